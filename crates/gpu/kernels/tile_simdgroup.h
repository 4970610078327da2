#if !defined(K_CUDA) && !defined(K_TENSOR) && !defined(K_PLAIN)
// Matrix tiles by 8x8 simdgroup matrices: Metal, and the host.
//
// A step of 32 of K: 128 threads fetch 8 elements each of a and 16 of w, dequantize them into threadgroup memory, and each of
// four simdgroups multiplies all M rows with its quarter of the columns. The next step's loads are issued before that.
#define TILE_STRIDE 40u   // elements from row to row: 32 and a pad that spreads rows over banks
#define TILE_LARGE 32u
#define TILE_WORDS(M, N) ((M) * ((N) + 4) > ((M) + (N)) * 20 ? (M) * ((N) + 4) : ((M) + (N)) * 20)

template <uint M, uint N, uint F, class A, class B, class E>
FN void gemm_tile(A a, B w, E e, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  const uint row = tid / 4, at = tid % 4 * 8;
  const DEVICE bf16 *x = row_of(a, row);
  Cursor<F> rows[N / 32];
  for (uint j = 0; j < N / 32; j++) open_row(rows[j], w, row + 32 * j);
  TG uint *to_a = mem + row * (TILE_STRIDE / 2) + at / 2;
  TG uint *to_w = to_a + M * (TILE_STRIDE / 2);
  const TG bf16 *from_a = (const TG bf16 *)mem;
  const TG bf16 *from_w = from_a + (M + simd * (N / 4)) * TILE_STRIDE;

  mat8f acc[M / 8][N / 32];
  for (uint i = 0; i < M / 8; i++)
    for (uint j = 0; j < N / 32; j++) acc[i][j] = mat8f_fill(0.0f);

  StepLoads<N, F> next;
  next.a = zero_eight();
  for (uint k = at;; k += 32) {
    const bool there = k < cols;
    if (there) fetch_step(x, row < M, rows, k, next);
    if (k != at) {   // the step before: multiplied while these loads are under way
      for (uint s = 0; s < 32; s += 8) {
        mat8b ma[M / 8], mw[N / 32];
        for (uint i = 0; i < M / 8; i++) simdgroup_load(ma[i], from_a + i * 8 * TILE_STRIDE + s, TILE_STRIDE);
        for (uint j = 0; j < N / 32; j++) simdgroup_load_transposed(mw[j], from_w + j * 8 * TILE_STRIDE + s, TILE_STRIDE);
        for (uint i = 0; i < M / 8; i++)
          for (uint j = 0; j < N / 32; j++) simdgroup_multiply_accumulate(acc[i][j], ma[i], mw[j], acc[i][j]);
      }
      tg_barrier();
    }
    if (k - at >= cols) break;
    stage_step(next, row < M, there, rows, to_a, to_w, TILE_STRIDE / 2);
    tg_barrier();
  }

  TG float *tile = (TG float *)mem;
  for (uint i = 0; i < M / 8; i++)
    for (uint j = 0; j < N / 32; j++) simdgroup_store(acc[i][j], tile + i * 8 * (N + 4) + simd * (N / 4) + j * 8, N + 4);
  tg_barrier();
  drain<M, N>(e, tile, tid, 128u);
}
#endif
