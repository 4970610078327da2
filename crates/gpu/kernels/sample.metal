// Choosing the next token, to the bit as lily_ops::sample does: weights are whole numbers, so that sums may be taken in
// any order. Stages: sample_scan (largest logit of each block of the vocabulary), sample_bins (weights summed by
// depth below it, unless every segment takes the largest), sample_pick (cuts, draw, end of the step).
// Bytes: the logits twice (once if greedy) and what sample_pick looks into again.

enum { BINS = 320, BIN_SHIFT = 22 }; // a bin is an eighth of a power of two: 39 * 8 of them, and room
enum { PARTIAL = 5 };                // words of a block's partial results:
// largest logit, its id, whether one is NaN, weights above min-p's floor (low, high).
enum { P_MAX = 0, P_ID = 1, P_NAN = 2, P_FLOOR = 3 };
enum { NONE = 0xffffffffu };

FN float negative_infinity() { return as_f(0xff800000u); }
FN bool is_nan(float x) { return (as_u(x) & 0x7fffffffu) > 0x7f800000u; }
// No compiler can know that `zero` is 0, and so none can fuse a product with the sum behind it.
FN float rounded(float x, uint zero) { return as_f(as_u(x) | zero); }
FN ulong wide(uint low, uint high) { return ulong(high) << 32 | low; }

// A row of logits and all that changes it before a token is chosen.
struct Logits {
  const DEVICE float *x;
  const DEVICE uint *counts, *mask; // of the slot; a bit a token
  const DEVICE BiasEntry *biases;   // ascending by id
  uint bias_count, penalties, masked, zero;
  float repetition, presence, frequency;
};

FN Logits logits_of(const DEVICE float *x, const DEVICE uint *counts, const DEVICE uint *masks, const DEVICE BiasEntry *biases, const DEVICE SamplerEntry *e, uint slot, uint vocab, uint zero)
{
  Logits l;
  l.x = x + ulong(e->row) * vocab;
  l.counts = counts + ulong(slot) * vocab;
  l.masked = e->mask != NONE;
  l.mask = masks + (l.masked ? ulong(e->mask) * ((vocab + 31) / 32) : 0);
  l.biases = biases + e->first_bias;
  l.bias_count = e->biases;
  l.penalties = e->penalties;
  l.zero = zero;
  l.repetition = e->repetition;
  l.presence = e->presence;
  l.frequency = e->frequency;
  return l;
}

// The logit of a token after bias, penalties and mask.
FN float logit(const THREAD Logits &l, uint id)
{
  float x = l.x[id];
  if (l.bias_count > 0) {
    uint first = 0, last = l.bias_count;
    while (first < last) {
      const uint middle = (first + last) / 2;
      if (l.biases[middle].id < id) first = middle + 1; else last = middle;
    }
    if (first < l.bias_count && l.biases[first].id == id) x += l.biases[first].value;
  }
  if (l.penalties) {
    const uint count = l.counts[id];
    if (count > 0) {
      x = x > 0.0f ? x / l.repetition : rounded(x * l.repetition, l.zero);
      x -= l.presence + rounded(l.frequency * float(count), l.zero);
    }
  }
  if (l.masked && (l.mask[id / 32] >> (id % 32) & 1u) == 0) x = negative_infinity();
  return x;
}

// How far a logit lies below the largest, as an exponent of two with 25 digits after the point; NONE from 39 on.
FN uint depth_of(float x, float largest, float scale)
{
  const float z = (largest - x) * scale;
  return z < 39.0f ? uint(z * 33554432.0f) : NONE;
}

// 2^-depth in units of 2^-39: a polynomial in the part after the point, then a shift.
FN ulong weight_of(uint depth)
{
  const uint f = depth << 7;
  uint r = 472172u;
  r = 5486705u - mul_hi(f, r);
  r = 41155296u - mul_hi(f, r);
  r = 238337602u - mul_hi(f, r);
  r = 1031757278u - mul_hi(f, r);
  r = 2977044080u - mul_hi(f, r);
  return (ulong(0x80000000u - (mul_hi(f, r) >> 1)) << 8) >> (depth >> 25);
}

FN void tg_add_wide(TG uint *low, TG uint *high, ulong x)
{
  const uint l = uint(x), before = tg_add(low, l), h = uint(x >> 32) + (before + l < before ? 1u : 0u);
  if (h) tg_add(high, h);
}

// Of a threadgroup's pairs the one with the largest x, of equal ones the lowest id; every thread has it. -0 equals 0.
// xs and ids: a word a simdgroup.
FN void group_best(THREAD float &x, THREAD uint &id, TG float *xs, TG uint *ids, uint lane, uint simd, uint simds)
{
  const float m = simd_max(x);
  const uint i = simd_min(x == m ? id : uint(NONE));
  if (lane == 0) {
    xs[simd] = m;
    ids[simd] = i;
  }
  tg_barrier();
  const float y = lane < simds ? xs[lane] : negative_infinity();
  x = simd_max(y);
  id = simd_min(lane < simds && y == x ? ids[lane] : uint(NONE));
  tg_barrier(); // xs and ids may be used again
}

// Whether any of a threadgroup says so; every thread knows. words: one a simdgroup.
FN bool group_any(bool x, TG uint *words, uint lane, uint simd, uint simds)
{
  const bool any = simd_any(x);
  if (lane == 0) words[simd] = any ? 1 : 0;
  tg_barrier();
  return simd_any(lane < simds && words[lane] != 0);
}

