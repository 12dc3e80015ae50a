"""Few queries and usual tiles with split keys: microseconds of a call in a CUDA graph over caches in turns."""
import statistics, sys
import torch
from fusegrad import flex_attention
WARM = len(sys.argv) > 1
torch.manual_seed(0)
def us(calls, reps=9):
    for c in calls: c()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    more = max(1, 6 // len(calls))
    with torch.cuda.graph(g):
        for _ in range(more):
            for c in calls: c()
    n = len(calls) * more
    times = []
    for _ in range(reps):
        torch.cuda._sleep(200_000)
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        times.append(a.elapsed_time(b) / n)
    return 1e3 * statistics.median(times)
few = [(1,8192,1,32,8,128), (4,8192,1,32,8,128), (16,8192,1,32,8,128), (17,8192,1,32,8,128), (64,8192,1,32,8,128), (64,4096,1,32,8,128), (1,131072,1,32,8,128), (1,8192,1,32,32,128), (16,8192,1,32,8,64), (8,8192,4,32,8,128), (8,8192,8,32,8,128), (8,8192,1,8,8,256), (1,2048,1,32,8,128), (8,65536,32,8,8,64)]
usual = [(1,65536,64,8,8,64), (1,65536,256,8,8,64), (1,16384,512,8,8,128), (1,4096,1024,4,4,128), (1,2048,512,8,8,128), (1,2048,64,8,8,64), (1,1024,256,16,16,128), (1,1024,1024,8,8,64), (1,1024,1024,8,8,128), (1,512,512,16,16,64), (1,512,512,16,16,128)]
s = torch.nn.functional.scaled_dot_product_attention
with torch.no_grad():
    for B, N, M, H, G, D in few + usual:
        size = 2 * B * G * N * D * 2
        copies = 1 if WARM else max(1, min(8, int(480e6 / size) + 1))
        q = torch.randn(B, H, M, D, device='cuda', dtype=torch.bfloat16)
        kv = [tuple(torch.randn(B, G, N, D, device='cuda', dtype=torch.bfloat16) for _ in 'kv') for _ in range(copies)]
        if WARM:
            flex_attention(q, *kv[0], enable_gqa=True)
            continue
        ours = us([lambda k=k, v=v: flex_attention(q, k, v, enable_gqa=True) for k, v in kv])
        theirs = us([lambda k=k, v=v: s(q, k, v, enable_gqa=H != G) for k, v in kv])
        once = size / 4.3e6
        print(f'{B}, {N}, {M}, {H}/{G}, {D} | {once:.1f} | {ours:.1f} | {ours / once:.2f} | {theirs:.1f}', flush=True)
        del q, kv
