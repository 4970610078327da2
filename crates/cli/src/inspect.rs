//! `lily inspect`: what a checkpoint is and what it takes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use lily_checkpoint::{Checkpoint, VerifyReport};
use lily_device::{MemoryLimit, Plan};
use lily_engine::{Budget, EngineOptions, Machine, budget};
use lily_model::{Claim, Layout, ModelConfig, Precision, load, plan_of_config};
use lily_ops::{ElementType, WeightFormat};

use crate::failure::Failure;
use crate::model::open_checkpoint;
use crate::options::{ComputeArgs, count};
use crate::output::{Progress, Stdout};
use crate::report;

/// Context that memory is computed for, unless asked otherwise.
const CONTEXT: usize = 8192;

/// Show what a checkpoint is: shape, quantization, bytes, memory.
///
/// Reads headers only, and the values of the norms. Of a folder with nothing but a config.json, shape and
/// budgets are shown.
#[derive(Args)]
pub struct InspectArgs {
    /// A checkpoint folder, ORG/NAME or ORG/NAME@REVISION of a downloaded model, or `demo`. Default: the built-in
    /// model.
    #[arg(value_name = "MODEL")]
    pub dir: Option<PathBuf>,

    /// Read every byte: checksums of the files, and values that are not finite. Fails if anything is wrong.
    #[arg(long)]
    pub verify: bool,

    /// Tokens that memory is computed for. Default: 8192, or what the model was made for if that is less.
    #[arg(long, value_name = "N", value_parser = count)]
    pub context: Option<usize>,

    /// List every tensor and the role that claimed it or the rule that skips it.
    #[arg(long)]
    pub tensors: bool,

    #[command(flatten)]
    pub compute: ComputeArgs,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// What is known of one checkpoint.
pub struct Inspection {
    pub source: String,
    /// `None` where there is a config only.
    pub files: Option<Files>,
    pub config: ModelConfig,
    pub classes: Vec<Class>,
    pub context: usize,
    pub chunk: usize,
    pub precise: bool,
    pub device: String,
    pub budget: Budget,
    /// KV cache bytes of one token.
    pub kv_token: u64,
    pub machine: Machine,
    pub limit: MemoryLimit,
}

/// The files of a checkpoint and what became of their tensors.
pub struct Files {
    pub layout: Layout,
    pub shards: Vec<(String, u64)>,
    pub tensors: Vec<TensorEntry>,
}

impl Files {
    pub fn claimed(&self) -> usize {
        self.tensors.iter().filter(|t| matches!(t.claim, Claim::Role(_))).count()
    }

    /// Tensors and bytes skipped, by rule.
    pub fn skipped(&self) -> BTreeMap<&'static str, (usize, u64)> {
        let mut rules = BTreeMap::new();
        for tensor in &self.tensors {
            if let Claim::Skipped(rule) = tensor.claim {
                let (tensors, bytes) = rules.entry(rule).or_insert((0, 0));
                *tensors += 1;
                *bytes += tensor.bytes;
            }
        }
        rules
    }
}

/// One tensor.
pub struct TensorEntry {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: u64,
    pub claim: Claim,
}

/// One class of weights.
pub struct Class {
    pub name: &'static str,
    /// Storage formats, `4-bit` and the like.
    pub formats: Vec<&'static str>,
    /// Bytes in the checkpoint.
    pub bytes: u64,
    /// Bytes that one decoded token reads.
    pub token: u64,
}

/// Runs the command.
pub fn inspect(args: &InspectArgs) -> anyhow::Result<()> {
    let mut out = Stdout::new();
    let config_only = args.dir.as_deref().filter(|dir| has_config_alone(dir));
    if let Some(dir) = config_only {
        if args.verify || args.tensors {
            return Err(Failure::new(
                format!("{} holds a config.json and no tensors", dir.display()),
                "leave out --verify and --tensors, or name a folder with *.safetensors files",
            )
            .into());
        }
        let inspection = of_config(args, dir)?;
        report::print(&mut out, args, &inspection, None)?;
        return Ok(());
    }
    let checkpoint = open_checkpoint(args.dir.as_deref())?;
    let inspection = of_checkpoint(args, &checkpoint)?;
    let verified = match args.verify {
        true => Some(verify(&checkpoint)?),
        false => None,
    };
    report::print(&mut out, args, &inspection, verified.as_ref())?;
    match verified.is_none_or(|report| report.is_clean()) {
        true => Ok(()),
        false => Err(Failure::new(
            format!("{} is damaged: see the report", checkpoint.source()),
            "download the files that it names again",
        )
        .into()),
    }
}

/// Whether a folder has a config and no weight file: as `lily bench synth --config-only` writes it.
fn has_config_alone(dir: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(dir) else { return false };
    let names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    let weights = |name: &String| {
        [".safetensors", ".safetensors.index.json", ".bin", ".gguf"]
            .iter()
            .any(|end| name.ends_with(end))
    };
    names.iter().any(|name| name == "config.json") && !names.iter().any(weights)
}

