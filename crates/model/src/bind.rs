//! Binds tensors to roles: finds them, checks shape, type and quantization, and notes what was claimed.

use std::collections::BTreeMap;
use std::sync::Arc;

use lily_checkpoint::{Checkpoint, Dtype, Tensor, TensorBytes};
use lily_device::Weight;
use lily_ops::plan::GROUP;
use lily_ops::{ElementType, WeightFormat, WeightSpec};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::names::{Prefix, skip_rule};
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
        }
    }

    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Name of a tensor of the text model, without `.weight`.
    fn stem(&self, role: &str) -> String {
        match role {
            "lm_head" => format!("{}lm_head", self.prefix.head),
            _ => format!("{}{role}", self.prefix.model),
        }
    }

    /// Claims a tensor and checks its shape.
    fn claim(&mut self, name: &str, role: &str, shape: &[usize]) -> Result<&'a Tensor, ModelError> {
        let checkpoint = self.checkpoint.expect("bytes are bound from a checkpoint");
        let tensor = checkpoint.get(name).ok_or_else(|| ModelError::MissingTensor {
            name: name.into(),
            source_name: checkpoint.source().into(),
        })?;
        if tensor.shape != shape {
            return Err(ModelError::BadTensor {
                name: name.into(),
                problem: format!(
                    "its shape is {:?}, the config asks for {shape:?}; config.json and tensors are of different models",
                    tensor.shape
                ),
            });
        }
        self.claims.insert(name.into(), Claim::Role(role.into()));
        Ok(tensor)
    }

    /// A matrix `[rows, cols]` (or a stack of `matrices` of them), quantized or dense.
    pub fn linear(
        &mut self,
        role: &str,
        class: &'static str,
        matrices: usize,
        [rows, cols]: [usize; 2],
    ) -> Result<Bound, ModelError> {
        let whole = RowRange { first: 0, rows, of: rows };
        self.matrix(role, role, class, matrices, whole, cols)
    }

    /// Gate, up and down projections of the experts of the layer whose MLP is `mlp`.
    pub fn experts(
        &mut self,
        mlp: &str,
        class: &'static str,
        c: &ModelConfig,
    ) -> Result<[Bound; 3], ModelError> {
        let (n, width, hidden) = (c.experts, c.expert_width, c.hidden_size);
        if self.layout == Layout::Mlx {
            let mut stack = |name: &str, shape| {
                self.linear(&format!("{mlp}.switch_mlp.{name}"), class, n, shape)
            };
            return Ok([
                stack("gate_proj", [width, hidden])?,
                stack("up_proj", [width, hidden])?,
                stack("down_proj", [hidden, width])?,
            ]);
        }
        let fused = format!("{mlp}.experts.gate_up_proj");
        let mut half = |first: usize, name: &str| {
            let range = RowRange { first, rows: width, of: 2 * width };
            self.matrix(&fused, &format!("{mlp}.experts.{name}"), class, n, range, hidden)
        };
        let gate = half(0, "gate_proj")?;
        let up = half(width, "up_proj")?;
        let down = format!("{mlp}.experts.down_proj");
        Ok([gate, up, self.linear(&down, class, n, [hidden, width])?])
    }

    fn matrix(
        &mut self,
        stem: &str,
        role: &str,
        class: &'static str,
        matrices: usize,
        range: RowRange,
        cols: usize,
    ) -> Result<Bound, ModelError> {
        let stem = self.stem(stem);
        let format = self.format(&stem, cols, role)?;
        let spec =
            WeightSpec { role: role.into(), class, format, matrices, rows: range.rows, cols };
        if self.checkpoint.is_none() {
            return Ok(Bound { spec, weight: no_bytes() });
        }
        let shape = |cols: usize| match matrices {
            1 => vec![range.of, cols],
            _ => vec![matrices, range.of, cols],
        };
        let part = |tensor: &Tensor, row_bytes: usize| -> (TensorBytes, usize) {
            let skip = (range.first * row_bytes) as u64;
            let data =
                tensor.data.slice(skip, tensor.data.len() - skip).unwrap_or(tensor.data.clone());
            (TensorBytes::Mapped(data), range.of * row_bytes)
        };
        let weight = match format {
            WeightFormat::Affine { bits } => {
                let words = cols * bits as usize / 32;
                let w = self.claim(&format!("{stem}.weight"), role, &shape(words))?;
                let s = self.claim(&format!("{stem}.scales"), role, &shape(cols / GROUP))?;
                let b = self.claim(&format!("{stem}.biases"), role, &shape(cols / GROUP))?;
                expect_dtype(w, Dtype::U32)?;
                expect_dtype(s, Dtype::BF16)?;
                expect_dtype(b, Dtype::BF16)?;
                let (codes, c) = part(w, format.row_bytes(cols));
                let (scales, st) = part(s, format.scale_bytes(cols));
                let (biases, bt) = part(b, format.scale_bytes(cols));
                Weight { codes, scales: Some(scales), biases: Some(biases), strides: [c, st, bt] }
            }
            WeightFormat::Dense(_) => {
                let name = self.dense_name(&stem);
                let w = self.claim(&name, role, &shape(cols))?;
                let (codes, stride) = part(w, format.row_bytes(cols));
                Weight { codes, scales: None, biases: None, strides: [stride, 0, 0] }
            }
        };
        Ok(Bound { spec, weight })
    }

    /// HF's fused expert tensors have no `.weight` behind their name.
    fn dense_name(&self, stem: &str) -> String {
        let bare = self.checkpoint.is_some_and(|c| c.get(stem).is_some());
        if bare { stem.into() } else { format!("{stem}.weight") }
    }

    /// The format of a matrix: from the shapes, checked against the config.
    fn format(&self, stem: &str, cols: usize, role: &str) -> Result<WeightFormat, ModelError> {
        let (said, own_entry) = self.quantization.of(stem);
        let Some(checkpoint) = self.checkpoint else {
            return Ok(match said {
                Some(ModuleQuantization::Affine { bits }) => WeightFormat::Affine { bits },
                _ => WeightFormat::Dense(ElementType::Bf16),
            });
        };
        let bad = |name: String, problem: String| ModelError::BadTensor { name, problem };
        let Some(scales) = checkpoint.get(&format!("{stem}.scales")) else {
            if own_entry && let Some(ModuleQuantization::Affine { bits }) = said {
                return Err(bad(
                    format!("{stem}.scales"),
                    format!("it is missing, but config.json says {stem} has {bits} bits"),
                ));
            }
            let name = self.dense_name(stem);
            let tensor = checkpoint.get(&name).ok_or_else(|| ModelError::MissingTensor {
                name: name.clone(),
                source_name: checkpoint.source().into(),
            })?;
            return Ok(WeightFormat::Dense(dense_element(tensor)?));
        };
        let name = format!("{stem}.weight");
        let tensor = checkpoint.get(&name).ok_or_else(|| ModelError::MissingTensor {
            name: name.clone(),
            source_name: checkpoint.source().into(),
        })?;
        let (words, groups) =
            (tensor.shape.last().copied().unwrap_or(0), scales.shape.last().copied().unwrap_or(0));
        if groups == 0 || !cols.is_multiple_of(groups) || cols / groups != GROUP {
            return Err(bad(
                format!("{stem}.scales"),
                format!("{groups} groups for {cols} inputs; only groups of {GROUP} are supported"),
            ));
        }
        let bits = match words.checked_mul(32) {
            Some(b) if b == 4 * cols => 4,
            Some(b) if b == 8 * cols => 8,
            _ => {
                return Err(bad(
                    name,
                    format!(
                        "{words} words for {cols} inputs ({role}); only 4 and 8 bits are supported"
                    ),
                ));
            }
        };
        match said {
            Some(ModuleQuantization::Affine { bits: b }) if b == bits => {
                Ok(WeightFormat::Affine { bits })
            }
            Some(ModuleQuantization::Affine { bits: b }) => Err(bad(
                name,
                format!(
                    "its shape says {bits} bits, config.json says {b}; take the config.json that belongs to the checkpoint"
                ),
            )),
            Some(ModuleQuantization::Dense) => Err(bad(
                name,
                format!("it has {bits}-bit codes, config.json says it is not quantized"),
            )),
            None => Err(bad(
                name,
                format!("it has {bits}-bit codes, config.json has no quantization entry"),
            )),
        }
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
        if self.checkpoint.is_none() {
            return Ok(Bound { spec, weight: no_bytes() });
        }
        // Decay rates and biases carry no `.weight` behind their name.
        let name = self.dense_name(&self.stem(role));
        let tensor = self.claim(&name, role, shape)?;
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

fn expect_dtype(tensor: &Tensor, dtype: Dtype) -> Result<(), ModelError> {
    if tensor.dtype == dtype {
        return Ok(());
    }
    Err(ModelError::BadTensor {
        name: tensor.name.clone(),
        problem: format!("its type is {}, {} is needed", tensor.dtype.name(), dtype.name()),
    })
}

fn dense_element(tensor: &Tensor) -> Result<ElementType, ModelError> {
    match tensor.dtype {
        Dtype::BF16 => Ok(ElementType::Bf16),
        Dtype::F32 => Ok(ElementType::F32),
        other => Err(ModelError::BadTensor {
            name: tensor.name.clone(),
            problem: format!("its type is {}; BF16 or F32 is needed", other.name()),
        }),
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
                return Err(ModelError::BadTensor {
                    name,
                    problem: format!(
                        "its shape is {:?}, three axes with one of length 1 are needed",
                        tensor.shape
                    ),
                });
            }
        };
        if found.is_some_and(|before| before != this) {
            return Err(ModelError::BadTensor {
                name,
                problem: "its axes are in another order than in earlier layers".into(),
            });
        }
        found = Some(this);
    }
    let experts = format!("{}layers.0.mlp.experts.gate_up_proj", prefix.model);
    let fused = checkpoint.get(&experts).is_some();
    Ok(found.unwrap_or(if fused { Layout::HuggingFace } else { Layout::Mlx }))
}
