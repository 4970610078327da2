//! Ctrl-C.

use lily_engine::Cancel;

use crate::failure::Failure;

/// The first Ctrl-C raises the flag, so that what is there is shown; the second ends the program at once.
pub fn cancel_on_interrupt() -> anyhow::Result<Cancel> {
    let cancel = Cancel::new();
    let raised = cancel.clone();
    let handler = move || {
        if raised.is_cancelled() {
            std::process::exit(130);
        }
        raised.cancel();
    };
    ctrlc::set_handler(handler).map_err(|error| {
        Failure::new(
            format!("Ctrl-C cannot be handled: {error}"),
            "this is a limit of the system the program runs in",
        )
    })?;
    Ok(cancel)
}
