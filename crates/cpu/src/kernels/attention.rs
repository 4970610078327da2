//! Gated full attention over paged keys and values: preparation of q, k and v, and causal attention.
//!
//! Keys are processed in blocks of 64 at absolute positions. Each block yields its own maximum, sum and
//! weighted values, and blocks combine in ascending order, so a row's bits depend on its position and the
//! keys alone: not on chunking, tiles, threads or batch mates.

use super::common::{SharedMut, StoredElem};
use crate::pool::Pool;
use crate::simd::{Isa, Simd, math};
use crate::simd_entry;

mod prep;

pub use prep::{KvPagesMut, PrepInput, RopeTable, attention_prep};

/// Tokens of a KV page.
pub const PAGE_TOKENS: usize = 256;

/// Keys of a block.
const BLOCK: usize = 64;

/// Dimensions of a panel of the value scratch: at 64 keys it takes 16 KiB of L1.
const PANEL: usize = 64;

/// Most queries (rows times heads) of a task; their q, scores and outputs stay in L2.
const TILE_QUERIES: usize = 128;

/// Largest head dimension.
pub const MAX_HEAD_DIM: usize = 512;

/// Dimensions of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; query head `h` uses `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Leading dimensions of a head that rope rotates.
    pub rot: usize,
}

impl AttentionShape {
    /// Whether the kernels of this module take the shape; the error says why not.
    pub fn supported(&self) -> Result<(), String> {
        let AttentionShape { heads, kv_heads, head_dim, rot } = *self;
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(format!("{heads} query heads are not a multiple of {kv_heads} kv heads"));
        }
        if head_dim == 0 || !head_dim.is_multiple_of(16) || head_dim > MAX_HEAD_DIM {
            return Err(format!(
                "head dimension {head_dim}: need a multiple of 16 of at most {MAX_HEAD_DIM}"
            ));
        }
        if !rot.is_multiple_of(2) || rot > head_dim {
            return Err(format!("rope over {rot} of {head_dim} dimensions: need an even part"));
        }
        Ok(())
    }

    /// Elements of one page of keys (or values) of a layer: `[kv head][token][head_dim]`.
    pub fn page_len(&self) -> usize {
        self.kv_heads * PAGE_TOKENS * self.head_dim
    }

    /// Query heads that share a key/value head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// A run of rows of one slot.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSegment<'a> {
    /// First row of the segment in the step's activations.
    pub first_row: usize,
    /// Rows (tokens) of the segment, in order.
    pub rows: usize,
    /// Position of the first row in the slot's sequence.
    pub start: usize,
    /// The slot's page table: position `p` is token `p % 256` of page `pages[p / 256]`.
    pub pages: &'a [u32],
}

/// Inputs of [`attention`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionInput<'a, T> {
    /// `[rows][heads * head_dim]`, normalized and rotated.
    pub q: &'a [f32],
    /// Keys of the layer, `[page][kv head][token][head_dim]`; they include those of the segments' rows.
    pub k_pages: &'a [T],
    /// Values, likewise.
    pub v_pages: &'a [T],
}

/// Scratch of [`attention`] for each worker; its size does not depend on the context.
#[derive(Debug)]
pub struct AttentionScratch {
    buffer: Vec<f32>,
    layout: Layout,
}

/// Offsets into a worker's scratch, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    v: usize,
    scores: usize,
    out: usize,
    stats: usize,
    len: usize,
}

impl Layout {
    fn new(head_dim: usize) -> Self {
        let v = BLOCK * head_dim;
        let scores = v + BLOCK * head_dim;
        let out = scores + TILE_QUERIES * BLOCK;
        let stats = out + TILE_QUERIES * head_dim;
        Layout { v, scores, out, stats, len: (stats + 4 * TILE_QUERIES).next_multiple_of(16) }
    }
}

impl AttentionScratch {
    /// Scratch for the workers of a pool of `threads`.
    pub fn new(shape: &AttentionShape, threads: usize) -> Self {
        let layout = Layout::new(shape.head_dim);
        AttentionScratch { buffer: vec![0.0; layout.len * threads + 15], layout }
    }

