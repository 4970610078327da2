//! Fork-join pool: one call runs numbered tasks on all threads and returns when all are done.
//!
//! A kernel call lasts tens of microseconds and the next follows at once, so threads spin for a
//! moment before they sleep. They sleep afterwards, so that an idle engine uses no CPU.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::hint;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a thread spins for the next call, or a caller for the last task.
const SPIN: Duration = Duration::from_micros(50);
/// Polls between two looks at the clock.
const POLLS: usize = 32;
/// Times that a thread offers its core to others before it sleeps.
const YIELDS: usize = 4;

/// A task function: the task's index, then the index of the thread that runs it.
type TaskFn<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// What the threads work on.
#[derive(Clone, Copy)]
struct Job {
    run: *const TaskFn<'static>,
    tasks: usize,
}

struct Shared {
    /// Valid for a thread that has claimed a task, until it counts the task in `done`.
    job: UnsafeCell<Job>,
    /// Tasks that nobody has claimed yet. Above zero only while `job` is published.
    unclaimed: AtomicUsize,
    /// Finished tasks of the job.
    done: AtomicUsize,
    /// A task has panicked: the remaining ones are skipped.
    panicked: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Threads that sleep, or are about to, until `unclaimed` rises.
    sleepers: AtomicUsize,
    work: Signal,
    /// The caller sleeps, or is about to, until `done` is complete.
    caller_sleeps: AtomicBool,
    finished: Signal,
}

// SAFETY: `job` is written only by the one caller inside `run`, while `unclaimed` is zero and all
// tasks of the job before are done. It is read only after a successful claim; the claim reads the
// value of `unclaimed` that the caller stored after writing, and the caller waits for the task.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` leads to a `Sync` function that outlives every use, as above.
unsafe impl Send for Shared {}

/// A condition variable without data: the conditions are the atomics of [`Shared`].
#[derive(Default)]
struct Signal {
    lock: Mutex<()>,
    changed: Condvar,
}

