//! Writes the kernel texts into a folder, for checks by other compilers: platform headers, argument structs, the sizes of a shape, kernel
//! files, and `cuda.cu`, the whole text for CUDA.
//!
//! `cargo run -p lily-gpu --example kernel_text -- FOLDER [tiny]`

use std::path::Path;

use lily_gpu::kernels::{argument_structs, read};
use lily_gpu::text::{EARLIER, EARLY, FILES, MEASURING, platform_header};
use lily_gpu::{Platform, Shape, Text};

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().expect("usage: kernel_text FOLDER [tiny]");
    let shape = match arguments.next().as_deref() {
        Some("tiny") => {
            Shape { key_dim: 32, value_dim: 64, head_dim: 64, heads_per_kv: 2, ..Shape::default() }
        }
        _ => Shape::default(),
    };
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder)?;
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text);
    for header in ["platform_metal.h", "platform_cuda.h", "platform_cpu.h", "platform_check.h"] {
        write(header, platform_header(header).expect("a platform header"))?;
    }
    write("shape.h", &Text::defines(&shape))?;
    write("arguments.h", &(argument_structs() + &read::declarations()))?;
    let files = || FILES.iter().chain([&MEASURING]);
    for (name, text) in files() {
        write(name, text)?;
    }
    let sooner = |name| if EARLIER.contains(&name) { " sooner" } else { "" };
    let early: Vec<String> = EARLY.iter().map(|name| format!("{name}{}\n", sooner(name))).collect();
    write("early", &early.concat())?;
    let names: Vec<&str> = files().map(|(name, _)| *name).collect();
    write("files", &(names.join("\n") + "\n"))?;
    write("cuda.cu", &Text::measuring(Platform::Cuda, &shape).source)
}