    /// Bytes that this scratch has taken.
    pub fn allocated(&self) -> usize {
        self.buffer.capacity() * size_of::<f32>()
    }

    /// Bytes that [`new`](Self::new) allocates.
    pub fn bytes(shape: &AttentionShape, threads: usize) -> usize {
        (Layout::new(shape.head_dim).len * threads + 15) * size_of::<f32>()
    }
}

/// Causal attention of each segment's rows over all keys up to their own position; writes
/// `[rows][heads * head_dim]`.
pub fn attention<T: StoredElem>(
    isa: Isa,
    pool: &Pool,
    shape: &AttentionShape,
    segments: &[AttentionSegment<'_>],
    input: &AttentionInput<'_, T>,
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    shape.supported().expect("shape checked at prepare time");
    let AttentionShape { heads, kv_heads, head_dim, .. } = *shape;
    let rows = out.len() / (heads * head_dim);
    let layout = Layout::new(head_dim);
    assert!(input.q.len() == out.len() && out.len() == rows * heads * head_dim);
    assert!(scratch.layout == layout && scratch.buffer.len() >= layout.len * pool.threads() + 15);
    check_segments(segments, rows, input.k_pages.len().min(input.v_pages.len()) / shape.page_len());

    let tiles = tiles(shape, segments, pool.threads());
    let aligned = scratch.buffer.as_ptr().align_offset(64).min(15);
    let scratch = SharedMut::new(&mut scratch.buffer[aligned..]);
    let out = SharedMut::new(out);
    pool.run(tiles.len(), &|task, worker| {
        let tile = &tiles[task];
        let segment = &segments[tile.segment];
        let at = ((segment.first_row + tile.first) * heads + tile.head) * head_dim;
        let work = Work {
            shape,
            pages: segment.pages,
            kv_head: tile.head / shape.group(),
            heads: tile.heads,
            rows: tile.rows,
            position: segment.start + tile.first,
            q: input.q[at..].as_ptr(),
            k_pages: input.k_pages.as_ptr().cast(),
            v_pages: input.v_pages.as_ptr().cast(),
            bf16: T::BF16,
            layout,
            // SAFETY: each worker has its own part, and runs one task at a time.
            scratch: unsafe { scratch.slice(worker * layout.len, layout.len) }.as_mut_ptr(),
            // SAFETY: tiles differ in rows or heads.
            out: unsafe { out.ptr(at) },
        };
        debug_assert!(work.kv_head < kv_heads);
        // SAFETY: `check_segments` bounds rows and pages; the tile lies inside its segment.
        unsafe { attend(isa, &work) }
    });
}

/// Rows of a segment and query heads of one kv head.
struct Tile {
    segment: usize,
    first: usize,
    rows: usize,
    head: usize,
    heads: usize,
}

/// Splits the segments into tasks, the longest contexts first. Heads of a group stay together, to share
/// the reading of K and V, unless that leaves threads idle.
fn tiles(shape: &AttentionShape, segments: &[AttentionSegment<'_>], threads: usize) -> Vec<Tile> {
    let group = shape.group();
    let step = (TILE_QUERIES / group).max(1);
    let row_tiles: usize = segments.iter().map(|s| s.rows.div_ceil(step)).sum();
    let mut heads = group.min(TILE_QUERIES);
    let count = |heads: usize| row_tiles * shape.kv_heads * group.div_ceil(heads);
    while heads > 1 && count(heads) < threads {
        heads = heads.div_ceil(2);
    }
    let mut tiles = Vec::with_capacity(count(heads));
    for (segment, s) in segments.iter().enumerate() {
        for first in (0..s.rows).step_by(step) {
            for kv_head in 0..shape.kv_heads {
                for h in (0..group).step_by(heads) {
                    tiles.push(Tile {
                        segment,
                        first,
                        rows: step.min(s.rows - first),
                        head: kv_head * group + h,
                        heads: heads.min(group - h),
                    });
                }
            }
        }
    }
    tiles.sort_by_key(|t| std::cmp::Reverse(segments[t.segment].start + t.first));
    tiles
}

/// One task: `rows` consecutive rows by `heads` query heads of one kv head. Query `i` is row `i / heads`,
/// head `i % heads`, so the causal limits of the queries ascend.
struct Work<'a> {
    shape: &'a AttentionShape,
    pages: &'a [u32],
    kv_head: usize,
    heads: usize,
    rows: usize,
    /// Position of the first row.
    position: usize,
    q: *const f32,
    /// Elements are bf16 or f32, as `bf16` says.
    k_pages: *const u8,
    v_pages: *const u8,
    bf16: bool,
    layout: Layout,
    scratch: *mut f32,
    out: *mut f32,
}

impl Work<'_> {
    fn queries(&self) -> usize {
        self.rows * self.heads
    }

    /// Offset of a query in `q` and `out`.
    fn offset(&self, query: usize) -> usize {
        let row = query / self.heads * self.shape.heads;
        (row + query % self.heads) * self.shape.head_dim
    }

    /// Token index in the layer's pages of the key at a position.
    fn token(&self, position: usize) -> usize {
        let page = self.pages[position / PAGE_TOKENS] as usize;
        (page * self.shape.kv_heads + self.kv_head) * PAGE_TOKENS + position % PAGE_TOKENS
    }

    /// Keys or values of the block after `start` from byte `at` on: what to fetch while this block is
    /// computed. Without it, one row of a long context alternates between waiting and computing. A few
    /// lines at a time, as the core tracks only some 20 misses. Null for what is not to be fetched.
    fn ahead(&self, pages: *const u8, start: usize, tile: usize, at: usize) -> *const u8 {
        let next = start + BLOCK;
        if tile >= 2 || next >= self.position + self.rows {
            return std::ptr::null();
        }
        let bytes = self.shape.head_dim * if self.bf16 { 2 } else { 4 };
        pages.wrapping_add(self.token(next) * bytes + at)
    }

    /// Keys of the block at `start` that a query sees.
    fn limit(&self, query: usize, start: usize) -> usize {
        (self.position + query / self.heads + 1).saturating_sub(start).min(BLOCK)
    }
}

