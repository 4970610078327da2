//! What kernels load and store, by what lies there: bytes, and 128-byte lines of each access of a simdgroup.

use std::collections::{BTreeMap, HashMap};
use std::ops::{AddAssign, Range};
use std::sync::{Arc, Mutex, PoisonError};

use lily_gpu::{Buffer, Dispatch};

use crate::compile::{Counts, Library, Region};

/// What lies in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Matrices: codes or elements.
    Weights,
    /// Their scales and biases.
    Scales,
    /// Weights of norms, convolution taps, constants of gates: read by every threadgroup that needs them.
    Vectors,
    /// K and V pages.
    Cache,
    /// Recurrent and convolution state.
    State,
    /// Everything else: activations, logits, tables.
    Activations,
}

impl Class {
    /// By what the buffer was allocated for.
    fn of(what: &str) -> Self {
        match what {
            "K pages" | "V pages" => Self::Cache,
            "recurrent state" => Self::State,
            what if what.starts_with("weights") => Self::Weights,
            _ => Self::Activations,
        }
    }
}

/// What was touched, of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Loads.
    pub loads: Counts,
    /// Stores.
    pub stores: Counts,
}

impl Counts {
    /// Lines touched ÷ the fewest possible.
    pub fn lines_ratio(&self) -> f64 {
        self.lines as f64 / self.ideal_lines as f64
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.accesses += other.accesses;
        self.lines += other.lines;
        self.ideal_lines += other.ideal_lines;
    }
}

impl AddAssign for Touched {
    fn add_assign(&mut self, other: Self) {
        self.loads += other.loads;
        self.stores += other.stores;
    }
}

/// The result of a trace.
#[derive(Clone, Debug, Default)]
pub struct Traced {
    /// By kernel and class.
    pub kernels: BTreeMap<(&'static str, Class), Touched>,
    /// Distinct bytes of each class that a list loaded, and stored; summed over lists.
    pub unique: BTreeMap<Class, [u64; 2]>,
    /// Each launch, in the order in which they ran.
    pub launches: Vec<Launch>,
}

/// What one launch moved, and what its encoder says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel.
    pub kernel: &'static str,
    /// The operation.
    pub op: &'static str,
    /// Distinct bytes loaded, and stored.
    pub unique: [u64; 2],
    /// [`Dispatch::traffic`].
    pub claimed: u64,
}

impl Traced {
    /// All kernels together.
    pub fn total(&self, class: Class) -> Touched {
        let mut total = Touched::default();
        self.kernels.iter().filter(|((_, c), _)| *c == class).for_each(|(_, t)| total += *t);
        total
    }

    /// Bytes loaded ÷ distinct bytes loaded.
    pub fn times_loaded(&self, class: Class) -> f64 {
        let unique = self.unique.get(&class).map_or(0, |u| u[0]);
        self.total(class).loads.bytes as f64 / unique as f64
    }
}

/// A switch, shared with a driver: while it is on, launches are counted.
#[derive(Clone, Debug, Default)]
pub struct Trace(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    on: bool,
    parts: Vec<(Range<u64>, Class)>,
    traced: Traced,
}

impl Trace {
    /// Begins; `parts` are the ranges of the weights' first slab that hold something else than matrices, in order.
    pub fn start(&self, parts: Vec<(Range<u64>, Class)>) {
        *self.state() = State { on: true, parts, traced: Traced::default() };
    }

