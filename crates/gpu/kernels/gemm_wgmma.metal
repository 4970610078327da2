#ifdef K_WGMMA
// The tiles of gemm_mma.metal by wgmma, 4-bit weights: out[128][256] = a[128][K] · w[256][K]ᵀ by two warpgroups of 128 threads, and where
// those would leave cores without work out[128][64] by one. A warpgroup has G times 64 rows of weights, a simdgroup 16 of each 64, which it
// dequantizes into the registers that wgmma takes its left operand from; 128 or 32 rows of activations are the right one, in threadgroup
// memory as wgmma wants them: lines of 128 bytes, 64 of K, whose pieces of 16 bytes change places by line (the 128-byte swizzle). A product
// is under way while the next 16 of K are dequantized, and activations come two lines ahead. The order of an element's sum is K's.
// Lane l has rows l / 4 and l / 4 + 8 of 16, and of every eight elements those two from 2 (l % 4) on: a byte of each word of codes. The four
// lanes of a row load 16 bytes of 64 each, which hold four words of all of them, and change bytes: what passes the first-level cache for 64
// of K are 8 KB of codes and 16 KB of activations once each, beside the 64 KB that wgmma reads, its matrix units' time. (On an H200
// activations copied by words, in the order in which lanes have codes, cost 58 of 202 us; codes loaded by each lane for itself 50 more.)

#define WIDE_LINE 32u // words of a row of a step of 64
#define WIDE_STEP (UNIT_ROWS * WIDE_LINE)
#define WIDE_STEPS 4u // of activations in threadgroup memory: the one before this one may still be read, two are on their way
#define WIDE_WORDS (WIDE_STEPS * WIDE_STEP) // as f32, 32 rows of results fit, too

// WARPS warpgroups, each with GROUPS times 64 columns.
template <uint WARPS, uint GROUPS> struct WideTile { enum { COLUMNS = WARPS * GROUPS * 64 }; };
template <uint WARPS, uint GROUPS> FN uint large_rows(WideTile<WARPS, GROUPS>) { return UNIT_ROWS; }

