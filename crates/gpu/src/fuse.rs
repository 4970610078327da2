//! Chains of a plan's operations that have a kernel of their own.

use lily_ops::{Op, Plan, ValueId};

use crate::tuning::Tuning;

/// Operations that are recorded together, by their index among [`Plan::nodes`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Group {
    /// One operation.
    Op(usize),
    /// Decode: a norm and the projections that read it. The norm's result is stored for readers that are
    /// no projection.
    Projections {
        /// The norm.
        norm: usize,
        /// Projections that store what they compute.
        linears: Vec<usize>,
        /// Gate and up projection with the activation of their product.
        gated: Option<[usize; 3]>,
        /// Whether something else reads the norm's result.
        keeps_norm: bool,
    },
    /// Convolution, q/k normalization and the gates of the delta rule.
    ConvPrep {
        /// The convolution.
        conv: usize,
        /// The normalization.
        norm: usize,
        /// The gates.
        gates: usize,
    },
    /// Decode: the recurrence and its gated norm.
    ScanNorm {
        /// The recurrence.
        scan: usize,
        /// The norm.
        norm: usize,
    },
    /// Decode: attention and its output gate.
    GatedAttention {
        /// Attention.
        attention: usize,
        /// The gate.
        gate: usize,
    },
    /// A projection added to the residual stream.
    ProjectAdd {
        /// The projection.
        linear: usize,
        /// The sum.
        add: usize,
    },
    /// Decode: the experts' and the shared expert's down projections, weighted and added to the residual stream.
    ExpertsOut {
        /// The experts' down projections.
        experts: usize,
        /// The shared expert's.
        shared: usize,
        /// The weighted sum.
        combine: usize,
    },
}

impl Group {
    /// What its dispatches are told as if fused kernels run it; `None`: as its operation.
    pub fn chain(&self) -> Option<&'static str> {
        Some(match self {
            Self::Op(_) => return None,
            Self::Projections { .. } => "norm + projections",
            Self::ConvPrep { .. } => "convolution + norm + gates",
            Self::ScanNorm { .. } => "delta scan + norm",
            Self::GatedAttention { .. } => "attention + gate",
            Self::ProjectAdd { .. } => "projection + residual",
            Self::ExpertsOut { .. } => "experts out + shared + residual",
        })
    }

    /// Its operations.
    pub fn nodes(&self) -> Vec<usize> {
        match self {
            Self::Op(i) => vec![*i],
            Self::Projections { norm, linears, gated, .. } => {
                let gated = gated.iter().flatten();
                [norm].into_iter().chain(linears).chain(gated).copied().collect()
            }
            Self::ConvPrep { conv, norm, gates } => vec![*conv, *norm, *gates],
            Self::ScanNorm { scan, norm } => vec![*scan, *norm],
            Self::GatedAttention { attention, gate } => vec![*attention, *gate],
            Self::ProjectAdd { linear, add } => vec![*linear, *add],
            Self::ExpertsOut { experts, shared, combine } => vec![*experts, *shared, *combine],
        }
    }
}

/// A plan's operations in groups, in an order that respects their dependencies.
pub fn groups(plan: &Plan, tuning: &Tuning, decode: bool) -> Vec<Group> {
    let finder = Finder::new(plan);
    let mut groups: Vec<(usize, Group)> = Vec::new();
    let mut taken = vec![false; finder.ops.len()];
    for i in 0..finder.ops.len() {
        let Some((at, group)) = finder.group_of(i, tuning, decode) else { continue };
        if group.nodes().iter().any(|n| taken[*n]) {
            continue;
        }
        group.nodes().iter().for_each(|n| taken[*n] = true);
        groups.push((at, group));
    }
    let alone = (0..finder.ops.len()).filter(|i| !taken[*i]).map(|i| (i, Group::Op(i)));
    let mut all: Vec<_> = groups.into_iter().chain(alone).collect();
    all.sort_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, group)| group).collect()
}

struct Finder<'a> {
    plan: &'a Plan,
    ops: Vec<&'a Op>,
    /// Operations that read each value.
    readers: Vec<Vec<usize>>,
    /// The operation that writes it.
    writer: Vec<Option<usize>>,
}

