//! llama.cpp by its own `llama-bench`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lily_engine::Cancel;
use serde_json::Value;

use super::process::{Patience, output};
use crate::engine::{Engine, Point, Trouble};

/// A setting that is this much slower in the warm-up is not measured in the rounds.
const HOPELESS: f64 = 1.05;

/// How a run computes, and how it reads the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setting {
    flash: bool,
    mapped: bool,
}

/// The option that says how the file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// `-lm mmap` and `-lm none`.
    LoadMode,
    /// `-mmp 1` and `-mmp 0`, in older ones.
    Mmap,
    /// None that is known: its default.
    Default,
}

impl Reading {
    /// From what `--help` prints.
    fn of(help: &str) -> Self {
        match help {
            h if h.contains("--load-mode") => Self::LoadMode,
            h if h.contains("--mmap") => Self::Mmap,
            _ => Self::Default,
        }
    }

    fn arguments(self, mapped: bool) -> &'static [&'static str] {
        match (self, mapped) {
            (Self::LoadMode, true) => &["-lm", "mmap"],
            (Self::LoadMode, false) => &["-lm", "none"],
            (Self::Mmap, true) => &["-mmp", "1"],
            (Self::Mmap, false) => &["-mmp", "0"],
            (Self::Default, _) => &[],
        }
    }
}

impl std::fmt::Display for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let read = if self.mapped { "mapped" } else { "read into memory" };
        write!(f, "-fa {}, {read}", u8::from(self.flash))
    }
}

/// One test of a `llama-bench -o json` run.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaTest {
    /// Tokens of the prompt, 0 in a test of generation.
    pub prompt: u64,
    /// Tokens generated, 0 in a test of a prompt.
    pub generated: u64,
    /// Tokens in the cache before.
    pub depth: u64,
    /// Seconds, one a repetition.
    pub seconds: Vec<f64>,
    /// Build, backend, model and settings, for the report.
    pub facts: Vec<(String, String)>,
}

/// Parses what `llama-bench -o json` prints: an array of tests. Unknown fields do no harm; fields that changed
/// their type between versions are taken as they come.
pub fn parse_llama_bench(text: &str) -> Result<Vec<LlamaTest>, Trouble> {
    let bad = |what: String| Trouble::Failed(format!("llama-bench printed {what}"));
    // Some builds say something before the array.
    let start = text.find("[\n").or_else(|| text.find('[')).unwrap_or(0);
    let value: Value = serde_json::from_str(text[start..].trim())
        .map_err(|error| bad(format!("no JSON: {error}")))?;
    let tests = value.as_array().ok_or_else(|| bad("JSON, but no array of tests".into()))?;
    tests.iter().map(|test| parse_test(test).map_err(bad)).collect()
}

fn parse_test(test: &Value) -> Result<LlamaTest, String> {
    let number = |key: &str| test[key].as_u64().ok_or_else(|| format!("a test without {key}"));
    let nanos: Vec<f64> = match test["samples_ns"].as_array() {
        Some(samples) => samples.iter().filter_map(Value::as_f64).collect(),
        None => Vec::new(),
    };
    // Versions before samples_ns have the average alone.
    let nanos = match nanos.is_empty() {
        true => vec![test["avg_ns"].as_f64().ok_or("a test without samples_ns and avg_ns")?],
        false => nanos,
    };
    let fact = |key: &str| match &test[key] {
        Value::Null => None,
        Value::String(text) => Some((key.to_owned(), text.clone())),
        other => Some((key.to_owned(), other.to_string())),
    };
    let told = ["build_commit", "build_number", "backends", "cpu_info", "gpu_info", "model_type"];
    let told = told.into_iter().chain(["model_size", "n_threads", "n_ubatch", "flash_attn"]);
    let told = told.chain(["use_mmap", "load_mode"]);
    Ok(LlamaTest {
        prompt: number("n_prompt")?,
        generated: number("n_gen")?,
        // Older than the option for it.
        depth: test["n_depth"].as_u64().unwrap_or(0),
        seconds: nanos.into_iter().map(|ns| ns / 1e9).collect(),
        facts: told.filter_map(fact).collect(),
    })
}

/// What llama.cpp is run on, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlamaOptions {
    /// The folder of its build, or above it.
    pub dir: PathBuf,
    /// The model's GGUF file.
    pub model: PathBuf,
    /// Threads; its own choice if `None`.
    pub threads: Option<usize>,
    /// More arguments of `llama-bench`, such as `-ngl 99 -ub 2048`.
    pub args: Vec<String>,
    /// Whether the file may also be read into memory, where it then is twice.
    pub unmapped: bool,
    /// How long one run of it may take.
    pub timeout: Duration,
}

