#if defined(K_CUDA) || defined(K_MMA)
// Matrix tiles by mma.sync: two buffers in shared memory, a step of 64 of K, of 32 for the largest tile. Activations come by
// cp.async; weights go through registers, are loaded one step ahead and dequantized on the way. One barrier a step.
#define TILE_LARGE 64u    // dequantizing a weight costs as much as a few rows' products with it
#define TILE_STEP(M) ((M) > 32 ? 32u : 64u)
#define TILE_STRIDE(M) (TILE_STEP(M) + 8u)   // a pad of 16 bytes: the eight rows of an ldmatrix lie in different banks
#define TILE_BUFFER(M, N) (((M) + (N)) * (TILE_STRIDE(M) / 2))
#define TILE_WORDS(M, N) (2 * TILE_BUFFER(M, N) > (M) * ((N) + 4) ? 2 * TILE_BUFFER(M, N) : (M) * ((N) + 4))

#ifdef K_CUDA
// Four 8x8 matrices, whose rows lie where lanes 0 to 7, 8 to 15, ... say.
FN void load_matrices(THREAD uint (&r)[4], uint from)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
#endif

template <uint M, uint N, uint F, class A, class B, class E>
FN void gemm_tile(A a, B w, E e, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  // Eight elements a thread: 16 or 32 rows at a time.
  constexpr uint STEP = TILE_STEP(M), STRIDE = TILE_STRIDE(M), BUFFER = TILE_BUFFER(M, N);
  constexpr uint AT_ONCE = 1024 / STEP, ROWS_A = M / AT_ONCE, ROWS_W = N / AT_ONCE, ROWS = M / 16, TILES = N / 32;
  const uint row = tid / (STEP / 8), at = tid % (STEP / 8) * 8;
  const DEVICE bf16 *x[ROWS_A];
  Cursor<F> rows[ROWS_W];
#pragma unroll
  for (uint i = 0; i < ROWS_A; i++) x[i] = row_of(a, row + AT_ONCE * i);
#pragma unroll
  for (uint j = 0; j < ROWS_W; j++) open_row(rows[j], w, row + AT_ONCE * j);
  TG uint *to_a = mem + row * (STRIDE / 2) + at / 2;
  TG uint *to_w = to_a + M * (STRIDE / 2);
  // ldmatrix takes a row address from each lane: of a, 16 rows and both halves of 16 columns; of w, 8 rows and four eighths.
  const TG bf16 *from_a = (const TG bf16 *)mem + lane % 16 * STRIDE + lane / 16 * 8;
  const TG bf16 *from_w = (const TG bf16 *)mem + (M + simd * (N / 4) + lane % 8) * STRIDE + lane / 8 * 8;

  float acc[ROWS][TILES][4];
#pragma unroll
  for (uint i = 0; i < ROWS; i++)
#pragma unroll
    for (uint j = 0; j < TILES; j++)
#pragma unroll
      for (uint q = 0; q < 4; q++) acc[i][j][q] = 0.0f;

  Fetched next[ROWS_W];
#pragma unroll
  for (uint i = 0; i < ROWS_A; i++) copy_async(to_a + i * AT_ONCE * (STRIDE / 2), x[i] + (at < cols ? at : 0), at < cols);
  if (at < cols)
#pragma unroll
    for (uint j = 0; j < ROWS_W; j++) next[j] = fetch(rows[j], at);

  uint buffer = 0;
  for (uint k0 = 0; k0 < cols; k0 += STEP, buffer ^= 1) {
#pragma unroll
    for (uint j = 0; j < ROWS_W; j++) {
      Eight v = zero_eight();
      if (k0 + at < cols) v = unpack(rows[j], next[j]);
      store4(to_w + buffer * BUFFER + j * AT_ONCE * (STRIDE / 2), v.w[0], v.w[1], v.w[2], v.w[3]);
    }
    copy_wait();
    tg_barrier();   // this buffer is full, and the other one is no longer read
    const uint k = k0 + STEP + at;
    if (k0 + STEP < cols) {
#pragma unroll
      for (uint i = 0; i < ROWS_A; i++)
        copy_async(to_a + (buffer ^ 1) * BUFFER + i * AT_ONCE * (STRIDE / 2), x[i] + (k < cols ? k : 0), k < cols);
      if (k < cols)
#pragma unroll
        for (uint j = 0; j < ROWS_W; j++) next[j] = fetch(rows[j], k);
    }
#pragma unroll
    for (uint s = 0; s < STEP; s += 32) {
      uint fa[ROWS][2][4], fw[TILES][4];
#pragma unroll
      for (uint i = 0; i < ROWS; i++)
#pragma unroll
        for (uint h = 0; h < 2; h++) load_matrices(fa[i][h], shared_address(from_a + buffer * BUFFER * 2 + i * 16 * STRIDE + s + h * 16));
#pragma unroll
      for (uint j = 0; j < TILES; j++) load_matrices(fw[j], shared_address(from_w + buffer * BUFFER * 2 + j * 8 * STRIDE + s));
#pragma unroll
      for (uint h = 0; h < 2; h++)
#pragma unroll
        for (uint i = 0; i < ROWS; i++)
#pragma unroll
          for (uint j = 0; j < TILES; j++) mma16(acc[i][j], fa[i][h], fw[j][2 * h], fw[j][2 * h + 1]);
    }
  }

  tg_barrier();   // the tile takes the buffers' place
  TG float *tile = (TG float *)mem;
#pragma unroll
  for (uint i = 0; i < ROWS; i++)
#pragma unroll
    for (uint j = 0; j < TILES; j++) {
      TG float *p = tile + (i * 16 + lane / 4) * (N + 4) + simd * (N / 4) + j * 8 + lane % 4 * 2;
      p[0] = acc[i][j][0];
      p[1] = acc[i][j][1];
      p[8 * (N + 4)] = acc[i][j][2];
      p[8 * (N + 4) + 1] = acc[i][j][3];
    }
  tg_barrier();
  drain<M, N>(e, tile, tid);
}
#endif
