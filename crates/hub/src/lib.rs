//! Models in the Hugging Face cache: where they lie, whether they are complete, how they get there.
//!
//! ```text
//! ORG/NAME[@revision] ──Spec── Cache::find ──► folder of a snapshot, if it is complete
//!                         └─── Hub::pull ────► listing ► blobs (resumed, summed) ► snapshot ► ref
//! ```
//!
//! The layout is that of `huggingface_hub`, so that what either has downloaded serves both:
//! `models--ORG--NAME/{blobs,refs,snapshots/<commit>}`, files of a snapshot being links into `blobs`. Nothing
//! has its final name before all of its bytes are there and their sum is right.
//!
//! This crate knows no model and no device.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod blob;
mod cache;
mod client;
mod error;
mod listing;
mod pull;
mod spec;
mod store;

pub use cache::{Cache, CachedModel, missing_files};
pub use client::{Hub, HubOptions};
pub use error::{HubError, TokenUse};
pub use pull::{Event, Pulled};
pub use spec::{Repo, Spec};
