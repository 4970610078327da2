// Gated DeltaNet before and after the recurrence: causal convolution, q/k normalization, gates, gated norm.
//
// A strip is KEY_DIM neighbouring channels of [q | k | v]: a q or a k head, or as much of v. One simdgroup works on a strip, LANE_DIM
// neighbouring channels a lane.
#define LANE_DIM (KEY_DIM / 32u)
#define VALUE_LANE_DIM (VALUE_DIM / 32u)
// bf16 of a lane as words, as they are loaded: two in a word, or one where N is odd.
#define DELTA_WORDS(N) ((N) % 2u ? (N) : (N) / 2u)

template <uint N> FN void lane_words(const DEVICE bf16 *p, THREAD uint *w)
{
  const DEVICE uint *u = (const DEVICE uint *)p;
  if (N % 4 == 0) {
    for (uint i = 0; i < N / 2; i += 2) {
      const uint2 v = load2(u + i);
      w[i] = v.x;
      w[i + 1] = v.y;
    }
  } else if (N % 2 == 0) {
    for (uint i = 0; i < N / 2; i++) w[i] = u[i];
  } else {
    for (uint i = 0; i < N; i++) w[i] = as_u(f32(p[i]));
  }
}

template <uint N> FN float lane_value(const THREAD uint *w, uint i)
{
  if (N % 2) return as_f(w[i]);
  return i % 2 ? bf16_high(w[i / 2]) : bf16_low(w[i / 2]);
}

template <uint N> FN void lane_values(const DEVICE bf16 *p, THREAD float *v)
{
  uint w[DELTA_WORDS(N)];
  lane_words<N>(p, w);
  for (uint i = 0; i < N; i++) v[i] = lane_value<N>(w, i);
}

template <uint N> FN void lane_store(DEVICE bf16 *p, const THREAD float *v)
{
  DEVICE uint *u = (DEVICE uint *)p;
  if (N % 4 == 0) {
    for (uint i = 0; i < N; i += 4) store2(u + i / 2, pack2(v[i], v[i + 1]), pack2(v[i + 2], v[i + 3]));
  } else if (N % 2 == 0) {
    for (uint i = 0; i < N; i += 2) u[i / 2] = pack2(v[i], v[i + 1]);
  } else {
    for (uint i = 0; i < N; i++) p[i] = to_bf16(v[i]);
  }
}

template <uint N> FN void lane_load_f32(const DEVICE float *p, THREAD float *v)
{
  if (N % 4 == 0) {
    for (uint i = 0; i < N; i += 4) {
      const float4 x = load4(p + i);
      v[i] = x.x;
      v[i + 1] = x.y;
      v[i + 2] = x.z;
      v[i + 3] = x.w;
    }
  } else {
    for (uint i = 0; i < N; i++) v[i] = p[i];
  }
}

template <uint N> FN void lane_store_f32(DEVICE float *p, const THREAD float *v)
{
  if (N % 4 == 0) {
    for (uint i = 0; i < N; i += 4) store4(p + i, v[i], v[i + 1], v[i + 2], v[i + 3]);
  } else {
    for (uint i = 0; i < N; i++) p[i] = v[i];
  }
}

// First word of a slot's state: the current one (next = 0), which a step reads, or the other (next = 1), which it writes.
FN ulong state_base(const DEVICE SlotHeader *headers, uint slot, uint next, uint words)
{
  return ulong(slot * 2 + ((headers[slot].parity ^ next) & 1u)) * words;
}

// x / sqrt(sum x^2 + 1e-6), times scale, over a simdgroup's strip.
FN void l2_norm(THREAD float *x, float scale)
{
  float sum = 0.0f;
  for (uint i = 0; i < LANE_DIM; i++) sum = fma(x[i], x[i], sum);
  const float r = inverse_sqrt(simd_sum(sum) + 1e-6f);
  for (uint i = 0; i < LANE_DIM; i++) x[i] = x[i] * r * scale;
}

// q is scaled by KEY_DIM^-1/2.
FN float l2_scale(uint strip, uint key_heads) { return strip < key_heads ? 1.0f / sqrt(float(KEY_DIM)) : 1.0f; }

// Rows that are loaded together, so that their latencies overlap.
#define CONV_AHEAD 4u
#define GATES_AHEAD 8u
#define CONV_PAST (CONV_TAPS - 1u)

