// Attention of a decode step: a slot's cache is cut into splits, a threadgroup has one split of one KV head for ATTENTION_PACK
// (or 1) of the query heads that share it, a second kernel combines the splits.
//
// Its four simdgroups take tiles of 8 tokens in turn, each with a softmax of its own that goes on from tile to tile. A lane
// owns HEAD_DIM / 32 neighbouring elements of q, K, V and the output: it reads 16 bytes of a row where a head has 256 elements,
// and 16 such reads are in flight. The order of all sums is that of a lane's elements, then lanes 16, 8, 4, 2, 1 apart, then
// tiles ascending, then simdgroups, then splits: neither packing nor the way of reading changes a bit.
// Expected bytes at 16 heads on 2 KV heads of 256: K and V of a token twice (2 · 2048), partial sums 1032 for a head and split.

#define ATTENTION_SIMDS 4u
#define ATTENTION_TILE 8u
#define LANE_ELEMENTS (HEAD_DIM / 32u)
#define LANE_WORDS ((LANE_ELEMENTS + 1u) / 2u)
#define ATTENTION_LEAST (-1e30f) // below every score, and finite: differences stay numbers
#if HEADS_PER_KV >= 4u && HEAD_DIM <= 256u
#define ATTENTION_PACK 4u
#elif HEADS_PER_KV >= 2u && HEAD_DIM <= 512u
#define ATTENTION_PACK 2u
#else
#define ATTENTION_PACK 1u
#endif

// Tokens of a split of a slot with `len` tokens. From fixed_from tokens on it is a page; below, as many whole blocks of 64 as make
// at most most_splits splits. It hangs on this slot alone: what else is in the step changes no bit.
FN uint split_tokens(uint len, uint most_splits, uint fixed_from)
{
  if (len >= fixed_from) return PAGE_TOKENS;
  const uint blocks = (len + 63) / 64;
  return 64 * ((blocks + most_splits - 1) / most_splits);
}

// A lane's elements of a row, two in a word, element by element.
FN void read_apart(THREAD uint *words, const DEVICE bf16 *row)
{
  for (uint i = 0; i < LANE_WORDS; i++) {
    words[i] = as_u(f32(row[i * 2])) >> 16;
    if (i * 2 + 1 < LANE_ELEMENTS) words[i] |= as_u(f32(row[i * 2 + 1]));
  }
}

// The same, several at once where they are whole words.
FN void read_together(THREAD uint *words, const DEVICE bf16 *row)
{
#if HEAD_DIM % 256u == 0u
  for (uint i = 0; i < LANE_WORDS; i += 4) {
    const uint4 w = load4((const DEVICE uint *)row + i);
    words[i] = w.x;
    words[i + 1] = w.y;
    words[i + 2] = w.z;
    words[i + 3] = w.w;
  }
#elif HEAD_DIM % 64u == 0u
  for (uint i = 0; i < LANE_WORDS; i++) words[i] = ((const DEVICE uint *)row)[i];
#else
  read_apart(words, row);
#endif
}

FN float word_element(const THREAD uint *words, uint e) { return e % 2 ? bf16_high(words[e / 2]) : bf16_low(words[e / 2]); }

// What a lane makes of its elements c of a row: their product with a query's.
FN float row_part(const TG float *q, const THREAD uint *words, uint c)
{
  float acc = 0.0f;
  for (uint e = 0; e < LANE_ELEMENTS; e++) acc = fma(q[c * LANE_ELEMENTS + e], word_element(words, e), acc);
  return acc;
}

// For reading alone (read.metal): their sum, as words.
FN uint row_part(const TG uint *nothing, const THREAD uint *words, uint c)
{
  uint sum = 0;
  for (uint i = 0; i < LANE_WORDS; i++) sum += words[i];
  return sum;
}

