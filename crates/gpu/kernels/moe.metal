// Experts for many rows: products grouped by the blocks of route.metal. Each block reads its expert's weights, from L2 if the
// expert's block before it did.

struct RoutedBlock { uint first, rows, expert, large, there; };
FN RoutedBlock routed_block(const DEVICE uint *blocks, uint i)
{
  RoutedBlock b = {0, 0, 0, i < blocks[0] ? 1u : 0u, i < blocks[0] + blocks[1] ? 1u : 0u};
  if (b.there != 0) {
    const uint4 x = load4(blocks + 4 + 4 * i);
    b.first = x.x;
    b.rows = x.y;
    b.expert = x.z;
  }
  return b;
}

// out[entry] = silu(x[row] · gateᵀ) · (x[row] · upᵀ), half a tile's columns of each.
template <class Kind>
FN void experts_in_rows(Kind kind, const DEVICE uint *gate, const DEVICE uint *up, const DEVICE bf16 *x, const DEVICE uint *order,
                        const DEVICE uint *blocks, DEVICE bf16 *out, CONSTANT ExpertsInArgs &p, TG uint *mem, uint column_block,
                        uint block, uint tid, uint lane, uint simd)
{
  const RoutedBlock b = routed_block(blocks, p.first + block);
  if (b.there == 0) return;   // for the whole threadgroup
  const DEVICE uint *list = order + b.first;
  const uint col = column_block * (Kind::COLUMNS / 2);
  const ListedRows a = {x, list, b.rows, p.gate.cols, p.k};
  const PairedRows w = {weight_rows(gate, p.gate, b.expert, col), weight_rows(up, p.up, b.expert, col), Kind::COLUMNS / 2};
  const SiluScatter e = {{out, list, b.rows, col, p.gate.rows}};
  run_tile(kind, b.large != 0, a, w, e, p.gate.cols, mem, tid, lane, simd);
}

#define EXPERTS_IN_OPERANDS IN(0, uint, gate), IN(1, uint, up), IN(2, bf16, x), IN(3, uint, order), IN(4, uint, blocks), OUT(5, bf16, out), ARGS(6, ExpertsInArgs, p)
#ifndef K_CUDA
#define EXPERTS_IN(name, F) \
  KERNEL(name, 128, EXPERTS_IN_OPERANDS) \
  { \
    SHARED(uint, mem, TILE_WORDS(32, 64)); \
    experts_in_rows(SimdgroupTile<64, F>(), gate, up, x, order, blocks, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd); \
  }
EXPERTS_IN(experts_in_q4, Q4)
EXPERTS_IN(experts_in_q8, Q8)
EXPERTS_IN(experts_in_any, ANY_FORMAT)
#endif

// out[entry] = x[entry] · downᵀ.
template <class Kind>
FN void experts_out_rows(Kind kind, const DEVICE uint *down, const DEVICE bf16 *x, const DEVICE uint *order, const DEVICE uint *blocks,
                         DEVICE bf16 *out, CONSTANT ExpertsOutArgs &p, TG uint *mem, uint column_block, uint block, uint tid,
                         uint lane, uint simd)
{
  const RoutedBlock b = routed_block(blocks, p.first + block);
  if (b.there == 0) return;   // for the whole threadgroup
  const DEVICE uint *list = order + b.first;
  const uint col = column_block * Kind::COLUMNS;
  const ListedRows a = {x, list, b.rows, p.down.cols, 1};
  const WeightRows w = weight_rows(down, p.down, b.expert, col);
  const ScatterRows e = {out, list, b.rows, col, p.down.rows};
  run_tile(kind, b.large != 0, a, w, e, p.down.cols, mem, tid, lane, simd);
}

#define EXPERTS_OUT_OPERANDS IN(0, uint, down), IN(1, bf16, x), IN(2, uint, order), IN(3, uint, blocks), OUT(4, bf16, out), ARGS(5, ExpertsOutArgs, p)
#ifndef K_CUDA
#define EXPERTS_OUT(name, F) \
  KERNEL(name, 128, EXPERTS_OUT_OPERANDS) \
  { \
    SHARED(uint, mem, TILE_WORDS(32, 64)); \
    experts_out_rows(SimdgroupTile<64, F>(), down, x, order, blocks, out, p, mem, k_group.x, k_group.y, k_thread.x, k_lane, k_simd); \
  }
EXPERTS_OUT(experts_out_q4, Q4)
EXPERTS_OUT(experts_out_q8, Q8)
EXPERTS_OUT(experts_out_any, ANY_FORMAT)
#endif

// out = residual + Σ_rank weight · routed + sigmoid(shared_gate) · shared; eight columns a thread.
KERNEL(moe_combine, 256, IN(0, float, residual), IN(1, bf16, routed), IN(2, float, weights), IN(3, bf16, shared_out),
       IN(4, float, shared_gate), OUT(5, float, out), ARGS(6, CombineArgs, p))
{
  const uint col = (k_group.x * 256 + k_thread.x) * 8, row = k_group.y;
  if (col >= p.width) return;
  const ulong at = ulong(row) * p.width;
  const DEVICE bf16 *mine = routed + at * p.k;
  Floats sum = {{0, 0, 0, 0, 0, 0, 0, 0}};
  for (uint r = 0; r < p.k; r++) {
    const float weight = weights[row * p.k + r];
    const Floats v = get_bf16(mine + ulong(r) * p.width, col, p.width);
    for (uint i = 0; i < 8; i++) sum.v[i] = fma(weight, v.v[i], sum.v[i]);
  }
  const float gate = sigmoid(shared_gate[row]);
  const Floats v = get_bf16(shared_out + at, col, p.width), old = get_f32(residual + at, col, p.width);
  for (uint i = 0; i < 8; i++) sum.v[i] = old.v[i] + fma(gate, v.v[i], sum.v[i]);
  put_f32(out + at, col, p.width, sum);
}
