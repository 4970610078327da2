#if defined(K_CUDA) || defined(K_CPU)
// Matrix tiles by mma.sync m16n8k16: out[128][N] = a[128][K] · w[N][K]ᵀ by 128 threads. Weights are the left operand: a simdgroup has 32
// rows of them and dequantizes these from device memory into registers, where they meet every row of activations; nothing else does it
// again but the simdgroups that share N's columns. Activations come by cp.async, 64 of K a step, two steps in threadgroup memory.
// Lane l has weight rows l / 4 and l / 4 + 8 of 16, and of their 64 elements those from 16 (l % 4) on; of eight rows of activations row
// l / 4, the same elements. An element's sum is in the order of K's steps, whatever the tile: a row's bits depend on itself alone.
// Bytes: weights once for 128 rows, activations once for N columns, both from L2 but for the first. A step of 128 rows: 256 products of
// 2,048 a simdgroup, 64 loads of 16 bytes a lane, about 300 instructions to dequantize.

#define UNIT_ROWS 128u
#define UNIT_THREADS 128u
#define UNIT_STEP 64u
#define UNIT_LINE 36u // words of a row of a step: a pad of 16 bytes, so that the two rows of a quarter of a load lie in different banks
#define UNIT_TILES 4u // of eight rows of activations, whose products are under way together
#define UNIT_PASS 32u // rows of results that go out together
#define UNIT_STEP_WORDS (UNIT_ROWS * UNIT_LINE)
#define UNIT_WORDS(N) (2 * UNIT_STEP_WORDS > UNIT_PASS * ((N) + 4) ? 2 * UNIT_STEP_WORDS : UNIT_PASS * ((N) + 4))

// N columns of weights in format F, for gemm_rows() and others. Rows of activations are multiplied or left out SKIP at a time: many at a time
// are scheduled better, few fit blocks of routed rows better.
template <uint N, uint F, uint SKIP> struct UnitTile { enum { COLUMNS = N }; };
template <uint N, uint F, uint SKIP> FN uint large_rows(UnitTile<N, F, SKIP>) { return UNIT_ROWS; }

// Sixteen neighbours of a row of weights from element k on, as pairs of bf16; zeros behind the row's end.
template <uint F> struct Sixteen { Fetched half[2]; };
template <uint F> FN void fetch_sixteen(const THREAD Cursor<F> &c, uint k, uint cols, THREAD Sixteen<F> &to)
{
  if (F == Q4) { // whole groups
    if (k >= cols) return;
    const uint2 q = load2(c.codes + k / 8);
    to.half[0].w[0] = q.x;
    to.half[1].w[0] = q.y;
    to.half[0].scale = f32(c.scales[k / GROUP]);
    to.half[0].bias = f32(c.scales[k / GROUP + c.to_bias]);
  } else if (F == Q8) {
    if (k >= cols) return;
    const uint4 q = load4(c.codes + k / 4);
    to.half[0].w[0] = q.x; to.half[0].w[1] = q.y;
    to.half[1].w[0] = q.z; to.half[1].w[1] = q.w;
    to.half[0].scale = to.half[1].scale = f32(c.scales[k / GROUP]);
    to.half[0].bias = to.half[1].bias = f32(c.scales[k / GROUP + c.to_bias]);
  } else {
#pragma unroll
    for (uint h = 0; h < 2; h++)
      if (k + h * 8 < cols) to.half[h] = fetch(c, k + h * 8);
  }
}
// A group's scale and bias for pairs of codes of which the second is `times` too high.
struct Affine { uint scale, bias; };
FN Affine affine_pairs(float scale, float bias, float times)
{
  const Affine a = {pack2(scale * CODE_PAIR_UP, scale * (CODE_PAIR_UP / times)), pack2(bias * CODE_PAIR_DOWN, bias * CODE_PAIR_DOWN)};
  return a;
}
FN Affine affine_pairs(float scale, float bias) { return affine_pairs(scale, bias, 16.0f); }
// Two neighbouring codes, the low nibbles of a word's halves but the second 16 times too high: scale * code + bias rounded once, times
// CODE_PAIR_DOWN. Codes are no numbers first (platform_cuda.h): a mask and one instruction.
FN uint unpack_codes(uint q, Affine a) { return fma_pair(code_pair(q & 0x00f0000fu), a.scale, a.bias); }