/// The plan of a model, of a config.json alone too, and where it comes from.
pub fn plan_of(model: Option<&Path>, precision: Precision) -> anyhow::Result<(String, Plan)> {
    if let Some(dir) = model.filter(|dir| has_config_alone(dir)) {
        let source = dir.display().to_string();
        let (_, plan) = plan_of_config(&source, &Checkpoint::read_config(dir)?, precision)?;
        return Ok((source, plan));
    }
    let checkpoint = open_checkpoint(model)?;
    let plan = load(&checkpoint, precision)?.plan;
    Ok((checkpoint.source().to_string(), (*plan).clone()))
}

fn of_config(args: &InspectArgs, dir: &Path) -> anyhow::Result<Inspection> {
    let value = Checkpoint::read_config(dir)?;
    let source = dir.display().to_string();
    let (config, plan) = plan_of_config(&source, &value, args.compute.precision())?;
    let classes = classes(&plan, |_| None);
    inspection(args, source, None, config, &plan, classes)
}

fn of_checkpoint(args: &InspectArgs, checkpoint: &Checkpoint) -> anyhow::Result<Inspection> {
    let model = load(checkpoint, args.compute.precision())?;
    let claims: BTreeMap<&str, &Claim> =
        model.claims.iter().map(|(name, claim)| (name.as_str(), claim)).collect();
    let entry = |tensor: &lily_checkpoint::Tensor| {
        let claim = claims.get(tensor.name.as_str()).copied()?.clone();
        Some(TensorEntry {
            name: tensor.name.clone(),
            dtype: tensor.dtype.name(),
            shape: tensor.shape.clone(),
            bytes: tensor.data.len(),
            claim,
        })
    };
    let files = Files {
        layout: model.layout,
        shards: checkpoint.shards().iter().map(|s| (s.name().to_owned(), s.len())).collect(),
        tensors: checkpoint.tensors().filter_map(entry).collect(),
    };
    let by_role = bytes_by_class(&files, &model.plan);
    let classes = classes(&model.plan, |class| by_role.get(class).copied());
    let source = checkpoint.source().to_owned();
    inspection(args, source, Some(files), model.config.clone(), &model.plan, classes)
}

/// Checkpoint bytes of each class: those of the tensors that its roles claimed.
fn bytes_by_class(files: &Files, plan: &Plan) -> BTreeMap<&'static str, u64> {
    let class: BTreeMap<&str, &'static str> =
        plan.weights.iter().map(|w| (w.role.as_str(), w.class)).collect();
    let mut bytes = BTreeMap::new();
    for tensor in &files.tensors {
        // A tensor that serves two roles of one class names one of them.
        if let Claim::Role(role) = &tensor.claim
            && let Some(class) = class.get(role.as_str())
        {
            *bytes.entry(*class).or_insert(0) += tensor.bytes;
        }
    }
    bytes
}

/// The classes of a plan, in its order. `stored` tells the bytes in the checkpoint where they are known.
fn classes(plan: &Plan, stored: impl Fn(&str) -> Option<u64>) -> Vec<Class> {
    let mut classes: Vec<Class> = Vec::new();
    for weight in &plan.weights {
        let index = classes.iter().position(|c| c.name == weight.class).unwrap_or_else(|| {
            classes.push(Class { name: weight.class, formats: vec![], bytes: 0, token: 0 });
            classes.len() - 1
        });
        let class = &mut classes[index];
        class.bytes += weight.bytes();
        let format = format_name(weight.format);
        if !class.formats.contains(&format) {
            class.formats.push(format);
        }
    }
    let read: BTreeMap<&str, u64> = plan.bytes_per_token().into_iter().collect();
    for class in &mut classes {
        class.bytes = stored(class.name).unwrap_or(class.bytes);
        class.token = read.get(class.name).copied().unwrap_or(0);
    }
    classes
}

fn format_name(format: WeightFormat) -> &'static str {
    match format {
        WeightFormat::Affine { bits: 4 } => "4-bit",
        WeightFormat::Affine { .. } => "8-bit",
        WeightFormat::Dense(ElementType::Bf16) => "bf16",
        WeightFormat::Dense(_) => "f32",
    }
}

fn inspection(
    args: &InspectArgs,
    source: String,
    files: Option<Files>,
    config: ModelConfig,
    plan: &Plan,
    classes: Vec<Class>,
) -> anyhow::Result<Inspection> {
    let device = args.compute.device()?;
    let context = args.context.unwrap_or(CONTEXT.min(config.max_position_embeddings));
    let chunk = args.compute.chunk();
    let options = EngineOptions::new(context, 1, chunk);
    Ok(Inspection {
        source,
        files,
        config,
        classes,
        context,
        chunk,
        precise: args.compute.precise,
        device: device.name(),
        budget: budget(&*device, plan, &options),
        kv_token: (plan.state.page_bytes() / lily_ops::plan::PAGE_TOKENS) as u64,
        machine: Machine::detect(),
        limit: device.memory_limit(),
    })
}

fn verify(checkpoint: &Checkpoint) -> anyhow::Result<VerifyReport> {
    let mut progress = Progress::new("verifying:", false);
    let total = checkpoint.total_bytes();
    Ok(checkpoint.verify(|done| progress.bytes(done, total))?)
}
