//! `lily licenses`.

use crate::output::Stdout;

/// Prints the licence of Lily and the notices of the built-in model.
pub fn licenses() -> anyhow::Result<()> {
    let mut out = Stdout::new();
    out.line(&format!(
        "lily {} is licensed under the Apache License, Version 2.0 ({}).\n",
        env!("CARGO_PKG_VERSION"),
        env!("CARGO_PKG_LICENSE"),
    ))?;
    out.text(lily_demo::NOTICE)?;
    out.flush()?;
    Ok(())
}
