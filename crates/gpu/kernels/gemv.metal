// y = W x for 1 to 8 rows of x: weights stream through registers once, x waits in threadgroup memory.
//
// A row of W is cut into packets of 16 bytes (f32: two of them): 32, 16, 8 or 8 elements. `lanes` neighbouring
// lanes (a power of two) share a row and take neighbouring packets, so that a simdgroup reads whole lines; 32 / lanes
// rows lie beside each other in a simdgroup, and each lane works on R such rows at once, to have R packets in
// flight. The order of a sum depends on the matrix alone: neither on M, R nor on who shares the threadgroup.
// Bytes: the matrices once, codes and scales; x once a threadgroup, out of a cache.

// Where a lane stands: its rows of the matrix are first + r * beside, of which row_count are there.
struct GemvPlace {
  uint first, beside, row_count;
  uint lanes, part; // lanes of a row, and which of them this is
  uint tid, threads;
};

// The lane's row of weights number r; beyond the last one the last one.
template <uint R> FN uint gemv_row(const THREAD GemvPlace &at, bool paired, uint r)
{
  return min(at.first + (paired && r >= R / 2 ? r - R / 2 : r) * at.beside, at.row_count - 1);
}

// Packet i of each of the lane's R rows. The upper half of them comes from b, starting over at `first`, if `paired`.
template <uint F, uint R> FN void load_rows(const THREAD Rows &a, const THREAD Rows &b, bool paired, const THREAD GemvPlace &at, uint packets, uint i, THREAD uint *q, THREAD float *affine)
{
#pragma unroll
  for (uint r = 0; r < R; r++) load_packet<F>(r < R / 2 ? a : b, gemv_row<R>(at, paired, r), packets, i, q + r * 8, affine + r * 2);
}

// Whether packets are loaded ahead of their use: more rows of x hide the loads, f32 is rare, and registers are scarce.
template <uint F, uint M> FN bool loads_early() { return M < 8 && F != F32; }

// The first packets of each row, which wait for nothing; and on their way into the cache what follows: `blocks` blocks of rows,
// `block` rows apart. A packet's two neighbours share a sector.
template <uint F, uint R, uint M> FN void load_first(const THREAD Rows &a, const THREAD Rows &b, bool paired, const THREAD GemvPlace &at, uint cols, uint blocks, uint block, THREAD uint *q, THREAD float *affine)
{
  const uint packets = cols / packet_elements<F>();
  if (loads_early<F, M>() && at.part < packets) load_rows<F, R>(a, b, paired, at, packets, at.part, q, affine);
  GemvPlace next = at;
  for (uint k = 0; k < blocks; k++) {
    for (uint i = at.part + (k == 0 ? at.lanes : 0); i < packets; i += at.lanes) {
      if ((i & 1) != 0) continue;
#pragma unroll
      for (uint r = 0; r < R; r++) prefetch_packet<F>(r < R / 2 ? a : b, gemv_row<R>(next, paired, r), packets, i);
    }
    next.first += block;
  }
}

// Sums of R rows of weights with M rows of x, in every lane. TILE columns of x fit into the tile. The whole threadgroup
// comes here together, once for each of its blocks of rows: `again` after the first time. q and affine hold the first
// packets; the next block's, `ahead` rows on, are left there, so that loads never pause; 0: there is no next one.
template <bool WIDE, uint F, uint R, uint M, uint TILE> FN void gemv_block(const THREAD Rows &a, const THREAD Rows &b, bool paired, const THREAD GemvPlace &at, bool again, uint ahead, const THREAD GemvInput &in, TG uint *tile, TG float *sums, THREAD uint *q, THREAD float *affine, THREAD float *acc)
{
  const uint elements = packet_elements<F>(), packets = in.cols / elements, stride = TILE / (WIDE ? 1 : 2);
  const uint W = R * 8, A = R * 2;
  uint q_next[W];
  float affine_next[A];
  GemvPlace next = at;
  next.first += ahead;
  const bool EARLY = loads_early<F, M>();
#pragma unroll
  for (uint i = 0; i < R * M; i++) acc[i] = 0.0f;
  for (uint first = 0; first < packets; first += TILE / elements) {
    const uint end = min(first + TILE / elements, packets);
    if (!again || in.cols > TILE) {
      if (again || first > 0) tg_barrier(); // the tile is read no more
      stage_x<WIDE, F>(in, first * elements, (end - first) * elements, at.lanes, tile, stride, sums, TILE / 8, at.tid, at.threads);
      tg_barrier();
    }
    for (uint c = first; c < end; c += at.lanes) {
      const uint i = c + at.lanes + at.part;
      if (!EARLY && c + at.part < packets) load_rows<F, R>(a, b, paired, at, packets, c + at.part, q, affine);
      if (EARLY && i < packets) load_rows<F, R>(a, b, paired, at, packets, i, q_next, affine_next);
      else if (EARLY && ahead > 0 && c + at.lanes >= packets && at.part < packets) load_rows<F, R>(a, b, paired, next, packets, at.part, q_next, affine_next);
      if (c + at.part < end) {
        const TG uint *x = tile + ((c - first) * (elements / 8) * (piece_words<WIDE>() / 4) + at.part) * 4;
        dot_packets<WIDE, F, R, M>(q, affine, x, stride, at.lanes, sums + (c - first + at.part) * (elements / 8), TILE / 8, in.rows, acc);
      }
      if (EARLY) {
#pragma unroll
        for (uint w = 0; w < W; w++) q[w] = q_next[w];
#pragma unroll
        for (uint w = 0; w < A; w++) affine[w] = affine_next[w];
      }
    }
  }
  lanes_sum<R * M>(acc, at.lanes);
}

