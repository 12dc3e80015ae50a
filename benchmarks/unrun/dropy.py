import os, sys, time, statistics, torch
from concurrent.futures import ThreadPoolExecutor
from fusegrad import flex_attention, compile_flex
P = 0.1
CASES = {64: 32, 128: 16, 256: 8}
def timed(f, n):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(800_000); a.record()
    for _ in range(n): f()
    b.record(); torch.cuda.synchronize(); return a.elapsed_time(b) / n
def bench(D, p, back, rounds=4, n=3, S=8192, B=2):
    torch.manual_seed(0)
    q, k, v = [torch.randn(B, CASES[D], S, D, device="cuda", dtype=torch.bfloat16, requires_grad=back) for _ in range(3)]
    g = torch.randn_like(q); f, b = [], []
    for _ in range(rounds):
        with torch.no_grad(): f.append(timed(lambda: flex_attention(q, k, v, dropout_p=p), n))
        if back:
            out = flex_attention(q, k, v, dropout_p=p)
            b.append(timed(lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True), n))
    return "%d f %.3f" % (D, statistics.median(f[1:])) + (" b %.3f" % statistics.median(b[1:]) if back else "")
def child(flags, work):
    pid = os.fork()
    if pid == 0:
        try:
            if flags: os.environ["FUSEGRAD_JIT_FLAGS"] = flags
            work()
        except BaseException as e: print(flags, repr(e)[:300], flush=True)
        sys.stdout.flush(); os._exit(0)
    return pid
def compiles(ps, back):
    jobs = [dict(head_size=D, dropout_p=p, requires_grad=back, architecture="90a") for D in CASES for p in ps]
    with ThreadPoolExecutor(8) as ex: list(ex.map(lambda j: compile_flex(**j), jobs))
def prof():
    D = 128
    q, k, v = [torch.randn(1, 16, 4096, D, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    for p in (0.0, P):
        out = flex_attention(q, k, v, dropout_p=p); torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    torch.cuda.synchronize()
if __name__ == "__main__":
    if sys.argv[1] == "prof": prof(); sys.exit()
    variants = [("", (0.0, P), True), ("-DX_POS=1", (P,), False), ("-DX_NOMUL", (P,), True), ("-DX_ROLL", (P,), False), ("-DX_NODRAW", (P,), True),
                ("-DX_NODRAW -DX_PADU", (P,), False), ("-DX_NODRAW -DX_PADL", (P,), False)]
    t = time.time()
    for pid in [child(f, lambda: compiles(ps, back)) for f, ps, back in variants]: os.waitpid(pid, 0)
    print("compiled in %.0f s" % (time.time() - t), flush=True)
    while os.path.exists("/tmp/profiling"): time.sleep(0.1)
    for f, ps, back in variants:
        for p in ps: os.waitpid(child(f, lambda: print("%-22s p %.1f | %s" % (f, p, " | ".join(bench(D, p, back) for D in CASES)), flush=True)), 0)
    print("%.0f s" % (time.time() - t), flush=True)