impl LlamaOptions {
    /// Whether the arguments ask for flash attention: it is not varied then.
    fn flash(&self) -> Option<bool> {
        let at = self.args.iter().position(|a| a == "-fa" || a == "--flash-attn")?;
        Some(self.args.get(at + 1).is_none_or(|value| !["0", "off"].contains(&value.as_str())))
    }
}

/// llama.cpp, by one run of `llama-bench` for each measurement: with flash attention and without, the file mapped and
/// read into memory; the best one counts. It warms up by itself before it measures.
pub struct LlamaBench {
    program: PathBuf,
    options: LlamaOptions,
    patience: Patience,
    reading: Option<Reading>,
    /// Those that are worth measuring at this point.
    settings: Vec<Setting>,
    facts: Vec<(String, String)>,
    /// The best setting of each point.
    best: Vec<(String, String)>,
}

impl LlamaBench {
    /// Finds the program and the file.
    pub fn new(options: LlamaOptions, cancel: Cancel) -> Result<Self, Trouble> {
        let program = find(&options.dir)?;
        if !options.model.is_file() {
            return Err(Trouble::Missing(format!(
                "the GGUF file {} is not there; name it with --gguf, or write one with `lily bench synth --gguf`",
                options.model.display()
            )));
        }
        let patience = Patience { timeout: options.timeout, cancel };
        let (facts, best) = (Vec::new(), Vec::new());
        Ok(Self { program, options, patience, reading: None, settings: Vec::new(), facts, best })
    }

    /// The option of this program that says how the file is read.
    fn reading(&mut self) -> Result<Reading, Trouble> {
        if let Some(reading) = self.reading {
            return Ok(reading);
        }
        let mut command = Command::new(&self.program);
        command.arg("--help");
        let reading = match output(command, &self.patience) {
            Ok(help) => Reading::of(&help),
            Err(Trouble::Failed(_)) => Reading::Default,
            Err(trouble) => return Err(trouble),
        };
        self.reading = Some(reading);
        Ok(reading)
    }

    /// All settings that this program and this machine have, but for what the arguments settle.
    fn all_settings(&mut self) -> Result<Vec<Setting>, Trouble> {
        let reading = self.reading()?;
        let unmapped = self.options.unmapped && reading != Reading::Default;
        let reads: &[bool] = if unmapped { &[true, false] } else { &[true] };
        let flash: &[bool] = match self.options.flash() {
            Some(true) => &[true],
            Some(false) => &[false],
            None => &[false, true],
        };
        let with = |mapped: &bool| {
            let mapped = *mapped;
            flash.iter().map(move |flash| Setting { flash: *flash, mapped })
        };
        Ok(reads.iter().flat_map(with).collect())
    }

    fn arguments(&self, point: Point, setting: Setting) -> Vec<String> {
        let flash = if setting.flash { "1" } else { "0" };
        let mut args: Vec<String> = ["-o", "json", "-r", "1"].map(Into::into).into();
        if self.options.flash().is_none() {
            args.extend(["-fa".into(), flash.into()]);
        }
        let reading = self.reading.unwrap_or(Reading::Default);
        args.extend(reading.arguments(setting.mapped).iter().map(|a| (*a).to_owned()));
        args.extend(["-m".into(), self.options.model.display().to_string()]);
        if let Some(threads) = self.options.threads {
            args.extend(["-t".into(), threads.to_string()]);
        }
        args.extend(match point {
            Point::Prefill { tokens } => {
                ["-p".into(), tokens.to_string(), "-n".into(), "0".into()].to_vec()
            }
            Point::Decode { context, tokens } => {
                let numbers = ["0".into(), tokens.to_string(), context.to_string()];
                ["-p", "-n", "-d"]
                    .into_iter()
                    .map(String::from)
                    .zip(numbers)
                    .flat_map(|(a, b)| [a, b])
                    .collect()
            }
        });
        args.extend(self.options.args.iter().cloned());
        args
    }