simd_entry! {
    unsafe fn attend(work: &Work<'_>) = attend_kernel;
}

#[inline(always)]
unsafe fn attend_kernel<S: Simd>(w: &Work<'_>) {
    let head_dim = w.shape.head_dim;
    let queries = w.queries();
    let last = w.position + w.rows - 1;
    for block in 0..=last / BLOCK {
        let start = block * BLOCK;
        // The rows of a tile that lie before the block see none of it.
        let first = start.saturating_sub(w.position) * w.heads;
        let keys = w.limit(queries - 1, start);
        // SAFETY: the caller vouches for the pointers of `w`; the first `keys` keys of the block exist,
        // and the queries from `first` see at least one of them.
        unsafe {
            if w.bf16 {
                load_block::<S, u16>(w, start, keys);
            } else {
                load_block::<S, f32>(w, start, keys);
            }
            scores::<S>(w, start, first, keys);
            for i in first..queries {
                softmax::<S>(w, i, w.limit(i, start), block == 0);
            }
            values::<S>(w, start, first, block == 0);
        }
    }
    for i in 0..queries {
        // SAFETY: each query has its place in the scratch and in the output.
        unsafe {
            let sum = S::splat(*w.scratch.add(w.layout.stats + TILE_QUERIES + i));
            let from = w.scratch.add(w.layout.out + i * head_dim);
            for c in (0..head_dim).step_by(16) {
                S::store(w.out.add(w.offset(i) + c), S::div(S::load(from.add(c)), sum));
            }
        }
    }
}

/// Widens a block's keys to `[key][head_dim]` and its values to panels `[panel][key][64]`: one power of
/// two between the keys of a panel would leave most of L1 unused.
#[inline(always)]
unsafe fn load_block<S: Simd, T: StoredElem>(w: &Work<'_>, start: usize, keys: usize) {
    let head_dim = w.shape.head_dim;
    let token = w.token(start);
    // SAFETY: a block never crosses a page, and the caller vouches for the page and the scratch.
    unsafe {
        let (k, v) = (
            w.k_pages.cast::<T>().add(token * head_dim),
            w.v_pages.cast::<T>().add(token * head_dim),
        );
        let (k_to, v_to) = (w.scratch, w.scratch.add(w.layout.v));
        for c in (0..keys * head_dim).step_by(16) {
            S::store(k_to.add(c), T::load::<S>(k.add(c)));
        }
        for panel in (0..head_dim).step_by(PANEL) {
            let width = PANEL.min(head_dim - panel);
            for key in 0..keys {
                let to = v_to.add(panel * BLOCK + key * width);
                for c in (0..width).step_by(16) {
                    S::store(to.add(c), T::load::<S>(v.add(key * head_dim + panel + c)));
                }
            }
        }
    }
}

/// Raw dot products of the queries from `first` with the block's keys, to `scores[query][64]`. Entries
/// past a query's limit are left undefined.
#[inline(always)]
unsafe fn scores<S: Simd>(w: &Work<'_>, start: usize, first: usize, keys: usize) {
    let head_dim = w.shape.head_dim;
    // SAFETY: the scratch holds 64 keys and `TILE_QUERIES` rows of scores; whatever the keys past `keys`
    // hold, their scores are not used.
    unsafe {
        let scores = w.scratch.add(w.layout.scores);
        // 16 keys stay in L1 while all queries pass.
        for k0 in (0..keys).step_by(16) {
            let k = w.scratch.add(k0 * head_dim);
            let mut i = first;
            while i + 4 <= w.queries() {
                let q = [0, 1, 2, 3].map(|j| w.q.add(w.offset(i + j)));
                let (limit, tile) = (w.limit(i + 3, start), (i - first) / 4);
                for key in (k0..limit.min(k0 + 16)).step_by(4) {
                    let k = w.scratch.add(key * head_dim);
                    let next = w.ahead(w.k_pages, start, tile, (key / 2 + tile) * head_dim * 4);
                    let mut tile = [0.0; 16];
                    S::store(tile.as_mut_ptr(), tile4x4::<S>(&q, k, head_dim, next));
                    for j in 0..4 {
                        let to = scores.add((i + j) * BLOCK + key);
                        to.copy_from_nonoverlapping(tile.as_ptr().add(4 * j), 4);
                    }
                }
                i += 4;
            }
            for i in i..w.queries() {
                if w.limit(i, start) > k0 {
                    let q = w.q.add(w.offset(i));
                    S::store(scores.add(i * BLOCK + k0), tile1x16::<S>(q, k, head_dim));
                }
            }
        }
    }
}

/// Lane `4i + j` is the dot product of query `i` and key `j`.
#[inline(always)]
unsafe fn tile4x4<S: Simd>(
    q: &[*const f32; 4],
    k: *const f32,
    head_dim: usize,
    next: *const u8,
) -> S::F32 {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut sums = [S::splat(0.0); 16];
        if S::WIDE {
            dots::<S, 4, 4>(q, k, head_dim, next, &mut sums);
        } else {
            for (i, j) in [(0, 0), (0, 2), (2, 0), (2, 2)] {
                let next = if (i, j) == (0, 0) { next } else { std::ptr::null() };
                let q = [q[i], q[i + 1]];
                dots::<S, 2, 2>(&q, k.add(j * head_dim), head_dim, next, &mut sums[4 * i + j..]);
            }
        }
        S::reduce16(sums)
    }
}

