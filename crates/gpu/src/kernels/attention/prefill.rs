//! Attention over prompts.

use super::Attend;
use crate::kernels::common::Context;
use crate::list::Recorder;

/// Records causal flash attention of a step.
pub fn attention_prefill(_r: &mut Recorder, _c: &Context, _attend: &Attend) {}
