// Which expert computes which row: selection, and for many rows the rows sorted by expert.

// The k largest logits of a row by one simdgroup, 32 · EACH experts at most: each round takes the largest of all lanes' largest,
// the lowest id of equal ones. Softmax over the chosen is softmax over all, renormalized.
template <uint EACH>
FN void select_experts(const DEVICE float *logits, DEVICE uint *ids, DEVICE float *weights, uint experts, uint k, uint lane)
{
  uint key[EACH];
  for (uint i = 0; i < EACH; i++) key[i] = i * 32 + lane < experts ? max(ordered(logits[i * 32 + lane]), 1u) : 0; // 0: none is left
  uint mine = 0;        // lane r keeps the expert of rank r
  for (uint rank = 0; rank < k; rank++) {
    uint best = 0, at = 0;
    for (uint i = 0; i < EACH; i++)
      if (key[i] > best) { best = key[i]; at = i; }
    const uint top = simd_max(best);
    const uint id = simd_min(best == top ? at * 32 + lane : 0xffffffffu);
    for (uint i = 0; i < EACH; i++)
      if (id == i * 32 + lane) key[i] = 0;
    if (lane == rank) mine = id;
  }
  const float logit = lane < k ? logits[mine] : 0.0f;
  const float largest = simd_shuffle(logit, 0u);
  const float p = lane < k ? exp(logit - largest) : 0.0f;
  const float sum = simd_sum(p);
  if (lane < k) {
    ids[lane] = mine;
    weights[lane] = quotient(p, sum);
  }
}

#define ROUTER(name, EACH) \
  KERNEL(name, 128, IN(0, float, logits), OUT(1, uint, ids), OUT(2, float, weights), ARGS(3, RouterArgs, p)) \
  { \
    inputs_ready(); \
    const uint row = k_group.x * p.simdgroups + k_simd; \
    if (row < p.rows) \
      select_experts<EACH>(logits + ulong(row) * p.experts, ids + row * p.k, weights + row * p.k, p.experts, p.k, k_lane); \
  }
ROUTER(router_256, 8)
ROUTER(router_1024, 32)

// Sorting of routed rows (entry = row · k + rank) by expert, in the order of entries, in two launches without atomics.
// A threadgroup has ROUTE_CHUNK entries; a thread has p.each neighbouring experts, 4 at most.
#define ROUTE_CHUNK 512u

FN uint stage_entries(const DEVICE uint *ids, TG uint *part, uint first, uint entries, uint tid)
{
  const uint n = min(entries - first, ROUTE_CHUNK);
  for (uint i = tid; i < n; i += 256) part[i] = ids[first + i];
  return n;
}

// counts[chunk][expert] = entries of the chunk that chose it.
KERNEL(route_count, 256, IN(0, uint, ids), OUT(1, uint, counts), ARGS(2, RouteArgs, p))
{
  SHARED(uint, part, ROUTE_CHUNK);
  const uint n = stage_entries(ids, part, k_group.x * ROUTE_CHUNK, p.entries, k_thread.x);
  tg_barrier();
  for (uint j = 0; j < p.each; j++) {
    const uint expert = k_thread.x * p.each + j;
    uint count = 0;
    for (uint i = 0; i < n; i++) count += part[i] == expert ? 1u : 0u;
    if (expert < p.experts) counts[k_group.x * p.experts + expert] = count;
  }
}

// Rows of an expert in blocks of `large` rows, and in blocks of 16 what is left, if that is `tail` rows at most; all in blocks of 16 if
// `large` is 0.
FN uint large_blocks(uint rows, uint large, uint tail) { return large != 0 ? (rows + large - 1 - tail) / large : 0; }
FN uint small_blocks(uint rows, uint large, uint tail)
{
  const uint rest = rows - min(rows, large_blocks(rows, large, tail) * large);
  return (rest + 15) / 16;
}
FN void put_block(DEVICE uint *blocks, uint at, uint first, uint rows, uint expert) { store4(blocks + 4 + 4 * at, first, rows, expert, 0); }

// order[] = the entries by expert. The first threadgroup also writes the blocks: how many large ones, how many of 16 rows, then
// {first place in order, rows, expert} of each, the large ones first.
KERNEL(route_scatter, 256, IN(0, uint, ids), IN(1, uint, counts), OUT(2, uint, order), OUT(3, uint, blocks), ARGS(4, RouteArgs, p))
{
  SHARED(uint, part, ROUTE_CHUNK);
  SHARED(uint, sums, 24);
  const uint n = stage_entries(ids, part, k_group.x * ROUTE_CHUNK, p.entries, k_thread.x);
  uint total[4], before[4], entries = 0, large = 0, small = 0;
#pragma unroll
  for (uint j = 0; j < 4; j++) {
    total[j] = before[j] = 0;
    const uint expert = k_thread.x * p.each + j;
    if (j >= p.each || expert >= p.experts) continue;
    for (uint chunk = 0; chunk < p.chunks; chunk++) {
      const uint count = counts[chunk * p.experts + expert];
      total[j] += count;
      if (chunk < k_group.x) before[j] += count;
    }
    entries += total[j];
    large += large_blocks(total[j], p.large, p.tail);
    small += small_blocks(total[j], p.large, p.tail);
  }
  uint at = simd_exclusive_sum(entries), at_large = simd_exclusive_sum(large), at_small = simd_exclusive_sum(small);
  if (k_lane == 31) {
    sums[k_simd] = at + entries;
    sums[8 + k_simd] = at_large + large;
    sums[16 + k_simd] = at_small + small;
  }
  tg_barrier();
  uint all_large = 0, all_small = 0;
  for (uint s = 0; s < 8; s++) {
    if (s < k_simd) { at += sums[s]; at_large += sums[8 + s]; at_small += sums[16 + s]; }
    all_large += sums[8 + s];
    all_small += sums[16 + s];
  }
  at_small += all_large;
  if (k_group.x == 0 && k_thread.x == 0) store4(blocks, all_large, all_small, 0, 0);
#pragma unroll
  for (uint j = 0; j < 4; j++) {
    const uint expert = k_thread.x * p.each + j;
    if (j >= p.each || expert >= p.experts) continue;
    uint place = at + before[j];
    for (uint i = 0; i < n; i++)
      if (part[i] == expert) order[place++] = k_group.x * ROUTE_CHUNK + i;
    if (k_group.x == 0) {
      const uint in_large = large_blocks(total[j], p.large, p.tail), in_small = small_blocks(total[j], p.large, p.tail);
      for (uint b = 0; b < in_large; b++) put_block(blocks, at_large++, at + b * p.large, min(p.large, total[j] - b * p.large), expert);
      for (uint b = 0; b < in_small; b++) {
        const uint from = in_large * p.large + b * 16;
        put_block(blocks, at_small++, at + from, min(16u, total[j] - from), expert);
      }
    }
    at += total[j];
  }
}
