// Target: clang's C++-for-OpenCL front end, as a judge of address spaces. Nothing is generated.
#define K_CHECK 1
#define DEVICE   __global
#define TG       __local
#define CONSTANT const __constant
#define THREAD   __private
#define FN       static inline
enum class bf16 : ushort {};                       // a scalar: readable from any address space, no hidden conversion
float f32(bf16 x);
bf16 to_bf16(float x);
float as_f(uint x);
uint as_u(float x);
uint4 load4(const DEVICE uint *p);
float4 load4(const DEVICE float *p);
float4 load4(const TG float *p);
uint2 load2(const DEVICE uint *p);
void store4(DEVICE float *p, float a, float b, float c, float d);
uint4 load4(const TG uint *p);
void store4(DEVICE uint *p, uint a, uint b, uint c, uint d);
void store4(TG uint *p, uint a, uint b, uint c, uint d);
void store4(TG float *p, float a, float b, float c, float d);
void store2(DEVICE uint *p, uint a, uint b);
uint pack2(float lo, float hi);
float code_number(uint x);
#define CODE_UP 1.0f
#define CODE_DOWN 1.0f
float quotient(float a, float b);
float inverse_sqrt(float x);
uint tg_add(TG uint *p, uint x);
#define IN(i, T, name)   const __global T *name
#define OUT(i, T, name)  __global T *name
#define ARGS(i, T, name) __constant T &name
#define SHARED(T, name, n) __local T (&name)[n] = *(__local T(*)[n])16
#define KERNEL(name, maxthreads, ...) void name(__VA_ARGS__, uint3 k_group, uint3 k_thread, uint3 k_groups, uint k_lane, uint k_simd)
void inputs_ready();
void next_may_start();
uint load_ahead(const DEVICE uint *p);
template <class T> void prefetch(const DEVICE T *);
void tg_barrier();
void simd_fence();
float simd_sum(float);
uint simd_sum(uint);
float simd_max(float);
uint simd_max(uint);
uint simd_min(uint);
bool simd_any(bool);
uint simd_exclusive_sum(uint);
float simd_shuffle(float, uint);
uint simd_shuffle(uint, uint);
float simd_shuffle_xor(float, uint);
uint simd_shuffle_xor(uint, uint);
template <class T> struct simdgroup_matrix8 { T e[2]; };
typedef simdgroup_matrix8<float> mat8f;
typedef simdgroup_matrix8<bf16> mat8b;
mat8f mat8f_fill(float);
template <class T> void simdgroup_load(THREAD simdgroup_matrix8<T> &, const DEVICE T *, uint);
template <class T> void simdgroup_load(THREAD simdgroup_matrix8<T> &, const TG T *, uint);
template <class T> void simdgroup_store(const THREAD simdgroup_matrix8<T> &, DEVICE T *, uint);
template <class T> void simdgroup_store(const THREAD simdgroup_matrix8<T> &, TG T *, uint);
template <class A, class B> void simdgroup_multiply_accumulate(THREAD mat8f &, const THREAD simdgroup_matrix8<A> &, const THREAD simdgroup_matrix8<B> &, const THREAD mat8f &);
template <class T> void simdgroup_load_transposed(THREAD simdgroup_matrix8<T> &, const TG T *, uint);