// What a lane loads of R rows of weights: a quarter of 128 elements' codes, scales and biases of four groups.
template <uint R> struct WideRows { uint codes[R][4], scales[R][2], biases[R][2]; };
template <uint R> FN void fetch_codes(const THREAD Cursor<Q4> (&c)[R], uint k, THREAD WideRows<R> &to)
{
#pragma unroll
  for (uint r = 0; r < R; r++) {
    const uint4 q = load4(c[r].codes + k / 8);
    to.codes[r][0] = q.x; to.codes[r][1] = q.y; to.codes[r][2] = q.z; to.codes[r][3] = q.w;
  }
}
// Two neighbours, zeros behind the last group.
FN uint two_groups(const DEVICE bf16 *p, uint group, uint groups)
{
  return pack2(group < groups ? f32(p[group]) : 0.0f, group + 1 < groups ? f32(p[group + 1]) : 0.0f);
}
template <uint R> FN void fetch_scales(const THREAD Cursor<Q4> (&c)[R], uint group, uint groups, THREAD WideRows<R> &to)
{
  if (groups % 4 == 0) {
#pragma unroll
    for (uint r = 0; r < R; r++) {
      const uint2 s = load2((const DEVICE uint *)(c[r].scales + group)), b = load2((const DEVICE uint *)(c[r].scales + c[r].to_bias + group));
      to.scales[r][0] = s.x; to.scales[r][1] = s.y;
      to.biases[r][0] = b.x; to.biases[r][1] = b.y;
    }
  } else {
#pragma unroll
    for (uint i = 0; i < R * 2; i++) {
      to.scales[i / 2][i % 2] = two_groups(c[i / 2].scales, group + i % 2 * 2, groups);
      to.biases[i / 2][i % 2] = two_groups(c[i / 2].scales + c[i / 2].to_bias, group + i % 2 * 2, groups);
    }
  }
}
// Four lanes' 64 bytes of a row become each lane's bytes of all words: of words 4 s to 4 s + 3 lane s loaded them. Even s are in [0], odd ones
// in [1]; those of the lane's own pair of lanes in `kept`, those of the other pair in `got`.
template <uint R> struct WideCodes { uint kept[R][2], got[R][2]; };
template <uint R> FN void exchange_codes(const THREAD WideRows<R> &raw, uint part, THREAD WideCodes<R> &to)
{
  const bool odd = part % 2 != 0;
  const uint mine = odd ? 0x7531u : 0x6420u, theirs = mine ^ 0x1111u, later = part / 2 != 0 ? 0x7531u : 0x6420u, sent = later ^ 0x1111u;
#pragma unroll
  for (uint r = 0; r < R; r++) {
    uint even[2], uneven[2]; // of lanes 2 q and 2 q + 1: of each word two bytes
#pragma unroll
    for (uint h = 0; h < 2; h++) {
      const uint a = raw.codes[r][2 * h], b = raw.codes[r][2 * h + 1];
      const uint own = byte_permute(a, b, mine), other = simd_shuffle_xor(byte_permute(a, b, theirs), 1u);
      even[h] = odd ? other : own;
      uneven[h] = odd ? own : other;
    }
    to.kept[r][0] = byte_permute(even[0], even[1], later);
    to.kept[r][1] = byte_permute(uneven[0], uneven[1], later);
    to.got[r][0] = simd_shuffle_xor(byte_permute(even[0], even[1], sent), 2u);
    to.got[r][1] = simd_shuffle_xor(byte_permute(uneven[0], uneven[1], sent), 2u);
  }
}
// Scales and biases of one of four groups.
template <uint R> FN void take_affine(const THREAD WideRows<R> &raw, bool odd, uint half, THREAD Affine (&to)[R])
{
#pragma unroll
  for (uint r = 0; r < R; r++) {
    const uint scales = odd ? raw.scales[r][1] : raw.scales[r][0], biases = odd ? raw.biases[r][1] : raw.biases[r][0];
    to[r] = affine_pairs(half != 0 ? bf16_high(scales) : bf16_low(scales), half != 0 ? bf16_high(biases) : bf16_low(biases));
  }
}
// The left operands of product j of eight: of each two rows. Its two words' bytes are taken twice, for their two nibbles.
template <uint R> FN void unpack_wide(const THREAD WideCodes<R> &codes, const THREAD Affine (&affine)[R], uint j, uint part, THREAD uint (&left)[R / 2][4])
{
  const uint which = (part / 2 == j / 4 ? 0x1010u : 0x5454u) + j % 2 * 0x2222u;
#pragma unroll
  for (uint r = 0; r < R; r++) {
    const uint q = byte_permute(codes.kept[r][j / 2 % 2], codes.got[r][j / 2 % 2], which);
    left[r / 2][r % 2] = unpack_codes(q, affine[r]);
    left[r / 2][2 + r % 2] = unpack_codes(q >> 8, affine[r]);
  }
}

// A thread's copies of activations: a piece of N rows.
template <uint N> struct WideCopy {
  const DEVICE bf16 *x[N];
  TG uint *to;
  uint at;
};
template <uint N, class A> FN void open_copy(THREAD WideCopy<N> &c, A a, TG uint *mem, uint tid, uint at_once)
{
  const uint row = tid / 8;
  c.at = tid % 8 * 8;
#pragma unroll
  for (uint n = 0; n < N; n++) c.x[n] = row_of(a, row + n * at_once);
  c.to = mem + row * WIDE_LINE + ((tid ^ row) % 8) * 4;
}
// The 64 elements from k on, to a line of each row; zeros behind the row's end.
template <uint N> FN void copy_line(const THREAD WideCopy<N> &c, uint k, uint cols, uint step, uint at_once)
{
  const bool there = k < cols;
#pragma unroll
  for (uint n = 0; n < N; n++) copy_async(c.to + step * WIDE_STEP + n * at_once * WIDE_LINE, c.x[n] + (there ? k + c.at : 0), there);
  copy_commit();
}

