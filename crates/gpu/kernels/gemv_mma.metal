#if defined(K_CUDA) || defined(K_CPU)
// y = W x for 1 to 8 rows of x by mma.sync m16n8k16: 16 rows of W against the 8 columns that are the rows of x, so that eight rows
// cost what one costs. A simdgroup has T tiles of 16 rows and a share of the columns, `split` simdgroups share a tile. Codes become bf16
// exactly, whatever the order of the columns inside a group of 64: x is put in the order in which codes come apart. Each group is summed
// on its own and then scaled. The order of a sum depends on the matrix alone: groups ascending in a simdgroup, then simdgroups ascending.
// Lane l has rows l / 4 and l / 4 + 8 of the tile and 16 elements of a group, those from 16 (l % 4) on; of x row l / 4. Of two groups of
// 4-bit codes the four lanes of a row read 64 bytes and then swap halves, which puts the lanes' elements in the order 0, 32, 16, 48.
// Bytes: the matrices once, codes and scales; x once a tile and group, out of a cache.

// Two codes below 16, at the words' halves, as bf16: behind 128 in a mantissa of 7 bits, from which 128 is taken.
FN uint code_pair(uint v)
{
#ifdef K_CUDA
  uint r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(v | 0x43004300u), "r"(0x3f803f80u), "r"(0xc300c300u));
  return r;
#else
  return pack2(float(v & 0xffffu), float(v >> 16));
#endif
}

// Words of a group of 64 columns; of it one lane's.
template <uint F> FN constexpr uint group_words() { return F == Q4 ? 8 : F == Q8 ? 16 : 32; }
template <uint F> FN constexpr uint lane_words() { return group_words<F>() / 4; }

// Whether lanes read 16 bytes of two groups at once.
template <uint F, uint C> FN constexpr bool swaps() { return F == Q4 && C % 2 == 0; }

// Which rows a simdgroup has, and which groups of columns.
struct MmaPlace {
  uint row, rows;            // the lane's first row, all rows of the matrix
  uint groups;               // of columns
  uint first, end;           // the simdgroup's chunks of C groups
  uint part;                 // l % 4
};

// A chunk of C groups of T tiles: a lane's words, and scales and biases, two in a word.
template <uint F, uint T, uint C> struct MmaChunk {
  uint w[T][2][C * lane_words<F>()];
  uint scales[T][2][(C + 1) / 2], biases[T][2][(C + 1) / 2];
};

// C scales or biases from group `at` on.
template <uint C> FN void load_affine(const DEVICE bf16 *from, ulong at, THREAD uint *to)
{
  if (C == 4) {
    const uint2 v = load2((const DEVICE uint *)(from + at));
    to[0] = v.x;
    to[1] = v.y;
  } else if (C == 2) {
    to[0] = *(const DEVICE uint *)(from + at);
  } else {
    to[0] = as_u(f32(from[at])) >> 16;
  }
}

template <uint F, uint T, uint C>
FN void load_chunk(const THREAD Rows (&m)[T], const THREAD MmaPlace &at, uint tile_step, uint chunk, THREAD MmaChunk<F, T, C> &to)
{
  constexpr uint W = lane_words<F>();
#pragma unroll
  for (uint t = 0; t < T; t++)
#pragma unroll
    for (uint h = 0; h < 2; h++) {
      const uint row = min(at.row + t * tile_step + h * 8, at.rows - 1);
      const ulong group = ulong(row) * at.groups + chunk * C;
      const DEVICE uint *from = m[t].codes + group * group_words<F>() + at.part * (swaps<F, C>() ? 4 : W);
#pragma unroll
      for (uint c = 0; c < C; c++, from += group_words<F>()) {
        if (swaps<F, C>()) {
          if (c % 2 == 1) continue;
          const uint4 v = load4(from);
          to.w[t][h][c * W] = v.x;
          to.w[t][h][c * W + 1] = v.y;
          to.w[t][h][c * W + 2] = v.z;
          to.w[t][h][c * W + 3] = v.w;
        } else if (F == Q4) {
          const uint2 v = load2(from);
          to.w[t][h][c * W] = v.x;
          to.w[t][h][c * W + 1] = v.y;
        } else {
#pragma unroll
          for (uint i = 0; i < W; i += 4) {
            const uint4 v = load4(from + i);
            to.w[t][h][c * W + i] = v.x;
            to.w[t][h][c * W + i + 1] = v.y;
            to.w[t][h][c * W + i + 2] = v.z;
            to.w[t][h][c * W + i + 3] = v.w;
          }
        }
      }
      if (F == Q4 || F == Q8) {
        load_affine<C>(m[t].scales, group, to.scales[t][h]);
        load_affine<C>(m[t].biases, group, to.biases[t][h]);
      }
    }
}