// A row by one lane, in the order in which 32 lanes would sum it: the parts of lane c and of every 32 / N lanes further on.
template <uint N> struct Parts {};
template <typename T> FN T strided_row(Parts<1>, const TG T *q, const DEVICE bf16 *k, uint c)
{
  uint words[LANE_WORDS];
  read_together(words, k + c * LANE_ELEMENTS);
  return row_part(q, words, c);
}
template <uint N, typename T> FN T strided_row(Parts<N>, const TG T *q, const DEVICE bf16 *k, uint c)
{
  return strided_row(Parts<N / 2>(), q, k, c) + strided_row(Parts<N / 2>(), q, k, c + 32 / N);
}

// A threadgroup's split: the tokens from `begin` to `end` of a slot, none where the slot does not have it; a KV head, and its query heads
// from `first` on. `fixed`: it lies in one page.
struct DecodeSplit {
  uint slot, row, kv_head, first, begin, end;
  bool fixed;
};
template <uint PACK, bool FIXED> FN DecodeSplit split_of(const DEVICE SlotHeader *headers, const DEVICE SegmentEntry *segments,
    CONSTANT AttentionArgs &p, uint3 group)
{
  const uint packs = (HEADS_PER_KV + PACK - 1) / PACK;
  DecodeSplit s;
  s.kv_head = group.y / packs;
  s.first = group.y % packs * PACK;
  s.slot = segments[group.z].slot;
  s.row = segments[group.z].first;
  const uint len = headers[s.slot].position + 1;
  s.fixed = FIXED && len >= p.fixed_from;
  const uint size = split_tokens(len, p.most_splits, FIXED ? p.fixed_from : 0xffffffffu);
  s.begin = group.x * size;
  s.end = s.begin + size < len ? s.begin + size : len;
  if (!FIXED && len >= p.fixed_from) s.end = 0; // a slot of attention_fixed_units
  return s;
}

// Where a split of a page begins: it is looked up once.
FN ulong split_page(const THREAD DecodeSplit &s, const DEVICE uint *pages, CONSTANT AttentionArgs &p)
{
  return s.fixed ? attention_row(pages, s.slot, p.max_pages, s.begin, p.kv_heads, s.kv_head) : 0;
}

// Where the tile of tokens from t0 on begins.
FN ulong tile_at(const THREAD DecodeSplit &s, ulong page, const DEVICE uint *pages, CONSTANT AttentionArgs &p, uint t0)
{
  return s.fixed ? page + (t0 - s.begin) * HEAD_DIM : attention_row(pages, s.slot, p.max_pages, t0, p.kv_heads, s.kv_head);
}

// A lane's elements of a tile's token.
template <bool TOGETHER> FN void read_token(THREAD uint *words, const DEVICE bf16 *tile, uint t, uint lane)
{
  if (TOGETHER) read_together(words, tile + t * HEAD_DIM + lane * LANE_ELEMENTS);
  else read_apart(words, tile + t * HEAD_DIM + lane * LANE_ELEMENTS);
}

// Which score is a lane's, of PACK heads with a tile's tokens, where each lane reads a row.
template <uint PACK> FN uint own_score(uint lane) { return lane / (32 / (PACK * ATTENTION_TILE)); }

// The running softmax of a simdgroup. Lane l speaks for the head and the token (of eight) of its scores.
template <uint PACK> struct DecodeSums {
  float m, l;
  float o[PACK][LANE_ELEMENTS];
};

// Takes one tile in: `score` is this lane's, n tokens exist.
template <uint PACK> FN void take_tile(THREAD DecodeSums<PACK> &s, float score, const THREAD uint (*v)[LANE_WORDS], uint n, uint lane)
{
  const uint each = 32 / (PACK * ATTENTION_TILE); // lanes with the same score
  const bool seen = lane / each % ATTENTION_TILE < n;
  float most = seen ? score : ATTENTION_LEAST;
  for (uint t = ATTENTION_TILE / 2; t > 0; t >>= 1) most = fmax(most, simd_shuffle_xor(most, t * each));
  most = fmax(most, s.m);
  const float scale = exp2(s.m - most), weight = seen ? exp2(score - most) : 0.0f;
  s.m = most;
  s.l = fma(s.l, scale, weight);
  for (uint h = 0; h < PACK; h++) {
    const float a = simd_shuffle(scale, h * ATTENTION_TILE * each);
    for (uint e = 0; e < LANE_ELEMENTS; e++) s.o[h][e] *= a;
    for (uint t = 0; t < ATTENTION_TILE; t++) {
      const float w = simd_shuffle(weight, (h * ATTENTION_TILE + t) * each);
      for (uint e = 0; e < LANE_ELEMENTS; e++) s.o[h][e] = fma(w, word_element(v[t], e), s.o[h][e]);
    }
  }
}

