//! The list of operations. Everything that must cover each of them is generated from it.

use crate::case::{Case, Tolerance};
use crate::ops;
use crate::plan::{Plan, ValueId, WeightId};
use crate::reference::Reference;

/// What an operation promises, and how that is checked.
pub trait Contract {
    /// Name, unique among the operations.
    const NAME: &'static str;
    /// Values read.
    fn reads(&self) -> Vec<ValueId>;
    /// Values written; each value of a plan is written once.
    fn writes(&self) -> Vec<ValueId>;
    /// Weights read.
    fn weights(&self) -> Vec<WeightId> {
        Vec::new()
    }
    /// Checks shapes and element types against the plan.
    fn check(&self, plan: &Plan) -> Result<(), String>;
    /// Computes the operation one scalar at a time.
    fn reference(&self, run: &mut Reference);
    /// Largest error a device may show against the reference.
    fn tolerance(&self) -> Tolerance;
    /// Seeded test cases.
    fn cases() -> Vec<Case>;
    /// Weight bytes read for a step of one token.
    fn weight_bytes_per_token(&self, plan: &Plan) -> Vec<(WeightId, u64)> {
        self.weights().into_iter().map(|w| (w, plan.weight(w).bytes())).collect()
    }
}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// One operation with its arguments.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Op { $($(#[$doc])* $name(ops::$name)),+ }

        impl Op {
            /// Names of all operations.
            pub const NAMES: &'static [&'static str] = &[$(<ops::$name as Contract>::NAME),+];

            /// Its name.
            pub fn name(&self) -> &'static str {
                match self { $(Self::$name(_) => <ops::$name as Contract>::NAME),+ }
            }
            /// Values read.
            pub fn reads(&self) -> Vec<ValueId> {
                match self { $(Self::$name(op) => op.reads()),+ }
            }
            /// Values written.
            pub fn writes(&self) -> Vec<ValueId> {
                match self { $(Self::$name(op) => op.writes()),+ }
            }
            /// Weights read.
            pub fn weights(&self) -> Vec<WeightId> {
                match self { $(Self::$name(op) => op.weights()),+ }
            }
            /// Checks shapes and element types against the plan.
            pub fn check(&self, plan: &Plan) -> Result<(), String> {
                match self { $(Self::$name(op) => op.check(plan)),+ }
            }
            /// Computes it with the scalar reference.
            pub fn reference(&self, run: &mut Reference) {
                match self { $(Self::$name(op) => op.reference(run)),+ }
            }
            /// Largest error a device may show.
            pub fn tolerance(&self) -> Tolerance {
                match self { $(Self::$name(op) => op.tolerance()),+ }
            }
            /// Weight bytes read for a step of one token.
            pub fn weight_bytes_per_token(&self, plan: &Plan) -> Vec<(WeightId, u64)> {
                match self { $(Self::$name(op) => op.weight_bytes_per_token(plan)),+ }
            }
            /// The test cases of all operations.
            pub fn all_cases() -> Vec<Case> {
                let mut cases = Vec::new();
                $(cases.extend(<ops::$name as Contract>::cases());)+
                cases
            }
        }

        $(impl From<ops::$name> for Op {
            fn from(op: ops::$name) -> Self { Self::$name(op) }
        })+
    };
}

operations! {
    /// Rows of the embedding table.
    Embed,
    /// RMS normalization with a weight.
    RmsNorm,
    /// Matrix product with a weight.
    Linear,
    /// Causal depthwise convolution and silu.
    CausalConv,
    /// L2 normalization of the recurrent layer's q and k.
    QkL2Norm,
    /// Decay and learning rate of the delta rule.
    DeltaGates,
    /// The gated delta rule, token by token.
    DeltaScan,
    /// RMS normalization followed by a silu gate.
    GatedRmsNorm,
    /// q and k normalization, rotary embedding, K and V written to their pages.
    AttentionPrep,
    /// Causal attention over the pages of a slot.
    Attention,
    /// The sigmoid gate on attention's output.
    AttentionGate,
    /// Expert selection.
    Router,
    /// Gate and up projections of the selected experts, with their activation.
    ExpertsIn,
    /// Down projection of the selected experts.
    ExpertsOut,
    /// `silu(gate) · up`.
    SwiGlu,
    /// Weighted sum of the experts, the shared expert and the residual.
    MoeCombine,
    /// Sum of two values.
    Add,
    /// The rows whose logits are asked for.
    GatherRows,
}
