//! Command lists: what a step dispatches, and where one dispatch must wait for another.

use std::ops::Range;

use lily_ops::ElementType;

use crate::args::KernelArgs;
use crate::driver::{Buffer, Pipeline};
use crate::kernels::gemm::RowBlocks;

/// A range of a buffer that holds elements of one type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    /// The buffer.
    pub buffer: Buffer,
    /// First byte, a multiple of 16.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// Element type.
    pub element: ElementType,
}

/// What a dispatch does with a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads it, and nothing else may write it meanwhile.
    Read,
    /// Likewise, and in front of `inputs_ready()`: while the stage before may still run, where that does not write it.
    ReadAhead,
    /// Writes it, or reads and writes it.
    Write,
    /// Reads what never changes: weights, tables. Takes no part in hazards.
    Constant,
}

/// A buffer range as one kernel sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Binding {
    /// The buffer.
    pub buffer: Buffer,
    /// Byte offset of the kernel's pointer.
    pub offset: u64,
    /// Bytes from there that the kernel may touch.
    pub bytes: u64,
    /// Element type.
    pub element: ElementType,
    /// What it does with them.
    pub access: Access,
    /// The bytes of the buffer that take part in hazards, where these are fewer than the bound ones (one layer of a
    /// state that is bound as a whole).
    pub hazard: Range<u64>,
}

impl Binding {
    /// All of an operand.
    pub fn new(operand: Operand, access: Access) -> Self {
        let Operand { buffer, offset, bytes, element } = operand;
        Self { buffer, offset, bytes, element, access, hazard: offset..offset + bytes }
    }

    /// All of an operand is bound, `hazard` of the buffer is used.
    pub fn within(operand: Operand, access: Access, hazard: Range<u64>) -> Self {
        Self { hazard, ..Self::new(operand, access) }
    }

    /// Whether one of two bindings writes what the other touches.
    fn conflicts(&self, other: &Self) -> bool {
        let constant = [self.access, other.access].contains(&Access::Constant);
        let writes = [self.access, other.access].contains(&Access::Write);
        self.buffer == other.buffer
            && writes
            && !constant
            && self.hazard.start < other.hazard.end
            && other.hazard.start < self.hazard.end
    }
}

/// One kernel launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    /// The kernel's name in the text.
    pub kernel: &'static str,
    /// The operation (or fused chain) it belongs to, for timings and tables.
    pub op: &'static str,
    /// Layer, or `None` outside the layers.
    pub layer: Option<u32>,
    /// Threadgroups.
    pub groups: [u32; 3],
    /// Threads of a threadgroup, a multiple of 32.
    pub threads: u32,
    /// Buffers, bound at the indices 0, 1, …; the arguments follow at the next index.
    pub bindings: Vec<Binding>,
    /// Bytes of the argument struct; its name is checked against the kernel's when it is recorded.
    pub args: Vec<u8>,
    /// Distinct bytes that the dispatch reads and writes, as its encoder counts them.
    pub traffic: u64,
    /// Multiply-adds of its products, attention or recurrence, as its form does them and at most: where the bytes do not, they decide how
    /// long it takes. What tiles multiply beyond the last row does not count; 0 for all other kernels.
    pub work: u64,
    /// How several dispatches can do what this one does, where it may take long; they write apart.
    pub cut: Option<Cut>,
}

/// Along which dimension a grid can be cut, and where the number of a part's first threadgroup stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The dimension.
    pub dimension: usize,
    /// Byte of the arguments at which a u32 counts the threadgroups in front of the part's.
    pub at: usize,
}

impl Dispatch {
    /// Parts that it can be cut into at most.
    pub fn most_parts(&self) -> u32 {
        self.cut.map_or(1, |cut| self.groups[cut.dimension])
    }

    /// A dispatch of some of the threadgroups along the dimension that it can be cut in.
    pub fn part(&self, groups: Range<u32>) -> Self {
        let mut part = self.clone();
        if let Some(Cut { dimension, at }) = self.cut {
            part.groups[dimension] = groups.len() as u32;
            part.args[at..at + 4].copy_from_slice(&groups.start.to_ne_bytes());
        }
        part
    }