impl Signal {
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleep_until(&self, condition: impl Fn() -> bool) {
        let mut guard = self.lock();
        while !condition() {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wakes up to `threads`. The lock is taken so that no sleeper is between check and wait.
    fn wake(&self, threads: usize) {
        drop(self.lock());
        for _ in 0..threads {
            self.changed.notify_one();
        }
    }
}

thread_local! {
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Polls `condition` for a short, bounded time; false when it did not come true.
fn spin_until(condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < SPIN {
        for _ in 0..POLLS {
            if condition() {
                return true;
            }
            hint::spin_loop();
        }
    }
    for _ in 0..YIELDS {
        thread::yield_now();
        if condition() {
            return true;
        }
    }
    false
}

impl Shared {
    /// Claims tasks of the current job and runs them until none is left.
    fn work(&self, worker: usize) {
        loop {
            let mut unclaimed = self.unclaimed.load(SeqCst);
            loop {
                if unclaimed == 0 {
                    return;
                }
                match self.unclaimed.compare_exchange_weak(unclaimed, unclaimed - 1, SeqCst, SeqCst)
                {
                    Ok(_) => break,
                    Err(now) => unclaimed = now,
                }
            }
            // SAFETY: a task was claimed, so the job is published and its caller waits.
            let job = unsafe { *self.job.get() };
            self.run_task(job, job.tasks - unclaimed, worker);
            let finished = self.done.fetch_add(1, SeqCst) + 1;
            if finished == job.tasks && self.caller_sleeps.load(SeqCst) {
                self.finished.wake(1);
            }
        }
    }

    fn run_task(&self, job: Job, task: usize, worker: usize) {
        if self.panicked.load(SeqCst) {
            return;
        }
        // SAFETY: as in `work`, the function lives until this task is counted as done.
        let run = unsafe { &*job.run };
        let outer = IN_TASK.replace(true);
        let result = panic::catch_unwind(AssertUnwindSafe(|| run(task, worker)));
        IN_TASK.set(outer);
        if let Err(payload) = result {
            let mut first = self.payload.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(payload);
            self.panicked.store(true, SeqCst);
        }
    }

    fn thread_main(&self, worker: usize) {
        let has_work = || self.unclaimed.load(SeqCst) > 0 || self.stop.load(SeqCst);
        while !self.stop.load(SeqCst) {
            if !spin_until(has_work) {
                self.sleepers.fetch_add(1, SeqCst);
                self.work.sleep_until(has_work);
                self.sleepers.fetch_sub(1, SeqCst);
            }
            self.work(worker);
        }
    }
}

/// A fixed set of threads; the calling thread is one of them.
pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// One call at a time.
    turn: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

impl Pool {
    /// A pool of `threads` threads (at least one), the caller of [`run`](Self::run) included.
    ///
    /// Where the system refuses to start more threads (a limit on processes or memory), the pool has as many
    /// as were started: [`threads`](Self::threads) tells.
    pub fn new(threads: usize) -> Self {
        fn nothing(_task: usize, _worker: usize) {}
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(Job { run: &nothing as &TaskFn<'static>, tasks: 0 }),
            unclaimed: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            payload: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            work: Signal::default(),
            caller_sleeps: AtomicBool::new(false),
            finished: Signal::default(),
        });
        let handles = (1..threads).map(|worker| {
            let shared = Arc::clone(&shared);
            let builder = thread::Builder::new().name(format!("lily-cpu-{worker}"));
            builder.spawn(move || shared.thread_main(worker))
        });
        let handles = handles.map_while(Result::ok).collect();
        Self { shared, handles, turn: Mutex::new(()) }
    }

    /// The number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Runs `f(task, worker)` for every `task < tasks` and returns when all have returned.
    ///
    /// Tasks start in ascending order on whichever thread is free. `worker < threads()` differs
    /// between tasks of this call that run at the same time. A single task, or a single thread,
    /// runs on the caller without synchronisation.
    ///
    /// # Panics
    /// With the payload of a task that panics (tasks that have not started are skipped), and when
    /// called from inside a task of a pool.
    pub fn run(&self, tasks: usize, f: &TaskFn<'_>) {
        assert!(!IN_TASK.get(), "a task must not start tasks");
        if tasks <= 1 || self.handles.is_empty() {
            (0..tasks).for_each(|task| f(task, 0));
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;

        // SAFETY: only the lifetime changes. The pointer is used by claimed tasks alone, and this
        // function returns or unwinds only after all of them are done.
        let run = unsafe { std::mem::transmute::<*const TaskFn<'_>, *const TaskFn<'static>>(f) };
        shared.done.store(0, SeqCst);
        shared.panicked.store(false, SeqCst);
        // SAFETY: nothing is claimed or claimable, so no thread reads the job.
        unsafe { *shared.job.get() = Job { run, tasks } };
        shared.unclaimed.store(tasks, SeqCst);
        let sleepers = shared.sleepers.load(SeqCst);
        if sleepers > 0 {
            shared.work.wake(sleepers.min(tasks - 1));
        }

        shared.work(0);
        let complete = || shared.done.load(SeqCst) == tasks;
        if !complete() && !spin_until(complete) {
            shared.caller_sleeps.store(true, SeqCst);
            shared.finished.sleep_until(complete);
            shared.caller_sleeps.store(false, SeqCst);
        }
        if shared.panicked.load(SeqCst) {
            let payload = shared.payload.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(turn);
            panic::resume_unwind(payload.expect("a panic leaves its payload"));
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.work.wake(self.handles.len());
        for handle in self.handles.drain(..) {
            // Panics of tasks are caught, so a thread ends only by returning.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for tasks in [0, 1, 2, 3, 7, 100] {
                let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                pool.run(tasks, &|task, worker| {
                    assert!(worker < threads);
                    counts[task].fetch_add(1, Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Relaxed) == 1));
            }
        }
    }

    #[test]
    fn calls_do_not_mix_under_stress() {
        let pool = Pool::new(5);
        for call in 0..20_000u64 {
            let tasks = 1 + (call % 9) as usize;
            let sum = AtomicU64::new(0);
            pool.run(tasks, &|task, _| {
                sum.fetch_add(call * 16 + task as u64, Relaxed);
            });
            let tasks = tasks as u64;
            assert_eq!(sum.load(Relaxed), call * 16 * tasks + tasks * (tasks - 1) / 2);
        }
    }

    #[test]
    fn sleeping_threads_wake_up() {
        let pool = Pool::new(3);
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(2));
            let busy = Mutex::new(std::collections::HashSet::new());
            pool.run(3, &|_, worker| {
                busy.lock().unwrap().insert(worker);
                thread::sleep(Duration::from_millis(5));
            });
            assert!(busy.lock().unwrap().len() > 1);
        }
    }

    #[test]
    fn callers_take_turns() {
        let pool = Pool::new(3);
        let active = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        pool.run(4, &|_, _| {
                            assert!(active.fetch_add(1, Relaxed) < 3);
                            active.fetch_sub(1, Relaxed);
                        });
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(3);
        for round in 0..50 {
            let result = panic::catch_unwind(AssertUnwindSafe(|| {
                pool.run(8, &|task, _| assert!(task != round % 8, "task {task}"));
            }));
            let payload = result.unwrap_err();
            assert_eq!(*payload.downcast::<String>().unwrap(), format!("task {}", round % 8));
            let count = AtomicU32::new(0);
            pool.run(8, &|_, _| {
                count.fetch_add(1, Relaxed);
            });
            assert_eq!(count.load(Relaxed), 8);
        }
    }

    #[test]
    fn nesting_is_refused() {
        let pool = Pool::new(2);
        let result = panic::catch_unwind(AssertUnwindSafe(|| {
            pool.run(2, &|_, _| pool.run(2, &|_, _| {}));
        }));
        assert!(result.is_err());
    }

    #[test]
    fn worker_indices_are_exclusive() {
        let pool = Pool::new(4);
        let taken: Vec<AtomicBool> = (0..4).map(|_| AtomicBool::new(false)).collect();
        for _ in 0..500 {
            pool.run(16, &|_, worker| {
                assert!(!taken[worker].swap(true, SeqCst));
                hint::spin_loop();
                taken[worker].store(false, SeqCst);
            });
        }
    }
}
