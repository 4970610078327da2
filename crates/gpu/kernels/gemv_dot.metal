// What a product with few rows of x is made of: packets of weights, x in threadgroup memory, their products. See gemv.metal.

enum { Q4 = 0, Q8 = 1, BF16 = 2, F32 = 3 }; // Matrix.format

// Elements of a packet, and words of it.
template <uint F> FN uint packet_elements() { return F == Q4 ? 32u : F == Q8 ? 16u : 8u; }
template <uint F> FN uint packet_words() { return F == F32 ? 8u : 4u; }

// Elements 8j to 8j + 7 of a packet, to be multiplied with x from the tile. Of a quantized one the codes, taken where they lie: numbers
// that many powers of two too large, which x makes good (see code_shift).
template <uint F> FN void take8(const THREAD uint *q, uint j, THREAD float *w)
{
  if (F == Q4) {
    const uint low = q[j], high = low >> 20;
#pragma unroll
    for (uint e = 0; e < 5; e++) w[e] = code_number(low & (15u << (4 * e)));
#pragma unroll
    for (uint e = 5; e < 8; e++) w[e] = code_number(high & (15u << (4 * e - 20)));
  } else if (F == Q8) {
#pragma unroll
    for (uint h = 0; h < 4; h++) {
      const uint pair = q[2 * j + h / 2] >> (h % 2 * 16);
      w[2 * h] = code_number(pair & 0xffu);
      w[2 * h + 1] = code_number(pair & 0xff00u);
    }
  } else if (F == BF16) {
#pragma unroll
    for (uint h = 0; h < 4; h++) {
      w[2 * h] = bf16_low(q[h]);
      w[2 * h + 1] = bf16_high(q[h]);
    }
  } else {
#pragma unroll
    for (uint h = 0; h < 8; h++) w[h] = as_f(q[h]);
  }
}

// The power of two that take8 has element e too large by.
template <uint F> FN uint code_shift(uint e) { return F == Q4 ? 4 * (e < 5 ? e : e - 5) : F == Q8 ? 8 * (e % 2) : 0; }

// Those elements as they are, for tiles and embeddings. A code or'ed into the mantissa of a power of two whose last digit stands where
// the code lies is that power plus the code: cheaper than a conversion.
template <uint F> FN void decode8(const THREAD uint *q, uint j, THREAD float *w)
{
  if (F == Q4) {
    const uint low = q[j], high = low >> 20;
    w[0] = as_f((low & 0xfu) | 0x4b000000u) - 8388608.0f;
    w[1] = as_f((low & 0xf0u) | 0x49000000u) - 524288.0f;
    w[2] = as_f((low & 0xf00u) | 0x47000000u) - 32768.0f;
    w[3] = as_f((low & 0xf000u) | 0x45000000u) - 2048.0f;
    w[4] = as_f((low & 0xf0000u) | 0x43000000u) - 128.0f;
    w[5] = as_f((high & 0xfu) | 0x4b000000u) - 8388608.0f;
    w[6] = as_f((high & 0xf0u) | 0x49000000u) - 524288.0f;
    w[7] = as_f((high & 0xf00u) | 0x47000000u) - 32768.0f;
  } else if (F == Q8) {
#pragma unroll
    for (uint h = 0; h < 4; h++) {
      const uint pair = q[2 * j + h / 2] >> (h % 2 * 16);
      w[2 * h] = as_f((pair & 0xffu) | 0x4b000000u) - 8388608.0f;
      w[2 * h + 1] = as_f((pair & 0xff00u) | 0x47000000u) - 32768.0f;
    }
  } else {
    take8<F>(q, j, w);
  }
}

// One of the stacked matrices of a weight.
struct Rows {
  const DEVICE uint *codes;
  const DEVICE bf16 *scales, *biases;
};

FN Rows rows_of(const DEVICE uint *slab, CONSTANT Matrix &m, uint matrix)
{
  Rows w;
  w.codes = slab_words(slab, m.codes) + ulong(matrix) * m.codes_stride * 4;
  w.scales = slab_bf16(slab, m.scales) + ulong(matrix) * m.scales_stride * 8;
  w.biases = slab_bf16(slab, m.biases) + ulong(matrix) * m.scales_stride * 8;
  return w;
}

// Packet i of row `row`, which has `packets`: its words, and its group's scale and bias.
template <uint F> FN void load_packet(const THREAD Rows &w, uint row, uint packets, uint i, THREAD uint *q, THREAD float *affine)
{
  const DEVICE uint *p = w.codes + ulong(row * packets + i) * packet_words<F>();
  const uint4 a = load4(p);
  q[0] = a.x; q[1] = a.y; q[2] = a.z; q[3] = a.w;
  if (F == F32) {
    const uint4 b = load4(p + 4);
    q[4] = b.x; q[5] = b.y; q[6] = b.z; q[7] = b.w;
  }
  if (F == Q4 || F == Q8) {
    const uint each = GROUP / packet_elements<F>();
    const uint g = row * (packets / each) + i / each;
    affine[0] = f32(w.scales[g]);
    affine[1] = f32(w.biases[g]);
  }
}

