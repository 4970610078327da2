//! Binds tensors to roles: finds them, checks shape, type and quantization, and notes what was claimed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use lily_checkpoint::{Checkpoint, Dtype, Tensor, TensorBytes};
use lily_device::Weight;
use lily_ops::plan::GROUP;
use lily_ops::{ElementType, WeightFormat, WeightSpec};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::names::{Prefix, dense_name, skip_rule};
use crate::quantization::{ModuleQuantization, Quantization};

/// What became of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It is (part of) the weight with this role.
    Role(String),
    /// It is skipped by a named rule.
    Skipped(&'static str),
}

/// How the checkpoint lays out its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// As MLX converters write it: experts in three stacks, norms hold the scale itself.
    Mlx,
    /// As the original: gate and up projections of the experts fused, norms hold the scale minus one.
    HuggingFace,
}

/// A weight of the plan and its bytes.
pub(crate) struct Bound {
    pub spec: WeightSpec,
    pub weight: Weight,
}

/// A part of an expert stack: `rows` rows of each matrix beginning at `first` of `of` stored rows.
#[derive(Clone, Copy)]
struct RowRange {
    first: usize,
    rows: usize,
    of: usize,
}

/// Finds tensors and remembers which were claimed.
pub(crate) struct Binder<'a> {
    checkpoint: Option<&'a Checkpoint>,
    quantization: &'a Quantization,
    prefix: Prefix,
    layout: Layout,
    claims: BTreeMap<String, Claim>,
    /// Names of all modules asked for, without `.weight`.
    stems: BTreeSet<String>,
}

impl<'a> Binder<'a> {
    pub fn new(
        checkpoint: &'a Checkpoint,
        config: &ModelConfig,
        quantization: &'a Quantization,
    ) -> Result<Self, ModelError> {
        let prefix = Prefix::detect(checkpoint)?;
        let layout = detect_layout(checkpoint, prefix, config)?;
        Ok(Self {
            checkpoint: Some(checkpoint),
            quantization,
            prefix,
            layout,
            claims: BTreeMap::new(),
            stems: BTreeSet::new(),
        })
    }

    /// A binder that finds every tensor, with the formats the config names and no bytes.
    pub fn of_config(quantization: &'a Quantization) -> Self {
        Self {
            checkpoint: None,
            quantization,
            prefix: crate::names::PREFIXES[0],
            layout: Layout::Mlx,
            claims: BTreeMap::new(),
            stems: BTreeSet::new(),
        }
    }

    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Name of a module of the text model in the checkpoint; notes that it exists.
    fn stem(&mut self, module: &str) -> String {
        let stem = match module {
            "lm_head" => format!("{}lm_head", self.prefix.head),
            _ => format!("{}{module}", self.prefix.model),
        };
        self.stems.insert(stem.clone());
        stem
    }

