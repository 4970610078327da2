//! The CPU as a [`Device`].

use std::sync::Arc;

use lily_device::{Device, Limits, MemoryNeed, PrepareError, Program, Weight};
use lily_ops::{Case, CaseOutputs, CaseWeight, Plan};

use crate::pool::Pool;
use crate::program::{CpuProgram, Executor, memory_need, unsupported};
use crate::simd::Isa;

/// How the CPU is used.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Threads, the caller included; `None` takes one a core that this process may use.
    pub threads: Option<usize>,
    /// Instruction set; `None` takes the best.
    pub isa: Option<Isa>,
}

/// The default device: every machine has one.
#[derive(Debug)]
pub struct CpuDevice {
    pool: Arc<Pool>,
    isa: Isa,
}

impl CpuDevice {
    /// Starts the threads.
    pub fn new(options: CpuOptions) -> Self {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = options.threads.unwrap_or_else(cores).clamp(1, 1024);
        Self { pool: Arc::new(Pool::new(threads)), isa: options.isa.unwrap_or_else(Isa::detect) }
    }
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        format!("cpu ({}, {} threads)", self.isa, self.pool.threads())
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> MemoryNeed {
        memory_need(plan, limits, self.pool.threads())
    }

    fn prepare(
        &self,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, PrepareError> {
        if weights.len() != plan.weights.len() {
            return Err(PrepareError::Invalid(format!(
                "{} weights are given, the plan has {}",
                weights.len(),
                plan.weights.len()
            )));
        }
        plan.check().map_err(PrepareError::Invalid)?;
        for (spec, weight) in plan.weights.iter().zip(&weights) {
            weight.check(spec).map_err(PrepareError::Invalid)?;
        }
        if limits.slots == 0 || limits.rows == 0 || limits.outputs == 0 {
            return Err(PrepareError::Invalid(format!(
                "slots, rows and outputs must be at least one: {limits:?}"
            )));
        }
        self.refuse_unsupported(&plan)?;
        let executor = Executor::new(Arc::clone(&self.pool), self.isa, plan, weights, limits)?;
        Ok(Box::new(CpuProgram::new(executor)))
    }

    fn evaluate(&self, case: &Case) -> Result<CaseOutputs, PrepareError> {
        self.refuse_unsupported(&case.plan)?;
        let weights = case.weights.iter().map(owned_weight).collect();
        let longest = case.slots.iter().map(|s| s.position).max().unwrap_or(0);
        let mut limits =
            Limits::new(case.slots.len(), longest + case.tokens.len(), case.tokens.len());
        limits.outputs = case.output_rows.len().max(1);
        let plan = Arc::new(case.plan.clone());
        let executor = Executor::new(Arc::clone(&self.pool), self.isa, plan, weights, limits)?;
        Ok(CpuProgram::new(executor).evaluate(case))
    }
}

impl CpuDevice {
    fn refuse_unsupported(&self, plan: &Plan) -> Result<(), PrepareError> {
        match unsupported(plan) {
            list if list.is_empty() => Ok(()),
            list => {
                Err(PrepareError::Unsupported { device: self.name(), operations: list.join("; ") })
            }
        }
    }
}

fn owned_weight(w: &CaseWeight) -> Weight {
    let bytes = |b: &[u8]| lily_checkpoint::TensorBytes::Owned(Arc::from(b));
    let part = |b: &[u8]| (!b.is_empty()).then(|| bytes(b));
    Weight {
        codes: bytes(&w.codes),
        scales: part(&w.scales),
        biases: part(&w.biases),
        strides: w.strides,
    }
}
