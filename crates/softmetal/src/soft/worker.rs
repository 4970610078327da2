//! Threads that outlive their devices: an emulator keeps stacks for each thread that it ran on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

static IDLE: Mutex<Vec<Sender<Job>>> = Mutex::new(Vec::new());

/// A thread that runs jobs in the order in which they are handed to it.
pub(crate) struct Worker(Sender<Job>);

impl Worker {
    pub fn new() -> Self {
        let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Self(idle.unwrap_or_else(|| {
            let (sender, jobs) = channel::<Job>();
            std::thread::spawn(move || {
                for job in jobs {
                    // A panic has printed its message; what waits for the job finds out by itself.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                }
            });
            sender
        }))
    }

    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        // The thread ends only when the last sender is gone.
        let _ = self.0.send(Box::new(job));
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(self.0.clone());
    }
}
