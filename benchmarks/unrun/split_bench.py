import statistics, sys, torch
from fusegrad import flex_attention
import os
torch.manual_seed(0)
def gpu_ms(calls, reps=9):
    """Median over reps of the mean of a row of calls, the host hidden."""
    for c in calls: c()
    torch.cuda.synchronize()
    times=[]
    for _ in range(reps):
        torch.cuda._sleep(2_000_000)
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        a.record()
        for c in calls: c()
        b.record(); torch.cuda.synchronize()
        times.append(a.elapsed_time(b)/len(calls))
    return statistics.median(times)
def graph_ms(calls, reps=9):
    for c in calls: c()
    torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for c in calls: c()
    times=[]
    for _ in range(reps):
        torch.cuda._sleep(200_000)
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        times.append(a.elapsed_time(b)/len(calls))
    return statistics.median(times)
rows=[(1,8192,1,32,8,128),(4,8192,1,32,8,128),(16,8192,1,32,8,128),(17,8192,1,32,8,128),(64,8192,1,32,8,128),(64,4096,1,32,8,128),(1,131072,1,32,8,128),(1,8192,1,32,32,128),(16,8192,1,32,8,64),(8,8192,4,32,8,128),(8,8192,8,32,8,128),(8,8192,1,8,8,256),(1,2048,1,32,8,128),(8,65536,32,8,8,64),(1,65536,64,8,8,64),(1,65536,256,8,8,64),(1,16384,512,8,8,128)]
for B,N,M,H,G,D in rows:
    bytes_=2*B*G*N*D*2
    copies=max(1,min(6,int(240e6/bytes_)+1))   # beyond the L2 cache
    q=torch.randn(B,H,M,D,device='cuda',dtype=torch.bfloat16)
    kv=[(torch.randn(B,G,N,D,device='cuda',dtype=torch.bfloat16),torch.randn(B,G,N,D,device='cuda',dtype=torch.bfloat16)) for _ in range(copies)]
    bias=torch.randn(H,N,device='cuda')
    calls={'plain':[lambda k=k,v=v: flex_attention(q,k,v,enable_gqa=True) for k,v in kv],
           'bias[h,kv]':[lambda k=k,v=v: flex_attention(q,k,v,lambda s,b,h,i,j:s+bias[h,j],enable_gqa=True) for k,v in kv]}
    limit=bytes_/4.3e12*1e3
    out=[]
    with torch.no_grad():
        for n,c in calls.items():
            if n!='plain' and (N,M)!=(8192,1): continue
            t=gpu_ms(c); tg=graph_ms(c)
            out.append(f'{n} {t:.4f} graph {tg:.4f} ({tg/limit:.2f}x)')
        if M==1:
            k,v=kv[0]
            s=torch.nn.functional.scaled_dot_product_attention
            t=graph_ms([lambda k=k,v=v: s(q,k,v,enable_gqa=True) for k,v in kv])
            out.append(f'sdpa {t:.4f}')
        t=graph_ms([lambda k=k: k.sum(dtype=torch.float32) for k,v in kv])
        out.append(f'(sum of k {t:.4f} = {bytes_/2/t/1e9:.2f} TB/s)')
    print(f'B{B} N{N} M{M} H{H}/{G} D{D} limit {limit:.4f}:', '; '.join(out), flush=True)
    del kv, q
