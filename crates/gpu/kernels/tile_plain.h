#ifdef K_PLAIN
// Matrix tiles by a plain loop, the simplest there is: what the others are compared with.
#define TILE_STRIDE 34u
#define TILE_LARGE 32u
#define TILE_WORDS(M, N) ((M) * ((N) + 4) > ((M) + (N)) * 17 ? (M) * ((N) + 4) : ((M) + (N)) * 17)

template <uint M, uint N, uint F, class A, class B, class E>
FN void gemm_tile(A a, B w, E e, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  float acc[M * N / 128];
  for (uint i = 0; i < M * N / 128; i++) acc[i] = 0.0f;
  const TG bf16 *values = (const TG bf16 *)mem;
  for (uint k0 = 0; k0 < cols; k0 += 32) {
    for (uint i = tid; i < (M + N) * 4; i += 128) {
      const uint row = i / 4, k = k0 + i % 4 * 8;
      Eight v = zero_eight();
      if (k < cols && row < M) v = load_eight(row_of(a, row), k);
      if (k < cols && row >= M) {
        Cursor<F> cursor;
        open_row(cursor, w, row - M);
        v = unpack(cursor, fetch(cursor, k));
      }
      for (uint j = 0; j < 4; j++) mem[row * (TILE_STRIDE / 2) + i % 4 * 4 + j] = v.w[j];
    }
    tg_barrier();
    for (uint i = 0; i < M * N / 128; i++) {
      const uint at = tid + i * 128;
      for (uint k = 0; k < 32; k++)
        acc[i] = fma(f32(values[at / N * TILE_STRIDE + k]), f32(values[(M + at % N) * TILE_STRIDE + k]), acc[i]);
    }
    tg_barrier();
  }
  TG float *tile = (TG float *)mem;
  for (uint i = 0; i < M * N / 128; i++) tile[(tid + i * 128) / N * (N + 4) + (tid + i * 128) % N] = acc[i];
  tg_barrier();
  drain<M, N>(e, tile, tid, 128u);
}
#endif
