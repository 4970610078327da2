//! Queues, fences, residency sets.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use objc2::rc::Retained;
use objc2::runtime::NSObject;
use objc2::{DefinedClass, define_class};

use super::command::{Committed, SoftCommandBuffer};
use super::device::SoftBuffer;
use super::{make, raw};
use crate::soft::memory::Region;
use crate::soft::rules::Rule;
use crate::soft::state::{Alive, Kind, State};

/// Residency sets of a queue at most.
const MOST_SETS: usize = 32;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses.
    #[unsafe(super(NSObject))]
    #[name = "SoftFence"]
    #[ivars = Fence]
    pub(crate) struct SoftFence;
);

/// A fence.
pub(crate) struct Fence {
    pub id: u64,
    _alive: Alive,
}

impl Fence {
    pub fn new(state: &Arc<State>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, _alive: Alive::new(state, Kind::Other) }
    }
}

/// Buffers that are asked to be resident: those added, and those that were when the set was committed last.
#[derive(Default)]
struct Members {
    added: HashMap<u64, Arc<Region>>,
    committed: HashMap<u64, Arc<Region>>,
}

impl Members {
    fn commit(&mut self) {
        self.added.values().for_each(|r| r.is_kept(true));
        self.committed.values().for_each(|r| r.is_kept(false));
        self.committed = self.added.clone();
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        self.committed.values().for_each(|r| r.is_kept(false));
    }
}

#[derive(Clone)]
pub(crate) struct Residents {
    members: Arc<Mutex<Members>>,
    _alive: Arc<Alive>,
}

impl Residents {
    pub fn new(state: &Arc<State>) -> Self {
        let alive = Arc::new(Alive::new(state, Kind::Other));
        Self { members: Arc::default(), _alive: alive }
    }
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses.
    #[unsafe(super(NSObject))]
    #[name = "SoftResidencySet"]
    #[ivars = Residents]
    pub(crate) struct SoftSet;

    impl SoftSet {
        #[unsafe(method(addAllocation:))]
        fn add(&self, buffer: &SoftBuffer) {
            let region = buffer.ivars().region.clone();
            lock(&self.ivars().members).added.insert(region.id, region);
        }

        #[unsafe(method(removeAllocation:))]
        fn remove(&self, buffer: &SoftBuffer) {
            lock(&self.ivars().members).added.remove(&buffer.ivars().region.id);
        }

        #[unsafe(method(removeAllAllocations))]
        fn clear(&self) {
            lock(&self.ivars().members).added.clear();
        }

        #[unsafe(method(commit))]
        fn commit(&self) {
            lock(&self.ivars().members).commit();
        }

        #[unsafe(method(requestResidency))]
        fn request(&self) {}

        #[unsafe(method(endResidency))]
        fn end(&self) {}
    }
);

/// What a queue and its command buffers share.
pub(crate) struct Shared {
    pub state: Arc<State>,
    sets: Mutex<Vec<Retained<SoftSet>>>,
    most: usize,
    /// Command buffers that were made and are not over.
    pub open: AtomicUsize,
    _alive: Alive,
    /// After one was killed, the queue runs no other.
    pub failed: AtomicBool,
}

// SAFETY: residency sets may be asked for their members on any thread: they lie behind a lock.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Buffers that are resident for what is committed now; `None` if the queue has no set.
    pub fn residents(&self) -> Option<HashSet<u64>> {
        let sets = lock(&self.sets);
        let members = |s: &Retained<SoftSet>| -> Vec<u64> {
            lock(&s.ivars().members).committed.keys().copied().collect()
        };
        (!sets.is_empty()).then(|| sets.iter().flat_map(members).collect())
    }

    fn buffer(self: &Arc<Self>, retains: bool) -> Retained<SoftCommandBuffer> {
        if !self.state.wait_for(|| self.open.load(Ordering::Acquire) < self.most) {
            let what = format!("{} command buffers are under way and none ends", self.most);
            self.state.violated(Rule::QueueDepth, what);
        }
        self.open.fetch_add(1, Ordering::AcqRel);
        make(Committed::new(self, retains))
    }
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses.
    #[unsafe(super(NSObject))]
    #[name = "SoftCommandQueue"]
    #[ivars = Arc<Shared>]
    pub(crate) struct SoftQueue;

    impl SoftQueue {
        #[unsafe(method(addResidencySet:))]
        fn add_set(&self, set: &SoftSet) {
            use objc2::Message;
            let mut sets = lock(&self.ivars().sets);
            if sets.len() >= MOST_SETS {
                let what = format!("a queue takes {MOST_SETS} residency sets");
                self.ivars().state.violated(Rule::ResidencySets, what);
                return;
            }
            sets.push(set.retain());
        }

        #[unsafe(method(removeResidencySet:))]
        fn remove_set(&self, set: &SoftSet) {
            lock(&self.ivars().sets).retain(|s| !std::ptr::eq(&**s, set));
        }

        #[unsafe(method_id(commandBuffer))]
        fn command_buffer(&self) -> Retained<SoftCommandBuffer> {
            self.ivars().buffer(true)
        }

        #[unsafe(method_id(commandBufferWithUnretainedReferences))]
        fn unretained(&self) -> Retained<SoftCommandBuffer> {
            self.ivars().buffer(false)
        }
    }
);

/// A queue for so many command buffers at once.
pub(super) fn new_queue(state: &Arc<State>, most: usize) -> *mut SoftQueue {
    raw(Arc::new(Shared {
        state: state.clone(),
        sets: Mutex::default(),
        most,
        open: AtomicUsize::new(0),
        _alive: Alive::new(state, Kind::Other),
        failed: AtomicBool::new(false),
    }))
}
