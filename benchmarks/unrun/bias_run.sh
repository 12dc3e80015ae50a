#!/bin/bash
# takes: 120 s. Answers: gradients of the two new sums right (T5's buckets, sums over batches) and biases of pairs by boxes;
# our own times of all rows with learned biases (plain, frozen, learned); the kernels' times of four backwards.
export FUSEGRAD_CACHE_DIR=$OUT/../cache-bias
T=tests/python/attention/test_flex_gradients_cuda.py
timeout 25 python3 -m pytest -q $T -k "test_buckets_of_diagonals" 2>&1 | tail -4
timeout 30 python3 -m pytest -q $T -k "test_sums_over_batches and (own or meet) and portable" 2>&1 | tail -6
timeout 35 python3 -m pytest -q -x $T -k "test_biases_of_pairs and bfloat16 and (dense or offset) and portable" 2>&1 | grep -E "^E|passed|failed|FAILED" | head -12
cat > prof_bias.py <<'PY'
import sys, torch
sys.path.insert(0, "benchmarks")
import learned_biases as L
for i in [int(x) for x in sys.argv[1:]]:
    row = L.ROWS[i]
    bias = row.bias(row)
    x = [torch.randn(row.batch, row.heads, n, row.size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (row.queries, row.keys, row.keys)]
    f = L.ours(row, bias)
    g = torch.randn_like(x[0])
    for name in ("plain", "frozen", "fusegrad"):
        out = f[name](*x)
        want = [*x, *([t for t in bias.tables if t.requires_grad] if name == "fusegrad" else [])]
        torch.autograd.grad(out, want, g, retain_graph=True)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            for _ in range(3):
                f[name](*x)
                torch.autograd.grad(out, want, g, retain_graph=True)
            torch.cuda.synchronize()
        print(row.label, name, "; ".join(f"{e.key[-28:]} {e.device_time_total / 3e3:.3f}" for e in sorted(p.key_averages(), key=lambda e: -e.device_time_total)[:7]), flush=True)
PY
for i in 1 7 9 11; do timeout 20 python3 prof_bias.py $i 2>&1 | grep -v -i -E "warn|compiling" | tail -4; done
for r in 't5' 'triangle|evo' 'af3' 'swin' 'graph'; do
timeout 25 python3 benchmarks/learned_biases.py --rows "$r" --peers none --no-ordered --rounds 2 --reps 2 --output $OUT/${r%%|*} --commit wip 2>&1 | grep -E "error|plain|frozen|fusegrad |run|failed|Error" | grep -v -i compiling | tail -30
done
which ncu
