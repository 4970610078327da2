//! Names of tensors in the kinds of checkpoints that exist.

use lily_checkpoint::Checkpoint;

use crate::error::ModelError;

/// Where a checkpoint keeps the text model's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    /// Before `embed_tokens`, `norm` and `layers.N`.
    pub model: &'static str,
    /// Before `lm_head`.
    pub head: &'static str,
}

/// MLX conversions, MLX conversions of the text part alone (also HF's text-only naming), HF originals.
pub(crate) const PREFIXES: [Prefix; 3] = [
    Prefix { model: "language_model.model.", head: "language_model." },
    Prefix { model: "model.", head: "" },
    Prefix { model: "model.language_model.", head: "" },
];

impl Prefix {
    /// The prefix under which the checkpoint has its embedding.
    pub fn detect(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let present: Vec<Prefix> = PREFIXES
            .into_iter()
            .filter(|p| checkpoint.get(&format!("{}embed_tokens.weight", p.model)).is_some())
            .collect();
        let unknown = |problem: String| ModelError::UnknownLayout {
            source_name: checkpoint.source().into(),
            problem,
        };
        match present[..] {
            [prefix] => Ok(prefix),
            [] => Err(unknown(
                "it has no embed_tokens.weight under language_model.model., model. or \
                 model.language_model."
                    .into(),
            )),
            _ => Err(unknown("it has embed_tokens.weight under two prefixes".into())),
        }
    }
}

/// The rule by which a tensor that the text model does not use is skipped.
pub(crate) fn skip_rule(name: &str) -> Option<&'static str> {
    const RULES: [(&str, &str); 5] = [
        ("vision_tower", "vision tower"),
        ("model.visual", "vision tower"),
        ("visual.", "vision tower"),
        ("mtp.", "multi-token prediction"),
        ("language_model.mtp.", "multi-token prediction"),
    ];
    RULES.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, rule)| *rule)
}

/// The tensor of an unquantized module: decay rates, biases and the original's fused experts have no
/// `.weight` behind their name.
pub(crate) fn dense_name(stem: &str) -> String {
    const BARE: [&str; 4] = [".A_log", ".dt_bias", ".experts.gate_up_proj", ".experts.down_proj"];
    match BARE.iter().any(|end| stem.ends_with(end)) {
        true => stem.into(),
        false => format!("{stem}.weight"),
    }
}