// A chunk on its way into the cache: the four lanes of a row take 32 bytes of each 128.
template <uint F, uint T, uint C>
FN void prefetch_chunk(const THREAD Rows (&m)[T], const THREAD MmaPlace &at, uint tile_step, uint chunk)
{
#pragma unroll
  for (uint t = 0; t < T; t++)
#pragma unroll
    for (uint h = 0; h < 2; h++) {
      const uint row = min(at.row + t * tile_step + h * 8, at.rows - 1);
      const ulong group = ulong(row) * at.groups + chunk * C;
      for (uint i = at.part * 8; i < C * group_words<F>(); i += 32) prefetch(m[t].codes + group * group_words<F>() + i);
      if ((F == Q4 || F == Q8) && at.part == 0) {
        prefetch(m[t].scales + group);
        prefetch(m[t].biases + group);
      }
    }
}

// Pair i of a lane's 16 elements of a group as bf16, as codes come apart; and the same of x.
template <uint F> FN uint weight_pair(const THREAD uint *w, uint i)
{
  if (F == Q4) return code_pair((w[i / 4] >> (i % 4 * 4)) & 0x000f000fu);
  if (F == Q8) {
    const uint v = w[i / 2] >> (i % 2 * 8);
    return pack2(as_f((v & 0xffu) | 0x4b000000u) - 8388608.0f, as_f((v >> 16 & 0xffu) | 0x4b000000u) - 8388608.0f);
  }
  return w[i];
}
template <uint F> FN uint x_pair(const THREAD uint *x, uint i)
{
  const uint apart = F == Q4 ? 2 : 1, a = F == Q4 ? i / 4 * 4 + i % 4 / 2 : i / 2 * 2;
  if (F == BF16) return x[i];
  return i % 2 == 0 ? (x[a] & 0xffffu) | x[a + apart] << 16 : x[a] >> 16 | (x[a + apart] & 0xffff0000u);
}

// Where x comes from: rows of bf16 words, in threadgroup memory if it was normalized.
struct MmaInput {
  const DEVICE uint *x;
  const TG uint *tile;
  uint stride, rows;
  bool staged;
};

FN void load_x(const THREAD MmaInput &in, uint row, uint word, THREAD uint *x)
{
  if (row >= in.rows) {
#pragma unroll
    for (uint i = 0; i < 8; i++) x[i] = 0;
    return;
  }
  uint4 a, b;
  if (in.staged) {
    a = load4(in.tile + row * in.stride + word);
    b = load4(in.tile + row * in.stride + word + 4);
  } else {
    a = load4(in.x + ulong(row) * in.stride + word);
    b = load4(in.x + ulong(row) * in.stride + word + 4);
  }
  x[0] = a.x; x[1] = a.y; x[2] = a.z; x[3] = a.w;
  x[4] = b.x; x[5] = b.y; x[6] = b.z; x[7] = b.w;
}

// Of four words the first two are the first group's afterwards, the others the second's.
FN void swap_halves(THREAD uint *w, bool second)
{
  const uint a = simd_shuffle_xor(second ? w[0] : w[2], 2), b = simd_shuffle_xor(second ? w[1] : w[3], 2);
  if (second) {
    w[0] = a;
    w[1] = b;
  } else {
    w[2] = a;
    w[3] = b;
  }
}

