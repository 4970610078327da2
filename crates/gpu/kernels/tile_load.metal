// What a matrix tile reads and writes, shared by all targets: rows of activations, rows of weights, what becomes of the
// result. A tile is out[M][N] = a[M][K] · w[N][K]ᵀ, a and w in bf16 and sums in f32; the loop over K has a file per target:
//
//   gemm_tile<M, N, W>(a, w, e, cols, mem, thread, lane, simd)
//
// by 128 threads. `a` has row_of(a, r), `w` has open_row(cursor, w, r) with a cursor W, `e` has drain<M, N>(e, tile, thread).
// Rows beyond the last repeat it: their results are not kept.

// Eight bf16 in pairs, and what they are made of before dequantization.
struct Eight { uint w[4]; };
struct Fetched { uint w[8]; };

FN Eight zero_eight() { const Eight e = {{0, 0, 0, 0}}; return e; }

// ---- Activations

struct DenseRows { const DEVICE bf16 *x; uint first, rows, cols; };
FN const DEVICE bf16 *row_of(DenseRows a, uint r) { return a.x + ulong(a.first + min(r, a.rows - 1)) * a.cols; }

// Row r is row list[r] / share of x.
struct ListedRows { const DEVICE bf16 *x; const DEVICE uint *list; uint rows, cols, share; };
FN const DEVICE bf16 *row_of(ListedRows a, uint r) { return a.x + ulong(a.list[min(r, a.rows - 1)] / a.share) * a.cols; }

FN Eight load_eight(const DEVICE bf16 *row, uint k)
{
  const uint4 x = load4((const DEVICE uint *)(row + k));
  const Eight e = {{x.x, x.y, x.z, x.w}};
  return e;
}

// ---- Weights: a cursor on one row for each format

struct WeightRows { const DEVICE uint *codes; const DEVICE bf16 *scales; const DEVICE bf16 *biases; uint first, rows, cols, format; };
// The first half of the tile's rows are of one matrix, the other half the same rows of another.
struct PairedRows { WeightRows low, high; uint half_rows; };

FN WeightRows weight_rows(const DEVICE uint *slab, CONSTANT Matrix &m, uint matrix, uint first)
{
  const uint scales = matrix * m.scales_stride;
  const WeightRows w = {slab_words(slab, m.codes + matrix * m.codes_stride), slab_bf16(slab, m.scales + scales),
                        slab_bf16(slab, m.biases + scales), first, m.rows, m.cols, m.format};
  return w;
}

struct Q4Row { const DEVICE uint *codes; const DEVICE bf16 *scales; const DEVICE bf16 *biases; };
struct Q8Row { const DEVICE uint *codes; const DEVICE bf16 *scales; const DEVICE bf16 *biases; };
struct Bf16Row { const DEVICE uint *codes; };
// Whatever the format: a branch at each load.
struct AnyRow { const DEVICE uint *codes; const DEVICE bf16 *scales; const DEVICE bf16 *biases; uint format; };

FN uint row_in(WeightRows w, uint r) { return min(w.first + r, w.rows - 1); }

FN void open_row(THREAD Q4Row &c, WeightRows w, uint r)
{
  const ulong row = row_in(w, r);
  c.codes = w.codes + row * (w.cols / 8);
  c.scales = w.scales + row * (w.cols / GROUP);
  c.biases = w.biases + row * (w.cols / GROUP);
}
FN void open_row(THREAD Q8Row &c, WeightRows w, uint r)
{
  const ulong row = row_in(w, r);
  c.codes = w.codes + row * (w.cols / 4);
  c.scales = w.scales + row * (w.cols / GROUP);
  c.biases = w.biases + row * (w.cols / GROUP);
}
FN void open_row(THREAD Bf16Row &c, WeightRows w, uint r) { c.codes = w.codes + ulong(row_in(w, r)) * (w.cols / 2); }
FN void open_row(THREAD AnyRow &c, WeightRows w, uint r)
{
  const ulong row = row_in(w, r);
  c.format = w.format;
  c.codes = w.codes + row * (w.format == 0 ? w.cols / 8 : w.format == 1 ? w.cols / 4 : w.format == 2 ? w.cols / 2 : w.cols);
  c.scales = w.scales + row * (w.cols / GROUP);
  c.biases = w.biases + row * (w.cols / GROUP);
}
template <class W> FN void open_row(THREAD W &c, PairedRows w, uint r)
{
  if (r < w.half_rows) open_row(c, w.low, r);
  else open_row(c, w.high, r - w.half_rows);
}

