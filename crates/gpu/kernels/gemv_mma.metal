#if defined(K_CUDA) || defined(K_CPU)
// y = W x for 1 to 8 rows of x by mma.sync m16n8k16: 16 rows of W, a tile, against the 8 columns that are the rows of x, so that eight
// rows cost what one costs. A simdgroup has a tile and of its columns a slice of 256 bytes a row, which it copies to threadgroup memory
// before the inputs are there (cp.async); `split` simdgroups share a tile. Codes are no numbers first: below 256 the bits of a bf16, taken
// as they lie, are that many times its smallest step, so a mask makes an operand of two codes, and what stands 16 times too high meets an x
// that is 16 times smaller. Each group of 64 columns is summed on its own and then scaled; the groups' biases are a product of their own,
// with the sums of x in three parts of bf16. The order of a sum depends on the matrix alone: biases, then groups ascending in a simdgroup,
// then simdgroups ascending.
// Lane l has rows l / 4 and l / 4 + 8 of the tile and 16 elements of a group, those from 16 (l % 4) on; of x row l / 4.
// Bytes: the matrices once, codes and scales; x once a threadgroup, out of a cache. Instructions for a group of a tile, 32 weights a lane:
// about 35.

#define MMA_SIMDS 8u
#define MMA_THREADS (MMA_SIMDS * 32)
#define MMA_ROW 72u               // words of a slice's row: the pad puts neighbouring rows where 4-bit codes do not meet in a bank
#define MMA_SLICE (16 * MMA_ROW)

// Groups of a slice, and words of a group.
template <uint F> FN constexpr uint slice_groups() { return F == Q4 ? 8 : F == Q8 ? 4 : 2; }
template <uint F> FN constexpr uint group_words() { return F == Q4 ? 8 : F == Q8 ? 16 : 32; }

// Words of a row of x in threadgroup memory and of its groups' sums, three parts of them: whole slices of all simdgroups, and a pad of 16 bytes.
FN constexpr uint x_words(uint cols) { return (cols + 2047) / 2048 * 1024 + 4; }
FN constexpr uint x_sums(uint cols) { return (cols + 2047) / 2048 * 16 * 3; }
FN constexpr uint mma_words(uint rows, uint cols) { return MMA_SIMDS * MMA_SLICE + rows * (x_words(cols) + x_sums(cols)) + MMA_SIMDS * 16 * rows + 16; }

// A simdgroup's tile of one matrix.
struct MmaTile {
  Rows w;
  uint row, rows, groups; // the first row, all rows of the matrix, groups of a row
};

// What a lane knows of C groups of its two rows: scales, two in a word, and biases as an operand.
template <uint C> struct MmaAffine {
  uint scales[2][C / 2], biases[2];
};

// Two neighbours of `n`, zero behind the last one.
FN uint bf16_pair(const DEVICE bf16 *p, uint i, uint n)
{
  if (n % 2 == 0) return i < n ? *(const DEVICE uint *)(p + i) : 0u;
  return (i < n ? as_u(f32(p[i])) >> 16 : 0u) | (i + 1 < n ? as_u(f32(p[i + 1])) & 0xffff0000u : 0u);
}

// A slice of the tile on its way to threadgroup memory; zeros behind a row's end.
template <uint F> FN void copy_slice(const THREAD MmaTile &t, uint slice, TG uint *to, uint lane)
{
  const uint width = t.groups * group_words<F>(), at = slice * 64 + lane % 16 * 4;
#pragma unroll
  for (uint r = lane / 16; r < 16; r += 2)
    copy_async(to + r * MMA_ROW + lane % 16 * 4, t.w.codes + ulong(min(t.row + r, t.rows - 1)) * width + (at < width ? at : 0), at < width);
}

