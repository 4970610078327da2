// y = W x for 1 to 8 rows of x: weights stream through registers once, x waits in threadgroup memory.
//
// A row of W is cut into packets of 16 bytes (f32: two of them): 32, 16, 8 or 8 elements. `lanes` neighbouring
// lanes (a power of two) share a row and take neighbouring packets, so that a simdgroup reads whole lines; 32 / lanes
// rows lie beside each other in a simdgroup, and each lane works on R such rows at once, to have R packets in
// flight. The order of a sum depends on the matrix alone: neither on M, R nor on who shares the threadgroup.
// Bytes: the matrices once, codes and scales; x once a threadgroup, out of a cache.

enum { Q4 = 0, Q8 = 1, BF16 = 2, F32 = 3 }; // Matrix.format

// Elements of a packet, and words of it.
template <uint F> FN uint packet_elements() { return F == Q4 ? 32u : F == Q8 ? 16u : 8u; }
template <uint F> FN uint packet_words() { return F == F32 ? 8u : 4u; }

// Elements 8j to 8j + 7 of a packet, exact; of a quantized one the codes. A code or'ed into the mantissa of a power of
// two whose last digit stands where the code lies is that power plus the code: cheaper than a conversion.
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
  const DEVICE uint *p = w.codes + (ulong(row) * packets + i) * packet_words<F>();
  const uint4 a = load4(p);
  q[0] = a.x; q[1] = a.y; q[2] = a.z; q[3] = a.w;
  if (F == F32) {
    const uint4 b = load4(p + 4);
    q[4] = b.x; q[5] = b.y; q[6] = b.z; q[7] = b.w;
  }
  if (F == Q4 || F == Q8) {
    const uint each = GROUP / packet_elements<F>();
    const ulong g = ulong(row) * (packets / each) + i / each;
    affine[0] = f32(w.scales[g]);
    affine[1] = f32(w.biases[g]);
  }
}

// Adds the products of 8 elements of R rows of weights with M rows of x to dot[r * M + m], and x to sum[m].
template <uint F, uint R, uint M> FN void dot8(const THREAD uint *q, uint j, const TG uint *x, uint stride, uint rows, THREAD float *dot, THREAD float *sum)
{
  const uint W = R * 8;
  float w[W];
#pragma unroll
  for (uint r = 0; r < R; r++) decode8<F>(q + r * 8, j, w + r * 8);
#pragma unroll
  for (uint m = 0; m < M; m++) {
    if (M > 1 && m >= rows) continue;
    const uint4 u = load4(x + m * stride);
    const float v[8] = {bf16_low(u.x), bf16_high(u.x), bf16_low(u.y), bf16_high(u.y), bf16_low(u.z), bf16_high(u.z), bf16_low(u.w), bf16_high(u.w)};
    if (F == Q4 || F == Q8) sum[m] += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
#pragma unroll
    for (uint r = 0; r < R; r++) {
#pragma unroll
      for (uint e = 0; e < 8; e++) dot[r * M + m] = fma(w[r * 8 + e], v[e], dot[r * M + m]);
    }
  }
}

