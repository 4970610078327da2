// Target: Apple Metal, MSL 3.1 or later (bfloat).
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
#ifdef K_TENSOR
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#endif
using namespace metal;
#define K_METAL 1
#define DEVICE   device
#define TG       threadgroup
#define CONSTANT constant
#define THREAD   thread
#define FN       static inline
#define IN(i, T, name)   device const T *name [[buffer(i)]]
#define OUT(i, T, name)  device T *name [[buffer(i)]]
#define ARGS(i, T, name) constant T &name [[buffer(i)]]
#define SHARED(T, name, n) alignas(16) threadgroup T name[n] // load4 and store4 need it
#define K_IDS uint3 k_group [[threadgroup_position_in_grid]], uint3 k_thread [[thread_position_in_threadgroup]], \
    uint3 k_groups [[threadgroups_per_grid]], uint k_lane [[thread_index_in_simdgroup]], uint k_simd [[simdgroup_index_in_threadgroup]]
#define KERNEL(name, maxthreads, ...) [[kernel, max_total_threads_per_threadgroup(maxthreads)]] void name(__VA_ARGS__, K_IDS)
typedef bfloat bf16;
FN float f32(bf16 x) { return float(x); }
FN bf16 to_bf16(float x) { return bf16(x); }
FN float as_f(uint x) { return as_type<float>(x); }
FN uint as_u(float x) { return as_type<uint>(x); }
FN uint mul_hi(uint a, uint b) { return mulhi(a, b); }
FN uint4 load4(device const uint *p) { return *(device const uint4 *)p; }
FN float4 load4(device const float *p) { return *(device const float4 *)p; }
FN float4 load4(threadgroup const float *p) { return *(threadgroup const float4 *)p; }
FN uint2 load2(device const uint *p) { return *(device const uint2 *)p; }
FN void store4(device float *p, float a, float b, float c, float d) { *(device float4 *)p = float4(a, b, c, d); }
FN uint4 load4(threadgroup const uint *p) { return *(threadgroup const uint4 *)p; }
FN void store4(device uint *p, uint a, uint b, uint c, uint d) { *(device uint4 *)p = uint4(a, b, c, d); }
FN void store4(threadgroup float *p, float a, float b, float c, float d) { *(threadgroup float4 *)p = float4(a, b, c, d); }
FN void store4(threadgroup uint *p, uint a, uint b, uint c, uint d) { *(threadgroup uint4 *)p = uint4(a, b, c, d); }
FN void store2(device uint *p, uint a, uint b) { *(device uint2 *)p = uint2(a, b); }
FN uint pack2(float lo, float hi) { return as_type<uint>(bfloat2(bfloat(lo), bfloat(hi))); }
// See platform_cuda.h: there a number of few digits is not converted.
FN float code_number(uint x) { return float(x); }
#define CODE_UP 1.0f
#define CODE_DOWN 1.0f
FN float quotient(float a, float b) { return a / b; }
FN float inverse_sqrt(float x) { return rsqrt(x); }
FN uint tg_add(threadgroup uint *p, uint x) { return atomic_fetch_add_explicit((threadgroup atomic_uint *)p, x, memory_order_relaxed); }
FN uint simd_exclusive_sum(uint x) { return simd_prefix_exclusive_sum(x); }
FN void inputs_ready() {}
FN void next_may_start() {}
FN uint load_ahead(device const uint *p) { return *p; }
template <class T> FN void prefetch(device const T *) {}
#define tg_barrier() threadgroup_barrier(mem_flags::mem_threadgroup)
#define simd_fence() simdgroup_barrier(mem_flags::mem_threadgroup)
typedef simdgroup_float8x8 mat8f;
typedef simdgroup_matrix<bfloat, 8, 8> mat8b;
FN mat8f mat8f_fill(float v) { return make_filled_simdgroup_matrix<float, 8, 8>(v); }
FN void simdgroup_load_transposed(thread mat8b &m, threadgroup const bfloat *p, uint stride) { simdgroup_load(m, p, stride, ulong2(0), true); }