    /// Whether it writes integers: experts, places in lists, tokens, positions. Other kernels may read memory where these say.
    pub fn writes_indices(&self) -> bool {
        let integers = |b: &Binding| b.access == Access::Write && b.element == ElementType::U32;
        self.bindings.iter().any(integers)
    }

    fn conflicts(&self, other: &Self) -> bool {
        self.bindings.iter().any(|a| other.bindings.iter().any(|b| a.conflicts(b)))
    }
}

/// The dispatches of one submission, in an order in which running them one by one is right, cut into
/// stages: dispatches of one stage do not depend on each other, each stage waits for the one before it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CommandList {
    /// Dispatches in order.
    pub dispatches: Vec<Dispatch>,
    /// The pipeline of each.
    pub pipelines: Vec<Pipeline>,
    /// First dispatch of each stage; the first stage begins at 0.
    pub stages: Vec<usize>,
    /// Ranges of shared buffers that the host wrote for this list.
    pub inputs: Vec<(Buffer, Range<u64>)>,
    /// Ranges of shared buffers that the host reads after this list.
    pub outputs: Vec<(Buffer, Range<u64>)>,
    /// Where the host steps in: the dispatch before which it does, and what it does.
    pub breaks: Vec<(usize, HostRoute)>,
}

/// The host sorts routed rows by expert, as `route_count` and `route_scatter` do on the device.
#[derive(Clone, Debug, PartialEq)]
pub struct HostRoute {
    /// u32 expert of each routed row, read back.
    pub ids: Operand,
    /// u32, written: see [`Routes::order`](crate::kernels::route::Routes).
    pub order: Operand,
    /// u32, written: see [`Routes::blocks`](crate::kernels::route::Routes).
    pub blocks: Operand,
    /// Routed rows.
    pub entries: u32,
    /// Experts.
    pub experts: u32,
    /// How an expert's rows are cut into blocks.
    pub cut: RowBlocks,
}

impl CommandList {
    /// The list cut where the host steps in, with what it does after each part.
    pub fn parts(&self) -> Vec<(Self, Option<HostRoute>)> {
        let mut parts = Vec::new();
        let mut first = 0;
        let cuts = self.breaks.iter().map(|(at, route)| (*at, Some(route.clone())));
        for (end, route) in cuts.chain([(self.dispatches.len(), None)]) {
            let stages = self.stages.iter().filter(|s| (first..end).contains(*s));
            parts.push((
                Self {
                    dispatches: self.dispatches[first..end].to_vec(),
                    pipelines: self.pipelines[first..end].to_vec(),
                    stages: stages.map(|s| s - first).collect(),
                    inputs: if first == 0 { self.inputs.clone() } else { Vec::new() },
                    outputs: if route.is_none() { self.outputs.clone() } else { Vec::new() },
                    breaks: Vec::new(),
                },
                route,
            ));
            first = end;
        }
        parts
    }

    /// The list without some of its dispatches; the others stay in the stages they were in. Whatever is asked, those that
    /// [write indices](Dispatch::writes_indices) stay: what they leave is never what an earlier list or another value left there.
    pub fn without(&self, left_out: impl Fn(&Dispatch) -> bool) -> Self {
        let mut less =
            Self { inputs: self.inputs.clone(), outputs: self.outputs.clone(), ..Self::default() };
        // Before which of the remaining dispatches the host steps in.
        let mut places = Vec::new();
        for stage in self.stages() {
            let first = less.dispatches.len();
            for (i, dispatch) in stage.clone().zip(&self.dispatches[stage]) {
                places.push(less.dispatches.len());
                if dispatch.writes_indices() || !left_out(dispatch) {
                    less.dispatches.push(dispatch.clone());
                    less.pipelines.extend(self.pipelines.get(i));
                }
            }
            if less.dispatches.len() > first {
                less.stages.push(first);
            }
        }
        places.push(less.dispatches.len());
        let place = |(at, route): &(usize, HostRoute)| (places[*at], route.clone());
        less.breaks = self.breaks.iter().map(place).collect();
        less
    }

