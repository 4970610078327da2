//! Libraries, functions, pipelines.

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lily_softgpu::{Library, Signature};
use objc2::runtime::NSObject;
use objc2::{DefinedClass, define_class};
use objc2_foundation::NSString;
use objc2_metal::{MTLCompileOptions, MTLLanguageVersion};

use super::raw;
use crate::soft::caps::Fault;
use crate::soft::foundation::compile_options;
use crate::soft::rules::Rule;
use crate::soft::state::{Alive, Kind, State};
use crate::soft::text::{has_tensors, host_text, misplaced};

/// A compiled text.
pub(crate) struct Compiled {
    library: Arc<Library>,
    tensors: bool,
    alive: Alive,
}

/// A kernel of a compiled text.
pub(crate) struct Function {
    library: Arc<Library>,
    tensors: bool,
    name: CString,
    signature: Signature,
    alive: Alive,
}

/// A kernel ready to run; alive until the last command that knows of it is done.
pub(crate) struct KernelOf {
    pub library: Arc<Library>,
    /// Whether its text is one of tensor operations.
    pub tensors: bool,
    pub name: CString,
    pub signature: Signature,
    released: AtomicBool,
}

impl KernelOf {
    pub fn name(&self) -> String {
        self.name.to_string_lossy().into_owned()
    }

    pub fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }
}

/// What a pipeline object holds.
pub(crate) struct Pipeline {
    pub kernel: Arc<KernelOf>,
    _alive: Alive,
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.kernel.released.store(true, Ordering::Release);
    }
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses.
    #[unsafe(super(NSObject))]
    #[name = "SoftLibrary"]
    #[ivars = Compiled]
    pub(crate) struct SoftLibrary;

    impl SoftLibrary {
        #[unsafe(method(newFunctionWithName:))]
        fn function(&self, name: &NSString) -> *mut SoftFunction {
            let Compiled { library, tensors, alive } = self.ivars();
            let Ok(name) = CString::new(name.to_string()) else { return std::ptr::null_mut() };
            let Some(signature) = library.signature(&name) else { return std::ptr::null_mut() };
            let (library, alive) = (library.clone(), Alive::new(&alive.state, Kind::Other));
            raw(Function { library, tensors: *tensors, name, signature, alive })
        }
    }
);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses.
    #[unsafe(super(NSObject))]
    #[name = "SoftFunction"]
    #[ivars = Function]
    pub(crate) struct SoftFunction;
);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses.
    #[unsafe(super(NSObject))]
    #[name = "SoftPipeline"]
    #[ivars = Pipeline]
    pub(crate) struct SoftPipeline;

    impl SoftPipeline {
        #[unsafe(method(threadExecutionWidth))]
        fn width(&self) -> usize {
            32
        }

        #[unsafe(method(maxTotalThreadsPerThreadgroup))]
        fn most_threads(&self) -> usize {
            self.ivars().kernel.signature.max_threads as usize
        }

        // The emulator counts threadgroup memory when a kernel runs.
        #[unsafe(method(staticThreadgroupMemoryLength))]
        fn memory(&self) -> usize {
            0
        }
    }
);

/// Compiles a text with the host's compiler; an error is the log.
pub(super) fn compile(
    state: &Arc<State>,
    source: &str,
    options: Option<&MTLCompileOptions>,
) -> Result<Compiled, String> {
    let options = compile_options(options);
    if options.version == 0 {
        let what = "no language version is set: the default is that of the SDK the program was linked with";
        return Err(state.violated(Rule::LanguageVersion, what));
    }
    if !options.exact {
        return Err(state.violated(Rule::FastMath, "fast math is on, as it is by default"));
    }
    let version = MTLLanguageVersion(options.version);
    let tensors = has_tensors(source);
    let least =
        if tensors { MTLLanguageVersion::Version4_0 } else { MTLLanguageVersion::Version3_1 };
    if version < least {
        let what = format!("version {:#x}, the text needs {:#x}", version.0, least.0);
        return Err(state.violated(Rule::LanguageVersion, what));
    }
    let new = version >= MTLLanguageVersion::Version4_0;
    let (fault, supported) = match new {
        true => (Fault::CompileTensor, state.caps.tensors),
        false => (Fault::Compile, true),
    };
    if !supported {
        return Err(format!("language version {:#x} is not supported", version.0));
    }
    if state.has_fault(fault) {
        return Err("program_source:1:1: error: a fault was injected".into());
    }
    if let Some(kernel) = misplaced(source) {
        return Err(state.violated(Rule::KernelIndices, kernel));
    }
    let mut text = host_text(source)?;
    if tensors && state.has_fault(Fault::WrongTensor) {
        text = text.replace("c[i] = s;", "c[i] = s + 1.0f;");
    }
    let compiler = match tensors {
        true => state.compiler.clone().with_flags(&["-std=c++20"]),
        false => state.compiler.clone(),
    };
    let library = match state.caps.tracked {
        true => compiler.tracking_library(&text),
        false => compiler.library(&text),
    };
    let library = Arc::new(library.map_err(|e| e.0)?);
    Ok(Compiled { library, tensors, alive: Alive::new(state, Kind::Other) })
}

/// A pipeline of a function; an error says why there is none.
pub(super) fn pipeline(state: &Arc<State>, function: &SoftFunction) -> Result<Pipeline, String> {
    if state.has_fault(Fault::Pipeline) {
        return Err("Compute function exceeds available registers: a fault was injected".into());
    }
    let Function { library, tensors, name, signature, alive } = function.ivars();
    let mut signature = *signature;
    if state.has_fault(Fault::FewThreads) {
        signature.max_threads = signature.max_threads.min(64);
    }
    let kernel = KernelOf {
        library: library.clone(),
        tensors: *tensors,
        name: name.clone(),
        signature,
        released: AtomicBool::new(false),
    };
    Ok(Pipeline { kernel: Arc::new(kernel), _alive: Alive::new(&alive.state, Kind::Other) })
}
