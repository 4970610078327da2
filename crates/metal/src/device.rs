//! The device: found, asked what it is, and how the driver is to work with it.

use std::sync::Arc;
use std::time::Duration;

use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLDevice, MTLGPUFamily};

use crate::family::{Facts, Family};
use crate::system::System;

/// A Metal device.
pub type Device = Retained<ProtocolObject<dyn MTLDevice>>;

/// Whether to use tensor operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorUse {
    /// Where device and system have them and they pass a test.
    Auto,
    /// Never.
    Off,
}

/// How the driver works.
#[derive(Clone)]
pub struct Options {
    /// The system.
    pub system: System,
    /// Tensor operations.
    pub tensors: TensorUse,
    /// Rows, columns and inner size of the product that tensor operations are tested with. Small ones have been seen to
    /// come out right where large ones do not.
    pub tensor_test: [u32; 3],
    /// Seconds that a command buffer should take at most.
    pub part_seconds: f64,
    /// The device is taken for lost if no command buffer ends for this long.
    pub patience: Duration,
    /// Told, in one line, what the user should know.
    pub notify: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Options {
    /// The default on a system.
    pub fn on(system: System) -> Self {
        Self {
            system,
            tensors: TensorUse::Auto,
            tensor_test: [1040, 512, 2048],
            part_seconds: 0.1,
            patience: Duration::from_secs(60),
            notify: Arc::new(|line| eprintln!("{line}")),
        }
    }
}

#[cfg(target_os = "macos")]
impl Default for Options {
    fn default() -> Self {
        Self::on(System::read())
    }
}

/// What a device says of itself, or why it is of no use.
pub(crate) fn facts(device: &ProtocolObject<dyn MTLDevice>) -> Result<Facts, String> {
    let name = device.name().to_string();
    let families = [
        (MTLGPUFamily::Apple10, Family::Apple10),
        (MTLGPUFamily::Apple9, Family::Apple9),
        (MTLGPUFamily::Apple8, Family::Apple8),
        (MTLGPUFamily::Apple7, Family::Apple7),
    ];
    let family = families.iter().find(|(f, _)| device.supportsFamily(*f)).map(|(_, f)| *f);
    let mut facts = Facts {
        name,
        family: Family::Apple7,
        threadgroup_memory: device.maxThreadgroupMemoryLength() as u64,
        max_buffer: device.maxBufferLength() as u64,
        working_set: device.recommendedMaxWorkingSetSize(),
        unified: device.hasUnifiedMemory(),
    };
    match family {
        Some(family) => facts.family = family,
        // A virtual machine's device names an older family than the one that it runs on.
        None if facts.is_paravirtual() => {}
        None => return Err(format!("{} is no GPU of Apple's M series", facts.name)),
    }
    Ok(facts)
}

// Metal finds the system's device only in programs that are linked with it.
#[cfg(target_os = "macos")]
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

/// The system's device.
#[cfg(target_os = "macos")]
pub(crate) fn system_device() -> Result<Device, String> {
    objc2_metal::MTLCreateSystemDefaultDevice()
        .ok_or_else(|| "the system has no Metal device".into())
}
