//! Other engines, as programs: found, started, watched, their output parsed.

mod llama;
mod mlx;
mod process;

use std::path::PathBuf;
use std::time::Duration;

pub use llama::{LlamaBench, LlamaOptions, LlamaTest, parse_llama_bench};
pub use mlx::{MlxFile, MlxLm, MlxReady, MlxScore, parse_ready, parse_score, parse_seconds};

/// Which other engine, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerSpec {
    /// llama.cpp: the folder of its build.
    LlamaCpp(PathBuf),
    /// mlx-lm: a Python interpreter that has it.
    MlxLm(PathBuf),
}

impl std::str::FromStr for PeerSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some(("llama.cpp", dir)) if !dir.is_empty() => Ok(Self::LlamaCpp(dir.into())),
            Some(("mlx-lm", python)) if !python.is_empty() => Ok(Self::MlxLm(python.into())),
            _ => Err("there are llama.cpp=DIR (a folder with llama-bench) and mlx-lm=PYTHON (an interpreter)".into()),
        }
    }
}

/// How long a peer may take for one answer, unless asked otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs() {
        let parse = |text: &str| text.parse::<PeerSpec>();
        assert_eq!(parse("llama.cpp=/a=b"), Ok(PeerSpec::LlamaCpp("/a=b".into())));
        assert_eq!(parse("mlx-lm=python3"), Ok(PeerSpec::MlxLm("python3".into())));
        for wrong in ["llama.cpp", "llama.cpp=", "ollama=/x", "", "=x"] {
            assert!(parse(wrong).unwrap_err().contains("llama.cpp=DIR"), "{wrong}");
        }
    }
}
