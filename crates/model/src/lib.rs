//! The Qwen3.5 / Qwen3.6 mixture-of-experts family: the only crate that names a model.
//!
//! [`load`] turns a checkpoint into a [`Model`]: its [`ModelConfig`] read without defaults for anything
//! that changes numbers, every tensor claimed by a role or skipped by a named rule, and the [`Plan`] that
//! devices prepare. Nothing is computed here and no weight is copied.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod bind;
mod config;
mod error;
mod fields;
mod lower;
mod names;
mod norms;
mod quantization;
mod rope;

use std::sync::Arc;

use lily_checkpoint::Checkpoint;
use lily_device::Weight;
use lily_ops::Plan;

pub use bind::{Claim, Layout};
pub use config::ModelConfig;
pub use error::ModelError;
pub use quantization::{ModuleQuantization, Quantization};

/// How activations are held between operations and taken by linear operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Inputs of 4-bit matrices in 15 bits, those of the routed experts' gate and up projections in int8
    /// (f32 where only one of the two is 4-bit); K, V and the convolution's state in bf16; all else f32.
    #[default]
    Standard,
    /// Everything f32.
    Precise,
}

/// A checkpoint understood: what to compute, and with which bytes.
#[derive(Clone, Debug)]
pub struct Model {
    /// The numbers of its config.
    pub config: ModelConfig,
    /// The operations of one forward pass.
    pub plan: Arc<Plan>,
    /// The bytes of the plan's weights, in its order.
    pub weights: Vec<Weight>,
    /// What became of each tensor of the checkpoint, by name.
    pub claims: Vec<(String, Claim)>,
    /// How the checkpoint names and lays out its tensors.
    pub layout: Layout,
}

/// Reads a checkpoint's config and headers, and the values of its norms; binds every tensor; lowers the plan.
pub fn load(checkpoint: &Checkpoint, precision: Precision) -> Result<Model, ModelError> {
    let config = ModelConfig::read(checkpoint.config())?;
    let quantization = Quantization::read(checkpoint.config())?;
    let mut binder = bind::Binder::new(checkpoint, &config, &quantization)?;
    let lowered = lower::lower(checkpoint.source(), &config, precision, &mut binder)?;
    let layout = binder.layout();
    let claims = binder.finish()?;
    norms::check(&lowered, layout)?;
    lowered.plan.check().map_err(ModelError::Plan)?;
    for (spec, weight) in lowered.plan.weights.iter().zip(&lowered.weights) {
        weight.check(spec).map_err(ModelError::Plan)?;
    }
    Ok(Model { config, plan: Arc::new(lowered.plan), weights: lowered.weights, claims, layout })
}

/// The plan of a config alone, with weights of the given quantization and no bytes: for budgets and for
/// checkpoints that are yet to be written.
pub fn plan_of_config(
    name: &str,
    config: &serde_json::Value,
    precision: Precision,
) -> Result<(ModelConfig, Plan), ModelError> {
    let parsed = ModelConfig::read(config)?;
    let quantization = Quantization::read(config)?;
    let mut binder = bind::Binder::of_config(&quantization);
    let lowered = lower::lower(name, &parsed, precision, &mut binder)?;
    lowered.plan.check().map_err(ModelError::Plan)?;
    Ok((parsed, lowered.plan))
}