// Leaves a simdgroup's sums in threadgroup memory: `part` [PACK][HEAD_DIM], `ml` [PACK][2].
template <uint PACK> FN void leave_sums(THREAD DecodeSums<PACK> &s, TG float *part, TG float *ml, uint lane)
{
  const uint each = 32 / (PACK * ATTENTION_TILE);
  for (uint t = ATTENTION_TILE / 2; t > 0; t >>= 1) s.l += simd_shuffle_xor(s.l, t * each);
  if (lane % (ATTENTION_TILE * each) == 0) {
    ml[lane / (ATTENTION_TILE * each) * 2] = s.m;
    ml[lane / (ATTENTION_TILE * each) * 2 + 1] = s.l;
  }
  for (uint h = 0; h < PACK; h++)
    for (uint e = 0; e < LANE_ELEMENTS; e++) part[h * HEAD_DIM + e * 32 + lane] = s.o[h][e];
}

// One head of the four simdgroups' sums to device memory. A lane's element e stays at e * 32 + lane until the combined head is stored.
template <uint PACK> FN void merge_head(uint h, const TG float *part, const TG float *ml, DEVICE float *o, DEVICE float *o_ml, uint lane)
{
  float most = ATTENTION_LEAST, weight[ATTENTION_SIMDS], l = 0.0f;
  for (uint s = 0; s < ATTENTION_SIMDS; s++) most = fmax(most, ml[(s * PACK + h) * 2]);
  for (uint s = 0; s < ATTENTION_SIMDS; s++) {
    weight[s] = exp2(ml[(s * PACK + h) * 2] - most);
    l = fma(weight[s], ml[(s * PACK + h) * 2 + 1], l);
  }
  for (uint e = 0; e < LANE_ELEMENTS; e++) {
    float x = 0.0f;
    for (uint s = 0; s < ATTENTION_SIMDS; s++) x = fma(weight[s], part[(s * PACK + h) * HEAD_DIM + e * 32 + lane], x);
    o[e * 32 + lane] = x;
  }
  if (lane == 0) {
    o_ml[0] = most;
    o_ml[1] = l;
  }
}

