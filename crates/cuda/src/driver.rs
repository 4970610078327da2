use std::collections::HashMap;
use std::ffi::CString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::result::{self, DriverError as CudaError};
use cudarc::driver::sys;
use lily_gpu::{
    Buffer, CommandList, Dispatch, Driver, DriverError, Pipeline, Placement, Platform, Profile,
    Submission, Text, Thresholds, Timing,
};

use crate::context::{Primary, Stream};
use crate::graph::{Graph, Launch, build};
use crate::memory::{Memory, Staging};
use crate::nvrtc::{Nvrtc, NvrtcError};

/// How the driver works.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of the device.
    pub ordinal: i32,
    /// Runs a list that is submitted again as a CUDA graph; off: kernel by kernel, one after another.
    pub graphs: bool,
    /// In a graph a kernel that waits for its inputs itself starts while the one before it still runs, where device and
    /// driver can do that (compute capability 9.0, CUDA 12.3).
    pub early_starts: bool,
    /// Where machine code is kept; `None` keeps none.
    pub cache: Option<PathBuf>,
    /// Told, in one line, what the user should know.
    pub notify: fn(&str),
}

impl Default for Options {
    fn default() -> Self {
        let home = || std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache"));
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
        Self {
            ordinal: 0,
            graphs: true,
            early_starts: true,
            cache: cache.map(|c| c.join("lily").join("cubin")),
            notify: |line| eprintln!("{line}"),
        }
    }
}

/// A kernel of a module.
struct Kernel {
    module: u64,
    name: &'static str,
    function: sys::CUfunction,
}

/// A list that was submitted before.
struct Known {
    /// Keeps the address, by which it is known, from being used again.
    list: Arc<CommandList>,
    graph: Option<Graph>,
    launches: u64,
    /// What it took when it was last waited for, 0 before.
    seconds: f64,
    /// What the host took to launch its kernels one by one.
    launching: f64,
    /// There was no memory for its graph, or the driver refused it: it is not tried again.
    refused: bool,
}

/// A submission under way.
struct Flight {
    number: u64,
    /// Held, so that its address is no other's.
    list: Arc<CommandList>,
    start: sys::CUevent,
    end: sys::CUevent,
}

/// What makes machine code of texts, on any thread.
struct Compiler {
    device: String,
    capability: (i32, i32),
    cache: Option<PathBuf>,
}

impl Compiler {
    /// Machine code of a text; `kept`: as it was kept, if it was.
    fn code(&self, text: &Text, kept: bool) -> Result<Vec<u8>, DriverError> {
        let failed = |log: String| DriverError::Compile { device: self.device.clone(), log };
        let nvrtc = Nvrtc::open().map_err(|e| match e {
            NvrtcError::Missing(what) | NvrtcError::Refused(what) => failed(what),
        })?;
        let mut hasher = DefaultHasher::new();
        (&text.source, self.capability, nvrtc.version(), crate::nvrtc::OPTIONS).hash(&mut hasher);
        let file = format!("{:016x}.cubin", hasher.finish());
        let path = self.cache.as_ref().map(|folder| folder.join(file));
        let whole = |code: &Vec<u8>| code.starts_with(b"\x7fELF") && code.len() > 4096;
        let read = path.as_ref().filter(|_| kept).and_then(|p| std::fs::read(p).ok());
        if let Some(code) = read.filter(whole) {
            return Ok(code);
        }
        let (code, _) = nvrtc.compile(&text.source, self.capability).map_err(|e| match e {
            NvrtcError::Missing(what) | NvrtcError::Refused(what) => failed(what),
        })?;
        if let Some(path) = path {
            // A cache that cannot be written costs only the next start's time.
            let beside = path.with_extension(format!("{}.tmp", std::process::id()));
            let _ = path.parent().map(std::fs::create_dir_all);
            if std::fs::write(&beside, &code).is_ok() {
                let _ = std::fs::rename(&beside, &path);
            }
        }
        Ok(code)
    }
}