template <uint W, uint WARPS, uint GROUPS, class A, class B, class E>
FN void wide_tile(A a, B w, E e, uint rows, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  constexpr uint COLUMNS = WARPS * GROUPS * 64, R = 2 * GROUPS, AT_ONCE = WARPS * 16; // rows of weights a lane, of activations a copy
  const uint first = simd / 4 * (GROUPS * 64) + simd % 4 * 16 + lane / 4, part = lane % 4;
  Cursor<Q4> weights[R];
#pragma unroll
  for (uint m = 0; m < R; m++) open_row(weights[m], w, first + m / 2 * 64 + m % 2 * 8);
  WideCopy<W / AT_ONCE> copy;
  open_copy(copy, a, mem, tid, AT_ONCE);

  float acc[GROUPS][W / 8][4];
#pragma unroll
  for (uint i = 0; i < GROUPS * W / 2; i++) acc[i / (W / 2)][i / 4 % (W / 8)][i % 4] = 0.0f;

  WideRows<R> raw;
  WideCodes<R> codes;
  Affine affine[R];
  uint left[2][GROUPS][4];
  copy_line(copy, 0, cols, 0, AT_ONCE);
  copy_line(copy, 64, cols, 1, AT_ONCE);
  // A quarter behind the row's end: any codes, with zeros for scales.
  fetch_codes<R>(weights, part * 32 < cols ? part * 32 : 0, raw);
  fetch_scales<R>(weights, 0, cols / GROUP, raw);
  exchange_codes<R>(raw, part, codes);
  take_affine<R>(raw, false, 0, affine);
  unpack_wide<R>(codes, affine, 0, part, left[0]);

  uint step = 0;
  bool odd = false;
  for (uint k0 = 0; k0 < cols; k0 += 128, odd = !odd) {
    const bool more = k0 + 128 < cols;
#pragma unroll
    for (uint j = 0; j < 8; j++) {
      if (j % 4 == 0) {
        if (j == 0 || more) copy_wait_but_one();
        else copy_wait();
        matrix_memory_fence();
        tg_barrier(); // this line is there, and the one before the last is no longer read
      }
      wgmma_begin();
#pragma unroll
      for (uint m = 0; m < GROUPS; m++) wgmma<W>(acc[m], left[j % 2][m], mem + step * WIDE_STEP, j % 4, lane);
      wgmma_commit();
      if (j == 0 && more) {
        const uint k = k0 + 128 + part * 32;
        fetch_codes<R>(weights, k < cols ? k : 0, raw);
      }
      if (j == 4 && more && odd) fetch_scales<R>(weights, (k0 + 128) / GROUP, cols / GROUP, raw);
      if (j % 4 == 0 && more) copy_line(copy, k0 + 128 + j * 16, cols, (step + 2) % WIDE_STEPS, AT_ONCE);
      if (j % 4 == 3) step = (step + 1) % WIDE_STEPS;
      wgmma_wait(1u); // the product before this one has read its operands
      if (j == 3) take_affine<R>(raw, odd, 1, affine);
      if (j == 7 && more) {
        exchange_codes<R>(raw, part, codes);
        take_affine<R>(raw, !odd, 0, affine);
      }
      unpack_wide<R>(codes, affine, (j + 1) % 8, part, left[(j + 1) % 2]);
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
  static_assert(WIDE_WORDS <= LARGE_gemm_wgmma_q4_n256, "text::LARGE_MEMORY"); \
  SHARED_LARGE(uint, mem, WIDE_WORDS); \
  gemm_rows(WideTile<WARPS, GROUPS>(), slab, x, residual, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd);
#else
#define GEMM_WGMMA_TILE(WARPS, GROUPS)
#endif
#define GEMM_WGMMA(name, THREADS, WARPS, GROUPS) \
  KERNEL(name, THREADS, GEMM_OPERANDS) \
  { \
    GEMM_WGMMA_TILE(WARPS, GROUPS) \
  }
GEMM_WGMMA(gemm_wgmma_q4_n256, 256, 2, 2)
GEMM_WGMMA(gemm_wgmma_q4_n64, 128, 1, 1)

KERNEL(experts_in_wgmma_q4, 256, EXPERTS_IN_OPERANDS)
{
#ifdef K_WGMMA
  SHARED_LARGE(uint, mem, WIDE_WORDS);
  experts_in_rows(WideTile<2, 2>(), gate, up, x, order, blocks, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd);
#endif
}

KERNEL(experts_out_wgmma_q4, 256, EXPERTS_OUT_OPERANDS)
{
#ifdef K_WGMMA
  SHARED_LARGE(uint, mem, WIDE_WORDS);
  experts_out_rows(WideTile<2, 2>(), down, x, order, blocks, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd);
#endif
}
#endif
