//! Test cases of operations: one operation, its inputs, its weights and the state before it.

use crate::op::{Contract, Op};
use crate::plan::{
    GROUP, LayerKind, Node, Plan, Rows, StateLayout, Value, ValueId, WeightFormat, WeightId,
    WeightSpec,
};
use crate::quant::{WeightRef, quantize_affine};
use crate::reference::{Reference, ReferenceSegment, SlotState};
use crate::tensor::{ElementType, HostTensor};
use half::bf16;

/// Largest error allowed: `|got − want| ≤ absolute + relative · max|want|`, over each tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Absolute part.
    pub absolute: f32,
    /// Part relative to the tensor's largest magnitude.
    pub relative: f32,
}

impl Tolerance {
    /// The result must be equal.
    pub const EXACT: Self = Self { absolute: 0.0, relative: 0.0 };
    /// A few roundings of f32.
    pub const F32: Self = Self { absolute: 1e-7, relative: 2e-6 };
    /// Sums of some thousand products in f32.
    pub const F32_SUM: Self = Self { absolute: 1e-6, relative: 2e-5 };
}

/// Owned bytes of a case's weight.
#[derive(Clone, Debug, Default)]
pub struct CaseWeight {
    /// Codes or plain elements.
    pub codes: Vec<u8>,
    /// bf16 scales.
    pub scales: Vec<u8>,
    /// bf16 biases.
    pub biases: Vec<u8>,
    /// Bytes between stacked matrices in each part.
    pub strides: [usize; 3],
}

impl CaseWeight {
    /// Borrows the bytes.
    pub fn as_ref(&self) -> WeightRef<'_> {
        WeightRef {
            codes: &self.codes,
            scales: &self.scales,
            biases: &self.biases,
            strides: self.strides,
        }
    }
}

/// One operation with everything it reads.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name, unique among all cases.
    pub name: String,
    /// A plan whose body (or head) is the one operation.
    pub plan: Plan,
    /// Its weights.
    pub weights: Vec<CaseWeight>,
    /// The values it reads.
    pub inputs: Vec<(ValueId, HostTensor)>,
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Segments of the step.
    pub segments: Vec<ReferenceSegment>,
    /// Rows whose logits are asked for.
    pub output_rows: Vec<usize>,
    /// State of each slot before the operation.
    pub slots: Vec<SlotState>,
}

/// What a case leaves behind.
#[derive(Clone, Debug, PartialEq)]
pub struct CaseOutputs {
    /// Values written.
    pub values: Vec<(ValueId, HostTensor)>,
    /// State of each slot after the operation (positions unchanged).
    pub slots: Vec<SlotState>,
}

impl Case {
    /// The operation under test.
    pub fn op(&self) -> &Op {
        &self.plan.nodes().next().expect("a case holds one operation").op
    }

    /// Runs the scalar reference.
    pub fn reference(&self) -> CaseOutputs {
        let weights: Vec<WeightRef> = self.weights.iter().map(CaseWeight::as_ref).collect();
        let mut slots = self.slots.clone();
        let mut run = Reference::new(
            &self.plan,
            &weights,
            &self.segments,
            &self.tokens,
            &self.output_rows,
            &mut slots,
        );
        for (id, tensor) in &self.inputs {
            run.set(*id, tensor.clone());
        }
        self.op().reference(&mut run);
        let values = self.op().writes().into_iter().map(|id| (id, run.get(id).clone())).collect();
        CaseOutputs { values, slots }
    }