// Adds a chunk's products to y: of each tile rows l / 4 and + 8, columns 2 (l % 4) and the next.
template <uint F, uint T, uint C>
FN void multiply_chunk(THREAD MmaChunk<F, T, C> &w, const THREAD MmaInput &in, uint chunk, uint lane, THREAD float (&y)[T][4])
{
  constexpr uint W = lane_words<F>();
  const uint part = lane % 4, place = swaps<F, C>() ? part % 2 * 2 + part / 2 : part;
  if (swaps<F, C>()) {
#pragma unroll
    for (uint t = 0; t < T; t++)
#pragma unroll
      for (uint h = 0; h < 2; h++)
#pragma unroll
        for (uint i = 0; i < C * W; i += 4) swap_halves(w.w[t][h] + i, part >= 2);
  }
#pragma unroll
  for (uint c = 0; c < C; c++) {
    uint x[8], xs[8];
    load_x(in, lane / 4, (chunk * C + c) * 32 + place * 8, x);
    float left = 0.0f, right = 0.0f; // sums of the lane's two columns
    if (F == Q4 || F == Q8) {
      float sum = 0.0f;
#pragma unroll
      for (uint i = 0; i < 8; i++) sum += bf16_low(x[i]) + bf16_high(x[i]);
      sum += simd_shuffle_xor(sum, 1);
      sum += simd_shuffle_xor(sum, 2);
      left = simd_shuffle(sum, part * 8);
      right = simd_shuffle(sum, part * 8 + 4);
    }
#pragma unroll
    for (uint i = 0; i < 8; i++) xs[i] = x_pair<F>(x, i);
#pragma unroll
    for (uint t = 0; t < T; t++) {
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (uint j = 0; j < 4; j++) {
        const uint a[4] = {weight_pair<F>(w.w[t][0] + c * W, 2 * j), weight_pair<F>(w.w[t][1] + c * W, 2 * j),
                           weight_pair<F>(w.w[t][0] + c * W, 2 * j + 1), weight_pair<F>(w.w[t][1] + c * W, 2 * j + 1)};
        mma16(d, a, xs[2 * j], xs[2 * j + 1]);
      }
#pragma unroll
      for (uint h = 0; h < 2; h++) {
        if (F == Q4 || F == Q8) {
          const float s = c % 2 == 0 ? bf16_low(w.scales[t][h][c / 2]) : bf16_high(w.scales[t][h][c / 2]);
          const float b = c % 2 == 0 ? bf16_low(w.biases[t][h][c / 2]) : bf16_high(w.biases[t][h][c / 2]);
          y[t][2 * h] = fma(s, d[2 * h], fma(b, left, y[t][2 * h]));
          y[t][2 * h + 1] = fma(s, d[2 * h + 1], fma(b, right, y[t][2 * h + 1]));
        } else {
          y[t][2 * h] += d[2 * h];
          y[t][2 * h + 1] += d[2 * h + 1];
        }
      }
    }
  }
}

// The threadgroup's launch, as its kernel is given it.
struct MmaLaunch {
  const DEVICE uint *x, *norm, *slab;
  DEVICE uint *out;
  const DEVICE float *residual;
  DEVICE uint *normed;
  uint matrix, block; // which of the matrices, which block of its rows
  uint lane, simd, tid;
};

#define MMA_SIMDS 8u
#define MMA_COLUMNS 4096u // of rows that are normalized on the way
#define MMA_STAGED 2u     // such rows

