import torch
OPS = {
 "lop3": ('"lop3.b32 %0, %0, %1, %2, 0x96;"', 1), "mul.wide": (None, 1), "mad.lo": ('"mad.lo.u32 %0, %0, %1, %2;"', 1),
 "prmt": ('"prmt.b32 %0, %0, %1, 0x2143;"', 1), "shl": ('"shf.l.wrap.b32 %0, %0, %1, 5;"', 1),
 "hset2": ('"set.geu.u32.f16x2 %0, %0, %1;"', 1), "hfma2.relu": ('"fma.rn.relu.bf16x2 %0, %0, %1, %2;"', 1),
 "f2fp": ('"cvt.rn.bf16x2.f32 %0, %0, %1;"', 1), "ex2": ('"ex2.approx.ftz.f32 %0, %0;"', 1),
 "sel": ('"selp.b32 %0, %1, %0, p;"', 1), "ffma": ('"fma.rn.f32 %0, %0, %1, %2;"', 1),
 "lop3+mul.wide": ("mix", 2), "lop3+ffma": ("mixf", 2), "mul.wide+ffma": ("mixw", 2), "lop3+ex2": ("mixe", 2),
}
F = {"f2fp","ex2","ffma"}
def source():
    s = ""
    for k, (name, (text, _)) in enumerate(OPS.items()):
        def one(j, what):
            if what == "w": return 'asm volatile("{.reg .b64 t; mul.wide.u32 t, %%0, %%2; mov.b64 {%%0, %%1}, t;}" : "+r"(x[%d]), "=r"(y[%d]) : "r"(b)); ' % (j, j)
            if what == "l": return 'asm volatile("lop3.b32 %%0, %%0, %%1, %%2, 0x96;" : "+r"(y2[%d]) : "r"(a), "r"(b)); ' % j
            if what == "f": return 'asm volatile("fma.rn.f32 %%0, %%0, %%1, %%2;" : "+f"(f[%d]) : "f"(fa), "f"(fb)); ' % j
            if what == "e": return 'asm volatile("ex2.approx.ftz.f32 %%0, %%0;" : "+f"(f[%d])); ' % j
        body = ""
        for j in range(8):
            if text is None: body += one(j, "w")
            elif text == "mix": body += one(j, "w") + one(j, "l")
            elif text == "mixf": body += one(j, "l") + one(j, "f")
            elif text == "mixw": body += one(j, "w") + one(j, "f")
            elif text == "mixe": body += one(j, "l") + one(j, "e")
            elif name == "sel": body += 'asm volatile("{.reg .pred p; setp.ne.b32 p, %%2, 0; selp.b32 %%0, %%1, %%0, p;}" : "+r"(x[%d]) : "r"(a), "r"(b)); ' % j
            elif name == "f2fp": body += 'asm volatile("cvt.rn.bf16x2.f32 %%0, %%1, %%2;" : "=r"(x[%d]) : "f"(f[%d]), "f"(fa)); ' % (j, j)
            elif name == "ex2": body += one(j, "e")
            elif name == "ffma": body += one(j, "f")
            else: body += 'asm volatile(%s : "+r"(x[%d]) : "r"(a), "r"(b)); ' % (text.replace("%", "%"), j)
        s += '''extern "C" __global__ void k%d(unsigned* out, long long* cycles, unsigned a, unsigned b, float fa, float fb) {
 unsigned x[8], y[8], y2[8]; float f[8];
 for (int j = 0; j < 8; ++j) { x[j] = threadIdx.x * 77 + j; y[j] = j; y2[j] = threadIdx.x ^ j; f[j] = threadIdx.x + j; }
 __syncthreads(); long long t = clock64();
 #pragma unroll 1
 for (int i = 0; i < 128; ++i) { %s %s }
 long long u = clock64(); __syncthreads();
 unsigned z = 0; for (int j = 0; j < 8; ++j) z += x[j] ^ y[j] ^ y2[j] ^ __float_as_int(f[j]);
 out[blockIdx.x * blockDim.x + threadIdx.x] = z; if (threadIdx.x == 0) cycles[blockIdx.x] = u - t; }
''' % (k, body, body)
    return s
if __name__ == "__main__":
    out = torch.empty(1 << 20, dtype=torch.int32, device="cuda"); cyc = torch.zeros(1024, dtype=torch.int64, device="cuda")
    print("cycles per warp instruction of a multiprocessor's quarter; 1, 2, 3, 4 warps there")
    src = source()
    for k, (name, (_, n)) in enumerate(OPS.items()):
        kern = torch.cuda._compile_kernel(src, "k%d" % k)
        r = []
        for w in (1, 2, 3, 4):
            for _ in range(2): kern(grid=(132, 1, 1), block=(128 * w, 1, 1), args=[out, cyc, 12345, 0x9E3779B9, 0.5, 1.25])
            torch.cuda.synchronize(); r.append(cyc[:132].float().median().item() / (128 * 16 * n * w))
        print("%-16s" % name, " ".join("%.2f" % x for x in r), flush=True)
