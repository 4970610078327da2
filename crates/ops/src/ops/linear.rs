use super::{expect_f32, expect_weight};
use crate::case::{Case, CaseBuilder, NO_STATE, Tolerance};
use crate::op::Contract;
use crate::plan::{Activation, GROUP, Plan, Rows, ValueId, WeightFormat, WeightId, WeightSpec};
use crate::quant::{QuantizedGroup, WeightRef, quantize_group};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// `out = x · Wᵀ`, row by row.
///
/// With [`Activation::I8G64`] and [`Activation::I16G64`] the input is quantized first, and the products
/// of a group are an exact integer: `Σ_g [ s_g · x_g · Σ q·c + b_g · x_g · Σ c ]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// `rows × cols`.
    pub x: ValueId,
    /// `[width, cols]`.
    pub weight: WeightId,
    /// How the input is taken.
    pub activation: Activation,
    /// `rows × width`.
    pub out: ValueId,
}

/// One row of activations as a linear operation takes it.
pub(crate) enum LinearInput {
    F32(Vec<f32>),
    Quantized(Vec<QuantizedGroup>),
}

impl LinearInput {
    pub(crate) fn new(x: &[f32], activation: Activation) -> Self {
        match activation {
            Activation::F32 => Self::F32(x.to_vec()),
            Activation::I8G64 | Activation::I16G64 => Self::Quantized(
                x.chunks(GROUP).filter_map(|x| quantize_group(x, activation)).collect(),
            ),
        }
    }

    /// The product with row `row` of matrix `matrix`, accumulated in f64.
    pub(crate) fn dot(&self, spec: &WeightSpec, w: &WeightRef, matrix: usize, row: usize) -> f32 {
        match self {
            Self::F32(x) => {
                let w = w.row(spec, matrix, row);
                w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32
            }
            Self::Quantized(groups) => {
                let mut sum = 0f64;
                for (g, x) in groups.iter().enumerate() {
                    let (codes, scale, bias) = w.group(spec, matrix, row, g);
                    let dot: i32 = codes
                        .iter()
                        .zip(&x.codes)
                        .map(|(&q, &c)| i32::from(q) * i32::from(c))
                        .sum();
                    sum += f64::from(scale * x.scale) * f64::from(dot);
                    sum += f64::from(bias) * f64::from(x.sum);
                }
                sum as f32
            }
        }
    }
}

/// Checks that an input of `cols` elements suits the weight's format and the activation.
pub(crate) fn check_activation(spec: &WeightSpec, activation: Activation) -> Result<(), String> {
    let quantized = matches!(spec.format, WeightFormat::Affine { .. });
    if quantized && !spec.cols.is_multiple_of(GROUP) {
        return Err(format!("{} has {} inputs, not a multiple of {GROUP}", spec.role, spec.cols));
    }
    if activation != Activation::F32 && spec.format != (WeightFormat::Affine { bits: 4 }) {
        return Err(format!("{}: quantized activations need 4-bit weights", spec.role));
    }
    Ok(())
}

impl Contract for Linear {
    const NAME: &'static str = "linear";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.x]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.weight]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let (x, out) = (plan.value(self.x), plan.value(self.out));
        expect_f32(plan, "x", self.x, x.rows, x.width)?;
        expect_f32(plan, "out", self.out, x.rows, out.width)?;
        expect_weight(plan, "weight", self.weight, [1, out.width, x.width])?;
        check_activation(plan.weight(self.weight), self.activation)
    }
    fn reference(&self, run: &mut Reference) {
        let (spec, w) = run.weight(self.weight);
        let mut out = Vec::new();
        for x in run.f32(self.x).chunks(spec.cols) {
            let x = LinearInput::new(x, self.activation);
            out.extend((0..spec.rows).map(|r| x.dot(spec, &w, 0, r)));
        }
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32_SUM
    }
    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        let q4 = WeightFormat::Affine { bits: 4 };
        let kinds = [
            ("q4-i8", q4, Activation::I8G64),
            ("q4-i16", q4, Activation::I16G64),
            ("q4-f32", q4, Activation::F32),
            ("q8-f32", WeightFormat::Affine { bits: 8 }, Activation::F32),
            ("bf16-f32", WeightFormat::Dense(ElementType::Bf16), Activation::F32),
            ("f32-f32", WeightFormat::Dense(ElementType::F32), Activation::F32),
        ];
        let shapes = [(10, 64), (1, 128), (17, 192), (33, 384), (48, 2048), (5, 2048), (129, 128)];
        for (name, format, activation) in kinds {
            for (width, cols) in shapes {
                for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 63, 64, 65, 130] {
                    // What lies between others is tried with the small matrices, and with few columns of long rows.
                    let between = [6, 7, 32, 63, 64].contains(&rows) && width * cols > 4000;
                    let large = rows * width * cols > 1_500_000;
                    let skip = if width == 5 { rows < 31 } else { large || between };
                    if skip {
                        continue;
                    }
                    let variant = format!("{name}/{rows}x{cols}->{width}");
                    let mut b = CaseBuilder::new::<Self>(&variant, &[(rows, 0)], NO_STATE);
                    let x = b.input(Rows::Tokens, cols, 1.5);
                    let weight = b.weight(format, 1, width, cols);
                    let out = b.output(Rows::Tokens, width, ElementType::F32);
                    cases.push(b.build(Self { x, weight, activation, out }));
                }
            }
        }
        cases
    }
}
