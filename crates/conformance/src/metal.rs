//! The Metal host code on a device in software.

use std::sync::Arc;
use std::time::Duration;

use lily_gpu::device::Open;
use lily_gpu::{Driver, Platform, Profile};
use lily_metal::system::System;
use lily_metal::{MetalDriver, Options};
use lily_softgpu::SoftDriver;
use lily_softmetal::{Caps, Soft};

/// Options for a device in software: a Mac of today, a small test of tensor operations, little patience.
pub fn options(notify: impl Fn(&str) + Send + Sync + 'static) -> Options {
    let system = System { os: (26, 2), memory: 64 << 30, wired_limit: None, gpu_cores: Some(40) };
    Options {
        tensor_test: [40, 64, 128],
        // A busy machine may take minutes for what is one command buffer on a Mac.
        patience: Duration::from_secs(900),
        notify: Arc::new(notify),
        ..Options::on(system)
    }
}

/// Opens drivers on a new device, and the device.
pub fn open(caps: Caps) -> (Arc<Soft>, Open) {
    open_with(caps, options(|line| println!("{line}")))
}

/// As [`open`] with other options.
pub fn open_with(caps: Caps, options: Options) -> (Arc<Soft>, Open) {
    let soft = Arc::new(Soft::new(caps));
    let device = soft.clone();
    let open: Open =
        Box::new(move || Ok(Box::new(MetalDriver::open_on(device.device(), options.clone())?)));
    (soft, open)
}

/// Opens drivers that run the same kernels without Metal, with policies for the same device.
pub fn softgpu(profile: &Profile) -> Open {
    let options = lily_softgpu::Options {
        profile: Profile { platform: Platform::Host, ..profile.clone() },
        ..lily_softgpu::Options::default()
    };
    Box::new(move || Ok(Box::new(SoftDriver::new(options.clone()))))
}

/// The profile of the drivers that `open` opens.
pub fn profile(open: &Open) -> Profile {
    let driver: Box<dyn Driver> = open().expect("the device opens");
    driver.profile().clone()
}
