import sys, torch
sys.path.insert(0, "tests/python/support")
import sanitize_flex_attention as s
from fusegrad import _C
_C.flex.force_family("portable")
W, S = s.WINDOWS, s.SHARED
for case in (("E", 32, False, W), ("F", 32, False, W), ("none", 32, False, W), ("E", 32, False, S), ("F", 32, True, S), ("buckets", 32, False, S)):
    s.call(torch.bfloat16, case[0], "none", case[1], case[2], case[3])
if "extra" in sys.argv:
    t = torch.randn(600, 4, device="cuda", requires_grad=True); i = torch.randint(600, (20, 49, 50), device="cuda", dtype=torch.int32)[:, :, 1:]
    q, k, v = (torch.randn(20, 4, 49, 24, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    from fusegrad import flex_attention
    flex_attention(q, k, v, lambda s, b, h, q, kv: s + t[i[b, q, kv], h]).sum().backward()
    e = torch.randn(20, 4, 49, 49, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    flex_attention(q, k, v, lambda s, b, h, q, kv: s + e[b, h, q, kv]).sum().backward()
    torch.cuda.synchronize()
print("done")
