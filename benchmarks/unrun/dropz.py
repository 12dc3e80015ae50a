import os, sys, time, statistics, torch
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from concurrent.futures import ThreadPoolExecutor
from fusegrad import flex_attention, compile_flex
from torch.nn.attention.flex_attention import create_block_mask
from dropy import child, timed, CASES
P = 0.1
def causal(b, h, q, kv): return q >= kv
def bench(D, p, cz, rounds=4, n=3, S=8192, B=2):
    torch.manual_seed(0)
    q, k, v = [torch.randn(B, CASES[D], S, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    bm = create_block_mask(causal, None, None, S, S, device="cuda") if cz else None
    g = torch.randn_like(q); f, b = [], []
    for _ in range(rounds):
        with torch.no_grad(): f.append(timed(lambda: flex_attention(q, k, v, block_mask=bm, dropout_p=p), n))
        out = flex_attention(q, k, v, block_mask=bm, dropout_p=p)
        b.append(timed(lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True), n))
    return "%d%s f %.3f b %.3f" % (D, "c" if cz else "", statistics.median(f[1:]), statistics.median(b[1:]))
def compiles(ps, czs):
    jobs = [dict(head_size=D, dropout_p=p, mask_mod=causal if cz else None, architecture="90a") for D in CASES for p in ps for cz in czs]
    with ThreadPoolExecutor(8) as ex: list(ex.map(lambda j: compile_flex(**j), jobs))
if __name__ == "__main__":
    variants = [("", (0.0, P), (False, True)), ("-DX_GEN=1", (P,), (False,)), ("-DX_GEN=2", (P,), (False,))]
    t = time.time()
    for pid in [child(f, lambda: compiles(ps, czs)) for f, ps, czs in variants]: os.waitpid(pid, 0)
    print("compiled in %.0f s" % (time.time() - t), flush=True)
    for f, ps, czs in variants:
        for p in ps: os.waitpid(child(f, lambda: print("%-10s p %.1f | %s" % (f, p, " | ".join(bench(D, p, cz) for D in CASES for cz in czs)), flush=True)), 0)
    print("%.0f s" % (time.time() - t), flush=True)
