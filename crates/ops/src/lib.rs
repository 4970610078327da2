//! The contract of every operation Lily computes.
//!
//! An operation is one file under [`ops`]: its arguments, the element types and shapes it accepts, a
//! plain scalar [reference](Contract::reference), a [tolerance](Contract::tolerance) and seeded test
//! [cases](Contract::cases). The one list in [`op`] is what everything else is generated from.
//!
//! A [`Plan`] strings operations together: plain, printable data that says *what* one forward pass
//! computes and nothing about *how*. Devices turn it into their own programs; [`mod@reference`] runs it
//! one scalar at a time and is what every device is compared with.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod case;
pub mod op;
pub mod ops;
pub mod plan;
pub mod quant;
pub mod reference;
pub mod sample;
pub mod tensor;

pub use case::{Case, CaseOutputs, CaseWeight, Tolerance};
pub use op::{Contract, Op};
pub use plan::{
    Activation, LayerKind, Node, Plan, Rows, StateLayout, Value, ValueId, WeightFormat, WeightId,
    WeightSpec,
};
pub use reference::{Reference, ReferenceSegment, SlotState};
pub use tensor::{ElementType, HostTensor};