// Eight neighbours from element k on, a multiple of 8. Loading and dequantizing are two steps, so that the loads of the
// next tile are in flight while this one is multiplied.
FN Fetched fetch(const THREAD Q4Row &c, uint k)
{
  const Fetched f = {{c.codes[k / 8], as_u(f32(c.scales[k / GROUP])), as_u(f32(c.biases[k / GROUP])), 0, 0, 0, 0, 0}};
  return f;
}
FN Fetched fetch(const THREAD Q8Row &c, uint k)
{
  const uint2 q = load2(c.codes + k / 4);
  const Fetched f = {{q.x, as_u(f32(c.scales[k / GROUP])), as_u(f32(c.biases[k / GROUP])), q.y, 0, 0, 0, 0}};
  return f;
}
FN Fetched fetch(const THREAD Bf16Row &c, uint k)
{
  const uint4 x = load4(c.codes + k / 2);
  const Fetched f = {{x.x, x.y, x.z, x.w, 0, 0, 0, 0}};
  return f;
}
FN Fetched fetch(const THREAD AnyRow &c, uint k)
{
  if (c.format == 0) { const Q4Row q = {c.codes, c.scales, c.biases}; return fetch(q, k); }
  if (c.format == 1) { const Q8Row q = {c.codes, c.scales, c.biases}; return fetch(q, k); }
  if (c.format == 2) { const Bf16Row q = {c.codes}; return fetch(q, k); }
  const uint4 x = load4(c.codes + k), y = load4(c.codes + k + 4);
  const Fetched f = {{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w}};
  return f;
}

// The number in some bits of the low 16 of a word, in place: 2^23 + n as a float has n as its low bits. No shift, no
// conversion instruction; the place's power of two goes into the scale, which is exact.
FN float in_place(uint word, uint mask) { return as_f((word & mask) | 0x4b000000u) - 8388608.0f; }

// Four 4-bit weights from the low half of a word: scale · code + bias in f32, one rounding.
FN uint2 dequantize_four(uint word, float scale, float bias)
{
  uint2 pairs;
  pairs.x = pack2(fma(in_place(word, 0xfu), scale, bias), fma(in_place(word, 0xf0u), scale * 0.0625f, bias));
  pairs.y = pack2(fma(in_place(word, 0xf00u), scale * 0.00390625f, bias), fma(in_place(word, 0xf000u), scale * 0.000244140625f, bias));
  return pairs;
}
FN uint dequantize_two(uint word, float scale, float bias)
{
  return pack2(fma(in_place(word, 0xffu), scale, bias), fma(in_place(word, 0xff00u), scale * 0.00390625f, bias));
}
FN Eight unpack(const THREAD Q4Row &c, Fetched f)
{
  const float scale = as_f(f.w[1]), bias = as_f(f.w[2]);
  const uint2 low = dequantize_four(f.w[0], scale, bias), high = dequantize_four(f.w[0] >> 16, scale, bias);
  const Eight e = {{low.x, low.y, high.x, high.y}};
  return e;
}
FN Eight unpack(const THREAD Q8Row &c, Fetched f)
{
  const float scale = as_f(f.w[1]), bias = as_f(f.w[2]);
  const Eight e = {{dequantize_two(f.w[0], scale, bias), dequantize_two(f.w[0] >> 16, scale, bias),
                    dequantize_two(f.w[3], scale, bias), dequantize_two(f.w[3] >> 16, scale, bias)}};
  return e;
}
FN Eight unpack(const THREAD Bf16Row &c, Fetched f)
{
  const Eight e = {{f.w[0], f.w[1], f.w[2], f.w[3]}};
  return e;
}
FN Eight unpack(const THREAD AnyRow &c, Fetched f)
{
  const Q4Row q4 = {c.codes, c.scales, c.biases};
  const Q8Row q8 = {c.codes, c.scales, c.biases};
  const Bf16Row dense = {c.codes};
  if (c.format == 0) return unpack(q4, f);
  if (c.format == 1) return unpack(q8, f);
  if (c.format == 2) return unpack(dense, f);
  const Eight e = {{pack2(as_f(f.w[0]), as_f(f.w[1])), pack2(as_f(f.w[2]), as_f(f.w[3])),
                    pack2(as_f(f.w[4]), as_f(f.w[5])), pack2(as_f(f.w[6]), as_f(f.w[7]))}};
  return e;
}

// ---- What becomes of a tile: it lies in threadgroup memory as f32, rows of N + 4

struct Floats { float v[8]; };

FN Floats tile_eight(const TG float *p)
{
  const float4 a = load4(p), b = load4(p + 4);
  const Floats f = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  return f;
}
FN Floats eight_floats(Eight e)
{
  const Floats f = {{bf16_low(e.w[0]), bf16_high(e.w[0]), bf16_low(e.w[1]), bf16_high(e.w[1]), bf16_low(e.w[2]), bf16_high(e.w[2]),
                     bf16_low(e.w[3]), bf16_high(e.w[3])}};
  return f;
}
FN Floats get_bf16(const DEVICE bf16 *row, uint col, uint cols)
{
  if (cols % 8 == 0) return eight_floats(load_eight(row, col));
  Floats f = {{0, 0, 0, 0, 0, 0, 0, 0}};
  for (uint i = 0; i < 8; i++)
    if (col + i < cols) f.v[i] = f32(row[col + i]);
  return f;
}
FN Floats get_f32(const DEVICE float *row, uint col, uint cols)
{
  Floats f = {{0, 0, 0, 0, 0, 0, 0, 0}};
  if (cols % 8 == 0) {
    const float4 a = load4(row + col), b = load4(row + col + 4);
    f.v[0] = a.x; f.v[1] = a.y; f.v[2] = a.z; f.v[3] = a.w; f.v[4] = b.x; f.v[5] = b.y; f.v[6] = b.z; f.v[7] = b.w;
  } else
    for (uint i = 0; i < 8; i++)
      if (col + i < cols) f.v[i] = row[col + i];
  return f;
}
// Columns from `col` on of a row that has `cols`; rows of a multiple of 8 are stored 16 bytes at a time.
FN void put_bf16(DEVICE bf16 *row, uint col, uint cols, Floats f)
{
  if (col >= cols) return;
  if (cols % 8 == 0)
    store4((DEVICE uint *)(row + col), pack2(f.v[0], f.v[1]), pack2(f.v[2], f.v[3]), pack2(f.v[4], f.v[5]),
           pack2(f.v[6], f.v[7]));
  else
    for (uint i = 0; i < 8; i++)
      if (col + i < cols) row[col + i] = to_bf16(f.v[i]);
}
FN void put_f32(DEVICE float *row, uint col, uint cols, Floats f)
{
  if (col >= cols) return;
  if (cols % 8 == 0) {
    store4(row + col, f.v[0], f.v[1], f.v[2], f.v[3]);
    store4(row + col + 4, f.v[4], f.v[5], f.v[6], f.v[7]);
  } else
    for (uint i = 0; i < 8; i++)
      if (col + i < cols) row[col + i] = f.v[i];
}

// Dense rows: as bf16 (0), as f32 (1), added to an f32 residual (2).
struct StoreRows { DEVICE uint *out; const DEVICE float *residual; uint first, rows, col, cols, store; };
FN void put(StoreRows e, uint r, uint c, Floats f)
{
  const uint col = e.col + c;
  const ulong at = ulong(e.first + r) * e.cols;
  if (e.store == 0) { put_bf16((DEVICE bf16 *)e.out + at, col, e.cols, f); return; }
  if (col >= e.cols) return;
  if (e.store == 2) {
    const Floats old = get_f32(e.residual + at, col, e.cols);
    for (uint i = 0; i < 8; i++) f.v[i] += old.v[i];
  }
  put_f32((DEVICE float *)e.out + at, col, e.cols, f);
}
// Row r goes to row list[r].
struct ScatterRows { DEVICE bf16 *out; const DEVICE uint *list; uint rows, col, cols; };
FN void put(ScatterRows e, uint r, uint c, Floats f) { put_bf16(e.out + ulong(e.list[r]) * e.cols, e.col + c, e.cols, f); }

template <uint M, uint N, class E> FN void drain(E e, const TG float *tile, uint tid)
{
  for (uint i = tid; i < M * N / 8; i += 128) {
    const uint r = i / (N / 8), c = i % (N / 8) * 8;
    if (r < e.rows) put(e, r, c, tile_eight(tile + r * (N + 4) + c));
  }
}
// The tile's first half of columns are gates of the second half: silu(gate) · up, scattered.
struct SiluScatter { ScatterRows to; };
template <uint M, uint N> FN void drain(SiluScatter e, const TG float *tile, uint tid)
{
  for (uint i = tid; i < M * N / 16; i += 128) {
    const uint r = i / (N / 16), c = i % (N / 16) * 8;
    if (r >= e.to.rows) continue;
    Floats gate = tile_eight(tile + r * (N + 4) + c);
    const Floats up = tile_eight(tile + r * (N + 4) + N / 2 + c);
    for (uint j = 0; j < 8; j++) gate.v[j] = silu(gate.v[j]) * up.v[j];
    put(e.to, r, c, gate);
  }
}
