//! Whole models on the host's GPU driver, with an eye on what is submitted.
#![allow(dead_code)] // each test uses a part

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use lily_device::{Device, Limits, Program};
use lily_gpu::{
    Buffer, CommandList, Driver, DriverError, GpuDevice, Pipeline, Placement, Profile, Submission,
    Text, Timing, Tuning,
};
use lily_model::Model;
use lily_softgpu::{Options, SoftDriver};

/// A submitted list.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    /// Kernel, threadgroups and arguments of each dispatch.
    pub dispatches: Vec<(&'static str, [u32; 3], Vec<u8>)>,
    /// First dispatch of each stage.
    pub stages: Vec<usize>,
    /// The operation or chain of each dispatch, and its layer.
    pub ops: Vec<(&'static str, Option<u32>)>,
}

impl Listed {
    /// The kernels of a stage.
    pub fn kernels(&self, stage: usize) -> Vec<&'static str> {
        let end = self.stages.get(stage + 1).copied().unwrap_or(self.dispatches.len());
        self.dispatches[self.stages[stage]..end].iter().map(|d| d.0).collect()
    }
}

/// What a program did with its driver.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Log {
    /// Submissions, in order.
    pub lists: Vec<Listed>,
    /// Bytes of scratch.
    pub scratch: u64,
    /// What the buffers are for that were read back, in order.
    pub reads: Vec<String>,
}

/// A boundary between two stages: the stage behind it runs before the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// Which submission, from 0.
    pub list: usize,
    /// The stage behind the boundary, from 1.
    pub stage: usize,
}

/// The driver, with its log.
struct Watch {
    inner: SoftDriver,
    log: Arc<Mutex<Log>>,
    swap: Option<Swap>,
    scratch: Option<(Buffer, u64)>,
    buffers: HashMap<Buffer, String>,
}

impl Watch {
    /// The list, with two of its stages in the wrong order.
    fn swapped(list: &CommandList, stage: usize) -> CommandList {
        let ranges: Vec<_> = list.stages().collect();
        let mut out = CommandList {
            dispatches: Vec::new(),
            pipelines: Vec::new(),
            stages: Vec::new(),
            ..list.clone()
        };
        let mut order: Vec<usize> = (0..ranges.len()).collect();
        order.swap(stage - 1, stage);
        for i in order {
            out.stages.push(out.dispatches.len());
            out.dispatches.extend_from_slice(&list.dispatches[ranges[i].clone()]);
            out.pipelines.extend_from_slice(&list.pipelines[ranges[i].clone()]);
        }
        out
    }
}

impl Driver for Watch {
    fn profile(&self) -> &Profile {
        self.inner.profile()
    }

    fn allocate(
        &mut self,
        what: &str,
        bytes: u64,
        placement: Placement,
    ) -> Result<Buffer, DriverError> {
        let buffer = self.inner.allocate(what, bytes, placement)?;
        self.buffers.insert(buffer, what.to_owned());
        if what == "scratch" {
            self.log.lock().expect("no test panics here").scratch += bytes;
            self.scratch = Some((buffer, bytes));
        }
        Ok(buffer)
    }

    fn release(&mut self, buffer: Buffer) {
        self.inner.release(buffer);
    }

    fn write(&mut self, buffer: Buffer, offset: u64, bytes: &[u8]) -> Result<(), DriverError> {
        self.inner.write(buffer, offset, bytes)
    }

    fn read(&mut self, buffer: Buffer, offset: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        let what = self.buffers.get(&buffer).cloned().unwrap_or_default();
        self.log.lock().expect("no test panics here").reads.push(what);
        self.inner.read(buffer, offset, bytes)
    }

    fn pipelines(
        &mut self,
        text: &Arc<Text>,
        kernels: &[&'static str],
    ) -> Result<Vec<Pipeline>, DriverError> {
        self.inner.pipelines(text, kernels)
    }

    fn submit(&mut self, list: &Arc<CommandList>) -> Result<Submission, DriverError> {
        let dispatches = list.dispatches.iter().map(|d| (d.kernel, d.groups, d.args.clone()));
        let listed = Listed {
            dispatches: dispatches.collect(),
            stages: list.stages.clone(),
            ops: list.dispatches.iter().map(|d| (d.op, d.layer)).collect(),
        };
        let number = {
            let mut log = self.log.lock().expect("no test panics here");
            log.lists.push(listed);
            log.lists.len() - 1
        };
        match self.swap {
            Some(swap) if swap.list == number => {
                // What is read too early is zero: no id or offset leads out of a buffer.
                if let Some((buffer, bytes)) = self.scratch {
                    self.inner.write(buffer, 0, &vec![0; bytes as usize])?;
                }
                self.inner.submit(&Arc::new(Self::swapped(list, swap.stage)))
            }
            _ => self.inner.submit(list),
        }
    }

    fn wait(&mut self, submission: Submission) -> Result<Timing, DriverError> {
        self.inner.wait(submission)
    }

    fn allocated(&self) -> u64 {
        self.inner.allocated()
    }
}

/// A model on a driver with a log, which runs everything in order: what a swap changes comes from the swap.
pub fn prepare(
    model: &Model,
    tuning: Tuning,
    limits: Limits,
    swap: Option<Swap>,
) -> (Box<dyn Program>, Arc<Mutex<Log>>) {
    prepare_ordered(model, tuning, limits, swap, None)
}

/// The same, in an order drawn from a seed.
pub fn prepare_ordered(
    model: &Model,
    tuning: Tuning,
    limits: Limits,
    swap: Option<Swap>,
    seed: Option<u32>,
) -> (Box<dyn Program>, Arc<Mutex<Log>>) {
    prepare_on(model, tuning, limits, swap, Options { seed, ..Options::default() })
}

/// The same, on a host of that profile, in the order of its seed.
pub fn prepare_on(
    model: &Model,
    tuning: Tuning,
    limits: Limits,
    swap: Option<Swap>,
    options: Options,
) -> (Box<dyn Program>, Arc<Mutex<Log>>) {
    let (profile, log) = (options.profile.clone(), Arc::new(Mutex::new(Log::default())));
    let shared = log.clone();
    let open = move || {
        let (inner, log) = (SoftDriver::new(options.clone()), shared.clone());
        let buffers = HashMap::new();
        Ok(Box::new(Watch { inner, log, swap, scratch: None, buffers }) as Box<dyn Driver>)
    };
    let device = GpuDevice::new(profile, tuning, Box::new(open));
    let program = device.prepare(Arc::clone(&model.plan), model.weights.clone(), limits);
    (program.expect("the plan is prepared"), log)
}