    fn once(&mut self, point: Point, setting: Setting) -> Result<f64, Trouble> {
        let mut command = Command::new(&self.program);
        command.args(self.arguments(point, setting));
        let tests = parse_llama_bench(&output(command, &self.patience)?)?;
        let (prompt, generated, depth) = match point {
            Point::Prefill { tokens } => (tokens, 0, 0),
            Point::Decode { context, tokens } => (0, tokens, context),
        };
        let want = (prompt as u64, generated as u64, depth as u64);
        let test = tests.into_iter().find(|t| (t.prompt, t.generated, t.depth) == want);
        let test = test.ok_or_else(|| {
            Trouble::Failed(format!("llama-bench measured something else than {point}"))
        })?;
        self.facts = test.facts;
        let best = test.seconds.into_iter().reduce(f64::min);
        best.ok_or_else(|| Trouble::Failed("llama-bench has no figure".into()))
    }

    /// The times of each setting that works; trouble if none does.
    fn all(&mut self, point: Point) -> Result<Vec<(Setting, f64)>, Trouble> {
        if self.settings.is_empty() {
            self.settings = self.all_settings()?;
        }
        let mut times = Vec::new();
        let mut trouble = None;
        for setting in self.settings.clone() {
            match self.once(point, setting) {
                Ok(seconds) => times.push((setting, seconds)),
                Err(Trouble::Interrupted) => return Err(Trouble::Interrupted),
                Err(error) => trouble = Some(error),
            }
        }
        match trouble {
            Some(trouble) if times.is_empty() => Err(trouble),
            _ => Ok(times),
        }
    }
}

/// `llama-bench` in a folder, or where a build below it puts it.
fn find(dir: &Path) -> Result<PathBuf, Trouble> {
    let name = format!("llama-bench{}", std::env::consts::EXE_SUFFIX);
    let places = ["", "bin", "build/bin"].map(|place| dir.join(place).join(&name));
    let found = places.iter().find(|path| path.is_file()).cloned();
    found.ok_or_else(|| {
        Trouble::Missing(format!(
            "there is no {name} in {0}, {0}/bin or {0}/build/bin; build llama.cpp's target llama-bench",
            dir.display()
        ))
    })
}

impl Engine for LlamaBench {
    fn name(&self) -> &str {
        "llama.cpp"
    }

    fn facts(&self) -> Vec<(String, String)> {
        let mut facts = vec![("file".to_owned(), self.options.model.display().to_string())];
        // Which setting the last run had says nothing; which was best at each point does.
        let runs = |key: &str| ["flash_attn", "use_mmap", "load_mode"].contains(&key);
        facts.extend(self.facts.iter().filter(|(key, _)| !runs(key)).cloned());
        facts.extend(self.best.iter().cloned());
        facts
    }

    fn warm_up(&mut self, point: Point) -> Result<(), Trouble> {
        self.settings = self.all_settings()?;
        // The program warms up by itself: where there is nothing to choose from, nothing is left to do.
        if let [only] = self.settings[..] {
            self.best.retain(|(k, _)| *k != format!("best at {point}"));
            self.best.push((format!("best at {point}"), only.to_string()));
            return Ok(());
        }
        let times = self.all(point)?;
        let best = times.iter().map(|t| t.1).fold(f64::INFINITY, f64::min);
        self.settings = times.iter().filter(|t| t.1 <= HOPELESS * best).map(|t| t.0).collect();
        let names: Vec<String> = self.settings.iter().map(Setting::to_string).collect();
        let key = format!("best at {point}");
        self.best.retain(|(k, _)| *k != key);
        self.best.push((key, names.join(" or ")));
        Ok(())
    }

    fn prefill(&mut self, tokens: usize) -> Result<f64, Trouble> {
        self.measure(Point::Prefill { tokens })
    }

    fn decode(&mut self, context: usize, tokens: usize) -> Result<f64, Trouble> {
        self.measure(Point::Decode { context, tokens })
    }

    fn measure(&mut self, point: Point) -> Result<f64, Trouble> {
        let times = self.all(point)?;
        Ok(times.into_iter().map(|t| t.1).fold(f64::INFINITY, f64::min))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_has_its_own_option_for_reading() {
        let recorded = include_str!("../../tests/recorded/llama-bench/help-load-mode.stdout");
        assert_eq!(Reading::of(recorded), Reading::LoadMode);
        assert_eq!(Reading::of("  -mmp, --mmap <0|1>  (default: 1)"), Reading::Mmap);
        assert_eq!(Reading::of("usage"), Reading::Default);
        assert_eq!(Reading::LoadMode.arguments(false), ["-lm", "none"]);
        assert_eq!(Reading::Mmap.arguments(true), ["-mmp", "1"]);
    }
}
