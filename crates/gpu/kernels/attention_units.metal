#if (defined(K_CUDA) || defined(K_CPU)) && HEADS_PER_KV <= 8u && HEAD_DIM % 128u == 0u
// Attention of a decode step by mma.sync, of slots from p.fixed_from tokens on: a threadgroup has a page of one KV head for all query heads
// that share it, eight at most: they are the eight columns of every product.
//
// Each of four simdgroups takes tiles of 16 tokens in turn. Scores are K q^T: the rows are tokens, and a lane's 16 neighbouring elements of a row are
// in the order of the products' sums for both. Outputs are V^T p: the rows are elements; a lane reads 16 bytes of four tokens' rows and pairs them.
// Lane l: scores and probabilities of tokens l / 4 and + 8, of heads 2 (l % 4) and the next; outputs of elements 8 (l / 4) on of each 64, same heads.
// Expected bytes at 16 heads on 2 KV heads of 256: K and V of a token once (2048), partial sums 1032 for a head and split.

#define UNIT_TILE 16u
#define UNIT_PASS ATTENTION_SIMDS // heads whose sums are merged at once
#define UNIT_WORDS (HEAD_DIM / 64u * 8u)

struct UnitSums {
  float m[2], l[2];             // of the lane's two heads; l of its own tokens only
  float o[HEAD_DIM / 16u][4];   // of elements e and e + 64, heads 2 (l % 4) and the next
};

// 16 neighbouring elements of each 64 of a row; zeros if it is not there.
FN void unit_row(const DEVICE bf16 *row, bool there, uint part, THREAD uint *w)
{
#pragma unroll
  for (uint i = 0; i < UNIT_WORDS; i += 4) {
    uint4 v = {0, 0, 0, 0};
    if (there) v = load4((const DEVICE uint *)row + i / 8 * 32 + part * 8 + i % 8);
    w[i] = v.x; w[i + 1] = v.y; w[i + 2] = v.z; w[i + 3] = v.w;
  }
}

// Of the tokens 2 (l % 4), the next, and both + 8: elements 8 (l / 4) on of each 64. What nobody wrote is zero.
FN void unit_values(const DEVICE bf16 *v, uint n, uint lane, THREAD uint (&w)[4][HEAD_DIM / 16u])
{
#pragma unroll
  for (uint t = 0; t < 4; t++) {
    const uint token = lane % 4 * 2 + t % 2 + t / 2 * 8;
#pragma unroll
    for (uint i = 0; i < HEAD_DIM / 64; i++) {
      uint4 x = {0, 0, 0, 0};
      if (token < n) x = load4((const DEVICE uint *)(v + token * HEAD_DIM + i * 64 + lane / 4 * 8));
      w[t][i * 4] = x.x; w[t][i * 4 + 1] = x.y; w[t][i * 4 + 2] = x.z; w[t][i * 4 + 3] = x.w;
    }
  }
}

// A pair of neighbours in a row of an 8 x 8 matrix a lane becomes a pair of neighbours in a column.
FN uint transposed(uint x, uint lane)
{
  const uint from = lane % 4 * 8 + lane / 8;
  const uint a = simd_shuffle(x, from), b = simd_shuffle(x, from + 4);
  return lane / 4 % 2 == 0 ? (a & 0xffffu) | b << 16 : a >> 16 | (b & 0xffff0000u);
}

// Takes a tile of n tokens in.
FN void unit_tile(THREAD UnitSums &s, const THREAD uint *q, const DEVICE bf16 *keys, const DEVICE bf16 *values, uint n, float scale, uint lane)
{
  uint k[2][UNIT_WORDS], v[4][HEAD_DIM / 16u];
  unit_row(keys + lane / 4 * HEAD_DIM, lane / 4 < n, lane % 4, k[0]);
  unit_row(keys + (lane / 4 + 8) * HEAD_DIM, lane / 4 + 8 < n, lane % 4, k[1]);
  unit_values(values, n, lane, v);
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (uint i = 0; i < UNIT_WORDS; i += 2) {
    const uint a[4] = {k[0][i], k[1][i], k[0][i + 1], k[1][i + 1]};
    mma16(d, a, q[i], q[i + 1]);
  }
  float weight[2][2], fade[2];
#pragma unroll
  for (uint i = 0; i < 2; i++) { // the lane's two heads
    const float x = lane / 4 < n ? d[i] * scale : ATTENTION_LEAST, y = lane / 4 + 8 < n ? d[2 + i] * scale : ATTENTION_LEAST;
    float most = fmax(x, y);
    most = fmax(most, simd_shuffle_xor(most, 4));
    most = fmax(most, simd_shuffle_xor(most, 8));
    most = fmax(most, simd_shuffle_xor(most, 16));
    most = fmax(most, s.m[i]);
    fade[i] = exp2(s.m[i] - most);
    weight[0][i] = lane / 4 < n ? exp2(x - most) : 0.0f;
    weight[1][i] = lane / 4 + 8 < n ? exp2(y - most) : 0.0f;
    s.m[i] = most;
    s.l[i] = fma(s.l[i], fade[i], weight[0][i] + weight[1][i]);
  }
  const uint p0 = transposed(pack2(weight[0][0], weight[0][1]), lane), p1 = transposed(pack2(weight[1][0], weight[1][1]), lane);
#pragma unroll
  for (uint e = 0; e < HEAD_DIM / 16; e++) {
    s.o[e][0] *= fade[0];
    s.o[e][1] *= fade[1];
    s.o[e][2] *= fade[0];
    s.o[e][3] *= fade[1];
    // Element j of the lane's eight, of two neighbouring 64s.
    const uint j = e % 8, w = e / 8 * 8 + j / 2;
    uint a[4];
#pragma unroll
    for (uint i = 0; i < 4; i++) {
      const uint left = v[i / 2 * 2][w + i % 2 * 4], right = v[i / 2 * 2 + 1][w + i % 2 * 4];
      a[i] = j % 2 == 0 ? (left & 0xffffu) | right << 16 : left >> 16 | (right & 0xffff0000u);
    }
    mma16(s.o[e], a, p0, p1);
  }
}

