//! Sampling fields that chats and completions share.

use std::hash::{BuildHasher, Hasher};

use lily_ops::sample::SampleParams;

use crate::error::ApiError;
use crate::fields::Fields;
use crate::model::ServedModel;

/// How answers are made.
#[derive(Debug, Clone)]
pub struct Sampling {
    pub params: SampleParams,
    pub logit_bias: Vec<(u32, f32)>,
    /// Most tokens of an answer, if there is a limit.
    pub max_tokens: Option<usize>,
    pub stops: Vec<String>,
    /// Choices.
    pub n: u32,
}

impl Sampling {
    /// Reads the fields; what is missing is the model's default.
    pub fn read(fields: &Fields<'_>, model: &ServedModel) -> Result<Self, ApiError> {
        let number = |name: &str, low: f64, high: f64, default: f32| {
            Ok::<_, ApiError>(fields.number(name, low..=high)?.map_or(default, |x| x as f32))
        };
        let defaults = &model.defaults;
        let temperature = if defaults.do_sample { defaults.temperature } else { 0.0 };
        let top_k = fields.integer("top_k", -1..=i64::from(i32::MAX))?;
        let seed = fields.integer("seed", 0..=i64::MAX)?;
        let params = SampleParams {
            temperature: number("temperature", 0.0, 2.0, temperature)?,
            top_k: top_k.map_or(defaults.top_k, |k| u32::try_from(k).unwrap_or(0)),
            top_p: number("top_p", 0.0, 1.0, defaults.top_p)?,
            min_p: number("min_p", 0.0, 1.0, defaults.min_p)?,
            repetition_penalty: number(
                "repetition_penalty",
                0.01,
                100.0,
                defaults.repetition_penalty,
            )?,
            presence_penalty: number("presence_penalty", -2.0, 2.0, defaults.presence_penalty)?,
            frequency_penalty: number("frequency_penalty", -2.0, 2.0, 0.0)?,
            seed: seed.map_or_else(random, |seed| seed.unsigned_abs()),
            mask: model.mask.clone(),
            ..SampleParams::GREEDY
        };
        Ok(Self {
            params,
            logit_bias: logit_bias(fields, model)?,
            max_tokens: max_tokens(fields)?,
            stops: stops(fields)?,
            n: fields.integer("n", 1..=128)?.map_or(1, |n| n as u32),
        })
    }
}

/// Random bits: the standard library's hash maps take their keys from the system's randomness.
pub fn random() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish() >> 1
}

fn logit_bias(fields: &Fields<'_>, model: &ServedModel) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(biases) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    let mut list = Vec::new();
    for (key, value) in biases.map() {
        let id = key.parse::<u32>().ok().filter(|id| model.tokenizer.names(*id));
        let id = id.ok_or_else(|| {
            ApiError::field(
                "logit_bias",
                format!("logit_bias: {key:?} is no token id of this model"),
            )
        })?;
        let bias = value.as_f64().filter(|bias| bias.abs() <= 100.0);
        let bias = bias.ok_or_else(|| biases.error(key, "a number from -100 to 100"))?;
        list.push((id, bias as f32));
    }
    Ok(list)
}

/// The newer field wins; -1 is a habit of local clients and means no limit.
fn max_tokens(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let read = |name: &str| {
        let limit = fields.integer(name, -1..=i64::MAX)?;
        match limit {
            Some(0) => Err(fields.error(name, "a whole number from 1")),
            limit => Ok(limit),
        }
    };
    let (old, new) = (read("max_tokens")?, read("max_completion_tokens")?);
    Ok(new.or(old).and_then(|limit| usize::try_from(limit).ok()))
}

/// Bytes of a stop sequence: each choice has its own matcher.
const MOST_STOP: usize = 4096;

fn stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    const NEEDED: &str = "a string of 1 to 4096 bytes, or an array of at most 16 of them";
    let error = || fields.error("stop", NEEDED);
    let Some(value) = fields.get("stop") else { return Ok(Vec::new()) };
    let one = std::slice::from_ref(value);
    let list = value.as_array().map_or(one, Vec::as_slice);
    if list.len() > 16 {
        return Err(error());
    }
    let text = |stop: &serde_json::Value| {
        let text = stop.as_str().filter(|text| (1..=MOST_STOP).contains(&text.len()));
        text.map(str::to_owned).ok_or_else(error)
    };
    list.iter().map(text).collect()
}

/// Whether a stream is asked for, and with usage.
pub fn streaming(fields: &Fields<'_>) -> Result<(bool, bool), ApiError> {
    let stream = fields.bool("stream")?.unwrap_or(false);
    let options = fields.object("stream_options")?;
    let usage = options.map(|options| options.bool("include_usage")).transpose()?.flatten();
    Ok((stream, usage.unwrap_or(false)))
}
