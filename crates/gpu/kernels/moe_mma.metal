#if defined(K_CUDA) || defined(K_CPU)
// Experts for a few rows by matrix units, 4-bit weights: the slices of gemv_mma.metal with the matrix chosen by the entry's expert. One
// entry of x a threadgroup: rows that chose the same expert read it twice, which of 8 rows and 256 experts few do.

// A threadgroup's share of the work: an entry, and 16 or more rows of its expert's matrices.
struct ExpertTask {
  uint entry, block;
  uint4 x[2]; // a thread's pieces of the entry's row of x
};

FN void open_task(const DEVICE uint *x, CONSTANT ExpertsArgs &p, uint number, uint tid, THREAD ExpertTask &t)
{
  t.entry = number / p.blocks;
  t.block = number % p.blocks;
  const DEVICE uint *row = x + ulong(t.entry / p.share) * (p.a.cols / 2);
#pragma unroll
  for (uint i = 0; i < 2; i++) {
    const uint u = tid + i * MMA_THREADS;
    t.x[i] = u < p.a.cols / 8 ? load_ahead4(row + u * 4) : uint4{0, 0, 0, 0};
  }
}

// A simdgroup's part of every task: one of `members` matrices, of the task's rows those behind `mine` tiles, and of their columns a slice.
struct ExpertPlace {
  const DEVICE uint *a, *b;
  uint split, mine, first, members, block;
  bool has;
};

FN ExpertPlace expert_place(const DEVICE uint *a, const DEVICE uint *b, CONSTANT ExpertsArgs &p, uint simd)
{
  ExpertPlace e;
  e.a = a;
  e.b = b;
  e.split = p.lanes;
  e.mine = simd / e.split;
  e.first = simd % e.split;
  e.members = p.paired != 0 ? 2 : 1;
  e.block = MMA_SIMDS / e.split / e.members * 16;
  e.has = e.first * slice_groups<Q4>() < p.a.cols / 64;
  return e;
}

// The simdgroup's tile of an expert's block of rows, and its slice on the way.
template <uint C>
FN void open_tile(const THREAD ExpertPlace &e, CONSTANT ExpertsArgs &p, uint expert, uint block, THREAD MmaTile &tile, TG uint *slice, THREAD MmaAffine<C> &affine, uint lane)
{
  tile.w = e.mine % e.members == 1 ? rows_of(e.b, p.b, expert) : rows_of(e.a, p.a, expert);
  tile.row = block * e.block + e.mine / e.members * 16;
  tile.rows = p.a.rows;
  tile.groups = p.a.cols / 64;
  if (!e.has) return;
  copy_slice<Q4>(tile, e.first, slice, lane);
  load_affine(tile, e.first, affine, lane);
}

// A task's x, ready for the products.
FN void stage_task(const THREAD ExpertTask &t, CONSTANT ExpertsArgs &p, const THREAD MmaMemory &m, uint tid)
{
#pragma unroll
  for (uint i = 0; i < 2; i++)
    if (i * MMA_THREADS * 8 < p.a.cols) stage_piece<Q4>(t.x[i], tid + i * MMA_THREADS, m.x, m.sums, m.sums_part);
}

// Row `i` of a task's result, from its simdgroups' sums.
FN bf16 task_result(const TG float *sums, uint i, const THREAD ExpertPlace &e)
{
  const TG float *parts = sums + i / 16 * e.members * e.split * 16 + i % 16;
  const float value = sum_parts(parts, e.split, 16);
  return to_bf16(e.members == 2 ? silu(value) * sum_parts(parts + e.split * 16, e.split, 16) : value);
}

