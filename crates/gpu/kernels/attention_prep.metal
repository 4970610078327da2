// Before attention: q and k normalized per head, both rotated, K and V written to the slot's pages. A simdgroup
// has one head of one row.

// First element of a KV head's row at `position`, as all K and V pages are laid out.
FN ulong attention_row(const DEVICE uint *pages, uint slot, uint max_pages, uint position, uint kv_heads, uint kv_head)
{
  const uint page = pages[ulong(slot) * max_pages + position / PAGE_TOKENS];
  return (ulong(page) * kv_heads + kv_head) * (PAGE_TOKENS * HEAD_DIM) + position % PAGE_TOKENS * HEAD_DIM;
}

// 1 / sqrt(mean of squares + eps) of a head.
FN float head_inverse(const DEVICE bf16 *x, float eps, uint lane)
{
  float sum = 0.0f;
  for (uint d = lane * 2; d < HEAD_DIM; d += 64) {
    const uint w = *(const DEVICE uint *)(x + d);
    sum = fma(bf16_low(w), bf16_low(w), sum);
    sum = fma(bf16_high(w), bf16_high(w), sum);
  }
  return inverse_sqrt(simd_sum(sum) / float(HEAD_DIM) + eps);
}

FN float normed(float x, float inverse, float weight) { return x * inverse * weight; }

// Element d of the rotated pair (d, its partner half the rotated elements away), `turn` the cosines, then the sines.
FN float rotated(float own, float partner, uint d, uint dims, const DEVICE float *turn)
{
  const uint pairs = dims / 2, i = d < pairs ? d : d - pairs;
  return d < pairs ? fma(own, turn[i], -(partner * turn[pairs + i])) : fma(own, turn[i], partner * turn[pairs + i]);
}

FN uint rotation_partner(uint d, uint dims) { return d < dims / 2 ? d + dims / 2 : d - dims / 2; }

// A head in one go. Partners are read and normalized a second time instead of passed between lanes.
FN void head_prepare(const DEVICE bf16 *x, const DEVICE float *weight, const DEVICE float *turn, uint dims, float eps, DEVICE bf16 *to, uint lane)
{
  const float inverse = head_inverse(x, eps, lane);
  for (uint d = lane * 2; d < HEAD_DIM; d += 64) {
    const uint w = *(const DEVICE uint *)(x + d);
    float y0 = normed(bf16_low(w), inverse, weight[d]), y1 = normed(bf16_high(w), inverse, weight[d + 1]);
    if (d < dims) {
      const uint q0 = rotation_partner(d, dims), q1 = rotation_partner(d + 1, dims);
      const float z0 = normed(f32(x[q0]), inverse, weight[q0]), z1 = normed(f32(x[q1]), inverse, weight[q1]);
      y0 = rotated(y0, z0, d, dims, turn);
      y1 = rotated(y1, z1, d + 1, dims, turn);
    }
    *(DEVICE uint *)(to + d) = pack2(y0, y1);
  }
}

// Only normalized: no element is turned.
FN void head_normalize(const DEVICE bf16 *x, const DEVICE float *weight, float eps, DEVICE bf16 *to, uint lane)
{
  head_prepare(x, weight, weight, 0, eps, to, lane);
}

// In place: a lane has both elements of its pairs.
FN void head_rotate(DEVICE bf16 *x, const DEVICE float *turn, uint dims, uint lane)
{
  for (uint d = lane; d < dims / 2; d += 32) {
    const uint e = d + dims / 2;
    const float a = f32(x[d]), b = f32(x[e]);
    x[d] = to_bf16(rotated(a, b, d, dims, turn));
    x[e] = to_bf16(rotated(b, a, e, dims, turn));
  }
}

FN void head_copy(const DEVICE bf16 *x, DEVICE bf16 *to, uint lane)
{
  for (uint d = lane * 2; d < HEAD_DIM; d += 64) *(DEVICE uint *)(to + d) = *(const DEVICE uint *)(x + d);
}

// Position of a row of the step, from its segment and the slot's header.
FN uint row_position(uint row, uint segment, const DEVICE SegmentEntry *segments, const DEVICE SlotHeader *headers)
{
  return headers[segments[segment].slot].position + row - segments[segment].first;
}

