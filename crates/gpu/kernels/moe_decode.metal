// Experts for a few rows: each selected expert's weights are read once for each row that selected it. One row of the real
// model: 8 · 2 · 512 · 2048 weights in, 9 · 2048 · 512 out, 4.5 bits each with scales and biases: 9.4 MB and 5.3 MB.

// out[entry] = x[entry / share] · a[expert]ᵀ, or with two matrices silu(· a) · (· b): the GEMV of gemv.metal, with the matrix
// chosen by the entry's expert.
template <uint F, uint R, uint TILE>
FN void expert_block(const DEVICE uint *a_slab, const DEVICE uint *b_slab, const DEVICE uint *x, const DEVICE uint *ids, DEVICE bf16 *out,
                     CONSTANT ExpertsArgs &p, TG uint *tile, TG float *sums, uint block, uint entry, uint lane, uint simd, uint tid)
{
  const bool paired = p.paired != 0;
  const uint each = paired ? R / 2 : R;
  GemvInput in;
  in.x = x + ulong(entry / p.share) * (p.a.cols / 2);
  in.cols = p.a.cols;
  in.rows = 1;
  in.normed = false;
  in.keeps = false;
  GemvPlace at;
  at.lanes = p.lanes;
  at.beside = 32 / p.lanes;
  at.part = lane & (p.lanes - 1);
  at.first = (block * 8 + simd) * each * at.beside + lane / p.lanes;
  at.row_count = p.a.rows;
  at.tid = tid;
  at.threads = 256;
  inputs_ready();
  const uint expert = ids[entry];
  const Rows a = rows_of(a_slab, p.a, expert);
  Rows b = a;
  if (paired) b = rows_of(b_slab, p.b, expert);
  const uint W = R * 8, A = R * 2;
  uint q[W];
  float affine[A], acc[R];
  load_first<F, R, 1>(a, b, paired, at, p.a.cols, 1, 0, q, affine);
  gemv_block<true, F, R, 1, TILE>(a, b, paired, at, false, 0, in, tile, sums, q, affine, acc);
#pragma unroll
  for (uint r = 0; r < R; r++) {
    const uint row = at.first + r * at.beside;
    if (r >= each || row >= at.row_count || (r & (at.lanes - 1)) != at.part) continue;
    out[ulong(entry) * at.row_count + row] = to_bf16(paired ? silu(acc[r]) * acc[(r + R / 2) % R] : acc[r]);
  }
}

KERNEL(decode_experts, 256, IN(0, uint, a), IN(1, uint, b), IN(2, uint, x), IN(3, uint, ids), OUT(4, bf16, out), ARGS(5, ExpertsArgs, p))
{
  SHARED(uint, tile, 2048);
  SHARED(float, sums, 256);
  const uint f = p.a.format;
  if (f == Q4) expert_block<Q4, 4, 2048>(a, b, x, ids, out, p, tile, sums, k_group.x, k_group.y, k_lane, k_simd, k_thread.x);
  else if (f == Q8) expert_block<Q8, 4, 2048>(a, b, x, ids, out, p, tile, sums, k_group.x, k_group.y, k_lane, k_simd, k_thread.x);
  else if (f == BF16) expert_block<BF16, 4, 2048>(a, b, x, ids, out, p, tile, sums, k_group.x, k_group.y, k_lane, k_simd, k_thread.x);
  else expert_block<F32, 4, 2048>(a, b, x, ids, out, p, tile, sums, k_group.x, k_group.y, k_lane, k_simd, k_thread.x);
}

// Packet i of row `col` of eight experts, from rank `first` on.
template <uint F>
FN void load_experts(const DEVICE uint *slab, CONSTANT ExpertsSumArgs &p, const DEVICE uint *ids, uint first, uint col, uint i, THREAD uint *q, THREAD float *affine)
{
  const uint packets = p.down.cols / packet_elements<F>();
#pragma unroll
  for (uint e = 0; e < 8; e++) {
    if (first + e >= p.k) continue;
    const Rows rows = rows_of(slab, p.down, load_ahead(ids + first + e));
    load_packet<F>(rows, col, packets, i, q + e * 8, affine + e * 2);
  }
}

