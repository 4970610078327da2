//! The plan of one forward pass: operations, the values between them, the weights and the state.

use std::fmt;

use crate::op::Op;
use crate::tensor::ElementType;

/// A value: the result of exactly one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// A weight, by its place in [`Plan::weights`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub u32);

/// How many rows a value has in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
    /// One row a token of the step.
    Tokens,
    /// One row for each (token, selected expert): row `token * k + rank`.
    Routed(u32),
    /// One row for each token whose logits are asked for.
    Outputs,
}

impl Rows {
    /// Rows in a step of `tokens` tokens, `outputs` of which have logits.
    pub fn count(self, tokens: usize, outputs: usize) -> usize {
        match self {
            Self::Tokens => tokens,
            Self::Routed(k) => tokens.saturating_mul(k as usize),
            Self::Outputs => outputs,
        }
    }
}

/// A value between two operations: `rows × width`, row-major.
#[derive(Clone, Debug)]
pub struct Value {
    /// What it is, for messages and printed plans.
    pub name: &'static str,
    /// Row rule.
    pub rows: Rows,
    /// Elements a row.
    pub width: usize,
    /// Element type.
    pub element: ElementType,
}

/// How the elements of a weight are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// MLX affine quantization: `w = scale · code + bias` in groups of 64 along the input axis, `bits` 4 or 8.
    Affine {
        /// Bits of a code: 4 or 8.
        bits: u8,
    },
    /// Plain elements.
    Dense(ElementType),
}

/// Input elements that share one scale and bias.
pub const GROUP: usize = 64;

impl WeightFormat {
    /// Bytes of the codes (or plain elements) of one row of `cols` elements.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::Affine { bits } => cols * bits as usize / 8,
            Self::Dense(e) => cols * e.size(),
        }
    }

    /// Bytes of the scales of one row (the biases take as many).
    pub fn scale_bytes(self, cols: usize) -> usize {
        match self {
            Self::Affine { .. } => cols / GROUP * 2,
            Self::Dense(_) => 0,
        }
    }
}

/// A weight: `matrices` stacked `[rows, cols]` matrices (1 unless these are experts).
#[derive(Clone, Debug)]
pub struct WeightSpec {
    /// Its role, for messages and byte tables: `layers.3.self_attn.q_proj`.
    pub role: String,
    /// Byte class, for budgets: `GDN in_proj_qkv`.
    pub class: &'static str,
    /// Storage format.
    pub format: WeightFormat,
    /// Stacked matrices.
    pub matrices: usize,
    /// Output elements.
    pub rows: usize,
    /// Input elements.
    pub cols: usize,
}

impl WeightSpec {
    /// Bytes of one of the stacked matrices: codes, scales and biases.
    pub fn matrix_bytes(&self) -> u64 {
        (self.rows * (self.format.row_bytes(self.cols) + 2 * self.format.scale_bytes(self.cols)))
            as u64
    }

    /// Bytes of all the stacked matrices.
    pub fn bytes(&self) -> u64 {
        self.matrices as u64 * self.matrix_bytes()
    }
}

/// How a linear operation treats its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Quantized to int8 in groups of 64 with one f32 scale each; see [`quant`](crate::quant).
    I8G64,
    /// Likewise, with codes of 15 bits, which two planes of int8 hold.
    I16G64,
    /// Used as f32.
    F32,
}

impl Activation {
    /// The largest code, if the input is quantized: the magnitude that a group's largest element gets.
    pub fn largest_code(self) -> Option<i16> {
        match self {
            Self::I8G64 => Some(127),
            // Of the codes that two int8 planes hold as 128 · high + low, the largest with high ≤ 127.
            Self::I16G64 => Some(127 * 128),
            Self::F32 => None,
        }
    }
}

/// What mixes the tokens of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Gated DeltaNet: a recurrent state.
    Recurrent,
    /// Gated attention: a KV cache.
    Attention,
}

/// Tokens of one KV page.
pub const PAGE_TOKENS: usize = 256;

/// What a slot keeps from one step to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// Attention layers; each has K and V pages `[page][kv head][token][head_dim]`.
    pub kv_layers: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Recurrent layers; the state of a slot is `[layer][head][dv][dk]` f32.
    pub recurrent_layers: usize,
    /// Value heads of a recurrent layer.
    pub heads: usize,
    /// Elements of a value head.
    pub dv: usize,
    /// Elements of a key head.
    pub dk: usize,
    /// Channels of the causal convolution; its state is `[layer][taps - 1][channels]`, oldest row first.
    pub conv_channels: usize,
    /// Taps of the causal convolution.
    pub conv_taps: usize,
    /// Element type of K, V and the convolution's state.
    pub cache_element: ElementType,
}

impl StateLayout {
    /// f32 elements of one layer's recurrent state.
    pub const fn recurrent_len(&self) -> usize {
        self.heads * self.dv * self.dk
    }

    /// Elements of one layer's convolution state.
    pub const fn conv_len(&self) -> usize {
        (self.conv_taps - 1) * self.conv_channels
    }

