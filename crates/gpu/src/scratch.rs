//! Memory between dispatches: each value and each work space is a virtual buffer while a list is recorded;
//! afterwards those that are never alive together share bytes.

use std::collections::HashMap;
use std::ops::Range;

use lily_ops::ElementType;

use crate::driver::Buffer;
use crate::list::{CommandList, Operand};

/// Virtual buffers have numbers from here on; drivers never get as far.
const VIRTUAL: u32 = 1 << 31;

/// Every virtual buffer begins at a multiple of this many bytes.
const ALIGNMENT: u64 = 256;

/// Hands out virtual buffers while a list is recorded.
#[derive(Debug, Default)]
pub struct Scratch {
    sizes: Vec<u64>,
}

impl Scratch {
    /// A new virtual buffer for `count` elements.
    pub fn take(&mut self, count: u64, element: ElementType) -> Operand {
        let bytes = count.saturating_mul(element.size() as u64);
        self.sizes.push(bytes);
        let buffer = Buffer(VIRTUAL + self.sizes.len() as u32 - 1);
        Operand { buffer, offset: 0, bytes, element }
    }

    /// Gives each virtual buffer of a recorded list its place in one arena; returns the arena's bytes.
    ///
    /// Lifetimes are counted in stages, so that sharing never makes two dispatches wait for each other
    /// that could run together. Without `reuse` nothing is shared.
    pub fn place(&self, list: &mut CommandList, arena: Buffer, reuse: bool) -> u64 {
        let mut alive: HashMap<Buffer, Range<usize>> = HashMap::new();
        for (stage, dispatches) in list.stages().enumerate() {
            let hosts = list.breaks.iter().filter(|(at, _)| dispatches.contains(at));
            let by_host = hosts.flat_map(|(_, r)| [r.ids.buffer, r.order.buffer, r.blocks.buffer]);
            let bound = list.dispatches[dispatches.clone()].iter().flat_map(|d| &d.bindings);
            for buffer in bound.map(|b| b.buffer).chain(by_host).filter(|b| b.0 >= VIRTUAL) {
                let range = alive.entry(buffer).or_insert(stage..stage);
                range.end = stage;
            }
        }
        let mut order: Vec<(Buffer, Range<usize>)> = alive.into_iter().collect();
        order.sort_by_key(|(buffer, range)| (range.start, *buffer));
        let size = |b: Buffer| self.sizes[(b.0 - VIRTUAL) as usize].next_multiple_of(ALIGNMENT);
        let mut placed: Vec<(u64, u64, Range<usize>)> = Vec::new();
        let mut offsets: HashMap<Buffer, u64> = HashMap::new();
        let mut total = 0;
        for (buffer, range) in order {
            let together = |other: &Range<usize>| {
                !reuse || (other.start <= range.end && range.start <= other.end)
            };
            let mut busy: Vec<(u64, u64)> =
                placed.iter().filter(|(_, _, r)| together(r)).map(|(a, b, _)| (*a, *b)).collect();
            busy.sort_unstable();
            let mut at = 0;
            for (start, end) in busy {
                if at + size(buffer) <= start {
                    break;
                }
                at = at.max(end);
            }
            placed.push((at, at + size(buffer), range));
            offsets.insert(buffer, at);
            total = total.max(at + size(buffer));
        }
        for dispatch in &mut list.dispatches {
            for b in &mut dispatch.bindings {
                if let Some(at) = offsets.get(&b.buffer) {
                    b.buffer = arena;
                    b.offset += at;
                    b.hazard = b.hazard.start + at..b.hazard.end + at;
                }
            }
        }
        for (_, route) in &mut list.breaks {
            for operand in [&mut route.ids, &mut route.order, &mut route.blocks] {
                if let Some(at) = offsets.get(&operand.buffer) {
                    operand.buffer = arena;
                    operand.offset += at;
                }
            }
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel_args;
    use crate::list::{Access, Binding, Recorder};

    kernel_args! {
        /// None to speak of.
        pub struct NoArgs { unused: u32 }
    }

    /// A chain a → b → c → d beside a value that is read only at the end.
    fn chain(reuse: bool) -> (CommandList, u64) {
        let mut scratch = Scratch::default();
        let v: Vec<Operand> = (0..5).map(|_| scratch.take(64, ElementType::F32)).collect();
        let mut r = Recorder::default();
        let mut step = |reads: &[usize], write: usize| {
            let mut bindings: Vec<Binding> =
                reads.iter().map(|i| Binding::new(v[*i], Access::Read)).collect();
            bindings.push(Binding::new(v[write], Access::Write));
            r.dispatch("k", [1, 1, 1], 32, bindings, &NoArgs { unused: 0 }, 0);
        };
        step(&[], 0);
        step(&[], 4);
        step(&[0], 1);
        step(&[1], 2);
        step(&[2, 4], 3);
        let mut list = r.finish(true);
        let bytes = scratch.place(&mut list, Buffer(7), reuse);
        (list, bytes)
    }

    #[test]
    fn what_is_never_alive_together_shares_bytes() {
        let (shared, bytes) = chain(true);
        let (apart, all) = chain(false);
        assert_eq!((bytes, all), (3 * 256, 5 * 256));
        assert_eq!(shared.stages, apart.stages, "sharing adds no barrier");
        assert!(shared.dispatches.iter().flat_map(|d| &d.bindings).all(|b| b.buffer == Buffer(7)));
        // The barriers that the placed list needs are those it has.
        let again = Recorder { dispatches: shared.dispatches.clone(), ..Recorder::default() };
        assert_eq!(again.finish(true).stages, shared.stages);
    }
}
