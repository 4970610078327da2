//! Reading alone, which kernels are compared with.

use lily_ops::ElementType;

use crate::driver::Buffer;
use crate::kernel_args;
use crate::list::{Access, Binding, Operand, Recorder};

kernel_args! {
    /// Of `read_bytes`.
    pub struct ReadArgs {
        /// Where it begins in the slab, in units of 16 bytes.
        first: u32,
        /// Units of 16 bytes.
        packets: u32,
        /// How often they are read.
        passes: u32,
        /// Threads of a threadgroup.
        threads: u32,
        /// Whether each thread writes what it summed up.
        keep: u32,
    }
}

/// Bytes of a packet.
pub const PACKET: u64 = 16;

/// Which part of a slab is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The slab.
    pub buffer: Buffer,
    /// Its bytes.
    pub bytes: u64,
    /// First packet.
    pub first: u32,
    /// Packets.
    pub packets: u32,
    /// How often they are read.
    pub passes: u32,
}

/// Reads a part with this grid; each thread's sum goes to `out` if `keep`.
pub fn read(
    r: &mut Recorder,
    part: &Part,
    (groups, threads): ([u32; 3], u32),
    out: Operand,
    keep: bool,
) {
    let slab =
        Operand { buffer: part.buffer, offset: 0, bytes: part.bytes, element: ElementType::U32 };
    let bindings = vec![Binding::new(slab, Access::Constant), Binding::new(out, Access::Write)];
    let Part { first, packets, passes, .. } = *part;
    let args = ReadArgs { first, packets, passes, threads, keep: u32::from(keep) };
    let traffic = u64::from(packets) * u64::from(passes) * PACKET;
    r.dispatch("read_bytes", groups, threads, bindings, &args, traffic);
}