/// Lane `j` is the dot product of the query and key `j`.
#[inline(always)]
unsafe fn tile1x16<S: Simd>(q: *const f32, k: *const f32, head_dim: usize) -> S::F32 {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut sums = [S::splat(0.0); 16];
        for j in (0..16).step_by(4) {
            dots::<S, 1, 4>(&[q], k.add(j * head_dim), head_dim, std::ptr::null(), &mut sums[j..]);
        }
        S::reduce16(sums)
    }
}

/// Lane sums of `Q` queries by `K` consecutive keys, to `sums[4 * query + key]`. Fetches a line of `next`
/// with each step.
#[inline(always)]
unsafe fn dots<S: Simd, const Q: usize, const K: usize>(
    q: &[*const f32; Q],
    k: *const f32,
    head_dim: usize,
    next: *const u8,
    sums: &mut [S::F32],
) {
    // SAFETY: queries and keys hold `head_dim` elements, a multiple of 16.
    unsafe {
        let mut acc = [[S::splat(0.0); K]; Q];
        for c in (0..head_dim).step_by(16) {
            if !next.is_null() {
                S::prefetch(next.wrapping_add(4 * c));
            }
            let mut keys = [S::splat(0.0); K];
            for (j, key) in keys.iter_mut().enumerate() {
                *key = S::load(k.add(j * head_dim + c));
            }
            for (q, acc) in q.iter().zip(&mut acc) {
                let q = S::load(q.add(c));
                for (key, acc) in keys.iter().zip(acc) {
                    *acc = S::fma(q, *key, *acc);
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            for (j, &acc) in acc.iter().enumerate() {
                sums[4 * i + j] = acc;
            }
        }
    }
}

/// Turns a query's scores of a block into weights relative to the block's maximum, and combines maximum
/// and sum with those of the blocks before. Leaves the factors for old and new output in the stats.
#[inline(always)]
unsafe fn softmax<S: Simd>(w: &Work<'_>, query: usize, limit: usize, first_block: bool) {
    // SAFETY: each query has a row of 64 scores and four stats.
    unsafe {
        let row = w.scratch.add(w.layout.scores + query * BLOCK);
        for key in limit..BLOCK {
            *row.add(key) = f32::NEG_INFINITY;
        }
        let scale = S::splat((1.0 / (w.shape.head_dim as f64).sqrt()) as f32);
        let mut s = [S::splat(0.0); BLOCK / 16];
        for (c, s) in s.iter_mut().enumerate() {
            *s = S::mul(S::load(row.add(16 * c)), scale);
        }
        let block_max = S::reduce_max(S::max(S::max(s[0], s[1]), S::max(s[2], s[3])));
        let mut sum = S::splat(0.0);
        for (c, s) in s.into_iter().enumerate() {
            let p = math::exp::<S>(S::sub(s, S::splat(block_max)));
            S::store(row.add(16 * c), p);
            sum = S::add(sum, p);
        }
        let block_sum = S::reduce_add(sum);

        let stats = w.scratch.add(w.layout.stats + query);
        let (max, sum) = (stats, stats.add(TILE_QUERIES));
        if first_block {
            (*max, *sum) = (block_max, block_sum);
            return;
        }
        let new_max = if *max > block_max { *max } else { block_max };
        let mut factors = [0.0; 16];
        factors[0] = *max - new_max;
        factors[1] = block_max - new_max;
        S::store(factors.as_mut_ptr(), math::exp::<S>(S::load(factors.as_ptr())));
        *max = new_max;
        *sum = sum.read().mul_add(factors[0], block_sum * factors[1]);
        *stats.add(2 * TILE_QUERIES) = factors[0];
        *stats.add(3 * TILE_QUERIES) = factors[1];
    }
}

/// Adds the block's weighted values to the outputs of the queries from `first`.
#[inline(always)]
unsafe fn values<S: Simd>(w: &Work<'_>, start: usize, first: usize, first_block: bool) {
    let head_dim = w.shape.head_dim;
    // SAFETY: the scratch holds the panels, scores and outputs; each limit is at most the keys loaded.
    unsafe {
        for panel in (0..head_dim).step_by(PANEL) {
            let width = PANEL.min(head_dim - panel);
            let v = w.scratch.add(w.layout.v + panel * BLOCK);
            let mut i = first;
            while i < w.queries() {
                let limit = w.limit(i, start);
                let tile = (i - first) / 4;
                let next = w.ahead(w.v_pages, start, tile, (panel / 32 + tile) * BLOCK * 64);
                let at = Values { w, query: i, panel, width, limit, next, first_block };
                // Only queries that see the same keys share a tile.
                if S::WIDE && i + 4 <= w.queries() && w.limit(i + 3, start) == limit {
                    at.panel::<S, 4, 4>(v);
                    i += 4;
                } else if i + 2 <= w.queries() && w.limit(i + 1, start) == limit {
                    at.panel::<S, 2, 2>(v);
                    i += 2;
                } else {
                    at.panel::<S, 1, 4>(v);
                    i += 1;
                }
            }
        }
    }
}

/// A panel of the outputs of a few queries with the same limit.
struct Values<'a> {
    w: &'a Work<'a>,
    query: usize,
    panel: usize,
    width: usize,
    limit: usize,
    /// Lines to fetch, one with each key.
    next: *const u8,
    first_block: bool,
}

impl Values<'_> {
    /// `Q` queries, `C` vectors at a time.
    #[inline(always)]
    unsafe fn panel<S: Simd, const Q: usize, const C: usize>(&self, v: *const f32) {
        let mut c = 0;
        // SAFETY: passed on from the caller; the vectors lie inside the panel's width.
        unsafe {
            while c + 16 * C <= self.width {
                self.columns::<S, Q, C>(v, c);
                c += 16 * C;
            }
            while c < self.width {
                self.columns::<S, Q, 1>(v, c);
                c += 16;
            }
        }
    }

    #[inline(always)]
    unsafe fn columns<S: Simd, const Q: usize, const C: usize>(&self, v: *const f32, c: usize) {
        let w = self.w;
        let head_dim = w.shape.head_dim;
        // SAFETY: passed on from the caller.
        unsafe {
            let p = w.scratch.add(w.layout.scores + self.query * BLOCK).cast_const();
            let mut acc = [[S::splat(0.0); C]; Q];
            for key in 0..self.limit {
                if !self.next.is_null() {
                    S::prefetch(self.next.wrapping_add(64 * key));
                }
                let mut row = [S::splat(0.0); C];
                for (j, row) in row.iter_mut().enumerate() {
                    *row = S::load(v.add(key * self.width + c + 16 * j));
                }
                for (q, acc) in acc.iter_mut().enumerate() {
                    let p = S::splat(*p.add(q * BLOCK + key));
                    for (row, acc) in row.iter().zip(acc) {
                        *acc = S::fma(p, *row, *acc);
                    }
                }
            }
            for (q, acc) in acc.iter().enumerate() {
                let stats = w.scratch.add(w.layout.stats + self.query + q);
                let out =
                    w.scratch.add(w.layout.out + (self.query + q) * head_dim + self.panel + c);
                let old = S::splat(*stats.add(2 * TILE_QUERIES));
                let new = S::splat(*stats.add(3 * TILE_QUERIES));
                for (j, &acc) in acc.iter().enumerate() {
                    let out = out.add(16 * j);
                    let sum = if self.first_block {
                        acc
                    } else {
                        S::fma(S::load(out), old, S::mul(acc, new))
                    };
                    S::store(out, sum);
                }
            }
        }
    }
}

/// Panics unless the segments are ascending, disjoint, inside `rows`, and their page tables reach every
/// key inside `pages` pages.
fn check_segments(segments: &[AttentionSegment<'_>], rows: usize, pages: usize) {
    let mut next = 0;
    for s in segments {
        assert!(
            s.first_row >= next && s.rows <= rows && s.first_row <= rows - s.rows,
            "segment rows"
        );
        next = s.first_row + s.rows;
        let used = &s.pages[..(s.start + s.rows).div_ceil(PAGE_TOKENS)];
        assert!(used.iter().all(|&p| (p as usize) < pages), "page outside the layer's buffer");
    }
}
