//! Kernel texts to shared libraries, through the host's C++ compiler, with a cache on disk.

use std::collections::hash_map::DefaultHasher;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::sanitize::Sanitizer;

const EMULATOR: &str = include_str!("../emu/emu.cpp");
const HEADER: &str = include_str!("../emu/emu.h");
const RUNNER: &str = include_str!("../emu/runner.cpp");
const TRACK: &str = include_str!("../emu/track.cpp");

/// What a text with tensor operations needs behind `platform_cpu.h`, and C++20.
pub const TENSORS: &str = include_str!("../emu/mpp_cpu.h");
const TRACE: &str = include_str!("../emu/trace.cpp");

/// Why a kernel text has no library.
#[derive(Debug)]
pub struct CompileError(pub String);

/// A C++ compiler and where its results are kept.
#[derive(Clone, Debug)]
pub struct Compiler {
    program: String,
    flags: Vec<String>,
    folder: PathBuf,
    /// Whether kernels tell what they touch.
    traced: bool,
}

impl Default for Compiler {
    /// `$CXX`, else `c++`; results under the system's folder for temporary files.
    fn default() -> Self {
        let flags = ["-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-w", "-fPIC"];
        Self {
            program: std::env::var("CXX").unwrap_or_else(|_| "c++".into()),
            flags: flags.map(String::from).to_vec(),
            folder: std::env::temp_dir().join("lily-softgpu"),
            traced: false,
        }
    }
}

impl Compiler {
    /// With more flags, which win over those before them.
    pub fn with_flags(mut self, flags: &[&str]) -> Self {
        self.flags.extend(flags.iter().map(|flag| (*flag).to_string()));
        self
    }

    /// `$CLANGXX`, else `clang++-22`, whose coverage hooks tell what kernels touch. Loops stay as they are written, so that an
    /// access of the text is an access of the trace.
    pub fn tracing() -> Self {
        let flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-fPIC"];
        Self {
            program: std::env::var("CLANGXX").unwrap_or_else(|_| "clang++-22".into()),
            flags: flags.map(String::from).to_vec(),
            traced: true,
            ..Self::default()
        }
    }

    /// The shared library of a kernel text.
    pub fn library(&self, source: &str) -> Result<Library, CompileError> {
        let mut hasher = DefaultHasher::new();
        (source, EMULATOR, HEADER, &self.program, &self.flags).hash(&mut hasher);
        if self.traced {
            TRACE.hash(&mut hasher);
        }
        let target = self.folder.join(format!("{:016x}.so", hasher.finish()));
        if !target.is_file() {
            self.build_with(&target, |folder| self.compile(source, folder))?;
        }
        Library::open(&target)
    }

    /// The shared library of a kernel text that notes what each dispatch reads and writes (see [`Library::tracked`]).
    pub fn tracking_library(&self, source: &str) -> Result<Library, CompileError> {
        let mut hasher = DefaultHasher::new();
        (source, EMULATOR, HEADER, TRACK, &self.program, &self.flags).hash(&mut hasher);
        let target = self.folder.join(format!("{:016x}.track.so", hasher.finish()));
        if !target.is_file() {
            self.build_with(&target, |folder| self.compile_tracking(source, folder))?;
        }
        Library::open(&target)
    }

    fn compile_tracking(&self, source: &str, folder: &Path) -> Result<PathBuf, CompileError> {
        write_sources(source, folder)?;
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        let kernels = ["-fsanitize=thread", "-c", "kernels.cpp"];
        self.run(folder, &[&flags[..], &kernels].concat())?;
        let rest = ["-shared", "-o", "kernels.so", "emu.cpp", "track.cpp", "kernels.o"];
        self.run(folder, &[&flags[..], &rest].concat())?;
        Ok(folder.join("kernels.so"))
    }

    /// Where results are kept.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The program that runs a command list of a kernel text under a sanitizer.
    pub(crate) fn runner(
        &self,
        source: &str,
        sanitizer: Sanitizer,
    ) -> Result<PathBuf, CompileError> {
        let mut hasher = DefaultHasher::new();
        (source, EMULATOR, HEADER, RUNNER, &self.program, sanitizer).hash(&mut hasher);
        self.flags.hash(&mut hasher);
        let target = self.folder.join(format!("{:016x}", hasher.finish()));
        if !target.is_file() {
            self.build_with(&target, |folder| self.compile_runner(source, sanitizer, folder))?;
        }
        Ok(target)
    }