// Normalizes the rows of x into the tile.
FN void stage_normed(const THREAD MmaLaunch &at, CONSTANT GemvArgs &p, TG uint *tile, TG float *shares)
{
  GemvInput in;
  in.x = at.x;
  in.cols = p.cols;
  in.rows = p.rows;
  in.normed = true;
  in.norm = slab_f32(at.norm, p.norm);
  in.shares = shares;
  in.eps = p.eps;
  in.normed_out = at.normed;
  in.keeps = p.keeps_normed != 0 && at.matrix == 0 && at.block == 0;
#pragma unroll 1
  for (uint m = 0; m < p.rows; m++) square_shares((const DEVICE float *)at.x + ulong(m) * p.cols, p.cols, shares + m * 8, at.lane, at.simd, MMA_SIMDS);
  tg_barrier();
  stage_x<BF16>(in, 0, p.cols, 1, tile, p.cols / 2, at.tid, MMA_SIMDS * 32);
  tg_barrier();
}

// What was summed of a block of tiles goes out: each result is the sum of its tile's simdgroups.
template <uint T>
FN void mma_store(const THREAD MmaLaunch &at, CONSTANT GemvArgs &p, const TG float *parts, uint split, uint first_row)
{
  const uint epilogue = p.matrices[at.matrix].epilogue, rows = p.matrices[at.matrix].weight.rows;
  const uint tiles = T * MMA_SIMDS / split, members = epilogue == GATED ? 2 : 1, wide = tiles / members * 16;
  for (uint i = at.tid; i < wide * p.rows; i += MMA_SIMDS * 32) {
    const uint n = i / wide, r = i % wide, row = first_row + r;
    if (row >= rows) continue;
    float y[2] = {0.0f, 0.0f};
    for (uint k = 0; k < members; k++) {
      const uint tile = r / 16 * members + k;
      for (uint s = 0; s < split; s++) y[k] += parts[((tile / T * split + s) * T + tile % T) * 128 + r % 16 * 8 + n];
    }
    const ulong to = ulong(n) * rows + row;
    gemv_store(at.out, epilogue == ADD_TO ? at.residual[to] : 0.0f, epilogue, to, y[0], y[1]);
  }
}

template <uint F, uint T, uint C>
FN void gemv_mma_blocks(const THREAD MmaLaunch &at, CONSTANT GemvArgs &p, TG uint *tile, TG float *shares, TG float *parts)
{
  const uint split = p.matrices[at.matrix].lanes, tasks = MMA_SIMDS / split, task = at.simd / split;
  const bool paired = p.matrices[at.matrix].epilogue == GATED;
  Rows m[T];
  m[0] = rows_of(at.slab, p.matrices[at.matrix].weight, 0);
  // Of a pair of matrices each simdgroup has the same tile of both.
  if (T == 2) m[T - 1] = paired ? rows_of(at.slab, p.matrices[at.matrix].up, 0) : m[0];
  const uint tile_step = paired ? 0 : 16, own = paired ? 1 : T, block = tasks * own * 16;
  MmaPlace place;
  place.rows = p.matrices[at.matrix].weight.rows;
  place.groups = p.cols / 64;
  place.part = at.lane % 4;
  // Simdgroups share the columns by fours of groups where there are whole fours, so that C changes no sum.
  const uint unit = place.groups % 4 == 0 ? 4 : 1, each = (place.groups / unit + split - 1) / split * unit;
  const uint first_row = at.block * p.repeat * block;
  place.row = first_row + task * own * 16 + at.lane / 4;
  place.first = min(at.simd % split * each, place.groups) / C;
  place.end = min(at.simd % split * each + each, place.groups) / C;
  const bool any = place.first < place.end;
  MmaChunk<F, T, C> now;
  if (any) load_chunk<F, T, C>(m, place, tile_step, place.first, now);
  for (uint c = place.first + 1; c < min(place.end, place.first + 4); c++) prefetch_chunk<F, T, C>(m, place, tile_step, c);
  if (p.normed != 0) for (uint u = at.tid * 8; u < p.cols; u += MMA_SIMDS * 256) prefetch(slab_f32(at.norm, p.norm) + u);
  inputs_ready();
  MmaInput in;
  in.x = at.x;
  in.tile = tile;
  in.stride = p.cols / 2;
  in.rows = p.rows;
  in.staged = p.normed != 0;
  if (in.staged) stage_normed(at, p, tile, shares);
#pragma unroll 1
  for (uint k = 0; k < p.repeat; k++) {
    float y[T][4];
#pragma unroll
    for (uint t = 0; t < T; t++)
#pragma unroll
      for (uint i = 0; i < 4; i++) y[t][i] = 0.0f;
    MmaPlace next = place;
#pragma unroll 1
    for (uint c = place.first; c < place.end; c++) {
      MmaChunk<F, T, C> soon;
      const bool last = c + 1 == place.end;
      if (last) next.row += block;
      if (!last || k + 1 < p.repeat) load_chunk<F, T, C>(m, next, tile_step, last ? place.first : c + 1, soon);
      multiply_chunk<F, T, C>(now, in, c, at.lane, y);
      now = soon;
    }
    if (k > 0) tg_barrier(); // the sums before have been read
#pragma unroll
    for (uint t = 0; t < T; t++) {
      TG float *to = parts + (at.simd * T + t) * 128 + at.lane / 4 * 8 + at.lane % 4 * 2;
      to[0] = y[t][0];
      to[1] = y[t][1];
      to[64] = y[t][2];
      to[65] = y[t][3];
    }
    tg_barrier();
    mma_store<T>(at, p, parts, split, first_row + k * block);
    place.row += block;
  }
}

