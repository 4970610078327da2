#if (defined(K_CUDA) || defined(K_CPU)) && KEY_DIM <= 128u
// The gated delta rule from chunk to chunk: see delta_chunk_parts.metal.
//
// A threadgroup has 32 rows of a head's S: two tiles of 16, each with two simdgroups that both keep it in registers, as f32, from the first chunk to the
// last. One recalls and corrects (K S^T and D), the other reads (Q S^T and Y), and completes Y while the first one makes the next chunk's D. All products are transposed: S is the left operand
// as it lies in registers, so is every result; K, Q come from threadgroup memory, T and M from memory in the order of the products.
// Expected, a simdgroup, chunk and head of 128: 64 products of S, 18 of T or M, 64 of the update: 146 x 2048 multiply-adds; 32 ldmatrix without conflicts of
// banks, some 400 instructions of conversion and decay, two barriers. A threadgroup reads 18 KB of K, Q and V and 6.5 KB of parts, out of the second-level cache.

#define CHUNK_VALUES 32u                  // rows of S
#define CHUNK_LINE (KEY_DIM + 8u)         // bf16 of a row of K or Q: the eight rows of an ldmatrix lie in different banks
#define CHUNK_VALUE_LINE (CHUNK_VALUES + 8u)
#define CHUNK_BUFFER (CHUNK * (2u * CHUNK_LINE + CHUNK_VALUE_LINE)) // bf16 of K, Q and V of a chunk

// Of 8 rows and 32 columns: a lane has columns 2 (l % 4) and the next of every 8, of row l / 4.
FN void chunk_load(THREAD uint (&r)[4], const TG bf16 *tile, uint line, uint lane) { load_matrices(r, tile + lane % 8 * line + lane / 8 * 8); }
// Of 16 rows and 16 columns: a lane has rows 2 (l % 4) and the next of each 8, of column l / 4 (r[0], r[1]) and l / 4 + 8.
FN void chunk_load_transposed(THREAD uint (&r)[4], const TG bf16 *tile, uint line, uint lane)
{
  load_matrices_transposed(r, tile + lane % 16 * line + lane / 16 * 8);
}

// A thread's pieces of a chunk of n tokens on their way; zeros behind them.
FN void chunk_send(TG bf16 *to, const DEVICE bf16 *q, const DEVICE bf16 *k, const DEVICE bf16 *v, uint channels, uint n, uint tid)
{
#pragma unroll
  for (uint piece = 0; piece < KEY_DIM / 32; piece++) {
    const uint i = piece * CHUNK_SIMDS * 32 + tid, row = i / (KEY_DIM / 8), at = i % (KEY_DIM / 8) * 8;
    const ulong from = row < n ? ulong(row) * channels + at : 0;
    copy_async(to + row * CHUNK_LINE + at, k + from, row < n);
    copy_async(to + (CHUNK + row) * CHUNK_LINE + at, q + from, row < n);
  }
  const uint row = tid / 4, at = tid % 4 * 8; // of V four pieces a row
  copy_async(to + 2 * CHUNK * CHUNK_LINE + row * CHUNK_VALUE_LINE + at, v + (row < n ? ulong(row) * channels + at : 0), row < n);
}

// Two neighbouring tiles of a result as a left operand of 16 columns, both parts.
struct ChunkLeft { uint high[4], low[4]; };
FN void chunk_left(const THREAD float (&a)[4], const THREAD float (&b)[4], THREAD ChunkLeft &to)
{
  chunk_split(a[0], a[1], to.high[0], to.low[0]);
  chunk_split(a[2], a[3], to.high[1], to.low[1]);
  chunk_split(b[0], b[1], to.high[2], to.low[2]);
  chunk_split(b[2], b[3], to.high[3], to.low[3]);
}

FN void chunk_zero(THREAD float (&x)[4][4])
{
#pragma unroll
  for (uint j = 0; j < 4; j++)
#pragma unroll
    for (uint e = 0; e < 4; e++) x[j][e] = 0.0f;
}

