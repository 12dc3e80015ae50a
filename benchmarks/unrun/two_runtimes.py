import ctypes, torch, fusegrad, threading
import torch.nn.functional as F
def ok(name, c): print(("ok   " if c else "FAIL ") + name, flush=True)
x = torch.randn(64, 1000, device="cuda"); t = torch.randint(0, 1000, (64,), device="cuda")
def right(): return torch.allclose(fusegrad.cross_entropy(x, t), F.cross_entropy(x, t), rtol=1e-5)
ok("first call", right())
# an error left in PyTorch's runtime is not blamed on the core
rt = ctypes.CDLL("libcudart.so.13")
ok("error made in the shared runtime", rt.cudaSetDevice(99) != 0)
try: ok("core after it", right())
except Exception as e: ok(f"core after it: {e}"[:200], False)
print("pending in shared runtime:", rt.cudaGetLastError())
def in_thread():
    try: ok("fresh thread, no current context before", right())
    except Exception as e: ok(f"thread {e}"[:200], False)
th = threading.Thread(target=in_thread); th.start(); th.join()
def raw():
    try:
        # a thread whose first CUDA call is the core's
        ok("raw thread", bool(torch.isfinite(torch.ops.fusegrad.cross_entropy.default is not None and torch.tensor(1.0))))
    except Exception as e: ok(str(e)[:200], False)
s = torch.cuda.Stream()
with torch.cuda.stream(s):
    torch.cuda._sleep(50_000_000); y = x * 2
    l = fusegrad.cross_entropy(y, t)
s.synchronize(); ok("side stream is ordered", torch.allclose(l, F.cross_entropy(x * 2, t), rtol=1e-5))
g = torch.cuda.CUDAGraph(); xs = x.clone().requires_grad_()
for _ in range(3): torch.autograd.grad(fusegrad.cross_entropy(xs, t), xs)
with torch.cuda.graph(g): (gr,) = torch.autograd.grad(fusegrad.cross_entropy(xs, t), xs)
with torch.no_grad(): xs.copy_(x * 3)
g.replay(); xe = (x * 3).requires_grad_(); (ge,) = torch.autograd.grad(F.cross_entropy(xe, t), xe)
ok("graph", torch.allclose(gr, ge, rtol=1e-4, atol=1e-7))
# device-side error in PyTorch's own kernel is reported by somebody
print("pending at end:", rt.cudaGetLastError())
# backward thread whose first CUDA use is the core's
q = torch.randn(1, 2, 64, 64, device="cuda", requires_grad=True)
o = fusegrad.flex_attention(q, q, q); o.sum().backward(); ok("autograd thread", bool(q.grad.isfinite().all()))
print("done")
