//! What several families share: the table of a step's rows and segments, slot headers, weights.

use lily_ops::{WeightFormat, WeightSpec};

use crate::kernel_args;
use crate::list::{Access, Binding, Operand};
use crate::profile::Profile;
use crate::text::Shape;
use crate::tuning::Tuning;

kernel_args! {
    /// A segment of a step: `rows` next tokens of one slot. Written by the host in a shared buffer, one
    /// after another.
    pub struct SegmentEntry {
        /// The slot.
        slot: u32,
        /// First row of the step that belongs to it.
        first: u32,
        /// Its rows.
        rows: u32,
        /// First token of it among the rows whose logits are asked for; `outputs` of them.
        first_output: u32,
    }

    /// The device-resident header of a slot: kernels read it, the last kernel of a step writes it.
    /// Nothing of it is baked into arguments, so that a recorded list can run again.
    pub struct SlotHeader {
        /// Tokens seen before the step that reads it.
        position: u32,
        /// The token sampled last.
        last_token: u32,
        /// Tokens sampled since the answer began.
        generated: u32,
        /// Which of the two recurrent states is current: 0 or 1. A step reads it and writes the other.
        parity: u32,
    }

    /// Where a quantized or dense weight lies in its slab, in units of 16 bytes.
    pub struct Matrix {
        /// Codes, or plain elements: rows one after another.
        codes: u32,
        /// bf16 scales: `cols / 64` a row.
        scales: u32,
        /// bf16 biases, likewise.
        biases: u32,
        /// From one stacked matrix to the next: codes.
        codes_stride: u32,
        /// From one stacked matrix to the next: scales and biases.
        scales_stride: u32,
        /// Output elements.
        rows: u32,
        /// Input elements.
        cols: u32,
        /// 0: 4-bit codes, 1: 8-bit codes, 2: bf16, 3: f32.
        format: u32,
    }
}

impl Matrix {
    /// Elements of one of the stacked matrices: multiply-adds of its product with a row.
    pub fn elements(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.cols)
    }
}

/// Unit of the offsets in [`Matrix`].
pub const SLAB_UNIT: u64 = 16;

/// The `format` of a [`Matrix`].
pub fn format_code(format: WeightFormat) -> u32 {
    match format {
        WeightFormat::Affine { bits: 4 } => 0,
        WeightFormat::Affine { .. } => 1,
        WeightFormat::Dense(lily_ops::ElementType::Bf16) => 2,
        WeightFormat::Dense(_) => 3,
    }
}

/// A weight on the device. The codes of MLX's checkpoint are kept bit by bit; vectors (one row) and the
/// convolution's taps are kept as f32.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceWeight {
    /// The slab that holds it, bound as a whole.
    pub slab: Operand,
    /// Where in the slab.
    pub matrix: Matrix,
    /// Stacked matrices.
    pub matrices: u32,
    /// Its bytes as the checkpoint has them: what one full read costs.
    pub bytes: u64,
}

impl DeviceWeight {
    /// Byte ranges of a weight in its slab (codes, scales, biases, each as long as all stacked matrices need), and
    /// the matrix entry, if it begins at byte `at`. Strides are whole units.
    pub fn layout(spec: &WeightSpec, at: u64) -> ([std::ops::Range<u64>; 3], Matrix) {
        let unit = |bytes: usize| (bytes as u64).next_multiple_of(SLAB_UNIT);
        let codes = unit(spec.rows * spec.format.row_bytes(spec.cols));
        let scales = unit(spec.rows * spec.format.scale_bytes(spec.cols));
        let n = spec.matrices as u64;
        // Parts start at whole cache lines of any device.
        let line = |x: u64| x.next_multiple_of(256);
        let scales_at = line(at + n * codes);
        let biases_at = line(scales_at + n * scales);
        let matrix = Matrix {
            codes: (at / SLAB_UNIT) as u32,
            scales: (scales_at / SLAB_UNIT) as u32,
            biases: (biases_at / SLAB_UNIT) as u32,
            codes_stride: (codes / SLAB_UNIT) as u32,
            scales_stride: (scales / SLAB_UNIT) as u32,
            rows: spec.rows as u32,
            cols: spec.cols as u32,
            format: format_code(spec.format),
        };
        let parts = [
            at..at + n * codes,
            scales_at..scales_at + n * scales,
            biases_at..biases_at + n * scales,
        ];
        (parts, matrix)
    }
}