// Σ_rank weight · (x[rank] · downᵀ) + gate · (shared_x · shared_downᵀ) for one column: `lanes` lanes go through the experts in
// the order of rank, the shared one last, with the packets of eight experts in flight; each lane sums its share of all of them
// before the lanes are summed. All inputs wait in threadgroup memory. `lanes` divides the packets of both matrices' rows. The experts
// were chosen two stages ago: their weights are loaded while the stage before still runs.
template <uint F>
FN float experts_sum(const DEVICE uint *down, const DEVICE uint *shared_down, const DEVICE uint *x, const DEVICE uint *ids,
                     const DEVICE float *weights, const DEVICE uint *shared_x, const DEVICE float *shared_gate, CONSTANT ExpertsSumArgs &p,
                     TG uint *tile, TG float *sums, uint col, uint part, uint tid)
{
  const uint elements = packet_elements<F>(), packets = p.down.cols / elements, shared_packets = p.shared_down.cols / elements;
  const Rows shared_rows = rows_of(shared_down, p.shared_down, 0);
  uint q[64], shared_q[8];
  float affine[16], shared_affine[2];
  load_experts<F>(down, p, ids, 0, col, part, q, affine);
  load_packet<F>(shared_rows, col, shared_packets, part, shared_q, shared_affine);
  inputs_ready();
  const float gate = sigmoid(*shared_gate);
  TG uint *shared_tile = tile + p.k * p.down.cols;
  TG float *shared_sums = sums + p.k * p.down.cols / 8;
  GemvInput in;
  in.x = x;
  in.cols = p.k * p.down.cols;
  in.rows = 1;
  in.normed = false;
  in.keeps = false;
  stage_x<true, F>(in, 0, in.cols, p.lanes, tile, 0, sums, 0, tid, 256);
  in.x = shared_x;
  in.cols = p.shared_down.cols;
  stage_x<true, F>(in, 0, in.cols, p.lanes, shared_tile, 0, shared_sums, 0, tid, 256);
  tg_barrier();
  float sum[1] = {0.0f};
  for (uint first = 0; first < p.k; first += 8)
    for (uint i = part; i < packets; i += p.lanes) {
      if (first + i > part) load_experts<F>(down, p, ids, first, col, i, q, affine);
#pragma unroll
      for (uint e = 0; e < 8; e++) {
        if (first + e >= p.k) continue;
        float dot[1] = {0.0f};
        const uint packet = (first + e) * packets + i;
        dot_packets<true, F, 1, 1>(q + e * 8, affine + e * 2, tile + ((packet - part) * (elements / 4) + part) * 4, 0, p.lanes,
                            sums + packet * (elements / 8), 0, 1, dot);
        sum[0] = fma(weights[first + e], dot[0], sum[0]);
      }
    }
  for (uint i = part; i < shared_packets; i += p.lanes) {
    if (i > part) load_packet<F>(shared_rows, col, shared_packets, i, shared_q, shared_affine);
    float dot[1] = {0.0f};
    dot_packets<true, F, 1, 1>(shared_q, shared_affine, shared_tile + ((i - part) * (elements / 4) + part) * 4, 0, p.lanes,
                        shared_sums + i * (elements / 8), 0, 1, dot);
    sum[0] = fma(gate, dot[0], sum[0]);
  }
  lanes_sum<1>(sum, p.lanes);
  return sum[0];
}

// out = residual + the experts' weighted sum: their down projections, routing weights, the shared expert and its gate.
KERNEL(decode_experts_out, 256, IN(0, uint, down), IN(1, uint, shared_down), IN(2, uint, x), IN(3, uint, ids), IN(4, float, weights),
       IN(5, uint, shared_x), IN(6, float, shared_gate), IN(7, float, residual), OUT(8, float, out), ARGS(9, ExpertsSumArgs, p))
{
  SHARED(uint, tile, 6144);
  SHARED(float, sums, 768);
  const uint row = k_group.y, col = k_group.x * (256 / p.lanes) + k_thread.x / p.lanes, part = k_lane & (p.lanes - 1);
  const uint there = min(col, p.down.rows - 1), f = p.down.format;
  const DEVICE uint *my_x = x + ulong(row) * p.k * (p.down.cols / 2), *my_ids = ids + row * p.k;
  const DEVICE uint *my_shared = shared_x + ulong(row) * (p.shared_down.cols / 2);
  const DEVICE float *my_weights = weights + row * p.k;
  const DEVICE float *my_gate = shared_gate + row;
  float sum;
  if (f == Q4) sum = experts_sum<Q4>(down, shared_down, my_x, my_ids, my_weights, my_shared, my_gate, p, tile, sums, there, part, k_thread.x);
  else if (f == Q8) sum = experts_sum<Q8>(down, shared_down, my_x, my_ids, my_weights, my_shared, my_gate, p, tile, sums, there, part, k_thread.x);
  else if (f == BF16) sum = experts_sum<BF16>(down, shared_down, my_x, my_ids, my_weights, my_shared, my_gate, p, tile, sums, there, part, k_thread.x);
  else sum = experts_sum<F32>(down, shared_down, my_x, my_ids, my_weights, my_shared, my_gate, p, tile, sums, there, part, k_thread.x);
  const ulong at = ulong(row) * p.down.rows + col;
  if (part == 0 && col < p.down.rows) out[at] = residual[at] + sum;
}