template <uint PACK, bool TOGETHER, bool FIXED> FN void decode_split(const DEVICE bf16 *q, const DEVICE bf16 *keys, const DEVICE bf16 *values,
    const DEVICE uint *pages, const DEVICE SlotHeader *headers, const DEVICE SegmentEntry *segments, DEVICE float *partial,
    CONSTANT AttentionArgs &p, TG float *part, TG float *ml, TG float *queries, uint3 group, uint lane, uint simd)
{
  const DecodeSplit split = split_of<PACK, FIXED>(headers, segments, p, group);
  if (split.begin >= split.end) {
    inputs_ready();
    return; // the whole threadgroup, before any barrier
  }
  const uint kv_head = split.kv_head, first = split.first, end = split.end;
  // The first tokens' K and V are on their way while this token's are still made.
  const uint soon = split.begin + simd * ATTENTION_TILE + lane % ATTENTION_TILE;
  if (soon < end) {
    const ulong at = attention_row(pages, split.slot, p.max_pages, soon, p.kv_heads, kv_head);
    for (uint d = lane / ATTENTION_TILE * 16; d < HEAD_DIM; d += 64) {
      prefetch(keys + at + d);
      prefetch(values + at + d);
    }
  }
  inputs_ready();
  const DEVICE bf16 *own = q + (ulong(split.row) * p.heads + kv_head * HEADS_PER_KV + first) * HEAD_DIM;
  float mine[PACK][LANE_ELEMENTS];
  for (uint h = 0; h < PACK; h++)
    for (uint e = 0; e < LANE_ELEMENTS; e++)
      mine[h][e] = first + h < HEADS_PER_KV ? f32(own[h * HEAD_DIM + lane * LANE_ELEMENTS + e]) * p.scale : 0.0f;
  if (!TOGETHER) {
    for (uint h = simd; h < PACK; h += ATTENTION_SIMDS)
      for (uint e = 0; e < LANE_ELEMENTS; e++) queries[h * HEAD_DIM + lane * LANE_ELEMENTS + e] = mine[h][e];
    tg_barrier();
  }
  DecodeSums<PACK> s;
  s.m = ATTENTION_LEAST;
  s.l = 0.0f;
  for (uint h = 0; h < PACK; h++)
    for (uint e = 0; e < LANE_ELEMENTS; e++) s.o[h][e] = 0.0f;
  const ulong page = split_page(split, pages, p);
  for (uint t0 = split.begin + simd * ATTENTION_TILE; t0 < end; t0 += ATTENTION_SIMDS * ATTENTION_TILE) {
    const ulong at = tile_at(split, page, pages, p, t0);
    const uint n = end - t0 < ATTENTION_TILE ? end - t0 : ATTENTION_TILE;
    uint k[ATTENTION_TILE][LANE_WORDS], v[ATTENTION_TILE][LANE_WORDS];
    for (uint t = 0; t < ATTENTION_TILE; t++) {
      for (uint i = 0; i < LANE_WORDS; i++) k[t][i] = v[t][i] = 0;
      if (t < n) { // beyond the last token lies what nobody wrote
        if (TOGETHER) read_token<true>(k[t], keys + at, t, lane);
        read_token<TOGETHER>(v[t], values + at, t, lane);
      }
    }
    float score;
    if (TOGETHER) {
      float dots[PACK][ATTENTION_TILE];
      for (uint h = 0; h < PACK; h++)
        for (uint t = 0; t < ATTENTION_TILE; t++) {
          float acc = 0.0f;
          for (uint e = 0; e < LANE_ELEMENTS; e++) acc = fma(mine[h][e], word_element(k[t], e), acc);
          dots[h][t] = acc;
        }
      score = simd_sums<PACK * ATTENTION_TILE>(&dots[0][0], lane);
    } else {
      const uint value = own_score<PACK>(lane), t = value % ATTENTION_TILE;
      score = t < n ? strided_row(Parts<32>(), queries + value / ATTENTION_TILE * HEAD_DIM, keys + at + t * HEAD_DIM, 0) : 0.0f;
    }
    take_tile<PACK>(s, score, v, n, lane);
  }
  leave_sums<PACK>(s, part + simd * PACK * HEAD_DIM, ml + simd * PACK * 2, lane);
  tg_barrier();
  for (uint h = simd; h < PACK && first + h < HEADS_PER_KV; h += ATTENTION_SIMDS) {
    const ulong at = (ulong(group.z) * p.heads + kv_head * HEADS_PER_KV + first + h) * p.splits + group.x;
    merge_head<PACK>(h, part, ml, partial + at * HEAD_DIM, partial + p.sums_at + at * 2, lane);
  }
}

#define ATTENTION_DECODE(NAME, PACK, TOGETHER, FIXED) \
  KERNEL(NAME, 128, IN(0, bf16, q), IN(1, bf16, keys), IN(2, bf16, values), IN(3, uint, pages), IN(4, SlotHeader, headers), \
      IN(5, SegmentEntry, segments), OUT(6, float, partial), ARGS(7, AttentionArgs, p)) \
  { \
    SHARED(float, part, ATTENTION_SIMDS * PACK * HEAD_DIM); \
    SHARED(float, ml, ATTENTION_SIMDS * PACK * 2); \
    SHARED(float, queries, TOGETHER ? 4 : PACK * HEAD_DIM); \
    decode_split<PACK, TOGETHER, FIXED>(q, keys, values, pages, headers, segments, partial, p, part, ml, queries, k_group, k_lane, k_simd); \
  }