template <uint C> FN void load_affine(const THREAD MmaTile &t, uint slice, THREAD MmaAffine<C> &to, uint lane)
{
#pragma unroll
  for (uint h = 0; h < 2; h++) {
    const ulong row = ulong(min(t.row + lane / 4 + h * 8, t.rows - 1)) * t.groups;
    const DEVICE bf16 *s = t.w.scales + row, *b = t.w.biases + row;
    const uint first = slice * C;
    if (C == 8 && t.groups % 8 == 0) {
      const uint4 v = load4((const DEVICE uint *)(s + first));
      to.scales[h][0] = v.x;
      to.scales[h][1] = v.y;
      to.scales[h][C / 2 - 2] = v.z;
      to.scales[h][C / 2 - 1] = v.w;
    } else {
#pragma unroll
      for (uint i = 0; i < C; i += 2) to.scales[h][i / 2] = bf16_pair(s, first + i, t.groups);
    }
    to.biases[h] = lane % 4 * 2 < C ? bf16_pair(b, first + lane % 4 * 2, t.groups) : 0u;
  }
}

// Pair i of a lane's 16 elements of a group.
template <uint F> FN uint weight_pair(const THREAD uint *w, uint i)
{
  if (F == Q4) return code_pair(w[i / 4] >> (i % 4 / 2 * 8) & (i % 2 == 0 ? 0x000f000fu : 0x00f000f0u));
  if (F == Q8) return code_pair(w[i / 2] >> (i % 2 * 8) & 0x00ff00ffu);
  return w[i];
}

// Adds a slice's products to y: rows l / 4 and + 8, columns 2 (l % 4) and the next; of quantized weights CODE_PAIR_DOWN of them. x: the
// lane's row from the slice's first column on; sums: of its groups, the parts `parts` words apart. ONE: all columns are the same. Of 4-bit
// codes two groups at a time, so that a product need not wait for the one before it.
template <uint F, uint C, bool ONE>
FN void multiply_slice(const TG uint *slice, const THREAD MmaAffine<C> &affine, const TG uint *x, const TG uint *sums, uint parts, uint groups, uint lane, THREAD float (&y)[4])
{
  constexpr uint W = group_words<F>() / 4, B = F == Q4 ? 2 : 1;
  if (F != BF16) {
    const uint a[4] = {affine.biases[0], affine.biases[1], 0, 0};
#pragma unroll
    for (uint p = 0; p < 3; p++) mma16(y, a, lane % 4 * 2 < C ? sums[p * parts + lane % 4] : 0u, 0u);
  }
  const TG uint *top = slice + lane / 4 * MMA_ROW + lane % 4 * W, *below = top + 8 * MMA_ROW;
#pragma unroll
  for (uint first = 0; first < C; first += B) {
    if (first / 4 * 4 >= groups) continue;
    uint a[B][W], b[B][W], xs[B][8];
    float d[B][4];
#pragma unroll
    for (uint c = 0; c < B; c++) {
      const uint group = first + c;
      if (F == Q4) {
        const uint2 u = load2(top + group * group_words<F>()), v = load2(below + group * group_words<F>());
        a[c][0] = u.x; a[c][1] = u.y;
        b[c][0] = v.x; b[c][1] = v.y;
      } else {
#pragma unroll
        for (uint i = 0; i < W; i += 4) {
          const uint4 u = load4(top + group * group_words<F>() + i), v = load4(below + group * group_words<F>() + i);
          a[c][i] = u.x; a[c][i + 1] = u.y; a[c][i + 2] = u.z; a[c][i + 3] = u.w;
          b[c][i] = v.x; b[c][i + 1] = v.y; b[c][i + 2] = v.z; b[c][i + 3] = v.w;
        }
      }
      const uint4 u = load4(x + group * 32 + lane % 4 * 8), v = load4(x + group * 32 + lane % 4 * 8 + 4);
      xs[c][0] = u.x; xs[c][1] = u.y; xs[c][2] = u.z; xs[c][3] = u.w;
      xs[c][4] = v.x; xs[c][5] = v.y; xs[c][6] = v.z; xs[c][7] = v.w;
      d[c][0] = d[c][1] = d[c][2] = d[c][3] = 0.0f;
    }
#pragma unroll
    for (uint j = 0; j < 4; j++)
#pragma unroll
      for (uint c = 0; c < B; c++) {
        const uint q[4] = {weight_pair<F>(a[c], 2 * j), weight_pair<F>(b[c], 2 * j), weight_pair<F>(a[c], 2 * j + 1), weight_pair<F>(b[c], 2 * j + 1)};
        if (F == BF16) mma16(y, q, xs[c][2 * j], xs[c][2 * j + 1]);
        else mma16(d[c], q, xs[c][2 * j], xs[c][2 * j + 1]);
      }
    if (F == BF16) continue;
#pragma unroll
    for (uint c = 0; c < B; c++)
#pragma unroll
      for (uint h = 0; h < 2; h++) {
        const uint both = affine.scales[h][(first + c) / 2];
        const float s = (first + c) % 2 == 0 ? bf16_low(both) : bf16_high(both);
        y[2 * h] = fma(s, d[c][2 * h], y[2 * h]);
        if (!ONE) y[2 * h + 1] = fma(s, d[c][2 * h + 1], y[2 * h + 1]);
      }
  }
}