template <uint T> FN void gemv_mma(THREAD MmaLaunch &at, CONSTANT GemvArgs &p, TG uint *tile, TG float *shares, TG float *parts)
{
  // As many groups at once as registers allow for, twice.
  constexpr uint C4 = T == 1 ? 4 : 2, C8 = T == 1 ? 2 : 1;
  const uint format = p.matrices[at.matrix].weight.format;
  const bool fours = p.cols / 64 % 4 == 0;
  if (format == Q4 && fours) gemv_mma_blocks<Q4, T, C4>(at, p, tile, shares, parts);
  else if (format == Q4) gemv_mma_blocks<Q4, T, 1>(at, p, tile, shares, parts);
  else if (format == Q8 && fours) gemv_mma_blocks<Q8, T, C8>(at, p, tile, shares, parts);
  else if (format == Q8) gemv_mma_blocks<Q8, T, 1>(at, p, tile, shares, parts);
  else gemv_mma_blocks<BF16, T, 1>(at, p, tile, shares, parts);
}

// Bound as gemv.metal's kernels are.
#define GEMV_MMA(name, T)                                                                                              \
  KERNEL(name, 512, IN(0, uint, x), IN(1, uint, norm), IN(2, uint, slab), OUT(3, uint, out0), OUT(4, uint, out1), OUT(5, uint, out2), \
         OUT(6, uint, out3), OUT(7, uint, out4), OUT(8, uint, out5), IN(9, float, residual), OUT(10, uint, normed),         \
         ARGS(11, GemvArgs, p))                                                                                           \
  {                                                                                                                    \
    SHARED(uint, tile, MMA_STAGED * MMA_COLUMNS / 2);                                                                  \
    SHARED(float, shares, MMA_STAGED * 8);                                                                             \
    SHARED(float, parts, MMA_SIMDS * T * 128);                                                                         \
    uint i = 0, first = 0;                                                                                             \
    while (i + 1 < p.count && k_group.x >= p.matrices[i].end) first = p.matrices[i++].end;                             \
    MmaLaunch at = {x, norm, slab, i == 0 ? out0 : i == 1 ? out1 : i == 2 ? out2 : i == 3 ? out3 : i == 4 ? out4 : out5, residual, normed, \
                    i, k_group.x - first, k_lane, k_simd, k_thread.x};                                                 \
    gemv_mma<T>(at, p, tile, shares, parts);                                                                           \
  }
GEMV_MMA(gemv_mma_1, 1)
GEMV_MMA(gemv_mma_2, 2)
#endif
