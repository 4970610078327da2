// Target: CUDA through NVRTC; no toolkit header is included. 32-lane warps play the simdgroups.
#define K_CUDA 1
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long long ulong;
#define DEVICE
#define TG
#define CONSTANT const
#define THREAD
#define FN static __device__ __forceinline__
#define IN(i, T, name)   const T *name // not __restrict__: such loads may move ahead of inputs_ready()
#define OUT(i, T, name)  T *name
#define ARGS(i, T, name) const __grid_constant__ T name
#define SHARED(T, name, n) __shared__ __align__(16) T name[n]
// More of it than a kernel's text may have: the driver sets it aside for the kernels of text::LARGE_MEMORY.
#define SHARED_LARGE(T, name, n) extern __shared__ __align__(1024) uint large_memory[]; T *const name = (T *)large_memory
#define SHARED_48K(T, name, n) __shared__ __align__(1024) T name[n] // Metal has 32 KiB; a swizzle counts from 1 KiB on
#define KERNEL(name, maxthreads, ...) extern "C" __global__ void __launch_bounds__(maxthreads) name(__VA_ARGS__)
#define k_group  (uint3{blockIdx.x, blockIdx.y, blockIdx.z})
#define k_groups (uint3{gridDim.x, gridDim.y, gridDim.z})
#define k_thread (uint3{threadIdx.x, threadIdx.y, threadIdx.z})
#define k_lane   (threadIdx.x & 31u)
#define k_simd   (threadIdx.x >> 5)
struct bf16 { ushort u; };
FN float as_f(uint x) { return __uint_as_float(x); }
FN uint as_u(float x) { return __float_as_uint(x); }
FN float f32(bf16 x) { return as_f(uint(x.u) << 16); }
FN bf16 to_bf16(float x) { bf16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.u) : "f"(x)); return r; }
FN uint mul_hi(uint a, uint b) { return __umulhi(a, b); }
FN uint4 load4(const uint *p) { return *(const uint4 *)p; }
FN float4 load4(const float *p) { return *(const float4 *)p; }
FN uint2 load2(const uint *p) { return *(const uint2 *)p; }
FN void store4(float *p, float a, float b, float c, float d) { *(float4 *)p = make_float4(a, b, c, d); }
FN void store4(uint *p, uint a, uint b, uint c, uint d) { *(uint4 *)p = make_uint4(a, b, c, d); }
FN void store2(uint *p, uint a, uint b) { *(uint2 *)p = make_uint2(a, b); }
FN uint pack2(float lo, float hi) { uint r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
FN uint tg_add(uint *p, uint x) { return atomicAdd(p, x); } // what was there before
// A number of few digits below 2^23 times a unit, exactly: its bits are a number already. What it is multiplied with comes with
// CODE_UP (and may be 2^26 at most), and what comes of that is taken with CODE_DOWN (and is exact from 2^-78 on).
FN float code_number(uint x) { return __uint_as_float(x); } // times 2^-149
#define CODE_UP 2535301200456458802993406410752.0f          // 2^101
#define CODE_DOWN 281474976710656.0f                        // 2^48
// Two codes below 256, at the words' halves, as operands of mma16: the bits of a bf16 as they are, times 2^-133. What they are multiplied
// with comes with CODE_PAIR_UP (and may be 2^26 at most); then all is CODE_PAIR_DOWN too small, until CODE_PAIR_BACK.
FN uint code_pair(uint v) { return v; }
// Both of a pair times a power of two.
FN uint scale_pair(uint x, float s)
{
  uint r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(pack2(s, s)), "r"(0x80008000u));
  return r;
}
// Both of a pair: a · b + c, rounded once.
FN uint fma_pair(uint a, uint b, uint c) { uint r; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
// a / b rounded right, as elsewhere, for numbers from 2^-100 to 2^100 and a of 0, without the branch for others: a larger b counts as 2^100 (the
// quotient is then small, not right), and an infinite a gives no number. Callers divide by 1 and more, or by sums of softmax.
FN float quotient(float a, float b)
{
  b = b > 1267650600228229401496703205376.0f ? 1267650600228229401496703205376.0f : b;
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = fmaf(fmaf(-b, r, 1.0f), r, r);
  float q = a * r;
  q = fmaf(fmaf(-b, q, a), r, q);
  return fmaf(fmaf(-b, q, a), r, q);
}
FN float inverse_sqrt(float x) { return 1.0f / sqrtf(x); }
FN uint byte_permute(uint a, uint b, uint which) { return __byte_perm(a, b, which); } // of eight bytes those that the four digits name
#define CODE_PAIR_UP 2535301200456458802993406410752.0f // 2^101
#define CODE_PAIR_DOWN 2.3283064365386963e-10f           // 2^-32
#define CODE_PAIR_BACK 4294967296.0f
FN float fma(float a, float b, float c) { return fmaf(a, b, c); }
#if __CUDA_ARCH__ >= 900
// The stage before this one has ended, then the next one may begin to be: see docs/kernels.md, "Early starts".
FN void inputs_ready() { asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory"); }
// In front of inputs_ready(): the next stage may begin before the inputs of this one are there.
FN void next_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
FN void inputs_ready() {}
FN void next_may_start() {}
#endif
// What a stage before the last one wrote, read ahead of inputs_ready(): past the first-level cache, where an older line may lie.
FN uint load_ahead(const uint *p) { uint x; asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(x) : "l"(p)); return x; }
FN uint4 load_ahead4(const uint *p) { uint4 x; asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p)); return x; }
FN uint shared_address(const void *p) { return uint(__cvta_generic_to_shared(p)); }
// 16 bytes from device to threadgroup memory, or zeros: there once the thread has come through copy_wait().
FN void copy_async(void *to, const void *from, bool there)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(to)), "l"(from), "r"(there ? 16u : 0u) : "memory");
}
// Copies until now, since the last time, are a group: all but the last one are there.
FN void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
FN void copy_wait_but_one() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
FN void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Four 8x8 matrices of 16-bit elements, whose rows lie where lanes 0 to 7, 8 to 15, … say: lane l has elements 2 (l % 4) and the next of row l / 4
// of each; transposed, of column l / 4.
FN void load_matrices(uint (&r)[4], const void *row)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
FN void load_matrices_transposed(uint (&r)[4], const void *row)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
FN void prefetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#define tg_barrier() __syncthreads()
#define simd_fence() __syncwarp()
FN float simd_shuffle_xor(float v, uint m) { return __shfl_xor_sync(0xffffffffu, v, m); }
FN uint simd_shuffle_xor(uint v, uint m) { return __shfl_xor_sync(0xffffffffu, v, m); }
FN float simd_shuffle(float v, uint l) { return __shfl_sync(0xffffffffu, v, l); }
FN uint simd_shuffle(uint v, uint l) { return __shfl_sync(0xffffffffu, v, l); }
FN float simd_sum(float v) { for (uint m = 16; m; m >>= 1) v += simd_shuffle_xor(v, m); return v; }
FN uint simd_sum(uint v) { return __reduce_add_sync(0xffffffffu, v); }
FN float simd_max(float v) { for (uint m = 16; m; m >>= 1) v = fmaxf(v, simd_shuffle_xor(v, m)); return v; }
FN uint simd_max(uint v) { return __reduce_max_sync(0xffffffffu, v); }
FN uint simd_min(uint v) { return __reduce_min_sync(0xffffffffu, v); }
FN bool simd_any(bool v) { return __any_sync(0xffffffffu, v); }
FN uint simd_exclusive_sum(uint v) {
  uint s = v;
  for (uint d = 1; d < 32; d <<= 1) { const uint o = __shfl_up_sync(0xffffffffu, s, d); if (k_lane >= d) s += o; }
  return s - v;
}
// d[16][8] += a[16][16] b[16][8], pairs of bf16: see mma.sync m16n8k16.
FN void mma16(float (&d)[4], const uint (&a)[4], uint b0, uint b1)
{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// wgmma m64nNk16, an accumulator of N / 8 tiles of mma16: d[64][N] += a[64][16] b[N][16]ᵀ by four simdgroups, of which each has 16 rows; K
// elements 16 j to 16 j + 15 of b's lines of 128 bytes, swizzled. Registers and b must stay as they are until it was waited for.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL // not of the chips after it
#define K_WGMMA 1
#define WGMMA_4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
FN void wgmma_sync(float (&d)[4][4], const uint (&a)[4], ulong b)
{
  asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
               : WGMMA_4(d, 0), WGMMA_4(d, 1), WGMMA_4(d, 2), WGMMA_4(d, 3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
FN void wgmma_sync(float (&d)[16][4], const uint (&a)[4], ulong b)
{
  asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
               : WGMMA_4(d, 0), WGMMA_4(d, 1), WGMMA_4(d, 2), WGMMA_4(d, 3), WGMMA_4(d, 4), WGMMA_4(d, 5), WGMMA_4(d, 6), WGMMA_4(d, 7), WGMMA_4(d, 8), WGMMA_4(d, 9), WGMMA_4(d, 10), WGMMA_4(d, 11), WGMMA_4(d, 12), WGMMA_4(d, 13), WGMMA_4(d, 14), WGMMA_4(d, 15) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <uint N> FN void wgmma(float (&d)[N / 8][4], const uint (&a)[4], const uint *b, uint j, uint)
{
  wgmma_sync(d, a, ulong((shared_address(b) & 0x3ffffu) >> 4) + j * 2 | ulong(1) << 16 | ulong(64) << 32 | ulong(1) << 62);
}
template <uint N> FN void wgmma_done(float (&d)[N / 8][4])
{
#pragma unroll
  for (uint i = 0; i < N / 8; i++) asm volatile("" : WGMMA_4(d, i) :: "memory");
}
FN void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
#define wgmma_wait(n) asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(n) : "memory")
FN void matrix_memory_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif
