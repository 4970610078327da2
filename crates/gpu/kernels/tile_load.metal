// What a matrix tile reads and writes, shared by all targets: rows of activations, rows of weights, what becomes of the
// result. A tile is out[M][N] = a[M][K] · w[N][K]ᵀ, a and w in bf16 and sums in f32; the loop over K has a file per target:
//
//   gemm_tile<M, N, F>(a, w, e, cols, mem, thread, lane, simd)
//
// by 128 threads (tiles by mma.sync and wgmma: gemm_mma.metal, gemm_wgmma.metal). `a` has row_of(a, r), `w` has open_row(cursor, w, r) with a Cursor<F>, `e` has
// drain<M, N>(e, tile, thread, threads).
// Rows beyond the last repeat it: their results are not kept.

// Eight bf16 in pairs.
struct Eight { uint w[4]; };

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

// ---- Weights: rows of one matrix, and a cursor on one of them

struct WeightRows { Rows base; uint first, rows, cols, format; };
// The first half of the tile's rows are of one matrix, the other half the same rows of another.
struct PairedRows { WeightRows low, high; uint half_rows; };

FN WeightRows weight_rows(const DEVICE uint *slab, CONSTANT Matrix &m, uint matrix, uint first)
{
  const WeightRows w = {rows_of(slab, m, matrix), first, m.rows, m.cols, m.format};
  return w;
}

// F is a Matrix.format, or ANY_FORMAT: looked up at each load, for formats that are rare.
enum { ANY_FORMAT = 4 };
template <uint F> struct Cursor {
  const DEVICE uint *codes;
  const DEVICE bf16 *scales;
  uint to_bias; // from a group's scale to its bias
  uint format;
};

template <uint F> FN uint format_of(const THREAD Cursor<F> &c) { return F == ANY_FORMAT ? c.format : F; }

template <uint F> FN void open_row(THREAD Cursor<F> &c, WeightRows w, uint r)
{
  const ulong row = min(w.first + r, w.rows - 1);
  c.format = w.format;
  const uint format = format_of(c);
  c.codes = w.base.codes + row * (format == Q4 ? w.cols / 8 : format == Q8 ? w.cols / 4 : format == BF16 ? w.cols / 2 : w.cols);
  c.scales = w.base.scales + row * (w.cols / GROUP);
  c.to_bias = uint(w.base.biases - w.base.scales);
}
template <uint F> FN void open_row(THREAD Cursor<F> &c, PairedRows w, uint r)
{
  if (r < w.half_rows) open_row(c, w.low, r);
  else open_row(c, w.high, r - w.half_rows);
}

// Eight neighbours from element k on, a multiple of 8. Loading and dequantizing are two steps, so that the loads of the
// next tile are in flight while this one is multiplied.
struct Fetched { uint w[8]; float scale, bias; };
template <uint F> FN Fetched fetch(const THREAD Cursor<F> &c, uint k)
{
  const uint format = format_of(c);
  Fetched f;
  if (format == Q4) f.w[0] = c.codes[k / 8];
  else if (format == Q8) {
    const uint2 q = load2(c.codes + k / 4);
    f.w[0] = q.x; f.w[1] = q.y;
  } else {
    const uint4 q = load4(c.codes + (format == BF16 ? k / 2 : k));
    f.w[0] = q.x; f.w[1] = q.y; f.w[2] = q.z; f.w[3] = q.w;
  }
  if (format == F32) {
    const uint4 q = load4(c.codes + k + 4);
    f.w[4] = q.x; f.w[5] = q.y; f.w[6] = q.z; f.w[7] = q.w;
  }
  if (format == Q4 || format == Q8) {
    f.scale = f32(c.scales[k / GROUP]);
    f.bias = f32(c.scales[k / GROUP + c.to_bias]);
  }
  return f;
}
// To bf16: scale * code + bias in f32, one rounding.
template <uint F> FN Eight unpack(const THREAD Cursor<F> &c, Fetched f)
{
  const uint format = format_of(c);
  Eight e;
  if (format == BF16) {
    for (uint i = 0; i < 4; i++) e.w[i] = f.w[i];
    return e;
  }
  float v[8];
  if (format == Q4) decode8<Q4>(f.w, 0, v);
  else if (format == Q8) decode8<Q8>(f.w, 0, v);
  else decode8<F32>(f.w, 0, v);
  if (format != F32)
    for (uint i = 0; i < 8; i++) v[i] = fma(f.scale, v[i], f.bias);
  for (uint i = 0; i < 4; i++) e.w[i] = pack2(v[2 * i], v[2 * i + 1]);
  return e;
}

// ---- A step of 32 of K by 128 threads: a thread has eight elements of a row of `a`, if there is one, and of N / 32 rows of `w`

template <uint N, uint F> struct StepLoads {
  Eight a;
  Fetched w[N / 32];
};

// On their way to registers.
template <uint N, uint F> FN void fetch_step(const DEVICE bf16 *x, bool has_row, const THREAD Cursor<F> *rows, uint k, THREAD StepLoads<N, F> &s)
{
  if (has_row) s.a = load_eight(x, k);
  for (uint j = 0; j < N / 32; j++) s.w[j] = fetch(rows[j], k);
}

// To threadgroup memory, dequantized, rows `line` words apart; zeros behind a row's end.
template <uint N, uint F>
FN void stage_step(const THREAD StepLoads<N, F> &s, bool has_row, bool there, const THREAD Cursor<F> *rows, TG uint *to_a, TG uint *to_w, uint line)
{
  if (has_row) {
    Eight v = zero_eight();
    if (there) v = s.a;
    store4(to_a, v.w[0], v.w[1], v.w[2], v.w[3]);
  }
  for (uint j = 0; j < N / 32; j++) {
    Eight v = zero_eight();
    if (there) v = unpack(rows[j], s.w[j]);
    store4(to_w + 32 * j * line, v.w[0], v.w[1], v.w[2], v.w[3]);
  }
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

// The same from row r on.
FN StoreRows rows_from(StoreRows e, uint r) { e.first += r; e.rows -= min(e.rows, r); return e; }
FN ScatterRows rows_from(ScatterRows e, uint r) { e.list += r; e.rows -= min(e.rows, r); return e; }

template <uint M, uint N, class E> FN void drain(E e, const TG float *tile, uint tid, uint threads)
{
  for (uint i = tid; i < M * N / 8; i += threads) {
    const uint r = i / (N / 8), c = i % (N / 8) * 8;
    if (r < e.rows) put(e, r, c, tile_eight(tile + r * (N + 4) + c));
  }
}
// The tile's first half of columns are gates of the second half: silu(gate) · up, scattered.
struct SiluScatter { ScatterRows to; };
FN SiluScatter rows_from(SiluScatter e, uint r) { e.to = rows_from(e.to, r); return e; }
template <uint M, uint N> FN void drain(SiluScatter e, const TG float *tile, uint tid, uint threads)
{
  for (uint i = tid; i < M * N / 16; i += threads) {
    const uint r = i / (N / 16), c = i % (N / 16) * 8;
    if (r >= e.to.rows) continue;
    Floats gate = tile_eight(tile + r * (N + 4) + c);
    const Floats up = tile_eight(tile + r * (N + 4) + N / 2 + c);
    for (uint j = 0; j < 8; j++) gate.v[j] = silu(gate.v[j]) * up.v[j];
    put(e.to, r, c, gate);
  }
}
