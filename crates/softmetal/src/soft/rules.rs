//! Rules by name.

use std::fmt;

/// A rule of Metal, or of its documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Buffer indices are 0 to 30.
    BufferIndex,
    /// An offset lies inside its buffer and is aligned for what the kernel loads there.
    BufferOffset,
    /// A buffer has at least one byte and no more than the device allows.
    BufferLength,
    /// A buffer around existing memory begins and ends at a page.
    PageAlignment,
    /// `setBytes` takes 1 to 4,096 bytes.
    BytesLength,
    /// A dispatch has a buffer or bytes at each of its kernel's indices, as many bytes as it reads.
    Binding,
    /// A dispatch has a pipeline.
    NoPipeline,
    /// Threadgroup memory: 32 KiB at most, lengths in 16 bytes.
    ThreadgroupMemory,
    /// A threadgroup has 1 to as many threads as its pipeline allows.
    ThreadgroupSize,
    /// A grid has at least one threadgroup in each direction.
    GridSize,
    /// One encoder at a time; nothing is encoded after `endEncoding`; each encoder is ended.
    EncoderOrder,
    /// A command buffer is committed once, after its encoders have ended; handlers are added before.
    CommitOrder,
    /// An encoder does not wait for a fence that it has updated.
    FenceOrder,
    /// What a command buffer uses is in a residency set of its queue, committed before the command buffer.
    Residency,
    /// A queue has at most 32 residency sets; a device without them is not asked for one.
    ResidencySets,
    /// What a command buffer without retained references uses is released after it has completed.
    Released,
    /// A buffer is taken out of a residency set, and the set committed, before it is released: the set keeps its memory.
    StillResident,
    /// The language version is set; a text's features are of that version.
    LanguageVersion,
    /// Kernels need exact arithmetic: fast math is off.
    FastMath,
    /// A kernel's parameters are at the indices 0, 1, ….
    KernelIndices,
    /// Blit ranges lie inside their buffers, do not overlap, and count whole words.
    BlitRange,
    /// Barriers of scope `buffers` in an encoder.
    BarrierScope,
    /// Two dispatches that nothing orders touch the same bytes, one of them writing.
    Unordered,
    /// A dispatch touches memory of the device beside what is bound to it.
    OutOfBounds,
    /// A kernel does what no kernel may: a barrier that not all threads reach, too much threadgroup memory.
    Kernel,
    /// A queue has no more than its number of command buffers under way.
    QueueDepth,
    /// A command buffer was held for a next one that did not come.
    Held,
}

/// A rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// What broke it.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Metal's rule {:?} is broken: {}", self.rule, self.what)
    }
}
