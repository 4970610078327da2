#if !defined(K_CUDA) && !defined(ATTENTION_MMA)
// A simdgroup's part of flash attention by 8x8 simdgroup matrices: Metal, and the host. RT times 8 query rows of one head
// against a block of 32 tokens. Nobody knows which lane holds which element of a matrix: scores and probabilities go through
// FLASH_MEMORY floats of the simdgroup's own, and sums are rescaled by a diagonal matrix.
#define FLASH_BLOCK 32u
#define FLASH_SHARED SHARED
#define FLASH_ROW (HEAD_DIM + 8u)      // elements of a staged row: 16 bytes more than a head spread rows over banks
#define FLASH_STRIDE 36u               // floats from row to row of `mem`; twice as many bf16
#define FLASH_MEMORY (8u * FLASH_STRIDE + 64u)
#define FLASH_WORDS (FLASH_BLOCK * FLASH_ROW / 2u + FLASH_SIMDS * FLASH_MEMORY)

FN TG float *flash_own(TG uint *mem, uint simd) { return (TG float *)mem + FLASH_BLOCK * FLASH_ROW / 2 + simd * FLASH_MEMORY; }

template <uint RT> struct FlashTile {
  mat8b q[RT][HEAD_DIM / 8u];
  mat8f o[RT][HEAD_DIM / 8u];
  float m[RT], l[RT]; // of row lane / 4; l of this lane's tokens only
};
template <uint RT> struct FlashWeights { mat8b p[RT][4]; };

// Queries from `rows` of threadgroup memory; nothing summed yet.
template <uint RT> FN void flash_open(THREAD FlashTile<RT> &f, const TG bf16 *rows, TG uint *mem, uint lane, uint simd)
{
  TG float *diagonal = flash_own(mem, simd) + 8 * FLASH_STRIDE;
  for (uint i = lane; i < 64; i += 32) diagonal[i] = 0.0f;
  for (uint r = 0; r < RT; r++) {
    f.m[r] = ATTENTION_LEAST;
    f.l[r] = 0.0f;
    for (uint d = 0; d < HEAD_DIM / 8; d++) {
      simdgroup_load(f.q[r][d], rows + r * 8 * FLASH_ROW + d * 8, FLASH_ROW);
      f.o[r][d] = mat8f_fill(0.0f);
    }
  }
}

// Scores of the block at `t0` that lies at `k`, their softmax, and the sums so far on its scale. Row i of the tile sees
// tokens up to `position` + i.
template <uint RT> FN void flash_scores(THREAD FlashTile<RT> &f, THREAD FlashWeights<RT> &w, const TG bf16 *k, TG float *mem, uint t0,
                                        uint position, float scale, uint lane)
{
  mat8f s[RT][4];
  for (uint r = 0; r < RT; r++)
    for (uint j = 0; j < 4; j++) s[r][j] = mat8f_fill(0.0f);
  for (uint d = 0; d < HEAD_DIM / 8; d++)
    for (uint j = 0; j < 4; j++) {
      mat8b b;
      simdgroup_load_transposed(b, k + j * 8 * FLASH_ROW + d * 8, FLASH_ROW);
      for (uint r = 0; r < RT; r++) simdgroup_multiply_accumulate(s[r][j], f.q[r][d], b, s[r][j]);
    }
  TG bf16 *weights = (TG bf16 *)mem;
  TG float *diagonal = mem + 8 * FLASH_STRIDE;
  const uint row = lane / 4, at = lane % 4 * 8;
  for (uint r = 0; r < RT; r++) {
    simd_fence(); // the weights of the block or rows before have been read
    for (uint j = 0; j < 4; j++) simdgroup_store(s[r][j], mem + j * 8, FLASH_STRIDE);
    simd_fence();
    float x[8], most = f.m[r], sum = 0.0f;
    for (uint i = 0; i < 8; i++) {
      x[i] = t0 + at + i <= position + r * 8 + row ? mem[row * FLASH_STRIDE + at + i] * scale : ATTENTION_LEAST;
      most = fmax(most, x[i]);
    }
    most = fmax(most, simd_shuffle_xor(most, 1));
    most = fmax(most, simd_shuffle_xor(most, 2));
    for (uint i = 0; i < 8; i++) {
      x[i] = exp2(x[i] - most); // 0 for what is not seen: every row has seen the first token
      sum += x[i];
    }
    const float fade = exp2(f.m[r] - most);
    f.m[r] = most;
    f.l[r] = fma(f.l[r], fade, sum);
    simd_fence(); // the scores have been read
    for (uint i = 0; i < 8; i += 2) *(TG uint *)(weights + row * (2 * FLASH_STRIDE) + at + i) = pack2(x[i], x[i + 1]);
    if (lane % 4 == 0) diagonal[row * 9] = fade;
    simd_fence();
    for (uint j = 0; j < 4; j++) simdgroup_load(w.p[r][j], weights + j * 8, 2 * FLASH_STRIDE);
    if (!simd_any(fade != 1.0f)) continue;
    mat8f by;
    const mat8f zero = mat8f_fill(0.0f);
    simdgroup_load(by, diagonal, 8);
    for (uint d = 0; d < HEAD_DIM / 8; d++) {
      const mat8f old = f.o[r][d];
      simdgroup_multiply_accumulate(f.o[r][d], by, old, zero);
    }
  }
}