    fn compile_runner(
        &self,
        source: &str,
        sanitizer: Sanitizer,
        folder: &Path,
    ) -> Result<PathBuf, CompileError> {
        write_sources(source, folder)?;
        let standard = self.flags.iter().rfind(|flag| flag.starts_with("-std="));
        let standard = standard.map_or("-std=c++17", String::as_str);
        let common = [standard, "-O1", "-g1", "-w", "-ffp-contract=off", "-march=native"];
        // TSan must not see the emulator's own work: it switches stacks and passes values between threads.
        let (define, flags, emulator): (_, &[&str], &[&str]) = match sanitizer {
            Sanitizer::Thread => ("-DEMU_TSAN", &["-fsanitize=thread"], &[]),
            Sanitizer::Address => {
                let both = &["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"];
                ("-DEMU_ASAN", both, both)
            }
        };
        self.run(folder, &[&common[..], &[define], emulator, &["-c", "emu.cpp"]].concat())?;
        let sources = [define, "-o", "runner", "kernels.cpp", "runner.cpp", "emu.o"];
        self.run(folder, &[&common[..], flags, &sources[..]].concat())?;
        Ok(folder.join("runner"))
    }

    /// Builds beside the target and renames, so that tests in parallel never see half a file.
    fn build_with(
        &self,
        target: &Path,
        compile: impl FnOnce(&Path) -> Result<PathBuf, CompileError>,
    ) -> Result<(), CompileError> {
        let io = |what: &Path, e: std::io::Error| CompileError(format!("{}: {e}", what.display()));
        let own = format!("{}-{:?}", std::process::id(), std::thread::current().id());
        let own: String = own.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let folder = self.folder.join(format!("build-{own}"));
        std::fs::create_dir_all(&folder).map_err(|e| io(&folder, e))?;
        let result = compile(&folder)
            .and_then(|built| std::fs::rename(&built, target).map_err(|e| io(target, e)));
        let _ = std::fs::remove_dir_all(&folder);
        result
    }

    fn compile(&self, source: &str, folder: &Path) -> Result<PathBuf, CompileError> {
        write_sources(source, folder)?;
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        if self.traced {
            let flags = [&flags[..], &["-DEMU_TRACE"]].concat();
            self.run(folder, &[&flags[..], &["-c", "emu.cpp", "trace.cpp"]].concat())?;
            let hooks = [
                "-fno-vectorize",
                "-fno-slp-vectorize",
                "-fsanitize-coverage=func,trace-loads,trace-stores",
            ];
            self.run(folder, &[&flags[..], &hooks, &["-c", "kernels.cpp"]].concat())?;
            let link = ["-shared", "-o", "kernels.so", "emu.o", "trace.o", "kernels.o"];
            self.run(folder, &link)?;
            return Ok(folder.join("kernels.so"));
        }
        let rest = ["-shared", "-o", "kernels.so", "emu.cpp", "kernels.cpp"];
        self.run(folder, &[&flags[..], &rest].concat())?;
        Ok(folder.join("kernels.so"))
    }

    /// Runs the compiler in a folder.
    fn run(&self, folder: &Path, arguments: &[&str]) -> Result<(), CompileError> {
        let mut command = Command::new(&self.program);
        let output = command.args(arguments).current_dir(folder).output().map_err(|e| {
            CompileError(format!(
                "the C++ compiler `{}` does not run ({e}); install one or name it in CXX",
                self.program
            ))
        })?;
        match output.status.success() {
            true => Ok(()),
            false => Err(CompileError(String::from_utf8_lossy(&output.stderr).into_owned())),
        }
    }
}

fn write_sources(source: &str, folder: &Path) -> Result<(), CompileError> {
    let files = [
        ("emu.h", HEADER),
        ("emu.cpp", EMULATOR),
        ("runner.cpp", RUNNER),
        ("track.cpp", TRACK),
        ("trace.cpp", TRACE),
        ("kernels.cpp", source),
    ];
    for (name, text) in files {
        let path = folder.join(name);
        std::fs::write(&path, text)
            .map_err(|e| CompileError(format!("{}: {e}", path.display())))?;
    }
    Ok(())
}