    /// Whether each dispatch may start while the stage before its own still runs: its kernel waits for its inputs itself
    /// ([`EARLY`](crate::text::EARLY)), and what may still run then writes nothing of what it reads before it waits: that stage, and behind
    /// one of [`EARLIER`](crate::text::EARLIER) the one before, too.
    pub fn early_starts(&self) -> Vec<bool> {
        let mut early = Vec::new();
        let mut running: Vec<&Dispatch> = Vec::new();
        for stage in self.stages() {
            let stage = &self.dispatches[stage];
            early.extend(stage.iter().map(|dispatch| {
                let ahead = dispatch.bindings.iter().filter(|b| b.access == Access::ReadAhead);
                let mut written = running.iter().flat_map(|d| &d.bindings);
                crate::text::EARLY.contains(&dispatch.kernel)
                    && !written.any(|w| ahead.clone().any(|a| a.conflicts(w)))
            }));
            if !stage.iter().any(|d| crate::text::EARLIER.contains(&d.kernel)) {
                running.clear();
            }
            running.extend(stage);
        }
        early
    }

    /// The dispatches of each stage.
    pub fn stages(&self) -> impl Iterator<Item = Range<usize>> {
        let ends = self.stages.iter().skip(1).copied().chain([self.dispatches.len()]);
        self.stages.iter().copied().zip(ends).map(|(a, b)| a..b)
    }
}

/// Records dispatches.
#[derive(Debug, Default)]
pub struct Recorder {
    /// Dispatches so far.
    pub dispatches: Vec<Dispatch>,
    /// The operation that dispatches are recorded for.
    pub op: &'static str,
    /// Its layer.
    pub layer: Option<u32>,
    /// Where the host steps in.
    pub breaks: Vec<(usize, HostRoute)>,
    /// Whether the last launch had no threadgroups and was left out.
    pub left_out: bool,
}

impl Recorder {
    fn last(&mut self) -> Option<&mut Dispatch> {
        if self.left_out { None } else { self.dispatches.last_mut() }
    }

    /// The dispatch recorded last takes this many multiply-adds: see [`Dispatch::work`].
    pub fn worth(&mut self, multiply_adds: u64) {
        if let Some(dispatch) = self.last() {
            dispatch.work = multiply_adds;
        }
    }

    /// The dispatch recorded last can be cut: see [`Dispatch::cut`].
    pub fn may_cut(&mut self, dimension: usize, at: usize) {
        if let Some(dispatch) = self.last() {
            dispatch.cut = Some(Cut { dimension, at });
        }
    }

    /// The host steps in before what is recorded next.
    pub fn by_host(&mut self, route: HostRoute) {
        self.breaks.push((self.dispatches.len(), route));
    }

    /// Records one launch of `kernel`; `traffic` as in [`Dispatch::traffic`]. A launch without threadgroups
    /// is left out.
    pub fn dispatch(
        &mut self,
        kernel: &'static str,
        groups: [u32; 3],
        threads: u32,
        bindings: Vec<Binding>,
        args: &impl KernelArgs,
        traffic: u64,
    ) {
        debug_assert!(threads.is_multiple_of(32) && threads > 0, "{kernel}: {threads} threads");
        self.left_out = groups.contains(&0);
        if self.left_out {
            return;
        }
        let args = bytemuck::bytes_of(args).to_vec();
        let (op, layer) = (self.op, self.layer);
        self.dispatches.push(Dispatch {
            kernel,
            op,
            layer,
            groups,
            threads,
            bindings,
            args,
            traffic,
            work: 0,
            cut: None,
        });
    }