    /// Ends; what was counted.
    pub fn stop(&self) -> Traced {
        let mut state = self.state();
        state.on = false;
        std::mem::take(&mut state.traced)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the launches of a list with their traces on.
    pub(crate) fn begin(
        &self,
        buffers: &HashMap<Buffer, (String, usize, u64)>,
    ) -> Option<Counting> {
        let state = self.state();
        state.on.then(|| Counting::new(buffers, &state.parts))
    }

    /// Adds what a list's launches touched.
    pub(crate) fn end(&self, counting: Counting) {
        let mut state = self.state();
        for (key, touched) in counting.kernels {
            *state.traced.kernels.entry(key).or_default() += touched;
        }
        state.traced.launches.extend(counting.launches);
        for (class, bits) in counting.classes.iter().zip(&counting.all) {
            let unique = state.traced.unique.entry(*class).or_default();
            for (sum, words) in unique.iter_mut().zip(bits) {
                *sum += words.iter().map(|w| u64::from(w.count_ones())).sum::<u64>();
            }
        }
    }
}

/// The regions of one list's launches.
pub(crate) struct Counting {
    regions: Vec<Region>,
    classes: Vec<Class>,
    /// A bit a byte: touched by the launch that runs, and by any before it.
    bits: Vec<[Vec<u64>; 2]>,
    all: Vec<[Vec<u64>; 2]>,
    kernels: HashMap<(&'static str, Class), Touched>,
    launches: Vec<Launch>,
}

impl Counting {
    fn new(
        buffers: &HashMap<Buffer, (String, usize, u64)>,
        others: &[(Range<u64>, Class)],
    ) -> Self {
        // Base, bytes, buffer, class.
        let mut parts: Vec<(usize, u64, usize, Class)> = Vec::new();
        for (what, buffer, bytes) in buffers.values() {
            let class = Class::of(what);
            let mut at = 0;
            let mut part = |end: u64, class| {
                parts.push((*buffer + at as usize, end - at, *buffer, class));
                at = end;
            };
            let others = if class == Class::Weights { others } else { &[] };
            for (range, other) in others.iter().filter(|(r, _)| r.end <= *bytes) {
                part(range.start, class);
                part(range.end, *other);
            }
            part(*bytes, class);
        }
        parts.retain(|(_, bytes, ..)| *bytes > 0);
        parts.sort_unstable();
        let words = |bytes: u64| vec![0u64; bytes.div_ceil(64) as usize];
        let mut bits: Vec<[Vec<u64>; 2]> =
            parts.iter().map(|(_, bytes, ..)| [words(*bytes), words(*bytes)]).collect();
        let all = bits.clone();
        let regions = parts
            .iter()
            .zip(&mut bits)
            .map(|((base, bytes, buffer, _), bits)| Region {
                base: *base,
                bytes: *bytes,
                buffer: *buffer,
                touched: bits.each_mut().map(|words| words.as_mut_ptr()),
                counts: [Counts::default(); 2],
            })
            .collect();
        let classes = parts.iter().map(|(.., class)| *class).collect();
        Self { regions, classes, bits, all, kernels: HashMap::new(), launches: Vec::new() }
    }

    /// Makes `launch` count.
    pub(crate) fn launch<T>(
        &mut self,
        library: &Library,
        dispatch: &Dispatch,
        launch: impl FnOnce() -> T,
    ) -> T {
        self.regions.iter_mut().for_each(|r| r.counts = [Counts::default(); 2]);
        // SAFETY: regions and bits outlive the launch, and nothing else touches them until the trace is off again.
        unsafe { library.trace(&mut self.regions) };
        let result = launch();
        // SAFETY: there are no regions.
        unsafe { library.trace(&mut []) };
        for (region, class) in self.regions.iter().zip(&self.classes) {
            let [loads, stores] = region.counts;
            if loads.accesses + stores.accesses > 0 {
                let key = (dispatch.kernel, *class);
                *self.kernels.entry(key).or_default() += Touched { loads, stores };
            }
        }
        let unique = self.take_unique();
        let Dispatch { kernel, op, traffic: claimed, .. } = *dispatch;
        self.launches.push(Launch { kernel, op, unique, claimed });
        result
    }

    /// The distinct bytes of the launch that has run; its bits join all others'.
    fn take_unique(&mut self) -> [u64; 2] {
        let mut unique = [0; 2];
        for (bits, all) in self.bits.iter_mut().zip(&mut self.all) {
            for ((bits, all), sum) in bits.iter_mut().zip(all).zip(&mut unique) {
                for (word, all) in bits.iter_mut().zip(all) {
                    *sum += u64::from(word.count_ones());
                    *all |= std::mem::take(word);
                }
            }
        }
        unique
    }
}
