use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::Arc;

use lily_gpu::{
    Buffer, CommandList, Dispatch, Driver, DriverError, Pipeline, Placement, Profile, Submission,
    Text, Timing,
};

use crate::compile::{Compiler, Library, Signature};
use crate::fault::{Fault, only};
use crate::sanitize::{Job, Sanitizer};
use crate::trace::{Counting, Trace};

/// How kernels are run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Runs the dispatches of a stage, threadgroups and simdgroups in an order drawn from this seed; `None`
    /// runs them in order.
    pub seed: Option<u32>,
    /// The device that policies see.
    pub profile: Profile,
    /// The compiler.
    pub compiler: Compiler,
    /// Runs each list in a process of its own, built with a sanitizer.
    pub sanitizer: Option<Sanitizer>,
    /// A mistake made on purpose.
    pub fault: Option<Fault>,
    /// Counts what kernels touch, while it is on: with [`Compiler::tracing`], without a sanitizer.
    pub trace: Option<Trace>,
}

impl Default for Options {
    /// In order of seed 1, as `softgpu`. Any test becomes one of a mistake, or one under a sanitizer, by the environment:
    /// `SOFTGPU_FAULT` (see [`Fault::parse`]) and `SOFTGPU_SANITIZER` (`thread` or `address`).
    fn default() -> Self {
        let named = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let sanitizer = named("SOFTGPU_SANITIZER").map(|name| {
            Sanitizer::named(&name).expect("SOFTGPU_SANITIZER is `thread` or `address`")
        });
        let fault = named("SOFTGPU_FAULT")
            .map(|fault| Fault::parse(&fault).expect("SOFTGPU_FAULT is FILE:LINE or stage:N"));
        let profile = Profile::named("softgpu").expect("a known profile");
        Self {
            seed: Some(1),
            profile,
            compiler: Compiler::default(),
            sanitizer,
            fault,
            trace: None,
        }
    }
}

/// What ran so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Launches of each kernel.
    pub launches: HashMap<&'static str, u64>,
    /// Stages.
    pub stages: u64,
    /// Submissions.
    pub submissions: u64,
    /// Kernel threads.
    pub threads: u64,
}

/// 16-byte units, so that any element type is aligned.
type Memory = Vec<u128>;

struct Kernel {
    library: Arc<Library>,
    name: CString,
    signature: Signature,
}

/// Runs command lists on the calling thread, when they are submitted.
pub struct SoftDriver {
    options: Options,
    buffers: HashMap<Buffer, (u64, Memory)>,
    /// What each buffer is for.
    names: HashMap<Buffer, String>,
    next_buffer: u32,
    libraries: HashMap<u64, (Arc<Text>, Arc<Library>)>,
    kernels: Vec<Kernel>,
    submissions: u64,
    order: u64,
    stats: Stats,
}

impl SoftDriver {
    /// A driver without buffers.
    pub fn new(options: Options) -> Self {
        let order = u64::from(options.seed.unwrap_or(0)) << 1 | 1;
        Self {
            options,
            buffers: HashMap::new(),
            names: HashMap::new(),
            next_buffer: 0,
            libraries: HashMap::new(),
            kernels: Vec::new(),
            submissions: 0,
            order,
            stats: Stats::default(),
        }
    }

    /// What ran so far.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    fn range(&self, buffer: Buffer, offset: u64, len: u64) -> Result<&(u64, Memory), DriverError> {
        buffer.range(self.buffers.get(&buffer), |entry| entry.0, offset, len)
    }

    fn random(&mut self) -> u32 {
        // xorshift64*
        self.order ^= self.order >> 12;
        self.order ^= self.order << 25;
        self.order ^= self.order >> 27;
        (self.order.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as u32
    }

    /// The kernel of a dispatch that fits it in all that the host can tell.
    fn checked(&self, dispatch: &Dispatch, pipeline: Pipeline) -> Result<&Kernel, DriverError> {
        let invalid = |why: String| DriverError::Invalid(format!("{}: {why}", dispatch.kernel));
        let kernel = self
            .kernels
            .get(pipeline.0 as usize)
            .filter(|k| k.name.as_bytes() == dispatch.kernel.as_bytes())
            .ok_or_else(|| invalid(format!("pipeline {} is another kernel's", pipeline.0)))?;
        let Signature { slots, args_bytes, .. } = kernel.signature;
        if dispatch.bindings.len() + 1 != slots as usize {
            return Err(invalid(format!(
                "{} buffers, it takes {}",
                dispatch.bindings.len(),
                slots - 1
            )));
        }
        if dispatch.args.len() != args_bytes as usize {
            return Err(invalid(format!(
                "{} bytes of arguments, it takes {args_bytes}",
                dispatch.args.len()
            )));
        }
        for binding in &dispatch.bindings {
            self.range(binding.buffer, binding.offset, binding.bytes)?;
            if !binding.offset.is_multiple_of(16) {
                return Err(invalid(format!("offset {} is no multiple of 16", binding.offset)));
            }
        }
        Ok(kernel)
    }

    fn run(
        &mut self,
        dispatch: &Dispatch,
        pipeline: Pipeline,
        counting: &mut Option<Counting>,
    ) -> Result<(), DriverError> {
        let kernel = self.checked(dispatch, pipeline)?;
        let mut pointers: Vec<*mut c_void> = Vec::new();
        for binding in &dispatch.bindings {
            let (_, memory) = self.range(binding.buffer, binding.offset, binding.bytes)?;
            let base = memory.as_ptr().cast::<u8>().cast_mut();
            pointers.push(base.wrapping_add(binding.offset as usize).cast());
        }
        let mut args = vec![0u128; dispatch.args.len().div_ceil(16)];
        bytes_mut(&mut args)[..dispatch.args.len()].copy_from_slice(&dispatch.args);
        pointers.push(args.as_mut_ptr().cast());
        let (library, name) = (kernel.library.clone(), kernel.name.clone());
        let order = self.options.seed.is_some().then(|| self.random());
        let mut launch = || {
            // SAFETY: as many pointers as the kernel takes, to buffers of this driver, which nothing else
            // touches meanwhile, and to argument bytes of the kernel's size. Kernels stay inside their bindings:
            // that is what the address-sanitizer build and the tests are for.
            unsafe {
                library.launch(&name, dispatch.groups, dispatch.threads, &mut pointers, order)
            }
        };
        let result = match counting {
            Some(counting) => counting.launch(&library, dispatch, launch),
            None => launch(),
        };
        result.map_err(|reason| DriverError::Kernel { kernel: dispatch.kernel.into(), reason })?;
        *self.stats.launches.entry(dispatch.kernel).or_default() += 1;
        Ok(())
    }
}

