//! Lily made ready to be measured: how long that takes, what memory it takes.

use std::fs;
use std::sync::Arc;

use lily_bench::{Clock, Engine as _, LilyEngine, Protocol, SystemClock, timed};
use lily_device::Device;
use lily_engine::{Budget, Cancel, Engine, EngineOptions, Machine, budget, snapshot_bytes};
use serde_json::{Value, json};

use crate::model::Opened;
use crate::output::{bytes, table};

/// Seconds until the first token, in their parts.
#[derive(Clone, Copy, Debug)]
pub struct Startup {
    /// Files opened, headers read, the plan made.
    pub open: f64,
    /// The device opened and the model prepared on it.
    pub prepare: f64,
    /// The first token of a prompt of one token.
    pub first_token: f64,
}

/// Lily, ready.
pub struct Loaded {
    pub engine: LilyEngine,
    pub device: String,
    pub startup: Startup,
}

/// Prepares the model for a protocol on a device. `facts` are told with the figures.
pub fn load(
    opened: &Opened,
    open: f64,
    device: impl FnOnce() -> anyhow::Result<Box<dyn Device>>,
    name: &str,
    (protocol, chunk): (&Protocol, usize),
    cancel: &Cancel,
) -> anyhow::Result<Loaded> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let (prepared, prepare) = timed(&*clock, || -> anyhow::Result<(Engine, String)> {
        let device = device()?;
        let options = options(opened, protocol, chunk, &*device);
        let (plan, weights) = (Arc::clone(&opened.model.plan), opened.model.weights.clone());
        Ok((Engine::new(&*device, plan, weights, options)?, device.name()))
    });
    let (engine, device) = prepared?;
    let facts = vec![
        ("model".to_owned(), opened.checkpoint.source().to_owned()),
        ("device".to_owned(), device.clone()),
        ("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
    ];
    let mut engine = LilyEngine::new(name, engine, clock, cancel.clone()).with_facts(facts);
    let first_token = engine.prefill(1)?;
    Ok(Loaded { engine, device, startup: Startup { open, prepare, first_token } })
}

/// Room for a copy of the longest context where the machine can spare it: contexts are then filled once a length
/// and not once a round.
fn options(
    opened: &Opened,
    protocol: &Protocol,
    chunk: usize,
    device: &dyn Device,
) -> EngineOptions {
    let plan = &opened.model.plan;
    let longest = protocol.decode.iter().copied().max().unwrap_or(0);
    let base = EngineOptions::new(protocol.context(), 1, chunk);
    let base = EngineOptions { undo: device.overlaps(), ..base };
    let with_copy = EngineOptions { snapshot_bytes: snapshot_bytes(plan, longest), ..base };
    let machine = Machine::detect();
    let spared = machine.available.is_none_or(|a| with_copy.snapshot_bytes <= a / 4);
    match spared && budget(device, plan, &with_copy).check(&machine, device.memory_limit()).is_ok()
    {
        true => with_copy,
        false => base,
    }
}

/// Memory as it was planned, and as it turned out.
pub struct Memory {
    budget: Budget,
    scratch_used: u64,
    /// Most that the process had resident, mapped files included.
    peak: Option<u64>,
    /// What it has now that is no file's.
    anonymous: Option<u64>,
}

impl Memory {
    pub fn of(engine: &LilyEngine) -> Self {
        let inner = engine.inner();
        Self {
            budget: inner.budget(),
            scratch_used: inner.program().scratch_high_water(),
            peak: status("VmHWM:"),
            anonymous: status("RssAnon:"),
        }
    }

    pub fn json(&self) -> Value {
        let b = &self.budget;
        json!({
            "weights": b.weights,
            "weights_read_once": b.droppable(),
            "copies": b.copies,
            "kv": b.kv,
            "state": b.state,
            "scratch": b.scratch,
            "scratch_used": self.scratch_used,
            "snapshots": b.snapshots,
            "total": b.total(),
            "process_peak": self.peak,
            "process_anonymous": self.anonymous,
        })
    }

    pub fn text(&self) -> String {
        let b = &self.budget;
        let row = |what: &str, n: u64| vec![what.to_owned(), bytes(n)];
        let mut rows = vec![
            row("weights, mapped from the files", b.weights),
            row("of it read once, then dropped at need", b.droppable()),
            row("copies of weights", b.copies),
            row("KV cache", b.kv),
            row("recurrent state", b.state),
            row("scratch", b.scratch),
            row("of it used", self.scratch_used),
            row("copy of a context", b.snapshots),
        ];
        rows.extend(self.peak.map(|n| row("process, peak with mapped files", n)));
        rows.extend(self.anonymous.map(|n| row("process, allocated", n)));
        format!("\nmemory\n{}", table(&rows))
    }
}

/// A figure of `/proc/self/status`, in bytes.
fn status(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok()?.checked_mul(1024)
}

impl Startup {
    pub fn json(&self) -> Value {
        json!({
            "open_seconds": self.open,
            "prepare_seconds": self.prepare,
            "first_token_seconds": self.first_token,
        })
    }

    pub fn text(&self) -> String {
        format!(
            "start-up: opened in {:.3} s, prepared in {:.3} s, first token of one {:.3} s later",
            self.open, self.prepare, self.first_token
        )
    }
}
