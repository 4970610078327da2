//! Expert selection, and the order in which many rows' experts are computed.

use lily_ops::ElementType;

use crate::kernel_args;
use crate::kernels::common::Context;
use crate::kernels::gemm::RowBlocks;
use crate::list::{Access, Binding, Operand, Recorder};
use crate::scratch::Scratch;

kernel_args! {
    /// Of the `router_*` kernels.
    pub struct RouterArgs {
        /// Rows.
        rows: u32,
        /// Experts.
        experts: u32,
        /// Selected experts a row.
        k: u32,
        /// Rows of a threadgroup.
        simdgroups: u32,
    }

    /// Of `route_count` and `route_scatter`.
    pub struct RouteArgs {
        /// Routed rows: `rows · k`.
        entries: u32,
        /// Experts.
        experts: u32,
        /// Neighbouring experts of a thread.
        each: u32,
        /// Threadgroups that the entries are shared by.
        chunks: u32,
        /// Rows of a large block; 0: blocks of 16 rows only.
        large: u32,
        /// Most rows that are left to blocks of 16.
        tail: u32,
    }
}

/// Most experts that the kernels select from.
pub const MOST_EXPERTS: u32 = 1024;

/// Most experts that a row may select.
pub const MOST_SELECTED: u32 = 32;

/// Entries of a threadgroup of the sort.
const CHUNK: u32 = 512;

/// Whether there is a kernel for that many experts.
pub fn supports(experts: u32, k: u32) -> Result<(), String> {
    if experts > MOST_EXPERTS || k > MOST_SELECTED || k > experts {
        return Err(format!(
            "a router that selects {k} of {experts} experts; the kernels select at most {MOST_SELECTED} of {MOST_EXPERTS}"
        ));
    }
    Ok(())
}

/// What a router reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct Selection {
    /// f32 `[rows][experts]`.
    pub logits: Operand,
    /// Rows.
    pub rows: u32,
    /// Experts.
    pub experts: u32,
    /// Selected experts a row.
    pub k: u32,
    /// u32 `[rows][k]`.
    pub ids: Operand,
    /// f32 `[rows][k]`.
    pub weights: Operand,
}

/// Records the selection of experts: a simdgroup a row.
pub fn router(r: &mut Recorder, _c: &Context, s: &Selection) {
    let kernel = if s.experts <= 256 { "router_256" } else { "router_1024" };
    // A few rows are spread over cores, many share threadgroups.
    let simdgroups = if s.rows <= 8 { 1 } else { 4 };
    r.dispatch(
        kernel,
        [s.rows.div_ceil(simdgroups), 1, 1],
        32 * simdgroups,
        vec![
            Binding::new(s.logits, Access::Read),
            Binding::new(s.ids, Access::Write),
            Binding::new(s.weights, Access::Write),
        ],
        &RouterArgs { rows: s.rows, experts: s.experts, k: s.k, simdgroups },
        u64::from(s.rows) * (u64::from(s.experts) * 4 + u64::from(s.k) * 8),
    );
}

/// Routed rows sorted by expert, and the blocks that the grouped products run over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routes {
    /// u32: entries (`row · k + rank`) by expert, then by row and rank.
    pub order: Operand,
    /// u32: how many large blocks there are, how many of 16 rows, two unused words; then of each block its first place in
    /// `order`, its rows, its expert and an unused word, the large ones first.
    pub blocks: Operand,
    /// Blocks at most: the grid of the products.
    pub most_blocks: u32,
}

/// Blocks that `entries` of `experts` may need at most, whatever their distribution.
pub fn most_blocks(entries: u32, experts: u32, cut: RowBlocks) -> u32 {
    let rows = u64::from(cut.large.max(16));
    let used = u64::from(experts.min(entries));
    // Each expert wastes less than a block.
    let most = (u64::from(entries) + used * (rows - 1)) / rows;
    (most as u32).min(entries)
}

impl Routes {
    /// Memory for them.
    pub fn take(scratch: &mut Scratch, entries: u32, experts: u32, cut: RowBlocks) -> Self {
        let most_blocks = most_blocks(entries, experts, cut);
        Self {
            order: scratch.take(entries.into(), ElementType::U32),
            blocks: scratch.take(4 + 4 * u64::from(most_blocks), ElementType::U32),
            most_blocks,
        }
    }
}

