#if defined(K_CUDA) || defined(K_CPU)
// y = W x for 1 to 8 rows of x by the products of mma_slice.metal.

// Words of a row of x in threadgroup memory and of its groups' sums, three parts of them: whole slices of all simdgroups, and a pad of 16 bytes.
FN constexpr uint x_words(uint cols) { return (cols + 2047) / 2048 * 1024 + 4; }
FN constexpr uint x_sums(uint cols) { return (cols + 2047) / 2048 * 16 * 3; }
FN constexpr uint mma_words(uint rows, uint cols) { return MMA_SIMDS * MMA_SLICE + rows * (x_words(cols) + x_sums(cols)) + MMA_SIMDS * 16 * rows + 16; }

// A second slice for each simdgroup, and room for its sums.
FN constexpr uint deep_words(uint rows) { return MMA_SIMDS * MMA_SLICE + MMA_SIMDS * 16 * rows; }

// Threadgroup memory of a launch.
struct MmaMemory {
  TG uint *slices, *x;
  TG bf16 *sums;
  TG float *parts, *shares;
  uint x_row, sums_part; // words of a row of x, and of one part of its groups' sums; a row has three
};

FN MmaMemory mma_memory(TG uint *memory, uint rows, uint cols)
{
  MmaMemory m;
  m.slices = memory;
  m.x = memory + MMA_SIMDS * MMA_SLICE;
  m.x_row = x_words(cols);
  m.sums = (TG bf16 *)(m.x + rows * m.x_row);
  m.sums_part = x_sums(cols) / 3;
  m.parts = (TG float *)(m.x + rows * (m.x_row + x_sums(cols)));
  m.shares = m.parts + MMA_SIMDS * 16 * rows;
  return m;
}