/// An NVIDIA GPU through the CUDA driver API.
pub struct CudaDriver {
    options: Options,
    stream: sys::CUstream,
    capability: (i32, i32),
    profile: Profile,
    buffers: HashMap<Buffer, Memory>,
    next_buffer: u32,
    staging: Staging,
    modules: HashMap<u64, sys::CUmodule>,
    kernels: Vec<Kernel>,
    known: HashMap<*const CommandList, Known>,
    flights: Vec<Flight>,
    events: Vec<sys::CUevent>,
    submissions: u64,
    notes: Vec<String>,
    lost: Option<String>,
    /// Given back last.
    context: Primary,
}

// SAFETY: handles of the CUDA driver may be used from any thread; each call makes the context current first.
unsafe impl Send for CudaDriver {}

/// Lists whose graphs are kept.
const KEPT_GRAPHS: usize = 64;

/// As 1000 major + 10 minor; 0 if the driver does not tell.
fn driver_version() -> i32 {
    let mut version = 0;
    // SAFETY: the library is loaded, and the version has room.
    let got = unsafe { sys::cuDriverGetVersion(&mut version) };
    if got == sys::CUresult::CUDA_SUCCESS { version } else { 0 }
}

fn unavailable(what: &str, e: CudaError) -> String {
    format!("{what}: {}", describe(&e))
}

fn describe(e: &CudaError) -> String {
    let text = |s: Result<&std::ffi::CStr, CudaError>| {
        s.map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
    };
    format!("{} ({})", text(e.error_string()), text(e.error_name()))
}

/// Sets a kernel's shared memory.
fn prepare(function: sys::CUfunction, name: &str, most: u32) -> Result<(), CudaError> {
    use sys::CUfunction_attribute_enum as A;
    // A core that divides its memory otherwise for the next kernel must first be empty, so that kernels could not overlap.
    let mut attributes = vec![(A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)];
    let large = lily_gpu::text::large_memory(name);
    // Policies do not choose what is more than the device has.
    if large > 0 && large <= most {
        attributes.push((A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, large as i32));
    }
    // SAFETY: the function is of a loaded module.
    attributes.into_iter().try_for_each(|(attribute, value)| unsafe {
        result::function::set_function_attribute(function, attribute, value)
    })
}

/// By what a text's module is known.
fn key_of(text: &Text) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// The module of machine code, in the current context.
fn load(code: &[u8]) -> Result<sys::CUmodule, CudaError> {
    // SAFETY: the image is a whole cubin as NVRTC wrote it, which CUDA copies.
    unsafe { result::module::load_data(code.as_ptr().cast()) }
}

impl CudaDriver {
    /// The name of device `ordinal`, or why there is none.
    pub fn device_name(ordinal: i32) -> Result<String, String> {
        Self::find(ordinal).map(|(_, name)| name)
    }

    fn find(ordinal: i32) -> Result<(sys::CUdevice, String), String> {
        // SAFETY: only loads the library, whose initialisers have no preconditions.
        if !unsafe { sys::is_culib_present() } {
            return Err("no NVIDIA driver is installed (libcuda was not found)".into());
        }
        result::init().map_err(|e| unavailable("the NVIDIA driver does not start", e))?;
        let count = result::device::get_count()
            .map_err(|e| unavailable("the NVIDIA driver lists no devices", e))?;
        if ordinal < 0 || ordinal >= count {
            return Err(format!("there is no CUDA device {ordinal}; {count} are there, from 0 on"));
        }
        let device = result::device::get(ordinal).map_err(|e| unavailable("the device", e))?;
        let name = result::device::get_name(device).map_err(|e| unavailable("the device", e))?;
        Ok((device, name))
    }