// out[entry] = x[entry / share] · a[expert]ᵀ, or with two matrices silu(· a) · (· b). A threadgroup takes its number and every `groups` after
// it, with the next one's weights on their way while the sums of one are put together. x was made before the experts were chosen: it comes
// while that still runs.
KERNEL(decode_experts_mma, 768, IN(0, uint, a), IN(1, uint, b), IN(2, uint, x), IN(3, uint, ids), OUT(4, bf16, out), ARGS(5, ExpertsArgs, p))
{
  static_assert(mma_words(1, 4096) <= LARGE_decode_experts_mma, "text::LARGE_MEMORY");
  SHARED_LARGE(uint, memory, LARGE_decode_experts_mma);
  const ExpertPlace e = expert_place(a, b, p, k_simd);
  const MmaMemory m = mma_memory(memory, 1, p.a.cols);
  const MmaStagedRows staged = {m, 0};
  TG uint *slice = m.slices + k_simd * MMA_SLICE;
  ExpertTask task;
  open_task(x, p, k_group.x, k_thread.x, task);
  inputs_ready();
  MmaTile tile;
  MmaAffine<slice_groups<Q4>()> affine;
  uint expert = ids[task.entry];
  for (uint number = k_group.x; number < p.tasks; number += k_groups.x) {
    if (number == k_group.x) open_tile(e, p, expert, task.block, tile, slice, affine, k_lane);
    stage_task(task, p, m, k_thread.x);
    tg_barrier();
    const uint entry = task.entry, row = task.block * e.block + k_thread.x, next = number + k_groups.x;
    if (next < p.tasks) {
      open_task(x, p, next, k_thread.x, task);
      expert = ids[task.entry];
    }
    float y[4];
    multiply_tile<Q4, true>(tile, 0, false, e.first, e.split, staged, affine, slice, k_lane, y);
    if (next < p.tasks) {
      simd_fence(); // all lanes have read the slice
      open_tile(e, p, expert, task.block, tile, slice, affine, k_lane);
    }
    keep_parts<true>(y, m.parts + k_simd * 16, 1, k_lane);
    tg_barrier();
    if (k_thread.x < e.block && row < tile.rows) out[ulong(entry) * tile.rows + row] = task_result(m.parts, k_thread.x, e);
  }
}

// The same for many tasks, with a second slice for each simdgroup: the next task's weights are on their way from the moment that this one's are
// there. A threadgroup takes p.each neighbouring tasks, most of one entry. Where a simdgroup has one slice of a row.
#define DEEP_WORDS (MMA_SIMDS * MMA_SLICE + MMA_SIMDS * 16)
KERNEL(decode_experts_mma_deep, 512, IN(0, uint, a), IN(1, uint, b), IN(2, uint, x), IN(3, uint, ids), OUT(4, bf16, out), ARGS(5, ExpertsArgs, p))
{
  static_assert(DEEP_WORDS + mma_words(1, 4096) <= LARGE_decode_experts_mma_deep, "text::LARGE_MEMORY");
  SHARED_LARGE(uint, memory, LARGE_decode_experts_mma_deep);
  constexpr uint C = slice_groups<Q4>();
  const ExpertPlace e = expert_place(a, b, p, k_simd);
  const MmaMemory m = mma_memory(memory + DEEP_WORDS, 1, p.a.cols);
  DeepSlices<C> d;
  d.slice = m.slices + k_simd * MMA_SLICE;
  d.other = memory + k_simd * MMA_SLICE;
  d.parts = m.parts;
  d.spare = (TG float *)(memory + MMA_SIMDS * MMA_SLICE);
  uint number = k_group.x * p.each;
  const uint end = min(number + p.each, p.tasks);
  ExpertTask task;
  open_task(x, p, number, k_thread.x, task);
  inputs_ready();
  MmaTile tile;
  open_tile(e, p, ids[task.entry], task.block, tile, d.slice, d.affine, k_lane);
  uint expert = ids[min(number + 1, end - 1) / p.blocks]; // of the entry of the task after the next copy
  uint staged_row = 0xffffffffu;
  for (; number < end; number++) {
    if (task.entry / p.share != staged_row) {
      staged_row = task.entry / p.share;
      stage_task(task, p, m, k_thread.x);
      tg_barrier();
    }
    const uint entry = task.entry, row = task.block * e.block + k_thread.x;
    copy_wait();
    simd_fence();
    if (number + 1 < end) {
      open_tile(e, p, expert, (number + 1) % p.blocks, tile, d.other, d.soon, k_lane);
      if ((number + 1) / p.blocks / p.share != staged_row) open_task(x, p, number + 1, k_thread.x, task);
      task.entry = (number + 1) / p.blocks;
      task.block = (number + 1) % p.blocks;
      expert = ids[min(number + 2, end - 1) / p.blocks];
    }
    const MmaStaged in = {m.x + e.first * C * 32, (const TG uint *)m.sums + e.first * C / 2, m.sums_part};
    const TG float *parts = deep_sums<Q4, true>(d, in, e.has, tile.groups - e.first * C, k_simd * 16, 1, k_lane);
    tg_barrier(); // and the slice and x have been read
    if (k_thread.x < e.block && row < tile.rows) out[ulong(entry) * tile.rows + row] = task_result(parts, k_thread.x, e);
  }
}

