//! The host code's kernel text, made ready for the host's compiler.

use lily_gpu::text::platform_header;

const METAL: &str = "#line 1 \"platform_metal.h\"";
const REST: &str = "#line 1 \"arguments\"";

/// A text as the host code hands it over, with these kernels: for tests of rules.
pub fn metal_text(kernels: &str) -> String {
    let header = platform_header("platform_metal.h").unwrap_or_default();
    format!("{METAL}\n{header}{REST}\n{kernels}")
}

/// Whether a text is one of tensor operations.
pub(crate) fn has_tensors(source: &str) -> bool {
    source.lines().take_while(|l| !l.starts_with(METAL)).any(|l| l.trim() == "#define K_TENSOR 1")
}

/// The very text behind the platform's header, behind the host's instead.
pub fn host_text(source: &str) -> Result<String, String> {
    let (head, rest) = match (source.find(METAL), source.find(REST)) {
        (Some(header), Some(rest)) if header < rest => (&source[..header], &source[rest..]),
        _ => return Err(format!("the text has no `{METAL}` or no `{REST}` behind it")),
    };
    if head.lines().any(|l| !l.starts_with("#define ") && !l.trim().is_empty()) {
        return Err("before the platform's header there may be #define lines only".into());
    }
    let cpu = platform_header("platform_cpu.h").unwrap_or_default();
    let tensors = if has_tensors(source) { lily_softgpu::TENSORS } else { "" };
    Ok(format!("{head}#line 1 \"platform_cpu.h\"\n{cpu}{tensors}{rest}"))
}

/// Kernels whose parameters are not at 0, 1, …: the emulator goes by their order, Metal by their indices.
pub(crate) fn misplaced(source: &str) -> Option<String> {
    let body = source.find(REST).map_or(source, |at| &source[at..]);
    // Parameters of several kernels stand in a define of their own, NAME_OPERANDS.
    let kernels = body.split(" KERNEL(").flat_map(|part| part.split("\nKERNEL("));
    for kernel in kernels.flat_map(|part| part.split("_OPERANDS ")).skip(1) {
        let name = kernel.split(',').next().unwrap_or_default();
        let parameters = &kernel[..kernel.find('{').unwrap_or(kernel.len())];
        let words: Vec<&str> = parameters.split(['(', ',', ' ', '\n']).collect();
        let index = |pair: &[&str]| {
            ["IN", "OUT", "ARGS"].contains(&pair[0]).then(|| pair[1].parse::<u32>().ok()).flatten()
        };
        let indices: Vec<u32> = words.windows(2).filter_map(index).collect();
        if indices.iter().zip(0..).any(|(a, b)| *a != b) || indices.len() > 31 {
            return Some(format!("{name} has {indices:?}"));
        }
    }
    None
}