// x [rows][cols] of bf16, whole slices of it, all pieces of a thread under way at once: two of one row, or one of each of eight.
template <uint F, bool ONE> FN void stage_rows(const DEVICE uint *x, uint rows, uint cols, const THREAD MmaMemory &m, uint tid)
{
  constexpr uint N = ONE ? 2 : 8;
  uint4 q[N];
#pragma unroll
  for (uint i = 0; i < N; i++) {
    const uint row = ONE ? 0 : i, u = ONE ? i * MMA_THREADS + tid : tid;
    q[i] = row < rows && u < cols / 8 ? load4(x + ulong(row) * (cols / 2) + u * 4) : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (uint i = 0; i < N; i++) {
    const uint row = ONE ? 0 : i, u = ONE ? i * MMA_THREADS + tid : tid;
    if (row >= rows || (ONE && i * 2048 >= cols)) continue;
    stage_piece<F>(q[i], u, m.x + row * m.x_row, m.sums + row * m.sums_part * 6, m.sums_part);
  }
}

// The launch of a GEMV, as its kernel is given it.
struct MmaLaunch {
  const DEVICE uint *x, *norm, *slab;
  DEVICE uint *out;
  const DEVICE float *residual;
  DEVICE uint *normed;
  uint matrix, block; // which of the matrices, which block of its rows
  uint lane, simd, tid;
};

// Rows of the residual stream, normalized on the way: the bits of rms_norm. The first 2048 columns are under way for their squares and as
// pieces at once.
template <uint F>
FN void stage_normed(const THREAD MmaLaunch &at, CONSTANT GemvArgs &p, const THREAD MmaMemory &m)
{
  const DEVICE float *norm = slab_f32(at.norm, p.norm);
  const bool keeps = p.keeps_normed != 0 && at.matrix == 0 && at.block == 0;
#pragma unroll 1
  for (uint row = 0; row < p.rows; row++) {
    const DEVICE float *x = (const DEVICE float *)at.x + ulong(row) * p.cols;
    const bool mine = at.tid < p.cols / 8;
    float4 a, b, v, z;
    if (mine) {
      a = load4(x + at.tid * 8);
      b = load4(x + at.tid * 8 + 4);
    }
    // Shares of the squares as in square_shares.
    float4 first[2];
#pragma unroll
    for (uint j = 0; j < 2; j++) {
      const uint c = at.tid * 4 + j * 1024;
      first[j] = c < p.cols ? load4(x + c) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    if (mine) {
      v = load4(norm + at.tid * 8);
      z = load4(norm + at.tid * 8 + 4);
    }
    const float s = simd_sum(squares_from(x, at.tid * 4 + 2048, p.cols, add_squares(first[1], add_squares(first[0], 0.0f))));
    if (at.lane == 0) m.shares[row * 8 + at.simd] = s;
    tg_barrier();
    const float scale = inverse_rms(m.shares + row * 8, p.cols, p.eps);
#pragma unroll 1
    for (uint u = at.tid; u < (p.cols + 2047) / 2048 * MMA_THREADS; u += MMA_THREADS) {
      uint q[4] = {0, 0, 0, 0};
      if (u < p.cols / 8) {
        if (u != at.tid) {
          a = load4(x + u * 8);
          b = load4(x + u * 8 + 4);
          v = load4(norm + u * 8);
          z = load4(norm + u * 8 + 4);
        }
        normed_piece(a, b, v, z, scale, q);
        if (keeps) store4(at.normed + (ulong(row) * p.cols + u * 8) / 2, q[0], q[1], q[2], q[3]);
      }
      stage_piece<F>(uint4{q[0], q[1], q[2], q[3]}, u, m.x + row * m.x_row, m.sums + row * m.sums_part * 6, m.sums_part);
    }
  }
}

// Where a simdgroup has its slices of x from: threadgroup memory, or device memory by registers.
struct MmaStagedRows {
  const THREAD MmaMemory &m;
  uint row; // the lane's
};
template <uint C> struct MmaDirectRows {
  const DEVICE uint *x;
  uint rows, cols;
  bool again; // whether each slice has to be loaded, or is the one that is there
  MmaInput<C> in;
};

template <uint F, uint C> FN MmaStaged next_input(const THREAD MmaStagedRows &x, uint slice, uint)
{
  return MmaStaged{x.m.x + x.row * x.m.x_row + slice * C * 32, (const TG uint *)x.m.sums + x.row * x.m.sums_part * 3 + slice * C / 2, x.m.sums_part};
}
template <uint F, uint C> FN const THREAD MmaInput<C> &next_input(THREAD MmaDirectRows<C> &x, uint slice, uint lane)
{
  if (x.again) load_input<F, C>(x.x, x.rows, x.cols, slice, x.in, lane);
  return x.in;
}

// A simdgroup's sums of its tile with all its slices. `first`: the slice that is on its way to threadgroup memory; the others follow, and then
// that of the next block's tile, if there is one.
template <uint F, bool ONE, class X>
FN void multiply_tile(const THREAD MmaTile &tile, uint next_row, bool more, uint first, uint split, THREAD X &x, THREAD MmaAffine<slice_groups<F>()> &affine, TG uint *slice, uint lane, THREAD float (&y)[4])
{
  constexpr uint C = slice_groups<F>();
  const uint slices = (tile.groups + C - 1) / C;
#pragma unroll
  for (uint i = 0; i < 4; i++) y[i] = 0.0f;
  for (uint c = first; c < slices; c += split) {
    const auto &in = next_input<F, C>(x, c, lane);
    copy_wait();
    simd_fence();
    multiply_slice<F, C, ONE>(slice, affine, in, tile.groups - c * C, lane, y);
    const bool last = c + split >= slices;
    if (last && !more) continue;
    simd_fence(); // all lanes have read the slice
    MmaTile next = tile;
    if (last) next.row = next_row;
    copy_slice<F>(next, last ? first : c + split, slice, lane);
    if (F != BF16) load_affine<C>(next, last ? first : c + split, affine, lane);
  }
  if (F != BF16) {
#pragma unroll
    for (uint i = 0; i < 4; i++) y[i] *= CODE_PAIR_BACK;
  }
}

// A simdgroup's results, for whoever puts them together: [simdgroup][16 rows][rows of x].
template <bool ONE> FN void keep_parts(const THREAD float (&y)[4], TG float *parts, uint rows, uint lane)
{
#pragma unroll
  for (uint i = 0; i < 4; i++) {
    const uint row = lane / 4 + i / 2 * 8, n = lane % 4 * 2 + i % 2;
    if (n < rows) parts[row * rows + n] = y[i];
  }
}

// The sum of a tile's simdgroups.
FN float sum_parts(const TG float *parts, uint split, uint step)
{
  float sum = parts[0];
  for (uint s = 1; s < split; s++) sum += parts[s * step];
  return sum;
}

// For many blocks of one slice a simdgroup: two slices, one that is multiplied while the next block's is on its way to the other, and likewise the
// sums of two blocks, one of which is put together meanwhile.
template <uint C> struct DeepSlices {
  TG uint *slice, *other;
  TG float *parts, *spare;
  MmaAffine<C> affine, soon;
};

// The next block's slice on its way, once this one's is there.
template <uint F, uint C> FN void deep_next(THREAD DeepSlices<C> &d, const THREAD MmaTile &next, uint first, uint lane)
{
  copy_slice<F>(next, first, d.other, lane);
  load_affine<C>(next, first, d.soon, lane);
}

// The simdgroup's sums with the slice that is there, kept at `at` of the parts that are returned; then it is the other slice's turn.
template <uint F, bool ONE, uint C, class X>
FN TG float *deep_sums(THREAD DeepSlices<C> &d, const THREAD X &in, bool has, uint groups, uint at, uint rows, uint lane)
{
  float y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (has) multiply_slice<F, C, ONE>(d.slice, d.affine, in, groups, lane, y);
#pragma unroll
  for (uint i = 0; i < 4; i++) y[i] *= CODE_PAIR_BACK;
  TG uint *const slice = d.slice;
  d.slice = d.other;
  d.other = slice;
  TG float *const parts = d.parts;
  d.parts = d.spare;
  d.spare = parts;
  d.affine = d.soon;
  keep_parts<ONE>(y, parts + at, rows, lane);
  return parts;
}

// STAGED: x by way of threadgroup memory, which all simdgroups fill; or each loads its own slices, where few would want the same. DEEP, staged: see
// DeepSlices.
template <uint F, bool ONE, bool STAGED, bool DEEP> FN void gemv_mma_blocks(const THREAD MmaLaunch &at, CONSTANT GemvArgs &p, TG uint *memory)
{
  constexpr uint C = slice_groups<F>();
  const uint split = p.matrices[at.matrix].lanes, tiles = MMA_SIMDS / split, mine = at.simd / split, first = at.simd % split;
  const uint epilogue = p.matrices[at.matrix].epilogue, members = epilogue == GATED ? 2 : 1, block = tiles / members * 16;
  const MmaMemory m = mma_memory(memory + (DEEP ? deep_words(ONE ? 1 : 8) : 0), p.rows, STAGED ? p.cols : 0);
  DeepSlices<C> d;
  d.slice = m.slices + at.simd * MMA_SLICE;
  d.other = memory + at.simd * MMA_SLICE;
  d.parts = m.parts;
  d.spare = (TG float *)(memory + MMA_SIMDS * MMA_SLICE);
  MmaTile tile;
  tile.w = mine % members == 1 ? rows_of(at.slab, p.matrices[at.matrix].up, 0) : rows_of(at.slab, p.matrices[at.matrix].weight, 0);
  tile.rows = p.matrices[at.matrix].weight.rows;
  tile.groups = p.cols / 64;
  uint first_row = at.block * p.repeat * block;
  tile.row = first_row + mine / members * 16;
  const uint blocks = min(p.repeat, (tile.rows - first_row + block - 1) / block);
  const bool has = first * C < tile.groups;
  if (has) {
    copy_slice<F>(tile, first, d.slice, at.lane);
    if (F != BF16) load_affine<C>(tile, first, d.affine, at.lane);
  }
  if (STAGED && p.normed != 0) for (uint u = at.tid * 8; u < p.cols; u += MMA_THREADS * 8) prefetch(slab_f32(at.norm, p.norm) + u);
  inputs_ready();
  // One result a thread, where there are no more: what it is added to comes while the sums are made.
  const bool single = epilogue == ADD_TO && block * p.rows <= MMA_THREADS;
  if (STAGED) {
    if (p.normed != 0) stage_normed<F>(at, p, m);
    else stage_rows<F, ONE>(at.x, p.rows, p.cols, m, at.tid);
    tg_barrier();
  }
  MmaDirectRows<C> direct;
  direct.x = at.x;
  direct.rows = p.rows;
  direct.cols = p.cols;
  const MmaStagedRows staged = {m, ONE ? 0 : min(at.lane / 4, p.rows - 1)};
#pragma unroll 1
  for (uint k = 0; k < blocks; k++) {
    float base = 0.0f;
    if (single && at.tid < block * p.rows && first_row + at.tid % block < tile.rows) base = at.residual[ulong(at.tid / block) * tile.rows + first_row + at.tid % block];
    const TG float *parts = m.parts;
    direct.again = k == 0 || (tile.groups + C - 1) / C > split;
    if (DEEP) {
      copy_wait();
      simd_fence();
      tile.row += block;
      if (has && k + 1 < blocks) deep_next<F>(d, tile, first, at.lane);
      parts = deep_sums<F, ONE>(d, next_input<F, C>(staged, first, at.lane), has, tile.groups - first * C, at.simd * 16 * p.rows, p.rows, at.lane);
    } else {
      float y[4];
      if (STAGED) multiply_tile<F, ONE>(tile, tile.row + block, k + 1 < blocks, first, split, staged, d.affine, d.slice, at.lane, y);
      else multiply_tile<F, ONE>(tile, tile.row + block, k + 1 < blocks, first, split, direct, d.affine, d.slice, at.lane, y);
      tile.row += block;
      if (k > 0) tg_barrier(); // the sums before have been read
      keep_parts<ONE>(y, m.parts + at.simd * 16 * p.rows, p.rows, at.lane);
    }
    tg_barrier();
    for (uint i = at.tid; i < block * p.rows; i += MMA_THREADS) {
      const uint n = i / block, r = i % block, row = first_row + r;
      if (row >= tile.rows) continue;
      const uint step = 16 * p.rows;
      const TG float *of = parts + r / 16 * members * split * step + r % 16 * p.rows + n;
      const float y0 = sum_parts(of, split, step), y1 = members == 2 ? sum_parts(of + split * step, split, step) : 0.0f;
      const ulong to = ulong(n) * tile.rows + row;
      if (epilogue == ADD_TO && !single) base = at.residual[to];
      gemv_store(at.out, base, epilogue, to, y0, y1);
    }
    first_row += block;
  }
}

// Bound as gemv.metal's kernels are. ROWS of x at most, COLS columns in threadgroup memory. A core's registers
// are enough for THREADS: three threadgroups, of the deep one two, of the wide one, which is one wave where it is wanted, one.
#define GEMV_MMA(name, THREADS, ROWS, COLS, DEEP)                                                                      \
  KERNEL(name, THREADS, GEMV_OPERANDS)                                                                                 \
  {                                                                                                                    \
    static_assert(mma_words(ROWS, COLS) + (DEEP ? deep_words(ROWS) : 0) <= LARGE_##name, "text::LARGE_MEMORY");        \
    SHARED_LARGE(uint, memory, LARGE_##name);                                                                          \
    uint i = 0, first = 0;                                                                                             \
    while (i + 1 < p.count && k_group.x >= p.matrices[i].end) first = p.matrices[i++].end;                             \
    const MmaLaunch at = {x, norm, slab, i == 0 ? out0 : i == 1 ? out1 : i == 2 ? out2 : i == 3 ? out3 : i == 4 ? out4 : out5, residual, normed, \
                          i, k_group.x - first, k_lane, k_simd, k_thread.x};                                           \
    const uint format = p.matrices[i].weight.format;                                                                   \
    if (DEEP || format == Q4) gemv_mma_blocks<Q4, ROWS == 1, COLS != 0, DEEP>(at, p, memory);                          \
    else if (format == Q8) gemv_mma_blocks<Q8, ROWS == 1, COLS != 0, false>(at, p, memory);                            \
    else gemv_mma_blocks<BF16, ROWS == 1, COLS != 0, false>(at, p, memory);                                            \
  }
GEMV_MMA(gemv_mma_1, 768, 1, 4096, false)
GEMV_MMA(gemv_mma_8, 768, 8, 2048, false)
GEMV_MMA(gemv_mma_8_wide, 384, 8, 0, false)
GEMV_MMA(gemv_mma_1_deep, 512, 1, 4096, true)
#endif
