# Columns of tables, stored gradients of pairs, two families in one call: right, faster, clean under the sanitizers?
P=$PWD/..
# $P/main: a build of main, for its times beside
S=$SECONDS
ROWS=3,4,5,6,11,101,102
(timeout 40 python3 $R/bias_bench.py warm $ROWS > $OUT/warm.txt 2>&1; timeout 20 python3 $R/bias_san.py extra > $OUT/san0.txt 2>&1) &
timeout 36 python3 -m pytest -v -p no:cacheprovider -n 12 --dist worksteal --tb=short tests/python/attention/test_flex_gradients_cuda.py -k "(columns_of and portable and int32) or (every_pair and bfloat16 and 24 and portable) or (every_pair and float32 and 64 and hopper and (order or without)) or (two_families and portable)" > $OUT/tests.txt 2>&1
tail -1 $OUT/tests.txt; echo "passed $(grep -c PASSED $OUT/tests.txt)"; grep -E "FAILED" $OUT/tests.txt | grep -o "test_[a-z_]*\[.*" | sort | uniq | head -14; grep -E "^E  " $OUT/tests.txt | sort | uniq -c | sort -rn | head -4; echo "at $((SECONDS-S))"
wait; grep -h ^warm $OUT/warm.txt | cut -c1-250; tail -1 $OUT/san0.txt; echo "at $((SECONDS-S))"
timeout 12 python3 $R/bias_bench.py bench $ROWS 2 3 ordered > $OUT/bench.txt 2>&1; grep -i BENCH $OUT/bench.txt | cut -c1-330; echo "at $((SECONDS-S))"
timeout 10 python3 $R/bias_bench.py prof 11,3,6 > $OUT/prof.txt 2>&1; grep -i PROF $OUT/prof.txt | grep fusegrad | cut -c1-500 ; echo "at $((SECONDS-S))"
(timeout 20 compute-sanitizer --tool racecheck --kernel-name kns=flex python3 $R/bias_san.py extra > $OUT/race.txt 2>&1) &
timeout 20 compute-sanitizer --tool memcheck --kernel-name kns=flex python3 $R/bias_san.py extra > $OUT/mem.txt 2>&1; wait; tail -2 $OUT/mem.txt; tail -2 $OUT/race.txt; echo "at $((SECONDS-S))"