    fn get(&self, name: &str) -> Result<&'a Tensor, ModelError> {
        let checkpoint = self.checkpoint.expect("bytes are bound from a checkpoint");
        checkpoint.get(name).ok_or_else(|| ModelError::MissingTensor {
            name: name.into(),
            source_name: checkpoint.source().into(),
        })
    }

    /// Claims a tensor and checks its shape.
    fn claim(&mut self, name: &str, role: &str, shape: &[usize]) -> Result<&'a Tensor, ModelError> {
        let tensor = self.get(name)?;
        if tensor.shape != shape {
            return Err(bad_tensor(
                name,
                format!(
                    "its shape is {:?}, the config asks for {shape:?}; config.json and tensors are of different models",
                    tensor.shape
                ),
            ));
        }
        self.claims.insert(name.into(), Claim::Role(role.into()));
        Ok(tensor)
    }

    /// A matrix `[rows, cols]`, quantized or dense.
    pub fn linear(
        &mut self,
        role: &str,
        class: &'static str,
        [rows, cols]: [usize; 2],
    ) -> Result<Bound, ModelError> {
        self.matrix(role, role, class, None, RowRange { first: 0, rows, of: rows }, cols)
    }

    /// Gate, up and down projections of the experts of the layer whose MLP is `mlp`: stacks of matrices.
    pub fn experts(
        &mut self,
        mlp: &str,
        class: &'static str,
        c: &ModelConfig,
    ) -> Result<[Bound; 3], ModelError> {
        let (n, width, hidden) = (Some(c.experts), c.expert_width, c.hidden_size);
        let layout = self.layout;
        let mut stack = |module: &str, role: &str, [first, rows, of]: [usize; 3], cols| {
            let range = RowRange { first, rows, of };
            self.matrix(&format!("{mlp}.{module}"), &format!("{mlp}.{role}"), class, n, range, cols)
        };
        match layout {
            Layout::Mlx => {
                let (gate, up, down) =
                    ("switch_mlp.gate_proj", "switch_mlp.up_proj", "switch_mlp.down_proj");
                Ok([
                    stack(gate, gate, [0, width, width], hidden)?,
                    stack(up, up, [0, width, width], hidden)?,
                    stack(down, down, [0, hidden, hidden], width)?,
                ])
            }
            Layout::HuggingFace => {
                let (fused, down) = ("experts.gate_up_proj", "experts.down_proj");
                Ok([
                    stack(fused, "experts.gate_proj", [0, width, 2 * width], hidden)?,
                    stack(fused, "experts.up_proj", [width, width, 2 * width], hidden)?,
                    stack(down, down, [0, hidden, hidden], width)?,
                ])
            }
        }
    }

    fn matrix(
        &mut self,
        module: &str,
        role: &str,
        class: &'static str,
        stack: Option<usize>,
        range: RowRange,
        cols: usize,
    ) -> Result<Bound, ModelError> {
        let stem = self.stem(module);
        let format = match self.checkpoint {
            Some(checkpoint) => self.format(checkpoint, &stem, cols)?,
            None => self.said_format(&stem, cols)?,
        };
        let matrices = stack.unwrap_or(1);
        let spec =
            WeightSpec { role: role.into(), class, format, matrices, rows: range.rows, cols };
        if self.checkpoint.is_none() {
            return Ok(Bound { spec, weight: no_bytes() });
        }
        let shape =
            |cols: usize| -> Vec<usize> { stack.into_iter().chain([range.of, cols]).collect() };
        let part = |tensor: &Tensor, row_bytes: usize| -> (TensorBytes, usize) {
            let skip = (range.first * row_bytes) as u64;
            let rest = tensor.data.slice(skip, tensor.data.len() - skip);
            let rest = rest.expect("the shape was checked, and the range ends inside it");
            (TensorBytes::Mapped(rest), range.of * row_bytes)
        };
        let weight = match format {
            WeightFormat::Affine { bits } => {
                let words = cols * bits as usize / 32;
                let w = self.claim(&format!("{stem}.weight"), module, &shape(words))?;
                let s = self.claim(&format!("{stem}.scales"), module, &shape(cols / GROUP))?;
                let b = self.claim(&format!("{stem}.biases"), module, &shape(cols / GROUP))?;
                expect_dtype(w, Dtype::U32)?;
                expect_dtype(s, Dtype::BF16)?;
                expect_dtype(b, Dtype::BF16)?;
                let (codes, c) = part(w, format.row_bytes(cols));
                let (scales, st) = part(s, format.scale_bytes(cols));
                let (biases, bt) = part(b, format.scale_bytes(cols));
                Weight { codes, scales: Some(scales), biases: Some(biases), strides: [c, st, bt] }
            }
            WeightFormat::Dense(_) => {
                let w = self.claim(&dense_name(&stem), module, &shape(cols))?;
                let (codes, stride) = part(w, format.row_bytes(cols));
                Weight { codes, scales: None, biases: None, strides: [stride, 0, 0] }
            }
        };
        Ok(Bound { spec, weight })
    }

    /// The format that the config alone asks for. Converters leave matrices whose inputs do not fill groups
    /// as they are.
    fn said_format(&self, stem: &str, cols: usize) -> Result<WeightFormat, ModelError> {
        match self.quantization.of(stem) {
            (Some(ModuleQuantization::Affine { .. }), true) if !cols.is_multiple_of(GROUP) => {
                Err(ModelError::Contradiction(format!(
                    "{stem} has {cols} inputs, which groups of {GROUP} do not divide, but an entry in \
                     quantization"
                )))
            }
            (Some(ModuleQuantization::Affine { bits }), _) if cols.is_multiple_of(GROUP) => {
                Ok(WeightFormat::Affine { bits })
            }
            _ => Ok(WeightFormat::Dense(ElementType::Bf16)),
        }
    }

    /// The format of a matrix: from the shapes, checked against the config.
    fn format(
        &self,
        checkpoint: &Checkpoint,
        stem: &str,
        cols: usize,
    ) -> Result<WeightFormat, ModelError> {
        let (said, own_entry) = self.quantization.of(stem);
        let Some(scales) = checkpoint.get(&format!("{stem}.scales")) else {
            let tensor = self.get(&dense_name(stem))?;
            if own_entry && let Some(ModuleQuantization::Affine { bits }) = said {
                let problem = format!(
                    "it has no {stem}.scales, but config.json says {bits} bits; download it again"
                );
                return Err(bad_tensor(&tensor.name, problem));
            }
            if tensor.dtype == Dtype::U32 {
                let problem =
                    format!("it holds codes, but {stem}.scales is missing; download it again");
                return Err(bad_tensor(&tensor.name, problem));
            }
            return Ok(WeightFormat::Dense(dense_element(tensor)?));
        };
        let tensor = self.get(&format!("{stem}.weight"))?;
        let last = |t: &Tensor| t.shape.last().copied().unwrap_or(0);
        if !cols.is_multiple_of(GROUP) || last(scales) != cols / GROUP {
            let problem = format!(
                "its last axis is {} for {cols} inputs; only groups of {GROUP} are supported, each with one scale",
                last(scales)
            );
            return Err(bad_tensor(&scales.name, problem));
        }
        let bits = match last(tensor) {
            words if words == cols / 8 => 4,
            words if words == cols / 4 => 8,
            words => {
                let problem = format!(
                    "its last axis is {words} for {cols} inputs; only 4 and 8 bits are supported"
                );
                return Err(bad_tensor(&tensor.name, problem));
            }
        };
        let problem = match said {
            Some(ModuleQuantization::Affine { bits: b }) if b == bits => {
                return Ok(WeightFormat::Affine { bits });
            }
            Some(ModuleQuantization::Affine { bits: b }) => format!("config.json says {b}"),
            Some(ModuleQuantization::Dense) => "config.json says it is not quantized".into(),
            None => "config.json has no quantization object".into(),
        };
        Err(bad_tensor(
            &tensor.name,
            format!(
                "its shape says {bits} bits, {problem}; take the config.json that belongs to the checkpoint"
            ),
        ))
    }

    /// A vector that is never quantized, stored with the given shape; read as `[rows, cols]`.
    pub fn vector(
        &mut self,
        role: &str,
        class: &'static str,
        shape: &[usize],
        [rows, cols]: [usize; 2],
    ) -> Result<Bound, ModelError> {
        let mut spec = WeightSpec {
            role: role.into(),
            class,
            format: WeightFormat::Dense(ElementType::Bf16),
            matrices: 1,
            rows,
            cols,
        };
        let stem = self.stem(role);
        if let (Some(ModuleQuantization::Affine { .. }), true) = self.quantization.of(&stem) {
            let problem = format!("quantization has an entry for {stem}, which is never quantized");
            return Err(ModelError::Contradiction(problem));
        }
        if self.checkpoint.is_none() {
            return Ok(Bound { spec, weight: no_bytes() });
        }
        let tensor = self.claim(&dense_name(&stem), role, shape)?;
        spec.format = WeightFormat::Dense(dense_element(tensor)?);
        Ok(Bound { spec, weight: dense(TensorBytes::Mapped(tensor.data.clone())) })
    }

    /// A norm that is stored zero-centred in the original: the offset of one is added here, once.
    pub fn centred_norm(
        &mut self,
        role: &str,
        class: &'static str,
        width: usize,
    ) -> Result<Bound, ModelError> {
        let mut bound = self.vector(role, class, &[width], [1, width])?;
        if self.layout == Layout::HuggingFace {
            let row = bound.weight.as_ref().row(&bound.spec, 0, 0);
            let bytes: Arc<[u8]> = row.iter().flat_map(|w| (1.0 + w).to_le_bytes()).collect();
            bound.spec.format = WeightFormat::Dense(ElementType::F32);
            bound.weight = dense(TensorBytes::Owned(bytes));
        }
        Ok(bound)
    }

    /// The convolution's taps: `[channels, taps, 1]` from MLX, `[channels, 1, taps]` from the original: the
    /// same bytes.
    pub fn convolution(
        &mut self,
        role: &str,
        class: &'static str,
        channels: usize,
        taps: usize,
    ) -> Result<Bound, ModelError> {
        let shape = match self.layout {
            Layout::Mlx => [channels, taps, 1],
            Layout::HuggingFace => [channels, 1, taps],
        };
        self.vector(role, class, &shape, [channels, taps])
    }

    /// Refuses quantization entries of modules that no call asked for.
    pub fn check_modules(&self) -> Result<(), ModelError> {
        self.quantization.check_modules(&self.stems)
    }

    /// What became of each tensor; an error if any belongs to nothing.
    pub fn finish(mut self) -> Result<Vec<(String, Claim)>, ModelError> {
        let mut unclaimed = Vec::new();
        for tensor in self.checkpoint.iter().flat_map(|c| c.tensors()) {
            if self.claims.contains_key(&tensor.name) {
                continue;
            }
            match skip_rule(&tensor.name) {
                Some(rule) => {
                    self.claims.insert(tensor.name.clone(), Claim::Skipped(rule));
                }
                None => unclaimed.push(tensor.name.clone()),
            }
        }
        match unclaimed.first() {
            Some(first) => {
                Err(ModelError::UnclaimedTensors { count: unclaimed.len(), first: first.clone() })
            }
            None => Ok(self.claims.into_iter().collect()),
        }
    }
}

