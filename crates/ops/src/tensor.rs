//! Element types, and the host tensor that references and tests work on.

use half::bf16;

/// Element type of a value, a weight or a part of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// IEEE single precision.
    F32,
    /// bfloat16: the upper half of an `F32`, rounded to nearest even.
    Bf16,
    /// Unsigned 32-bit integer (token ids, expert ids).
    U32,
}

impl ElementType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// Rounds `x` to this type and back. `U32` is not a numeric type of activations: returned unchanged.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Self::Bf16 => bf16::from_f32(x).to_f32(),
            Self::F32 | Self::U32 => x,
        }
    }
}

/// A dense row-major tensor on the host; its width is that of the [`Value`](crate::Value) it belongs to.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTensor {
    /// Activations.
    F32(Vec<f32>),
    /// Ids.
    U32(Vec<u32>),
}

impl HostTensor {
    /// The elements as `f32`.
    ///
    /// # Panics
    /// If the tensor holds ids.
    pub fn f32(&self) -> &[f32] {
        match self {
            Self::F32(v) => v,
            Self::U32(_) => panic!("tensor of ids where activations are expected"),
        }
    }

    /// The elements as ids.
    ///
    /// # Panics
    /// If the tensor holds activations.
    pub fn u32(&self) -> &[u32] {
        match self {
            Self::U32(v) => v,
            Self::F32(_) => panic!("tensor of activations where ids are expected"),
        }
    }
}
