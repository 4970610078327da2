//! A GPU as a device of the engine.

use std::sync::Arc;

use lily_device::{Device, Limits, MemoryNeed, PrepareError, Program, Weight};
use lily_ops::{Case, CaseOutputs, Plan};

use crate::driver::{Driver, DriverError};
use crate::evaluate::{EvaluateError, evaluate};
use crate::profile::Profile;
use crate::program::{GpuProgram, memory_need};
use crate::tuning::Tuning;

/// Opens a driver: one for each program.
pub type Open = Box<dyn Fn() -> Result<Box<dyn Driver>, DriverError> + Send + Sync>;

/// A GPU. Each program has a driver of its own, so that one that is lost takes no other with it.
pub struct GpuDevice {
    profile: Profile,
    tuning: Tuning,
    open: Open,
}

impl GpuDevice {
    /// A device of this profile whose drivers `open` opens.
    pub fn new(profile: Profile, tuning: Tuning, open: Open) -> Self {
        Self { profile, tuning, open }
    }

    /// What the device is.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }
}

impl Device for GpuDevice {
    fn name(&self) -> String {
        self.profile.name.clone()
    }

    /// Not where the host chooses each token: its next step waits for it.
    fn overlaps(&self) -> bool {
        self.tuning.token_handoff
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> MemoryNeed {
        // What cannot be recorded is refused by `prepare`, with its reason.
        memory_need(plan, limits, &self.tuning, &self.profile).unwrap_or_default()
    }

    fn prepare(
        &self,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, PrepareError> {
        if plan.state.cache_element != lily_ops::ElementType::Bf16 {
            return Err(PrepareError::Unsupported {
                device: self.name(),
                operations: "a cache of f32: precise mode is the CPU's; leave out --precise".into(),
            });
        }
        let driver = (self.open)().map_err(|e| match e {
            DriverError::OutOfMemory { .. } => PrepareError::OutOfMemory(e.to_string()),
            e => PrepareError::Invalid(e.to_string()),
        })?;
        Ok(Box::new(GpuProgram::new(driver, self.tuning, plan, &weights, limits)?))
    }

    fn evaluate(&self, case: &Case) -> Result<CaseOutputs, PrepareError> {
        let mut driver = (self.open)().map_err(|e| PrepareError::Invalid(e.to_string()))?;
        evaluate(&mut *driver, &self.tuning, case).map(|(outputs, _)| outputs).map_err(
            |e| match e {
                EvaluateError::Unsupported(operations) => {
                    PrepareError::Unsupported { device: self.name(), operations }
                }
                e => PrepareError::Invalid(e.to_string()),
            },
        )
    }
}