// Eight elements of a row of x, as pairs that meet the codes' and as large as these want them; the lane answers for piece `u` of the row.
// Eight lanes with a group's pieces keep its sum. All lanes of the simdgroup come here.
template <uint F> FN void stage_piece(uint4 q, uint u, TG uint *x, TG bf16 *sums, uint parts)
{
  if (F == BF16) {
    store4(x + u * 4, q.x, q.y, q.z, q.w);
    return;
  }
  float sum = ((bf16_low(q.x) + bf16_high(q.x)) + (bf16_low(q.y) + bf16_high(q.y))) + ((bf16_low(q.z) + bf16_high(q.z)) + (bf16_low(q.w) + bf16_high(q.w)));
#pragma unroll
  for (uint d = 1; d < 8; d *= 2) sum += simd_shuffle_xor(sum, d);
  if (u % 8 == 0) {
    sum *= CODE_PAIR_DOWN;
#pragma unroll
    for (uint p = 0; p < 3; p++) {
      const bf16 part = to_bf16(sum);
      sums[p * parts * 2 + u / 8] = part;
      sum -= f32(part);
    }
  }
  // Of 4-bit codes a word's pairs are 0 and 4, 1 and 5, …, of 8-bit codes 0 and 2, 1 and 3; the second and fourth stand 16 times too high.
  const uint a = F == Q4 ? q.z : q.y, b = F == Q4 ? q.y : q.z;
  store4(x + u * 4, scale_pair((q.x & 0xffffu) | a << 16, CODE_PAIR_UP), scale_pair(q.x >> 16 | (a & 0xffff0000u), F == Q4 ? CODE_PAIR_UP / 16.0f : CODE_PAIR_UP),
         scale_pair((b & 0xffffu) | q.w << 16, CODE_PAIR_UP), scale_pair(b >> 16 | (q.w & 0xffff0000u), F == Q4 ? CODE_PAIR_UP / 16.0f : CODE_PAIR_UP));
}

FN void load8(const DEVICE float *p, THREAD float *v)
{
  const float4 a = load4(p), b = load4(p + 4);
  v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
  v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}

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

