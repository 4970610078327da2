//! What GPU devices share, whatever their vendor: the kernel sources in one dialect, the lowering of a plan to
//! dispatches, barriers from read and write ranges, policies, weight upload. A vendor's crate brings a
//! [`Driver`].
//!
//! The dialect is a subset of the Metal Shading Language that `kernels/platform_*.h` map to Metal, to CUDA and to
//! the host's C++; docs/kernels.md describes it.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod args;
pub mod chains;
pub mod conformance;
pub mod device;
pub mod driver;
pub mod encode;
pub mod evaluate;
pub mod fuse;
pub mod kernels;
pub mod list;
pub mod memory;
pub mod null;
pub mod parts;
pub mod profile;
pub mod program;
pub mod report;
pub mod scratch;
pub mod text;
pub mod thresholds;
pub mod tuning;
pub mod upload;
pub mod values;

pub use device::GpuDevice;
pub use driver::{Buffer, Driver, DriverError, Pipeline, Placement, Submission, Timing};
pub use kernels::common::{Context, DeviceWeight, Matrix, StepShape, Tables};
pub use list::{Access, Binding, CommandList, Cut, Dispatch, Operand, Recorder};
pub use profile::{Platform, Profile};
pub use text::{Shape, Text};
pub use thresholds::Thresholds;
pub use tuning::Tuning;