// Half of sixteen. The values of unpack(), of codes rounded once and times CODE_PAIR_DOWN.
template <uint F> FN Eight unpack_half(const THREAD Cursor<F> &c, const THREAD Sixteen<F> &from, uint h, bool there)
{
  Eight e = zero_eight();
  if (!there) return e;
  if (F != Q4 && F != Q8) return unpack(c, from.half[h]);
  const Affine affine = affine_pairs(from.half[0].scale, from.half[0].bias, F == Q4 ? 16.0f : 1.0f);
#pragma unroll
  for (uint i = 0; i < 4; i++) {
    const uint word = from.half[h].w[F == Q4 ? 0 : i / 2];
    e.w[i] = F == Q4 ? unpack_codes(byte_permute(word, 0u, 0x1111u * i), affine)
                     : fma_pair(code_pair(byte_permute(word, 0u, i % 2 == 0 ? 0x4140u : 0x4342u)), affine.scale, affine.bias);
  }
  return e;
}

template <uint N, uint F, uint SKIP, class A, class B, class E>
FN void unit_tile(A a, B w, E e, uint rows, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  // Simdgroups beside each other, and of those that share columns every `SHARERS`th has the next rows of activations. Narrow tiles are for few
  // rows, whose steps are shorter than a load from memory takes: AHEAD steps of weights are under way.
  constexpr uint AHEAD = N == 32 && (F == Q4 || F == Q8) ? 3 : 1;
  constexpr uint COLUMNS = N / 32, SHARERS = UNIT_THREADS / 32 / COLUMNS, TILES = SHARERS > 2 ? 2 : UNIT_TILES, CHUNKS = UNIT_ROWS / 8 / TILES / SHARERS;
  const uint column = simd % COLUMNS * 32, sharer = simd / COLUMNS, copied = (rows + SKIP - 1) / SKIP * SKIP;
  Cursor<F> weights[2][2];
#pragma unroll
  for (uint m = 0; m < 4; m++) open_row(weights[m / 2][m % 2], w, column + m * 8 + lane / 4);
  const uint from = lane % 4 * 16, row = tid / 8, at = tid % 8 * 8;
  const DEVICE bf16 *x[UNIT_ROWS / 16];
#pragma unroll
  for (uint i = 0; i < UNIT_ROWS / 16; i++) x[i] = row_of(a, row + i * 16);
  TG uint *to = mem + row * UNIT_LINE + at / 2;

  float acc[CHUNKS][TILES][2][4];
#pragma unroll
  for (uint i = 0; i < CHUNKS * TILES * 8; i++) acc[i / 8 / TILES][i / 8 % TILES][i / 4 % 2][i % 4] = 0.0f;

  Sixteen<F> next[AHEAD][2][2];
#pragma unroll
  for (uint i = 0; i < UNIT_ROWS / 16; i++)
    if (row + i * 16 < copied) copy_async(to + i * 16 * UNIT_LINE, x[i] + (at < cols ? at : 0), at < cols);
#pragma unroll
  for (uint m = 0; m < 4 * AHEAD; m++) fetch_sixteen(weights[m / 2 % 2][m % 2], m / 4 * UNIT_STEP + from, cols, next[m / 4][m / 2 % 2][m % 2]);

  uint buffer = 0;
  for (uint begin = 0; begin < cols; begin += UNIT_STEP * AHEAD)
#pragma unroll
  for (uint step = 0; step < AHEAD; step++, buffer ^= 1) {
    const uint k0 = begin + step * UNIT_STEP;
    if (k0 >= cols) continue;
    uint left[2][2][2][4]; // half of the elements, 16 rows, product, operand
#pragma unroll
    for (uint h = 0; h < 2; h++)
#pragma unroll
      for (uint m = 0; m < 4; m++) {
        const Eight v = unpack_half(weights[m / 2][m % 2], next[step][m / 2][m % 2], h, k0 + from + h * 8 < cols);
#pragma unroll
        for (uint i = 0; i < 4; i++) left[h][m / 2][i / 2][i % 2 * 2 + m % 2] = v.w[i];
      }
    copy_wait();
    tg_barrier(); // this step is there, and the one before is no longer read
    if (k0 + UNIT_STEP < cols) {
      const uint k = k0 + UNIT_STEP + at;
#pragma unroll
      for (uint i = 0; i < UNIT_ROWS / 16; i++)
        if (row + i * 16 < copied)
          copy_async(to + (buffer ^ 1) * UNIT_STEP_WORDS + i * 16 * UNIT_LINE, x[i] + (k < cols ? k : 0), k < cols);
    }
#pragma unroll
    for (uint m = 0; m < 4; m++) fetch_sixteen(weights[m / 2][m % 2], k0 + UNIT_STEP * AHEAD + from, cols, next[step][m / 2][m % 2]);
    const TG uint *right = mem + buffer * UNIT_STEP_WORDS + lane / 4 * UNIT_LINE + lane % 4 * 8;
#pragma unroll
    for (uint c = 0; c < CHUNKS; c++) {
      const uint first = (c * SHARERS + sharer) * 8 * TILES;
      if (first / SKIP * SKIP >= rows) continue;
#pragma unroll
      for (uint h = 0; h < 2; h++) {
        uint4 v[TILES];
#pragma unroll
        for (uint i = 0; i < TILES; i++) v[i] = load4(right + (first + i * 8) * UNIT_LINE + h * 4);
        // Products that add to the same sums do not follow one another.
#pragma unroll
        for (uint i = 0; i < TILES; i++)
#pragma unroll
          for (uint m = 0; m < 2; m++) mma16(acc[c][i][m], left[h][m][0], v[i].x, v[i].y);
#pragma unroll
        for (uint i = 0; i < TILES; i++)
#pragma unroll
          for (uint m = 0; m < 2; m++) mma16(acc[c][i][m], left[h][m][1], v[i].z, v[i].w);
      }
    }
  }

  TG float *tile = (TG float *)mem;
#pragma unroll
  for (uint pass = 0; pass < UNIT_ROWS / UNIT_PASS; pass++) {
    if (pass * UNIT_PASS >= rows) continue;
    tg_barrier(); // what lay there has been read
#pragma unroll
    for (uint c = 0; c < CHUNKS; c++) {
      const uint first = (c * SHARERS + sharer) * 8 * TILES;
      if (first / UNIT_PASS != pass) continue;
#pragma unroll
      for (uint i = 0; i < TILES * 8; i++) {
        const uint r = first % UNIT_PASS + i / 8 * 8 + lane % 4 * 2 + i % 2;
        tile[r * (N + 4) + column + i / 4 % 2 * 16 + i / 2 % 2 * 8 + lane / 4] = acc[c][i / 8][i / 4 % 2][i % 4] * (F == Q4 || F == Q8 ? CODE_PAIR_BACK : 1.0f);
      }
    }
    tg_barrier();
    drain<UNIT_PASS, N>(rows_from(e, pass * UNIT_PASS), tile, tid, UNIT_THREADS);
  }
}