fn no_bytes() -> Weight {
    dense(TensorBytes::Owned(Arc::from([])))
}

fn dense(codes: TensorBytes) -> Weight {
    Weight { codes, scales: None, biases: None, strides: [0; 3] }
}

const AFFINE: &str = "only MLX affine quantization is supported";

fn bad_tensor(name: &str, problem: String) -> ModelError {
    ModelError::BadTensor { name: name.into(), problem }
}

fn expect_dtype(tensor: &Tensor, dtype: Dtype) -> Result<(), ModelError> {
    if tensor.dtype == dtype {
        return Ok(());
    }
    Err(bad_tensor(
        &tensor.name,
        format!("its type is {}, {} is needed; {AFFINE}", tensor.dtype.name(), dtype.name()),
    ))
}

fn dense_element(tensor: &Tensor) -> Result<ElementType, ModelError> {
    match tensor.dtype {
        Dtype::BF16 => Ok(ElementType::Bf16),
        Dtype::F32 => Ok(ElementType::F32),
        other => Err(bad_tensor(
            &tensor.name,
            format!(
                "its type is {}; BF16 or F32 is needed, convert the original again",
                other.name()
            ),
        )),
    }
}

/// MLX moves the convolution's tap axis: its last axis tells the layouts apart.
fn detect_layout(
    checkpoint: &Checkpoint,
    prefix: Prefix,
    config: &ModelConfig,
) -> Result<Layout, ModelError> {
    let mut found: Option<Layout> = None;
    for i in 0..config.layers.len() {
        let name = format!("{}layers.{i}.linear_attn.conv1d.weight", prefix.model);
        let Some(tensor) = checkpoint.get(&name) else { continue };
        let this = match tensor.shape[..] {
            [_, _, 1] => Layout::Mlx,
            [_, 1, _] => Layout::HuggingFace,
            _ => {
                let problem = format!(
                    "its shape is {:?}; three axes are needed, the second or third of length 1",
                    tensor.shape
                );
                return Err(bad_tensor(&name, problem));
            }
        };
        if found.is_some_and(|before| before != this) {
            let problem = "its axes are in another order than in earlier layers";
            return Err(bad_tensor(&name, problem.into()));
        }
        found = Some(this);
    }
    let fused = format!("{}layers.0.mlp.experts.gate_up_proj", prefix.model);
    let experts = match checkpoint.get(&fused) {
        Some(_) => Layout::HuggingFace,
        None => Layout::Mlx,
    };
    match found {
        Some(layout) if layout != experts => Err(ModelError::UnknownLayout {
            source_name: checkpoint.source().into(),
            problem: format!(
                "{} is {}, but the convolutions are as {} has them",
                fused,
                if experts == Layout::Mlx { "missing" } else { "there" },
                if layout == Layout::Mlx { "MLX" } else { "the original" },
            ),
        }),
        _ => Ok(experts),
    }
}
