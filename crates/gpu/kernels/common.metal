// Shared by all kernels: weights in their slabs, activations, small functions.

FN float silu(float x) { return x / (1.0f + exp(-x)); }
FN float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
FN float bf16_low(uint x) { return as_f(x << 16); }          // of two neighbours in one word: the first
FN float bf16_high(uint x) { return as_f(x & 0xffff0000u); } // the second

// Offsets count 16 bytes, and a slab may pass 4 GiB.
FN const DEVICE uint *slab_words(const DEVICE uint *slab, uint unit) { return slab + ulong(unit) * 4; }
FN const DEVICE bf16 *slab_bf16(const DEVICE uint *slab, uint unit) { return (const DEVICE bf16 *)slab_words(slab, unit); }
FN const DEVICE float *slab_f32(const DEVICE uint *slab, uint unit) { return (const DEVICE float *)slab_words(slab, unit); }

struct FillArgs { uint words, value; };

// Sets words: the smallest kernel there is, by which a driver can be tried.
KERNEL(fill_words, 256, OUT(0, uint, out), ARGS(1, FillArgs, p))
{
  const uint i = k_group.x * 256 + k_thread.x;
  if (i < p.words) out[i] = p.value;
}
