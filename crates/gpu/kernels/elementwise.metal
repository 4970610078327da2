// Element by element: embedding rows, norms, sums, gates. Four neighbours a thread; each value is read and written once.

// Elements i to i + 3 of n; beyond the end 0.
FN void read4(const DEVICE float *x, uint i, uint n, THREAD float *v)
{
  if (i + 4 <= n) {
    const float4 q = load4(x + i);
    v[0] = q.x; v[1] = q.y; v[2] = q.z; v[3] = q.w;
  } else {
    for (uint j = 0; j < 4; j++) v[j] = i + j < n ? x[i + j] : 0.0f;
  }
}
FN void read4(const DEVICE bf16 *x, uint i, uint n, THREAD float *v)
{
  if (i + 4 <= n) {
    const uint2 q = load2((const DEVICE uint *)(x + i));
    v[0] = bf16_low(q.x); v[1] = bf16_high(q.x); v[2] = bf16_low(q.y); v[3] = bf16_high(q.y);
  } else {
    for (uint j = 0; j < 4; j++) v[j] = i + j < n ? f32(x[i + j]) : 0.0f;
  }
}
FN void write4(DEVICE float *y, uint i, uint n, const THREAD float *v)
{
  if (i + 4 <= n) store4(y + i, v[0], v[1], v[2], v[3]);
  else for (uint j = 0; i + j < n; j++) y[i + j] = v[j];
}
FN void write4(DEVICE bf16 *y, uint i, uint n, const THREAD float *v)
{
  if (i + 4 <= n) store2((DEVICE uint *)(y + i), pack2(v[0], v[1]), pack2(v[2], v[3]));
  else for (uint j = 0; i + j < n; j++) y[i + j] = to_bf16(v[j]);
}

// Eight neighbours of an embedding row, as the checkpoint means them.
template <uint F> FN void embed8(const THREAD Rows &w, uint token, uint cols, uint i, DEVICE float *out)
{
  uint q[8];
  float affine[2], v[8];
  const uint elements = packet_elements<F>(), packets = cols / elements;
  load_packet<F>(w, token, packets, i * 8 / elements, q, affine);
  uint piece[8];
  const uint j = i % (elements / 8), words = packet_words<F>() / (elements / 8);
  for (uint k = 0; k < words; k++) piece[k] = q[j * words + k];
  decode8<F>(piece, 0, v);
  if (F == Q4 || F == Q8) {
    for (uint e = 0; e < 8; e++) v[e] = fma(affine[0], v[e], affine[1]);
  }
  store4(out + i * 8, v[0], v[1], v[2], v[3]);
  store4(out + i * 8 + 4, v[4], v[5], v[6], v[7]);
}

// A row of the table for each row of the step: grid [pieces of the row, rows].
KERNEL(embed, 256, IN(0, uint, tokens), IN(1, uint, row_segments), IN(2, SegmentEntry, segments), IN(3, SlotHeader, headers), IN(4, uint, slab), OUT(5, float, out), ARGS(6, EmbedArgs, p))
{
  const uint row = k_group.y, i = k_group.x * 256 + k_thread.x, cols = p.table.cols;
  uint token = tokens[row];
  if (token == p.last_sampled) token = headers[segments[row_segments[row]].slot].last_token;
  token = min(token, p.table.rows - 1);
  if (i < cols / 8) {
    const Rows w = rows_of(slab, p.table, 0);
    DEVICE float *to = out + ulong(row) * cols;
    if (p.table.format == Q4) embed8<Q4>(w, token, cols, i, to);
    else if (p.table.format == Q8) embed8<Q8>(w, token, cols, i, to);
    else if (p.table.format == BF16) embed8<BF16>(w, token, cols, i, to);
    else embed8<F32>(w, token, cols, i, to);
  }
}

// A threadgroup a row.
KERNEL(rms_norm, 256, IN(0, float, x), IN(1, uint, slab), OUT(2, bf16, out), ARGS(3, NormArgs, p))
{
  SHARED(float, shares, 8);
  const DEVICE float *from = x + ulong(k_group.x) * p.cols, *w = slab_f32(slab, p.weight);
  for (uint i = k_thread.x * 8; i < p.cols; i += 2048) prefetch(w + i);
  inputs_ready();
  square_shares(from, p.cols, shares, k_lane, k_simd, 8);
  tg_barrier();
  const float s = inverse_rms(shares, p.cols, p.eps);
  for (uint i = k_thread.x * 4; i < p.cols; i += 1024) {
    const float4 a = load4(from + i), v = load4(w + i);
    const float y[4] = {a.x * s * v.x, a.y * s * v.y, a.z * s * v.z, a.w * s * v.w};
    write4(out + ulong(k_group.x) * p.cols, i, p.cols, y);
  }
}

KERNEL(add_rows, 256, IN(0, float, a), IN(1, bf16, b), OUT(2, float, out), ARGS(3, CountArgs, p))
{
  const uint i = (k_group.x * 256 + k_thread.x) * 4;
  float v[4], w[4];
  read4(a, i, p.count, v);
  read4(b, i, p.count, w);
  for (uint j = 0; j < 4; j++) v[j] += w[j];
  write4(out, i, p.count, v);
}

KERNEL(swiglu, 256, IN(0, bf16, gate), IN(1, bf16, up), OUT(2, bf16, out), ARGS(3, CountArgs, p))
{
  const uint i = (k_group.x * 256 + k_thread.x) * 4;
  float v[4], w[4];
  read4(gate, i, p.count, v);
  read4(up, i, p.count, w);
  for (uint j = 0; j < 4; j++) v[j] = silu(v[j]) * w[j];
  write4(out, i, p.count, v);
}

// The gate of a head lies behind its query; heads are whole multiples of four.
KERNEL(attention_gate, 256, IN(0, bf16, x), IN(1, bf16, qg), OUT(2, bf16, out), ARGS(3, CountArgs, p))
{
  const uint i = (k_group.x * 256 + k_thread.x) * 4;
  if (i < p.count) {
    float v[4], g[4];
    read4(x, i, p.count, v);
    read4(qg, i + (i / HEAD_DIM + 1) * HEAD_DIM, p.count * 2, g);
    for (uint j = 0; j < 4; j++) v[j] = v[j] * sigmoid(g[j]);
    write4(out, i, p.count, v);
  }
}

// Grid [pieces of the row, output rows].
KERNEL(gather_rows, 256, IN(0, float, x), IN(1, uint, output_rows), OUT(2, float, out), ARGS(3, CountArgs, p))
{
  const uint i = (k_group.x * 256 + k_thread.x) * 4;
  float v[4];
  read4(x + ulong(output_rows[k_group.y]) * p.count, i, p.count, v);
  write4(out + ulong(k_group.y) * p.count, i, p.count, v);
}
