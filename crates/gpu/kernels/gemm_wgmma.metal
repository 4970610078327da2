#ifdef K_WGMMA
// The tiles of gemm_mma.metal by wgmma, 4-bit weights: out[128][256] = a[128][K] · w[256][K]ᵀ by two warpgroups of 128 threads, and where
// those would leave cores without work out[128][64] by one. A warpgroup has G times 64 rows of weights, a simdgroup 16 of each 64, which it
// dequantizes into the registers that wgmma takes its left operand from; 128 or 32 rows of activations are the right one, in threadgroup
// memory as wgmma wants them: lines of 128 bytes, 64 of K, whose pieces of 16 bytes change places by line (the 128-byte swizzle). A product
// is under way while the next 16 of K are dequantized, and the next 64 of K come meanwhile.
// Lane l has rows l / 4 and l / 4 + 8 of 16, and of every 128 of K the 32 from 32 (l % 4) on: 16 bytes of codes that no other lane loads. What
// wgmma calls elements 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of 16, which lane q has, are four neighbours of its 32; so activations lie in that
// order too, copied by pairs: of 64 pairs number 16 q + 8 a + i is pair 4 i + q of line a. The order of an element's sum is K's alone.
// Bytes that pass the first-level cache for 64 of K: codes 8 KB and activations 16 KB once each, what wgmma reads 64 KB: its rate is the bound.

#define WIDE_LINE 32u // words of a row of a step of 64
#define WIDE_STEP (UNIT_ROWS * WIDE_LINE)
#define WIDE_WORDS (3 * WIDE_STEP) // three steps; as f32, 32 rows of results fit, too

// WARPS warpgroups, each with GROUPS times 64 columns.
template <uint WARPS, uint GROUPS> struct WideTile { enum { COLUMNS = WARPS * GROUPS * 64 }; };
template <uint WARPS, uint GROUPS> FN uint large_rows(WideTile<WARPS, GROUPS>) { return UNIT_ROWS; }

// What a lane loads of R rows of weights: codes of its 32 of 128 elements, scales and biases of four groups.
template <uint R> struct WideRows { uint codes[R][4], scales[R][2], biases[R][2]; };
template <uint R> FN void fetch_codes(const THREAD Cursor<Q4> (&c)[R], uint k, THREAD WideRows<R> &to)
{
#pragma unroll
  for (uint r = 0; r < R; r++) {
    const uint4 q = load4(c[r].codes + k / 8);
    to.codes[r][0] = q.x; to.codes[r][1] = q.y; to.codes[r][2] = q.z; to.codes[r][3] = q.w;
  }
}
// Zeros behind the last group.
FN void fetch_four(const DEVICE bf16 *p, uint group, uint groups, THREAD uint (&to)[2])
{
  if (groups % 4 == 0) {
    const uint2 q = load2((const DEVICE uint *)(p + group));
    to[0] = q.x; to[1] = q.y;
  } else {
#pragma unroll
    for (uint i = 0; i < 2; i++) {
      const uint g = group + i * 2;
      to[i] = pack2(g < groups ? f32(p[g]) : 0.0f, g + 1 < groups ? f32(p[g + 1]) : 0.0f);
    }
  }
}
template <uint R> FN void fetch_scales(const THREAD Cursor<Q4> (&c)[R], uint group, uint groups, THREAD WideRows<R> &to)
{
#pragma unroll
  for (uint r = 0; r < R; r++) {
    fetch_four(c[r].scales, group, groups, to.scales[r]);
    fetch_four(c[r].scales + c[r].to_bias, group, groups, to.biases[r]);
  }
}
// A lane's 32 codes of each row, and their group's scale and bias: one of four by `odd` 128 elements and the lane's half of them.
template <uint R> struct WideCodes { uint q[R][4]; Affine affine[R]; };
template <uint R> FN void take_codes(const THREAD WideRows<R> &raw, bool odd, bool upper, THREAD WideCodes<R> &to)
{
#pragma unroll
  for (uint r = 0; r < R; r++) {
#pragma unroll
    for (uint i = 0; i < 4; i++) to.q[r][i] = raw.codes[r][i];
    const uint scales = odd ? raw.scales[r][1] : raw.scales[r][0], biases = odd ? raw.biases[r][1] : raw.biases[r][0];
    to.affine[r] = affine_pairs(upper ? bf16_high(scales) : bf16_low(scales), upper ? bf16_high(biases) : bf16_low(biases));
  }
}
// The left operands of product j of eight: of each two rows.
template <uint R> FN void unpack_wide(const THREAD WideCodes<R> &codes, uint j, THREAD uint (&left)[R / 2][4])
{
#pragma unroll
  for (uint r = 0; r < R; r++) {
    left[r / 2][r % 2] = unpack_codes(byte_permute(codes.q[r][j / 2], 0u, 0x1111u * (j % 2 * 2)), codes.affine[r]);
    left[r / 2][2 + r % 2] = unpack_codes(byte_permute(codes.q[r][j / 2], 0u, 0x1111u * (j % 2 * 2 + 1)), codes.affine[r]);
  }
}