    /// Compares a device's outputs with the reference's; the error names the first element that differs.
    pub fn compare(&self, got: &CaseOutputs, want: &CaseOutputs) -> Result<(), String> {
        let tolerance = self.op().tolerance();
        for ((id, g), (_, w)) in got.values.iter().zip(&want.values) {
            let value = self.plan.value(*id).name;
            match (g, w) {
                (HostTensor::U32(g), HostTensor::U32(w)) if g == w => {}
                (HostTensor::U32(g), HostTensor::U32(w)) => {
                    let at = g.iter().zip(w).position(|(g, w)| g != w);
                    let pair = at.map(|i| (g[i], w[i]));
                    return Err(format!(
                        "{}: {value}: id {at:?} is {pair:?} (got, want)",
                        self.name
                    ));
                }
                _ => tolerance
                    .compare(g.f32(), w.f32())
                    .map_err(|e| format!("{}: {value}: {e}", self.name))?,
            }
        }
        for (s, (g, w)) in got.slots.iter().zip(&want.slots).enumerate() {
            for (part, g, w, element) in [
                ("recurrent state", &g.recurrent, &w.recurrent, ElementType::F32),
                ("convolution state", &g.conv, &w.conv, self.plan.state.cache_element),
                ("K", &g.k, &w.k, self.plan.state.cache_element),
                ("V", &g.v, &w.v, self.plan.state.cache_element),
            ] {
                match element {
                    ElementType::Bf16 => tolerance.compare_bf16(g, w),
                    _ => tolerance.compare(g, w),
                }
                .map_err(|e| format!("{}: slot {s}: {part}: {e}", self.name))?;
            }
        }
        if got.values.len() != want.values.len() || got.slots.len() != want.slots.len() {
            return Err(format!("{}: outputs are missing", self.name));
        }
        Ok(())
    }
}

impl Tolerance {
    /// Checks `got` against `want`, element by element. NaN equals NaN only.
    pub fn compare(&self, got: &[f32], want: &[f32]) -> Result<(), String> {
        self.compare_stepped(got, want, |_| 0.0).map(|_| ())
    }

    /// As [`compare`](Self::compare), for elements stored in bf16 after the computation: where it ends near
    /// the middle of two bf16 numbers, one rounding may fall to the other side. That is rare: 2 % of the
    /// elements, or one. A store that rounds otherwise than to nearest moves many.
    pub fn compare_bf16(&self, got: &[f32], want: &[f32]) -> Result<(), String> {
        // 7 bits after the leading one: a step is 2^-7 of the power of two at or below.
        let step = |w: f32| f32::from_bits(w.to_bits() & 0x7F80_0000) / 128.0;
        let moved = self.compare_stepped(got, want, step)?;
        let most = (want.len() / 50).max(1);
        match moved.len() <= most {
            true => Ok(()),
            false => Err(format!(
                "{} of {} elements are rounded to another bf16, at most {most} may; the first is {}",
                moved.len(),
                want.len(),
                moved[0]
            )),
        }
    }

    /// Allows each element `step` of what is wanted more; the elements that made use of it.
    fn compare_stepped(
        &self,
        got: &[f32],
        want: &[f32],
        step: impl Fn(f32) -> f32,
    ) -> Result<Vec<usize>, String> {
        if got.len() != want.len() {
            return Err(format!("{} elements, want {}", got.len(), want.len()));
        }
        let largest = want.iter().filter(|x| x.is_finite()).fold(0f32, |m, x| m.max(x.abs()));
        let bound = self.absolute + self.relative * largest;
        let mut stepped = Vec::new();
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            if g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= bound {
                continue;
            }
            let more = bound + step(*w);
            if (g - w).abs() > more || !g.is_finite() || !w.is_finite() {
                return Err(format!("element {i} is {g}, want {w} ± {more:e}"));
            }
            stepped.push(i);
        }
        Ok(stepped)
    }
}

/// Deterministic numbers for cases (xorshift64*).
#[derive(Clone, Debug)]
pub struct Seeded(u64);

impl Seeded {
    /// A generator for the case `name`.
    pub fn new(name: &str) -> Self {
        let hash = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ b as u64).wrapping_mul(0x100_0000_01b3));
        Self(hash | 1)
    }

    /// The next 32 random bits.
    pub fn bits(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    /// Uniform in −1…1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// `n` numbers of spread `scale`, with a few much larger ones as activations have.
    pub fn activations(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n)
            .map(|_| {
                let x = self.unit() * scale;
                if self.bits().is_multiple_of(97) { x * 8.0 } else { x }
            })
            .collect()
    }
}

/// Builds a [`Case`] around one operation.
pub struct CaseBuilder {
    case: Case,
    rng: Seeded,
}