// Grid [blocks, segments].
KERNEL(sample_scan, 256, IN(0, float, logits), IN(1, SamplerEntry, entries), IN(2, SegmentEntry, segments), IN(3, uint, counts), IN(4, uint, masks), IN(5, BiasEntry, biases), OUT(6, uint, partials), ARGS(7, SampleArgs, p))
{
  SHARED(float, xs, 8);
  SHARED(uint, ids, 8);
  inputs_ready();
  const DEVICE SamplerEntry *e = entries + k_group.y;
  if (e->row != NONE) { // the same for the whole threadgroup
    const Logits l = logits_of(logits, counts, masks, biases, e, segments[k_group.y].slot, p.vocab, p.zero);
    const uint first = k_group.x * p.block, end = min(first + p.block, p.vocab), simds = p.scan_threads / 32;
    DEVICE uint *out = partials + (ulong(k_group.y) * p.blocks + k_group.x) * PARTIAL;
    float best = negative_infinity();
    uint id = NONE;
    bool nan = false;
    for (uint i = first + k_thread.x; i < end; i += p.scan_threads) {
      const float x = logit(l, i);
      if (is_nan(x)) nan = true;
      if (x > best || id == NONE) { best = is_nan(x) ? best : x; id = i; }
    }
    group_best(best, id, xs, ids, k_lane, k_simd, simds);
    const bool bad = group_any(nan, ids, k_lane, k_simd, simds);
    if (k_thread.x == 0) {
      out[P_MAX] = as_u(best);
      out[P_ID] = id;
      out[P_NAN] = bad ? 1 : 0;
    }
  }
}

// What sample_scan found in all blocks: the largest logit, its id, and whether one is NaN.
FN void combine_blocks(const DEVICE uint *partials, uint blocks, uint lane, THREAD float &best, THREAD uint &id, THREAD bool &nan)
{
  float x = negative_infinity();
  uint i = NONE, bad = 0;
  for (uint b = lane; b < blocks; b += 32) {
    const DEVICE uint *at = partials + b * PARTIAL;
    const float y = as_f(at[P_MAX]);
    if (i == NONE || y > x) { x = y; i = at[P_ID]; }
    bad |= at[P_NAN];
  }
  best = simd_max(x);
  id = simd_min(x == best ? i : uint(NONE));
  nan = simd_any(bad != 0);
}

// Whether the largest logit is taken, or no token is.
FN bool without_draw(const DEVICE SamplerEntry *e, float best, bool nan)
{
  return e->row == NONE || e->greedy || nan || best == negative_infinity() || best == as_f(0x7f800000u);
}

// Grid [blocks, segments]: counts and sums of weights by depth.
KERNEL(sample_bins, 256, IN(0, float, logits), IN(1, SamplerEntry, entries), IN(2, SegmentEntry, segments), IN(3, uint, counts), IN(4, uint, masks), IN(5, BiasEntry, biases), OUT(6, uint, partials), OUT(7, uint, bins), ARGS(8, SampleArgs, p))
{
  SHARED(uint, sums, 3 * BINS + 2);
  inputs_ready();
  const DEVICE SamplerEntry *e = entries + k_group.y;
  DEVICE uint *partial = partials + ulong(k_group.y) * p.blocks * PARTIAL;
  float best = 0.0f;
  uint id = 0;
  bool nan = false;
  if (e->row != NONE) combine_blocks(partial, p.blocks, k_lane, best, id, nan);
  if (!without_draw(e, best, nan)) { // the same for the whole threadgroup
    const Logits l = logits_of(logits, counts, masks, biases, e, segments[k_group.y].slot, p.vocab, p.zero);
    const uint first = k_group.x * p.block, end = min(first + p.block, p.vocab);
    const ulong floor = wide(e->floor_low, e->floor_high);
    DEVICE uint *out = bins + (ulong(k_group.y) * p.blocks + k_group.x) * (3 * BINS);
    for (uint i = k_thread.x; i < 3 * BINS + 2; i += p.scan_threads) sums[i] = 0;
    tg_barrier();
    ulong above = 0;
    for (uint i = first + k_thread.x; i < end; i += p.scan_threads) {
      const uint depth = depth_of(logit(l, i), best, e->scale);
      if (depth != NONE) {
        const ulong w = weight_of(depth);
        const uint bin = depth >> BIN_SHIFT;
        tg_add(sums + bin, 1u);
        tg_add_wide(sums + BINS + bin, sums + 2 * BINS + bin, w);
        above += w >= floor ? w : 0;
      }
    }
    tg_add_wide(sums + 3 * BINS, sums + 3 * BINS + 1, above);
    tg_barrier();
    for (uint i = k_thread.x; i < 3 * BINS; i += p.scan_threads) out[i] = sums[i];
    if (k_thread.x < 2) partial[k_group.x * PARTIAL + P_FLOOR + k_thread.x] = sums[3 * BINS + k_thread.x];
  }
}

// The end of a step that chooses no token: a thread a segment.
KERNEL(finish_step, 32, IN(0, SegmentEntry, segments), OUT(1, SlotHeader, headers), ARGS(2, CountArgs, p))
{
  const uint i = k_group.x * 32 + k_thread.x;
  if (i < p.count) {
    DEVICE SlotHeader *header = headers + segments[i].slot;
    header->position += segments[i].rows;
    header->parity ^= 1;
  }
}