/// Records the sort of `entries` routed rows: two launches after the router.
pub fn route(
    r: &mut Recorder,
    c: &Context,
    scratch: &mut Scratch,
    ids: Operand,
    entries: u32,
    experts: u32,
) -> Routes {
    let cut = RowBlocks::of(c.profile, c.tuning);
    let routes = Routes::take(scratch, entries, experts, cut);
    let chunks = entries.div_ceil(CHUNK);
    let counts = scratch.take(u64::from(chunks) * u64::from(experts), ElementType::U32);
    let each = experts.div_ceil(256);
    let args = RouteArgs { entries, experts, each, chunks, large: cut.large, tail: cut.tail };
    let ids_bytes = u64::from(entries) * 4;
    r.dispatch(
        "route_count",
        [chunks, 1, 1],
        256,
        vec![Binding::new(ids, Access::Read), Binding::new(counts, Access::Write)],
        &args,
        ids_bytes + counts.bytes,
    );
    r.dispatch(
        "route_scatter",
        [chunks, 1, 1],
        256,
        vec![
            Binding::new(ids, Access::Read),
            Binding::new(counts, Access::Read),
            Binding::new(routes.order, Access::Write),
            Binding::new(routes.blocks, Access::Write),
        ],
        &args,
        2 * ids_bytes + counts.bytes + routes.blocks.bytes,
    );
    routes
}

/// The tables of [`Routes`], made by the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTables {
    /// As [`Routes::order`].
    pub order: Vec<u32>,
    /// As [`Routes::blocks`], as far as it is used.
    pub blocks: Vec<u32>,
}

/// The tables that [`route`] writes, from ids that were read back. Ids beyond `experts` are left out.
pub fn host_tables(ids: &[u32], experts: u32, cut: RowBlocks) -> HostTables {
    let mut entries_of = vec![Vec::new(); experts as usize];
    for (entry, expert) in ids.iter().enumerate() {
        if let Some(list) = entries_of.get_mut(*expert as usize) {
            list.push(entry as u32);
        }
    }
    let mut order = Vec::new();
    let (mut large, mut small) = (Vec::new(), Vec::new());
    for (expert, entries) in entries_of.iter().enumerate() {
        let (first, rows) = (order.len() as u32, entries.len() as u32);
        let (in_large, in_small) = cut.blocks(rows);
        let mut at = 0;
        let sizes = std::iter::repeat_n(cut.large, in_large as usize)
            .chain(std::iter::repeat_n(16, in_small as usize));
        for (i, size) in sizes.enumerate() {
            let block = [first + at, size.min(rows - at), expert as u32, 0];
            if i < in_large as usize { &mut large } else { &mut small }.extend(block);
            at += block[1];
        }
        order.extend(entries);
    }
    let mut blocks = vec![large.len() as u32 / 4, small.len() as u32 / 4, 0, 0];
    blocks.extend(large);
    blocks.extend(small);
    HostTables { order, blocks }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_a_few_rows() {
        // Expert 2 has 17 rows, expert 0 one, expert 1 none.
        let mut ids = vec![2; 18];
        ids[4] = 0;
        let order: Vec<u32> = [4].into_iter().chain((0..18).filter(|i| *i != 4)).collect();
        let blocks = vec![1, 1, 0, 0, 1, 17, 2, 0, 0, 1, 0, 0];
        let tables = |cut| host_tables(&ids, 3, cut);
        assert_eq!(tables(RowBlocks::SIMDGROUPS), HostTables { order: order.clone(), blocks });
        let blocks = vec![0, 3, 0, 0, 0, 1, 0, 0, 1, 16, 2, 0, 17, 1, 2, 0];
        assert_eq!(tables(RowBlocks::FIXED), HostTables { order: order.clone(), blocks });
        let blocks = vec![2, 0, 0, 0, 0, 1, 0, 0, 1, 17, 2, 0];
        assert_eq!(tables(RowBlocks::UNITS), HostTables { order, blocks });
    }

    #[test]
    fn the_grid_is_never_too_small() {
        // The worst distributions: one row beyond whole blocks for as many experts as possible.
        for cut in [RowBlocks::FIXED, RowBlocks::SIMDGROUPS, RowBlocks::UNITS] {
            for (entries, experts) in
                [(1, 1), (8, 256), (40, 5), (1000, 7), (4096, 256), (16384, 256)]
            {
                let most = most_blocks(entries, experts, cut);
                for rest in [1, 15, 16, 17, 31, 127, 129] {
                    let mut ids = Vec::new();
                    for expert in 0..experts {
                        ids.extend(std::iter::repeat_n(expert, rest));
                    }
                    ids.truncate(entries as usize);
                    ids.resize(entries as usize, 0);
                    let blocks = host_tables(&ids, experts, cut).blocks;
                    assert!(blocks[0] + blocks[1] <= most, "{entries} entries, {rest} an expert");
                }
            }
        }
        // 2048 rows of the real model, and 640 blocks if each expert has its 64 rows and a few more.
        assert_eq!(most_blocks(2048 * 8, 256, RowBlocks::SIMDGROUPS), 760);
    }

    #[test]
    fn limits_are_named() {
        assert!(supports(256, 8).is_ok() && supports(4, 4).is_ok());
        assert!(supports(2048, 8).unwrap_err().contains("1024"));
        assert!(supports(64, 33).unwrap_err().contains("33 of 64"));
    }
}
