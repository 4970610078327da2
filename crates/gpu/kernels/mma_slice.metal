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

// A slice of x in threadgroup memory: the lane's row from the slice's first column on; of its groups' sums the parts, `parts` words apart.
struct MmaStaged {
  const TG uint *x, *sums;
  uint parts;
};

// A slice of x in registers: 16 elements of each group of the lane's row, and the parts of the sums of groups 2 (l % 4) and the next.
template <uint C> struct MmaInput {
  uint x[C][8], sums[3];
};

FN void input_group(const THREAD MmaStaged &in, uint group, uint lane, THREAD uint (&xs)[8])
{
  const uint4 u = load4(in.x + group * 32 + lane % 4 * 8), v = load4(in.x + group * 32 + lane % 4 * 8 + 4);
  xs[0] = u.x; xs[1] = u.y; xs[2] = u.z; xs[3] = u.w;
  xs[4] = v.x; xs[5] = v.y; xs[6] = v.z; xs[7] = v.w;
}
FN uint input_sums(const THREAD MmaStaged &in, uint part, uint lane) { return in.sums[part * in.parts + lane % 4]; }

template <uint C> FN void input_group(const THREAD MmaInput<C> &in, uint group, uint, THREAD uint (&xs)[8])
{
#pragma unroll
  for (uint i = 0; i < 8; i++) xs[i] = in.x[group][i];
}
template <uint C> FN uint input_sums(const THREAD MmaInput<C> &in, uint part, uint) { return in.sums[part]; }

// Adds a slice's products to y: rows l / 4 and + 8, columns 2 (l % 4) and the next; of quantized weights CODE_PAIR_DOWN of them. in: the slice
// of x. ONE: all columns are the same. Of 4-bit codes two groups at a time, so that a product need not wait for the one before it.
template <uint F, uint C, bool ONE, class X>
FN void multiply_slice(const TG uint *slice, const THREAD MmaAffine<C> &affine, const THREAD X &in, uint groups, uint lane, THREAD float (&y)[4])
{
  constexpr uint W = group_words<F>() / 4, B = F == Q4 ? 2 : 1;
  if (F != BF16) {
    const uint a[4] = {affine.biases[0], affine.biases[1], 0, 0};
#pragma unroll
    for (uint p = 0; p < 3; p++) mma16(y, a, lane % 4 * 2 < C ? input_sums(in, p, lane) : 0u, 0u);
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
      input_group(in, group, lane, xs[c]);
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

// The sum of eight elements of x.
FN float piece_sum(uint4 q)
{
  return ((bf16_low(q.x) + bf16_high(q.x)) + (bf16_low(q.y) + bf16_high(q.y))) + ((bf16_low(q.z) + bf16_high(q.z)) + (bf16_low(q.w) + bf16_high(q.w)));
}

// Eight elements of x as pairs that meet the codes' and as large as these want them: of 4-bit codes a word's pairs are 0 and 4, 1 and 5, …, of
// 8-bit codes 0 and 2, 1 and 3; the second and fourth stand 16 times too high.
template <uint F> FN uint4 scaled_piece(uint4 q)
{
  if (F == BF16) return q;
  const uint a = F == Q4 ? q.z : q.y, b = F == Q4 ? q.y : q.z;
  const float second = F == Q4 ? CODE_PAIR_UP / 16.0f : CODE_PAIR_UP;
  return uint4{scale_pair((q.x & 0xffffu) | a << 16, CODE_PAIR_UP), scale_pair(q.x >> 16 | (a & 0xffff0000u), second),
               scale_pair((b & 0xffffu) | q.w << 16, CODE_PAIR_UP), scale_pair(b >> 16 | (q.w & 0xffff0000u), second)};
}

// Eight elements of a row of x, ready for the products; the lane answers for piece `u` of the row. Eight lanes with a group's pieces keep its
// sum, as three parts. All lanes of the simdgroup come here.
template <uint F> FN void stage_piece(uint4 q, uint u, TG uint *x, TG bf16 *sums, uint parts)
{
  const uint4 v = scaled_piece<F>(q);
  store4(x + u * 4, v.x, v.y, v.z, v.w);
  if (F == BF16) return;
  float sum = piece_sum(q);
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
}

// A lane's slice of x [rows][cols] of bf16, straight from memory: no two lanes of a simdgroup want the same. The sums have the order of
// stage_piece; with each halving of the four lanes of a row the groups are halved, too, down to the lane's two.
template <uint F, uint C> FN void load_input(const DEVICE uint *x, uint rows, uint cols, uint slice, THREAD MmaInput<C> &to, uint lane)
{
  const DEVICE uint *row = x + ulong(min(lane / 4, rows - 1)) * (cols / 2) + slice * C * 32 + lane % 4 * 8;
  uint4 q[C][2];
#pragma unroll
  for (uint i = 0; i < 2 * C; i++)
    q[i / 2][i % 2] = lane / 4 < rows && (slice * C + i / 2) * 64 < cols ? load4(row + i / 2 * 32 + i % 2 * 4) : uint4{0, 0, 0, 0};
  if (F != BF16) {
    float s[C]; // those of groups that odd lanes answer for behind the others
#pragma unroll
    for (uint g = 0; g < C; g++) s[g / 2 % 2 * (C / 2) + g / 4 * 2 + g % 2] = piece_sum(q[g][0]) + piece_sum(q[g][1]);
    fold_lanes<C>(s, 1, lane);
    if (C == 8) fold_lanes<C / 2>(s, 2, lane);
#pragma unroll
    for (uint i = 0; i < 2; i++) {
      if (C != 8) s[i] += simd_shuffle_xor(s[i], 2);
      s[i] *= CODE_PAIR_DOWN;
    }
#pragma unroll
    for (uint p = 0; p < 3; p++) {
      to.sums[p] = pack2(s[0], s[1]);
      s[0] -= bf16_low(to.sums[p]);
      s[1] -= bf16_high(to.sums[p]);
    }
  }
#pragma unroll
  for (uint i = 0; i < 2 * C; i++) {
    const uint4 v = scaled_piece<F>(q[i / 2][i % 2]);
    to.x[i / 2][i % 2 * 4] = v.x; to.x[i / 2][i % 2 * 4 + 1] = v.y;
    to.x[i / 2][i % 2 * 4 + 2] = v.z; to.x[i / 2][i % 2 * 4 + 3] = v.w;
  }
}
#endif