FN void unit_page(const DEVICE bf16 *q, const DEVICE bf16 *keys, const DEVICE bf16 *values, const DEVICE uint *pages,
    const DEVICE SlotHeader *headers, const DEVICE SegmentEntry *segments, DEVICE float *partial, CONSTANT AttentionArgs &p, TG float *part,
    TG float *ml, uint3 group, uint lane, uint simd)
{
  const uint kv_head = group.y, slot = segments[group.z].slot, row = segments[group.z].first, len = headers[slot].position + 1;
  const uint begin = group.x * PAGE_TOKENS;
  if (begin >= len || len < p.fixed_from) { // a page that the slot does not have, or a slot of attention_split
    inputs_ready();
    return; // the whole threadgroup, before any barrier
  }
  const uint end = min(begin + PAGE_TOKENS, len), first = begin + simd * UNIT_TILE;
  const ulong page = attention_row(pages, slot, p.max_pages, begin, p.kv_heads, kv_head);
  // The first tokens' K and V are on their way while this token's are still made.
  if (first + lane / 2 < end) {
    const ulong at = page + (simd * UNIT_TILE + lane / 2) * HEAD_DIM + lane % 2 * (HEAD_DIM / 2);
    for (uint e = 0; e < HEAD_DIM / 2; e += 16) {
      prefetch(keys + at + e);
      prefetch(values + at + e);
    }
  }
  inputs_ready();
  uint queries[UNIT_WORDS];
  const uint head = lane / 4;
  unit_row(q + (ulong(row) * p.heads + kv_head * HEADS_PER_KV + min(head, HEADS_PER_KV - 1u)) * HEAD_DIM, head < HEADS_PER_KV, lane % 4, queries);
  UnitSums s;
  for (uint i = 0; i < 2; i++) {
    s.m[i] = ATTENTION_LEAST;
    s.l[i] = 0.0f;
  }
  for (uint e = 0; e < HEAD_DIM / 16; e++)
    for (uint i = 0; i < 4; i++) s.o[e][i] = 0.0f;
#pragma unroll 1
  for (uint t0 = first; t0 < end; t0 += ATTENTION_SIMDS * UNIT_TILE) {
    const ulong at = page + (t0 - begin) * HEAD_DIM;
    unit_tile(s, queries, keys + at, values + at, min(end - t0, UNIT_TILE), p.scale, lane);
  }
  for (uint i = 0; i < 2; i++)
    for (uint m = 4; m < 32; m *= 2) s.l[i] += simd_shuffle_xor(s.l[i], m);
  for (uint base = 0; base < HEADS_PER_KV; base += UNIT_PASS) {
    if (base > 0) tg_barrier(); // the sums before have been read
    for (uint i = 0; i < 2; i++) {
      const uint own = lane % 4 * 2 + i, of = simd * UNIT_PASS + own - base;
      if (own < base || own >= base + UNIT_PASS) continue;
      if (lane < 4) {
        ml[of * 2] = s.m[i];
        ml[of * 2 + 1] = s.l[i];
      }
      for (uint e = 0; e < HEAD_DIM / 16; e++)
        for (uint h = 0; h < 2; h++) {
          const uint d = e / 8 * 128 + h * 64 + lane / 4 * 8 + e % 8;
          part[of * HEAD_DIM + d % LANE_ELEMENTS * 32 + d / LANE_ELEMENTS] = s.o[e][h * 2 + i];
        }
    }
    tg_barrier();
    const uint h = base + simd; // a simdgroup a head
    if (h < HEADS_PER_KV) {
      const ulong at = (ulong(group.z) * p.heads + kv_head * HEADS_PER_KV + h) * p.splits + group.x;
      merge_head<UNIT_PASS>(simd, part, ml, partial + at * HEAD_DIM, partial + p.sums_at + at * 2, lane);
    }
  }
}

KERNEL(attention_fixed_units, 128, IN(0, bf16, q), IN(1, bf16, keys), IN(2, bf16, values), IN(3, uint, pages), IN(4, SlotHeader, headers),
    IN(5, SegmentEntry, segments), OUT(6, float, partial), ARGS(7, AttentionArgs, p))
{
  SHARED(float, part, ATTENTION_SIMDS * UNIT_PASS * HEAD_DIM);
  SHARED(float, ml, ATTENTION_SIMDS * UNIT_PASS * 2);
  unit_page(q, keys, values, pages, headers, segments, partial, p, part, ml, k_group, k_lane, k_simd);
}
#endif
