// The gated delta rule, token by token. Per value head, with the state S [VALUE_DIM][KEY_DIM]:
//   S = g S (decay), m = S k (recall), d = (v - m) beta, S = S + d k^T (update), y = S q (read).
// The read is taken before the update, beside the recall, and completed: y = S q + d (k q). So a token waits for one sum over the lanes, not
// for two.
//
// A simdgroup keeps R rows of S in registers, LANE_DIM neighbouring elements of each a lane, from the first token to the last. Only
// v, d and y belong to a row: k and q are loaded and converted once for R rows. Every form of the scan goes through
// delta_token, and its sums have one order: lane by lane ascending, then a tree over the lanes. So neither R nor
// where a chunk ends changes a bit.

// One token for R rows. v: of the row that this lane answers for (l R / 32); so is the result y.
template <uint R> FN float delta_token(THREAD float *s, const THREAD float *k, const THREAD float *q, float v, float g, float beta, uint lane)
{
  float m[R], y[R], kq = 0.0f;
#pragma unroll
  for (uint e = 0; e < LANE_DIM; e++) kq = fma(k[e], q[e], kq);
  kq = simd_sum(kq);
#pragma unroll
  for (uint r = 0; r < R; r++) {
    m[r] = y[r] = 0.0f;
#pragma unroll
    for (uint e = 0; e < LANE_DIM; e++) {
      s[r * LANE_DIM + e] *= g;
      m[r] = fma(s[r * LANE_DIM + e], k[e], m[r]);
      y[r] = fma(s[r * LANE_DIM + e], q[e], y[r]);
    }
  }
  const float recall = simd_sums<R>(m, lane), read = simd_sums<R>(y, lane), d = (v - recall) * beta;
#pragma unroll
  for (uint r = 0; r < R; r++) {
    const float dr = simd_shuffle(d, r * (32u / R));
#pragma unroll
    for (uint e = 0; e < LANE_DIM; e++) s[r * LANE_DIM + e] = fma(dr, k[e], s[r * LANE_DIM + e]);
  }
  return fma(d, kq, read);
}

template <uint R> FN void delta_rows_load(const DEVICE float *state, THREAD float *s, uint lane)
{
#pragma unroll
  for (uint r = 0; r < R; r++) lane_load_f32<LANE_DIM>(state + r * KEY_DIM + lane * LANE_DIM, s + r * LANE_DIM);
}

template <uint R> FN void delta_rows_store(DEVICE float *state, const THREAD float *s, uint lane)
{
#pragma unroll
  for (uint r = 0; r < R; r++) lane_store_f32<LANE_DIM>(state + r * KEY_DIM + lane * LANE_DIM, s + r * LANE_DIM);
}

// Tokens whose k, q, v and gates are loaded while the ones before them are computed: a token takes some 200 cycles, a load from
// memory more.
#define SCAN_AHEAD 4u
#define SCAN_WORDS DELTA_WORDS(LANE_DIM)

// What SCAN_AHEAD tokens bring: k and q as loaded, then v of the lane's row and the head's gates.
FN void delta_load(const DEVICE bf16 *q, const DEVICE bf16 *k, const DEVICE bf16 *v, const DEVICE float *decay, const DEVICE float *beta, uint channels,
                   uint heads, uint token, uint last, THREAD uint *qk, THREAD float *vgb)
{
#pragma unroll
  for (uint i = 0; i < SCAN_AHEAD; i++) {
    const uint row = min(token + i, last);
    const ulong line = ulong(row) * channels;
    lane_words<LANE_DIM>(q + line, qk + i * 2 * SCAN_WORDS);
    lane_words<LANE_DIM>(k + line, qk + (i * 2 + 1) * SCAN_WORDS);
    vgb[i * 3] = f32(v[line]);
    vgb[i * 3 + 1] = decay[row * heads];
    vgb[i * 3 + 2] = beta[row * heads];
  }
}