/// A state layout without any state, for operations that use none.
pub const NO_STATE: StateLayout = StateLayout {
    kv_layers: 0,
    kv_heads: 1,
    head_dim: 64,
    recurrent_layers: 0,
    heads: 1,
    dv: 16,
    dk: 16,
    conv_channels: 48,
    conv_taps: 4,
    cache_element: ElementType::F32,
};

impl CaseBuilder {
    /// A case named `op/variant` with segments of `rows` rows, one slot each, at the given start positions.
    pub fn new<C: Contract>(
        variant: &str,
        segments: &[(usize, usize)],
        state: StateLayout,
    ) -> Self {
        let name = format!("{}/{variant}", C::NAME);
        let mut rng = Seeded::new(&name);
        let mut first = 0;
        let mut list = Vec::new();
        let mut slots = Vec::new();
        for (slot, &(rows, start)) in segments.iter().enumerate() {
            list.push(ReferenceSegment { slot, first, rows });
            slots.push(SlotState::random(&state, start, &mut rng));
            first += rows;
        }
        let case = Case {
            name,
            plan: Plan {
                name: "case".into(),
                vocab: 1,
                layers: vec![LayerKind::Attention],
                values: Vec::new(),
                weights: Vec::new(),
                state,
                body: Vec::new(),
                head: Vec::new(),
                hidden: ValueId(0),
                logits: ValueId(0),
            },
            weights: Vec::new(),
            inputs: Vec::new(),
            tokens: vec![0; first],
            segments: list,
            output_rows: Vec::new(),
            slots,
        };
        Self { case, rng }
    }

    /// Rows of the case's step.
    pub fn rows(&self) -> usize {
        self.case.tokens.len()
    }

    /// The generator.
    pub fn rng(&mut self) -> &mut Seeded {
        &mut self.rng
    }

    /// Declares a value the operation writes.
    pub fn output(&mut self, rows: Rows, width: usize, element: ElementType) -> ValueId {
        let id = ValueId(self.case.plan.values.len() as u32);
        self.case.plan.values.push(Value { name: "output", rows, width, element });
        id
    }

    /// Declares a value the operation reads, filled with random activations of spread `scale`.
    pub fn input(&mut self, rows: Rows, width: usize, scale: f32) -> ValueId {
        let n = rows.count(self.rows(), self.case.output_rows.len()) * width;
        let data = self.rng.activations(n, scale);
        self.input_with(rows, width, HostTensor::F32(data))
    }

    /// Declares a value the operation reads, with its elements.
    pub fn input_with(&mut self, rows: Rows, width: usize, data: HostTensor) -> ValueId {
        let element = match data {
            HostTensor::F32(_) => ElementType::F32,
            HostTensor::U32(_) => ElementType::U32,
        };
        let id = self.output(rows, width, element);
        self.case.plan.values[id.0 as usize].name = "input";
        self.case.inputs.push((id, data));
        id
    }

    /// Tokens of the step's rows.
    pub fn tokens(&mut self, below: u32) {
        for t in &mut self.case.tokens {
            *t = self.rng.bits() % below;
        }
    }

    /// The rows whose logits are asked for.
    pub fn output_rows(&mut self, rows: Vec<usize>) {
        self.case.output_rows = rows;
    }

    /// A weight of `matrices` random `[rows, cols]` matrices.
    pub fn weight(
        &mut self,
        format: WeightFormat,
        matrices: usize,
        rows: usize,
        cols: usize,
    ) -> WeightId {
        let scale = (cols as f32).sqrt().recip() * 1.7;
        let values: Vec<f32> =
            (0..matrices * rows * cols).map(|_| self.rng.unit() * scale).collect();
        self.weight_with(format, matrices, rows, cols, &values)
    }