    /// Opens a device.
    pub fn open(mut options: Options) -> Result<Self, DriverError> {
        let (device, name) = Self::find(options.ordinal).map_err(DriverError::Lost)?;
        let lost = |e: CudaError| DriverError::Lost(unavailable(&name, e));
        // Given back wherever this ends.
        let context = Primary::retain(device).map_err(lost)?;
        context.enter().map_err(lost)?;
        let attribute = |a| {
            // SAFETY: the device exists.
            unsafe { result::device::get_attribute(device, a) }.map_err(lost)
        };
        use sys::CUdevice_attribute_enum as A;
        let capability = (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if capability < (8, 0) {
            return Err(DriverError::Lost(format!(
                "{name} has compute capability {}.{}; bf16 matrix units need 8.0 or later",
                capability.0, capability.1
            )));
        }
        options.early_starts &= capability >= (9, 0) && driver_version() >= 12_030;
        // SAFETY: the device exists.
        let memory = unsafe { result::device::total_mem(device) }.map_err(lost)? as u64;
        let clock = f64::from(attribute(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?) * 1e3;
        let width = f64::from(attribute(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?) / 8.0;
        let profile = Profile {
            name: name.clone(),
            platform: Platform::Cuda,
            mma: true,
            wgmma: capability == (9, 0),
            cores: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            threadgroup_memory: 48 << 10,
            large_memory: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                as u32,
            threads_per_core: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?
                as u32,
            max_buffer: memory,
            memory,
            bandwidth: 2.0 * clock * width,
            macs: Profile::known_macs(&name),
            unified: false,
            thresholds: Thresholds::of(Platform::Cuda, &name),
        };
        let stream = Stream::new().map_err(lost)?;
        let staging = Staging::new().map_err(lost)?;
        Ok(Self {
            options,
            stream: stream.keep(),
            capability,
            profile,
            buffers: HashMap::new(),
            next_buffer: 0,
            staging,
            modules: HashMap::new(),
            kernels: Vec::new(),
            known: HashMap::new(),
            flights: Vec::new(),
            events: Vec::new(),
            submissions: 0,
            notes: Vec::new(),
            lost: None,
            context,
        })
    }

    /// Makes the context current; an error if the device was lost before.
    fn enter(&self) -> Result<(), DriverError> {
        if let Some(why) = &self.lost {
            return Err(DriverError::Lost(why.clone()));
        }
        self.context.enter().map_err(|e| DriverError::Lost(unavailable(&self.profile.name, e)))
    }

    /// An error of a call that runs kernels or copies: CUDA reports a kernel's fault at any later call, and
    /// the context is of no use after it.
    fn fault(&mut self, doing: &str, e: CudaError) -> DriverError {
        let why = format!("{doing}: {}", describe(&e));
        self.lost = Some(why.clone());
        DriverError::Lost(why)
    }

    fn memory(&self, buffer: Buffer, offset: u64, len: u64) -> Result<&Memory, DriverError> {
        buffer.range(self.buffers.get(&buffer), |m| m.bytes, offset, len)
    }

    fn launch_of(&self, dispatch: &Dispatch, pipeline: Pipeline) -> Result<Launch, DriverError> {
        let kernel = self
            .kernels
            .get(pipeline.0 as usize)
            .filter(|k| k.name == dispatch.kernel)
            .ok_or_else(|| {
                DriverError::Invalid(format!("{}: not this kernel's pipeline", dispatch.kernel))
            })?;
        if dispatch.groups[1] > 65_535 || dispatch.groups[2] > 65_535 {
            return Err(DriverError::Invalid(format!(
                "{}: a grid of {:?}; beyond the first dimension CUDA allows 65535",
                dispatch.kernel, dispatch.groups
            )));
        }
        let mut buffers = Vec::new();
        for b in &dispatch.bindings {
            buffers.push(self.memory(b.buffer, b.offset, b.bytes)?.device + b.offset);
        }
        Ok(Launch {
            function: kernel.function,
            groups: dispatch.groups,
            threads: dispatch.threads,
            buffers,
            args: dispatch.args.clone(),
            shared: lily_gpu::text::large_memory(dispatch.kernel),
            early: false,
        })
    }

    fn stages(&self, list: &CommandList) -> Result<Vec<Vec<Launch>>, DriverError> {
        if list.pipelines.len() != list.dispatches.len() {
            return Err(DriverError::Invalid("a dispatch has no pipeline".into()));
        }
        let early = list.early_starts();
        list.stages()
            .map(|stage| {
                stage
                    .map(|i| {
                        let mut launch = self.launch_of(&list.dispatches[i], list.pipelines[i])?;
                        launch.early = self.options.early_starts && early[i];
                        Ok(launch)
                    })
                    .collect()
            })
            .collect()
    }

    fn compiler(&self) -> Compiler {
        Compiler {
            device: self.profile.name.clone(),
            capability: self.capability,
            cache: self.options.cache.clone(),
        }
    }

    fn event(&mut self) -> Result<sys::CUevent, CudaError> {
        match self.events.pop() {
            Some(event) => Ok(event),
            None => result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT),
        }
    }

    /// Moves the given ranges of shared buffers, to the device or back.
    fn mirror(
        &self,
        ranges: &[(Buffer, std::ops::Range<u64>)],
        down: bool,
    ) -> Result<(), CudaError> {
        for (buffer, range) in ranges {
            let Some(m) = self.buffers.get(buffer).filter(|m| !m.host.is_null()) else { continue };
            let (start, end) = (range.start.min(m.bytes), range.end.min(m.bytes));
            if start >= end {
                continue;
            }
            let len = (end - start) as usize;
            // SAFETY: both ranges lie inside the buffer; the host side is pinned and stays until the driver
            // has synchronized; the caller leaves it alone until the submission has ended.
            unsafe {
                let host = std::slice::from_raw_parts_mut(m.host.add(start as usize), len);
                match down {
                    true => result::memcpy_dtoh_async(host, m.device + start, self.stream)?,
                    false => result::memcpy_htod_async(m.device + start, host, self.stream)?,
                }
            }
        }
        Ok(())
    }

    fn run(&mut self, list: &Arc<CommandList>) -> Result<(), CudaError> {
        let key = Arc::as_ptr(list);
        let known = self.known.get_mut(&key).expect("entered by submit");
        known.launches += 1;
        if let Some(graph) = &known.graph {
            return graph.run(self.stream);
        }
        // The first time kernel by kernel: a list that runs once needs no graph.
        let again = known.launches > 1 && self.options.graphs && !known.refused;
        let again =
            again && crate::graph::pays(known.seconds, known.launching, list.dispatches.len());
        let mut stages = self.stages(list).expect("checked by submit");
        if again {
            let stream = self.stream;
            let built = build(&mut stages, |stages| Graph::started(stages, stream));
            if let Some(note) = built.note(list.dispatches.len()) {
                self.note(note);
            }
            if let Some(graph) = built.graph {
                if let Some(known) = self.known.get_mut(&key) {
                    known.graph = Some(graph);
                }
                return Ok(());
            }
            if let Some(known) = self.known.get_mut(&key) {
                known.refused = true;
            }
        }
        let begun = Instant::now();
        stages.iter().flatten().try_for_each(|launch| launch.run(self.stream))?;
        if let Some(known) = self.known.get_mut(&key) {
            known.launching = begun.elapsed().as_secs_f64();
        }
        Ok(())
    }

    /// Says once what the user should know.
    fn note(&mut self, line: String) {
        if self.notes.is_empty() {
            (self.options.notify)(&line);
        }
        if !self.notes.contains(&line) {
            self.notes.push(line);
        }
    }

    /// Forgets lists that nobody else holds any more.
    fn forget_lists(&mut self) {
        if self.known.len() < KEPT_GRAPHS {
            return;
        }
        let gone: Vec<_> = self
            .known
            .iter()
            .filter(|(_, k)| Arc::strong_count(&k.list) == 1)
            .map(|(key, _)| *key)
            .collect();
        if gone.is_empty() {
            return;
        }
        // SAFETY: the stream is ours; after it no graph runs.
        let _ = unsafe { result::stream::synchronize(self.stream) };
        for key in gone {
            if let Some(graph) = self.known.remove(&key).and_then(|k| k.graph) {
                // SAFETY: synchronized above.
                unsafe { graph.free() };
            }
        }
    }
}

impl Driver for CudaDriver {
    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn allocate(
        &mut self,
        what: &str,
        bytes: u64,
        placement: Placement,
    ) -> Result<Buffer, DriverError> {
        self.enter()?;
        let memory = Memory::new(bytes, placement == Placement::Shared).map_err(|e| {
            let free = result::mem_get_info().map(|(free, _)| free).unwrap_or(0);
            let why = format!("{} bytes are free on {}: {}", free, self.profile.name, describe(&e));
            DriverError::OutOfMemory { what: what.into(), bytes, why }
        })?;
        let buffer = Buffer(self.next_buffer);
        self.next_buffer += 1;
        self.buffers.insert(buffer, memory);
        Ok(buffer)
    }

    fn release(&mut self, buffer: Buffer) {
        if self.enter().is_err() {
            return;
        }
        if let Some(memory) = self.buffers.remove(&buffer) {
            // SAFETY: the stream is ours; after it nothing uses the buffer, and no graph that names it is kept.
            unsafe {
                let _ = result::stream::synchronize(self.stream);
                for (_, known) in self.known.drain() {
                    if let Some(graph) = known.graph {
                        graph.free();
                    }
                }
                memory.free();
            }
        }
    }

    fn write(&mut self, buffer: Buffer, offset: u64, bytes: &[u8]) -> Result<(), DriverError> {
        let memory = self.memory(buffer, offset, bytes.len() as u64)?;
        if !memory.host.is_null() {
            // SAFETY: the range lies inside the mirror; the caller keeps it apart from lists in flight.
            unsafe {
                let to = memory.host.add(offset as usize);
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            }
            return Ok(());
        }
        let to = memory.device + offset;
        self.enter()?;
        self.staging
            .upload(self.stream, to, bytes)
            .map_err(|e| self.fault("copying to the device", e))
    }

    fn read(&mut self, buffer: Buffer, offset: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        let memory = self.memory(buffer, offset, bytes.len() as u64)?;
        if !memory.host.is_null() {
            // SAFETY: the range lies inside the mirror; the caller waited for the list that filled it.
            unsafe {
                let from = memory.host.add(offset as usize);
                std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
            }
            return Ok(());
        }
        let from = memory.device + offset;
        self.enter()?;
        // SAFETY: the device range was checked; the stream is synchronized before the bytes are used.
        let copied = unsafe {
            result::memcpy_dtoh_async(bytes, from, self.stream)
                .and_then(|()| result::stream::synchronize(self.stream))
        };
        copied.map_err(|e| self.fault("copying from the device", e))
    }

    fn pipelines(
        &mut self,
        text: &Arc<Text>,
        kernels: &[&'static str],
    ) -> Result<Vec<Pipeline>, DriverError> {
        self.enter()?;
        let key = key_of(text);
        let failed =
            |device: &str, log: String| DriverError::Compile { device: device.into(), log };
        if !self.modules.contains_key(&key) {
            let compiler = self.compiler();
            let module = match load(&compiler.code(text, true)?) {
                Ok(module) => module,
                // What was kept may be damaged: compiled once more.
                Err(_) => load(&compiler.code(text, false)?)
                    .map_err(|e| failed(&self.profile.name, describe(&e)))?,
            };
            self.modules.insert(key, module);
        }
        let module = self.modules[&key];
        let mut list = Vec::new();
        for &name in kernels {
            let at = self.kernels.iter().position(|k| k.module == key && k.name == name);
            let at = match at {
                Some(at) => at,
                None => {
                    let missing = || failed(&self.profile.name, format!("no kernel {name}"));
                    let c_name = CString::new(name).map_err(|_| missing())?;
                    // SAFETY: the module is loaded and stays so until the driver is dropped.
                    let function = unsafe { result::module::get_function(module, c_name) }
                        .map_err(|_| missing())?;
                    prepare(function, name, self.profile.large_memory).map_err(|e| {
                        failed(&self.profile.name, format!("{name}: {}", describe(&e)))
                    })?;
                    self.kernels.push(Kernel { module: key, name, function });
                    self.kernels.len() - 1
                }
            };
            list.push(Pipeline(at as u32));
        }
        Ok(list)
    }

    fn compile(&mut self, texts: &[Arc<Text>]) {
        if self.enter().is_err() {
            return;
        }
        let compiler = self.compiler();
        let missing: HashMap<u64, &Arc<Text>> = texts
            .iter()
            .map(|text| (key_of(text), text))
            .filter(|(key, _)| !self.modules.contains_key(key))
            .collect();
        let missing: Vec<(u64, &Arc<Text>)> = missing.into_iter().collect();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        for some in missing.chunks(threads) {
            let codes: Vec<_> = std::thread::scope(|scope| {
                let start = |(_, text): &(u64, &'_ Arc<Text>)| {
                    let text = Arc::clone(text);
                    let compiler = &compiler;
                    std::thread::Builder::new()
                        .spawn_scoped(scope, move || compiler.code(&text, true))
                };
                let started: Vec<_> = some.iter().map(start).collect();
                started.into_iter().map(|thread| thread.ok()?.join().ok()?.ok()).collect()
            });
            for ((key, _), code) in some.iter().zip(codes) {
                if let Some(module) = code.and_then(|code| load(&code).ok()) {
                    self.modules.insert(*key, module);
                }
            }
        }
    }

    fn submit(&mut self, list: &Arc<CommandList>) -> Result<Submission, DriverError> {
        self.enter()?;
        let key = Arc::as_ptr(list);
        if !self.known.contains_key(&key) {
            self.forget_lists();
            self.stages(list)?;
            self.known.insert(
                key,
                Known {
                    list: list.clone(),
                    graph: None,
                    launches: 0,
                    seconds: 0.0,
                    launching: 0.0,
                    refused: false,
                },
            );
        }
        let ran = (|| {
            let (start, end) = (self.event()?, self.event()?);
            self.mirror(&list.inputs, false)?;
            // SAFETY: events and stream are ours.
            unsafe { result::event::record(start, self.stream)? };
            self.run(list)?;
            self.mirror(&list.outputs, true)?;
            // SAFETY: as above.
            unsafe { result::event::record(end, self.stream)? };
            Ok((start, end))
        })();
        let (start, end) = ran.map_err(|e| {
            let first = list.dispatches.first().map_or("no kernel", |d| d.kernel);
            self.fault(&format!("a list of {} kernels from {first} on", list.dispatches.len()), e)
        })?;
        self.submissions += 1;
        self.flights.push(Flight { number: self.submissions, list: list.clone(), start, end });
        Ok(Submission(self.submissions))
    }

    fn wait(&mut self, submission: Submission) -> Result<Timing, DriverError> {
        self.enter()?;
        if submission.0 == 0 || submission.0 > self.submissions {
            return Err(DriverError::Invalid(format!(
                "submission {} was never made",
                submission.0
            )));
        }
        let mut timing = Timing::default();
        let (done, rest): (Vec<_>, Vec<_>) =
            self.flights.drain(..).partition(|f| f.number <= submission.0);
        self.flights = rest;
        for flight in done {
            // SAFETY: events are ours; the end is behind the copies back to the host.
            let waited = unsafe {
                result::event::synchronize(flight.end)
                    .and_then(|()| result::event::elapsed(flight.start, flight.end))
            };
            let ms = waited.map_err(|e| self.fault("running kernels", e))?;
            timing.seconds = f64::from(ms) / 1e3;
            if let Some(known) = self.known.get_mut(&Arc::as_ptr(&flight.list)) {
                known.seconds = timing.seconds;
            }
            self.events.extend([flight.start, flight.end]);
        }
        Ok(timing)
    }

    fn allocated(&self) -> u64 {
        self.buffers.values().map(|m| m.bytes).sum()
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn available(&self) -> Result<u64, DriverError> {
        self.enter()?;
        let (free, _) = result::mem_get_info()
            .map_err(|e| DriverError::Lost(unavailable(&self.profile.name, e)))?;
        Ok(free as u64)
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        // SAFETY: everything was made by this driver in this context; the stream is synchronized first. After a
        // fault these calls fail, which is all the same.
        unsafe {
            let _ = self.context.enter();
            let _ = result::stream::synchronize(self.stream);
            for (_, known) in self.known.drain() {
                if let Some(graph) = known.graph {
                    graph.free();
                }
            }
            for (_, memory) in self.buffers.drain() {
                memory.free();
            }
            self.staging.free();
            let flights = self.flights.drain(..).flat_map(|f| [f.start, f.end]);
            for event in flights.collect::<Vec<_>>().into_iter().chain(self.events.drain(..)) {
                let _ = result::event::destroy(event);
            }
            for (_, module) in self.modules.drain() {
                let _ = result::module::unload(module);
            }
            let _ = result::stream::destroy(self.stream);
        }
    }
}
