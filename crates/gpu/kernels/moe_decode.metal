// Experts for a few rows: each selected expert's weights are read once for each row that selected it, 16 bytes a lane. One row
// of the real model: 8 · 2 · 512 · 2048 weights in, 9 · 2048 · 512 out, of 4 bits and a 16th of 16 + 16 bits each 32: 9.4 MB
// and 5.3 MB.

// What one lane loads of a weight's row: 16 bytes (f32: 32), and the scale and bias of their group.
struct Wide { uint w[8]; float scale, bias; };

FN uint wide_elements(const THREAD Q4Row &c) { return 32; }
FN uint wide_elements(const THREAD Q8Row &c) { return 16; }
FN uint wide_elements(const THREAD Bf16Row &c) { return 8; }
FN uint wide_elements(const THREAD AnyRow &c) { return 8; }

FN Wide fetch_wide(const THREAD Q4Row &c, uint k)
{
  const uint4 q = load4(c.codes + k / 8);
  const Wide f = {{q.x, q.y, q.z, q.w, 0, 0, 0, 0}, f32(c.scales[k / GROUP]), f32(c.biases[k / GROUP])};
  return f;
}
FN Wide fetch_wide(const THREAD Q8Row &c, uint k)
{
  const uint4 q = load4(c.codes + k / 4);
  const Wide f = {{q.x, q.y, q.z, q.w, 0, 0, 0, 0}, f32(c.scales[k / GROUP]), f32(c.biases[k / GROUP])};
  return f;
}
FN Wide fetch_wide(const THREAD Bf16Row &c, uint k)
{
  const uint4 q = load4(c.codes + k / 2);
  const Wide f = {{q.x, q.y, q.z, q.w, 0, 0, 0, 0}, 1.0f, 0.0f};
  return f;
}
FN Wide fetch_wide(const THREAD AnyRow &c, uint k)
{
  const Fetched q = fetch(c, k);
  Wide f = {{q.w[0], q.w[1], q.w[2], q.w[3], q.w[4], q.w[5], q.w[6], q.w[7]}, 1.0f, 0.0f};
  if (c.format < 2) {
    f.scale = as_f(q.w[1]);
    f.bias = as_f(q.w[2]);
    f.w[1] = q.w[3];
  }
  return f;
}

FN Floats input_eight(const DEVICE bf16 *x, uint k) { return eight_floats(load_eight(x, k)); }
FN float sum_eight(Floats v) { return ((v.v[0] + v.v[1]) + (v.v[2] + v.v[3])) + ((v.v[4] + v.v[5]) + (v.v[6] + v.v[7])); }

// Σ x · code of eight 4-bit codes. The places' powers of two go to x, which the rows of a lane share.
FN float dot_codes4(uint q, Floats x)
{
  float dot = in_place(q, 0xfu) * x.v[0];
  dot = fma(in_place(q, 0xf0u), x.v[1] * 0.0625f, dot);
  dot = fma(in_place(q, 0xf00u), x.v[2] * 0.00390625f, dot);
  dot = fma(in_place(q, 0xf000u), x.v[3] * 0.000244140625f, dot);
  dot = fma(in_place(q >> 16, 0xfu), x.v[4], dot);
  dot = fma(in_place(q >> 16, 0xf0u), x.v[5] * 0.0625f, dot);
  dot = fma(in_place(q >> 16, 0xf00u), x.v[6] * 0.00390625f, dot);
  return fma(in_place(q >> 16, 0xf000u), x.v[7] * 0.000244140625f, dot);
}
FN float dot_codes8(uint a, uint b, Floats x)
{
  float dot = in_place(a, 0xffu) * x.v[0];
  dot = fma(in_place(a, 0xff00u), x.v[1] * 0.00390625f, dot);
  dot = fma(in_place(a >> 16, 0xffu), x.v[2], dot);
  dot = fma(in_place(a >> 16, 0xff00u), x.v[3] * 0.00390625f, dot);
  dot = fma(in_place(b, 0xffu), x.v[4], dot);
  dot = fma(in_place(b, 0xff00u), x.v[5] * 0.00390625f, dot);
  dot = fma(in_place(b >> 16, 0xffu), x.v[6], dot);
  return fma(in_place(b >> 16, 0xff00u), x.v[7] * 0.00390625f, dot);
}
FN float dot_eight(Floats a, Floats b)
{
  float dot = a.v[0] * b.v[0];
  for (uint i = 1; i < 8; i++) dot = fma(a.v[i], b.v[i], dot);
  return dot;
}

