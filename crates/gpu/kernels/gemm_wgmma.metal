#ifdef K_WGMMA
// The tiles of gemm_mma.metal by wgmma, 4-bit weights: out[128][256] = a[128][K] · w[256][K]ᵀ by two warpgroups of 128 threads, and where
// those would leave cores without work out[128][64] by one. A warpgroup has G times 64 rows of weights, a simdgroup 16 of each 64, which it dequantizes into the registers that wgmma takes its left operand from; 128 or 32
// rows of activations are the right one, in threadgroup memory as wgmma wants them: lines of 128 bytes, 64 of K, whose pieces of 16 bytes
// change places by line (the 128-byte swizzle). A product is under way while the next 16 of K are dequantized, and the next 64 of K come
// meanwhile. The order of an element's sum is K's.
// Lane l has rows l / 4 and l / 4 + 8 of 16, of every eight elements those two from 2 (l % 4) on: a byte of each word of codes.

#define WIDE_LINE 32u // words of a row of a step of 64
#define WIDE_STEP (UNIT_ROWS * WIDE_LINE)
#define WIDE_WORDS (3 * WIDE_STEP) // three steps; as f32, 32 rows of results fit, too

// WARPS warpgroups, each with GROUPS times 64 columns.
template <uint WARPS, uint GROUPS> struct WideTile { enum { COLUMNS = WARPS * GROUPS * 64 }; };
template <uint WARPS, uint GROUPS> FN uint large_rows(WideTile<WARPS, GROUPS>) { return UNIT_ROWS; }

// A group of a row of weights on its way: all its codes, though a lane takes a quarter of them.
struct WideRow { uint4 codes[2]; float scale, bias; };
FN void fetch_wide(const THREAD Cursor<Q4> &c, uint k, THREAD WideRow &to)
{
  to.codes[0] = load4(c.codes + k / 8);
  to.codes[1] = load4(c.codes + k / 8 + 4);
  to.scale = f32(c.scales[k / GROUP]);
  to.bias = f32(c.scales[k / GROUP + c.to_bias]);
}
// What a lane takes of a group of a row: of each two words of codes its byte, twice.
struct WideCodes { uint q[4]; Affine affine; };
template <uint R> FN void take_codes(const THREAD WideRow (&raw)[R], uint part, THREAD WideCodes (&to)[R])
{
  const uint which = part * 0x1111u + 0x4040u;
#pragma unroll
  for (uint m = 0; m < R; m++) {
    const uint4 a = raw[m].codes[0], b = raw[m].codes[1];
    to[m].q[0] = byte_permute(a.x, a.y, which);
    to[m].q[1] = byte_permute(a.z, a.w, which);
    to[m].q[2] = byte_permute(b.x, b.y, which);
    to[m].q[3] = byte_permute(b.z, b.w, which);
    to[m].affine = affine_pairs(raw[m].scale, raw[m].bias);
  }
}
// The left operands of 16 of K: of each two rows.
template <uint R> FN void unpack_wide(const THREAD WideCodes (&codes)[R], uint j, THREAD uint (&left)[R / 2][4])
{
#pragma unroll
  for (uint m = 0; m < R; m++) {
    left[m / 2][m % 2] = unpack_codes(codes[m].q[j], codes[m].affine);
    left[m / 2][2 + m % 2] = unpack_codes(codes[m].q[j] >> 8, codes[m].affine);
  }
}