ATTENTION_DECODE(attention_split, ATTENTION_PACK, true, false)
ATTENTION_DECODE(attention_split_unpacked, 1u, true, false)
ATTENTION_DECODE(attention_split_strided, ATTENTION_PACK, false, false)
ATTENTION_DECODE(attention_split_unpacked_strided, 1u, false, false)
ATTENTION_DECODE(attention_fixed, ATTENTION_PACK, true, true)
ATTENTION_DECODE(attention_fixed_unpacked, 1u, true, true)
ATTENTION_DECODE(attention_fixed_strided, ATTENTION_PACK, false, true)
ATTENTION_DECODE(attention_fixed_unpacked_strided, 1u, false, true)

// Combines the splits of a head of segment k_group.y: simdgroup s takes the splits s, s + 8, …, then the eight are summed
// in order. COMBINE_PARTS threadgroups share a head, each has COMBINE_ELEMENTS of every lane's elements.
#define COMBINE_SIMDS 8u
#if HEAD_DIM % 128u == 0u
#define COMBINE_PARTS 4u
#else
#define COMBINE_PARTS 1u
#endif
#define COMBINE_ELEMENTS (LANE_ELEMENTS / COMBINE_PARTS)
#define COMBINE_DIM (HEAD_DIM / COMBINE_PARTS)
// Splits of a simdgroup under way at once.
#define COMBINE_AHEAD 8u
struct CombineSums { float x[COMBINE_AHEAD][COMBINE_ELEMENTS], m[COMBINE_AHEAD], l[COMBINE_AHEAD]; };

// The simdgroup's splits from `split` on.
FN void load_splits(const DEVICE float *partial, const DEVICE float *ml, uint split, uint splits, uint first, THREAD CombineSums &to, uint lane)
{
#pragma unroll
  for (uint i = 0; i < COMBINE_AHEAD; i++) {
    const uint at = min(split + i * COMBINE_SIMDS, splits - 1);
    to.m[i] = ml[at * 2];
    to.l[i] = ml[at * 2 + 1];
    for (uint e = 0; e < COMBINE_ELEMENTS; e++) to.x[i][e] = partial[ulong(at) * HEAD_DIM + (first + e) * 32 + lane];
  }
}

// Splits of the segment's slot: of what the step before left.
FN uint combine_count(const DEVICE SlotHeader *headers, const DEVICE SegmentEntry *segment, CONSTANT AttentionArgs &p)
{
  const uint len = headers[segment->slot].position + 1, size = split_tokens(len, p.most_splits, p.fixed_from);
  return (len + size - 1) / size;
}

FN void combine_splits(const DEVICE float *partial, uint splits, CONSTANT AttentionArgs &p, TG float *part, TG float *ls, uint3 group, uint lane, uint simd)
{
  const uint first = group.x % COMBINE_PARTS * COMBINE_ELEMENTS;
  const ulong at = (ulong(group.y) * p.heads + group.x / COMBINE_PARTS) * p.splits;
  const DEVICE float *ml = partial + p.sums_at + at * 2, *outputs = partial + at * HEAD_DIM;
  CombineSums sums;
  load_splits(outputs, ml, simd, splits, first, sums, lane);
  float most = ATTENTION_LEAST, l = 0.0f, o[COMBINE_ELEMENTS];
  for (uint s = lane; s < splits; s += 32) most = fmax(most, ml[s * 2]);
  most = simd_max(most);
  for (uint e = 0; e < COMBINE_ELEMENTS; e++) o[e] = 0.0f;
#pragma unroll 1
  for (uint s = simd; s < splits; s += COMBINE_SIMDS * COMBINE_AHEAD) {
#pragma unroll
    for (uint i = 0; i < COMBINE_AHEAD; i++) {
      if (s + i * COMBINE_SIMDS >= splits) continue;
      const float weight = exp2(sums.m[i] - most);
      l = fma(weight, sums.l[i], l);
      for (uint e = 0; e < COMBINE_ELEMENTS; e++) o[e] = fma(weight, sums.x[i][e], o[e]);
    }
    if (s + COMBINE_SIMDS * COMBINE_AHEAD < splits) load_splits(outputs, ml, s + COMBINE_SIMDS * COMBINE_AHEAD, splits, first, sums, lane);
  }
  for (uint e = 0; e < COMBINE_ELEMENTS; e++) part[simd * COMBINE_DIM + e * 32 + lane] = o[e];
  if (lane == 0) ls[simd] = l;
  tg_barrier();
}

