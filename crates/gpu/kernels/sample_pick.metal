// The last stage of sampling: cuts, draw, the end of the step.

enum { LISTED = 512, FINE = 256 }; // tokens that are ranked one against another; ranges of a finer look

FN ulong shuffle_wide(ulong x, uint from) { return wide(simd_shuffle(uint(x), from), simd_shuffle(uint(x >> 32), from)); }

// Sum over this lane and all before it.
FN ulong simd_sums_wide(ulong x, uint lane)
{
  for (uint d = 1; d < 32; d <<= 1) {
    const ulong before = shuffle_wide(x, (lane - d) & 31);
    if (lane >= d) x += before;
  }
  return x;
}

// Counts and weights of `size` ranges, a multiple of 32, in descending order of their tokens.
struct Ranges {
  const TG uint *counts, *low, *high;
  uint size;
};

// A range, and what lies before it: by the measure looked for (tokens or weights), and by weights.
struct Place {
  uint range;
  ulong before, weights;
};

// The range in which the tokens (or weights) from the first one on reach `amount`, which their sum does. Every simdgroup
// finds it for itself.
FN Place find_range(const THREAD Ranges &r, ulong amount, bool by_count, uint lane)
{
  const uint each = r.size / 32;
  ulong measure = 0, weights = 0;
  for (uint i = lane * each; i < lane * each + each; i++) {
    const ulong w = wide(r.low[i], r.high[i]);
    measure += by_count ? ulong(r.counts[i]) : w;
    weights += w;
  }
  const ulong to = simd_sums_wide(measure, lane), weights_to = simd_sums_wide(weights, lane);
  const uint at = min(simd_min(to >= amount ? lane : 31u), 31u);
  Place f;
  f.range = at * each;
  f.before = shuffle_wide(to - measure, at);
  f.weights = shuffle_wide(weights_to - weights, at);
  for (uint i = 1; i < each; i++) {
    const ulong w = wide(r.low[f.range], r.high[f.range]), m = by_count ? ulong(r.counts[f.range]) : w;
    if (f.before + m >= amount) break;
    f.before += m;
    f.weights += w;
    f.range += 1;
  }
  return f;
}

// Threadgroup memory of sample_pick, and what it looks into.
struct Pick {
  TG uint *sums;  // counts, low and high words of the weights of BINS bins
  TG uint *fine;  // likewise of FINE ranges of one bin
  TG uint *list;  // keys, ids, low and high words of the weights of LISTED tokens
  TG uint *words; // 0: blocks listed, 1: tokens listed, 2: token, 3 and 4: weights
  TG uint *blocks;
  const DEVICE uint *bins; // of the segment, from sample_bins
  float best, scale;
  uint vocab, block, block_count, lane, tid, threads;
};

// What is still looked at of a bin: tokens with these keys and ids, in the first `blocks` of the listed blocks.
struct Span {
  uint bin, blocks, key_low, key_high, id_low, id_high;
};

// Token j of a span's blocks, if it belongs to the span.
FN bool visit(const THREAD Pick &k, const THREAD Logits &l, const THREAD Span &s, uint j, THREAD uint &id, THREAD uint &key, THREAD uint &depth)
{
  id = k.blocks[j / k.block] * k.block + j % k.block;
  if (id >= k.vocab || id < s.id_low || id > s.id_high) return false;
  const float x = logit(l, id);
  depth = depth_of(x, k.best, k.scale);
  key = ordered(x);
  return depth != NONE && depth >> BIN_SHIFT == s.bin && key >= s.key_low && key <= s.key_high;
}

// The smallest shift by which `x` falls below FINE.
FN uint fine_shift(uint x)
{
  uint shift = 0;
  while (x >> shift >= FINE) shift++;
  return shift;
}

