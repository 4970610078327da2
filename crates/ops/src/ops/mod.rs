//! One file an operation.

mod add;
mod attention;
mod attention_gate;
mod attention_prep;
mod causal_conv;
mod delta_gates;
mod delta_scan;
mod embed;
mod experts;
mod gated_rms_norm;
mod gather_rows;
mod linear;
mod moe_combine;
mod qk_l2_norm;
mod rms_norm;
mod router;
mod swiglu;

pub use add::Add;
pub use attention::{Attention, BLOCK_TOKENS};
pub use attention_gate::AttentionGate;
pub use attention_prep::{AttentionPrep, Rope};
pub use causal_conv::CausalConv;
pub use delta_gates::DeltaGates;
pub use delta_scan::DeltaScan;
pub use embed::Embed;
pub use experts::{ExpertsIn, ExpertsOut};
pub use gated_rms_norm::GatedRmsNorm;
pub use gather_rows::GatherRows;
pub use linear::Linear;
pub use moe_combine::MoeCombine;
pub use qk_l2_norm::QkL2Norm;
pub use rms_norm::RmsNorm;
pub use router::Router;
pub use swiglu::SwiGlu;

use crate::plan::{Plan, Rows, ValueId, WeightId};
use crate::tensor::ElementType;

/// `1 / (1 + e^−x)`.
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x · sigmoid(x)`.
pub(crate) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// Checks that a value has the given rows, width and element type.
fn expect(
    plan: &Plan,
    what: &str,
    id: ValueId,
    rows: Rows,
    width: usize,
    element: ElementType,
) -> Result<(), String> {
    let v = plan.value(id);
    if (v.rows, v.width, v.element) == (rows, width, element) {
        return Ok(());
    }
    Err(format!(
        "{what} is {:?} × {} {:?}, want {rows:?} × {width} {element:?}",
        v.rows, v.width, v.element
    ))
}

/// Checks that a value holds f32 activations of the given rows and width.
fn expect_f32(
    plan: &Plan,
    what: &str,
    id: ValueId,
    rows: Rows,
    width: usize,
) -> Result<(), String> {
    expect(plan, what, id, rows, width, ElementType::F32)
}

/// Checks the shape of a weight.
fn expect_weight(
    plan: &Plan,
    what: &str,
    id: WeightId,
    [matrices, rows, cols]: [usize; 3],
) -> Result<(), String> {
    let w = plan.weight(id);
    if (w.matrices, w.rows, w.cols) == (matrices, rows, cols) {
        return Ok(());
    }
    Err(format!(
        "{what} ({}) is {} × [{}, {}], want {matrices} × [{rows}, {cols}]",
        w.role, w.matrices, w.rows, w.cols
    ))
}