// Convolution and silu of one strip, `block` rows of a segment from `start` on; then the l2 norm of q and k heads, if key_heads > 0. Each row
// of x is read once by its block: the window is in registers. A block has at least CONV_PAST rows, so that only the first looks
// into the state.
FN void conv_strip(const DEVICE bf16 *x, const DEVICE float *taps, const DEVICE SegmentEntry *segment, const DEVICE SlotHeader *headers,
                   DEVICE uint *states, DEVICE bf16 *out, CONSTANT ConvArgs &p, uint strip, uint start, uint key_heads, uint lane)
{
  const uint first = segment->first + start, left = segment->rows - start, rows = min(left, p.block);
  const uint at = strip * KEY_DIM + lane * LANE_DIM;
  const bool inside = at + LANE_DIM <= p.channels;
  const uint c = inside ? at : 0u; // lanes beyond the last channel follow the first ones and write nothing
  const ulong layer = ulong(p.layer) * CONV_PAST * p.channels;
  float w[LANE_DIM * CONV_TAPS], past[CONV_PAST * LANE_DIM];
  lane_load_f32<LANE_DIM * CONV_TAPS>(taps + ulong(c) * CONV_TAPS, w);
  if (start == 0) {
    const DEVICE bf16 *before = (const DEVICE bf16 *)(states + state_base(headers, segment->slot, 0, p.state_words) + p.conv_at) + layer;
    for (uint j = 0; j < CONV_PAST; j++) lane_values<LANE_DIM>(before + j * p.channels + c, past + j * LANE_DIM);
  }
  inputs_ready(); // the state is the step's before
  if (start > 0) {
    for (uint j = 0; j < CONV_PAST; j++) lane_values<LANE_DIM>(x + ulong(first + j - CONV_PAST) * p.channels + c, past + j * LANE_DIM);
  }
  const bool normed = strip < 2 * key_heads;
  const float scale = l2_scale(strip, key_heads);
  for (uint t = 0; t < rows; t += CONV_AHEAD) {
    uint words[CONV_AHEAD * DELTA_WORDS(LANE_DIM)];
    for (uint i = 0; i < CONV_AHEAD; i++)
      lane_words<LANE_DIM>(x + ulong(first + min(t + i, rows - 1)) * p.channels + c, words + i * DELTA_WORDS(LANE_DIM));
#pragma unroll
    for (uint i = 0; i < CONV_AHEAD; i++) {
      if (t + i < rows) {
        float y[LANE_DIM];
        for (uint e = 0; e < LANE_DIM; e++) {
          const float now = lane_value<LANE_DIM>(words + i * DELTA_WORDS(LANE_DIM), e);
          float sum = 0.0f;
          for (uint j = 0; j < CONV_PAST; j++) sum = fma(w[e * CONV_TAPS + j], past[j * LANE_DIM + e], sum);
          y[e] = silu(fma(w[e * CONV_TAPS + CONV_PAST], now, sum));
          for (uint j = 0; j + 1 < CONV_PAST; j++) past[j * LANE_DIM + e] = past[(j + 1) * LANE_DIM + e];
          past[(CONV_PAST - 1) * LANE_DIM + e] = now;
        }
        if (normed) l2_norm(y, scale);
        if (inside) lane_store<LANE_DIM>(out + ulong(first + t + i) * p.channels + c, y);
      }
    }
  }
  if (rows == left && inside) { // the segment's last rows are the next step's past
    DEVICE bf16 *after = (DEVICE bf16 *)(states + state_base(headers, segment->slot, 1, p.state_words) + p.conv_at) + layer;
    for (uint j = 0; j < CONV_PAST; j++) lane_store<LANE_DIM>(after + j * p.channels + c, past + j * LANE_DIM);
  }
}

KERNEL(causal_conv, 128, IN(0, bf16, x), IN(1, uint, slab), IN(2, SegmentEntry, segments), IN(3, SlotHeader, headers), OUT(4, uint, states),
       OUT(5, bf16, out), ARGS(6, ConvArgs, p))
{
  const uint strip = k_group.x * p.simds + k_simd, start = k_group.y * p.block;
  if (strip < p.strips && start < segments[k_group.z].rows)
    conv_strip(x, slab_f32(slab, p.taps), segments + k_group.z, headers, states, out, p, strip, start, 0u, k_lane);
}

// Of [q | k | v], q and k heads are normalized, v is copied.
KERNEL(qk_l2_norm, 128, IN(0, bf16, x), OUT(1, bf16, out), ARGS(2, QkNormArgs, p))
{
  const uint strip = k_group.x * p.simds + k_simd, c = strip * KEY_DIM + k_lane * LANE_DIM;
  if (strip < p.strips) {
    const bool inside = c + LANE_DIM <= p.channels;
    const ulong at = ulong(k_group.y) * p.channels + (inside ? c : 0u);
    float y[LANE_DIM];
    lane_values<LANE_DIM>(x + at, y);
    if (strip < 2 * p.key_heads) l2_norm(y, l2_scale(strip, p.key_heads));
    if (inside) lane_store<LANE_DIM>(out + at, y);
  }
}

// log(1 + e) for e in 0...1, to f32's precision also where 1 + e rounds to 1: 2 atanh(e / (2 + e)) as a series.
FN float log_1p(float e)
{
  const float s = quotient(e, 2.0f + e), t = s * s;
  float sum = fma(t, 1.0f / 15.0f, 1.0f / 13.0f);
  sum = fma(t, sum, 1.0f / 11.0f);
  sum = fma(t, sum, 1.0f / 9.0f);
  sum = fma(t, sum, 1.0f / 7.0f);
  sum = fma(t, sum, 1.0f / 5.0f);
  sum = fma(t, sum, 1.0f / 3.0f);
  return fma(2.0f * s * t, sum, 2.0f * s);
}