// Σ weight · x of what a lane loaded at element k.
FN float dot_wide(const THREAD Q4Row &c, Wide f, const DEVICE bf16 *x, uint k)
{
  float dot = 0.0f, sum = 0.0f;
  for (uint i = 0; i < 4; i++) {
    const Floats v = input_eight(x, k + i * 8);
    dot += dot_codes4(f.w[i], v);
    sum += sum_eight(v);
  }
  return fma(f.scale, dot, f.bias * sum);
}
FN float dot_wide(const THREAD Q8Row &c, Wide f, const DEVICE bf16 *x, uint k)
{
  const Floats a = input_eight(x, k), b = input_eight(x, k + 8);
  return fma(f.scale, dot_codes8(f.w[0], f.w[1], a) + dot_codes8(f.w[2], f.w[3], b), f.bias * (sum_eight(a) + sum_eight(b)));
}
FN float dot_wide(const THREAD Bf16Row &c, Wide f, const DEVICE bf16 *x, uint k)
{
  const Eight w = {{f.w[0], f.w[1], f.w[2], f.w[3]}};
  return dot_eight(eight_floats(w), input_eight(x, k));
}
FN float dot_wide(const THREAD AnyRow &c, Wide f, const DEVICE bf16 *x, uint k)
{
  const Floats v = input_eight(x, k);
  const Eight pairs = {{f.w[0], f.w[1], f.w[2], f.w[3]}};
  const Floats plain = {{as_f(f.w[0]), as_f(f.w[1]), as_f(f.w[2]), as_f(f.w[3]), as_f(f.w[4]), as_f(f.w[5]), as_f(f.w[6]), as_f(f.w[7])}};
  if (c.format == 0) return fma(f.scale, dot_codes4(f.w[0], v), f.bias * sum_eight(v));
  if (c.format == 1) return fma(f.scale, dot_codes8(f.w[0], f.w[1], v), f.bias * sum_eight(v));
  return c.format == 2 ? dot_eight(eight_floats(pairs), v) : dot_eight(plain, v);
}

// The sum over 16 neighbouring lanes, in all of them.
FN float sum16(float v)
{
  v += simd_shuffle_xor(v, 8u);
  v += simd_shuffle_xor(v, 4u);
  v += simd_shuffle_xor(v, 2u);
  return v + simd_shuffle_xor(v, 1u);
}

// out[entry] = silu(x[row] · gateᵀ) · (x[row] · upᵀ): a simdgroup has EACH columns of an entry, all lanes along K.
template <class W, uint EACH>
FN void decode_experts_in(const DEVICE uint *gate, const DEVICE uint *up, const DEVICE bf16 *x, const DEVICE uint *ids, DEVICE bf16 *out,
                          CONSTANT ExpertsInArgs &p, uint first, uint entry, uint lane)
{
  const uint expert = ids[entry], cols = p.gate.cols;
  const WeightRows g = weight_rows(gate, p.gate, expert, first), u = weight_rows(up, p.up, expert, first);
  const DEVICE bf16 *mine = x + ulong(entry / p.k) * cols;
  W rows[2 * EACH];
  float sums[2 * EACH];
  for (uint i = 0; i < EACH; i++) {
    open_row(rows[2 * i], g, i);
    open_row(rows[2 * i + 1], u, i);
    sums[2 * i] = sums[2 * i + 1] = 0.0f;
  }
  const uint n = wide_elements(rows[0]);
  for (uint k = lane * n; k < cols; k += 32 * n) {
    Wide f[2 * EACH];
    for (uint i = 0; i < 2 * EACH; i++) f[i] = fetch_wide(rows[i], k);
    for (uint i = 0; i < 2 * EACH; i++) sums[i] += dot_wide(rows[i], f[i], mine, k);
  }
  for (uint i = 0; i < EACH; i++) {
    const float a = simd_sum(sums[2 * i]), b = simd_sum(sums[2 * i + 1]);
    if (lane == 0 && first + i < p.gate.rows) out[ulong(entry) * p.gate.rows + first + i] = to_bf16(silu(a) * b);
  }
}

#define DECODE_EXPERTS_IN(name, W) \
  KERNEL(name, 128, IN(0, uint, gate), IN(1, uint, up), IN(2, bf16, x), IN(3, uint, ids), OUT(4, bf16, out), ARGS(5, ExpertsInArgs, p)) \
  { \
    decode_experts_in<W, 2>(gate, up, x, ids, out, p, (k_group.x * 4 + k_simd) * 2, k_group.y, k_lane); \
  }
DECODE_EXPERTS_IN(decode_experts_in_q4, Q4Row)
DECODE_EXPERTS_IN(decode_experts_in_q8, Q8Row)
DECODE_EXPERTS_IN(decode_experts_in_any, AnyRow)

