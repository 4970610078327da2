//! What is said where there is no device, and that a device runs a kernel where there is one.

use std::sync::Arc;

use lily_cuda::{CudaDriver, Options, unavailable};
use lily_gpu::{
    Access, Binding, Driver, DriverError, Operand, Placement, Platform, Recorder, Shape, Text,
    kernel_args,
};

mod args {
    use super::kernel_args;
    kernel_args! {
        /// Of `fill_words`.
        pub struct FillArgs { words: u32, value: u32 }
    }
}

#[test]
fn a_missing_device_is_named() {
    let beyond = Options { ordinal: 99, ..Options::default() };
    let Err(DriverError::Lost(why)) = CudaDriver::open(beyond) else {
        panic!("there is no device 99");
    };
    match unavailable() {
        Some(reason) => assert_eq!(why, reason, "the driver is missing for every number"),
        None => assert!(why.contains("there is no CUDA device 99"), "{why}"),
    }
}

/// Runs where there is a device; elsewhere the test above says why not.
#[test]
fn a_list_runs_again_as_a_graph() {
    if let Some(why) = unavailable() {
        println!("no device: {why}");
        return;
    }
    let mut driver = CudaDriver::open(Options::default()).expect("the device opens");
    let buffer = driver.allocate("words", 4096, Placement::Shared).expect("memory");
    let operand = Operand { buffer, offset: 0, bytes: 4096, element: lily_ops::ElementType::U32 };
    let mut r = Recorder::default();
    let args = args::FillArgs { words: 1000, value: 7 };
    let binding = Binding::new(operand, Access::Write);
    r.dispatch("fill_words", [4, 1, 1], 256, vec![binding], &args, 4000);
    let mut list = r.finish(true);
    let text = Arc::new(Text::new(Platform::Cuda, &Shape::default()));
    list.pipelines = driver.pipelines(&text, &["fill_words"]).expect("the text compiles");
    list.inputs = vec![(buffer, 0..4096)];
    list.outputs = vec![(buffer, 0..4096)];
    let list = Arc::new(list);
    for _ in 0..4 {
        driver.write(buffer, 0, &[0; 4096]).expect("the mirror is written");
        let submission = driver.submit(&list).expect("submitted");
        driver.wait(submission).expect("ran");
        let mut bytes = [0; 4096];
        driver.read(buffer, 0, &mut bytes).expect("read");
        let words: Vec<u32> = bytemuck::cast_slice(&bytes).to_vec();
        assert!(words[..1000].iter().all(|w| *w == 7) && words[1000..].iter().all(|w| *w == 0));
    }
}