template <uint N, uint F, uint SKIP, class A, class B, class E>
FN void run_tile(UnitTile<N, F, SKIP>, bool, A a, B w, E e, uint cols, TG uint *mem, uint tid, uint lane, uint simd)
{
  unit_tile<N, F, SKIP>(a, w, e, a.rows, cols, mem, tid, lane, simd);
}

#define GEMM_MMA(name, F, N) \
  KERNEL(name, 128, GEMM_OPERANDS) \
  { \
    SHARED_48K(uint, mem, UNIT_WORDS(N)); \
    gemm_rows(UnitTile<N, F, N == 32 ? 16 : 64>(), slab, x, residual, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd); \
  }
GEMM_MMA(gemm_mma_q4_n128, Q4, 128)
GEMM_MMA(gemm_mma_q4_n32, Q4, 32)
GEMM_MMA(gemm_mma_q8_n128, Q8, 128)
GEMM_MMA(gemm_mma_q8_n32, Q8, 32)
GEMM_MMA(gemm_mma_bf16_n128, BF16, 128)
GEMM_MMA(gemm_mma_bf16_n32, BF16, 32)
GEMM_MMA(gemm_mma_any_n32, ANY_FORMAT, 32)

#define EXPERTS_IN_MMA(name, F, N) \
  KERNEL(name, 128, EXPERTS_IN_OPERANDS) \
  { \
    SHARED_48K(uint, mem, UNIT_WORDS(N)); \
    experts_in_rows(UnitTile<N, F, 32>(), gate, up, x, order, blocks, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd); \
  }
EXPERTS_IN_MMA(experts_in_mma_q4, Q4, 128)
EXPERTS_IN_MMA(experts_in_mma_q8, Q8, 64)
EXPERTS_IN_MMA(experts_in_mma_any, ANY_FORMAT, 64)

#define EXPERTS_OUT_MMA(name, F, N) \
  KERNEL(name, 128, EXPERTS_OUT_OPERANDS) \
  { \
    SHARED_48K(uint, mem, UNIT_WORDS(N)); \
    experts_out_rows(UnitTile<N, F, 32>(), down, x, order, blocks, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd); \
  }
EXPERTS_OUT_MMA(experts_out_mma_q4, Q4, 128)
EXPERTS_OUT_MMA(experts_out_mma_q8, Q8, 64)
EXPERTS_OUT_MMA(experts_out_mma_any, ANY_FORMAT, 64)
#endif