// Where a lane's copies of activations begin: a simdgroup copies two rows' pairs at once, half of the pairs in one of two turns, whose 4-byte
// words lie in different banks.
template <uint N> struct WideCopy {
  const DEVICE uint *x[N];
  TG uint *to;
  uint quarter[2], from[2], at[2]; // by turn: of K, and in words
};
template <uint N, class A> FN void open_copy(THREAD WideCopy<N> &c, A a, TG uint *mem, uint lane, uint simd, uint at_once)
{
  const uint row = simd * 2 + lane / 16, i = lane % 8;
#pragma unroll
  for (uint n = 0; n < N; n++) c.x[n] = (const DEVICE uint *)row_of(a, row + n * at_once);
  c.to = mem + row * WIDE_LINE;
#pragma unroll
  for (uint t = 0; t < 2; t++) {
    c.quarter[t] = (t ^ (lane / 16)) * 2 + lane / 8 % 2;
    c.from[t] = c.quarter[t] * 16 + i;
    c.at[t] = (i ^ (row % 8)) * 4 + c.quarter[t];
  }
}
// Line `half` of the 128 elements from k on, to a step's memory; zeros behind the row's end.
template <uint N> FN void copy_line(const THREAD WideCopy<N> &c, uint k, uint half, uint cols, uint step, uint at_once)
{
#pragma unroll
  for (uint t = 0; t < 2; t++) {
    const bool there = k + c.quarter[t] * 32 < cols;
    const uint from = there ? k / 2 + half * 8 + c.from[t] : 0;
#pragma unroll
    for (uint n = 0; n < N; n++) copy_async_word(c.to + step * WIDE_STEP + n * at_once * WIDE_LINE + c.at[t], c.x[n] + from, there);
  }
}

template <uint W, uint WARPS, uint GROUPS, class A, class B, class E>
FN void wide_tile(A a, B w, E e, uint rows, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  constexpr uint COLUMNS = WARPS * GROUPS * 64, R = 2 * GROUPS, AT_ONCE = WARPS * 8; // rows of weights a lane, of activations a copy
  const uint first = simd / 4 * (GROUPS * 64) + simd % 4 * 16 + lane / 4, part = lane % 4;
  Cursor<Q4> weights[R];
#pragma unroll
  for (uint m = 0; m < R; m++) open_row(weights[m], w, first + m / 2 * 64 + m % 2 * 8);
  WideCopy<W / AT_ONCE> copy;
  open_copy(copy, a, mem, lane, simd, AT_ONCE);

  float acc[GROUPS][W / 8][4];
#pragma unroll
  for (uint i = 0; i < GROUPS * W / 2; i++) acc[i / (W / 2)][i / 4 % (W / 8)][i % 4] = 0.0f;

  WideRows<R> raw;
  WideCodes<R> codes;
  uint left[2][GROUPS][4];
  copy_line(copy, 0, 0, cols, 0, AT_ONCE);
  // A quarter behind the row's end: any codes, with zeros for scales.
  fetch_codes<R>(weights, part * 32 < cols ? part * 32 : 0, raw);
  fetch_scales<R>(weights, 0, cols / GROUP, raw);
  take_codes<R>(raw, false, part > 1, codes);
  unpack_wide<R>(codes, 0, left[0]);

  uint step = 0;
  bool odd = false;
  for (uint k0 = 0; k0 < cols; k0 += 128, odd = !odd) {
    const bool more = k0 + 128 < cols;
#pragma unroll
    for (uint j = 0; j < 8; j++) {
      if (j % 4 == 0) {
        copy_wait();
        matrix_memory_fence();
        tg_barrier(); // this step is there, and the one before the last is no longer read
      }
      wgmma_begin();
#pragma unroll
      for (uint m = 0; m < GROUPS; m++) wgmma<W>(acc[m], left[j % 2][m], mem + step * WIDE_STEP, j % 4, lane);
      wgmma_commit();
      if (j % 4 == 3) step = step == 2 ? 0 : step + 1;
      if (j == 0 && more) {
        const uint k = k0 + 128 + part * 32;
        fetch_codes<R>(weights, k < cols ? k : 0, raw);
        if (odd) fetch_scales<R>(weights, (k0 + 128) / GROUP, cols / GROUP, raw);
      }
      if (j == 0) copy_line(copy, k0, 1, cols, step == 2 ? 0 : step + 1, AT_ONCE);
      if (j == 4 && more) copy_line(copy, k0 + 128, 0, cols, step == 2 ? 0 : step + 1, AT_ONCE);
      wgmma_wait(1u); // the product before this one has read its operands
      if (j == 7 && more) take_codes<R>(raw, !odd, part > 1, codes);
      unpack_wide<R>(codes, (j + 1) % 8, left[(j + 1) % 2]);
    }
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
