/// Why a checkpoint is not accepted as a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The config describes another kind of model.
    #[error(
        "config.json: {field} is {found}; Lily runs Qwen3.5/3.6 mixture-of-experts models (qwen3_5_moe)"
    )]
    OtherModel {
        /// The field that says so.
        field: String,
        /// The model type found.
        found: String,
    },
    /// A field that is needed is not there.
    #[error(
        "config.json: {field} is missing; Lily assumes no default for a value that changes results: take the config.json that belongs to the checkpoint"
    )]
    MissingField {
        /// The field.
        field: String,
    },
    /// A field has a value that cannot be used.
    #[error("config.json: {field} is {found}; {want}")]
    BadField {
        /// The field.
        field: String,
        /// Its value, shortened.
        found: String,
        /// What is accepted.
        want: String,
    },
    /// Two fields contradict each other.
    #[error(
        "config.json: {0}; the file contradicts itself, take the one that belongs to the checkpoint"
    )]
    Contradiction(String),
    /// The quantization has an entry for a module that does not exist.
    #[error(
        "config.json: quantization has an entry for {name}, which is no module of the model; correct the name, or take the config.json that belongs to the checkpoint"
    )]
    UnknownModule {
        /// The module, without the prefix of the text part.
        name: String,
    },
    /// A tensor that the model needs is not there.
    #[error(
        "tensor {name} is missing from {source_name}; the checkpoint is incomplete or of another model: download it again"
    )]
    MissingTensor {
        /// Its name.
        name: String,
        /// The checkpoint.
        source_name: String,
    },
    /// Tensors that belong to no role.
    #[error(
        "{count} tensors belong to no part of the model, the first is {first}; the checkpoint is of another model or newer than this program"
    )]
    UnclaimedTensors {
        /// How many.
        count: usize,
        /// The first by name.
        first: String,
    },
    /// A tensor has the wrong shape, type or quantization.
    #[error("tensor {name}: {problem}")]
    BadTensor {
        /// Its name.
        name: String,
        /// What is wrong, and what is accepted.
        problem: String,
    },
    /// The names or the layout of the tensors are not those of a known kind of checkpoint.
    #[error(
        "{source_name} is laid out like no known checkpoint: {problem}; take an MLX conversion or the original"
    )]
    UnknownLayout {
        /// The checkpoint.
        source_name: String,
        /// What was found or looked for.
        problem: String,
    },
    /// The values of the norms show that the offset of one was added too often or not at all.
    #[error(
        "norm weights: {problem}; convert the original checkpoint again with a current converter"
    )]
    Norms {
        /// What the values show.
        problem: String,
    },
    /// The lowered plan breaks a rule of the operations.
    #[error("the model cannot be lowered: {0}")]
    Plan(String),
}
