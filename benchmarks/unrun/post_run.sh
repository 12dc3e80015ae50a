# seconds: 90 (hard limit 100)
# answers: (1) the baseline of benchmarks/token_log_prob.py with its support rows, fusegrad alone; (2) where the
# recomputing path's time goes, product by product, and which block widths and strides would be better; (3) whether
# products of a fixed number of rows give each row the same bits at any place, and what such tiles cost.
set -u
timeout 38 python3 benchmarks/token_log_prob.py --rounds 2 --reps 3 --no-accuracy --no-launch --only '^fusegrad' --output $OUT > $OUT/bench.txt 2>&1
tail -40 $OUT/bench.txt
cat > /tmp/exp.py <<'E'
import time, torch, sys, os
t00=time.time()
torch.manual_seed(0)
d="cuda"
N,H=8192,4096
def t(f,n=6):
    f();f()
    s=torch.cuda.Event(enable_timing=True);e=torch.cuda.Event(enable_timing=True)
    ts=[]
    for _ in range(n):
        s.record();f();e.record();e.synchronize();ts.append(s.elapsed_time(e))
    ts.sort();return ts[len(ts)//2]
x=torch.randn(N,H,device=d).bfloat16()
out=open(os.environ["OUT"]+"/exp.txt","w")
def p(*a):
    print(*a,file=out,flush=True)
for V in (128256,151936):
    w=(torch.randn(V,H,device=d)*0.02).bfloat16()
    z=torch.empty(N,V,device=d,dtype=torch.bfloat16); dw=torch.empty_like(w); dx=torch.empty_like(x)
    a=t(lambda:torch.mm(x,w.t(),out=z)); b=t(lambda:torch.mm(z,w,out=dx)); c=t(lambda:torch.mm(z.t(),x,out=dw))
    three=a+b+c
    p(f"V {V}: whole products logits {a:.2f} dx {b:.2f} dw {c:.2f} sum {three:.2f} four {(three+a)/three:.3f}")
    acc=torch.zeros(N,H,device=d)
    # forward chunks
    for r in (512,768,1024,2048):
        zb=torch.empty(r,V,device=d,dtype=torch.bfloat16)
        def f():
            for i in range(0,N,r):
                k=min(r,N-i); torch.mm(x[i:i+k],w.t(),out=zb[:k])
        p(f"  forward rows {r}: {t(f,3):.2f}")
        del zb
    for cw,pad in ((4096,0),(6144,0),(7168,0),(8192,0),(8192,64),(8064,0),(10240,0),(10240,64),(12288,64),(16384,64)):
        zb=torch.empty(N,cw+pad,device=d,dtype=torch.bfloat16)[:,:cw]; zb.normal_()
        def g(kind):
            def f():
                for i in range(0,V,cw):
                    k=min(cw,V-i); zz=zb[:,:k]
                    if kind==0: torch.mm(x,w[i:i+k].t(),out=zz)
                    elif kind==1: torch.ops.aten.addmm.dtype_out(acc,zz,w[i:i+k],torch.float32,out=acc)
                    elif kind==2: torch.mm(zz.t(),x,out=dw[i:i+k])
                    elif kind==3: torch.addmm(dx,zz,w[i:i+k],out=dx)
                    else: zz.mul_(0.5)
            return f
        r=[t(g(k),3) for k in range(5)]
        p(f"  columns {cw}+{pad}: logits {r[0]:.2f} dx f32 {r[1]:.2f} dw {r[2]:.2f} dx bf16 {r[3]:.2f} pass {r[4]:.2f} sum {r[0]+r[1]+r[2]:.2f}")
        del zb
    del z,dw,w
    torch.cuda.empty_cache()
p("seconds",time.time()-t00)
# fixed tiles
for V,H in ((128256,4096),(151936,2048),(32000,1024)):
    w=(torch.randn(V,H,device=d)*0.02).bfloat16(); x=torch.randn(4096,H,device=d).bfloat16()
    for dt in (torch.bfloat16,torch.float32):
        W,X=w.to(dt),x.to(dt)
        if dt==torch.float32 and V>100000: W=W[:32000]
        v=W.shape[0]
        for T in (128,256,512,1024):
            tile=X[:T].contiguous()
            z=tile@W.t(); bad=0; badx=0
            g=torch.softmax(z.float(),1).to(dt); dx=g@W
            for s in (1,17,T//2+3):
                bad+=int(((tile.roll(s,0)@W.t()).roll(-s,0)!=z).any(1).sum()); badx+=int(((g.roll(s,0)@W).roll(-s,0)!=dx).any(1).sum())
            # rows alone: the others are zero
            y=torch.zeros_like(tile); y[5]=tile[5]; alone=int(((y@W.t())[5]!=z[5]).sum())
            n=min(4096,X.shape[0])
            def tiles():
                for i in range(0,n,T): torch.mm(X[i:i+T],W.t(),out=z)
            def tilesx():
                for i in range(0,n,T): torch.mm(g,W,out=dx)
            zz=torch.empty(n,v,device=d,dtype=dt); xx=torch.empty(n,H,device=d,dtype=dt)
            whole=t(lambda:torch.mm(X[:n],W.t(),out=zz),3); wholex=t(lambda:torch.mm(zz,W,out=xx),3)
            p(f"V {v} H {H} {dt} tile {T}: rows that differ by place: logits {bad} dx {badx} alone {alone}; logits {t(tiles,3):.2f} of {whole:.2f}, dx {t(tilesx,3):.2f} of {wholex:.2f}")
            del zz,xx
p("seconds",time.time()-t00)
E
timeout 35 python3 /tmp/exp.py || echo exp failed; cat $OUT/exp.txt
cat > /tmp/prof.py <<'E'
import os, torch, fusegrad
from torch.profiler import profile, ProfilerActivity
d="cuda"
for V in (128256,151936):
    x=torch.randn(8192,4096,device=d).bfloat16().requires_grad_(); w=(torch.randn(V,4096,device=d)*0.02).bfloat16().requires_grad_()
    t=torch.randint(0,V,(8192,),device=d)
    def step():
        o=fusegrad.linear_log_prob(x,w,t,workspace_mib=265); torch.autograd.grad((o.log_prob+o.entropy/2).sum(),[x,w])
    for _ in range(3): step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        step(); torch.cuda.synchronize()
    def tm(f,n=5):
        f(); f(); ts=[]
        for _ in range(n):
            a=torch.cuda.Event(enable_timing=True); b=torch.cuda.Event(enable_timing=True); a.record(); f(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
        return sorted(ts)[n//2]
    for m in (233,265,297,393,521,1033):
        def fb():
            o=fusegrad.linear_log_prob(x,w,t,workspace_mib=m); torch.autograd.grad((o.log_prob+o.entropy/2).sum(),[x,w])
        def fw():
            with torch.no_grad(): fusegrad.linear_log_prob(x,w,t,workspace_mib=m)
        def fl():
            with torch.no_grad(): fusegrad.linear_log_prob(x,w,t,workspace_mib=m,return_entropy=False)
        print("V",V,"mib",m,"all %.2f forward %.2f without entropy %.2f"%(tm(fb),tm(fw),tm(fl)))
    open(os.environ["OUT"]+f"/prof{V}.txt","w").write(prof.key_averages().table(sort_by="cuda_time_total",row_limit=16,max_name_column_width=90))
E
timeout 24 python3 /tmp/prof.py