/// What a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Buffers and the argument struct.
    pub slots: u32,
    /// Bytes of the argument struct.
    pub args_bytes: u32,
    /// Threads of a threadgroup at most.
    pub max_threads: u32,
}

type KernelFn = unsafe extern "C" fn(*const c_char, *mut u32, *mut u32, *mut u32) -> c_int;
type LaunchFn = unsafe extern "C" fn(
    *const c_char,
    *const u32,
    u32,
    *mut *mut c_void,
    u32,
    c_int,
) -> *const c_char;
type BarrierFn = unsafe extern "C" fn();
type StatsFn = unsafe extern "C" fn(*mut u64);
type BeginFn = unsafe extern "C" fn(*const TrackedRange, u32, u32, u32, u32, u32);
type EndFn = unsafe extern "C" fn(*mut Access);

/// The last writer and the last two readers of two bytes of a buffer: numbers of dispatches, 0 for none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Cell {
    /// The last writer.
    pub writer: u32,
    /// The last readers.
    pub readers: [u32; 2],
}

/// A buffer as a tracking library sees it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TrackedRange {
    /// Its first byte.
    pub start: usize,
    /// 256 bytes behind its last one: what is there is still taken for it.
    pub end: usize,
    /// The first byte that the dispatch may touch.
    pub bound_from: usize,
    /// Whether the dispatch may touch it at all.
    pub bound: u32,
    /// Its number, for reports.
    pub buffer: u32,
    /// A cell for every two bytes.
    pub cells: *mut Cell,
}

/// The first access of a dispatch that breaks a rule.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Access {
    /// 0: none does. 1: nothing orders it and another dispatch's. 2: it is beside what is bound.
    pub kind: u32,
    /// The buffer's number.
    pub buffer: u32,
    /// The other dispatch.
    pub other: u32,
    /// Whether it writes.
    pub write: u32,
    /// Where in the buffer.
    pub offset: u64,
}

/// Where a dispatch stands among the others: they are numbered from 1 in the order in which they run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Place {
    /// Its number.
    pub number: u32,
    /// Dispatches below this number are before it by a fence.
    pub fence: u32,
    /// The first of its encoder.
    pub encoder: u32,
    /// The first behind the encoder's last barrier.
    pub interval: u32,
}

/// The part of a library that notes accesses.
#[derive(Clone, Copy)]
struct Tracker {
    begin: BeginFn,
    end: EndFn,
}

type TraceFn = unsafe extern "C" fn(*mut Region, u64);

/// What was loaded from or stored to a region.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes: of each access of a simdgroup those that are distinct.
    pub bytes: u64,
    /// Accesses of simdgroups.
    pub accesses: u64,
    /// Lines of 128 bytes that each access touched, summed.
    pub lines: u64,
    /// Lines that as many bytes need at least.
    pub ideal_lines: u64,
}

/// Bytes of a buffer that a trace counts together, as the trace build knows them.
#[repr(C)]
pub(crate) struct Region {
    pub base: usize,
    pub bytes: u64,
    /// Where its buffer begins.
    pub buffer: usize,
    /// A bit a byte: loaded, stored.
    pub touched: [*mut u64; 2],
    pub counts: [Counts; 2],
}

/// A loaded library: the emulator and one kernel text. It stays loaded, as fibers hold its code.
pub struct Library {
    kernel: KernelFn,
    launch: LaunchFn,
    barrier: BarrierFn,
    stats: StatsFn,
    tracker: Option<Tracker>,
    trace: Option<TraceFn>,
}

