# Split-KV on the merged main: its tests and sanitizers (28 s, together), then few-query times beside SDPA (8 s).
S=/usr/local/cuda/bin/compute-sanitizer
for i in 0 1 2; do timeout 28 $S --tool memcheck --kernel-name kns=flex python3 tests/python/support/sanitize_flex_attention.py --family split --part $i --parts 20 > $OUT/memcheck$i.txt 2>&1 & done
for i in 3 4 5; do timeout 28 $S --tool racecheck --kernel-name kns=flex python3 tests/python/support/sanitize_flex_attention.py --family split --part $i --parts 20 > $OUT/racecheck$i.txt 2>&1 & done
timeout 28 python3 -m pytest -q -p no:cacheprovider -n 8 --dist worksteal --tb=short tests/python/attention/test_few_queries_cuda.py > $OUT/tests.txt 2>&1 &
timeout 28 python3 $R/split_final.py warm > $OUT/warm.txt 2>&1 &
wait
tail -1 $OUT/tests.txt; grep -E "^(FAILED|ERROR)" $OUT/tests.txt | cut -c1-200 | head -12
for f in $OUT/memcheck* $OUT/racecheck*; do echo "$(basename $f): $(grep -hE 'calls of|ERROR SUMMARY|RACECHECK SUMMARY|^=+ (Invalid|Error|Warning)' $f | sort | uniq -c | head -3 | tr '\n' ';')"; done
timeout 12 python3 $R/split_final.py 2>&1 | tee $OUT/final.txt
