//! What the device is, and what goes wrong with it.

/// A device to be.
#[derive(Clone, Debug, PartialEq)]
pub struct Caps {
    /// Its name; one that contains `Paravirtual` is a virtual machine's.
    pub name: String,
    /// The newest of Apple's GPU families that it supports, 10 for `Apple10`; 0 for none.
    pub family: u8,
    /// Whether language version 4.0 and its tensor operations compile.
    pub tensors: bool,
    /// Whether there are residency sets; then what a command buffer uses must be in one.
    pub residency_sets: bool,
    /// Bytes of the largest buffer.
    pub max_buffer: u64,
    /// Bytes that the system recommends to have in use.
    pub working_set: u64,
    /// Bytes that there are: an allocation beyond them fails.
    pub memory: u64,
    /// Seconds that a kernel thread takes on the device's clock, on which nothing else takes time.
    pub thread_seconds: f64,
    /// Seed of the order of what has no order, and of delays.
    pub seed: u32,
    /// Notes which bytes each dispatch reads and writes: a conflict that nothing orders, or an access beside the bindings, is a
    /// violation of its own name, whatever the results are. Some ten times slower.
    pub tracked: bool,
}

impl Default for Caps {
    /// As an Apple M5 Max says it is.
    fn default() -> Self {
        Self {
            name: "Apple M5 Max".into(),
            family: 10,
            tensors: true,
            residency_sets: true,
            max_buffer: 28 << 30,
            working_set: 48 << 30,
            memory: 64 << 30,
            thread_seconds: 1e-9,
            seed: 1,
            tracked: false,
        }
    }
}

impl Caps {
    /// Apple M4 Max: no tensor operations.
    pub fn without_tensors() -> Self {
        Self { name: "Apple M4 Max".into(), family: 9, tensors: false, ..Self::default() }
    }

    /// A virtual machine's device.
    pub fn paravirtual() -> Self {
        Self {
            name: "Apple Paravirtual device".into(),
            family: 5,
            tensors: false,
            residency_sets: false,
            ..Self::default()
        }
    }
}

/// What is made to go wrong. Command buffers are counted from the device's first commit on, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The system kills this command buffer while it runs, for the display's sake, and runs no other of its queue.
    Killed(u64),
    /// This command buffer finds no memory; no other of its queue runs.
    OutOfMemory(u64),
    /// From this command buffer on the system runs none of this program's, on whatever queue.
    Revoked(u64),
    /// The device is gone when this command buffer would run, and stays so.
    Removed(u64),
    /// From this command buffer on none ends.
    Silent(u64),
    /// The compiler refuses base libraries (language version below 4.0).
    Compile,
    /// The compiler refuses tensor libraries (language version 4.0 and later).
    CompileTensor,
    /// No pipeline can be made of any function.
    Pipeline,
    /// Kernels take so many registers that their threadgroups have at most 64 threads.
    FewThreads,
    /// The results of tensor operations are wrong: matrix products of libraries of version 4.0 are off by some.
    WrongTensor,
}
