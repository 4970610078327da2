//! The bindings ask the linker for an Objective-C runtime. This crate is one: an empty library satisfies the linker.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_CFG_METAL_SOFT").is_none() {
        return Ok(());
    }
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    for name in ["libobjc.a", "libdispatch.a"] {
        std::fs::write(folder.join(name), "!<arch>\n")?;
    }
    println!("cargo:rustc-link-search=native={}", folder.display());
    Ok(())
}
