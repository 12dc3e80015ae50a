# Takes about 90 s. Answers: whether the forward (and backward) of few queries is right (pytest of
# test_few_queries_cuda.py), and its time beside the limit of reading the cache once.
set -u

t() { timeout 75 python3 -m pytest -q -p no:cacheprovider tests/python/attention/test_few_queries_cuda.py -k "$2" --maxfail=6 --tb=short > /tmp/split_test_$1.txt 2>&1; }
t 1 "test_sizes and bfloat16 and (one or latents)" & t 2 "test_sizes and bfloat16 and (three or key)" & t 3 "test_sizes and bfloat16 and (odd or wide)" &
t 4 "test_sizes and bfloat16 and many" & t 5 "test_what and bfloat16 and query and mask" & t 6 "test_what and bfloat16 and query and not mask" &
t 7 "test_sizes and float32 and (one or odd or latents)" & t 8 "not test_sizes and not test_what and not memory" & t 9 "test_what and float32 and odd and (score_mod or dropout or small)" &
wait
for i in 1 2 3 4 5 6 7 8 9; do echo "== $i"; grep -E "^(E  |FAILED|ERROR|[0-9]+ (passed|failed))" /tmp/split_test_$i.txt | cut -c1-300 | tail -12; done | tee $OUT/tests.txt
cat /tmp/split_test_*.txt | tail -c 60000 > $OUT/tests_full.txt
cat > $OUT/bench.py <<'PY'
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
PY
timeout 60 python3 $OUT/bench.py 2>&1 | tail -40 | tee $OUT/bench.txt