// decay = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b)
FN void delta_gate(float a, float b, float a_log, float dt_bias, DEVICE float *decay, DEVICE float *beta)
{
  const float x = a + dt_bias, softplus = fmax(x, 0.0f) + log_1p(exp(-fabs(x)));
  *decay = exp(-exp(a_log) * softplus);
  *beta = sigmoid(b);
}

KERNEL(delta_gates, 128, IN(0, float, a), IN(1, float, b), IN(2, uint, a_log_slab), IN(3, uint, dt_slab), OUT(4, float, decay), OUT(5, float, beta),
       ARGS(6, GateArgs, p))
{
  const uint i = k_group.x * 128 + k_thread.x, h = i % p.heads;
  if (i < p.count) delta_gate(a[i], b[i], slab_f32(a_log_slab, p.a_log)[h], slab_f32(dt_slab, p.dt_bias)[h], decay + i, beta + i);
}

// Convolution, silu, q/k norm and gates at once. The strip after the last is the gates': a lane a head. Too short for the recurrence's kernel to
// load its state meanwhile, which may therefore begin with it.
KERNEL(conv_prep, 128, IN(0, bf16, x), IN(1, uint, slab), IN(2, SegmentEntry, segments), IN(3, SlotHeader, headers), OUT(4, uint, states),
       OUT(5, bf16, out), IN(6, float, a), IN(7, float, b), IN(8, uint, a_log_slab), IN(9, uint, dt_slab), OUT(10, float, decay),
       OUT(11, float, beta), ARGS(12, PrepArgs, p))
{
  next_may_start();
  const uint strip = k_group.x * p.conv.simds + k_simd, start = k_group.y * p.conv.block;
  const DEVICE SegmentEntry *segment = segments + k_group.z;
  if (strip < p.conv.strips && start < segment->rows) {
    conv_strip(x, slab_f32(slab, p.conv.taps), segment, headers, states, out, p.conv, strip, start, p.key_heads, k_lane);
  } else if (strip == p.conv.strips && start < segment->rows) {
    const uint rows = min(segment->rows - start, p.conv.block);
    for (uint h = k_lane; h < p.heads; h += 32) {
      const float a_log = slab_f32(a_log_slab, p.a_log)[h], dt_bias = slab_f32(dt_slab, p.dt_bias)[h];
      inputs_ready();
      for (uint t = 0; t < rows; t += GATES_AHEAD) {
        const uint first = (segment->first + start + t) * p.heads + h;
        float x[GATES_AHEAD], y[GATES_AHEAD];
#pragma unroll
        for (uint i = 0; i < GATES_AHEAD; i++) {
          if (t + i >= rows) continue;
          x[i] = a[first + i * p.heads];
          y[i] = b[first + i * p.heads];
        }
#pragma unroll
        for (uint i = 0; i < GATES_AHEAD; i++)
          if (t + i < rows) delta_gate(x[i], y[i], a_log, dt_bias, decay + first + i * p.heads, beta + first + i * p.heads);
      }
    }
  }
}

FN void gated_norm_load(const DEVICE bf16 *z, const DEVICE float *weight, THREAD float *w, THREAD float *g, uint lane)
{
  lane_load_f32<VALUE_LANE_DIM>(weight + lane * VALUE_LANE_DIM, w);
  lane_values<VALUE_LANE_DIM>(z + lane * VALUE_LANE_DIM, g);
}

// rms_norm(y) w silu(z) over one value head of a simdgroup; g has z and is used up.
FN void gated_norm(const THREAD float *y, const THREAD float *w, THREAD float *g, DEVICE bf16 *out, float eps, uint lane)
{
  float sum = 0.0f;
  for (uint i = 0; i < VALUE_LANE_DIM; i++) sum = fma(y[i], y[i], sum);
  const float r = inverse_sqrt(simd_sum(sum) / float(VALUE_DIM) + eps);
  for (uint i = 0; i < VALUE_LANE_DIM; i++) g[i] = y[i] * r * w[i] * silu(g[i]);
  lane_store<VALUE_LANE_DIM>(out + lane * VALUE_LANE_DIM, g);
}

KERNEL(gated_rms_norm, 128, IN(0, bf16, y), IN(1, bf16, z), IN(2, uint, slab), OUT(3, bf16, out), ARGS(4, GatedNormArgs, p))
{
  const uint unit = k_group.x * p.simds + k_simd;
  if (unit < p.units) {
    const ulong at = ulong(unit) * VALUE_DIM;
    float v[VALUE_LANE_DIM], w[VALUE_LANE_DIM], g[VALUE_LANE_DIM];
    lane_values<VALUE_LANE_DIM>(y + at + k_lane * VALUE_LANE_DIM, v);
    gated_norm_load(z + at, slab_f32(slab, p.weight), w, g, k_lane);
    gated_norm(v, w, g, out + at, p.eps, k_lane);
  }
}
