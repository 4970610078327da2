// Only in texts for measuring: reads memory and computes nothing that another kernel would.

// Packets of 16 bytes, spread over all threads of a grid of any shape; four are under way at a time. Their sums go nowhere unless
// `keep` is set, which the compiler cannot know.
KERNEL(read_bytes, 1024, IN(0, uint, slab), OUT(1, uint, out), ARGS(2, ReadArgs, p))
{
  const uint group = (k_group.z * k_groups.y + k_group.y) * k_groups.x + k_group.x;
  const ulong stride = ulong(k_groups.x) * k_groups.y * k_groups.z * p.threads;
  const ulong own = ulong(group) * p.threads + k_thread.x;
  const DEVICE uint *from = slab_words(slab, p.first);
  uint sum = 0;
  for (uint pass = 0; pass < p.passes; pass++) {
    ulong i = own;
    for (; i + 3 * stride < p.packets; i += 4 * stride) {
      const uint4 a = load4(from + i * 4), b = load4(from + (i + stride) * 4);
      const uint4 c = load4(from + (i + 2 * stride) * 4), d = load4(from + (i + 3 * stride) * 4);
      sum += (a.x ^ a.y ^ a.z ^ a.w) + (b.x ^ b.y ^ b.z ^ b.w) + (c.x ^ c.y ^ c.z ^ c.w) + (d.x ^ d.y ^ d.z ^ d.w);
    }
    for (; i < p.packets; i += stride) {
      const uint4 a = load4(from + i * 4);
      sum += a.x ^ a.y ^ a.z ^ a.w;
    }
  }
  if (p.keep != 0) out[own] = sum;
}

// K or V of a step's slots, read as the splits of attention read it: by its functions, in its grid, with nothing in between. A simdgroup's sum
// of all words goes to `out`.
// A simdgroup's tile of tokens from t0 on, as far as the split has them.
template <bool TOGETHER> FN void read_tile(THREAD uint (*words)[LANE_WORDS], const THREAD DecodeSplit &split, ulong page, const DEVICE bf16 *cache,
    const DEVICE uint *pages, CONSTANT AttentionArgs &p, uint t0, uint lane)
{
  const ulong at = t0 < split.end ? tile_at(split, page, pages, p, t0) : 0;
  for (uint t = 0; t < ATTENTION_TILE; t++) {
    for (uint i = 0; i < LANE_WORDS; i++) words[t][i] = 0;
    if (t0 + t < split.end) read_token<TOGETHER>(words[t], cache + at, t, lane);
  }
}

template <bool KEYS, bool TOGETHER> FN uint read_split(const DEVICE bf16 *cache, const DEVICE uint *pages, const DEVICE SlotHeader *headers,
    const DEVICE SegmentEntry *segments, CONSTANT AttentionArgs &p, const TG uint *nothing, uint3 group, uint lane, uint simd)
{
  const bool rows = KEYS && !TOGETHER; // each lane has a row
  const DecodeSplit split = split_of<ATTENTION_PACK, true>(headers, segments, p, group);
  const ulong page = split.begin < split.end ? split_page(split, pages, p) : 0;
  const uint first = split.begin + simd * ATTENTION_TILE, stride = ATTENTION_SIMDS * ATTENTION_TILE;
  uint sum = 0;
  // A tile is under way while the one before it is summed up: else the compiler has half of a tile under way, for fewer registers.
  uint ahead[ATTENTION_TILE][LANE_WORDS];
  if (!rows) read_tile<TOGETHER>(ahead, split, page, cache, pages, p, first, lane);
  for (uint t0 = first; t0 < split.end; t0 += stride) {
    if (rows) {
      const ulong at = tile_at(split, page, pages, p, t0);
      const uint t = own_score<ATTENTION_PACK>(lane) % ATTENTION_TILE;
      sum += t0 + t < split.end ? strided_row(Parts<32>(), nothing, cache + at + t * HEAD_DIM, 0) : 0;
    } else {
      uint words[ATTENTION_TILE][LANE_WORDS];
      for (uint t = 0; t < ATTENTION_TILE; t++)
        for (uint i = 0; i < LANE_WORDS; i++) words[t][i] = ahead[t][i];
      read_tile<TOGETHER>(ahead, split, page, cache, pages, p, t0 + stride, lane);
      for (uint t = 0; t < ATTENTION_TILE; t++) sum += row_part(nothing, words[t], 0);
    }
  }
  for (uint t = 16; t > 0; t >>= 1) sum += simd_shuffle_xor(sum, t);
  return sum;
}

#define READ_CACHE(NAME, KEYS, TOGETHER) \
  KERNEL(NAME, 128, IN(0, bf16, cache), IN(1, uint, pages), IN(2, SlotHeader, headers), IN(3, SegmentEntry, segments), OUT(4, uint, out), \
      ARGS(5, AttentionArgs, p)) \
  { \
    SHARED(uint, nothing, 4); \
    const uint sum = read_split<KEYS, TOGETHER>(cache, pages, headers, segments, p, nothing, k_group, k_lane, k_simd); \
    const uint at = (k_group.z * k_groups.y + k_group.y) * k_groups.x + k_group.x; \
    if (k_lane == 0) out[at * ATTENTION_SIMDS + k_simd] = sum; \
  }
READ_CACHE(read_keys, true, true)
READ_CACHE(read_keys_strided, true, false)
READ_CACHE(read_values, false, true)
READ_CACHE(read_values_strided, false, false)
