#ifdef K_CUDA
// Matrix tiles by mma.sync: two buffers in shared memory, a step of 64 of K. Activations come by cp.async; weights go through
// registers, are loaded one step ahead and dequantized on the way. One barrier a step.
#define TILE_K 64u
#define TILE_STRIDE 72u   // a pad of 16 bytes: the eight rows of an ldmatrix lie in different banks
#define TILE_BUFFER(M, N) (((M) + (N)) * (TILE_STRIDE / 2))
#define TILE_WORDS(M, N) (2 * TILE_BUFFER(M, N) > (M) * ((N) + 4) ? 2 * TILE_BUFFER(M, N) : (M) * ((N) + 4))

FN uint shared_address(const void *p) { return uint(__cvta_generic_to_shared(p)); }
// 16 bytes from device to shared memory, or zeros.
FN void copy_async(uint to, const void *from, bool there)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16u : 0u) : "memory");
}
FN void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
FN void load_matrices(uint (&r)[4], uint from)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
FN void multiply(float (&d)[4], const uint (&a)[4], uint b0, uint b1)
{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <uint M, uint N, uint F, class A, class B, class E>
FN void gemm_tile(A a, B w, E e, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  // Eight threads a row of 64, sixteen rows at a time.
  constexpr uint ROWS_A = M / 16, ROWS_W = N / 16, TILES = N / 32, BUFFER = TILE_BUFFER(M, N);
  const uint row = tid / 8, at = tid % 8 * 8;
  const bf16 *x[ROWS_A];
  Cursor<F> rows[ROWS_W];
#pragma unroll
  for (uint i = 0; i < ROWS_A; i++) x[i] = row_of(a, row + 16 * i);
#pragma unroll
  for (uint j = 0; j < ROWS_W; j++) open_row(rows[j], w, row + 16 * j);
  uint *to_w = mem + (M + row) * (TILE_STRIDE / 2) + at / 2;
  const uint base = shared_address(mem);
  const uint to_a = base + (row * TILE_STRIDE + at) * 2;
  // ldmatrix takes a row address from each lane: of a, 16 rows and both halves of 16 columns; of w, 8 rows and four eighths.
  const uint from_a = base + ((lane % 16) * TILE_STRIDE + lane / 16 * 8) * 2;
  const uint from_w = base + ((M + simd * (N / 4) + lane % 8) * TILE_STRIDE + lane / 8 * 8) * 2;

  float acc[ROWS_A][TILES][4];
#pragma unroll
  for (uint i = 0; i < ROWS_A; i++)
#pragma unroll
    for (uint j = 0; j < TILES; j++)
#pragma unroll
      for (uint q = 0; q < 4; q++) acc[i][j][q] = 0.0f;

  Fetched next[ROWS_W];
#pragma unroll
  for (uint i = 0; i < ROWS_A; i++) copy_async(to_a + i * 16 * TILE_STRIDE * 2, x[i] + (at < cols ? at : 0), at < cols);
  if (at < cols)
#pragma unroll
    for (uint j = 0; j < ROWS_W; j++) next[j] = fetch(rows[j], at);

  uint buffer = 0;
  for (uint k0 = 0; k0 < cols; k0 += TILE_K, buffer ^= 1) {
#pragma unroll
    for (uint j = 0; j < ROWS_W; j++) {
      Eight v = zero_eight();
      if (k0 + at < cols) v = unpack(rows[j], next[j]);
      store4(to_w + buffer * BUFFER + j * 16 * (TILE_STRIDE / 2), v.w[0], v.w[1], v.w[2], v.w[3]);
    }
    copy_wait();
    tg_barrier();   // this buffer is full, and the other one is no longer read
    const uint k = k0 + TILE_K + at;
    if (k0 + TILE_K < cols) {
#pragma unroll
      for (uint i = 0; i < ROWS_A; i++)
        copy_async(to_a + (buffer ^ 1) * BUFFER * 4 + i * 16 * TILE_STRIDE * 2, x[i] + (k < cols ? k : 0), k < cols);
      if (k < cols)
#pragma unroll
        for (uint j = 0; j < ROWS_W; j++) next[j] = fetch(rows[j], k);
    }
#pragma unroll
    for (uint s = 0; s < TILE_K; s += 32) {
      uint fa[ROWS_A][2][4], fw[TILES][4];
#pragma unroll
      for (uint i = 0; i < ROWS_A; i++)
#pragma unroll
        for (uint h = 0; h < 2; h++) load_matrices(fa[i][h], from_a + buffer * BUFFER * 4 + (i * 16 * TILE_STRIDE + s + h * 16) * 2);
#pragma unroll
      for (uint j = 0; j < TILES; j++) load_matrices(fw[j], from_w + buffer * BUFFER * 4 + (j * 8 * TILE_STRIDE + s) * 2);
#pragma unroll
      for (uint h = 0; h < 2; h++)
#pragma unroll
        for (uint i = 0; i < ROWS_A; i++)
#pragma unroll
          for (uint j = 0; j < TILES; j++) multiply(acc[i][j], fa[i][h], fw[j][2 * h], fw[j][2 * h + 1]);
    }
  }

  tg_barrier();   // the tile takes the buffers' place
  float *tile = (float *)mem;
#pragma unroll
  for (uint i = 0; i < ROWS_A; i++)
#pragma unroll
    for (uint j = 0; j < TILES; j++) {
      float *p = tile + (i * 16 + lane / 4) * (N + 4) + simd * (N / 4) + j * 8 + lane % 4 * 2;
      p[0] = acc[i][j][0];
      p[1] = acc[i][j][1];
      p[8 * (N + 4)] = acc[i][j][2];
      p[8 * (N + 4) + 1] = acc[i][j][3];
    }
  tg_barrier();
  drain<M, N>(e, tile, tid);
}
#endif