impl Library {
    fn open(path: &Path) -> Result<Self, CompileError> {
        let error = |what: &str| CompileError(format!("{}: {what}", path.display()));
        let name =
            CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| error("odd path"))?;
        // SAFETY: the name is a terminated string; the library's initialisers only register kernels.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: dlerror gives a terminated string after a failed dlopen.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(error(&why.to_string_lossy()));
        }
        let symbol = |name: &CStr| {
            // SAFETY: the handle is open and the name is terminated.
            let at = unsafe { libc::dlsym(handle, name.as_ptr()) };
            if at.is_null() { Err(error("a symbol of the emulator is missing")) } else { Ok(at) }
        };
        let tracker = match (symbol(c"lily_track_begin"), symbol(c"lily_track_end")) {
            // SAFETY: track.cpp, which this crate compiled, defines the two functions with these types.
            (Ok(begin), Ok(end)) => Some(unsafe {
                Tracker {
                    begin: std::mem::transmute::<*mut c_void, BeginFn>(begin),
                    end: std::mem::transmute::<*mut c_void, EndFn>(end),
                }
            }),
            _ => None,
        };
        // SAFETY: emu.cpp and trace.cpp, which this crate compiled, define the functions with these types.
        unsafe {
            Ok(Self {
                kernel: std::mem::transmute::<*mut c_void, KernelFn>(symbol(c"lily_emu_kernel")?),
                launch: std::mem::transmute::<*mut c_void, LaunchFn>(symbol(c"lily_emu_launch")?),
                barrier: std::mem::transmute::<*mut c_void, BarrierFn>(symbol(
                    c"lily_emu_barrier",
                )?),
                stats: std::mem::transmute::<*mut c_void, StatsFn>(symbol(c"lily_emu_stats")?),
                tracker,
                trace: symbol(c"lily_emu_trace")
                    .ok()
                    .map(|at| std::mem::transmute::<*mut c_void, TraceFn>(at)),
            })
        }
    }

    /// What a kernel takes; `None` if there is none of that name.
    pub fn signature(&self, kernel: &CStr) -> Option<Signature> {
        let (mut slots, mut args_bytes, mut max_threads) = (0, 0, 0);
        // SAFETY: the name is terminated, the three numbers are ours.
        let found = unsafe {
            (self.kernel)(kernel.as_ptr(), &mut slots, &mut args_bytes, &mut max_threads)
        };
        (found != 0).then_some(Signature { slots, args_bytes, max_threads })
    }

    /// Runs one dispatch; an error says what went wrong.
    ///
    /// # Safety
    /// `slots` holds what the kernel's signature names: pointers to as many bytes as the kernel touches.
    pub unsafe fn launch(
        &self,
        kernel: &CStr,
        groups: [u32; 3],
        threads: u32,
        slots: &mut [*mut c_void],
        order: Option<u32>,
    ) -> Result<(), String> {
        let (seed, shuffle) = (order.unwrap_or(0), c_int::from(order.is_some()));
        // SAFETY: the caller vouches for the slots; name and groups outlive the call.
        let error = unsafe {
            (self.launch)(
                kernel.as_ptr(),
                groups.as_ptr(),
                threads,
                slots.as_mut_ptr(),
                seed,
                shuffle,
            )
        };
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: a terminated string that stays until this thread's next launch.
        Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned())
    }

    /// Runs `launch`, one dispatch of this library; the first access that breaks a rule, if the library notes them.
    ///
    /// # Safety
    /// `ranges` are all buffers, by address, with as many cells as they have pairs of bytes; nothing else uses the cells
    /// meanwhile.
    pub unsafe fn tracked<R>(
        &self,
        ranges: &[TrackedRange],
        place: Place,
        launch: impl FnOnce() -> R,
    ) -> (R, Option<Access>) {
        let Some(tracker) = &self.tracker else { return (launch(), None) };
        let Place { number, fence, encoder, interval } = place;
        let count = ranges.len() as u32;
        // SAFETY: the caller vouches for the ranges, which outlive the call of `end`.
        unsafe { (tracker.begin)(ranges.as_ptr(), count, number, fence, encoder, interval) };
        let result = launch();
        let mut access = Access::default();
        // SAFETY: it writes one access.
        unsafe { (tracker.end)(&mut access) };
        (result, (access.kind != 0).then_some(access))
    }

    /// From here on this thread's launches count in `regions`, which are in the order of their bases; a library without a trace
    /// counts nothing.
    ///
    /// # Safety
    /// The regions and their bits stay where they are until the next call.
    pub(crate) unsafe fn trace(&self, regions: &mut [Region]) {
        if let Some(trace) = self.trace {
            // SAFETY: the caller vouches for the regions.
            unsafe { trace(regions.as_mut_ptr(), regions.len() as u64) };
        }
    }

    /// Ends a stage.
    pub fn barrier(&self) {
        // SAFETY: no arguments, no preconditions.
        unsafe { (self.barrier)() }
    }

    /// Threads, switches, barriers and simd operations of this thread so far.
    pub(crate) fn stats(&self) -> [u64; 4] {
        let mut four = [0; 4];
        // SAFETY: the function writes four numbers.
        unsafe { (self.stats)(four.as_mut_ptr()) };
        four
    }
}
