//! A GPU as a device of the engine.

use std::sync::{Arc, Mutex, PoisonError};

use lily_device::{Device, Limits, MemoryLimit, MemoryNeed, PrepareError, Program, Weight};
use lily_ops::{Case, CaseOutputs, Plan};

use crate::driver::{Driver, DriverError};
use crate::evaluate::{EvaluateError, evaluate};
use crate::kernels::common::StepShape;
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
    /// A driver that was opened for a question and becomes the next program's.
    spare: Mutex<Option<Box<dyn Driver>>>,
}

impl GpuDevice {
    /// A device of this profile whose drivers `open` opens.
    pub fn new(profile: Profile, tuning: Tuning, open: Open) -> Self {
        Self { profile, tuning, open, spare: Mutex::new(None) }
    }

    fn spare(&self) -> std::sync::MutexGuard<'_, Option<Box<dyn Driver>>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that a program can take at present.
    fn available(&self) -> Result<u64, DriverError> {
        let mut spare = self.spare();
        let driver = match spare.take() {
            Some(driver) => driver,
            None => (self.open)()?,
        };
        // One that cannot say is lost: it is not kept.
        let bytes = driver.available()?;
        *spare = Some(driver);
        Ok(bytes.min(self.profile.memory))
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

    /// Decode kernels and products by vectors take so many; the rest goes by tiles.
    fn few_rows(&self) -> Option<usize> {
        Some(StepShape::DECODE_ROWS as usize)
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> MemoryNeed {
        // What cannot be recorded is refused by `prepare`, with its reason.
        memory_need(plan, limits, &self.tuning, &self.profile).unwrap_or_default()
    }

    fn memory_limit(&self) -> MemoryLimit {
        // A device that cannot be opened is refused by `prepare`, with its reason.
        let bytes = self.available().unwrap_or(self.profile.memory);
        match self.profile.unified {
            true => MemoryLimit::HostWithin(bytes),
            false => MemoryLimit::Own(bytes),
        }
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
        let spare = self.spare().take();
        let driver = spare.map_or_else(|| (self.open)(), Ok).map_err(|e| match e {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::null::NullDriver;

    /// A device, and how often a driver was opened.
    fn device(name: &str, opens: bool) -> (GpuDevice, Arc<AtomicUsize>) {
        let profile = Profile::named(name).expect("a known profile");
        let (count, driver) = (Arc::new(AtomicUsize::new(0)), profile.clone());
        let counted = Arc::clone(&count);
        let open = move || -> Result<Box<dyn Driver>, DriverError> {
            counted.fetch_add(1, Ordering::SeqCst);
            match opens {
                true => Ok(Box::new(NullDriver::new(driver.clone()))),
                false => Err(DriverError::Lost("it is gone".into())),
            }
        };
        (GpuDevice::new(profile, Tuning::default(), Box::new(open)), count)
    }

    #[test]
    fn a_device_tells_what_it_may_take() {
        for (name, limit) in
            [("m1-max", MemoryLimit::HostWithin(48 << 30)), ("h200", MemoryLimit::Own(139 << 30))]
        {
            let (device, opened) = device(name, true);
            assert_eq!(device.memory_limit(), limit);
            // The driver stays for the next question and for the next program.
            assert_eq!(device.memory_limit(), limit);
            assert_eq!(opened.load(Ordering::SeqCst), 1);
        }
    }

    #[test]
    fn what_a_driver_has_given_away_is_not_there() {
        let (device, _) = device("h200", true);
        let mut driver = (device.open)().unwrap();
        driver.allocate("x", 39 << 30, crate::driver::Placement::Device).unwrap();
        *device.spare() = Some(driver);
        assert_eq!(device.memory_limit(), MemoryLimit::Own(100 << 30));
    }

    #[test]
    fn a_device_that_is_gone_is_refused_when_it_is_prepared() {
        let (device, opened) = device("h200", false);
        assert_eq!(device.memory_limit(), MemoryLimit::Own(139 << 30));
        assert_eq!(device.memory_limit(), MemoryLimit::Own(139 << 30));
        assert_eq!(opened.load(Ordering::SeqCst), 2);
    }
}
