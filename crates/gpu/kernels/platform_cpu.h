// Target: the host CPU, through emu.h. C++17; g++ or clang++.
#include "emu.h"
#include <cmath>
#include <cstring>
#include <utility>
#define K_CPU 1
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
struct uint2 { uint x, y; };
struct uint3 { uint x, y, z; };
struct uint4 { uint x, y, z, w; };
struct float4 { float x, y, z, w; };
using std::fma; using std::sqrt; using std::exp; using std::exp2; using std::fabs; using std::fmax;
inline uint min(uint a, uint b) { return a < b ? a : b; }
inline uint max(uint a, uint b) { return a > b ? a : b; }
inline uint mul_hi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
inline uint as_u(float x) { uint u; memcpy(&u, &x, 4); return u; }
inline float as_f(uint u) { float x; memcpy(&x, &u, 4); return x; }
struct bf16 { ushort u; };
inline float f32(bf16 x) { return as_f(uint(x.u) << 16); }
inline bf16 to_bf16(float x) { const uint b = as_u(x); return {x != x ? ushort(b >> 16 | 64) : ushort((b + 0x7fff + (b >> 16 & 1)) >> 16)}; }
#define DEVICE
#define TG
#define CONSTANT const
#define THREAD
#define FN static inline
// Several elements are one access: the trace build counts it at the place of the call.
#ifdef EMU_TRACE
#define EMU_ONE __attribute__((noinline, no_sanitize("coverage")))
#define EMU_TOUCH(p, bytes, stored) emu::touch(p, bytes, stored, __builtin_return_address(0));
#else
#define EMU_ONE
#define EMU_TOUCH(p, bytes, stored)
#endif
EMU_ONE inline uint4 load4(const uint *p) { EMU_TOUCH(p, 16, false) return {p[0], p[1], p[2], p[3]}; }
EMU_ONE inline float4 load4(const float *p) { EMU_TOUCH(p, 16, false) return {p[0], p[1], p[2], p[3]}; }
EMU_ONE inline uint2 load2(const uint *p) { EMU_TOUCH(p, 8, false) return {p[0], p[1]}; }
EMU_ONE inline void store4(float *p, float a, float b, float c, float d) { EMU_TOUCH(p, 16, true) p[0] = a; p[1] = b; p[2] = c; p[3] = d; }
EMU_ONE inline void store4(uint *p, uint a, uint b, uint c, uint d) { EMU_TOUCH(p, 16, true) p[0] = a; p[1] = b; p[2] = c; p[3] = d; }
EMU_ONE inline void store2(uint *p, uint a, uint b) { EMU_TOUCH(p, 8, true) p[0] = a; p[1] = b; }
inline uint pack2(float lo, float hi) { return uint(to_bf16(lo).u) | uint(to_bf16(hi).u) << 16; }
// See platform_cuda.h: there a number of few digits is not converted.
inline float code_number(uint x) { return float(x); }
#define CODE_UP 1.0f
#define CODE_DOWN 1.0f
inline uint code_pair(uint v) { return pack2(float(v & 0xffffu), float(v >> 16)); }
inline uint scale_pair(uint x, float s) { return pack2(as_f(x << 16) * s, as_f(x & 0xffff0000u) * s); }
// Rounded once: towards odd in f32, which has digits to spare, then to bf16.
inline bf16 fma_once(float a, float b, float c)
{
  const double exact = double(a) * double(b) + double(c);
  const float near = float(exact);
  const uint u = as_u(near);
  return to_bf16(near == 0.0f || double(near) == exact || (u & 1) != 0 ? near : as_f((near > exact) == (near > 0.0f) ? u - 1 : u + 1));
}
inline uint fma_pair(uint a, uint b, uint c)
{
  return uint(fma_once(as_f(a << 16), as_f(b << 16), as_f(c << 16)).u) | uint(fma_once(as_f(a & 0xffff0000u), as_f(b & 0xffff0000u), as_f(c & 0xffff0000u)).u) << 16;
}
inline float quotient(float a, float b) { return a / b; }
inline float inverse_sqrt(float x) { return 1.0f / sqrt(x); }
inline uint byte_permute(uint a, uint b, uint which)
{
  const ulong both = ulong(b) << 32 | a;
  uint r = 0;
  for (uint i = 0; i < 4; i++) r |= uint(both >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}
#define CODE_PAIR_UP 1.0f
#define CODE_PAIR_DOWN 1.0f
#define CODE_PAIR_BACK 1.0f
inline uint tg_add(uint *p, uint x) { return __atomic_fetch_add(p, x, __ATOMIC_RELAXED); }
#define IN(i, T, name)   const T *name
#define OUT(i, T, name)  T *name
#define ARGS(i, T, name) const T &name
#define SHARED(T, name, n) static const char name##_site = 0; T (&name)[n] = *(T(*)[n])emu::shared(&name##_site, sizeof(T[n]), 16)
// Of kernels that Metal does not have.
#define SHARED_48K(T, name, n) static const char name##_site = 0; T (&name)[n] = *(T(*)[n])emu::shared(&name##_site, sizeof(T[n]), 16, 49152)
// Of kernels that only some GPUs run.
#define SHARED_LARGE(T, name, n) static const char name##_site = 0; T (&name)[n] = *(T(*)[n])emu::shared(&name##_site, sizeof(T[n]), 16, 232448)
template <class T> struct emu_arg; // void *const *slots -> argument
template <class T> struct emu_arg<T *> { static T *get(void *s) { return (T *)s; } static constexpr int is_args = 0; };
template <class T> struct emu_arg<const T &> { static const T &get(void *s) { return *(const T *)s; } static constexpr int is_args = sizeof(T); };
template <class... A, size_t... I> inline void emu_call(void (*f)(uint3, uint3, uint3, uint, uint, A...), void *const *s, const emu::Ids &d, std::index_sequence<I...>) {
  f({d.group.x, d.group.y, d.group.z}, {d.thread.x, d.thread.y, d.thread.z}, {d.groups.x, d.groups.y, d.groups.z}, d.lane, d.simd, emu_arg<A>::get(s[I])...);
}
template <class... A> inline void emu_bind(void (*f)(uint3, uint3, uint3, uint, uint, A...), void *const *s, const emu::Ids &d) { emu_call(f, s, d, std::index_sequence_for<A...>{}); }
template <class... A> constexpr uint emu_count(void (*)(uint3, uint3, uint3, uint, uint, A...)) { return sizeof...(A); }
template <class... A> constexpr uint emu_args_bytes(void (*)(uint3, uint3, uint3, uint, uint, A...)) { return (0 + ... + emu_arg<A>::is_args); }
// With EMU_ONLY defined, only kernels with a define EMU_KEEP_name (of `0,`) are compiled: for checks that need a few of many.
#define EMU_SECOND(a, b, ...) b
#define EMU_DEFINED(x) EMU_SECOND(x 1, 0, 0)
#ifdef EMU_ONLY
#define EMU_KEPT(name) EMU_DEFINED(EMU_KEEP_##name)
#else
#define EMU_KEPT(name) 1
#endif
#define EMU_ENTRY_0(name, maxthreads)
#define EMU_ENTRY_1(name, maxthreads) \
  static void name##_body(void *s, const emu::Ids &d) { emu_bind(name, (void *const *)s, d); } \
  static emu::Entry name##_entry(#name, name##_body, maxthreads, emu_count(name), emu_args_bytes(name));
#define EMU_JOIN2(a, b) a##b
#define EMU_JOIN(a, b) EMU_JOIN2(a, b)
#define KERNEL(name, maxthreads, ...) \
  static void name(uint3, uint3, uint3, uint, uint, __VA_ARGS__); \
  EMU_JOIN(EMU_ENTRY_, EMU_KEPT(name))(name, maxthreads) \
  static void name(uint3 k_group, uint3 k_thread, uint3 k_groups, uint k_lane, uint k_simd, __VA_ARGS__)
FN void inputs_ready() { emu::ready(); }
FN void next_may_start() {}
FN uint load_ahead(const uint *p) { return *p; }
FN uint4 load_ahead4(const uint *p) { return load4(p); }
template <class T> FN void prefetch(const T *) {}
// Under way until it is waited for: what lies there meanwhile is no number.
FN void copy_async(void *to, const void *from, bool there) { store4((uint *)to, ~0u, ~0u, ~0u, ~0u); emu::copy_async(to, there ? from : nullptr); }
FN void copy_commit() { emu::copy_commit(); }
FN void copy_wait_for(uint left) {
  void *to;
  for (const void *from; emu::copied(to, from, left);) {
    const uint4 v = from ? load4((const uint *)from) : uint4{0, 0, 0, 0};
    store4((uint *)to, v.x, v.y, v.z, v.w);
  }
}
FN void copy_wait() { copy_wait_for(0); }
FN void copy_wait_but_one() { copy_wait_for(1); }
#define tg_barrier() emu::barrier(__FILE__, __LINE__, false)
#define simd_fence() emu::barrier(__FILE__, __LINE__, true)
inline float emu_shuffle(float v, uint l, const char *f, int ln) { return as_f(emu::shuffle(as_u(v), l & 31, f, ln)); }
inline uint emu_shuffle(uint v, uint l, const char *f, int ln) { return emu::shuffle(v, l & 31, f, ln); }
#define simd_sum(v) emu::sum(v, __FILE__, __LINE__)
#define simd_max(v) emu::max(v, __FILE__, __LINE__)
#define simd_min(v) emu::min(v, __FILE__, __LINE__)
#define simd_any(v) (emu::max(uint((v) ? 1 : 0), __FILE__, __LINE__) != 0)
#define simd_exclusive_sum(v) emu::exclusive_sum(v, __FILE__, __LINE__)
#define simd_shuffle(v, l) emu_shuffle(v, l, __FILE__, __LINE__)
#define simd_shuffle_xor(v, m) emu_shuffle(v, emu::lane() ^ (m), __FILE__, __LINE__)
template <class T> struct emu_mat8 { T e[2]; };
typedef emu_mat8<float> mat8f;
typedef emu_mat8<bf16> mat8b;
FN mat8f mat8f_fill(float v) { return {{v, v}}; }
FN uint sm_row(uint l) { return l >> 2; }
FN uint sm_col(uint l) { return (l & 3) * 2; }
FN float sm_f(float x) { return x; }
FN float sm_f(bf16 x) { return f32(x); }
template <class T> FN void simdgroup_load(emu_mat8<T> &m, const T *p, uint stride) { uint l = emu::lane(), o = sm_row(l) * stride + sm_col(l); m.e[0] = p[o]; m.e[1] = p[o + 1]; }
template <class T> FN void simdgroup_store(const emu_mat8<T> &m, T *p, uint stride) { uint l = emu::lane(), o = sm_row(l) * stride + sm_col(l); p[o] = m.e[0]; p[o + 1] = m.e[1]; }
template <class T> FN void simdgroup_load_transposed(emu_mat8<T> &m, const T *p, uint stride) { uint l = emu::lane(), o = sm_col(l) * stride + sm_row(l); m.e[0] = p[o]; m.e[1] = p[o + stride]; }
template <class A, class B> FN void emu_mma(mat8f &d, const emu_mat8<A> &a, const emu_mat8<B> &b, const mat8f &c, const char *f, int ln) {
  const float x[6] = {sm_f(a.e[0]), sm_f(a.e[1]), sm_f(b.e[0]), sm_f(b.e[1]), c.e[0], c.e[1]};
  emu::mma8(x, d.e, f, ln);
}
#define mma16(d, a, b0, b1) emu_mma16(d, a, b0, b1, __FILE__, __LINE__)
FN void emu_mma16(float (&d)[4], const uint (&a)[4], uint b0, uint b1, const char *f, int ln) {
  const float x[6] = {as_f(a[0]), as_f(a[1]), as_f(a[2]), as_f(a[3]), as_f(b0), as_f(b1)};
  emu::multiply16(x, d, f, ln);
}
// Four 8x8 matrices: see platform_cuda.h. All rows lie in the threadgroup's memory: a lane is told how far from its own.
#define load_matrices(r, row) emu_load_matrices(r, row, __FILE__, __LINE__)
#define load_matrices_transposed(r, row) emu_load_matrices_transposed(r, row, __FILE__, __LINE__)
FN const ushort *emu_row(const void *own, uint lane, const char *f, int ln) {
  const uint at = uint(ulong(own));
  return (const ushort *)((const char *)own + int(emu_shuffle(at, lane, f, ln) - at));
}
FN void emu_load_matrices(uint (&r)[4], const void *own, const char *f, int ln) {
  const uint l = emu::lane();
  for (uint i = 0; i < 4; i++) {
    const ushort *row = emu_row(own, i * 8 + l / 4, f, ln) + l % 4 * 2;
    r[i] = uint(row[0]) | uint(row[1]) << 16;
  }
}
FN void emu_load_matrices_transposed(uint (&r)[4], const void *own, const char *f, int ln) {
  const uint l = emu::lane();
  for (uint i = 0; i < 4; i++) {
    const ushort *low = emu_row(own, i * 8 + l % 4 * 2, f, ln) + l / 4, *high = emu_row(own, i * 8 + l % 4 * 2 + 1, f, ln) + l / 4;
    r[i] = uint(*low) | uint(*high) << 16;
  }
}
// A simdgroup's 16 rows of a wgmma (platform_cuda.h): at once, but what it reads must be the same when it is waited for.
#define K_WGMMA 1
FN uint emu_held(const uint *at) { emu::hold(at, *at); return *at; }
template <uint N> FN void wgmma(float (&d)[N / 8][4], const uint (&a)[4], const uint *b, uint j, uint lane) {
  for (uint i = 0; i < 4; i++) emu_held(a + i);
  for (uint n = 0; n < N / 8; n++) {
    const uint row = n * 8 + lane / 4, *line = b + row * 32 + lane % 4;
    mma16(d[n], a, emu_held(line + ((2 * j) ^ (row % 8)) * 4), emu_held(line + ((2 * j + 1) ^ (row % 8)) * 4));
  }
}
FN void wgmma_begin() {}
FN void wgmma_commit() { emu::hold_commit(); }
FN void wgmma_wait(uint left) {
  uint was = 0;
  for (const uint *at; emu::held(at, was, left);) if (*at != was) emu::changed("what matrix units read was changed");
}
template <uint N> FN void wgmma_done(float (&)[N / 8][4]) {
  uint was = 0;
  const uint *at;
  if (emu::held(at, was, 0)) emu::changed("a result was taken");
}
FN void matrix_memory_fence() {}
#define simdgroup_multiply_accumulate(d, a, b, c) emu_mma(d, a, b, c, __FILE__, __LINE__)