// Packet i of row `row` on its way into the cache, and its group's scale and bias where they begin a sector.
template <uint F> FN void prefetch_packet(const THREAD Rows &w, uint row, uint packets, uint i)
{
  prefetch(w.codes + ulong(row * packets + i) * packet_words<F>());
  if (F == Q4 || F == Q8) {
    const uint each = GROUP / packet_elements<F>(), g = row * (packets / each) + i / each;
    if (i % each == 0 && g % 16 == 0) {
      prefetch(w.scales + g);
      prefetch(w.biases + g);
    }
  }
}

// Words of 8 elements of x in the tile: f32 if WIDE, in two halves, which spares few rows a conversion for each packet; else bf16.
template <bool WIDE> FN uint piece_words() { return WIDE ? 8u : 4u; }

template <bool WIDE> FN void load_piece(const TG uint *x, uint lanes, THREAD float *v)
{
  if (WIDE) {
    const float4 a = load4((const TG float *)x), b = load4((const TG float *)x + lanes * 4);
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
  } else {
    const uint4 u = load4(x);
    v[0] = bf16_low(u.x); v[1] = bf16_high(u.x); v[2] = bf16_low(u.y); v[3] = bf16_high(u.y);
    v[4] = bf16_low(u.z); v[5] = bf16_high(u.z); v[6] = bf16_low(u.w); v[7] = bf16_high(u.w);
  }
}

template <bool WIDE> FN void store_piece(TG uint *to, uint lanes, const THREAD float *v)
{
  if (WIDE) {
    store4((TG float *)to, v[0], v[1], v[2], v[3]);
    store4((TG float *)to + lanes * 4, v[4], v[5], v[6], v[7]);
  } else {
    store4(to, pack2(v[0], v[1]), pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7]));
  }
}

// Adds the products of 8 elements of R rows of weights with M rows of x to dot[r * M + m].
template <bool WIDE, uint F, uint R, uint M> FN void dot8(const THREAD uint *q, uint j, const TG uint *x, uint stride, uint lanes, uint rows, THREAD float *dot)
{
  const uint W = R * 8;
  float w[W];
#pragma unroll
  for (uint r = 0; r < R; r++) take8<F>(q + r * 8, j, w + r * 8);
#pragma unroll
  for (uint m = 0; m < M; m++) {
    if (M > 1 && m >= rows) continue;
    float v[8];
    load_piece<WIDE>(x + m * stride, lanes, v);
#pragma unroll
    for (uint r = 0; r < R; r++) {
#pragma unroll
      for (uint e = 0; e < 8; e++) dot[r * M + m] = fma(w[r * 8 + e], v[e], dot[r * M + m]);
    }
  }
}

// Adds the products of R packets of weights with M rows of x to acc[r * M + m]. x: the lane's packet in the tile, rows of it `stride`
// words apart; sums: of its pieces of x, rows `sums_stride` apart; `rows` of the M are there. q: 8 words a packet, used up; affine:
// scale and bias of each.
template <bool WIDE, uint F, uint R, uint M> FN void dot_packets(THREAD uint *q, const THREAD float *affine, const TG uint *x, uint stride, uint lanes, const TG float *sums, uint sums_stride, uint rows, THREAD float *acc)
{
  const uint N = R * M, pieces = packet_elements<F>() / 8, words = packet_words<F>() / pieces, step = lanes * piece_words<WIDE>();
  const bool coded = F == Q4 || F == Q8;
  float dot[N];
#pragma unroll
  for (uint i = 0; i < N; i++) dot[i] = 0.0f;
  if (M < 4) {
#pragma unroll
    for (uint j = 0; j < pieces; j++) dot8<WIDE, F, R, M>(q, j, x + j * step, stride, lanes, rows, dot);
  } else { // a loop, or compilers take long; the next words move to the front, so that registers have fixed names
#pragma unroll 1
    for (uint j = 0; j < pieces; j++) {
      dot8<WIDE, F, R, M>(q, 0, x + j * step, stride, lanes, rows, dot);
#pragma unroll
      for (uint r = 0; r < R; r++) {
#pragma unroll
        for (uint i = 0; i + words < 4; i++) q[r * 8 + i] = q[r * 8 + i + words];
      }
    }
  }
#pragma unroll
  for (uint m = 0; m < M; m++) {
    float sum = 0.0f;
    if (coded && m < rows) {
#pragma unroll
      for (uint j = 0; j < pieces; j++) sum += sums[m * sums_stride + j];
    }
#pragma unroll
    for (uint r = 0; r < R; r++) {
      const uint i = r * M + m;
      acc[i] = coded ? fma(affine[2 * r] * CODE_DOWN, dot[i], fma(affine[2 * r + 1], sum, acc[i])) : acc[i] + dot[i];
    }
  }
}