// Narrows a span that holds too many tokens: sums over FINE ranges of keys, or of ids where all keys are one.
// Returns how many tokens are left.
FN uint narrow(const THREAD Pick &k, const THREAD Logits &l, THREAD Span &s, THREAD Place &f, ulong amount, bool by_count)
{
  uint id, key, depth, low = NONE, high = 0;
  for (uint j = k.tid; j < s.blocks * k.block; j += k.threads) {
    if (!visit(k, l, s, j, id, key, depth)) continue;
    low = min(low, key);
    high = max(high, key);
  }
  low = simd_min(low);
  high = simd_max(high);
  for (uint i = k.tid; i < 3 * FINE; i += k.threads) k.fine[i] = 0;
  // A word of the list a simdgroup: nothing else is there yet.
  if (k.lane == 0) {
    k.list[k.tid / 32] = low;
    k.list[LISTED + k.tid / 32] = high;
  }
  tg_barrier();
  const uint simds = k.threads / 32;
  s.key_low = simd_min(k.lane < simds ? k.list[k.lane] : uint(NONE));
  s.key_high = simd_max(k.lane < simds ? k.list[LISTED + k.lane] : 0u);
  const bool by_key = s.key_low < s.key_high;
  const uint shift = fine_shift(by_key ? s.key_high - s.key_low : s.id_high - s.id_low);
  for (uint j = k.tid; j < s.blocks * k.block; j += k.threads) {
    if (!visit(k, l, s, j, id, key, depth)) continue;
    const uint range = (by_key ? s.key_high - key : id - s.id_low) >> shift;
    tg_add(k.fine + range, 1u);
    tg_add_wide(k.fine + FINE + range, k.fine + 2 * FINE + range, weight_of(depth));
  }
  tg_barrier();
  Ranges r;
  r.counts = k.fine;
  r.low = k.fine + FINE;
  r.high = k.fine + 2 * FINE;
  r.size = FINE;
  const Place g = find_range(r, amount - f.before, by_count, k.lane);
  f.before += g.before;
  f.weights += g.weights;
  const uint from = g.range << shift, width = (1u << shift) - 1;
  if (by_key) {
    s.key_high -= from;
    s.key_low = max(s.key_low, s.key_high < width ? 0u : s.key_high - width);
  } else {
    s.id_low += from;
    s.id_high = min(s.id_high, s.id_low + width);
  }
  const uint left = k.fine[g.range];
  tg_barrier(); // fine and the list may be used again
  return left;
}

// The last token of the shortest prefix of the descending order that holds `amount` tokens (or weights), and the weights up
// to it. Every thread has them.
FN ulong prefix_end(const THREAD Pick &k, const THREAD Logits &l, ulong amount, bool by_count, THREAD uint &token)
{
  Ranges r;
  r.counts = k.sums;
  r.low = k.sums + BINS;
  r.high = k.sums + 2 * BINS;
  r.size = BINS;
  Place f = find_range(r, amount, by_count, k.lane);
  Span s;
  s.bin = f.range;
  s.key_low = 0;
  s.key_high = NONE;
  s.id_low = 0;
  s.id_high = k.vocab - 1;
  if (k.tid < 2) k.words[k.tid] = 0;
  tg_barrier();
  for (uint b = k.tid; b < k.block_count; b += k.threads) {
    if (k.bins[ulong(b) * (3 * BINS) + s.bin] > 0) k.blocks[tg_add(k.words, 1u)] = b;
  }
  tg_barrier();
  s.blocks = k.words[0];
  uint left = k.sums[s.bin];
  while (left > LISTED) left = narrow(k, l, s, f, amount, by_count);
  for (uint j = k.tid; j < s.blocks * k.block; j += k.threads) {
    uint id, key, depth;
    if (!visit(k, l, s, j, id, key, depth)) continue;
    const uint at = tg_add(k.words + 1, 1u);
    const ulong w = weight_of(depth);
    k.list[at] = key;
    k.list[LISTED + at] = id;
    k.list[2 * LISTED + at] = uint(w);
    k.list[3 * LISTED + at] = uint(w >> 32);
  }
  tg_barrier();
  const uint listed = k.words[1];
  for (uint i = k.tid; i < listed; i += k.threads) {
    const uint key = k.list[i], id = k.list[LISTED + i];
    ulong before = f.before, weights = f.weights;
    for (uint j = 0; j < listed; j++) {
      if (k.list[j] < key || (k.list[j] == key && k.list[LISTED + j] >= id)) continue;
      const ulong w = wide(k.list[2 * LISTED + j], k.list[3 * LISTED + j]);
      before += by_count ? ulong(1) : w;
      weights += w;
    }
    const ulong w = wide(k.list[2 * LISTED + i], k.list[3 * LISTED + i]);
    if (before < amount && before + (by_count ? ulong(1) : w) >= amount) { // one token's place
      weights += w;
      k.words[2] = id;
      k.words[3] = uint(weights);
      k.words[4] = uint(weights >> 32);
    }
  }
  tg_barrier();
  token = k.words[2];
  return wide(k.words[3], k.words[4]);
}

// The upper half of a product of 128 bits.
FN ulong share(ulong a, ulong b)
{
  const ulong al = uint(a), ah = a >> 32, bl = uint(b), bh = b >> 32;
  const ulong middle = ah * bl + ((al * bl) >> 32), other = al * bh + uint(middle);
  return ah * bh + (middle >> 32) + (other >> 32);
}