// Tokens `start` to `start + count` of a segment for R rows of a head. The state comes from the slot's current half at the segment's
// first token, from the other one behind it, and goes to the other one.
template <uint R> FN void delta_scan_rows(const DEVICE bf16 *qkv, const DEVICE float *decay, const DEVICE float *beta, const DEVICE SegmentEntry *segment,
                                          const DEVICE SlotHeader *headers, DEVICE float *states, DEVICE bf16 *out, CONSTANT ScanArgs &p, uint head,
                                          uint row, uint lane)
{
  const uint count = min(segment->rows - p.start, p.count), first = segment->first + p.start, last = first + count - 1, slot = segment->slot;
  const ulong at = (ulong(p.layer) * p.heads + head) * (VALUE_DIM * KEY_DIM) + row * KEY_DIM;
  float s[R * LANE_DIM];
  delta_rows_load<R>(states + state_base(headers, slot, p.start > 0 ? 1u : 0u, p.state_words) + at, s, lane);
  // Of the lanes that answer for a row, each keeps its y of one token (its turn) until all tokens of a round are done.
  const uint mine = lane * R / 32, turn = lane % (32u / R);
  const DEVICE bf16 *q_at = qkv + head / VALUE_HEADS_PER_KEY * KEY_DIM + lane * LANE_DIM;
  const DEVICE bf16 *v_at = qkv + 2 * p.key_heads * KEY_DIM + head * VALUE_DIM + row + mine;
  uint qk_next[SCAN_AHEAD * 2 * SCAN_WORDS], qk[SCAN_AHEAD * 2 * SCAN_WORDS];
  float vgb_next[SCAN_AHEAD * 3], vgb[SCAN_AHEAD * 3];
  delta_load(q_at, q_at + p.key_heads * KEY_DIM, v_at, decay + head, beta + head, p.channels, p.heads, first, last, qk_next, vgb_next);
  for (uint token = first; token <= last; token += SCAN_AHEAD) {
#pragma unroll
    for (uint i = 0; i < SCAN_AHEAD * 2 * SCAN_WORDS; i++) qk[i] = qk_next[i];
#pragma unroll
    for (uint i = 0; i < SCAN_AHEAD * 3; i++) vgb[i] = vgb_next[i];
    if (token + SCAN_AHEAD <= last)
      delta_load(q_at, q_at + p.key_heads * KEY_DIM, v_at, decay + head, beta + head, p.channels, p.heads, token + SCAN_AHEAD, last, qk_next, vgb_next);
    float y = 0.0f;
#pragma unroll
    for (uint i = 0; i < SCAN_AHEAD; i++) {
      if (token + i <= last) {
        float q[LANE_DIM], k[LANE_DIM];
#pragma unroll
        for (uint e = 0; e < LANE_DIM; e++) {
          q[e] = lane_value<LANE_DIM>(qk + i * 2 * SCAN_WORDS, e);
          k[e] = lane_value<LANE_DIM>(qk + (i * 2 + 1) * SCAN_WORDS, e);
        }
        const float read = delta_token<R>(s, k, q, vgb[i * 3], vgb[i * 3 + 1], vgb[i * 3 + 2], lane);
        y = turn == i ? read : y;
      }
    }
    if (turn < SCAN_AHEAD && token + turn <= last) out[(ulong(token + turn) * p.heads + head) * VALUE_DIM + row + mine] = to_bf16(y);
  }
  delta_rows_store<R>(states + state_base(headers, slot, 1, p.state_words) + at, s, lane);
}

// A threadgroup: neighbouring rows of one head.
#define DELTA_SCAN(R)                                                                                                                              \
  KERNEL(delta_scan_##R, 256, IN(0, bf16, qkv), IN(1, float, decay), IN(2, float, beta), IN(3, SegmentEntry, segments), IN(4, SlotHeader, headers), \
         OUT(5, float, states), OUT(6, bf16, out), ARGS(7, ScanArgs, p))                                                                            \
  {                                                                                                                                                 \
    if (p.start < segments[k_group.z].rows && segments[k_group.z].rows < p.below) /* the others are delta_chunk's */                                \
      delta_scan_rows<R>(qkv, decay, beta, segments + k_group.z, headers, states, out, p, k_group.y, (k_group.x * p.simds + k_simd) * R, k_lane);   \
  }
