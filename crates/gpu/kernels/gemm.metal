// Matrix products for many rows: out[row][n] = Σ_k x[row][k] · w[n][k].
//
// `blocks` blocks of many rows, then some of 16 (the host's policy), times N columns. Weights are read once a block of rows, from L2 but
// for the first; x and out once a block of columns.

// Kind says which loop multiplies: the one of the platform's tile_*.h, by mma.sync (gemm_mma.metal) or by wgmma (gemm_wgmma.metal).
template <class Kind>
FN void gemm_rows(Kind kind, const DEVICE uint *slab, const DEVICE bf16 *x, const DEVICE float *residual, DEVICE uint *out, CONSTANT GemmArgs &p,
                  TG uint *mem, uint column_block, uint row_block, uint tid, uint lane, uint simd)
{
  column_block += p.first[0];
  row_block += p.first[1];
  const bool tail = row_block >= p.blocks;
  const uint first = tail ? p.blocks * large_rows(kind) + (row_block - p.blocks) * 16 : row_block * large_rows(kind);
  const uint rows = min(p.rows - first, tail ? 16u : large_rows(kind)), col = column_block * Kind::COLUMNS;
  const DenseRows a = {x, first, rows, p.w.cols};
  const StoreRows e = {out, residual, first, rows, col, p.w.rows, p.store};
  run_tile(kind, !tail, a, weight_rows(slab, p.w, 0, col), e, p.w.cols, mem, tid, lane, simd);
}

#define GEMM_OPERANDS IN(0, uint, slab), IN(1, bf16, x), IN(2, float, residual), OUT(3, uint, out), ARGS(4, GemmArgs, p)

#ifndef K_CUDA
template <uint N, uint F> struct SimdgroupTile { enum { COLUMNS = N }; };
template <uint N, uint F> FN uint large_rows(SimdgroupTile<N, F>) { return TILE_LARGE; }

template <uint N, uint F, class A, class B, class E>
FN void run_tile(SimdgroupTile<N, F>, bool large, A a, B w, E e, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  if (large) gemm_tile<TILE_LARGE, N, F>(a, w, e, cols, mem, tid, lane, simd);
  else gemm_tile<16, N, F>(a, w, e, cols, mem, tid, lane, simd);
}

#define GEMM_WORDS(N) (TILE_WORDS(TILE_LARGE, N) > TILE_WORDS(16, N) ? TILE_WORDS(TILE_LARGE, N) : TILE_WORDS(16, N))
#define GEMM(name, F, N) \
  KERNEL(name, 128, GEMM_OPERANDS) \
  { \
    SHARED(uint, mem, GEMM_WORDS(N)); \
    gemm_rows(SimdgroupTile<N, F>(), slab, x, residual, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd); \
  }
GEMM(gemm_q4_n64, Q4, 64)
GEMM(gemm_q4_n32, Q4, 32)
GEMM(gemm_q8_n64, Q8, 64)
GEMM(gemm_q8_n32, Q8, 32)
GEMM(gemm_bf16_n64, BF16, 64)
GEMM(gemm_bf16_n32, BF16, 32)
GEMM(gemm_any_n32, ANY_FORMAT, 32)
#endif

// Expands rows of a weight to bf16, eight elements a thread: the way without dequantization in the product.
KERNEL(dequantize, 256, IN(0, uint, slab), OUT(1, uint, out), ARGS(2, DequantizeArgs, p))
{
  const uint chunks = p.w.cols / 8, i = k_group.x * 256 + k_thread.x, row = k_group.y, matrix = k_group.z;
  if (i >= chunks) return;
  Cursor<ANY_FORMAT> c;
  open_row(c, weight_rows(slab, p.w, matrix, 0), row);
  const Eight v = unpack(c, fetch(c, i * 8));
  store4(out + ((ulong(matrix) * p.w.rows + row) * chunks + i) * 4, v.w[0], v.w[1], v.w[2], v.w[3]);
}