// Adds the block's values, which lie at `v`.
template <uint RT> FN void flash_values(THREAD FlashTile<RT> &f, THREAD FlashWeights<RT> &w, const TG bf16 *v, uint lane)
{
  for (uint j = 0; j < 4; j++)
    for (uint d = 0; d < HEAD_DIM / 8; d++) {
      mat8b b;
      simdgroup_load(b, v + j * 8 * FLASH_ROW + d * 8, FLASH_ROW);
      for (uint r = 0; r < RT; r++) simdgroup_multiply_accumulate(f.o[r][d], w.p[r][j], b, f.o[r][d]);
    }
}

// Pieces of 16 bytes of a block that a thread moves.
#define FLASH_PIECES ((FLASH_BLOCK * HEAD_DIM / 8u + FLASH_THREADS - 1u) / FLASH_THREADS)

struct FlashPiece { uint w[4]; };

// A thread's pieces of the block of `tokens` tokens at `from`; zeros beyond them, where nobody wrote.
FN void flash_fetch(THREAD FlashPiece *next, const DEVICE bf16 *from, uint tokens, uint tid)
{
  for (uint c = 0; c < FLASH_PIECES; c++) {
    const uint i = tid + c * FLASH_THREADS;
    for (uint j = 0; j < 4; j++) next[c].w[j] = 0;
    if (i / (HEAD_DIM / 8) >= tokens) continue;
    const uint4 x = load4((const DEVICE uint *)from + i * 4);
    next[c].w[0] = x.x;
    next[c].w[1] = x.y;
    next[c].w[2] = x.z;
    next[c].w[3] = x.w;
  }
}

FN void flash_stage(const THREAD FlashPiece *next, TG uint *block, uint tid)
{
  for (uint c = 0; c < FLASH_PIECES; c++) {
    const uint i = tid + c * FLASH_THREADS, row = i / (HEAD_DIM / 8);
    if (row < FLASH_BLOCK)
      store4(block + row * (FLASH_ROW / 2) + i % (HEAD_DIM / 8) * 4, next[c].w[0], next[c].w[1], next[c].w[2], next[c].w[3]);
  }
}

// One block in threadgroup memory at a time, K and V in turn; the next is on its way to registers meanwhile.
template <uint RT> FN void flash_blocks(THREAD FlashTile<RT> &f, FlashCache c, TG uint *mem, uint own, float scale, uint tid, uint lane, uint simd)
{
  const TG bf16 *staged = (const TG bf16 *)mem;
  FlashPiece next[FLASH_PIECES];
  FlashWeights<RT> w;
  flash_fetch(next, c.keys + flash_row(c, 0), min(c.len, FLASH_BLOCK), tid);
  for (uint t0 = 0; t0 < c.len; t0 += FLASH_BLOCK) {
    const bool seen = t0 < own + 8 * RT; // by any row of the simdgroup
    const uint t1 = t0 + FLASH_BLOCK;
    tg_barrier(); // what was staged before has been read
    flash_stage(next, mem, tid);
    flash_fetch(next, c.values + flash_row(c, t0), min(c.len - t0, FLASH_BLOCK), tid);
    tg_barrier();
    if (seen) flash_scores<RT>(f, w, staged, flash_own(mem, simd), t0, own, scale, lane);
    tg_barrier(); // the keys have been read
    flash_stage(next, mem, tid);
    if (t1 < c.len) flash_fetch(next, c.keys + flash_row(c, t1), min(c.len - t1, FLASH_BLOCK), tid);
    tg_barrier();
    if (seen) flash_values<RT>(f, w, staged, lane);
  }
}

// Stores the first `rows` rows, `stride` elements apart.
template <uint RT> FN void flash_close(THREAD FlashTile<RT> &f, DEVICE bf16 *out, uint stride, uint rows, TG uint *all, uint lane, uint simd)
{
  TG float *mem = flash_own(all, simd);
  const uint row = lane / 4, at = lane % 4 * 8;
  for (uint r = 0; r < RT; r++) {
    float l = f.l[r];
    l += simd_shuffle_xor(l, 1);
    l += simd_shuffle_xor(l, 2);
    for (uint d = 0; d < HEAD_DIM / 8; d += 4) {
      simd_fence(); // what lies there has been read
      for (uint j = 0; j < 4; j++) simdgroup_store(f.o[r][d + j], mem + j * 8, FLASH_STRIDE);
      simd_fence();
      const TG float *x = mem + row * FLASH_STRIDE + at;
      if (r * 8 + row < rows)
        store4((DEVICE uint *)(out + ulong(r * 8 + row) * stride + d * 8 + at), pack2(x[0] / l, x[1] / l), pack2(x[2] / l, x[3] / l),
               pack2(x[4] / l, x[5] / l), pack2(x[6] / l, x[7] / l));
    }
  }
}
#endif