FN void chunk_add(THREAD float (&x)[4][4], const THREAD float (&y)[4][4])
{
#pragma unroll
  for (uint j = 0; j < 4; j++)
#pragma unroll
    for (uint e = 0; e < 4; e++) x[j][e] += y[j][e];
}

// out = S rows^T: 16 rows of S, the chunk's tokens as columns. High and low parts are summed apart: eight chains of products at once.
FN void chunk_recall(const THREAD float (&s)[KEY_DIM / 8u][4], const TG bf16 *rows, THREAD float (&out)[4][4], uint lane)
{
  float low[4][4];
  chunk_zero(out);
  chunk_zero(low);
#pragma unroll
  for (uint d = 0; d < KEY_DIM / 32; d++) {
    ChunkLeft left[2];
#pragma unroll
    for (uint h = 0; h < 2; h++) chunk_left(s[d * 4 + h * 2], s[d * 4 + h * 2 + 1], left[h]);
#pragma unroll
    for (uint j = 0; j < 4; j++) {
      uint right[4];
      chunk_load(right, rows + j * 8 * CHUNK_LINE + d * 32, CHUNK_LINE, lane);
#pragma unroll
      for (uint h = 0; h < 2; h++) {
        mma16(out[j], left[h].high, right[2 * h], right[2 * h + 1]);
        mma16(low[j], left[h].low, right[2 * h], right[2 * h + 1]);
      }
    }
  }
  chunk_add(out, low);
}

// out += x W^T for a lower triangle W.
FN void chunk_triangle(const THREAD float (&x)[4][4], const THREAD uint4 (&w)[CHUNK_BLOCKS], THREAD float (&out)[4][4])
{
  ChunkLeft left[2];
  float low[4][4];
  chunk_zero(low);
#pragma unroll
  for (uint h = 0; h < 2; h++) chunk_left(x[h * 2], x[h * 2 + 1], left[h]);
#pragma unroll
  for (uint h = 0; h < 2; h++)
#pragma unroll
    for (uint j = 2 * h; j < 4; j++) {
      const uint4 right = w[chunk_block(j) + h];
      mma16(out[j], left[h].high, right.x, right.y);
      mma16(low[j], left[h].high, right.z, right.w);
      mma16(low[j], left[h].low, right.x, right.y);
    }
  chunk_add(out, low);
}

