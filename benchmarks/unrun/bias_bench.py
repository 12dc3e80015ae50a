# warm ROWS | bench ROWS [rounds reps] | prof ROWS ; ROWS: comma-separated numbers of CUDA_ROWS
import os, sys, time, torch, warnings
warnings.filterwarnings("ignore")
from concurrent.futures import ThreadPoolExecutor
import fusegrad, learned_biases as L
mode, rows = sys.argv[1], [int(x) for x in sys.argv[2].split(",")]
T0 = time.time()
EXTRA = [L.Row("pairs64", 256, 4, 256, 256, 64, bias=L.pairs("hqk", L.BF16)), L.Row("evo64", 16, 4, 768, 768, 64, bias=L.pairs("bhqk", L.BF16)),
         L.Row("long64", 4, 16, 4096, 4096, 64, bias=L.pairs("hqk", L.FP32)), L.Row("long128", 2, 16, 4096, 4096, 128, bias=L.pairs("hqk", L.BF16)),
         L.Row("evo128", 16, 4, 768, 768, 128, bias=L.pairs("bhqk", L.BF16)), L.Row("tri48", 256, 4, 256, 256, 48, bias=L.pairs("hqk", L.BF16))]
if os.environ.get("FAMILY"): fusegrad._C.flex.force_family(os.environ["FAMILY"])
ROWS = {**dict(enumerate(L.CUDA_ROWS)), **{100 + i: r for i, r in enumerate(EXTRA)}}
torch.set_default_device("cuda")
def setup(i):
    row = ROWS[i]
    bias = None if row.bias is None else row.bias(row)
    mk = lambda h, n, d: torch.randn(row.batch, h, n, d, dtype=torch.bfloat16, requires_grad=True)
    f = row.heads // row.group
    x = [mk(row.heads, row.queries, row.size), mk(f, row.keys, row.size), mk(f, row.keys, row.columns)]
    return row, bias, x
def warm(i):
    try:
        with torch.device("cuda"):
            row, bias, x = setup(i)
            for name, f in L.ours(row, bias).items():
                with torch.no_grad(): f(*x)
                if row.backward:
                    o = f(*x)
                    torch.autograd.grad(o, [*x, *([t for t in bias.tables if t.requires_grad] if bias else [])], o.detach(), allow_unused=True)
    except Exception as e:
        print("warm", i, type(e).__name__, str(e)[:300], flush=True)
if mode == "warm":
    # distinct programs only: smaller batches would change plans, so real rows, a few at a time
    with ThreadPoolExecutor(12) as p: list(p.map(warm, rows))
    torch.cuda.synchronize()
    print("warm", fusegrad.__file__, round(time.time() - T0, 1), "s")
elif mode == "bench":
    rounds, reps = (int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 3 else (2, 3)
    o = L.Options("cuda", [], "ordered" in sys.argv, rounds, reps)
    for i in rows:
        row = ROWS[i]
        try:
            r = L.measured(row, o)
        except Exception as e:
            print("BENCH", row.label, type(e).__name__, str(e)[:200], flush=True); continue
        m = r["ms"]; g = lambda n: m.get(n, float("nan"))
        if row.bias is None:
            print(f"BENCH {row.label}: f {g('plain forward'):.3f} b {g('plain backward'):.3f} traffic {r['traffic']['forward']:.3f}/{r['traffic']['backward']:.3f}", flush=True)
        else:
            print(f"BENCH {row.label}: f plain {g('plain forward'):.3f} ours {g('fusegrad forward'):.3f} ({g('fusegrad forward')/g('plain forward'):.2f}); b plain {g('plain backward'):.3f} frozen {g('frozen backward'):.3f} ours {g('fusegrad backward'):.3f} ({g('fusegrad backward')/g('plain backward'):.2f}) ordered {g('ordered backward'):.3f}; traffic {r['traffic']['forward']:.3f}/{r['traffic']['backward']:.3f} err {r.get('error', 0):.1e} {str(r['failures'])[:150] if r['failures'] else ''}", flush=True)
        torch.cuda.empty_cache()
    print("bench", round(time.time() - T0, 1), "s")
else:
    for i in rows:
        row, bias, x = setup(i)
        fs = L.ours(row, bias)
        for name in ("plain", "fusegrad") if bias else ("plain",):
            f = fs[name]; out = f(*x)
            want = [*x, *([t for t in bias.tables if t.requires_grad] if bias and name == "fusegrad" else [])]
            g = torch.randn_like(out)
            torch.autograd.grad(out, want, g, retain_graph=True); torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
                for _ in range(3):
                    f(*x); torch.autograd.grad(out, want, g, retain_graph=True)
                torch.cuda.synchronize()
            print("PROF", row.label, name, "; ".join(f"{e.key[:44]} {e.device_time_total / 3e3:.3f}" for e in sorted(p.key_averages(), key=lambda e: -e.device_time_total)[:8]), flush=True)
    print("prof", round(time.time() - T0, 1), "s")
