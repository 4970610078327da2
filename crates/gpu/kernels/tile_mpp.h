#ifdef K_TENSOR
// Matrix tiles by Metal 4 tensor operations: both operands staged in threadgroup memory, the sums in a cooperative tensor of
// four simdgroups. No assumption about which thread holds which element.
#define TILE_LARGE 32u
#define TILE_WORDS(M, N) ((M) * ((N) + 4) > ((M) + (N)) * 16 ? (M) * ((N) + 4) : ((M) + (N)) * 16)

template <uint M, uint N, uint F, class A, class B, class E>
FN void gemm_tile(A a, B w, E e, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  const uint row = tid / 4, at = tid % 4 * 8;
  const DEVICE bf16 *x = row_of(a, row);
  Cursor<F> rows[N / 32];
  for (uint j = 0; j < N / 32; j++) open_row(rows[j], w, row + 32 * j);
  TG uint *to_a = mem + row * 16 + at / 2;
  TG uint *to_w = to_a + M * 16;
  TG bf16 *staged = (TG bf16 *)mem;
  // Extents are (inner, outer).
  auto ta = tensor<TG bf16, dextents<int, 2>, tensor_inline>(staged, dextents<int, 2>(32, int(M)));
  auto tw = tensor<TG bf16, dextents<int, 2>, tensor_inline>(staged + M * 32, dextents<int, 2>(32, int(N)));
  // All seven parameters: what `multiply` does to the old sums is not settled.
  constexpr auto step = mpp::tensor_ops::matmul2d_descriptor(M, N, 32, false, true, false,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<step, execution_simdgroups<4>> mm;
  auto acc = mm.template get_destination_cooperative_tensor<decltype(ta), decltype(tw), float>();
  for (int i = 0; i < acc.get_capacity(); i++)
    if (acc.is_valid_element(i)) acc[i] = 0.0f;

  StepLoads<N, F> next;
  next.a = zero_eight();
  for (uint k = at;; k += 32) {
    const bool there = k < cols;
    if (there) fetch_step(x, row < M, rows, k, next);
    if (k != at) {
      mm.run(ta, tw, acc);
      tg_barrier();
    }
    if (k - at >= cols) break;
    stage_step(next, row < M, there, rows, to_a, to_w, 16);
    tg_barrier();
  }

  TG float *tile = (TG float *)mem;
  for (int i = 0; i < acc.get_capacity(); i++) {
    if (!acc.is_valid_element(i)) continue;
    auto at_element = acc.get_multidimensional_index(i);   // (column, row)
    tile[uint(at_element[1]) * (N + 4) + uint(at_element[0])] = acc[i];
  }
  tg_barrier();
  drain<M, N>(e, tile, tid, 128u);
}
#endif