// 64 bits of Philox4x32 with 10 rounds (Salmon et al., 2011): the first word of the result above the second.
FN ulong philox(uint k0, uint k1, uint c0, uint c1, uint c2, uint c3)
{
  for (uint i = 0; i < 10; i++) {
    const uint a = 0xd2511f53u, b = 0xcd9e8d57u, high = mul_hi(b, c2), low = b * c2, high2 = mul_hi(a, c0), low2 = a * c0;
    c0 = high ^ c1 ^ k0;
    c1 = low;
    c2 = high2 ^ c3 ^ k1;
    c3 = low2;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return wide(c1, c0);
}

// Cuts and draw.
FN uint draw(const THREAD Pick &k, const THREAD Logits &l, const DEVICE SamplerEntry *e, const DEVICE uint *partials, uint generated)
{
  for (uint i = k.tid; i < 3 * BINS; i += k.threads) k.sums[i] = 0;
  tg_barrier();
  // Three threads a bin.
  for (uint i = k.tid; i < 3 * BINS; i += k.threads) {
    uint count = 0;
    ulong w = 0;
    for (uint b = i / BINS; b < k.block_count; b += 3) {
      const DEVICE uint *from = k.bins + ulong(b) * (3 * BINS) + i % BINS;
      count += from[0];
      w += wide(from[BINS], from[2 * BINS]);
    }
    if (count > 0) {
      tg_add(k.sums + i % BINS, count);
      tg_add_wide(k.sums + BINS + i % BINS, k.sums + 2 * BINS + i % BINS, w);
    }
  }
  tg_barrier();
  ulong floor = 0, total = 0, tokens = 0;
  for (uint b = k.lane; b < k.block_count; b += 32) floor += wide(partials[b * PARTIAL + P_FLOOR], partials[b * PARTIAL + P_FLOOR + 1]);
  for (uint i = k.lane; i < BINS; i += 32) {
    tokens += k.sums[i];
    total += wide(k.sums[BINS + i], k.sums[2 * BINS + i]);
  }
  floor = shuffle_wide(simd_sums_wide(floor, k.lane), 31);
  tokens = shuffle_wide(simd_sums_wide(tokens, k.lane), 31);
  total = shuffle_wide(simd_sums_wide(total, k.lane), 31);
  // Each cut keeps a prefix of one order, so that the weights kept so far say all about those before. A loop, so that
  // prefix_end stands in the code once: top-k, top-p, min-p and the draw.
  uint token = 0;
#pragma unroll 1
  for (uint cut = 0; cut < 3; cut++) {
    ulong amount = e->top_k;
    if (cut == 0 && (e->top_k == 0 || amount >= tokens)) continue;
    if (cut == 1) {
      if (!e->cut_top_p) continue;
      amount = share(total, wide(e->top_p_low, e->top_p_high));
      amount = amount > 0 ? amount : 1;
    }
    if (cut == 2) {
      if (floor < total) total = floor;
      amount = share(total, philox(e->seed_low, e->choice, generated, 0, e->seed_high, 0)) + 1;
    }
    total = prefix_end(k, l, amount, cut == 0, token);
  }
  return token;
}

// A threadgroup a segment: the token, and the end of the step.
KERNEL(sample_pick, 768, IN(0, float, logits), IN(1, SamplerEntry, entries), IN(2, SegmentEntry, segments), OUT(3, uint, counts), IN(4, uint, masks), IN(5, BiasEntry, biases), IN(6, uint, partials), IN(7, uint, bins), OUT(8, SlotHeader, headers), OUT(9, ResultEntry, results), ARGS(10, SampleArgs, p))
{
  SHARED(uint, sums, 3 * BINS);
  SHARED(uint, fine, 3 * FINE);
  SHARED(uint, list, 4 * LISTED);
  SHARED(uint, words, 5);
  SHARED(uint, blocks, 64);
  inputs_ready();
  const uint segment = k_group.x, slot = segments[segment].slot;
  const DEVICE SamplerEntry *e = entries + segment;
  const DEVICE uint *partial = partials + ulong(segment) * p.blocks * PARTIAL;
  DEVICE SlotHeader *header = headers + slot;
  Pick k;
  k.sums = sums;
  k.fine = fine;
  k.list = list;
  k.words = words;
  k.blocks = blocks;
  k.bins = bins + ulong(segment) * p.blocks * (3 * BINS);
  k.scale = e->scale;
  k.vocab = p.vocab;
  k.block = p.block;
  k.block_count = p.blocks;
  k.lane = k_lane;
  k.tid = k_thread.x;
  k.threads = p.pick_threads;
  uint token = 0;
  bool chosen = false;
  if (e->row != NONE) { // what the conditions ask for is the same for the whole threadgroup
    bool nan;
    combine_blocks(partial, p.blocks, k_lane, k.best, token, nan);
    chosen = !nan && k.best != negative_infinity();
    if (!without_draw(e, k.best, nan)) {
      const Logits l = logits_of(logits, counts, masks, biases, e, slot, p.vocab, p.zero);
      token = draw(k, l, e, partial, header->generated);
    }
  }
  if (k_thread.x == 0) {
    results[segment].token = token;
    results[segment].status = chosen ? 0 : 1;
    if (e->advance) {
      header->position += segments[segment].rows;
      header->parity ^= 1;
    }
    if (chosen) {
      header->last_token = token;
      header->generated += 1;
      counts[ulong(slot) * p.vocab + token] += 1;
    }
  }
}
