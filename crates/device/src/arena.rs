//! Scratch memory: where each value of a plan lies, so that values that are never alive together share bytes.

use lily_ops::{Node, Op, Plan, Rows, ValueId};

/// Every value starts at a multiple of this many bytes.
pub const ALIGNMENT: u64 = 64;

/// Offsets of all values for a bounded number of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScratchLayout {
    offsets: Vec<u64>,
    bytes: u64,
}

impl ScratchLayout {
    /// Lays out `plan`'s values for steps of at most `rows` tokens and `outputs` rows of logits.
    ///
    /// Values are placed in the order they are written, each at the lowest offset that no value alive at
    /// the same time covers. The head may run several times on one body: what it reads of the body stays.
    ///
    /// `in_place` names the operand that a device's kernel overwrites with its result, if any; where that
    /// operand is not read again, nor twice by the same operation, the result takes its place.
    ///
    /// Sizes beyond 64 bits stay at the largest number of 64 bits: no budget allows them.
    pub fn new(
        plan: &Plan,
        rows: usize,
        outputs: usize,
        in_place: impl Fn(&Op) -> Option<ValueId>,
    ) -> Self {
        let count = plan.values.len();
        let nodes: Vec<&Node> = plan.nodes().collect();
        let last = nodes.len();
        let mut born = vec![0; count];
        let mut dies = vec![0; count];
        for (i, node) in nodes.iter().enumerate() {
            for v in node.op.writes() {
                born[v.0 as usize] = i;
                dies[v.0 as usize] = i;
            }
            for v in node.op.reads() {
                let in_head = i >= plan.body.len();
                let of_body = born[v.0 as usize] < plan.body.len();
                dies[v.0 as usize] = if in_head && of_body { last } else { i };
            }
        }
        dies[plan.logits.0 as usize] = last;

        let size = |v: usize| {
            let value = &plan.values[v];
            let rows = match value.rows {
                Rows::Tokens => rows as u64,
                Rows::Routed(k) => (rows as u64).saturating_mul(u64::from(k)),
                Rows::Outputs => outputs as u64,
            };
            let row = (value.width as u64).saturating_mul(value.element.size() as u64);
            let bytes = rows.saturating_mul(row);
            bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX)
        };
        let end = |at: u64, v: usize| at.saturating_add(size(v));
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by_key(|&v| born[v]);
        // The operand whose place a value takes.
        let mut takes = vec![None; count];
        for (i, node) in nodes.iter().enumerate() {
            if let (Some(operand), [result]) = (in_place(&node.op), &node.op.writes()[..]) {
                let once = node.op.reads().iter().filter(|v| **v == operand).count() == 1;
                let operand = operand.0 as usize;
                if once && dies[operand] == i && size(operand) == size(result.0 as usize) {
                    takes[result.0 as usize] = Some(operand);
                }
            }
        }
        let mut placed: Vec<usize> = Vec::new();
        let mut offsets = vec![0; count];
        let mut total = 0;
        for v in order {
            if let Some(operand) = takes[v] {
                offsets[v] = offsets[operand];
                placed.push(v);
                continue;
            }
            let mut busy: Vec<(u64, u64)> = placed
                .iter()
                .filter(|&&o| born[o] <= dies[v] && born[v] <= dies[o])
                .map(|&o| (offsets[o], end(offsets[o], o)))
                .collect();
            busy.sort_unstable();
            let mut at = 0;
            for (start, free) in busy {
                if end(at, v) <= start {
                    break;
                }
                at = at.max(free);
            }
            offsets[v] = at;
            total = total.max(end(at, v));
            placed.push(v);
        }
        Self { offsets, bytes: total }
    }

    /// Byte offset of a value.
    pub fn offset(&self, id: ValueId) -> u64 {
        self.offsets[id.0 as usize]
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lily_ops::ops::{Add, GatherRows};
    use lily_ops::{ElementType, LayerKind, Rows, Value, case::NO_STATE};

    fn chain(length: u32) -> Plan {
        let value = |rows| Value { name: "v", rows, width: 32, element: ElementType::F32 };
        let mut values = vec![value(Rows::Tokens); length as usize + 1];
        values.push(value(Rows::Outputs));
        let node = |op: lily_ops::Op| Node { op, layer: None, ends_layer: false };
        let body = (0..length)
            .map(|i| node(Add { a: ValueId(i), b: ValueId(0), out: ValueId(i + 1) }.into()))
            .collect();
        let gather = GatherRows { x: ValueId(length), out: ValueId(length + 1) };
        Plan {
            name: "chain".into(),
            vocab: 32,
            layers: vec![LayerKind::Attention],
            values,
            weights: vec![],
            state: NO_STATE,
            body,
            head: vec![node(gather.into())],
            hidden: ValueId(length),
            logits: ValueId(length + 1),
        }
    }

    fn none(_: &Op) -> Option<ValueId> {
        None
    }

    #[test]
    fn a_result_takes_the_place_of_an_operand_that_dies() {
        let first = |op: &Op| op.reads().first().copied();
        let layout = ScratchLayout::new(&chain(50), 10, 10, first);
        // The chain runs in one place beside the first value, which every link reads.
        assert_eq!(layout.bytes(), 2 * 32 * 4 * 10);
        assert_ne!(layout.offset(ValueId(0)), layout.offset(ValueId(1)));
        assert_eq!(layout.offset(ValueId(1)), layout.offset(ValueId(50)));
    }

    /// `x + x` reads `x` twice: a kernel that writes over one operand would read the sum as the other.
    #[test]
    fn an_operand_read_twice_by_its_operation_keeps_its_place() {
        let mut plan = chain(2);
        plan.body[1].op = Add { a: ValueId(1), b: ValueId(1), out: ValueId(2) }.into();
        let first = |op: &Op| op.reads().first().copied();
        let layout = ScratchLayout::new(&plan, 10, 10, first);
        assert_ne!(layout.offset(ValueId(1)), layout.offset(ValueId(2)));
        // Read once by the operation and never after it, it gives its place away.
        plan.body[1].op = Add { a: ValueId(1), b: ValueId(0), out: ValueId(2) }.into();
        let layout = ScratchLayout::new(&plan, 10, 10, first);
        assert_eq!(layout.offset(ValueId(1)), layout.offset(ValueId(2)));
    }

    #[test]
    fn absurd_sizes_saturate() {
        for (rows, outputs) in
            [(usize::MAX, 1), (1, usize::MAX), (usize::MAX / 130, usize::MAX / 64)]
        {
            assert!(ScratchLayout::new(&chain(5), rows, outputs, none).bytes() > u64::MAX / 4);
        }
        assert_eq!(ScratchLayout::new(&chain(5), usize::MAX, 1, none).bytes(), u64::MAX);
    }

    #[test]
    fn a_long_chain_takes_no_more_than_what_is_alive() {
        // Alive at once: the first value (read to the end), the one read and the one written; then the logits.
        let row = 32 * 4 * 10;
        assert_eq!(ScratchLayout::new(&chain(3), 10, 10, none).bytes(), 3 * row);
        assert_eq!(ScratchLayout::new(&chain(50), 10, 10, none).bytes(), 3 * row);
    }

    #[test]
    fn values_alive_together_do_not_overlap() {
        let plan = chain(20);
        let layout = ScratchLayout::new(&plan, 7, 2, none);
        for node in plan.nodes() {
            let ids: Vec<_> = node.op.reads().into_iter().chain(node.op.writes()).collect();
            for (i, a) in ids.iter().enumerate() {
                for b in &ids[i + 1..] {
                    let size = |v: &ValueId| {
                        (plan.value(*v).rows.count(7, 2) * plan.value(*v).width * 4) as u64
                    };
                    let (x, y) = (layout.offset(*a), layout.offset(*b));
                    assert!(a == b || x + size(a) <= y || y + size(b) <= x);
                }
            }
        }
    }
}