impl SoftDriver {
    /// The dispatches of a stage in the order in which they run.
    fn shuffled(&mut self, stage: std::ops::Range<usize>) -> Vec<usize> {
        let mut order: Vec<usize> = stage.collect();
        if self.options.seed.is_some() {
            for i in (1..order.len()).rev() {
                let other = self.random() as usize % (i + 1);
                order.swap(i, other);
            }
        }
        order
    }

    /// The stages of a list, less the one that a fault takes away.
    fn stages(&self, list: &CommandList) -> Vec<std::ops::Range<usize>> {
        let stages = list.stages().collect();
        self.options.fault.as_ref().map_or_else(|| list.stages().collect(), |f| f.stages(stages))
    }

    /// A count of what a list touches, while the trace is on.
    fn counting(&self) -> Option<Counting> {
        let trace = self.options.trace.as_ref()?;
        let place = |(buffer, (bytes, memory)): (&Buffer, &(u64, Memory))| {
            (*buffer, (self.names[buffer].clone(), memory.as_ptr() as usize, *bytes))
        };
        trace.begin(&self.buffers.iter().map(place).collect())
    }

    fn run_here(&mut self, list: &CommandList) -> Result<(), DriverError> {
        let mut counting = self.counting();
        for stage in self.stages(list) {
            for i in self.shuffled(stage) {
                self.run(&list.dispatches[i], list.pipelines[i], &mut counting)?;
            }
            if let Some((_, library)) = self.libraries.values().next() {
                library.barrier();
            }
            self.stats.stages += 1;
        }
        if let (Some(counting), Some(trace)) = (counting, &self.options.trace) {
            trace.end(counting);
        }
        Ok(())
    }

    /// Runs a list under a sanitizer; what it wrote comes back only if nothing was found.
    fn run_apart(&mut self, list: &CommandList, sanitizer: Sanitizer) -> Result<(), DriverError> {
        let mut job = Job::new(self.options.compiler.folder()).map_err(DriverError::Invalid)?;
        let mut library: Option<Arc<Library>> = None;
        for stage in self.stages(list) {
            for i in self.shuffled(stage) {
                let dispatch = &list.dispatches[i];
                let kernel = self.checked(dispatch, list.pipelines[i])?.library.clone();
                if Arc::ptr_eq(library.get_or_insert_with(|| kernel.clone()), &kernel) {
                    let order = self.options.seed.is_some().then(|| self.random());
                    let bytes = |b: Buffer| {
                        let (size, memory) = &self.buffers[&b];
                        &bytes(memory)[..*size as usize]
                    };
                    job.dispatch(dispatch, order, bytes).map_err(DriverError::Invalid)?;
                } else {
                    let why = "a list under a sanitizer takes kernels of one text";
                    return Err(DriverError::Invalid(why.into()));
                }
                *self.stats.launches.entry(dispatch.kernel).or_default() += 1;
            }
            job.stage();
            self.stats.stages += 1;
        }
        let Some(library) = library else { return Ok(()) };
        let text = self.libraries.values().find(|(_, l)| Arc::ptr_eq(l, &library));
        let Some((text, _)) = text else { return Ok(()) };
        let kernels: Vec<&str> = list.dispatches.iter().map(|d| d.kernel).collect();
        let source = only(&kernels) + &text.source;
        let runner = self.options.compiler.runner(&source, sanitizer).map_err(|e| {
            DriverError::Compile { device: self.options.profile.name.clone(), log: e.0 }
        })?;
        for (buffer, data) in job.run(&runner)? {
            self.write(buffer, 0, &data)?;
        }
        Ok(())
    }
}

