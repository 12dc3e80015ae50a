import os, sys, time, statistics, threading, torch, math
from concurrent.futures import ThreadPoolExecutor
import fusegrad
from fusegrad import flex_attention, compile_flex
from torch.nn.attention.flex_attention import create_block_mask
mode = sys.argv[1]
def causal(b, h, q, kv): return q >= kv
torch.manual_seed(0)
P = 0.1
def warm(Ds, dets=(False,), extra=()):
    t = time.time()
    jobs = [(dict(head_size=D, dropout_p=p, deterministic=d, mask_mod=m)) for D in Ds for p in (0.0, P) for d in dets for m in (None, causal)]
    jobs += list(extra)
    with ThreadPoolExecutor(16) as ex: list(ex.map(lambda j: compile_flex(**j), jobs))
    print("compiled in %.0f s" % (time.time() - t), flush=True)
def mask_of(seed, p, *s): return torch.ops.fusegrad.flex_attention_dropout_mask(torch.tensor(seed, device="cuda"), p, list(s))
def check(D, S, K, cz, det, sm=None):
    q, = [torch.randn(1, 2, S, D, device="cuda", dtype=torch.bfloat16).requires_grad_()]
    k, v = [torch.randn(1, 2, K, D, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    bm = create_block_mask(causal, None, None, S, K, device="cuda") if cz else None
    torch.manual_seed(3)
    out = flex_attention(q, k, v, sm, block_mask=bm, dropout_p=P, deterministic=det)
    g = torch.randn_like(out); got = torch.autograd.grad(out, (q, k, v), g)
    torch.manual_seed(3); seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cuda").item())
    keep = mask_of(seed, P, 1, 2, S, K)
    Q, Kk, V = [t.detach().double().requires_grad_() for t in (q, k, v)]
    s = Q @ Kk.mT * D ** -0.5
    if sm is not None: s = 30 * torch.tanh(s / 30)
    if cz: s = s.masked_fill(~torch.ones(S, K, device="cuda").tril().bool(), -math.inf)
    p = s.softmax(-1)
    ref = (p * keep / (1 - P)) @ V
    want = torch.autograd.grad(ref, (Q, Kk, V), g.double())
    e = [((a.double() - b).norm() / b.norm()).item() for a, b in zip((out, *got), (ref, *want))]
    bad = max(e) > 0.02
    print("check D%d S%d K%d causal %d det %d mod %d: %s%s" % (D, S, K, cz, det, sm is not None, " ".join("%.4f" % x for x in e), "  WRONG" if bad else ""), flush=True)
def timed(f, n):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000); a.record()
    for _ in range(n): f()
    b.record(); torch.cuda.synchronize(); return a.elapsed_time(b) / n
def bench(label, B, H, S, D, cz, rounds=5, n=4, det=None, backward=True):
    q, k, v = [torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    bm = create_block_mask(causal, None, None, S, S, device="cuda") if cz else None
    g = torch.randn_like(q); r = {}
    for _ in range(rounds):
        for p in (0.0, P):
            out = flex_attention(q, k, v, block_mask=bm, dropout_p=p, deterministic=det)
            with torch.no_grad(): r.setdefault(("f", p), []).append(timed(lambda: flex_attention(q, k, v, block_mask=bm, dropout_p=p), n))
            if backward: r.setdefault(("b", p), []).append(timed(lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True), n))
    m = {x: statistics.median(y[1:]) for x, y in r.items()}
    print("%s D%d %s: forward %.3f %.3f %.3f%s" % (label, D, "causal" if cz else "full  ", m["f", 0.0], m["f", P], m["f", P] / m["f", 0.0], "   backward %.3f %.3f %.3f" % (m["b", 0.0], m["b", P], m["b", P] / m["b", 0.0]) if backward else ""), flush=True)
if __name__ == "__main__":
    softcap = lambda s, b, h, q, kv: 30 * torch.tanh(s / 30)
    if mode == "all":
        warm((64, 128, 256), extra=[dict(head_size=D, dropout_p=P, deterministic=True) for D in (64, 128, 256)] + [dict(head_size=D, dropout_p=P, score_mod=softcap) for D in (64, 128, 256)])
        m1 = torch.ops.fusegrad.flex_attention_dropout_mask(torch.tensor(5), 0.3, [1, 2, 300, 333]); m2 = mask_of(5, 0.3, 1, 2, 300, 333)
        print("mask equal to the CPU's:", torch.equal(m1, m2.cpu()), "share", 1 - mask_of(7, P, 1, 4, 8192, 8192).double().mean().item())
        for D in (64, 128, 256):
            check(D, 700, 900, False, None); check(D, 1100, 1100, True, None); check(D, 700, 900, False, True); check(D, 700, 900, False, None, softcap)
    elif mode == "groups3":
        warm((64,)); check(64, 700, 900, False, None); check(64, 1100, 1100, True, None)
    for D, H in ((64, 32), (128, 16), (256, 8)) if mode == "all" else ((64, 32),):
        for cz in (False, True): bench(mode, 2, H, 8192, D, cz, backward=mode != "groups3")