DELTA_SCAN(1)
DELTA_SCAN(2)
DELTA_SCAN(4)
DELTA_SCAN(8)

// Decode: one token and the gated norm of the head that it makes; a threadgroup a head, its rows over the simdgroups. The state is read once
// and written once, each as 16 bytes a lane, all rows at once in flight: 64 KiB of a head of 128 x 128.
template <uint R> FN void scan_norm_head(const DEVICE bf16 *qkv, const DEVICE float *decay, const DEVICE float *beta, const DEVICE bf16 *z,
                                         const DEVICE float *weight, const DEVICE SegmentEntry *segment, const DEVICE SlotHeader *headers,
                                         DEVICE float *states, DEVICE bf16 *out, CONSTANT ScanNormArgs &p, TG float *y, uint head, uint lane, uint simd)
{
  const uint token = segment->first, slot = segment->slot, row = simd * R, mine = lane * R / 32;
  const ulong at = (ulong(p.layer) * p.heads + head) * (VALUE_DIM * KEY_DIM) + row * KEY_DIM;
  float s[R * LANE_DIM], k[LANE_DIM], q[LANE_DIM];
  const uint gate = token * p.heads + head;
  const ulong to = ulong(gate) * VALUE_DIM;
  float norm[VALUE_LANE_DIM], gates[VALUE_LANE_DIM];
  delta_rows_load<R>(states + state_base(headers, slot, 0, p.state_words) + at, s, lane);
  if (simd == 0) for (uint i = lane * 8; i < VALUE_DIM; i += 256) prefetch(weight + i);
  inputs_ready();
  if (simd == 0) gated_norm_load(z + to, weight, norm, gates, lane);
  const DEVICE bf16 *line = qkv + ulong(token) * p.channels, *q_at = line + head / VALUE_HEADS_PER_KEY * KEY_DIM + lane * LANE_DIM;
  lane_values<LANE_DIM>(q_at, q);
  lane_values<LANE_DIM>(q_at + p.key_heads * KEY_DIM, k);
  const float v = f32(line[2 * p.key_heads * KEY_DIM + head * VALUE_DIM + row + mine]);
  const float read = delta_token<R>(s, k, q, v, decay[gate], beta[gate], lane);
  delta_rows_store<R>(states + state_base(headers, slot, 1, p.state_words) + at, s, lane);
  if (lane % (32u / R) == 0) y[row + mine] = read;
  tg_barrier();
  if (simd == 0) {
    float head_y[VALUE_LANE_DIM];
    for (uint i = 0; i < VALUE_LANE_DIM; i++) head_y[i] = y[lane * VALUE_LANE_DIM + i];
    gated_norm(head_y, norm, gates, out + to, p.eps, lane);
  }
}

#define SCAN_NORM(R)                                                                                                                              \
  KERNEL(scan_norm_##R, 1024, IN(0, bf16, qkv), IN(1, float, decay), IN(2, float, beta), IN(3, bf16, z), IN(4, uint, slab),                       \
         IN(5, SegmentEntry, segments), IN(6, SlotHeader, headers), OUT(7, float, states), OUT(8, bf16, out), ARGS(9, ScanNormArgs, p))           \
  {                                                                                                                                               \
    SHARED(float, y, VALUE_DIM);                                                                                                                  \
    scan_norm_head<R>(qkv, decay, beta, z, slab_f32(slab, p.weight), segments + k_group.y, headers, states, out, p, y, k_group.x, k_lane, k_simd); \
  }
SCAN_NORM(4)
SCAN_NORM(8)
