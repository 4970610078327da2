//! The full shape on this machine: start-up time and memory.
//!
//! ```text
//! full_shape LILY DIR      LILY: the program; DIR: a synthetic checkpoint of 40 layers, written if absent
//! ```
//!
//! With the checkpoint in the page cache, from the start of the process to the first token of a one-token
//! prompt may take 1 s and two decode steps, and anonymous memory may reach the state (KV pages are a slot's
//! state too) and scratch that `lily inspect` prints and 200 MB. Exits with 1 if a bound is missed.

use std::io::Read;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const CONTEXT: &str = "4096";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [lily, dir] = &arguments[..] else {
        eprintln!("usage: full_shape LILY DIR");
        return ExitCode::from(2);
    };
    match check(lily, Path::new(dir)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("full_shape: {message}");
            ExitCode::FAILURE
        }
    }
}

fn check(lily: &str, dir: &Path) -> Result<bool, String> {
    let name = dir.to_str().ok_or("the folder's name is not UTF-8")?;
    if !dir.join("config.json").exists() {
        output(lily, &["bench", "synth", "--layers", "40", "--out", name])?;
    }
    warm(dir)?;
    let inspected = json(lily, &["inspect", name, "--context", CONTEXT, "--json"])?;
    let memory = |field: &str| {
        inspected["memory"][field].as_u64().ok_or(format!("inspect prints no memory.{field}"))
    };
    let planned = memory("kv")? + memory("state")? + memory("scratch")?;

    let prompt = std::env::temp_dir().join(format!("lily-full-shape-{}.json", std::process::id()));
    std::fs::write(&prompt, "[1]").map_err(|e| e.to_string())?;
    let prompt_name = prompt.to_str().ok_or("the temporary folder's name is not UTF-8")?;
    let run = |tokens: &'static str| {
        [
            "run",
            "--model",
            name,
            "--token-ids",
            prompt_name,
            "--max-tokens",
            tokens,
            "--temperature",
            "0",
            "--context",
            CONTEXT,
            "--json",
        ]
        .map(str::to_string)
    };
    let mut starts = Vec::new();
    let mut peak = 0;
    for _ in 0..5 {
        let (seconds, anonymous) = watched(lily, &run("1"))?;
        starts.push(seconds);
        peak = peak.max(anonymous);
    }
    starts.sort_by(f64::total_cmp);
    let longer = run("17");
    let timings = &json(lily, &longer.each_ref().map(String::as_str))?["timings"];
    let number = |field: &str| timings[field].as_f64().ok_or(format!("no timings.{field}"));
    let step = number("decode_seconds")? / number("decode_tokens")?.max(1.0);
    let _ = std::fs::remove_file(&prompt);

    let (start, bound) = (starts[starts.len() / 2], 1.0 + 2.0 * step);
    println!(
        "start to first token: {start:.3} s (median of {starts:.3?}); bound 1 s + 2 × {step:.3} s"
    );
    let allowed = planned + 200_000_000;
    println!("anonymous memory: {peak} bytes; planned {planned}, bound {allowed}");
    Ok(start <= bound && peak <= allowed)
}

/// Reads every file once, so that the page cache holds it.
fn warm(dir: &Path) -> Result<(), String> {
    let mut buffer = vec![0u8; 1 << 22];
    for entry in std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))? {
        let path = entry.map_err(|e| e.to_string())?.path();
        let mut file =
            std::fs::File::open(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        while file.read(&mut buffer).map_err(|e| e.to_string())? > 0 {}
    }
    Ok(())
}

fn output(lily: &str, arguments: &[&str]) -> Result<Vec<u8>, String> {
    let out = Command::new(lily)
        .args(arguments)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("{lily}: {e}"))?;
    match out.status.success() {
        true => Ok(out.stdout),
        false => Err(format!("{lily} {} fails", arguments.join(" "))),
    }
}

fn json(lily: &str, arguments: &[&str]) -> Result<Value, String> {
    serde_json::from_slice(&output(lily, arguments)?).map_err(|e| e.to_string())
}

/// Runs the program; returns its seconds and the highest anonymous memory seen.
fn watched(lily: &str, arguments: &[String]) -> Result<(f64, u64), String> {
    let start = Instant::now();
    let mut child = Command::new(lily)
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| format!("{lily}: {e}"))?;
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            let seconds = start.elapsed().as_secs_f64();
            return match status.success() {
                true => Ok((seconds, peak)),
                false => Err(format!("{lily} fails")),
            };
        }
        if let Ok(text) = std::fs::read_to_string(&status) {
            let line = text.lines().find_map(|l| l.strip_prefix("RssAnon:"));
            let kb = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
            peak = peak.max(kb.unwrap_or(0) * 1024);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