    /// Cuts the dispatches into stages. `concurrent` lets dispatches without a conflict share a stage;
    /// without it each is a stage of its own.
    pub fn finish(self, concurrent: bool) -> CommandList {
        let mut stages = Vec::new();
        let mut first = 0;
        for (i, dispatch) in self.dispatches.iter().enumerate() {
            let waits = || self.dispatches[first..i].iter().any(|d| d.conflicts(dispatch));
            let stopped = || self.breaks.iter().any(|(at, _)| *at == i);
            if i == 0 || !concurrent || waits() || stopped() {
                stages.push(i);
                first = i;
            }
        }
        let (dispatches, breaks) = (self.dispatches, self.breaks);
        CommandList { dispatches, stages, breaks, ..CommandList::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel_args;

    kernel_args! {
        /// None to speak of.
        pub struct NoArgs { unused: u32 }
    }

    fn list(concurrent: bool, launches: &[(u64, u64)]) -> Vec<usize> {
        let at =
            |offset| Operand { buffer: Buffer(0), offset, bytes: 16, element: ElementType::F32 };
        let mut r = Recorder::default();
        for &(read, write) in launches {
            let bindings =
                vec![Binding::new(at(read), Access::Read), Binding::new(at(write), Access::Write)];
            r.dispatch("k", [1, 1, 1], 32, bindings, &NoArgs { unused: 0 }, 0);
        }
        r.finish(concurrent).stages
    }

    #[test]
    fn a_stage_ends_where_the_data_says_so() {
        // Reads of one range are no conflict; read after write, write after read and write after write are.
        assert_eq!(list(true, &[(0, 16), (0, 32), (0, 48)]), [0]);
        assert_eq!(list(true, &[(0, 16), (16, 32)]), [0, 1]);
        assert_eq!(list(true, &[(0, 16), (32, 0)]), [0, 1]);
        assert_eq!(list(true, &[(0, 16), (0, 16)]), [0, 1]);
        assert_eq!(list(true, &[(0, 8), (0, 16)]), [0, 1], "overlapping ranges");
        assert_eq!(list(false, &[(0, 16), (0, 32)]), [0, 1]);
    }

    #[test]
    fn parts_of_a_dispatch_are_the_dispatch() {
        kernel_args! {
            /// Where the first threadgroup's number stands second.
            pub struct CutArgs { size: u32, first: u32 }
        }
        let mut r = Recorder::default();
        let args = CutArgs { size: 7, first: 0 };
        r.dispatch("k", [3, 10, 1], 32, vec![], &args, 0);
        assert_eq!(r.dispatches[0].most_parts(), 1);
        r.may_cut(1, std::mem::offset_of!(CutArgs, first));
        // One that was left out takes nothing from the one before it.
        r.dispatch("k", [0, 1, 1], 32, vec![], &args, 0);
        r.may_cut(0, 0);
        r.worth(3);
        let whole = &r.dispatches[0];
        assert_eq!((whole.most_parts(), whole.work), (10, 0));
        assert_eq!(whole.part(0..10), *whole);
        let part = whole.part(4..6);
        assert_eq!(part.groups, [3, 2, 1]);
        assert_eq!(
            bytemuck::pod_read_unaligned::<CutArgs>(&part.args),
            CutArgs { first: 4, ..args }
        );
    }

    #[test]
    fn what_is_left_out_moves_no_other_dispatch_to_another_stage() {
        let at = |offset, element| Operand { buffer: Buffer(0), offset, bytes: 16, element };
        let (float, index) = (ElementType::F32, ElementType::U32);
        let mut r = Recorder::default();
        // Stages: a b | c | d e | f.
        for (kernel, read, write, element) in [
            ("a", 0, 16, float),
            ("b", 0, 32, float),
            ("c", 16, 48, index),
            ("d", 48, 64, float),
            ("e", 48, 80, float),
            ("f", 80, 96, float),
        ] {
            let bindings = vec![
                Binding::new(at(read, float), Access::Read),
                Binding::new(at(write, element), Access::Write),
            ];
            r.dispatch(kernel, [1, 1, 1], 32, bindings, &NoArgs { unused: 0 }, 0);
        }
        let mut list = r.finish(true);
        list.pipelines = (0..6).map(Pipeline).collect();
        assert_eq!(list.stages, [0, 2, 3, 5]);
        let of = |left_out: &[&str]| {
            let less = list.without(|d| left_out.contains(&d.kernel));
            let names: String = less.dispatches.iter().map(|d| d.kernel).collect();
            let pipelines: Vec<u32> = less.pipelines.iter().map(|p| p.0).collect();
            (names, pipelines, less.stages)
        };
        assert_eq!(list.without(|_| false), list);
        assert_eq!(of(&["a"]), ("bcdef".into(), vec![1, 2, 3, 4, 5], vec![0, 1, 2, 4]));
        // e and f stay apart though nothing but the stage says so.
        assert_eq!(of(&["d"]), ("abcef".into(), vec![0, 1, 2, 4, 5], vec![0, 2, 3, 4]));
        assert_eq!(of(&["d", "e"]), ("abcf".into(), vec![0, 1, 2, 5], vec![0, 2, 3]));
        assert_eq!(of(&["f"]).2, [0, 2, 3]);
        // What writes indices stays, whatever is asked.
        assert!(list.dispatches[2].writes_indices() && !list.dispatches[3].writes_indices());
        assert_eq!(of(&["c"]).0, "abcdef");
        assert_eq!(of(&["a", "b", "c", "d", "e", "f"]), ("c".into(), vec![2], vec![0]));
    }

    #[test]
    fn what_is_read_ahead_is_not_of_the_stage_before() {
        let at =
            |offset| Operand { buffer: Buffer(0), offset, bytes: 16, element: ElementType::F32 };
        let early = |ahead, kernel| {
            let mut r = Recorder::default();
            for (kernel, access, read, write) in [
                ("rms_norm", Access::Read, 0, 16),
                ("rms_norm", Access::Read, 16, 32),
                (kernel, ahead, 16, 48),
                (kernel, Access::Read, 32, 64),
                (kernel, ahead, 64, 80),
            ] {
                let bindings =
                    vec![Binding::new(at(read), access), Binding::new(at(write), Access::Write)];
                r.dispatch(kernel, [1, 1, 1], 32, bindings, &NoArgs { unused: 0 }, 0);
            }
            let list = r.finish(true);
            (list.stages.clone(), list.early_starts())
        };
        // The third shares the second's stage only without a conflict; the last one reads what the stage before it wrote.
        let (stages, starts) = early(Access::ReadAhead, "decode_experts_mma");
        assert_eq!(
            (&stages[..], &starts[..]),
            (&[0, 1, 3, 4][..], &[true, true, false, true, false][..])
        );
        let (_, starts) = early(Access::Read, "decode_experts_mma");
        assert_eq!(starts, [true; 5]);
        let (_, starts) = early(Access::Read, "fill_words");
        assert_eq!(starts, [true, true, false, false, false]);

        // Behind a kernel that lets the next one begin before its own inputs are there, the stage before that may still run.
        let behind = |kernel: &'static str| {
            let mut r = Recorder::default();
            for (kernel, access, read, write) in [
                ("rms_norm", Access::Read, 0, 16),
                (kernel, Access::Read, 16, 32),
                ("scan_norm_4", Access::ReadAhead, 0, 48),
                (kernel, Access::Read, 48, 64),
                ("scan_norm_4", Access::ReadAhead, 48, 80),
                ("rms_norm", Access::ReadAhead, 48, 96),
            ] {
                let bindings = vec![
                    Binding::new(at(read), access),
                    Binding::new(at(write), Access::Write),
                    Binding::new(at(112), Access::Write),
                ];
                r.dispatch(kernel, [1, 1, 1], 32, bindings, &NoArgs { unused: 0 }, 0);
            }
            r.finish(true).early_starts()
        };
        assert_eq!(behind("rms_norm"), [true; 6]);
        assert_eq!(behind("conv_prep"), [true, true, true, true, false, true]);
    }

    #[test]
    fn constants_and_other_parts_of_a_buffer_are_no_conflict() {
        let whole = Operand { buffer: Buffer(1), offset: 0, bytes: 64, element: ElementType::F32 };
        let mut r = Recorder::default();
        for layer in 0..2u64 {
            let part = Binding::within(whole, Access::Write, layer * 32..layer * 32 + 32);
            r.dispatch("k", [1, 1, 1], 32, vec![part], &NoArgs { unused: 0 }, 0);
        }
        let constant = Binding::new(whole, Access::Constant);
        r.dispatch("k", [1, 1, 1], 32, vec![constant], &NoArgs { unused: 0 }, 0);
        r.dispatch("k", [1, 0, 1], 32, vec![], &NoArgs { unused: 0 }, 0);
        let list = r.finish(true);
        assert_eq!((list.stages.len(), list.dispatches.len()), (1, 3));
        assert_eq!(list.stages().next(), Some(0..3));
    }
}
