//! How each token of an answer is chosen.

use std::hash::{BuildHasher, Hasher};
use std::ops::RangeInclusive;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use lily_chat::GenerationDefaults;
use lily_engine::{LogitBias, SampleParams};

/// The options of a command that answers.
#[derive(Args, Clone, Debug)]
pub struct SamplingArgs {
    /// Sampling as Qwen recommends it for a purpose. Options given beside it win over it.
    #[arg(long, value_name = "NAME", help_heading = "Sampling")]
    pub preset: Option<Preset>,

    /// Randomness, 0 to 100: 0 always takes the most likely token, 1 samples from the model's distribution.
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = temperature, help_heading = "Sampling")]
    pub temperature: Option<f32>,

    /// Choose among the most likely tokens whose probabilities reach P together, 0 to 1; 1 is off.
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = share, help_heading = "Sampling")]
    pub top_p: Option<f32>,

    /// Choose among the K most likely tokens; 0 is off.
    #[arg(long, value_name = "K", allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_k: Option<u32>,

    /// Choose among tokens at least P times as likely as the most likely one, 0 to 1; 0 is off.
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = share, help_heading = "Sampling")]
    pub min_p: Option<f32>,

    /// Seed of the random choices: the same seed gives the same answer. Default: another one each time, named
    /// in the output of --json.
    #[arg(long, value_name = "N", help_heading = "Sampling")]
    pub seed: Option<u64>,

    /// Divide the logits of tokens already in the answer, 0.01 to 100; 1 is off.
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = repetition, help_heading = "Sampling")]
    pub repetition_penalty: Option<f32>,

    /// Subtract from the logits of tokens already in the answer, -100 to 100; 0 is off.
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = penalty, help_heading = "Sampling")]
    pub presence_penalty: Option<f32>,

    /// Subtract from the logits of tokens for each time they are in the answer, -100 to 100; 0 is off.
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = penalty, help_heading = "Sampling")]
    pub frequency_penalty: Option<f32>,

    /// Add to the logits of some tokens before anything else, each by -100 to 100: `--logit-bias 1234:5,77:-100`.
    #[arg(long, value_name = "ID:BIAS[,…]", allow_hyphen_values = true, value_parser = bias, help_heading = "Sampling")]
    pub logit_bias: Option<Arc<LogitBias>>,
}

/// Qwen's recommendations for Qwen3.6-35B-A3B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    /// Thinking, for general tasks: temperature 1, top-p 0.95, top-k 20, presence penalty 1.5.
    Thinking,
    /// Thinking, for precise coding: temperature 0.6, top-p 0.95, top-k 20.
    Coding,
    /// Without thinking, as --no-think: temperature 0.7, top-p 0.8, top-k 20, presence penalty 1.5.
    NoThink,
}

impl Preset {
    /// Temperature, top-p and presence penalty.
    fn values(self) -> (f32, f32, f32) {
        match self {
            Self::Thinking => (1.0, 0.95, 1.5),
            Self::Coding => (0.6, 0.95, 0.0),
            Self::NoThink => (0.7, 0.8, 1.5),
        }
    }
}

impl SamplingArgs {
    /// Whether the preset asks for an answer without thinking.
    pub fn no_think(&self) -> bool {
        self.preset == Some(Preset::NoThink)
    }

