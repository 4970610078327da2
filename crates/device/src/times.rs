//! Where the time of steps goes.

/// What a program measures of its steps beside running them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// Nothing: steps run at their full speed.
    #[default]
    Nothing,
    /// Seconds of each operation.
    Operations,
    /// Likewise, and beside each kernel how long its bytes take without its arithmetic.
    Twins,
    /// Nothing but how fast decode steps can read K and V, on GPUs: see [`CacheRead`].
    Cache,
}

/// K or V of all layers, read alone as the attention of decode steps reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CacheRead {
    /// K, else V.
    pub keys: bool,
    /// Lanes read neighbouring elements; else a row of K each, and V element by element.
    pub coalesced: bool,
    /// Launches: one a layer and step.
    pub launches: u64,
    /// Distinct bytes that they read.
    pub bytes: u64,
    /// Seconds of all of them.
    pub seconds: f64,
}

/// How long the bytes that a kernel moves take when nothing is computed with them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Twins {
    /// Read straight through, by as many threads as the device likes best.
    pub read_only: f64,
    /// Read by the kernel's own grid of threads.
    pub no_arithmetic: f64,
}

/// What a kernel takes inside its steps, among the others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Inside {
    /// It was not measured: only a step's costliest kernels are, and not all devices can.
    #[default]
    NotMeasured,
    /// No step goes without it: other kernels read memory where the indices say that it writes.
    Needed,
    /// Seconds that the steps take less without all its launches.
    Seconds(f64),
}

impl Inside {
    /// Of two sets of steps.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Seconds(a), Self::Seconds(b)) => Self::Seconds(a + b),
            (Self::Needed, _) | (_, Self::Needed) => Self::Needed,
            _ => Self::NotMeasured,
        }
    }
}

/// One kernel of one operation, in all steps that were measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OperationTime {
    /// The operation, or the chain of them that is one kernel.
    pub operation: &'static str,
    /// The kernel, where an operation may be several; else the operation again.
    pub kernel: &'static str,
    /// Calls or launches.
    pub calls: u64,
    /// Seconds of all of them.
    pub seconds: f64,
    /// Bytes that they move: weights on the CPU, everything on a GPU.
    pub bytes: u64,
    /// Multiply-adds of their products, attention and recurrence, where they are counted.
    pub macs: u64,
    /// The same bytes without arithmetic, if that was asked for.
    pub twins: Option<Twins>,
    /// What it takes among the others, if that was asked for.
    pub inside: Inside,
}

/// Seconds by operation since measuring began.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OperationTimes {
    /// Steps that were measured.
    pub steps: u64,
    /// Seconds of these steps as a whole.
    pub seconds: f64,
    /// The operations, in the order in which they first ran.
    pub operations: Vec<OperationTime>,
    /// Reads of K and V, where these were asked for.
    pub cache: Vec<CacheRead>,
    /// Bytes a second of a long read, where twins were asked for.
    pub read_rate: Option<f64>,
    /// Multiply-adds a second of the device's matrix units at best, where it is known and twins were asked for.
    pub matrix_rate: Option<f64>,
    /// Why steps are missing, if some are.
    pub trouble: Option<String>,
}

impl OperationTimes {
    /// Adds a measurement to what was measured of the same kernel before.
    pub fn add(&mut self, time: OperationTime) {
        let same =
            |t: &&mut OperationTime| (t.operation, t.kernel) == (time.operation, time.kernel);
        match self.operations.iter_mut().find(same) {
            Some(t) => {
                t.calls += time.calls;
                t.seconds += time.seconds;
                t.bytes += time.bytes;
                t.macs += time.macs;
                t.inside = t.inside.and(time.inside);
                t.twins = match (t.twins, time.twins) {
                    (Some(a), Some(b)) => Some(Twins {
                        read_only: a.read_only + b.read_only,
                        no_arithmetic: a.no_arithmetic + b.no_arithmetic,
                    }),
                    _ => None,
                };
            }
            None => self.operations.push(time),
        }
    }

    /// Adds reads of K or V to those of the same kind.
    pub fn add_cache(&mut self, read: CacheRead) {
        let same = |r: &&mut CacheRead| (r.keys, r.coalesced) == (read.keys, read.coalesced);
        match self.cache.iter_mut().find(same) {
            Some(r) => {
                r.launches += read.launches;
                r.bytes += read.bytes;
                r.seconds += read.seconds;
            }
            None => self.cache.push(read),
        }
    }

    /// Seconds of all operations.
    pub fn sum(&self) -> f64 {
        self.operations.iter().map(|t| t.seconds).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(operation: &'static str, kernel: &'static str, seconds: f64) -> OperationTime {
        let twins = Some(Twins { read_only: seconds / 4.0, no_arithmetic: seconds / 2.0 });
        let inside = Inside::Seconds(seconds / 8.0);
        OperationTime { operation, kernel, calls: 2, seconds, bytes: 10, macs: 30, twins, inside }
    }

    #[test]
    fn times_of_one_kernel_are_added() {
        let mut times = OperationTimes::default();
        times.add(time("linear", "gemv", 1.0));
        times.add(time("linear", "gemm", 2.0));
        times.add(time("linear", "gemv", 3.0));
        assert_eq!(times.operations.len(), 2);
        let first = &times.operations[0];
        assert_eq!((first.calls, first.seconds, first.bytes), (4, 4.0, 20));
        assert_eq!((first.macs, first.inside), (60, Inside::Seconds(0.5)));
        assert_eq!(first.twins, Some(Twins { read_only: 1.0, no_arithmetic: 2.0 }));
        assert_eq!(times.sum(), 6.0);
        let inside = Inside::NotMeasured;
        times.add(OperationTime { twins: None, inside, ..time("linear", "gemm", 1.0) });
        assert_eq!(times.operations[1].twins, None, "half of a twin is none");
        assert_eq!(times.operations[1].inside, Inside::NotMeasured);
        let read = CacheRead { keys: true, coalesced: true, launches: 10, bytes: 8, seconds: 0.5 };
        times.add_cache(read);
        times.add_cache(CacheRead { keys: false, ..read });
        times.add_cache(read);
        let twice = CacheRead { launches: 20, bytes: 16, seconds: 1.0, ..read };
        assert_eq!(times.cache, [twice, CacheRead { keys: false, ..read }]);
        times.add(OperationTime { inside: Inside::Needed, ..time("linear", "gemm", 1.0) });
        assert_eq!(times.operations[1].inside, Inside::Needed);
    }
}
