//! Other engines, as programs: found, started, watched, their output parsed.

mod llama;
mod mlx;
mod process;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};

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

/// SHA-256 of a file, hexadecimal: to know that a peer reads the same bytes.
pub fn sha256(path: &Path) -> io::Result<String> {
    let mut digest = Sha256::new();
    io::copy(&mut File::open(path)?, &mut digest)?;
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// How long a peer may take for one answer, unless asked otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_everyone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        let want = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(&path).unwrap(), want);
        assert!(sha256(&dir.path().join("none")).is_err());
    }

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
