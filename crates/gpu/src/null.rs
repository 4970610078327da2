//! A driver without a device: buffers are numbers. For plans of devices that are not there.

use std::sync::Arc;

use crate::driver::{Buffer, Driver, DriverError, Pipeline, Placement, Submission, Timing};
use crate::list::CommandList;
use crate::profile::Profile;
use crate::text::Text;

/// Counts bytes and hands out numbers; nothing runs on it.
#[derive(Debug)]
pub struct NullDriver {
    profile: Profile,
    next: u32,
    bytes: u64,
}

impl NullDriver {
    /// A driver that has the given profile and no memory in use.
    pub fn new(profile: Profile) -> Self {
        Self { profile, next: 0, bytes: 0 }
    }
}

impl Driver for NullDriver {
    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn allocate(&mut self, _: &str, bytes: u64, _: Placement) -> Result<Buffer, DriverError> {
        self.next += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        Ok(Buffer(self.next))
    }

    fn release(&mut self, _: Buffer) {}

    fn write(&mut self, _: Buffer, _: u64, _: &[u8]) -> Result<(), DriverError> {
        Ok(())
    }

    fn read(&mut self, _: Buffer, _: u64, _: &mut [u8]) -> Result<(), DriverError> {
        Err(DriverError::Invalid("there is no device to read from".into()))
    }

    fn pipelines(
        &mut self,
        _: &Arc<Text>,
        _: &[&'static str],
    ) -> Result<Vec<Pipeline>, DriverError> {
        Err(DriverError::Invalid("there is no device to compile for".into()))
    }

    fn submit(&mut self, _: &Arc<CommandList>) -> Result<Submission, DriverError> {
        Err(DriverError::Invalid("there is no device to run on".into()))
    }

    fn wait(&mut self, _: Submission) -> Result<Timing, DriverError> {
        Err(DriverError::Invalid("there is no device to wait for".into()))
    }

    fn allocated(&self) -> u64 {
        self.bytes
    }
}