enum { STORE_BF16 = 0, STORE_F32 = 1, ADD_TO = 2, GATED = 3 }; // GemvMatrix.epilogue

// One element of the result. What is added to the residual stream, or multiplied with the gate, is rounded to bf16 first,
// as it is where these are kernels of their own.
FN void gemv_store(DEVICE uint *out, float base, uint epilogue, ulong i, float y, float up)
{
  if (epilogue == STORE_F32) ((DEVICE float *)out)[i] = y;
  else if (epilogue == ADD_TO) ((DEVICE float *)out)[i] = base + f32(to_bf16(y));
  else if (epilogue == GATED) ((DEVICE bf16 *)out)[i] = to_bf16(silu(f32(to_bf16(y))) * f32(to_bf16(up)));
  else ((DEVICE bf16 *)out)[i] = to_bf16(y);
}

template <bool WIDE, uint R, uint M, uint TILE> FN void gemv(const DEVICE uint *x, const DEVICE uint *norm, const DEVICE uint *slab, DEVICE uint *out0, DEVICE uint *out1, DEVICE uint *out2, DEVICE uint *out3, DEVICE uint *out4, DEVICE uint *out5, const DEVICE float *residual, DEVICE uint *normed, CONSTANT GemvArgs &p, TG uint *tile, TG float *sums, TG float *shares, uint group, uint lane, uint simd, uint tid)
{
  GemvInput in;
  in.x = x;
  in.cols = p.cols;
  in.rows = p.rows;
  in.normed = p.normed != 0;
  in.norm = slab_f32(norm, p.norm);
  in.shares = shares;
  in.eps = p.eps;
  in.normed_out = normed;
  in.keeps = p.keeps_normed != 0 && group == 0;
  // The matrix, and the rows of it that are this simdgroup's: `repeat` times as many as its lanes take at once.
  uint i = 0, first = 0;
  while (i + 1 < p.count && group >= p.matrices[i].end) first = p.matrices[i++].end;
  const bool paired = p.matrices[i].epilogue == GATED;
  const uint lanes = p.matrices[i].lanes, each = paired ? R / 2 : R;
  GemvPlace at;
  at.lanes = lanes;
  at.beside = 32 / lanes;
  at.part = lane & (lanes - 1);
  const uint block = p.simds * each * at.beside;
  at.first = (group - first) * p.repeat * block + simd * each * at.beside + lane / lanes;
  at.row_count = p.matrices[i].weight.rows;
  at.tid = tid;
  at.threads = p.simds * 32;
  const Rows a = rows_of(slab, p.matrices[i].weight, 0);
  Rows b = a;
  if (paired) b = rows_of(slab, p.matrices[i].up, 0);
  DEVICE uint *out = i == 0 ? out0 : i == 1 ? out1 : i == 2 ? out2 : i == 3 ? out3 : i == 4 ? out4 : out5;
  const uint N = R * M, W = R * 8, A = R * 2, format = p.matrices[i].weight.format, epilogue = p.matrices[i].epilogue;
  uint q[W];
  float affine[A], acc[N];
  // A matrix's last threadgroup may have fewer: what lies behind the last row is not loaded once more.
  const uint blocks = min(p.repeat, (at.row_count - (group - first) * p.repeat * block + block - 1) / block), soon = min(blocks, 2u);
  if (format == Q4) load_first<Q4, R, M>(a, b, paired, at, p.cols, soon, block, q, affine);
  else if (format == Q8) load_first<Q8, R, M>(a, b, paired, at, p.cols, soon, block, q, affine);
  else if (format == BF16) load_first<BF16, R, M>(a, b, paired, at, p.cols, soon, block, q, affine);
  else load_first<F32, R, M>(a, b, paired, at, p.cols, soon, block, q, affine);
  if (in.normed) for (uint u = tid * 8; u < p.cols; u += at.threads * 8) prefetch(in.norm + u);
  inputs_ready();
  // Where a lane stores one result at most, what that is added to is fetched while the sums are made.
  const bool single = lanes >= N, adds = single && epilogue == ADD_TO && at.part < N && at.part % M < p.rows;
  if (in.normed) {
#pragma unroll 1
    for (uint m = 0; m < p.rows; m++) square_shares((const DEVICE float *)x + ulong(m) * p.cols, p.cols, shares + m * 8, lane, simd, p.simds);
    tg_barrier();
  }
#pragma unroll 1
  for (uint k = 0; k < blocks; k++) {
    const uint ahead = k + 1 < blocks ? block : 0, mine = at.first + at.part / M * at.beside;
    float base = 0.0f;
    if (adds && mine < at.row_count) base = residual[ulong(at.part % M) * at.row_count + mine];
    if (format == Q4) gemv_block<WIDE, Q4, R, M, TILE>(a, b, paired, at, k > 0, ahead, in, tile, sums, q, affine, acc);
    else if (format == Q8) gemv_block<WIDE, Q8, R, M, TILE>(a, b, paired, at, k > 0, ahead, in, tile, sums, q, affine, acc);
    else if (format == BF16) gemv_block<WIDE, BF16, R, M, TILE>(a, b, paired, at, k > 0, ahead, in, tile, sums, q, affine, acc);
    else gemv_block<WIDE, F32, R, M, TILE>(a, b, paired, at, k > 0, ahead, in, tile, sums, q, affine, acc);
    // Each lane of a row stores some of its results; all have them all.
#pragma unroll
    for (uint r = 0; r < R; r++) {
#pragma unroll
      for (uint m = 0; m < M; m++) {
        const uint row = at.first + r * at.beside;
        if (r >= each || m >= p.rows || row >= at.row_count || ((r * M + m) & (lanes - 1)) != at.part) continue;
        const ulong to = ulong(m) * at.row_count + row;
        if (epilogue == ADD_TO && !single) base = residual[to];
        gemv_store(out, base, epilogue, to, acc[r * M + m], acc[(r + R / 2) % R * M + m]);
      }
    }
    at.first += block;
  }
}