/// What every encoder is given: the device, the switches, the step and the tables that kernels reach state by.
#[derive(Clone, Debug)]
pub struct Context<'a> {
    /// The device.
    pub profile: &'a Profile,
    /// The switches.
    pub tuning: &'a Tuning,
    /// Sizes that the text was compiled for.
    pub shape: &'a Shape,
    /// Sizes of the step.
    pub step: StepShape,
    /// Tables of the step and of all slots.
    pub tables: &'a Tables,
}

/// Sizes of a step. Positions are not among them: kernels read those from the slots' headers, so that one
/// recorded list serves every step of these sizes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StepShape {
    /// Rows of each segment, in the order of their rows. All 1: a decode step.
    pub segments: Vec<u32>,
    /// Rows whose logits are asked for.
    pub outputs: u32,
    /// No slot of the step has more tokens than this after it; grids over the cache are as large as this asks for.
    pub context: u32,
}

impl StepShape {
    /// Most rows of a decode step; with more, or with a longer segment, it is a prefill step.
    pub const DECODE_ROWS: u32 = 8;

    /// Rows of the step.
    pub fn rows(&self) -> u32 {
        self.segments.iter().sum()
    }

    /// Whether the step runs the decode kernels.
    pub fn is_decode(&self) -> bool {
        self.segments.len() as u32 <= Self::DECODE_ROWS && self.segments.iter().all(|r| *r == 1)
    }
}

/// Tables in device memory. All are u32 unless said otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Tables {
    /// [`SegmentEntry`] of each segment of the step; written by the host.
    pub segments: Operand,
    /// Segment of each row of the step; written by the host.
    pub row_segments: Operand,
    /// Token of each row, [`LAST_SAMPLED`] for the one that the slot sampled last; written by the host.
    pub tokens: Operand,
    /// Row of each output row; written by the host.
    pub output_rows: Operand,
    /// [`SlotHeader`] of each slot.
    pub headers: Operand,
    /// KV pages of each slot: `[slot][max_pages]`.
    pub pages: Operand,
    /// Entries of a slot in `pages`.
    pub max_pages: u32,
    /// Recurrent states: `[slot][2][state_words]`, words of 32 bits; of the two, a slot's header tells the current one. A
    /// state is `[layer][head][dv][dk]` f32, then `[layer][taps - 1][channels]` bf16.
    pub states: Operand,
    /// Words of one state.
    pub state_words: u32,
    /// First word of the convolution's part.
    pub conv_at: u32,
    /// K and V of each attention layer: `[page][kv head][token][head_dim]` bf16.
    pub kv: Vec<[Operand; 2]>,
    /// Cosine and sine of the rotary angles, f32 `[position][2][dims / 2]`.
    pub rope: Operand,
}

/// In [`Tables::tokens`]: the token that the slot sampled last.
pub const LAST_SAMPLED: u32 = u32::MAX;

impl Tables {
    /// Binds the states for the recurrent part of `layer`; hazards are told apart by layer.
    pub fn recurrent(&self, layer: usize, layers: usize) -> Binding {
        self.state_part(layer as u64, 2 * layers as u64)
    }

    /// Binds the states for the convolution's part of `layer`.
    pub fn conv(&self, layer: usize, layers: usize) -> Binding {
        self.state_part((layers + layer) as u64, 2 * layers as u64)
    }

    /// A state's layers lie in every slot's block, not in one range: as hazards they are shares of the buffer.
    fn state_part(&self, part: u64, parts: u64) -> Binding {
        let share = self.states.bytes / parts;
        let start = self.states.offset + part * share;
        Binding::within(self.states, Access::Write, start..start + share)
    }
}
