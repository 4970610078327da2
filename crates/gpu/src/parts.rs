//! A list that may stop for the host.

use std::sync::Arc;

use crate::driver::{Driver, DriverError, Submission};
use crate::kernels::route::{HostTables, host_tables};
use crate::list::{CommandList, HostRoute};

/// A list in parts: after each but the last the host steps in.
#[derive(Debug)]
pub struct Parts(Vec<(Arc<CommandList>, Option<HostRoute>)>);

impl Parts {
    /// Cuts a list; its pipelines are set.
    pub fn new(list: CommandList) -> Self {
        if list.breaks.is_empty() {
            return Self(vec![(Arc::new(list), None)]);
        }
        Self(list.parts().into_iter().map(|(list, route)| (Arc::new(list), route)).collect())
    }

    /// Runs the parts; waits for all but the last.
    pub fn submit(&self, driver: &mut dyn Driver) -> Result<Submission, DriverError> {
        let mut last = Submission(0);
        for (list, route) in &self.0 {
            last = driver.submit(list)?;
            if let Some(route) = route {
                driver.wait(last)?;
                step_in(driver, route)?;
            }
        }
        Ok(last)
    }
}

fn step_in(driver: &mut dyn Driver, route: &HostRoute) -> Result<(), DriverError> {
    let mut ids = vec![0u32; route.entries as usize];
    driver.read(route.ids.buffer, route.ids.offset, bytemuck::cast_slice_mut(&mut ids))?;
    let HostTables { order, blocks } = host_tables(&ids, route.experts, route.cut);
    driver.write(route.order.buffer, route.order.offset, bytemuck::cast_slice(&order))?;
    driver.write(route.blocks.buffer, route.blocks.offset, bytemuck::cast_slice(&blocks))
}
