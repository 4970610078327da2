//! Which GPU the tests of GPU kernels run on.

use lily_gpu::device::Open;
use lily_gpu::{Driver, GpuDevice, Platform, Tuning};
use lily_ops::sample::SampleParams;
use lily_softgpu::{Options, SoftDriver};

/// Opens drivers: of the kernels thread by thread on the host, or with LILY_GPU=cuda or LILY_GPU=metal of the GPU of this machine
/// (Metal's in software where the build has `--cfg metal_soft`), with LILY_GPU=units on the host with the kernels by matrix units that
/// only CUDA devices have.
pub fn opener() -> Open {
    match std::env::var("LILY_GPU").as_deref() {
        Ok("cuda") => Box::new(|| {
            let options = lily_cuda::Options::default();
            Ok(Box::new(lily_cuda::CudaDriver::open(options)?))
        }),
        #[cfg(not(all(metal_soft, not(target_os = "macos"))))]
        Ok("metal") => Box::new(lily_metal::open),
        #[cfg(all(metal_soft, not(target_os = "macos")))]
        Ok("metal") => crate::metal::open(lily_softmetal::Caps::without_tensors()).1,
        Ok("units") => Box::new(|| Ok(Box::new(SoftDriver::new(units())))),
        Ok(name) => panic!("LILY_GPU={name}; there are cuda, metal and units"),
        Err(_) => Box::new(|| Ok(Box::new(SoftDriver::new(Options::default())))),
    }
}

/// The host as a device with `mma.sync` and `wgmma`.
pub fn units() -> Options {
    let mut options = Options::default();
    (options.profile.mma, options.profile.wgmma, options.profile.cores) = (true, true, 132);
    options.profile.threadgroup_memory = 48 << 10;
    options.profile.platform = Platform::HostUnits;
    options
}

/// Sampling with every rule at work.
pub fn drawn() -> SampleParams {
    SampleParams {
        temperature: 0.9,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.01,
        repetition_penalty: 1.1,
        presence_penalty: 0.3,
        frequency_penalty: 0.2,
        seed: 7,
        ..SampleParams::GREEDY
    }
}

/// Whether the kernels run thread by thread on the host.
pub fn is_emulated() -> bool {
    std::env::var("LILY_GPU").is_ok_and(|name| name == "units")
        || std::env::var_os("LILY_GPU").is_none()
}

/// A driver of that GPU.
pub fn driver() -> Box<dyn Driver> {
    opener()().expect("the device opens")
}

/// That GPU as a device.
pub fn device(tuning: Tuning) -> GpuDevice {
    let open = opener();
    let profile = open().expect("the device opens").profile().clone();
    GpuDevice::new(profile, tuning, open)
}