    /// The options; what they leave open is the preset's, or else the checkpoint's.
    pub fn params(&self, defaults: &GenerationDefaults) -> SampleParams {
        let mut base = SampleParams {
            temperature: if defaults.do_sample { defaults.temperature } else { 0.0 },
            top_k: defaults.top_k,
            top_p: defaults.top_p,
            min_p: defaults.min_p,
            repetition_penalty: defaults.repetition_penalty,
            presence_penalty: defaults.presence_penalty,
            frequency_penalty: defaults.frequency_penalty,
            ..SampleParams::GREEDY
        };
        if let Some(preset) = self.preset {
            (base.temperature, base.top_p, base.presence_penalty) = preset.values();
            (base.top_k, base.min_p, base.repetition_penalty) = (20, 0.0, 1.0);
            base.frequency_penalty = 0.0;
        }
        SampleParams {
            temperature: self.temperature.unwrap_or(base.temperature),
            top_k: self.top_k.unwrap_or(base.top_k),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(base.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(base.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(base.frequency_penalty),
            seed: self.seed.unwrap_or_else(random_seed),
            logit_bias: self.logit_bias.clone(),
            ..base
        }
    }
}

/// 32 bits, so that every JSON reader keeps it exactly and people can copy it.
fn random_seed() -> u64 {
    // The standard library's hash maps take their keys from the system's randomness.
    std::collections::hash_map::RandomState::new().build_hasher().finish() >> 32
}

fn number(text: &str, range: RangeInclusive<f32>) -> Result<f32, String> {
    match text.parse() {
        Ok(x) if range.contains(&x) => Ok(x),
        _ => Err(format!("a number from {} to {} is needed", range.start(), range.end())),
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    number(text, 0.0..=100.0)
}

fn share(text: &str) -> Result<f32, String> {
    number(text, 0.0..=1.0)
}

fn repetition(text: &str) -> Result<f32, String> {
    number(text, 0.01..=100.0)
}

fn penalty(text: &str) -> Result<f32, String> {
    number(text, -100.0..=100.0)
}

fn bias(text: &str) -> Result<Arc<LogitBias>, String> {
    let entry = |part: &str| {
        let (id, bias) = part.split_once(':')?;
        Some((id.trim().parse().ok()?, bias.trim().parse().ok()?))
    };
    let entries: Option<Vec<(u32, f32)>> = text.split(',').map(entry).collect();
    let entries =
        entries.ok_or("pairs of a token id and a number are needed, as in 1234:5,77:-100")?;
    LogitBias::new(entries).map(Arc::new)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    fn params(args: &[&str], defaults: &GenerationDefaults) -> SampleParams {
        let args = ["test"].iter().chain(args);
        Line::try_parse_from(args).map(|line| line.sampling.params(defaults)).unwrap()
    }

    #[test]
    fn options_win_over_presets_and_presets_over_defaults() {
        let defaults = GenerationDefaults {
            temperature: 0.5,
            top_k: 7,
            top_p: 0.5,
            min_p: 0.25,
            repetition_penalty: 1.5,
            presence_penalty: 0.5,
            ..GenerationDefaults::default()
        };
        let p = params(&[], &defaults);
        assert_eq!((p.temperature, p.top_k, p.top_p, p.min_p), (0.5, 7, 0.5, 0.25));
        assert_eq!((p.repetition_penalty, p.presence_penalty), (1.5, 0.5));
        for (name, temperature, top_p, presence) in
            [("thinking", 1.0, 0.95, 1.5), ("coding", 0.6, 0.95, 0.0), ("no-think", 0.7, 0.8, 1.5)]
        {
            let p = params(&["--preset", name], &defaults);
            assert_eq!(
                (p.temperature, p.top_p, p.presence_penalty),
                (temperature, top_p, presence)
            );
            assert_eq!((p.top_k, p.min_p, p.repetition_penalty), (20, 0.0, 1.0), "{name}");
        }
        let p = params(&["--preset", "coding", "--top-p", "1", "--seed", "3"], &defaults);
        assert_eq!((p.temperature, p.top_p, p.seed), (0.6, 1.0, 3));
        assert_eq!(p.logit_bias, None);
        let p = params(&["--logit-bias", "77:-100, 5:0.5"], &defaults);
        assert_eq!(p.logit_bias.unwrap().entries(), [(5, 0.5), (77, -100.0)]);
        let greedy = GenerationDefaults { do_sample: false, ..defaults };
        assert_eq!(params(&[], &greedy).temperature, 0.0);
        assert_eq!(params(&["--preset", "coding"], &greedy).temperature, 0.6);
    }
}