impl<'a> Finder<'a> {
    fn new(plan: &'a Plan) -> Self {
        let ops: Vec<&Op> = plan.nodes().map(|n| &n.op).collect();
        let mut readers = vec![Vec::new(); plan.values.len()];
        let mut writer = vec![None; plan.values.len()];
        for (i, op) in ops.iter().enumerate() {
            op.reads().iter().for_each(|v| readers[v.0 as usize].push(i));
            op.writes().iter().for_each(|v| writer[v.0 as usize] = Some(i));
        }
        Self { plan, ops, readers, writer }
    }

    /// The only reader of a value that nothing else keeps alive.
    fn only_reader(&self, value: ValueId) -> Option<usize> {
        match self.readers[value.0 as usize][..] {
            [one] if value != self.plan.hidden && value != self.plan.logits => Some(one),
            _ => None,
        }
    }

    fn written_by(&self, value: ValueId) -> Option<usize> {
        self.writer[value.0 as usize]
    }

    /// The group that begins at operation `i`, and where it is recorded.
    fn group_of(&self, i: usize, t: &Tuning, decode: bool) -> Option<(usize, Group)> {
        match self.ops[i] {
            Op::RmsNorm(op) if decode && t.fuse_norm => self.projections(i, op.out),
            Op::CausalConv(op) if t.fuse_conv => {
                let norm = self.only_reader(op.out)?;
                let Op::QkL2Norm(l2) = self.ops[norm] else { return None };
                let scan = self.only_reader(l2.out)?;
                let Op::DeltaScan(scan) = self.ops[scan] else { return None };
                let gates = self.written_by(scan.decay)?;
                matches!(self.ops[gates], Op::DeltaGates(_))
                    .then(|| (gates.max(norm), Group::ConvPrep { conv: i, norm, gates }))
            }
            Op::DeltaScan(op) if decode && t.fuse_scan_norm => {
                let norm = self.only_reader(op.out)?;
                matches!(self.ops[norm], Op::GatedRmsNorm(_))
                    .then_some((norm, Group::ScanNorm { scan: i, norm }))
            }
            Op::Attention(op) if decode => {
                let gate = self.only_reader(op.out)?;
                matches!(self.ops[gate], Op::AttentionGate(_))
                    .then_some((gate, Group::GatedAttention { attention: i, gate }))
            }
            Op::Linear(op) => {
                let add = self.only_reader(op.out)?;
                let Op::Add(sum) = self.ops[add] else { return None };
                (sum.b == op.out && sum.a != op.out)
                    .then_some((add, Group::ProjectAdd { linear: i, add }))
            }
            Op::ExpertsOut(op) if decode && t.fuse_experts_out => {
                let combine = self.only_reader(op.out)?;
                let Op::MoeCombine(sum) = self.ops[combine] else { return None };
                let shared = self.written_by(sum.shared)?;
                let matches = matches!(self.ops[shared], Op::Linear(_))
                    && self.only_reader(sum.shared) == Some(combine);
                matches.then_some((combine, Group::ExpertsOut { experts: i, shared, combine }))
            }
            _ => None,
        }
    }

    /// A norm with its projections. The head's is left alone: its matrix is so large that each
    /// threadgroup's own copy of the norm costs more than a stage.
    fn projections(&self, norm: usize, normed: ValueId) -> Option<(usize, Group)> {
        const MOST_ROWS: usize = 1 << 15;
        let readers = &self.readers[normed.0 as usize];
        let linear = |i: &usize| match self.ops[*i] {
            Op::Linear(op) => Some(op),
            _ => None,
        };
        let mut linears: Vec<usize> =
            readers.iter().copied().filter(|i| linear(i).is_some()).collect();
        let rows: usize =
            linears.iter().filter_map(linear).map(|op| self.plan.value(op.out).width).sum();
        if linears.is_empty() || rows > MOST_ROWS {
            return None;
        }
        let keeps_norm = readers.len() > linears.len();
        let gated = linears.iter().find_map(|&gate| {
            let act = self.only_reader(linear(&gate)?.out)?;
            let Op::SwiGlu(op) = self.ops[act] else { return None };
            let up = self.written_by(op.up)?;
            let pair = self.written_by(op.gate) == Some(gate) && linears.contains(&up);
            (pair && up != gate && self.only_reader(op.up) == Some(act)).then_some([gate, up, act])
        });
        if let Some([gate, up, _]) = gated {
            linears.retain(|i| ![gate, up].contains(i));
        }
        Some((norm, Group::Projections { norm, linears, gated, keeps_norm }))
    }
}
