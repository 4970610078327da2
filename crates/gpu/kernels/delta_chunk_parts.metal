#if (defined(K_CUDA) || defined(K_CPU)) && KEY_DIM <= 128u
// The gated delta rule, CHUNK tokens at a time, by mma.sync m16n8k16. Per value head, with the state S [VALUE_DIM][KEY_DIM] in front of a chunk, rows of K, Q and
// V for its tokens, g and beta their gates, f(t, s) the product of g behind s up to t, and f(t) that from the chunk's first token on:
//   A[t][s] = beta[t] f(t, s) (K K^T)[t][s] for s < t    T = (I + A)^-1 - I    M[t][s] = f(t, s) (Q K^T)[t][s] for s <= t
//   R = diag(beta) (V - diag(f) K S^T)    D = R + T R    Y = diag(f) Q S^T + M D    S = f(last) S + D^T diag(f(last, t)) K
// D has the corrections d of the token by token form, of which the rule makes a triangular system. f is multiplied up, never divided, so that decays of any
// strength, 0 too, do no harm.
//
// delta_chunk_parts makes T and M of all chunks at once, a simdgroup each; delta_chunk goes from chunk to chunk. Products have operands of bf16: K, Q and
// V are that; S, T, M, R and D are taken as two parts, whose product of low with low is left out (2^-18 of the whole). Everything else is f32.
//
// Lane l of a 16 x 8 result has the rows l / 4 and l / 4 + 8 and the columns 2 (l % 4) and the next.

#define CHUNK 32u
#define CHUNK_BLOCKS 6u                           // of 8 rows and 16 columns, in a lower triangle of CHUNK x CHUNK
#define CHUNK_TRIANGLE (CHUNK_BLOCKS * 128u)      // words of one: four a lane and block, both parts of what is multiplied
#define CHUNK_FACTORS (2u * CHUNK_TRIANGLE)       // behind T and M: beta f, f(t), f(last, t), beta, CHUNK words each
#define CHUNK_PART (CHUNK_FACTORS + 4u * CHUNK)   // words of a chunk's part
#define CHUNK_SIMDS 4u

// Both parts of two neighbours.
FN void chunk_split(float x, float y, THREAD uint &high, THREAD uint &low)
{
  high = pack2(x, y);
  low = pack2(x - bf16_low(high), y - bf16_high(high));
}

// First word of a chunk's part. A segment's chunks follow one another, and those of the segment before them never come so far.
FN ulong chunk_part(const DEVICE SegmentEntry *segments, uint segment, uint chunk, uint heads, uint head)
{
  return (ulong(segments[segment].first / CHUNK + segment + chunk) * heads + head) * CHUNK_PART;
}

// First of the blocks of rows 8 tile to 8 tile + 7.
FN constexpr uint chunk_block(uint tile) { return tile < 2 ? tile : 2 * tile - 2; }

// What this file makes, T and M of a chunk.
// Expected, a chunk and head of 128: 16 KB of K and Q (shared by the heads of a key head), 6.5 KB written; 96 products, some 500 fma and 128
// loads of 16 bytes of the substitution. There are 2,048 simdgroups of it in 2,048 tokens of 32 heads.

#define CHUNK_ROW (CHUNK + 4u) // floats of a row: eight rows of a result lie in different banks

// K K^T and Q K^T where row >= column: tiles of 16 x 8, two in the first 16 rows, four in the others. A lane's 16 bytes of a row of K are both its left
// and its right operand: of 32 elements in an order of their own, the same for both.
FN void chunk_products(const DEVICE bf16 *q, const DEVICE bf16 *k, uint channels, uint n, THREAD float (&kk)[6][4], THREAD float (&qk)[6][4], uint lane)
{
#pragma unroll
  for (uint i = 0; i < 6; i++)
#pragma unroll
    for (uint e = 0; e < 4; e++) kk[i][e] = qk[i][e] = 0.0f;
#pragma unroll 1
  for (uint d = 0; d < KEY_DIM; d += 32) {
    uint4 keys[4], queries[4];
#pragma unroll
    for (uint r = 0; r < 4; r++) {
      const uint row = r * 8 + lane / 4;
      const ulong at = ulong(row) * channels + d + lane % 4 * 8;
      keys[r] = queries[r] = {0, 0, 0, 0};
      if (row < n) {
        keys[r] = load4((const DEVICE uint *)(k + at));
        queries[r] = load4((const DEVICE uint *)(q + at));
      }
    }
#pragma unroll
    for (uint i = 0; i < 2; i++) {
      const uint4 k0 = keys[2 * i], k1 = keys[2 * i + 1], q0 = queries[2 * i], q1 = queries[2 * i + 1];
      const uint left[2][4] = {{k0.x, k1.x, k0.y, k1.y}, {k0.z, k1.z, k0.w, k1.w}};
      const uint read[2][4] = {{q0.x, q1.x, q0.y, q1.y}, {q0.z, q1.z, q0.w, q1.w}};
#pragma unroll
      for (uint j = 0; j < 2 + 2 * i; j++) {
        mma16(kk[2 * i + j], left[0], keys[j].x, keys[j].y);
        mma16(qk[2 * i + j], read[0], keys[j].x, keys[j].y);
        mma16(kk[2 * i + j], left[1], keys[j].z, keys[j].w);
        mma16(qk[2 * i + j], read[1], keys[j].z, keys[j].w);
      }
    }
  }
}