    /// Bytes of one slot's recurrent state, all layers.
    pub const fn recurrent_bytes(&self) -> usize {
        self.recurrent_layers * self.recurrent_len() * 4
    }

    /// Bytes of one slot's convolution state, all layers.
    pub const fn conv_bytes(&self) -> usize {
        self.recurrent_layers * self.conv_len() * self.cache_element.size()
    }

    /// Elements of one page of K (or of V) of one layer.
    pub const fn page_len(&self) -> usize {
        self.kv_heads * PAGE_TOKENS * self.head_dim
    }

    /// Bytes of one page: K and V of all attention layers.
    pub const fn page_bytes(&self) -> usize {
        self.kv_layers * 2 * self.page_len() * self.cache_element.size()
    }
}

/// One operation of a plan, and where it stands.
#[derive(Clone, Debug)]
pub struct Node {
    /// The operation and its arguments.
    pub op: Op,
    /// Layer, or `None` outside the layers.
    pub layer: Option<u32>,
    /// Whether the value it writes is the residual stream after a layer: checked for non-finite elements.
    pub ends_layer: bool,
}

/// One forward pass of one model shape: what to compute.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model name, for messages.
    pub name: String,
    /// Rows of the vocabulary (logits a row).
    pub vocab: usize,
    /// Kind of each layer.
    pub layers: Vec<LayerKind>,
    /// Values, each written by one node.
    pub values: Vec<Value>,
    /// Weights.
    pub weights: Vec<WeightSpec>,
    /// State of a slot.
    pub state: StateLayout,
    /// Operations on all tokens of a step.
    pub body: Vec<Node>,
    /// Operations on the rows whose logits are asked for; a device may run them in tiles of rows.
    pub head: Vec<Node>,
    /// The residual stream that `head` gathers its rows from.
    pub hidden: ValueId,
    /// The logits, written by `head`.
    pub logits: ValueId,
}

impl Plan {
    /// The value `id`.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// The weight `id`.
    pub fn weight(&self, id: WeightId) -> &WeightSpec {
        &self.weights[id.0 as usize]
    }

    /// Body and head in order.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.body.iter().chain(&self.head)
    }

    /// Checks every operation's shape and type rules, that each value is written once before it is read,
    /// and that each weight is used. An error names the operation.
    pub fn check(&self) -> Result<(), String> {
        let mut written = vec![false; self.values.len()];
        let mut used = vec![false; self.weights.len()];
        for (i, node) in self.nodes().enumerate() {
            let at = |what: String| format!("operation {i} ({}): {what}", node.op.name());
            for v in node.op.reads() {
                match written.get(v.0 as usize) {
                    Some(true) => {}
                    Some(false) => {
                        return Err(at(format!("value {} is read before it is written", v.0)));
                    }
                    None => return Err(at(format!("value {} does not exist", v.0))),
                }
            }
            for w in node.op.weights() {
                *used
                    .get_mut(w.0 as usize)
                    .ok_or_else(|| at(format!("weight {} does not exist", w.0)))? = true;
            }
            for v in node.op.writes() {
                match written.get_mut(v.0 as usize) {
                    Some(w) if !*w => *w = true,
                    Some(_) => return Err(at(format!("value {} is written twice", v.0))),
                    None => return Err(at(format!("value {} does not exist", v.0))),
                }
            }
            node.op.check(self).map_err(at)?;
        }
        if let Some(w) = used.iter().position(|u| !u) {
            return Err(format!("weight {} is used by no operation", self.weights[w].role));
        }
        Ok(())
    }

    /// Weight bytes that a decode step of one token reads, by class: all of a matrix for linears, the
    /// selected experts' share of a stack, one row of the embedding.
    pub fn bytes_per_token(&self) -> Vec<(&'static str, u64)> {
        let mut rows: Vec<(&'static str, u64)> = Vec::new();
        for node in self.nodes() {
            for (w, bytes) in node.op.weight_bytes_per_token(self) {
                let class = self.weight(w).class;
                match rows.iter_mut().find(|(c, _)| *c == class) {
                    Some((_, b)) => *b += bytes,
                    None => rows.push((class, bytes)),
                }
            }
        }
        rows
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} layers, vocabulary {}", self.name, self.layers.len(), self.vocab)?;
        for node in self.nodes() {
            match node.layer {
                Some(l) => write!(f, "  {l:>3}  ")?,
                None => write!(f, "    -  ")?,
            }
            let list = |ids: Vec<ValueId>| -> String {
                let names: Vec<String> = ids
                    .iter()
                    .map(|&id| {
                        format!("%{}:{}[{}]", id.0, self.value(id).name, self.value(id).width)
                    })
                    .collect();
                names.join(" ")
            };
            let weights: Vec<&str> =
                node.op.weights().iter().map(|&w| self.weight(w).role.as_str()).collect();
            writeln!(
                f,
                "{} <- {}({}) {}",
                list(node.op.writes()),
                node.op.name(),
                list(node.op.reads()),
                weights.join(" ")
            )?;
        }
        Ok(())
    }
}
