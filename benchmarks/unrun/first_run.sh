python3 two_runtimes.py 2>&1 | tail -25
timeout 110 python3 benchmarks/block_mask.py --output $OUT --commit $(cat commit) > $OUT/block_mask.txt 2>&1; tail -60 $OUT/block_mask.txt
timeout 150 python3 -m pytest -q -p no:cacheprovider -n 14 --dist worksteal -k cuda tests/python/attention/test_create_block_mask.py tests/python/attention/test_flex_attention_cuda.py tests/python/attention/test_block_masks.py tests/python/score_mod tests/python/contract/test_cuda.py --ignore tests/python/score_mod/test_flex_random_cuda.py > $OUT/tests.txt 2>&1; tail -15 $OUT/tests.txt
