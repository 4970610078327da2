//! Opening a model: checkpoint, tokenizer, template, engine.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use lily_chat::{ChatTemplate, GenerationDefaults, Tokenizer, find_template, generation_defaults};
use lily_checkpoint::Checkpoint;
use lily_device::Device;
use lily_engine::{
    Engine, EngineError, EngineOptions, MAX_CHECKPOINT_BYTES, MAX_CHECKPOINTS, SampleParams,
    snapshot_bytes,
};
use lily_model::{Model, load};
use lily_ops::sample::TokenMask;

use crate::failure::Failure;
use crate::options::{ComputeArgs, ModelArgs};
use crate::resolve::{Source, resolve};

/// A checkpoint and what it means.
pub struct Opened {
    pub checkpoint: Checkpoint,
    pub model: Model,
}

/// Opens a checkpoint: a folder, a model in the cache, or the built-in one.
pub fn open_checkpoint(name: Option<&Path>) -> anyhow::Result<Checkpoint> {
    match resolve(name)? {
        Source::Folder(path) => Ok(Checkpoint::open(&path)?),
        Source::Demo => Ok(lily_demo::open()?),
    }
}

impl Opened {
    pub fn new(args: &ModelArgs, compute: &ComputeArgs) -> anyhow::Result<Self> {
        let checkpoint = open_checkpoint(args.model.as_deref())?;
        let model = load(&checkpoint, compute.precision())
            .with_context(|| format!("{} cannot be run", checkpoint.source()))?;
        Ok(Self { checkpoint, model })
    }

    pub fn vocab(&self) -> usize {
        self.model.config.vocab_size
    }

    /// The tokenizer, if the checkpoint has one.
    pub fn tokenizer(&self) -> anyhow::Result<Option<Arc<Tokenizer>>> {
        let Some(json) = self.checkpoint.text_file("tokenizer.json")? else { return Ok(None) };
        let config = self.checkpoint.text_file("tokenizer_config.json")?;
        let tokenizer = Tokenizer::from_json(&json, config.as_deref())
            .with_context(|| format!("the tokenizer of {}", self.checkpoint.source()))?;
        Ok(Some(Arc::new(tokenizer)))
    }

    /// The tokenizer of a checkpoint that needs one.
    pub fn need_tokenizer(&self) -> anyhow::Result<Arc<Tokenizer>> {
        self.tokenizer()?.ok_or_else(|| {
            Failure::new(
                format!("{} has no tokenizer.json", self.checkpoint.source()),
                "take the tokenizer files published with the model, or give token ids with --token-ids",
            )
            .into()
        })
    }

    pub fn template(&self, tokenizer: &Tokenizer) -> anyhow::Result<ChatTemplate> {
        let file = self.checkpoint.text_file("chat_template.jinja")?;
        let config = self.checkpoint.text_file("tokenizer_config.json")?;
        let source = find_template(file.as_deref(), config.as_deref()).ok_or_else(|| {
            Failure::new(
                format!("{} has no chat template", self.checkpoint.source()),
                "take chat_template.jinja as published with the model, or give token ids with --token-ids",
            )
        })?;
        ChatTemplate::new(&source, tokenizer)
            .with_context(|| format!("the chat template of {}", self.checkpoint.source()))
    }

    pub fn defaults(&self) -> anyhow::Result<GenerationDefaults> {
        let file = self.checkpoint.text_file("generation_config.json")?;
        generation_defaults(file.as_deref(), self.checkpoint.config())
            .with_context(|| format!("the generation defaults of {}", self.checkpoint.source()))
    }

    /// The tokens that text may consist of: those that the tokenizer names.
    pub fn named_tokens(&self, tokenizer: &Tokenizer) -> Arc<TokenMask> {
        let named: Vec<bool> = (0..self.vocab() as u32).map(|id| tokenizer.names(id)).collect();
        Arc::new(TokenMask::new(&named))
    }

    /// Refuses a context that the model was not made for.
    pub fn check_context(&self, context: usize) -> Result<(), Failure> {
        let max = self.model.config.max_position_embeddings;
        match context <= max {
            true => Ok(()),
            false => Err(Failure::new(
                format!(
                    "a context of {context} tokens is more than the {max} that the model was made for"
                ),
                "shorten the input, or use a smaller --context",
            )),
        }
    }

    /// Refuses sampling parameters that this model cannot follow.
    pub fn check_sampling(&self, params: &SampleParams) -> Result<(), Failure> {
        params.check(self.vocab()).map_err(|what| {
            Failure::new(what, "token ids are those of this model's tokenizer.json")
        })
    }

    /// The model on the device, for one session of `context` tokens.
    pub fn engine(&self, compute: &ComputeArgs, context: usize) -> anyhow::Result<Engine> {
        self.prepare(compute, EngineOptions::new(context, 1, compute.chunk()))
    }

    /// As [`engine`](Self::engine), for a session that keeps checkpoints.
    pub fn engine_with_checkpoints(
        &self,
        compute: &ComputeArgs,
        context: usize,
    ) -> anyhow::Result<Engine> {
        let all = snapshot_bytes(&self.model.plan, context).saturating_mul(MAX_CHECKPOINTS as u64);
        let snapshot_bytes = all.min(MAX_CHECKPOINT_BYTES as u64);
        let options = EngineOptions::new(context, 1, compute.chunk());
        self.prepare(compute, EngineOptions { snapshot_bytes, ..options })
    }

    fn prepare(&self, compute: &ComputeArgs, options: EngineOptions) -> anyhow::Result<Engine> {
        Ok(self.engines(compute.device()?.into())(options)?)
    }

    /// What prepares engines for this model on a device.
    pub fn engines(
        &self,
        device: Arc<dyn Device>,
    ) -> impl Fn(EngineOptions) -> Result<Engine, EngineError> + Send + use<> {
        let (plan, weights) = (Arc::clone(&self.model.plan), self.model.weights.clone());
        move |options: EngineOptions| {
            // A step that turns out to be one too many is taken back, where two in flight save time.
            let options = EngineOptions { undo: options.undo || device.overlaps(), ..options };
            Engine::new(&*device, Arc::clone(&plan), weights.clone(), options)
        }
    }
}
