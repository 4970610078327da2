//! Libraries and pipelines: a text compiled once, its kernels one by one when they are first asked for.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use lily_gpu::text::is_tile_kernel;
use lily_gpu::{DriverError, Pipeline, Text};
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{
    MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLanguageVersion, MTLLibrary,
    MTLMathFloatingPointFunctions, MTLMathMode,
};

use crate::family::Offers;

/// A kernel, ready to run.
pub(crate) struct Kernel {
    pub name: &'static str,
    pub state: Retained<ProtocolObject<dyn MTLComputePipelineState>>,
    /// Threads a threadgroup may have.
    pub threads: u32,
    text: u64,
    tensors: bool,
}

/// The libraries of a text.
struct Libraries {
    base: Retained<ProtocolObject<dyn MTLLibrary>>,
    /// With tensor operations; `None` where they are not used.
    tensors: Option<Retained<ProtocolObject<dyn MTLLibrary>>>,
}

/// All that was compiled.
pub(crate) struct Compiled {
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    name: String,
    threadgroup_memory: u32,
    offers: Offers,
    libraries: HashMap<u64, Libraries>,
    pub kernels: Vec<Kernel>,
}

/// The text of an error.
pub(crate) fn text_of(error: &NSError) -> String {
    error.localizedDescription().to_string()
}

/// By what a text is known.
pub(crate) fn key_of(text: &Text) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

impl Compiled {
    pub fn new(
        device: Retained<ProtocolObject<dyn MTLDevice>>,
        name: String,
        threadgroup_memory: u32,
        offers: Offers,
    ) -> Self {
        let (libraries, kernels) = (HashMap::new(), Vec::new());
        Self { device, name, threadgroup_memory, offers, libraries, kernels }
    }

    fn failed(&self, log: String) -> DriverError {
        DriverError::Compile { device: self.name.clone(), log }
    }

    fn compile(
        &self,
        source: &str,
        version: MTLLanguageVersion,
    ) -> Result<Retained<ProtocolObject<dyn MTLLibrary>>, DriverError> {
        let options = MTLCompileOptions::new();
        // Never left to the default, which follows what the program was linked with.
        options.setLanguageVersion(version);
        if self.offers.math_mode {
            options.setMathMode(MTLMathMode::Safe);
            options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Precise);
        } else {
            #[allow(deprecated)] // the only way before macOS 15
            options.setFastMathEnabled(false);
        }
        self.device
            .newLibraryWithSource_options_error(&NSString::from_str(source), Some(&options))
            .map_err(|e| self.failed(text_of(&e)))
    }

    /// Whether a text was compiled.
    pub fn has(&self, key: u64) -> bool {
        self.libraries.contains_key(&key)
    }

    /// Compiles a text without tensor operations.
    pub fn add(&mut self, key: u64, text: &Text) -> Result<(), DriverError> {
        let plain = text.without_tensors();
        let source = plain.as_ref().map_or(&text.source, |t| &t.source);
        let base = self.compile(source, MTLLanguageVersion::Version3_1)?;
        self.libraries.insert(key, Libraries { base, tensors: None });
        Ok(())
    }

    /// Compiles a text with tensor operations, apart.
    pub fn add_tensors(&mut self, key: u64, text: &Text) -> Result<(), DriverError> {
        let library = self.compile(&text.source, MTLLanguageVersion::Version4_0)?;
        if let Some(libraries) = self.libraries.get_mut(&key) {
            libraries.tensors = Some(library);
        }
        Ok(())
    }

    /// Gives up the tensor operations of a text.
    pub fn drop_tensors(&mut self, key: u64) {
        if let Some(libraries) = self.libraries.get_mut(&key) {
            libraries.tensors = None;
        }
    }

    /// Whether a text's matrix tiles use tensor operations; `None` before it was compiled.
    pub fn uses_tensors(&self, key: u64) -> Option<bool> {
        self.libraries.get(&key).map(|l| l.tensors.is_some())
    }

    /// The pipeline of a kernel, as its text was settled on.
    pub fn pipeline(&mut self, key: u64, name: &'static str) -> Result<Pipeline, DriverError> {
        let tensors = self.libraries.get(&key).is_some_and(|l| l.tensors.is_some());
        self.pipeline_of(key, name, tensors && is_tile_kernel(name))
    }

    /// The pipeline of a kernel with or without tensor operations.
    pub fn pipeline_of(
        &mut self,
        key: u64,
        name: &'static str,
        tensors: bool,
    ) -> Result<Pipeline, DriverError> {
        let known = |k: &Kernel| k.text == key && k.tensors == tensors && k.name == name;
        if let Some(at) = self.kernels.iter().position(known) {
            return Ok(Pipeline(at as u32));
        }
        let libraries = self.libraries.get(&key);
        let library =
            libraries.and_then(|l| if tensors { l.tensors.as_ref() } else { Some(&l.base) });
        let function = library.and_then(|l| l.newFunctionWithName(&NSString::from_str(name)));
        let function = function.ok_or_else(|| self.failed(format!("no kernel {name}")))?;
        let state = self
            .device
            .newComputePipelineStateWithFunction_error(&function)
            .map_err(|e| self.failed(format!("{name}: {}", text_of(&e))))?;
        let (width, memory) = (state.threadExecutionWidth(), state.staticThreadgroupMemoryLength());
        let threads = state.maxTotalThreadsPerThreadgroup() as u32;
        if width != 32 {
            return Err(
                self.failed(format!("{name}: simdgroups of {width} threads; 32 are needed"))
            );
        }
        if memory as u64 > u64::from(self.threadgroup_memory) {
            return Err(self.failed(format!(
                "{name}: {memory} bytes of threadgroup memory, the device has {}",
                self.threadgroup_memory
            )));
        }
        self.kernels.push(Kernel { name, state, threads, text: key, tensors });
        Ok(Pipeline(self.kernels.len() as u32 - 1))
    }
}
