//! The boundary to a vendor's API: buffers, pipelines, submissions.

use std::sync::Arc;

use crate::list::CommandList;
use crate::profile::Profile;
use crate::text::Text;

/// A buffer of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Buffer(pub u32);

impl Buffer {
    /// The buffer's memory, if there is one and `len` bytes from `offset` on lie in its `bytes`.
    pub fn range<M>(
        self,
        memory: Option<M>,
        bytes: impl Fn(&M) -> u64,
        offset: u64,
        len: u64,
    ) -> Result<M, DriverError> {
        let Some(memory) = memory else {
            return Err(DriverError::Invalid(format!("buffer {} does not exist", self.0)));
        };
        let bytes = bytes(&memory);
        match offset.checked_add(len) {
            Some(end) if end <= bytes => Ok(memory),
            _ => Err(DriverError::Invalid(format!(
                "bytes {offset} + {len} of buffer {}, which has {bytes}",
                self.0
            ))),
        }
    }
}

/// A compiled kernel of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pipeline(pub u32);

/// A submitted command list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Submission(pub u64);

/// Where a buffer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Device memory: weights, state, scratch. Host reads and writes take their turn among submissions.
    Device,
    /// Host-visible memory for what changes each step: inputs and results. Host reads and writes act at
    /// once; the caller keeps them apart from lists in flight. Where host memory is far from the device,
    /// the driver keeps a copy on either side and moves a list's [`inputs`](CommandList::inputs) and
    /// [`outputs`](CommandList::outputs) with it.
    Shared,
}

/// Seconds that a submission took on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// From its first to its last command; 0 where the device does not tell.
    pub seconds: f64,
}

/// Why a driver could not do it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The memory is not there.
    #[error("{what} needs {bytes} bytes of device memory; {why}")]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// Bytes asked for.
        bytes: u64,
        /// The system's reason.
        why: String,
    },
    /// The kernel text was refused.
    #[error("the kernels do not compile for {device}: {log}")]
    Compile {
        /// The device.
        device: String,
        /// The compiler's log.
        log: String,
    },
    /// A kernel failed while it ran; what it wrote is undefined.
    #[error("kernel {kernel} failed: {reason}")]
    Kernel {
        /// The kernel, or a list of those that may have been it.
        kernel: String,
        /// The system's reason.
        reason: String,
    },
    /// The device is gone.
    #[error("the device is lost: {0}")]
    Lost(String),
    /// The call breaks a rule of this interface.
    #[error("{0}")]
    Invalid(String),
}

/// A vendor's API, reduced to what a program needs.
pub trait Driver: Send {
    /// What the device is.
    fn profile(&self) -> &Profile;

    /// A new buffer, all zero.
    fn allocate(
        &mut self,
        what: &str,
        bytes: u64,
        placement: Placement,
    ) -> Result<Buffer, DriverError>;

    /// Gives a buffer back; lists in flight may still use it.
    fn release(&mut self, buffer: Buffer);

    /// Copies bytes into a buffer. See [`Placement`] for when.
    fn write(&mut self, buffer: Buffer, offset: u64, bytes: &[u8]) -> Result<(), DriverError>;

    /// Copies bytes out of a buffer. See [`Placement`] for when.
    fn read(&mut self, buffer: Buffer, offset: u64, bytes: &mut [u8]) -> Result<(), DriverError>;

    /// Compiles `kernels` of a text, each once; a text that was compiled before costs nothing.
    fn pipelines(
        &mut self,
        text: &Arc<Text>,
        kernels: &[&'static str],
    ) -> Result<Vec<Pipeline>, DriverError>;

    /// Compiles texts side by side where that takes long, so that [`pipelines`](Driver::pipelines) need not. Of one that does not compile that
    /// one tells.
    fn compile(&mut self, texts: &[Arc<Text>]) {
        let _ = texts;
    }

    /// Threads that a threadgroup of this pipeline may have.
    fn most_threads(&self, pipeline: Pipeline) -> u32 {
        let _ = pipeline;
        u32::MAX
    }

    /// Hands a list to the device without waiting. Lists run in the order they were submitted in.
    fn submit(&mut self, list: &Arc<CommandList>) -> Result<Submission, DriverError>;

    /// Waits for a submission and all before it.
    fn wait(&mut self, submission: Submission) -> Result<Timing, DriverError>;

    /// Bytes of all buffers.
    fn allocated(&self) -> u64;

    /// Bytes that buffers can take at present, besides those that are there; what other programs have taken of
    /// the device's memory counts where the vendor's API tells.
    fn available(&self) -> Result<u64, DriverError> {
        Ok(self.profile().memory.saturating_sub(self.allocated()))
    }

    /// What was settled for the texts compiled so far, in lines for people: which of several ways, and why.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// What would make room for `bytes` bytes in sum where there is too little, if the system has a way.
    fn more_room(&self, bytes: u64) -> Option<String> {
        let _ = bytes;
        None
    }
}