// Element i of the threadgroup's part of the combined head, and which element of the head that is.
FN uint combined_at(uint group, uint i) { return i / COMBINE_ELEMENTS * LANE_ELEMENTS + group % COMBINE_PARTS * COMBINE_ELEMENTS + i % COMBINE_ELEMENTS; }
FN float combined(const TG float *part, const TG float *ls, uint i)
{
  const uint at = i % COMBINE_ELEMENTS * 32 + i / COMBINE_ELEMENTS;
  float x = 0.0f, l = 0.0f;
  for (uint s = 0; s < COMBINE_SIMDS; s++) {
    x += part[s * COMBINE_DIM + at];
    l += ls[s];
  }
  return quotient(x, l);
}

// A threadgroup's part of a head; GATED: with the output gate, which lies behind the head's query in qg.
template <bool GATED> FN void combine_head(const DEVICE float *partial, const DEVICE SlotHeader *headers, const DEVICE SegmentEntry *segments,
    const DEVICE bf16 *qg, DEVICE bf16 *out, CONSTANT AttentionArgs &p, TG float *part, TG float *ls, uint3 group, uint tid, uint lane, uint simd)
{
  const uint splits = combine_count(headers, segments + group.y, p);
  const ulong head = ulong(segments[group.y].first) * p.heads + group.x / COMBINE_PARTS;
  const DEVICE bf16 *gates = qg + (head * 2 + 1) * HEAD_DIM;
  inputs_ready();
  // A thread's first gate comes beside the sums.
  const float soon = GATED && tid < COMBINE_DIM ? f32(gates[combined_at(group.x, tid)]) : 0.0f;
  combine_splits(partial, splits, p, part, ls, group, lane, simd);
  for (uint i = tid; i < COMBINE_DIM; i += 32 * COMBINE_SIMDS) {
    const uint d = combined_at(group.x, i);
    float x = combined(part, ls, i);
    if (GATED) x *= sigmoid(i == tid ? soon : f32(gates[d]));
    out[head * HEAD_DIM + d] = to_bf16(x);
  }
}

KERNEL(attention_combine, 256, IN(0, float, partial), IN(1, SlotHeader, headers), IN(2, SegmentEntry, segments), OUT(3, bf16, out),
    ARGS(4, AttentionArgs, p))
{
  SHARED(float, part, COMBINE_SIMDS * COMBINE_DIM);
  SHARED(float, ls, COMBINE_SIMDS);
  combine_head<false>(partial, headers, segments, out, out, p, part, ls, k_group, k_thread.x, k_lane, k_simd);
}

KERNEL(attention_combine_gated, 256, IN(0, float, partial), IN(1, SlotHeader, headers), IN(2, SegmentEntry, segments), IN(3, bf16, qg),
    OUT(4, bf16, out), ARGS(5, AttentionArgs, p))
{
  SHARED(float, part, COMBINE_SIMDS * COMBINE_DIM);
  SHARED(float, ls, COMBINE_SIMDS);
  combine_head<true>(partial, headers, segments, qg, out, p, part, ls, k_group, k_thread.x, k_lane, k_simd);
}
