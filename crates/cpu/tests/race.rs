//! A race on purpose: `.ci/threads` must see it.

use std::cell::UnsafeCell;
use std::thread;

struct Shared(UnsafeCell<u64>);

// SAFETY: it is not; that is the point. Only ThreadSanitizer's check runs this.
unsafe impl Sync for Shared {}

static SHARED: Shared = Shared(UnsafeCell::new(0));

#[test]
#[ignore = "undefined behaviour, for ThreadSanitizer to find"]
fn two_threads_write_without_a_lock() {
    let threads: Vec<_> = (0..2)
        .map(|_| {
            thread::spawn(|| {
                for _ in 0..1000 {
                    // SAFETY: none, see above.
                    unsafe { *SHARED.0.get() += 1 };
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