    /// A weight with the given elements, stored in `format`.
    pub fn weight_with(
        &mut self,
        format: WeightFormat,
        matrices: usize,
        rows: usize,
        cols: usize,
        values: &[f32],
    ) -> WeightId {
        let id = WeightId(self.case.plan.weights.len() as u32);
        self.case.plan.weights.push(WeightSpec {
            role: "weight".into(),
            class: "weight",
            format,
            matrices,
            rows,
            cols,
        });
        let mut w = CaseWeight::default();
        match format {
            WeightFormat::Affine { bits } => {
                for group in values.chunks(GROUP) {
                    let (codes, scale, bias) = quantize_affine(group, bits);
                    match bits {
                        4 => w.codes.extend(codes.chunks(2).map(|c| c[0] | c[1] << 4)),
                        _ => w.codes.extend(codes),
                    }
                    w.scales.extend(bf16::from_f32(scale).to_le_bytes());
                    w.biases.extend(bf16::from_f32(bias).to_le_bytes());
                }
            }
            WeightFormat::Dense(ElementType::Bf16) => {
                w.codes.extend(values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()));
            }
            WeightFormat::Dense(_) => w.codes.extend(values.iter().flat_map(|x| x.to_le_bytes())),
        }
        w.strides = [&w.codes, &w.scales, &w.biases].map(|p| p.len() / matrices);
        self.case.weights.push(w);
        id
    }

    /// The finished case of `op`.
    ///
    /// # Panics
    /// If the operation's own check refuses the case.
    pub fn build(mut self, op: impl Into<Op>) -> Case {
        let op = op.into();
        if let Err(e) = op.check(&self.case.plan) {
            panic!("{}: {e}", self.case.name);
        }
        let in_head = matches!(op, Op::GatherRows(_))
            || op.writes().iter().any(|&v| self.case.plan.value(v).rows == Rows::Outputs);
        let node = Node { op, layer: None, ends_layer: false };
        match in_head {
            true => self.case.plan.head.push(node),
            false => self.case.plan.body.push(node),
        }
        self.case
    }
}

/// Segments used by most operations: one row, several rows, several segments.
pub const SEGMENTS: &[(&str, &[(usize, usize)])] = &[
    ("1", &[(1, 0)]),
    ("2", &[(2, 0)]),
    ("7", &[(7, 3)]),
    ("8", &[(8, 0)]),
    ("9", &[(9, 2)]),
    ("31", &[(31, 0)]),
    ("32", &[(32, 5)]),
    ("33", &[(33, 0)]),
    ("65+1+2", &[(65, 0), (1, 9), (2, 1)]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_elements_may_fall_to_the_other_side_but_rarely() {
        let mut rng = Seeded::new("bf16");
        let exact = rng.activations(1000, 1.0);
        let want: Vec<f32> = exact.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
        let t = Tolerance::F32;
        assert_eq!(t.compare_bf16(&want, &want), Ok(()));
        let step = |x: f32| f32::from_bits(x.to_bits() + 0x1_0000);
        let mut few = want.clone();
        few[..20].iter_mut().for_each(|x| *x = step(*x));
        assert_eq!(t.compare_bf16(&few, &want), Ok(()));
        few[20] = step(few[20]);
        assert!(t.compare_bf16(&few, &want).unwrap_err().contains("21 of 1000"));
        // One element of a few may.
        assert_eq!(t.compare_bf16(&[step(2.0), 1.0], &[2.0, 1.0]), Ok(()));
        assert!(t.compare_bf16(&[step(2.0), step(1.0)], &[2.0, 1.0]).is_err());
        assert!(t.compare_bf16(&[step(step(2.0)), 1.0], &[2.0, 1.0]).is_err());
        assert!(t.compare_bf16(&[f32::NAN, 1.0], &[2.0, 1.0]).is_err());
        assert!(t.compare_bf16(&[f32::INFINITY], &[f32::MAX]).is_err());
        // Truncation is seen.
        let cut: Vec<f32> =
            exact.iter().map(|x| f32::from_bits(x.to_bits() & 0xFFFF_0000)).collect();
        assert!(t.compare_bf16(&cut, &want).is_err());
    }

    #[test]
    fn tolerances_are_of_the_largest_element() {
        let t = Tolerance { absolute: 0.0, relative: 0.1 };
        assert_eq!(t.compare(&[10.0, 0.9], &[10.0, 0.0]), Ok(()));
        assert!(t.compare(&[10.0, 1.1], &[10.0, 0.0]).is_err());
        assert!(t.compare(&[f32::NAN], &[0.0]).is_err());
        assert_eq!(t.compare(&[f32::NAN, f32::INFINITY], &[f32::NAN, f32::INFINITY]), Ok(()));
        assert!(t.compare(&[0.0], &[0.0, 0.0]).is_err());
    }
}