// Column `lane` of (I + A)^-1, row by row, with its 1.
FN void chunk_invert(const TG float *a, THREAD float (&x)[CHUNK], uint lane)
{
#pragma unroll
  for (uint i = 0; i < CHUNK; i++) x[i] = 0.0f;
#pragma unroll
  for (uint i = 0; i < CHUNK; i++) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}; // what comes of x[i - 1], the last one, waits for nothing else
#pragma unroll
    for (uint s = 0; s < i; s += 4) { // x is still 0 from x[i] on
      const float4 row = load4(a + i * CHUNK_ROW + s);
      sum[0] = fma(row.x, x[s], sum[0]);
      sum[1] = fma(row.y, x[s + 1], sum[1]);
      sum[2] = fma(row.z, x[s + 2], sum[2]);
      sum[3] = fma(row.w, x[s + 3], sum[3]);
    }
    x[i] = (i == lane ? 1.0f : 0.0f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

// A lane's words of a block whose row is its row's: columns 2 (l % 4), the next, and both + 8.
FN void chunk_store(DEVICE uint *to, uint block, float a, float b, float c, float d, uint lane)
{
  uint high[2], low[2];
  chunk_split(a, b, high[0], low[0]);
  chunk_split(c, d, high[1], low[1]);
  store4(to + block * 128 + lane * 4, high[0], high[1], low[0], low[1]);
}

// A chunk of n tokens of a head. What is missing of CHUNK decays nothing and corrects nothing.
FN void chunk_parts(const DEVICE bf16 *q, const DEVICE bf16 *k, const DEVICE float *decay, const DEVICE float *beta, DEVICE uint *to,
                    CONSTANT ChunkArgs &p, uint n, TG float *mem, uint lane)
{
  const float g = lane < n ? decay[lane * p.heads] : 1.0f, b = lane < n ? beta[lane * p.heads] : 0.0f;
  float kk[6][4], qk[6][4];
  chunk_products(q, k, p.channels, n, kk, qk, lane);

  float fade = 1.0f, all = 1.0f, here = 1.0f; // f(t, lane), f(t), f(lane)
#pragma unroll
  for (uint t = 0; t < CHUNK; t++) {
    const float gt = simd_shuffle(g, t);
    fade = t > lane ? fade * gt : 1.0f;
    all *= gt;
    here = t == lane ? all : here;
    mem[t * CHUNK_ROW + lane] = t < lane ? 0.0f : fade;
  }
  const float factors[4] = {b * here, here, fade, b};
#pragma unroll
  for (uint i = 0; i < 4; i++) to[CHUNK_FACTORS + i * CHUNK + lane] = as_u(factors[i]);
  simd_fence(); // f is there
#pragma unroll
  for (uint i = 0; i < 6; i++)
#pragma unroll
    for (uint e = 0; e < 4; e++) {
      const uint t = (i < 2 ? 0 : 16) + lane / 4 + e / 2 * 8, s = (i < 2 ? i : i - 2) * 8 + lane % 4 * 2 + e % 2;
      const float f = mem[t * CHUNK_ROW + s];
      mem[t * CHUNK_ROW + s] = kk[i][e] * f * simd_shuffle(b, t); // A takes the place that the lane has read
      qk[i][e] *= f;
    }
#pragma unroll
  for (uint tile = 0; tile < 4; tile++)
#pragma unroll
    for (uint s = 0; s <= tile / 2; s++) {
      const uint i = tile / 2 * 2 + 2 * s, h = tile % 2 * 2;
      chunk_store(to + CHUNK_TRIANGLE, chunk_block(tile) + s, qk[i][h], qk[i][h + 1], qk[i + 1][h], qk[i + 1][h + 1], lane);
    }
  simd_fence(); // A is there
  float x[CHUNK];
  chunk_invert(mem, x, lane);
  simd_fence(); // A has been read
#pragma unroll
  for (uint i = 0; i < CHUNK; i++) mem[i * CHUNK_ROW + lane] = i == lane ? 0.0f : x[i];
  simd_fence(); // T is there
#pragma unroll
  for (uint tile = 0; tile < 4; tile++)
#pragma unroll
    for (uint s = 0; s <= tile / 2; s++) {
      const TG float *row = mem + (tile * 8 + lane / 4) * CHUNK_ROW + s * 16 + lane % 4 * 2;
      chunk_store(to, chunk_block(tile) + s, row[0], row[1], row[8], row[9], lane);
    }
}

// A threadgroup: a chunk of neighbouring heads.
KERNEL(delta_chunk_parts, 128, IN(0, bf16, qkv), IN(1, float, decay), IN(2, float, beta), IN(3, SegmentEntry, segments), OUT(4, uint, parts),
       ARGS(5, ChunkArgs, p))
{
  SHARED(float, mem, CHUNK_SIMDS * CHUNK * CHUNK_ROW);
  const uint head = k_group.y * CHUNK_SIMDS + k_simd, rows = segments[k_group.z].rows, start = k_group.x * CHUNK;
  if (rows >= p.least && start < rows && head < p.heads) {
    const uint token = segments[k_group.z].first + start;
    const DEVICE bf16 *q = qkv + ulong(token) * p.channels + head / VALUE_HEADS_PER_KEY * KEY_DIM;
    chunk_parts(q, q + p.key_heads * KEY_DIM, decay + token * p.heads + head, beta + token * p.heads + head,
                parts + chunk_part(segments, k_group.z, k_group.x, p.heads, head), p, min(rows - start, CHUNK),
                mem + k_simd * CHUNK * CHUNK_ROW, k_lane);
  }
}
#endif