fn bytes_mut(memory: &mut [u128]) -> &mut [u8] {
    let len = size_of_val(memory);
    // SAFETY: any bytes are a u128 and the other way round; u8 has no alignment.
    unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), len) }
}

fn bytes(memory: &[u128]) -> &[u8] {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), size_of_val(memory)) }
}

impl Driver for SoftDriver {
    fn profile(&self) -> &Profile {
        &self.options.profile
    }

    fn allocate(
        &mut self,
        what: &str,
        size: u64,
        _placement: Placement,
    ) -> Result<Buffer, DriverError> {
        let too_large =
            |why: String| DriverError::OutOfMemory { what: what.into(), bytes: size, why };
        if size > self.options.profile.max_buffer {
            let most = self.options.profile.max_buffer;
            return Err(too_large(format!("a buffer has at most {most}")));
        }
        let mut memory = Memory::new();
        let units = size.div_ceil(16) as usize;
        memory.try_reserve_exact(units).map_err(|e| too_large(e.to_string()))?;
        memory.resize(units, 0);
        let buffer = Buffer(self.next_buffer);
        self.next_buffer += 1;
        self.buffers.insert(buffer, (size, memory));
        self.names.insert(buffer, what.to_owned());
        Ok(buffer)
    }

    fn release(&mut self, buffer: Buffer) {
        self.buffers.remove(&buffer);
        self.names.remove(&buffer);
    }

    fn write(&mut self, buffer: Buffer, offset: u64, data: &[u8]) -> Result<(), DriverError> {
        self.range(buffer, offset, data.len() as u64)?;
        if let Some((_, memory)) = self.buffers.get_mut(&buffer) {
            bytes_mut(memory)[offset as usize..][..data.len()].copy_from_slice(data);
        }
        Ok(())
    }

    fn read(&mut self, buffer: Buffer, offset: u64, data: &mut [u8]) -> Result<(), DriverError> {
        let (_, memory) = self.range(buffer, offset, data.len() as u64)?;
        data.copy_from_slice(&bytes(memory)[offset as usize..][..data.len()]);
        Ok(())
    }

    fn pipelines(
        &mut self,
        text: &Arc<Text>,
        kernels: &[&'static str],
    ) -> Result<Vec<Pipeline>, DriverError> {
        use std::hash::{DefaultHasher, Hash, Hasher};
        // A text with a fault is compiled for these kernels alone.
        let faulty = self.options.fault.as_ref().and_then(|f| f.text(text, kernels));
        let text = &faulty.map_or_else(|| text.clone(), Arc::new);
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        let key = hasher.finish();
        let device = self.options.profile.name.clone();
        if !self.libraries.contains_key(&key) {
            let library = self
                .options
                .compiler
                .library(&text.source)
                .map_err(|e| DriverError::Compile { device: device.clone(), log: e.0 })?;
            self.libraries.insert(key, (text.clone(), Arc::new(library)));
        }
        let library = self.libraries[&key].1.clone();
        kernels
            .iter()
            .map(|kernel| {
                let missing = || DriverError::Compile {
                    device: device.clone(),
                    log: format!("the text has no kernel {kernel}"),
                };
                let name = CString::new(*kernel).map_err(|_| missing())?;
                let same = |k: &Kernel| k.name == name && Arc::ptr_eq(&k.library, &library);
                let at = match self.kernels.iter().position(same) {
                    Some(at) => at,
                    None => {
                        let signature = library.signature(&name).ok_or_else(missing)?;
                        self.kernels.push(Kernel { library: library.clone(), name, signature });
                        self.kernels.len() - 1
                    }
                };
                Ok(Pipeline(at as u32))
            })
            .collect()
    }

    fn submit(&mut self, list: &Arc<CommandList>) -> Result<Submission, DriverError> {
        if list.pipelines.len() != list.dispatches.len() {
            return Err(DriverError::Invalid("a dispatch has no pipeline".into()));
        }
        // A library counts all that ran on this thread, for other drivers too.
        let threads = |driver: &Self| -> u64 {
            driver.libraries.values().map(|(_, library)| library.stats()[0]).sum()
        };
        let before = threads(self);
        match self.options.sanitizer {
            Some(sanitizer) => self.run_apart(list, sanitizer)?,
            None => self.run_here(list)?,
        }
        self.stats.threads += threads(self) - before;
        self.submissions += 1;
        self.stats.submissions = self.submissions;
        Ok(Submission(self.submissions))
    }

    fn wait(&mut self, submission: Submission) -> Result<Timing, DriverError> {
        match submission.0 <= self.submissions {
            true => Ok(Timing::default()),
            false => {
                Err(DriverError::Invalid(format!("submission {} was never made", submission.0)))
            }
        }
    }

    fn allocated(&self) -> u64 {
        self.buffers.values().map(|(size, _)| size).sum()
    }
}