// Heads, then K, then V of the row k_group.y: all in one kernel.
KERNEL(attention_prep, 128, IN(0, bf16, qg), IN(1, bf16, k), IN(2, bf16, v), IN(3, uint, q_slab), IN(4, uint, k_slab), IN(5, float, rope),
    IN(6, uint, row_segments), IN(7, SegmentEntry, segments), IN(8, SlotHeader, headers), IN(9, uint, pages), OUT(10, bf16, out),
    OUT(11, bf16, keys), OUT(12, bf16, values), ARGS(13, AttentionPrepArgs, p))
{
  const uint row = k_group.y, task = k_group.x * 4 + k_simd;
  if (task >= p.heads + 2 * p.kv_heads) return; // a whole simdgroup, and there is no barrier
  const uint segment = row_segments[row], slot = segments[segment].slot, position = row_position(row, segment, segments, headers);
  const DEVICE float *turn = rope + ulong(position) * p.rope_dims;
  const DEVICE float *weight = task < p.heads ? slab_f32(q_slab, p.q_norm) : slab_f32(k_slab, p.k_norm);
  for (uint d = k_lane * 8; d < HEAD_DIM; d += 256) prefetch(weight + d);
  for (uint d = k_lane * 8; d < p.rope_dims; d += 256) prefetch(turn + d);
  inputs_ready();
  if (task < p.heads) {
    const ulong head = ulong(row) * p.heads + task;
    head_prepare(qg + head * (2 * HEAD_DIM), weight, turn, p.rope_dims, p.eps, out + head * HEAD_DIM, k_lane);
    return;
  }
  const uint kv_head = (task - p.heads) % p.kv_heads;
  const ulong from = (ulong(row) * p.kv_heads + kv_head) * HEAD_DIM;
  const ulong at = attention_row(pages, slot, p.max_pages, position, p.kv_heads, kv_head);
  if (task < p.heads + p.kv_heads)
    head_prepare(k + from, weight, turn, p.rope_dims, p.eps, keys + at, k_lane);
  else
    head_copy(v + from, values + at, k_lane);
}

// The same as a chain of kernels, each of which stores bf16. Queries are normalized and rotated in `out`, keys in
// their page.
KERNEL(attention_norm_q, 128, IN(0, bf16, qg), IN(1, uint, slab), OUT(2, bf16, out), ARGS(3, AttentionPrepArgs, p))
{
  const uint task = k_group.x * 4 + k_simd;
  if (task >= p.heads) return;
  const ulong head = ulong(k_group.y) * p.heads + task;
  head_normalize(qg + head * (2 * HEAD_DIM), slab_f32(slab, p.q_norm), p.eps, out + head * HEAD_DIM, k_lane);
}

KERNEL(attention_norm_k, 128, IN(0, bf16, k), IN(1, uint, slab), IN(2, uint, row_segments), IN(3, SegmentEntry, segments),
    IN(4, SlotHeader, headers), IN(5, uint, pages), OUT(6, bf16, keys), ARGS(7, AttentionPrepArgs, p))
{
  const uint row = k_group.y, task = k_group.x * 4 + k_simd;
  if (task >= p.kv_heads) return;
  const uint segment = row_segments[row];
  const ulong at = attention_row(pages, segments[segment].slot, p.max_pages, row_position(row, segment, segments, headers), p.kv_heads, task);
  head_normalize(k + (ulong(row) * p.kv_heads + task) * HEAD_DIM, slab_f32(slab, p.k_norm), p.eps, keys + at, k_lane);
}

KERNEL(attention_rotate_q, 128, IN(0, float, rope), IN(1, uint, row_segments), IN(2, SegmentEntry, segments), IN(3, SlotHeader, headers),
    OUT(4, bf16, out), ARGS(5, AttentionPrepArgs, p))
{
  const uint row = k_group.y, task = k_group.x * 4 + k_simd;
  if (task >= p.heads) return;
  const uint position = row_position(row, row_segments[row], segments, headers);
  head_rotate(out + (ulong(row) * p.heads + task) * HEAD_DIM, rope + ulong(position) * p.rope_dims, p.rope_dims, k_lane);
}

KERNEL(attention_rotate_k, 128, IN(0, float, rope), IN(1, uint, row_segments), IN(2, SegmentEntry, segments), IN(3, SlotHeader, headers),
    IN(4, uint, pages), OUT(5, bf16, keys), ARGS(6, AttentionPrepArgs, p))
{
  const uint row = k_group.y, task = k_group.x * 4 + k_simd;
  if (task >= p.kv_heads) return;
  const uint segment = row_segments[row], position = row_position(row, segment, segments, headers);
  const ulong at = attention_row(pages, segments[segment].slot, p.max_pages, position, p.kv_heads, task);
  head_rotate(keys + at, rope + ulong(position) * p.rope_dims, p.rope_dims, k_lane);
}

KERNEL(attention_write_v, 128, IN(0, bf16, v), IN(1, uint, row_segments), IN(2, SegmentEntry, segments), IN(3, SlotHeader, headers),
    IN(4, uint, pages), OUT(5, bf16, values), ARGS(6, AttentionPrepArgs, p))
{
  const uint row = k_group.y, task = k_group.x * 4 + k_simd;
  if (task >= p.kv_heads) return;
  const uint segment = row_segments[row];
  const ulong at = attention_row(pages, segments[segment].slot, p.max_pages, row_position(row, segment, segments, headers), p.kv_heads, task);
  head_copy(v + (ulong(row) * p.kv_heads + task) * HEAD_DIM, values + at, k_lane);
}
