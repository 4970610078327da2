//! NVRTC, NVIDIA's run-time compiler: found on disk, called through its C interface.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;

/// Why there is no machine code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NvrtcError {
    /// The library was not found; the places that were looked at.
    Missing(String),
    /// The text was refused; the compiler's log.
    Refused(String),
}

/// Options beside the architecture.
pub(crate) const OPTIONS: &[&str] =
    &["--std=c++17", "--fmad=true", "--device-int128", "--ptxas-options=-v"];

type Program = *mut c_void;

/// The compiler.
pub struct Nvrtc {
    library: Library,
    version: (i32, i32),
}

macro_rules! call {
    ($self:expr, $name:literal, fn($($type:ty),*), $($arg:expr),* $(,)?) => {{
        // SAFETY: the signature is that of nvrtc.h, unchanged since CUDA 11; the arguments outlive the call.
        unsafe {
            $self
                .library
                .get::<unsafe extern "C" fn($($type),*) -> c_int>($name)
                .map(|f| f($($arg),*))
                .map_err(|e| NvrtcError::Refused(format!("NVRTC is damaged: {e}")))
        }
    }};
}

impl Nvrtc {
    /// Looks beside the program, in `CUDA_PATH`, in the toolkit's folder, where the system's linker
    /// looks, and in pip's packages of a virtual environment.
    pub fn open() -> Result<Self, NvrtcError> {
        let places = places();
        for place in &places {
            // SAFETY: NVRTC's initialisers have no preconditions.
            let Ok(library) = (unsafe { Library::new(place) }) else { continue };
            let (mut major, mut minor) = (0, 0);
            let this = Self { library, version: (0, 0) };
            let rc =
                call!(this, b"nvrtcVersion\0", fn(*mut c_int, *mut c_int), &mut major, &mut minor)?;
            if rc == 0 {
                return Ok(Self { version: (major, minor), ..this });
            }
        }
        Err(NvrtcError::Missing(format!(
            "NVRTC, NVIDIA's run-time compiler, was not found; install the CUDA toolkit or the Python package nvidia-cuda-nvrtc, or set CUDA_PATH (looked for {} names, from {} on)",
            places.len(),
            places.first().map(|p| p.display().to_string()).unwrap_or_default()
        )))
    }

    /// Major and minor version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Machine code of a text for compute capability `major.minor`, and the compiler's log.
    pub fn compile(
        &self,
        source: &str,
        capability: (i32, i32),
    ) -> Result<(Vec<u8>, String), NvrtcError> {
        let text = CString::new(source)
            .map_err(|_| NvrtcError::Refused("the text holds a zero byte".into()))?;
        let mut program: Program = std::ptr::null_mut();
        type Create = *const *const c_char;
        let rc = call!(
            self,
            b"nvrtcCreateProgram\0",
            fn(*mut Program, *const c_char, *const c_char, c_int, Create, Create),
            &mut program,
            text.as_ptr(),
            c"lily.cu".as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )?;
        if rc != 0 {
            return Err(NvrtcError::Refused(format!("nvrtcCreateProgram returned {rc}")));
        }
        let result = self.compile_program(program, capability);
        let _ = call!(self, b"nvrtcDestroyProgram\0", fn(*mut Program), &mut program)?;
        result
    }

    fn compile_program(
        &self,
        program: Program,
        (major, minor): (i32, i32),
    ) -> Result<(Vec<u8>, String), NvrtcError> {
        // Instructions of one chip only (wgmma) need the suffix.
        let suffix = if major >= 9 { "a" } else { "" };
        let architecture = format!("--gpu-architecture=sm_{major}{minor}{suffix}");
        let options: Vec<CString> = [architecture.as_str()]
            .iter()
            .chain(OPTIONS)
            .filter_map(|o| CString::new(*o).ok())
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let rc = call!(
            self,
            b"nvrtcCompileProgram\0",
            fn(Program, c_int, *const *const c_char),
            program,
            pointers.len() as c_int,
            pointers.as_ptr(),
        )?;
        let mut size = 0usize;
        call!(self, b"nvrtcGetProgramLogSize\0", fn(Program, *mut usize), program, &mut size)?;
        let mut log = vec![0u8; size.max(1)];
        call!(
            self,
            b"nvrtcGetProgramLog\0",
            fn(Program, *mut c_char),
            program,
            log.as_mut_ptr().cast(),
        )?;
        let log = CStr::from_bytes_until_nul(&log)
            .map(|l| l.to_string_lossy().into_owned())
            .unwrap_or_default();
        if rc != 0 {
            return Err(NvrtcError::Refused(log));
        }
        call!(self, b"nvrtcGetCUBINSize\0", fn(Program, *mut usize), program, &mut size)?;
        let mut code = vec![0u8; size];
        let rc = call!(
            self,
            b"nvrtcGetCUBIN\0",
            fn(Program, *mut c_char),
            program,
            code.as_mut_ptr().cast()
        )?;
        match rc {
            0 if size > 0 => Ok((code, log)),
            _ => Err(NvrtcError::Refused(format!("no machine code came back ({rc}): {log}"))),
        }
    }
}

/// Where the library may lie, best first.
fn places() -> Vec<PathBuf> {
    let names: &[&str] = match cfg!(windows) {
        true => &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"],
        false => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    };
    let mut folders: Vec<PathBuf> = Vec::new();
    let program = std::env::current_exe().ok();
    folders.extend(program.as_deref().and_then(Path::parent).map(Path::to_path_buf));
    for root in ["CUDA_PATH", "CUDA_HOME"].into_iter().filter_map(std::env::var_os) {
        let root = PathBuf::from(root);
        folders.extend(["lib64", "lib", "bin"].map(|d| root.join(d)));
    }
    folders.extend(["/usr/local/cuda/lib64", "/opt/cuda/lib64"].map(PathBuf::from));
    let mut list: Vec<PathBuf> =
        folders.iter().flat_map(|f| names.iter().map(|n| f.join(n))).collect();
    // Bare names: the system's own search.
    list.extend(names.iter().map(PathBuf::from));
    for root in ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os) {
        list.extend(pip(Path::new(&root), names));
    }
    list.extend(["/usr", "/usr/local"].iter().flat_map(|r| pip(Path::new(r), names)));
    list
}

/// In the packages that pip installs under `root`.
fn pip(root: &Path, names: &[&str]) -> Vec<PathBuf> {
    let pythons = std::fs::read_dir(root.join("lib")).into_iter().flatten().flatten();
    pythons
        .flat_map(|python| {
            ["site-packages", "dist-packages"]
                .map(|d| python.path().join(d).join("nvidia"))
                .into_iter()
                .flat_map(|nvidia| {
                    ["cuda_nvrtc/lib", "cu13/lib"].map(|d| nvidia.join(d)).into_iter()
                })
                .collect::<Vec<_>>()
        })
        .flat_map(|folder| names.iter().map(move |n| folder.join(n)))
        .collect()
}
