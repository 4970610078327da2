// What the tiles of flash attention share; their loop over K and V has a file per target:
//
//   flash_open<RT>(f, rows, mem, lane)              queries of a simdgroup, staged as rows of FLASH_ROW elements
//   flash_blocks<RT>(f, c, mem, own, scale, …)      all blocks of FLASH_BLOCK tokens, by all simdgroups of the threadgroup
//   flash_close<RT>(f, out, stride, rows, mem, …)   the simdgroup's rows of the output
//
// `mem` is the threadgroup's memory, FLASH_WORDS words.

#define FLASH_HEADS (HEADS_PER_KV < 8u ? HEADS_PER_KV : 8u)
#define FLASH_COLUMNS ((HEADS_PER_KV + 7u) / 8u) // threadgroups for the heads of a KV head
#define FLASH_SIMDS (8u % FLASH_HEADS == 0u ? 8u : FLASH_HEADS)
#define FLASH_THREADS (32u * FLASH_SIMDS)
#define FLASH_ROW_BLOCKS (FLASH_SIMDS / FLASH_HEADS)

// The keys and values of one KV head that a tile sees: the first `len` tokens of a slot.
struct FlashCache {
  const DEVICE bf16 *keys, *values;
  const DEVICE uint *pages;
  uint slot, max_pages, kv_heads, kv_head, len;
};

FN ulong flash_row(FlashCache c, uint token) { return attention_row(c.pages, c.slot, c.max_pages, token, c.kv_heads, c.kv_head); }