#define GEMV_OPERANDS                                                                                                  \
  IN(0, uint, x), IN(1, uint, norm), IN(2, uint, slab), OUT(3, uint, out0), OUT(4, uint, out1), OUT(5, uint, out2),     \
  OUT(6, uint, out3), OUT(7, uint, out4), OUT(8, uint, out5), IN(9, float, residual), OUT(10, uint, normed), ARGS(11, GemvArgs, p)

// M rows of x at most, R rows of weights a lane, TILE columns of x at a time, as f32 if WIDE. Threadgroups have 256 threads at
// most; twice as many are declared, so that compilers leave registers for two threadgroups a core.
#define GEMV(name, WIDE, M, R, TILE)                                                                                   \
  KERNEL(name, 512, GEMV_OPERANDS)                                                                                     \
  {                                                                                                                    \
    SHARED(uint, tile, M * TILE / (WIDE ? 1 : 2));                                                                     \
    SHARED(float, sums, M * TILE / 8);                                                                                 \
    SHARED(float, shares, M * 8);                                                                                      \
    gemv<WIDE, R, M, TILE>(x, norm, slab, out0, out1, out2, out3, out4, out5, residual, normed, p, tile, sums, shares, k_group.x, \
                             k_lane, k_simd, k_thread.x);                                                              \
  }

GEMV(gemv_1x2, true, 1, 2, 4096)
GEMV(gemv_1x4, true, 1, 4, 4096)
GEMV(gemv_2x2, true, 2, 2, 2048)
GEMV(gemv_4x2, false, 4, 2, 2048)
GEMV(gemv_8x2, false, 8, 2, 1024)