// Each of N sums over `lanes` neighbouring lanes, a power of two; every lane has them.
template <uint N> FN void lanes_sum(THREAD float *x, uint lanes)
{
  if (lanes == 32) {
#pragma unroll
    for (uint i = 0; i < N; i++) x[i] = simd_sum(x[i]);
  } else {
#pragma unroll 1
    for (uint d = lanes / 2; d; d >>= 1) {
#pragma unroll
      for (uint i = 0; i < N; i++) x[i] += simd_shuffle_xor(x[i], d);
    }
  }
}

// A lane's share of a row's sum of squares: four columns, and from column i on those of every 1024.
FN float add_squares(float4 v, float s)
{
  s = fma(v.x, v.x, s); s = fma(v.y, v.y, s); s = fma(v.z, v.z, s);
  return fma(v.w, v.w, s);
}
FN float squares_from(const DEVICE float *x, uint i, uint cols, float s)
{
  for (; i < cols; i += 1024) s = add_squares(load4(x + i), s);
  return s;
}

// Shares of a row's sum of squares: 8 of them, whoever computes them, so that the norm's bits do not depend on the
// threadgroup's size.
FN void square_shares(const DEVICE float *x, uint cols, TG float *shares, uint lane, uint simd, uint simds)
{
  for (uint share = simd; share < 8; share += simds) {
    const float s = simd_sum(squares_from(x, (share * 32 + lane) * 4, cols, 0.0f));
    if (lane == 0) shares[share] = s;
  }
}

// 1 / sqrt(mean of squares + eps), from the shares.
FN float inverse_rms(const TG float *shares, uint cols, float eps)
{
  float s = 0.0f;
#pragma unroll
  for (uint i = 0; i < 8; i++) s += shares[i];
  return inverse_sqrt(s / float(cols) + eps);
}

// Eight neighbours of the residual stream, a and b, times the norm's scale and its weights, v and z: to bf16.
FN void normed_piece(float4 a, float4 b, float4 v, float4 z, float s, THREAD uint *q)
{
  q[0] = pack2(a.x * s * v.x, a.y * s * v.y);
  q[1] = pack2(a.z * s * v.z, a.w * s * v.w);
  q[2] = pack2(b.x * s * z.x, b.y * s * z.y);
  q[3] = pack2(b.z * s * z.z, b.w * s * z.w);
}

// Where x comes from: bf16 rows, or the residual stream, which is normalized on the way.
struct GemvInput {
  const DEVICE uint *x;
  uint cols, rows;
  bool normed;
  const DEVICE float *norm; // the norm's weight
  const TG float *shares;   // of each row's squares
  float eps;
  DEVICE uint *normed_out;  // where this threadgroup leaves the normalized rows, if it keeps them
  bool keeps;
};

FN void keep_normed(const THREAD GemvInput &in, ulong element, const THREAD uint *q)
{
  if (in.keeps) store4(in.normed_out + element / 2, q[0], q[1], q[2], q[3]);
}

// Columns [first, first + columns) of x to the tile, in the order in which lanes take them: `lanes` lanes read neighbouring 16 bytes.
// They are made good for what take8 leaves. sums: of the pieces, those of a packet side by side, rows `sums_stride` apart.
template <bool WIDE, uint F> FN void stage_x(const THREAD GemvInput &in, uint first, uint columns, uint lanes, TG uint *tile, uint stride, TG float *sums, uint sums_stride, uint tid, uint threads)
{
  const uint pieces = packet_elements<F>() / 8;
#pragma unroll 1
  for (uint m = 0; m < in.rows; m++) {
    const float s = in.normed ? inverse_rms(in.shares + m * 8, in.cols, in.eps) : 0.0f;
    for (uint u = tid; u < columns / 8; u += threads) {
      const uint i = u / pieces;
      const ulong from = ulong(m) * in.cols + first + u * 8;
      uint q[4];
      if (in.normed) {
        const DEVICE float *x = (const DEVICE float *)in.x + from, *w = in.norm + first + u * 8;
        normed_piece(load4(x), load4(x + 4), load4(w), load4(w + 4), s, q);
        keep_normed(in, from, q);
      } else {
        const uint4 a = load4(in.x + from / 2);
        q[0] = a.x; q[1] = a.y; q[2] = a.z; q[3] = a.w;
      }
      float v[8];
#pragma unroll
      for (uint e = 0; e < 4; e++) {
        v[2 * e] = bf16_low(q[e]);
        v[2 * e + 1] = bf16_high(q[e]);
      }
      sums[m * sums_stride + u] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
#pragma unroll
      for (uint e = 0; e < 8; e++) {
        if (F == Q4 || F == Q8) v[e] = v[e] * (CODE_UP * as_f((127 - code_shift<F>(e)) << 23));
      }
      store_piece<WIDE>(tile + m * stride + (i / lanes * pieces + u % pieces) * lanes * piece_words<WIDE>() + i % lanes * 4, lanes, v);
    }
  }
}
