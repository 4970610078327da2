// Shared by all kernels: weights in their slabs, activations, small functions.

FN float silu(float x) { return quotient(x, 1.0f + exp(-x)); }
FN float sigmoid(float x) { return quotient(1.0f, 1.0f + exp(-x)); }
FN float bf16_low(uint x) { return as_f(x << 16); }          // of two neighbours in one word: the first
FN float bf16_high(uint x) { return as_f(x & 0xffff0000u); } // the second

// Offsets count 16 bytes, and a slab may pass 4 GiB.
FN const DEVICE uint *slab_words(const DEVICE uint *slab, uint unit) { return slab + ulong(unit) * 4; }
FN const DEVICE bf16 *slab_bf16(const DEVICE uint *slab, uint unit) { return (const DEVICE bf16 *)slab_words(slab, unit); }
FN const DEVICE float *slab_f32(const DEVICE uint *slab, uint unit) { return (const DEVICE float *)slab_words(slab, unit); }

// A number that orders as the float does; -0 and 0 are one.
FN uint ordered(float x)
{
  const uint u = as_u(x == 0.0f ? 0.0f : x);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

// N values of each lane become N / 2, added to those of the lanes m apart; one value is added in place.
template <uint N> FN void fold_lanes(THREAD float *v, uint m, uint lane)
{
  const bool upper = (lane & m) != 0;
  if (N == 1) v[0] += simd_shuffle_xor(v[0], m);
#pragma unroll
  for (uint i = 0; i * 2 + 1 < N; i++) {
    const float keep = upper ? v[i + N / 2] : v[i], give = upper ? v[i] : v[i + N / 2];
    v[i] = keep + simd_shuffle_xor(give, m);
  }
}
#define FOLDED(N, times) (N >> times > 0u ? N >> times : 1u)

// Sums N values over the lanes, all at once: with each halving of the lanes the values are halved, too, until one is left: N - 1 + 5 - log2 N
// shuffles instead of 5 N. Lane l has the sum of value l / (32 / N). Every value is summed over lanes 16, 8, 4, 2, 1 apart.
template <uint N> FN float simd_sums(THREAD float *v, uint lane)
{
  fold_lanes<N>(v, 16, lane);
  fold_lanes<FOLDED(N, 1)>(v, 8, lane);
  fold_lanes<FOLDED(N, 2)>(v, 4, lane);
  fold_lanes<FOLDED(N, 3)>(v, 2, lane);
  fold_lanes<FOLDED(N, 4)>(v, 1, lane);
  return v[0];
}

struct FillArgs { uint words, value; };

// Sets words: the smallest kernel there is, by which a driver can be tried.
KERNEL(fill_words, 256, OUT(0, uint, out), ARGS(1, FillArgs, p))
{
  const uint i = k_group.x * 256 + k_thread.x;
  if (i < p.words) out[i] = p.value;
}
