#if defined(K_CUDA) || defined(ATTENTION_MMA)
// A simdgroup's part of flash attention by mma.sync m16n8k16: 16 query rows of one head (RT is 2) against a block of 32 tokens.
// The layout of an accumulator is known and is that of the next product's left operand: scores, softmax and probabilities stay in
// registers. Lane l has rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next of every 8.
#define FLASH_BLOCK 32u
#define FLASH_PAD 8u // the eight rows of an ldmatrix lie in different banks
#define FLASH_SHARED SHARED_48K
#define FLASH_ROW (HEAD_DIM + FLASH_PAD)
#define FLASH_WORDS (FLASH_BLOCK * FLASH_ROW) // a block of K and one of V

template <uint RT> struct FlashTile {
  uint q[HEAD_DIM / 16u][4];
  float o[HEAD_DIM / 8u][4];
  float m[2], l[2]; // of the lane's two rows; l of its own tokens only
};
template <uint RT> struct FlashWeights { uint p[2][4]; };

template <uint RT> FN void flash_open(THREAD FlashTile<RT> &f, const TG bf16 *rows, TG uint *mem, uint lane, uint simd)
{
  for (uint k = 0; k < HEAD_DIM / 16; k++) load_matrices(f.q[k], rows + lane % 16 * FLASH_ROW + k * 16 + lane / 16 * 8);
  for (uint i = 0; i < 2; i++) {
    f.m[i] = ATTENTION_LEAST;
    f.l[i] = 0.0f;
  }
  for (uint d = 0; d < HEAD_DIM / 8; d++)
    for (uint i = 0; i < 4; i++) f.o[d][i] = 0.0f;
}

template <uint RT> FN void flash_scores(THREAD FlashTile<RT> &f, THREAD FlashWeights<RT> &w, const TG bf16 *k, uint t0,
                                        uint position, float scale, uint lane)
{
  float s[4][4];
  for (uint j = 0; j < 4; j++)
    for (uint i = 0; i < 4; i++) s[j][i] = 0.0f;
  for (uint d = 0; d < HEAD_DIM; d += 32)
    for (uint j = 0; j < 4; j++) {
      uint b[4];
      load_matrices(b, k + (j * 8 + lane % 8) * FLASH_ROW + d + lane / 8 * 8);
      mma16(s[j], f.q[d / 16], b[0], b[1]);
      mma16(s[j], f.q[d / 16 + 1], b[2], b[3]);
    }
  for (uint h = 0; h < 2; h++) { // the lane's two rows
    const uint last = position + lane / 4 + h * 8;
    float most = f.m[h], sum = 0.0f;
    for (uint i = 0; i < 8; i++) {
      const uint token = t0 + i / 2 * 8 + lane % 4 * 2 + i % 2;
      const float x = token <= last ? s[i / 2][h * 2 + i % 2] * scale : ATTENTION_LEAST;
      s[i / 2][h * 2 + i % 2] = x;
      most = fmax(most, x);
    }
    most = fmax(most, simd_shuffle_xor(most, 1));
    most = fmax(most, simd_shuffle_xor(most, 2));
    for (uint i = 0; i < 8; i++) {
      const float e = exp2(s[i / 2][h * 2 + i % 2] - most); // 0 for what is not seen: every row has seen the first token
      s[i / 2][h * 2 + i % 2] = e;
      sum += e;
    }
    const float fade = exp2(f.m[h] - most);
    f.m[h] = most;
    f.l[h] = fma(f.l[h], fade, sum);
    for (uint d = 0; d < HEAD_DIM / 8; d++) {
      f.o[d][h * 2] *= fade;
      f.o[d][h * 2 + 1] *= fade;
    }
  }
  for (uint i = 0; i < 2; i++)
    for (uint j = 0; j < 4; j++) w.p[i][j] = pack2(s[i * 2 + j / 2][j % 2 * 2], s[i * 2 + j / 2][j % 2 * 2 + 1]);
}

template <uint RT> FN void flash_values(THREAD FlashTile<RT> &f, THREAD FlashWeights<RT> &w, const TG bf16 *v, uint lane)
{
  for (uint i = 0; i < 2; i++)
    for (uint d = 0; d < HEAD_DIM / 8; d += 2) {
      uint b[4];
      load_matrices_transposed(b, v + (i * 16 + lane % 16) * FLASH_ROW + d * 8 + lane / 16 * 8);
      mma16(f.o[d], w.p[i], b[0], b[1]);
      mma16(f.o[d + 1], w.p[i], b[2], b[3]);
    }
}

// A thread's pieces of a block from `from` on its way to `to`: 16 bytes each, zeros from row `tokens` on, where nobody wrote.
FN void flash_send(TG uint *to, const DEVICE bf16 *from, uint tokens, uint tid)
{
  for (uint i = tid; i < FLASH_BLOCK * HEAD_DIM / 8; i += FLASH_THREADS) {
    const uint row = i / (HEAD_DIM / 8);
    copy_async(to + row * (FLASH_ROW / 2) + i % (HEAD_DIM / 8) * 4, from + (row < tokens ? i * 8 : 0), row < tokens);
  }
}

// K and V have a buffer each: V is on its way while the scores are computed, the next K while the values are added.
template <uint RT> FN void flash_blocks(THREAD FlashTile<RT> &f, FlashCache c, TG uint *mem, uint own, float scale, uint tid, uint lane, uint simd)
{
  TG uint *v = mem + FLASH_BLOCK * FLASH_ROW / 2;
  FlashWeights<RT> w;
  tg_barrier(); // the queries have been read
  flash_send(mem, c.keys + flash_row(c, 0), min(c.len, FLASH_BLOCK), tid);
  for (uint t0 = 0; t0 < c.len; t0 += FLASH_BLOCK) {
    const bool seen = t0 < own + 8 * RT; // by any row of the simdgroup
    const uint t1 = t0 + FLASH_BLOCK;
    copy_wait();
    tg_barrier(); // K is there, and V has been read
    flash_send(v, c.values + flash_row(c, t0), min(c.len - t0, FLASH_BLOCK), tid);
    if (seen) flash_scores<RT>(f, w, (const TG bf16 *)mem, t0, own, scale, lane);
    copy_wait();
    tg_barrier(); // V is there, and K has been read
    if (t1 < c.len) flash_send(mem, c.keys + flash_row(c, t1), min(c.len - t1, FLASH_BLOCK), tid);
    if (seen) flash_values<RT>(f, w, (const TG bf16 *)v, lane);
  }
}

template <uint RT> FN void flash_close(THREAD FlashTile<RT> &f, DEVICE bf16 *out, uint stride, uint rows, TG uint *mem, uint lane, uint simd)
{
  for (uint h = 0; h < 2; h++) {
    float l = f.l[h];
    l += simd_shuffle_xor(l, 1);
    l += simd_shuffle_xor(l, 2);
    const uint row = lane / 4 + h * 8;
    DEVICE uint *to = (DEVICE uint *)(out + ulong(row) * stride) + lane % 4;
    for (uint d = 0; d < HEAD_DIM / 8; d++)
      if (row < rows) to[d * 4] = pack2(quotient(f.o[d][h * 2], l), quotient(f.o[d][h * 2 + 1], l));
  }
}
#endif