// x [rows][cols] of bf16, whole slices of it, four pieces a thread under way.
template <uint F> FN void stage_rows(const DEVICE uint *x, uint rows, uint cols, const THREAD MmaMemory &m, uint tid)
{
  const uint pieces = (cols + 2047) / 2048 * MMA_THREADS;
#pragma unroll 1
  for (uint first = 0; first < rows * pieces; first += 4 * MMA_THREADS) {
    uint4 q[4];
#pragma unroll
    for (uint i = 0; i < 4; i++) {
      const uint row = (first + i * MMA_THREADS) / pieces, u = (first + i * MMA_THREADS) % pieces + tid;
      q[i] = row < rows && u < cols / 8 ? load4(x + ulong(row) * (cols / 2) + u * 4) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (uint i = 0; i < 4; i++) {
      const uint row = (first + i * MMA_THREADS) / pieces, u = (first + i * MMA_THREADS) % pieces + tid;
      if (row >= rows) continue;
      stage_piece<F>(q[i], u, m.x + row * m.x_row, m.sums + row * m.sums_part * 6, m.sums_part);
    }
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
    float v[8], w[8], s = 0.0f;
    if (at.tid < p.cols / 8) load8(x + at.tid * 8, v);
    // Shares of the squares as in square_shares.
    float4 z[2];
#pragma unroll
    for (uint j = 0; j < 2; j++) {
      const uint c = at.tid * 4 + j * 1024;
      z[j] = c < p.cols ? load4(x + c) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    if (at.tid < p.cols / 8) load8(norm + at.tid * 8, w);
#pragma unroll
    for (uint j = 0; j < 2; j++) {
      s = fma(z[j].x, z[j].x, s); s = fma(z[j].y, z[j].y, s); s = fma(z[j].z, z[j].z, s); s = fma(z[j].w, z[j].w, s);
    }
    for (uint c = at.tid * 4 + 2048; c < p.cols; c += 1024) {
      const float4 z = load4(x + c);
      s = fma(z.x, z.x, s); s = fma(z.y, z.y, s); s = fma(z.z, z.z, s); s = fma(z.w, z.w, s);
    }
    s = simd_sum(s);
    if (at.lane == 0) m.shares[row * 8 + at.simd] = s;
    tg_barrier();
    const float scale = inverse_rms(m.shares + row * 8, p.cols, p.eps);
#pragma unroll 1
    for (uint u = at.tid; u < (p.cols + 2047) / 2048 * MMA_THREADS; u += MMA_THREADS) {
      uint4 q = {0, 0, 0, 0};
      if (u < p.cols / 8) {
        if (u != at.tid) {
          load8(x + u * 8, v);
          load8(norm + u * 8, w);
        }
        q = uint4{pack2(v[0] * scale * w[0], v[1] * scale * w[1]), pack2(v[2] * scale * w[2], v[3] * scale * w[3]),
                  pack2(v[4] * scale * w[4], v[5] * scale * w[5]), pack2(v[6] * scale * w[6], v[7] * scale * w[7])};
        if (keeps) store4(at.normed + (ulong(row) * p.cols + u * 8) / 2, q.x, q.y, q.z, q.w);
      }
      stage_piece<F>(q, u, m.x + row * m.x_row, m.sums + row * m.sums_part * 6, m.sums_part);
    }
  }
}

// A simdgroup's sums of its tile with all its slices, from threadgroup memory. `first`: the slice that is on its way there; the others
// follow, and then that of the next block's tile, if there is one.
template <uint F, bool ONE>
FN void multiply_tile(const THREAD MmaTile &tile, uint next_row, bool more, uint first, uint split, uint rows, THREAD MmaAffine<slice_groups<F>()> &affine, const THREAD MmaMemory &m, TG uint *slice, uint lane, THREAD float (&y)[4])
{
  constexpr uint C = slice_groups<F>();
  const uint slices = (tile.groups + C - 1) / C, row = ONE ? 0 : min(lane / 4, rows - 1);
#pragma unroll
  for (uint i = 0; i < 4; i++) y[i] = 0.0f;
  for (uint c = first; c < slices; c += split) {
    copy_wait();
    simd_fence();
    multiply_slice<F, C, ONE>(slice, affine, m.x + row * m.x_row + c * C * 32, (const TG uint *)m.sums + row * m.sums_part * 3 + c * C / 2, m.sums_part, tile.groups - c * C, lane, y);
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

template <uint F, bool ONE> FN void gemv_mma_blocks(const THREAD MmaLaunch &at, CONSTANT GemvArgs &p, TG uint *memory)
{
  constexpr uint C = slice_groups<F>();
  const uint split = p.matrices[at.matrix].lanes, tiles = MMA_SIMDS / split, mine = at.simd / split, first = at.simd % split;
  const uint epilogue = p.matrices[at.matrix].epilogue, members = epilogue == GATED ? 2 : 1, block = tiles / members * 16;
  const MmaMemory m = mma_memory(memory, p.rows, p.cols);
  TG uint *slice = m.slices + at.simd * MMA_SLICE;
  MmaTile tile;
  tile.w = mine % members == 1 ? rows_of(at.slab, p.matrices[at.matrix].up, 0) : rows_of(at.slab, p.matrices[at.matrix].weight, 0);
  tile.rows = p.matrices[at.matrix].weight.rows;
  tile.groups = p.cols / 64;
  uint first_row = at.block * p.repeat * block;
  tile.row = first_row + mine / members * 16;
  const uint blocks = min(p.repeat, (tile.rows - first_row + block - 1) / block);
  MmaAffine<C> affine;
  if (first * C < tile.groups) {
    copy_slice<F>(tile, first, slice, at.lane);
    if (F != BF16) load_affine<C>(tile, first, affine, at.lane);
  }
  if (p.normed != 0) for (uint u = at.tid * 8; u < p.cols; u += MMA_THREADS * 8) prefetch(slab_f32(at.norm, p.norm) + u);
  inputs_ready();
  // One result a thread, where there are no more: what it is added to comes while the sums are made.
  const bool single = epilogue == ADD_TO && block * p.rows <= MMA_THREADS;
  if (p.normed != 0) stage_normed<F>(at, p, m);
  else stage_rows<F>(at.x, p.rows, p.cols, m, at.tid);
  tg_barrier();
#pragma unroll 1
  for (uint k = 0; k < blocks; k++) {
    float base = 0.0f;
    if (single && at.tid < block * p.rows && first_row + at.tid % block < tile.rows) base = at.residual[ulong(at.tid / block) * tile.rows + first_row + at.tid % block];
    float y[4];
    multiply_tile<F, ONE>(tile, tile.row + block, k + 1 < blocks, first, split, p.rows, affine, m, slice, at.lane, y);
    if (k > 0) tg_barrier(); // the sums before have been read
    keep_parts<ONE>(y, m.parts + at.simd * 16 * p.rows, p.rows, at.lane);
    tg_barrier();
    for (uint i = at.tid; i < block * p.rows; i += MMA_THREADS) {
      const uint n = i / block, r = i % block, row = first_row + r;
      if (row >= tile.rows) continue;
      const TG float *parts = m.parts + r % 16 * p.rows + n;
      const uint part = r / 16 * members * split, step = 16 * p.rows;
      const float y0 = sum_parts(parts + part * step, split, step), y1 = members == 2 ? sum_parts(parts + (part + split) * step, split, step) : 0.0f;
      const ulong to = ulong(n) * tile.rows + row;
      if (epilogue == ADD_TO && !single) base = at.residual[to];
      gemv_store(at.out, base, epilogue, to, y0, y1);
    }
    tile.row += block;
    first_row += block;
  }
}

// Bound as gemv.metal's kernels are. ROWS of x at most, COLS columns. Three threadgroups' registers fit a core.
#define GEMV_MMA(name, ROWS, COLS)                                                                                     \
  KERNEL(name, 768, IN(0, uint, x), IN(1, uint, norm), IN(2, uint, slab), OUT(3, uint, out0), OUT(4, uint, out1), OUT(5, uint, out2), \
         OUT(6, uint, out3), OUT(7, uint, out4), OUT(8, uint, out5), IN(9, float, residual), OUT(10, uint, normed),         \
         ARGS(11, GemvArgs, p))                                                                                           \
  {                                                                                                                    \
    static_assert(mma_words(ROWS, COLS) <= LARGE_##name, "text::LARGE_MEMORY");                                        \
    SHARED_LARGE(uint, memory, LARGE_##name);                                                                          \
    uint i = 0, first = 0;                                                                                             \
    while (i + 1 < p.count && k_group.x >= p.matrices[i].end) first = p.matrices[i++].end;                             \
    const MmaLaunch at = {x, norm, slab, i == 0 ? out0 : i == 1 ? out1 : i == 2 ? out2 : i == 3 ? out3 : i == 4 ? out4 : out5, residual, normed, \
                          i, k_group.x - first, k_lane, k_simd, k_thread.x};                                           \
    const uint format = p.matrices[i].weight.format;                                                                   \
    if (format == Q4) gemv_mma_blocks<Q4, ROWS == 1>(at, p, memory);                                                   \
    else if (format == Q8) gemv_mma_blocks<Q8, ROWS == 1>(at, p, memory);                                              \
    else gemv_mma_blocks<BF16, ROWS == 1>(at, p, memory);                                                              \
  }
GEMV_MMA(gemv_mma_1, 1, 4096)
GEMV_MMA(gemv_mma_8, 8, 2048)
GEMV_MMA(gemv_mma_8_wide, 8, 4096)
#endif
