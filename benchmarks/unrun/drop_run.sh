# Takes about 70 s (compiles some 30 kernels in 16 threads, 25 s; checks; times). Answers: whether attention dropout with
# bit-sliced numbers drawn behind the products is right, what it costs forward and backward at D 64, 128, 256, with
# three warpgroups at D 64, and the rates of the instructions it is made of.
set -u
D=$(dirname "$0"); [ -f "$D/bench.py" ] || D=/tmp/gpu-drop
timeout 50 python3 $D/bench.py all 2>&1 | tail -30
FUSEGRAD_X_GROUPS3=1 FUSEGRAD_CACHE_DIR=$(mktemp -d) timeout 20 python3 $D/bench.py groups3 2>&1 | tail -6
timeout 10 python3 $D/micro.py 2>&1 | tail -20
