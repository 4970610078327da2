//! Command lists in a process of their own, built with a sanitizer: one that is not there when a program starts
//! cannot be loaded into it later.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use lily_gpu::{Buffer, Dispatch, DriverError};

/// What a list is run under.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sanitizer {
    /// ThreadSanitizer: each kernel thread is a thread of its own; only the barriers of kernels and the ends of stages order
    /// what they do.
    Thread,
    /// AddressSanitizer and UndefinedBehaviorSanitizer: a kernel touches what its dispatch binds, nothing else.
    Address,
}

impl Sanitizer {
    /// By name: `thread` or `address`.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "thread" => Some(Self::Thread),
            "address" => Some(Self::Address),
            _ => None,
        }
    }
}

/// Characters of a report that are kept.
const REPORT: usize = 3000;

/// A list as the runner reads it: lines `buffer BYTES FILE`, `dispatch KERNEL …`, `stage`; files hold the buffers.
pub(crate) struct Job {
    folder: PathBuf,
    text: String,
    buffers: Vec<(Buffer, PathBuf)>,
}

impl Job {
    pub fn new(folder: &Path) -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = folder.join(format!("job-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        Ok(Self { folder, text: String::new(), buffers: Vec::new() })
    }

    /// The number of a buffer in the job; its first use writes its file.
    fn number(&mut self, buffer: Buffer, data: &[u8]) -> Result<usize, String> {
        if let Some(at) = self.buffers.iter().position(|(b, _)| *b == buffer) {
            return Ok(at);
        }
        let path = self.folder.join(format!("buffer-{}", buffer.0));
        std::fs::write(&path, data).map_err(|e| format!("{}: {e}", path.display()))?;
        let _ = writeln!(self.text, "buffer {} {}", data.len(), path.display());
        self.buffers.push((buffer, path));
        Ok(self.buffers.len() - 1)
    }

    /// Adds a dispatch; `bytes` are those of a buffer.
    pub fn dispatch<'a>(
        &mut self,
        dispatch: &Dispatch,
        order: Option<u32>,
        bytes: impl Fn(Buffer) -> &'a [u8],
    ) -> Result<(), String> {
        let mut bindings = String::new();
        for b in &dispatch.bindings {
            let number = self.number(b.buffer, bytes(b.buffer))?;
            let _ = write!(bindings, " {number} {} {}", b.offset, b.bytes);
        }
        let [x, y, z] = dispatch.groups;
        let _ = write!(
            self.text,
            "dispatch {} {x} {y} {z} {} {} {} {}{bindings} {}",
            dispatch.kernel,
            dispatch.threads,
            order.unwrap_or(0),
            u32::from(order.is_some()),
            dispatch.bindings.len(),
            dispatch.args.len()
        );
        for byte in &dispatch.args {
            let _ = write!(self.text, " {byte:x}");
        }
        self.text.push('\n');
        Ok(())
    }

    /// Ends a stage.
    pub fn stage(&mut self) {
        self.text.push_str("stage\n");
    }

    /// Runs it; the buffers afterwards.
    pub fn run(&self, runner: &Path) -> Result<Vec<(Buffer, Vec<u8>)>, DriverError> {
        let invalid = |what: &Path, e: std::io::Error| {
            DriverError::Invalid(format!("{}: {e}", what.display()))
        };
        let job = self.folder.join("job");
        std::fs::write(&job, &self.text).map_err(|e| invalid(&job, e))?;
        // TSan does not know the address layout of newer kernels: `setarch -R` fixes it.
        let mut command = Command::new("setarch");
        command.arg("-R").arg(runner).arg(&job);
        command.env("TSAN_OPTIONS", "halt_on_error=1 exitcode=66 report_signal_unsafe=0");
        command.env("ASAN_OPTIONS", "detect_leaks=0 exitcode=66 detect_stack_use_after_return=0");
        command.env("UBSAN_OPTIONS", "print_stacktrace=1");
        let output = command.output().map_err(|e| invalid(runner, e))?;
        if !output.status.success() {
            let kernels = String::from_utf8_lossy(&output.stdout);
            let report = String::from_utf8_lossy(&output.stderr);
            let report: String = report.trim().chars().take(REPORT).collect();
            return Err(DriverError::Kernel {
                kernel: kernels.lines().last().unwrap_or("before the first").to_owned(),
                reason: if report.is_empty() { output.status.to_string() } else { report },
            });
        }
        let read = |(buffer, path): &(Buffer, PathBuf)| {
            std::fs::read(path).map(|data| (*buffer, data)).map_err(|e| invalid(path, e))
        };
        self.buffers.iter().map(read).collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