// Adds the products of R packets of weights with M rows of x to acc[r * M + m]. x: the lane's packet in threadgroup
// memory, in pieces of 8 bf16 that lie `step` words apart, rows of it `stride` words apart; `rows` of the M are there.
// q: 8 words a packet, used up; affine: scale and bias of each.
template <uint F, uint R, uint M> FN void dot_packets(THREAD uint *q, const THREAD float *affine, const TG uint *x, uint stride, uint step, uint rows, THREAD float *acc)
{
  const uint N = R * M, pieces = packet_elements<F>() / 8, words = packet_words<F>() / pieces;
  float dot[N], sum[M];
#pragma unroll
  for (uint i = 0; i < N; i++) dot[i] = 0.0f;
#pragma unroll
  for (uint m = 0; m < M; m++) sum[m] = 0.0f;
  if (M < 4) {
#pragma unroll
    for (uint j = 0; j < pieces; j++) dot8<F, R, M>(q, j, x + j * step, stride, rows, dot, sum);
  } else { // a loop, or compilers take long; the next words move to the front, so that registers have fixed names
#pragma unroll 1
    for (uint j = 0; j < pieces; j++) {
      dot8<F, R, M>(q, 0, x + j * step, stride, rows, dot, sum);
#pragma unroll
      for (uint r = 0; r < R; r++) {
#pragma unroll
        for (uint i = 0; i + words < 4; i++) q[r * 8 + i] = q[r * 8 + i + words];
      }
    }
  }
#pragma unroll
  for (uint r = 0; r < R; r++) {
#pragma unroll
    for (uint m = 0; m < M; m++) {
      const uint i = r * M + m;
      acc[i] = F == Q4 || F == Q8 ? fma(affine[2 * r], dot[i], fma(affine[2 * r + 1], sum[m], acc[i])) : acc[i] + dot[i];
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

// Shares of a row's sum of squares: 8 of them, whoever computes them, so that the norm's bits do not depend on the
// threadgroup's size.
FN void square_shares(const DEVICE float *x, uint cols, TG float *shares, uint lane, uint simd, uint simds)
{
  for (uint share = simd; share < 8; share += simds) {
    float s = 0.0f;
    for (uint i = (share * 32 + lane) * 4; i < cols; i += 1024) {
      const float4 v = load4(x + i);
      s = fma(v.x, v.x, s); s = fma(v.y, v.y, s); s = fma(v.z, v.z, s); s = fma(v.w, v.w, s);
    }
    s = simd_sum(s);
    if (lane == 0) shares[share] = s;
  }
}

// 1 / sqrt(mean of squares + eps), from the shares.
FN float inverse_rms(const TG float *shares, uint cols, float eps)
{
  float s = 0.0f;
#pragma unroll
  for (uint i = 0; i < 8; i++) s += shares[i];
  return 1.0f / sqrt(s / float(cols) + eps);
}

// Where x comes from: bf16 rows, or the residual stream, which is normalized on the way.
struct GemvInput {
  const DEVICE uint *x;
  uint cols, rows;
  bool normed;
  const DEVICE float *norm; // the norm's weight
  const TG float *shares;   // of each row's squares
  float eps;
};

// Columns [first, first + columns) of x to the tile, in the order in which lanes take them: piece j of packet i lies
// where `lanes` lanes read neighbouring 16 bytes.
template <uint F> FN void stage_x(const THREAD GemvInput &in, uint first, uint columns, uint lanes, TG uint *tile, uint stride, uint tid, uint threads)
{
  const uint pieces = packet_elements<F>() / 8;
#pragma unroll 1
  for (uint m = 0; m < in.rows; m++) {
    const float s = in.normed ? inverse_rms(in.shares + m * 8, in.cols, in.eps) : 0.0f;
    for (uint u = tid; u < columns / 8; u += threads) {
      const uint i = u / pieces, at = (i / lanes * pieces + u % pieces) * lanes + i % lanes;
      TG uint *to = tile + m * stride + at * 4;
      const ulong from = ulong(m) * in.cols + first + u * 8;
      if (in.normed) {
        const DEVICE float *x = (const DEVICE float *)in.x + from, *w = in.norm + first + u * 8;
        const float4 a = load4(x), b = load4(x + 4), v = load4(w), z = load4(w + 4);
        store4(to, bf16_pair(a.x * s * v.x, a.y * s * v.y), bf16_pair(a.z * s * v.z, a.w * s * v.w),
               bf16_pair(b.x * s * z.x, b.y * s * z.y), bf16_pair(b.z * s * z.z, b.w * s * z.w));
      } else {
        const uint4 q = load4(in.x + from / 2);
        store4(to, q.x, q.y, q.z, q.w);
      }
    }
  }
}

// Where a lane stands: its rows of the matrix are first + r * beside, of which row_count are there.
struct GemvPlace {
  uint first, beside, row_count;
  uint lanes, part; // lanes of a row, and which of them this is
  uint tid, threads;
};

// Sums of R rows of weights with M rows of x, in every lane. The upper half of the R rows comes from b, starting over
// at `first`, if `paired`. TILE columns of x fit into the tile. The whole threadgroup comes here together.
template <uint F, uint R, uint M, uint TILE> FN void gemv_sums(const THREAD Rows &a, const THREAD Rows &b, bool paired, const THREAD GemvPlace &at, const THREAD GemvInput &in, TG uint *tile, THREAD float *acc)
{
  const uint elements = packet_elements<F>(), packets = in.cols / elements, stride = TILE / 2;
  const uint W = R * 8, A = R * 2;
  uint q[W], ahead[W], row[R];
  float affine[A], affine_ahead[A];
#pragma unroll
  for (uint r = 0; r < R; r++) {
    row[r] = min(at.first + (paired && r >= R / 2 ? r - R / 2 : r) * at.beside, at.row_count - 1);
    if (at.part < packets) load_packet<F>(r < R / 2 ? a : b, row[r], packets, at.part, q + r * 8, affine + r * 2);
  }
#pragma unroll
  for (uint i = 0; i < R * M; i++) acc[i] = 0.0f;
  for (uint first = 0; first < packets; first += TILE / elements) {
    const uint end = min(first + TILE / elements, packets);
    if (first > 0) tg_barrier(); // the tile is read no more
    stage_x<F>(in, first * elements, (end - first) * elements, at.lanes, tile, stride, at.tid, at.threads);
    tg_barrier();
    for (uint c = first; c < end; c += at.lanes) {
      const uint next = c + at.lanes + at.part;
      if (next < packets) {
#pragma unroll
        for (uint r = 0; r < R; r++) load_packet<F>(r < R / 2 ? a : b, row[r], packets, next, ahead + r * 8, affine_ahead + r * 2);
      }
      if (c + at.part < end)
        dot_packets<F, R, M>(q, affine, tile + ((c - first) * (elements / 8) + at.part) * 4, stride, at.lanes * 4, in.rows, acc);
#pragma unroll
      for (uint i = 0; i < R * 8; i++) q[i] = ahead[i];
#pragma unroll
      for (uint i = 0; i < R * 2; i++) affine[i] = affine_ahead[i];
    }
  }
  lanes_sum<R * M>(acc, at.lanes);
}

enum { STORE_BF16 = 0, STORE_F32 = 1, ADD_TO = 2, GATED = 3 }; // GemvMatrix.epilogue

// One element of the result. What is added to the residual stream, or multiplied with the gate, is rounded to bf16 first,
// as it is where these are kernels of their own.
FN void gemv_store(DEVICE uint *out, const DEVICE float *residual, uint epilogue, ulong i, float y, float up)
{
  if (epilogue == STORE_F32) ((DEVICE float *)out)[i] = y;
  else if (epilogue == ADD_TO) ((DEVICE float *)out)[i] = residual[i] + f32(to_bf16(y));
  else if (epilogue == GATED) ((DEVICE bf16 *)out)[i] = to_bf16(silu(f32(to_bf16(y))) * f32(to_bf16(up)));
  else ((DEVICE bf16 *)out)[i] = to_bf16(y);
}

template <uint R, uint M, uint TILE> FN void gemv(const DEVICE uint *x, const DEVICE uint *norm, const DEVICE uint *slab, DEVICE uint *out0, DEVICE uint *out1, DEVICE uint *out2, DEVICE uint *out3, DEVICE uint *out4, DEVICE uint *out5, const DEVICE float *residual, CONSTANT GemvArgs &p, TG uint *tile, TG float *shares, uint group, uint lane, uint simd, uint tid)
{
  GemvInput in;
  in.x = x;
  in.cols = p.cols;
  in.rows = p.rows;
  in.normed = p.normed != 0;
  in.norm = slab_f32(norm, p.norm);
  in.shares = shares;
  in.eps = p.eps;
  if (in.normed) {
#pragma unroll 1
    for (uint m = 0; m < p.rows; m++) square_shares((const DEVICE float *)x + ulong(m) * p.cols, p.cols, shares + m * 8, lane, simd, p.simds);
    tg_barrier();
  }
  // The matrix, and the rows of it that are this simdgroup's.
  uint i = 0, first = 0;
  while (i + 1 < p.count && group >= p.matrices[i].end) first = p.matrices[i++].end;
  const bool paired = p.matrices[i].epilogue == GATED;
  const uint lanes = p.matrices[i].lanes, each = paired ? R / 2 : R;
  GemvPlace at;
  at.lanes = lanes;
  at.beside = 32 / lanes;
  at.part = lane & (lanes - 1);
  at.first = ((group - first) * p.simds + simd) * each * at.beside + lane / lanes;
  at.row_count = p.matrices[i].weight.rows;
  at.tid = tid;
  at.threads = p.simds * 32;
  const Rows a = rows_of(slab, p.matrices[i].weight, 0);
  Rows b = a;
  if (paired) b = rows_of(slab, p.matrices[i].up, 0);
  const uint N = R * M, format = p.matrices[i].weight.format;
  float acc[N];
  if (format == Q4) gemv_sums<Q4, R, M, TILE>(a, b, paired, at, in, tile, acc);
  else if (format == Q8) gemv_sums<Q8, R, M, TILE>(a, b, paired, at, in, tile, acc);
  else if (format == BF16) gemv_sums<BF16, R, M, TILE>(a, b, paired, at, in, tile, acc);
  else gemv_sums<F32, R, M, TILE>(a, b, paired, at, in, tile, acc);
  // Each lane of a row stores some of its results; all have them all.
  DEVICE uint *out = i == 0 ? out0 : i == 1 ? out1 : i == 2 ? out2 : i == 3 ? out3 : i == 4 ? out4 : out5;
#pragma unroll
  for (uint r = 0; r < R; r++) {
#pragma unroll
    for (uint m = 0; m < M; m++) {
      const uint row = at.first + r * at.beside;
      if (r >= each || m >= p.rows || row >= at.row_count || ((r * M + m) & (lanes - 1)) != at.part) continue;
      gemv_store(out, residual, p.matrices[i].epilogue, ulong(m) * at.row_count + row, acc[r * M + m], acc[(r + R / 2) % R * M + m]);
    }
  }
}

// M rows of x at most, R rows of weights a lane, TILE columns of x at a time.
#define GEMV(name, M, R, TILE)                                                                                         \
  KERNEL(name, 256, IN(0, uint, x), IN(1, uint, norm), IN(2, uint, slab), OUT(3, uint, out0), OUT(4, uint, out1), OUT(5, uint, out2), \
         OUT(6, uint, out3), OUT(7, uint, out4), OUT(8, uint, out5), IN(9, float, residual), ARGS(10, GemvArgs, p))        \
  {                                                                                                                    \
    SHARED(uint, tile, M * TILE / 2);                                                                                  \
    SHARED(float, shares, M * 8);                                                                                      \
    gemv<R, M, TILE>(x, norm, slab, out0, out1, out2, out3, out4, out5, residual, p, tile, shares, k_group.x, k_lane,   \
                     k_simd, k_thread.x);                                                               \
  }

GEMV(gemv_1x2, 1, 2, 4096)
GEMV(gemv_1x4, 1, 4, 4096)
GEMV(gemv_2x2, 2, 2, 2048)
GEMV(gemv_4x2, 4, 2, 2048)
GEMV(gemv_8x2, 8, 2, 1024)