template <uint W, uint WARPS, uint GROUPS, class A, class B, class E>
FN void wide_tile(A a, B w, E e, uint rows, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  constexpr uint COLUMNS = WARPS * GROUPS * 64, R = 2 * GROUPS, AT_ONCE = WARPS * 16; // rows of weights a lane, of activations a copy
  const uint first = simd / 4 * (GROUPS * 64) + simd % 4 * 16 + lane / 4;
  Cursor<Q4> weights[R];
#pragma unroll
  for (uint m = 0; m < R; m++) open_row(weights[m], w, first + m / 2 * 64 + m % 2 * 8);
  const uint row = tid / 8, at = tid % 8 * 8;
  const DEVICE bf16 *x[W / AT_ONCE];
#pragma unroll
  for (uint i = 0; i < W / AT_ONCE; i++) x[i] = row_of(a, row + i * AT_ONCE) + at;
  TG uint *to = mem + row * WIDE_LINE + ((tid ^ row) % 8) * 4;

  float acc[GROUPS][W / 8][4];
#pragma unroll
  for (uint i = 0; i < GROUPS * W / 2; i++) acc[i / (W / 2)][i / 4 % (W / 8)][i % 4] = 0.0f;

  WideRow raw[R];
  WideCodes codes[R];
  uint left[2][GROUPS][4];
#pragma unroll
  for (uint i = 0; i < W / AT_ONCE; i++) copy_async(to + i * AT_ONCE * WIDE_LINE, x[i], true);
#pragma unroll
  for (uint m = 0; m < R; m++) fetch_wide(weights[m], 0, raw[m]);
  take_codes<R>(raw, lane % 4, codes);
  unpack_wide<R>(codes, 0, left[0]);

  uint buffer = 0;
  for (uint k0 = 0; k0 < cols; k0 += 64) {
    const uint next = buffer == 2 ? 0 : buffer + 1;
    const bool more = k0 + 64 < cols;
    copy_wait();
    matrix_memory_fence();
    tg_barrier(); // this step is there, and the one before the last is no longer read
#pragma unroll
    for (uint j = 0; j < 4; j++) {
      wgmma_begin();
#pragma unroll
      for (uint m = 0; m < GROUPS; m++) wgmma<W>(acc[m], left[j % 2][m], mem + buffer * WIDE_STEP, j, lane);
      wgmma_commit();
      if (j == 0 && more) {
#pragma unroll
        for (uint m = 0; m < R; m++) fetch_wide(weights[m], k0 + 64, raw[m]);
#pragma unroll
        for (uint i = 0; i < W / AT_ONCE; i++) copy_async(to + next * WIDE_STEP + i * AT_ONCE * WIDE_LINE, x[i] + k0 + 64, true);
      }
      wgmma_wait(1u); // the product before this one has read its operands
      if (j == 3 && more) take_codes<R>(raw, lane % 4, codes);
      unpack_wide<R>(codes, (j + 1) % 4, left[(j + 1) % 2]);
    }
    buffer = next;
  }
  wgmma_wait(0u);
#pragma unroll
  for (uint m = 0; m < GROUPS; m++) wgmma_done<W>(acc[m]);

  TG float *tile = (TG float *)mem;
#pragma unroll
  for (uint pass = 0; pass < W / UNIT_PASS; pass++) {
    if (pass * UNIT_PASS >= rows) continue;
    tg_barrier(); // what lay there has been read
#pragma unroll
    for (uint i = 0; i < GROUPS * 16; i++) {
      const uint m = i / 16, n = i / 4 % 4, q = i % 4;
      tile[(n * 8 + lane % 4 * 2 + q % 2) * (COLUMNS + 4) + first + m * 64 + q / 2 * 8] = acc[m][pass * 4 + n][q] * CODE_PAIR_BACK;
    }
    tg_barrier();
    drain<UNIT_PASS, COLUMNS>(rows_from(e, pass * UNIT_PASS), tile, tid, WARPS * 128);
  }
}

template <uint WARPS, uint GROUPS, class A, class B, class E>
FN void run_tile(WideTile<WARPS, GROUPS>, bool, A a, B w, E e, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  if (a.rows > 32) wide_tile<128, WARPS, GROUPS>(a, w, e, a.rows, cols, mem, tid, lane, simd);
  else wide_tile<32, WARPS, GROUPS>(a, w, e, a.rows, cols, mem, tid, lane, simd);
}

#endif

#if defined(K_CUDA) || defined(K_CPU)
#ifdef K_WGMMA
#define GEMM_WGMMA_TILE(WARPS, GROUPS) \
  SHARED_48K(uint, mem, WIDE_WORDS); \
  gemm_rows(WideTile<WARPS, GROUPS>(), slab, x, residual, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd);
#else
#define GEMM_WGMMA_TILE(WARPS, GROUPS)
#endif
#define GEMM_WGMMA(name, THREADS, WARPS, GROUPS) \
  KERNEL(name, THREADS, IN(0, uint, slab), IN(1, bf16, x), IN(2, float, residual), OUT(3, uint, out), ARGS(4, GemmArgs, p)) \
  { \
    GEMM_WGMMA_TILE(WARPS, GROUPS) \
  }
GEMM_WGMMA(gemm_wgmma_q4_n256, 256, 2, 2)
GEMM_WGMMA(gemm_wgmma_q4_n64, 128, 1, 1)

KERNEL(experts_in_wgmma_q4, 256, IN(0, uint, gate), IN(1, uint, up), IN(2, bf16, x), IN(3, uint, order), IN(4, uint, blocks), OUT(5, bf16, out),
       ARGS(6, ExpertsInArgs, p))
{
#ifdef K_WGMMA
  SHARED_48K(uint, mem, WIDE_WORDS);
  experts_in_rows(WideTile<2, 2>(), gate, up, x, order, blocks, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd);
#endif
}

KERNEL(experts_out_wgmma_q4, 256, IN(0, uint, down), IN(1, bf16, x), IN(2, uint, order), IN(3, uint, blocks), OUT(4, bf16, out), ARGS(5, ExpertsOutArgs, p))
{
#ifdef K_WGMMA
  SHARED_48K(uint, mem, WIDE_WORDS);
  experts_out_rows(WideTile<2, 2>(), down, x, order, blocks, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd);
#endif
}
#endif
