// Causal flash attention over a prompt: a threadgroup has RT times 8 query rows of the heads that share a KV head, eight at most
// (times as many row blocks as make eight simdgroups), a simdgroup those of one head. Blocks of 32 tokens lie at absolute positions and are
// taken in ascending order, K and V of a block are staged once for all heads, and what comes next is loaded while the matrix
// units work. A row's bits depend on its slot alone: not on tile, chunk or batch mates.
// Expected bytes at 16 heads on 2 KV heads of 256: q and the output once, 1024 of K and V for a tile and token.

// Queries of the 32 matrix rows from `first` on into the block; zeros for rows that the segment does not have.
FN void flash_stage_queries(const DEVICE bf16 *q, TG uint *block, uint first, uint simd_rows, uint rows, uint heads, uint own_heads,
                             uint tid)
{
  for (uint i = tid; i < FLASH_BLOCK * HEAD_DIM / 8; i += FLASH_THREADS) {
    const uint row = i / (HEAD_DIM / 8), piece = i % (HEAD_DIM / 8), simd = (first + row) / simd_rows;
    const uint at = simd / FLASH_HEADS * simd_rows + (first + row) % simd_rows, head = simd % FLASH_HEADS;
    TG uint *to = block + row * (FLASH_ROW / 2) + piece * 4;
    if (simd < FLASH_SIMDS && head < own_heads && at < rows) {
      const uint4 x = load4((const DEVICE uint *)(q + (ulong(at) * heads + head) * HEAD_DIM) + piece * 4);
      store4(to, x.x, x.y, x.z, x.w);
    } else {
      store4(to, 0, 0, 0, 0);
    }
  }
}

template <uint RT> FN void flash_attention(const DEVICE bf16 *q, const DEVICE bf16 *keys, const DEVICE bf16 *values, const DEVICE uint *pages,
    const DEVICE SlotHeader *headers, const DEVICE SegmentEntry *segments, DEVICE bf16 *out, CONSTANT AttentionArgs &p, TG uint *mem,
    uint tile, uint column, uint tid, uint lane, uint simd)
{
  const uint simd_rows = 8 * RT, tile_rows = simd_rows * FLASH_ROW_BLOCKS;
  uint segment = 0;
  for (; segment + 1 < p.segments; segment++) {
    const uint tiles = (segments[segment].rows + tile_rows - 1) / tile_rows;
    if (tile < tiles) break;
    tile -= tiles;
  }
  const uint slot = segments[segment].slot, first = tile * tile_rows;
  const uint rows = min(segments[segment].rows - first, tile_rows), position = headers[slot].position + first;
  const uint kv_head = column / FLASH_COLUMNS, first_head = column % FLASH_COLUMNS * FLASH_HEADS;
  const uint own_heads = min(HEADS_PER_KV - first_head, FLASH_HEADS);
  const ulong at = (ulong(segments[segment].first + first) * p.heads + kv_head * HEADS_PER_KV + first_head) * HEAD_DIM;
  const TG bf16 *staged = (const TG bf16 *)mem;

  FlashTile<RT> f;
  for (uint s = 0; s < FLASH_SIMDS * simd_rows; s += FLASH_BLOCK) {
    if (s > 0) tg_barrier(); // the queries before have been read
    flash_stage_queries(q + at, mem, s, simd_rows, rows, p.heads, own_heads, tid);
    tg_barrier();
    if (simd * simd_rows / FLASH_BLOCK * FLASH_BLOCK == s) flash_open<RT>(f, staged + (simd * simd_rows - s) * FLASH_ROW, mem, lane, simd);
  }

  const FlashCache c = {keys, values, pages, slot, p.max_pages, p.kv_heads, kv_head, position + rows};
  flash_blocks<RT>(f, c, mem, position + simd / FLASH_HEADS * simd_rows, p.scale, tid, lane, simd);
  const uint skipped = simd / FLASH_HEADS * simd_rows;
  const uint kept = rows > skipped && simd % FLASH_HEADS < own_heads ? rows - skipped : 0;
  flash_close<RT>(f, out + at + (ulong(skipped) * p.heads + simd % FLASH_HEADS) * HEAD_DIM, p.heads * HEAD_DIM, kept, mem, lane, simd);
}

// The last tiles see most tokens and begin first.
#define FLASH_ATTENTION(NAME, RT) \
  KERNEL(NAME, FLASH_THREADS, IN(0, bf16, q), IN(1, bf16, keys), IN(2, bf16, values), IN(3, uint, pages), IN(4, SlotHeader, headers), \
      IN(5, SegmentEntry, segments), OUT(6, bf16, out), ARGS(7, AttentionArgs, p)) \
  { \
    FLASH_SHARED(uint, mem, FLASH_WORDS); \
    flash_attention<RT>(q, keys, values, pages, headers, segments, out, p, mem, p.tiles - 1 - p.first - k_group.x, k_group.y, \
        k_thread.x, k_lane, k_simd); \
  }
FLASH_ATTENTION(flash_attention_16, 2)
#if !defined(K_CUDA) && !defined(ATTENTION_MMA)
FLASH_ATTENTION(flash_attention_8, 1)
#endif