// out[entry] = x[entry / share] · weightᵀ for each entry's expert: the projection alone. 16 lanes a column.
template <class W>
FN void decode_experts(const DEVICE uint *slab, const DEVICE bf16 *x, const DEVICE uint *ids, DEVICE bf16 *out, CONSTANT ExpertsArgs &p,
                       uint col, uint entry, uint lane)
{
  W row;
  open_row(row, weight_rows(slab, p.w, ids[entry], col), 0);
  const DEVICE bf16 *mine = x + ulong(entry / p.share) * p.w.cols;
  const uint n = wide_elements(row);
  float sum = 0.0f;
  for (uint k = lane % 16 * n; k < p.w.cols; k += 16 * n) sum += dot_wide(row, fetch_wide(row, k), mine, k);
  sum = sum16(sum);
  if (lane % 16 == 0 && col < p.w.rows) out[ulong(entry) * p.w.rows + col] = to_bf16(sum);
}

#define DECODE_EXPERTS(name, W) \
  KERNEL(name, 128, IN(0, uint, slab), IN(1, bf16, x), IN(2, uint, ids), OUT(3, bf16, out), ARGS(4, ExpertsArgs, p)) \
  { \
    decode_experts<W>(slab, x, ids, out, p, k_group.x * 8 + k_thread.x / 16, k_group.y, k_lane); \
  }
DECODE_EXPERTS(decode_experts_q4, Q4Row)
DECODE_EXPERTS(decode_experts_q8, Q8Row)
DECODE_EXPERTS(decode_experts_any, AnyRow)

// out = residual + Σ_rank weight · (x[rank] · downᵀ) + sigmoid(shared_gate) · (shared_x · shared_downᵀ). 16 lanes a column go
// through the experts in the order of rank, four experts' loads at a time, the shared one last; each lane sums its share of
// all of them before the lanes are summed.
template <class W, class S>
FN void decode_experts_out(const DEVICE uint *down, const DEVICE uint *shared_down, const DEVICE bf16 *x, const DEVICE uint *ids,
                           const DEVICE float *weights, const DEVICE bf16 *shared_x, const DEVICE float *shared_gate,
                           const DEVICE float *residual, DEVICE float *out, CONSTANT ExpertsSumArgs &p, uint col, uint row, uint lane)
{
  float sum = 0.0f;
  for (uint first = 0; first < p.k; first += 4) {
    W rows[4];
    float scores[4];
    const DEVICE bf16 *inputs[4];
    for (uint i = 0; i < 4; i++) {
      const uint rank = min(first + i, p.k - 1), entry = row * p.k + rank;
      open_row(rows[i], weight_rows(down, p.down, ids[entry], col), 0);
      scores[i] = weights[entry];
      inputs[i] = x + ulong(entry) * p.down.cols;
    }
    const uint n = wide_elements(rows[0]);
    for (uint k = lane % 16 * n; k < p.down.cols; k += 16 * n) {
      Wide f[4];
      for (uint i = 0; i < 4; i++)
        if (first + i < p.k) f[i] = fetch_wide(rows[i], k);
      for (uint i = 0; i < 4; i++)
        if (first + i < p.k) sum = fma(scores[i], dot_wide(rows[i], f[i], inputs[i], k), sum);
    }
  }
  S row_shared;
  open_row(row_shared, weight_rows(shared_down, p.shared_down, 0, col), 0);
  const DEVICE bf16 *input = shared_x + ulong(row) * p.shared_down.cols;
  const uint n = wide_elements(row_shared);
  const float gate = sigmoid(shared_gate[row]);
  for (uint k = lane % 16 * n; k < p.shared_down.cols; k += 16 * n)
    sum = fma(gate, dot_wide(row_shared, fetch_wide(row_shared, k), input, k), sum);
  sum = sum16(sum);
  const ulong at = ulong(row) * p.down.rows + col;
  if (lane % 16 == 0 && col < p.down.rows) out[at] = residual[at] + sum;
}

#define DECODE_EXPERTS_OUT(name, W, S) \
  KERNEL(name, 128, IN(0, uint, down), IN(1, uint, shared_down), IN(2, bf16, x), IN(3, uint, ids), IN(4, float, weights), \
         IN(5, bf16, shared_x), IN(6, float, shared_gate), IN(7, float, residual), OUT(8, float, out), ARGS(9, ExpertsSumArgs, p)) \
  { \
    decode_experts_out<W, S>(down, shared_down, x, ids, weights, shared_x, shared_gate, residual, out, p, \
                             k_group.x * 8 + k_thread.x / 16, k_group.y, k_lane); \
  }
DECODE_EXPERTS_OUT(decode_experts_out_q4, Q4Row, Q4Row)
DECODE_EXPERTS_OUT(decode_experts_out_q8, Q8Row, Q8Row)
DECODE_EXPERTS_OUT(decode_experts_out_any, AnyRow, AnyRow)

// The gated activation alone.
KERNEL(gate_product, 256, IN(0, bf16, gate), IN(1, bf16, up), OUT(2, bf16, out), ARGS(3, GateProductArgs, p))
{
  const uint i = k_group.x * 256 + k_thread.x;
  if (i < p.count) out[i] = to_bf16(silu(f32(gate[i])) * f32(up[i]));
}