#define SUM_GROUPS 8u // of an expert's row at most: one slice
#define SUM_EXPERTS 9u
#define SUM_WORDS (SUM_EXPERTS * (MMA_SLICE + SUM_GROUPS * 32 + 3 * SUM_GROUPS / 2 + 2 * 16))

// out = residual + Σ weight · (x[rank] · downᵀ) + gate · (shared_x · shared_downᵀ) for 16 columns: a simdgroup an expert, the shared one
// last, and their sum in the order of rank. The experts were chosen two stages ago: their weights come while the stage before still runs.
// A threadgroup takes 16 columns and those `groups` further on, with the next ones' weights on their way while a sum is put together. Bound so
// that three of them fit a core.
KERNEL(decode_experts_out_mma, 864, IN(0, uint, down), IN(1, uint, shared_down), IN(2, uint, x), IN(3, uint, ids), IN(4, float, weights),
       IN(5, uint, shared_x), IN(6, float, shared_gate), IN(7, float, residual), OUT(8, float, out), ARGS(9, ExpertsSumArgs, p))
{
  static_assert(SUM_WORDS <= LARGE_decode_experts_out_mma, "text::LARGE_MEMORY");
  SHARED_LARGE(uint, memory, LARGE_decode_experts_out_mma);
  constexpr uint C = SUM_GROUPS;
  TG uint *slice = memory + k_simd * MMA_SLICE, *my_x = memory + SUM_EXPERTS * MMA_SLICE + k_simd * C * 32;
  TG uint *sums = memory + SUM_EXPERTS * (MMA_SLICE + C * 32) + k_simd * (3 * C / 2);
  TG float *both = (TG float *)(memory + SUM_EXPERTS * (MMA_SLICE + C * 32 + 3 * C / 2));
  const uint row = k_group.y, rank = row * p.k + k_simd;
  const bool shared = k_simd == p.k;
  MmaTile tile;
  tile.w = shared ? rows_of(shared_down, p.shared_down, 0) : rows_of(down, p.down, load_ahead(ids + rank));
  tile.rows = p.down.rows;
  tile.groups = (shared ? p.shared_down.cols : p.down.cols) / 64;
  tile.row = k_group.x * 16;
  MmaAffine<C> affine;
  copy_slice<Q4>(tile, 0, slice, k_lane);
  load_affine(tile, 0, affine, k_lane);
  inputs_ready();
  const float weight = shared ? sigmoid(shared_gate[row]) : weights[rank];
  const DEVICE uint *from = shared ? shared_x + ulong(row) * (p.shared_down.cols / 2) : x + ulong(rank) * (p.down.cols / 2);
#pragma unroll
  for (uint u = k_lane; u < C * 8; u += 32) {
    stage_piece<Q4>(u < tile.groups * 8 ? load4(from + u * 4) : uint4{0, 0, 0, 0}, u, my_x, (TG bf16 *)sums, C / 2);
  }
#pragma unroll 1
  for (uint i = 0; tile.row < tile.rows; i++) {
    const uint column = tile.row + k_thread.x;
    const bool mine = k_thread.x < 16 && column < tile.rows;
    const ulong to = ulong(row) * tile.rows + column;
    float total = 0.0f;
    if (mine) total = residual[to];
    copy_wait();
    simd_fence();
    float y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const MmaStaged in = {my_x, sums, C / 2};
    multiply_slice<Q4, C, true>(slice, affine, in, tile.groups, k_lane, y);
    tile.row += k_groups.x * 16;
    if (tile.row < tile.rows) {
      simd_fence(); // all lanes have read the slice
      copy_slice<Q4>(tile, 0, slice, k_lane);
      load_affine(tile, 0, affine, k_lane);
    }
#pragma unroll
    for (uint j = 0; j < 4; j++) y[j] *= weight * CODE_PAIR_BACK;
    TG float *parts = both + i % 2 * (SUM_EXPERTS * 16);
    keep_parts<true>(y, parts + k_simd * 16, 1, k_lane);
    tg_barrier();
    if (!mine) continue;
    float sum = 0.0f;
    for (uint e = 0; e <= p.k; e++) sum += parts[e * 16 + k_thread.x];
    out[to] = total + sum;
  }
}
#endif