// S = fade S + d K. The sum of a chunk begins at zero and is added once, so that S is rounded once a chunk.
FN void chunk_update(THREAD float (&s)[KEY_DIM / 8u][4], const THREAD float (&d)[4][4], const TG bf16 *keys, float fade, uint lane)
{
  ChunkLeft left[2];
#pragma unroll
  for (uint h = 0; h < 2; h++) chunk_left(d[h * 2], d[h * 2 + 1], left[h]);
#pragma unroll
  for (uint i = 0; i < KEY_DIM / 16; i++) {
    float sum[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (uint h = 0; h < 2; h++) {
      uint right[4];
      chunk_load_transposed(right, keys + h * 16 * CHUNK_LINE + i * 16, CHUNK_LINE, lane);
#pragma unroll
      for (uint j = 0; j < 2; j++) {
        mma16(sum[j], left[h].high, right[2 * j], right[2 * j + 1]);
        mma16(sum[j], left[h].low, right[2 * j], right[2 * j + 1]);
      }
    }
#pragma unroll
    for (uint j = 0; j < 2; j++)
#pragma unroll
      for (uint e = 0; e < 4; e++) s[2 * i + j][e] = fma(fade, s[2 * i + j][e], sum[j][e]);
  }
}

// Y of n tokens, 16 elements of each: neighbouring lanes of a column swap, so that each writes two elements of a token.
FN void chunk_write(const THREAD float (&y)[4][4], DEVICE bf16 *out, uint stride, uint n, uint lane)
{
  const bool odd = lane / 4 % 2 != 0;
#pragma unroll
  for (uint j = 0; j < 4; j++)
#pragma unroll
    for (uint h = 0; h < 2; h++) {
      const float first = y[j][h * 2], second = y[j][h * 2 + 1];
      const float other = simd_shuffle_xor(odd ? first : second, 4);
      const uint token = j * 8 + lane % 4 * 2 + (odd ? 1 : 0), words = odd ? pack2(other, second) : pack2(first, other);
      if (token < n) ((DEVICE uint *)(out + ulong(token) * stride + h * 8))[lane / 8] = words;
    }
}

// A factor of the lane's columns: on its way from here on, however late it is used.
FN void chunk_factor(const DEVICE uint *part, uint factor, THREAD float (&to)[4][2], uint lane)
{
#pragma unroll
  for (uint j = 0; j < 4; j++) {
    const DEVICE uint *at = part + CHUNK_FACTORS + factor * CHUNK + j * 8 + lane % 4 * 2;
    to[j][0] = as_f(load_ahead(at));
    to[j][1] = as_f(load_ahead(at + 1));
  }
}

// A lane's words of a triangle.
FN void chunk_fetch(const DEVICE uint *part, uint triangle, THREAD uint4 (&w)[CHUNK_BLOCKS], uint lane)
{
#pragma unroll
  for (uint i = 0; i < CHUNK_BLOCKS; i++) w[i] = load4(part + triangle * CHUNK_TRIANGLE + i * 128 + lane * 4);
}

FN void chunk_rows(const DEVICE bf16 *qkv, const DEVICE uint *parts, const DEVICE SegmentEntry *segments, const DEVICE SlotHeader *headers,
                   DEVICE float *states, DEVICE bf16 *out, CONSTANT ChunkArgs &p, TG bf16 *mem, TG float *shared_d, uint3 group, uint tid, uint lane, uint simd)
{
  const uint rows = segments[group.z].rows, slot = segments[group.z].slot, head = group.y, row = group.x * CHUNK_VALUES + simd % 2 * 16;
  const bool reads = simd >= 2;
  const ulong token = segments[group.z].first;
  const ulong at = (ulong(p.layer) * p.heads + head) * (VALUE_DIM * KEY_DIM) + (row + lane / 4) * KEY_DIM + lane % 4 * 2;
  const DEVICE bf16 *q = qkv + token * p.channels + head / VALUE_HEADS_PER_KEY * KEY_DIM, *k = q + p.key_heads * KEY_DIM;
  const DEVICE bf16 *v = qkv + token * p.channels + 2 * p.key_heads * KEY_DIM + head * VALUE_DIM + group.x * CHUNK_VALUES;
  DEVICE bf16 *to = out + (token * p.heads + head) * VALUE_DIM + row;
  TG float *corrections = shared_d + simd % 2 * 512 + lane * 4;
  chunk_send(mem, q, k, v, p.channels, min(rows, CHUNK), tid);

  float s[KEY_DIM / 8u][4], y[4][4], d[4][4];
  uint4 w[CHUNK_BLOCKS];
  const DEVICE float *state = states + state_base(headers, slot, 0, p.state_words) + at;
#pragma unroll
  for (uint j = 0; j < KEY_DIM / 8; j++)
#pragma unroll
    for (uint h = 0; h < 2; h++) {
      const uint2 x = load2((const DEVICE uint *)(state + h * 8 * KEY_DIM + j * 8));
      s[j][h * 2] = as_f(x.x);
      s[j][h * 2 + 1] = as_f(x.y);
    }
#pragma unroll 1
  for (uint start = 0; start < rows; start += CHUNK) {
    const TG bf16 *keys = mem + start / CHUNK % 2 * CHUNK_BUFFER, *queries = keys + CHUNK * CHUNK_LINE;
    copy_wait();
    tg_barrier(); // this chunk is there; the one before and its corrections have been read
    if (start + CHUNK < rows) {
      const ulong next = ulong(start + CHUNK) * p.channels;
      chunk_send(mem + (start / CHUNK + 1) % 2 * CHUNK_BUFFER, q + next, k + next, v + next, p.channels, min(rows - start - CHUNK, CHUNK), tid);
    }
    if (reads && start > 0) {
      chunk_triangle(d, w, y);
      chunk_write(y, to + ulong(start - CHUNK) * p.heads * VALUE_DIM, p.heads * VALUE_DIM, CHUNK, lane);
    }
    const DEVICE uint *part = parts + chunk_part(segments, group.z, start / CHUNK, p.heads, head);
    const float fade = as_f(part[CHUNK_FACTORS + 2 * CHUNK - 1]);
    float from[4][2], until[4][2], beta[4][2];
    chunk_fetch(part, reads ? 1 : 0, w, lane);
    chunk_factor(part, reads ? 1 : 0, from, lane);
    chunk_factor(part, 2, until, lane);
    chunk_factor(part, 3, beta, lane);
    chunk_recall(s, reads ? queries : keys, y, lane);
#pragma unroll
    for (uint j = 0; j < 4; j++)
#pragma unroll
      for (uint e = 0; e < 4; e++) y[j][e] *= from[j][e % 2];
    if (!reads) {
      const TG bf16 *values = queries + CHUNK * CHUNK_LINE + simd % 2 * 16;
#pragma unroll
      for (uint j = 0; j < 4; j += 2) {
        uint x[4];
        chunk_load_transposed(x, values + j * 8 * CHUNK_VALUE_LINE, CHUNK_VALUE_LINE, lane);
#pragma unroll
        for (uint i = 0; i < 4; i++) {
          const uint t = j + i % 2, h = i / 2 * 2;
          d[t][h] = y[t][h] = fma(beta[t][0], bf16_low(x[i]), -y[t][h]);
          d[t][h + 1] = y[t][h + 1] = fma(beta[t][1], bf16_high(x[i]), -y[t][h + 1]);
        }
      }
      chunk_triangle(y, w, d);
#pragma unroll
      for (uint j = 0; j < 4; j++) store4(corrections + j * 128, d[j][0], d[j][1], d[j][2], d[j][3]);
    }
    tg_barrier(); // the corrections are there
    float faded[4][4];
#pragma unroll
    for (uint j = 0; j < 4; j++) {
      const float4 x = load4(corrections + j * 128);
      d[j][0] = x.x;
      d[j][1] = x.y;
      d[j][2] = x.z;
      d[j][3] = x.w;
#pragma unroll
      for (uint e = 0; e < 4; e++) faded[j][e] = d[j][e] * until[j][e % 2];
    }
    chunk_update(s, faded, keys, fade, lane);
  }
  if (reads) {
    const uint start = (rows - 1) / CHUNK * CHUNK;
    chunk_triangle(d, w, y);
    chunk_write(y, to + ulong(start) * p.heads * VALUE_DIM, p.heads * VALUE_DIM, rows - start, lane);
  }
  DEVICE float *after = states + state_base(headers, slot, 1, p.state_words) + at;
#pragma unroll
  for (uint j = 0; j < KEY_DIM / 8; j++)
    if ((j % 2 != 0) == reads) // half of the columns each
#pragma unroll
      for (uint h = 0; h < 2; h++) store2((DEVICE uint *)(after + h * 8 * KEY_DIM + j * 8), as_u(s[j][h * 2]), as_u(s[j][h * 2 + 1]));
}

KERNEL(delta_chunk, 128, IN(0, bf16, qkv), IN(1, uint, parts), IN(2, SegmentEntry, segments), IN(3, SlotHeader, headers), OUT(4, float, states),
       OUT(5, bf16, out), ARGS(6, ChunkArgs, p))
{
  SHARED_48K(uint, mem, CHUNK_BUFFER); // two buffers
  SHARED_48K(float, corrections, 2 * 512);
  if (segments[k_group.z].rows >= p.least)
    chunk_rows(qkv, parts, segments, headers, states, out, p, (TG bf16 *)mem, corrections, k_group, k_thread.x, k_lane, k_simd);
}
#endif
