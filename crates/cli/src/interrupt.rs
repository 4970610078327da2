//! Ctrl-C.

use std::sync::{Arc, Mutex, PoisonError};

use lily_engine::Cancel;

use crate::failure::Failure;

/// The first Ctrl-C raises the flag, so that what is there is shown; the second ends the program at once.
pub fn cancel_on_interrupt() -> anyhow::Result<Cancel> {
    let cancel = Cancel::new();
    let raised = cancel.clone();
    on_interrupt(move || {
        if raised.is_cancelled() {
            std::process::exit(130);
        }
        raised.cancel();
    })?;
    Ok(cancel)
}

/// Does something at each Ctrl-C. Once a process.
pub fn on_interrupt(handler: impl FnMut() + Send + 'static) -> anyhow::Result<()> {
    ctrlc::set_handler(handler).map_err(|error| {
        let what = format!("Ctrl-C cannot be handled: {error}");
        Failure::new(what, "this is a limit of the system the program runs in").into()
    })
}

/// Ctrl-C in a conversation: it ends the answer under way.
pub struct Interrupts(Arc<Mutex<Option<Cancel>>>);

impl Interrupts {
    /// While nothing is answered, Ctrl-C ends the program, unless there is an editor, which sees it as a key: then
    /// one that comes a moment too late for an answer must not end the conversation.
    pub fn install(editor: bool) -> anyhow::Result<Self> {
        let current = Arc::new(Mutex::new(None::<Cancel>));
        let shared = Arc::clone(&current);
        on_interrupt(move || {
            match shared.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
                Some(cancel) => cancel.cancel(),
                None if editor => {}
                None => std::process::exit(130),
            }
        })?;
        Ok(Self(current))
    }

    /// An answer begins; it ends when the result is dropped.
    pub fn answering(&self) -> Answering<'_> {
        let cancel = Cancel::new();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(cancel.clone());
        Answering { interrupts: self, cancel }
    }
}

/// An answer under way.
pub struct Answering<'a> {
    interrupts: &'a Interrupts,
    cancel: Cancel,
}

impl Answering<'_> {
    /// The flag that Ctrl-C raises.
    pub fn flag(&self) -> &Cancel {
        &self.cancel
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        *self.interrupts.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
