//! Every policy threshold on both sides, kernels alone, and the row that this device should have.

use std::sync::Arc;

use lily_gpu::program::sweep::{Measured, Sizes, Sweep};
use lily_gpu::thresholds::ALL;
use lily_model::{Model, Precision};
use serde_json::{Value, json};

use super::jobs::Pieces;
use super::measure::Measure;
use super::rows::NOISE;
use super::{Outcome, Part, Progress, driver};
use crate::model::open_checkpoint;
use crate::options::DeviceName;

/// Rows and context of the largest steps, the first that there is room for.
const SIZES: [(u32, u32); 4] = [(2048, 65_536), (2048, 16_384), (512, 4096), (64, 1024)];

/// Layers of a prompt's step that are run: their weights are more than caches hold.
const LAYERS: u32 = 4;

fn open(device: DeviceName, model: &Model) -> anyhow::Result<Option<Sweep>> {
    let weights: Vec<_> = model.weights.iter().map(|w| w.as_ref()).collect();
    let mut refused = String::new();
    for (rows, context) in SIZES {
        let Some(driver) = driver(device)? else { return Ok(None) };
        let sizes = Sizes { rows, context, layers: LAYERS };
        match Sweep::new(driver, Arc::clone(&model.plan), &weights, sizes) {
            Ok(sweep) => return Ok(Some(sweep)),
            Err(why) => refused = why,
        }
    }
    anyhow::bail!(refused)
}

/// A value, or that there is no bound.
fn value(n: u32) -> String {
    if n == u32::MAX { "none".into() } else { n.to_string() }
}

fn as_json(m: &Measured) -> Value {
    let cell = |c: &lily_gpu::program::sweep::Cell| json!({ "value": c.value, "step": c.point.to_string(), "seconds": c.seconds });
    let costs: Vec<Value> =
        m.values().into_iter().map(|v| json!({ "value": v, "cost": m.cost(v) })).collect();
    json!({
        "threshold": m.name,
        "current": m.current,
        "best": m.best(),
        "gain": m.gain(),
        "operations": m.operations,
        "costs": costs,
        "cells": m.cells.iter().map(cell).collect::<Vec<_>>(),
    })
}

fn line(found: &Value) -> Option<String> {
    let number = |name: &str| found[name].as_u64().map(|n| value(n as u32));
    let (name, now) = (found["threshold"].as_str()?, number("current")?);
    let Some(best) = number("best") else {
        return Some(format!("{name}: {now}; nothing here hangs on it"));
    };
    let gain = found["gain"].as_f64()?;
    let costs: Vec<String> = found["costs"].as_array()?.iter().filter_map(cost).collect();
    let verdict = match gain >= NOISE {
        true => format!("{best} takes {:.1} % less", 100.0 * gain),
        false => "stays".to_owned(),
    };
    Some(format!("{name}: {now}; {verdict} ({})", costs.join(", ")))
}

fn cost(entry: &Value) -> Option<String> {
    let n = value(entry["value"].as_u64()? as u32);
    Some(format!("{n}: {:.3}", entry["cost"].as_f64()?))
}

/// The device's row of the table in crates/gpu/src/thresholds.rs.
fn row(device: &str, done: &[Value]) -> String {
    let pays = |f: &&Value| f["gain"].as_f64().is_some_and(|gain| gain >= NOISE);
    let entry = |f: &Value| {
        let best = match f["best"].as_u64()? as u32 {
            u32::MAX => "u32::MAX".to_owned(),
            n => n.to_string(),
        };
        Some(format!("({:?}, {best})", f["threshold"].as_str()?))
    };
    let entries: Vec<String> = done.iter().filter(pays).filter_map(entry).collect();
    format!("({device:?}, &[{}]),", entries.join(", "))
}

fn figures(device: &str, so_far: &Pieces) -> Value {
    json!({
        "thresholds": so_far.done,
        "failures": so_far.failures,
        "not_measured": so_far.cut,
        "row": row(device, &so_far.done),
    })
}

/// Measures each threshold. It proposes; only what cannot be measured is a failure.
pub fn sweep(
    device: DeviceName,
    measure: &Measure,
    progress: &mut Progress,
) -> anyhow::Result<Part> {
    if device == DeviceName::Cpu {
        return Ok(Part::left_out("the CPU's kernels have no thresholds of this kind"));
    }
    if let Some(part) = measure.missing() {
        return Ok(part);
    }
    let deadline = measure.deadline();
    let model = lily_model::load(&open_checkpoint(Some(measure.folder()))?, Precision::Standard)?;
    let Some(mut sweep) = open(device, &model)? else {
        return Ok(Part::left_out("this device has no policies"));
    };
    let name = sweep.driver().profile().name.clone();
    let thresholds = ALL.iter().map(|t| (t.name.to_owned(), t)).collect();
    let one = |t: &&lily_gpu::thresholds::Threshold, _| {
        let measured = sweep.threshold(t).map_err(anyhow::Error::msg)?;
        Ok(Some(as_json(&measured)))
    };
    let told = |so_far: &Pieces| progress.found(figures(&name, so_far));
    let all = Pieces::run(deadline, thresholds, one, told)?;
    let mut lines: Vec<String> = all.done.iter().filter_map(line).collect();
    lines.extend(all.failures.iter().chain(&all.cut).cloned());
    lines.push(format!("row for crates/gpu/src/thresholds.rs: {}", row(&name, &all.done)));
    let outcome = match (all.failures.is_empty(), all.cut.is_empty()) {
        (false, _) => Outcome::Failed,
        (true, false) => Outcome::Unfinished,
        (true, true) => Outcome::Passed,
    };
    Ok(Part { outcome, lines, figures: figures(&name, &all) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, best: u32, gain: f64) -> Value {
        let costs = json!([{ "value": 2, "cost": 1.5 }, { "value": best, "cost": 1.0 }]);
        json!({ "threshold": name, "current": 2, "best": best, "gain": gain, "costs": costs })
    }

    #[test]
    fn the_row_has_what_pays() {
        let done = [
            found("split_groups", 4, 0.2),
            found("tile_groups", 8, 0.01),
            found("fixed_from", u32::MAX, 0.1),
            json!({ "threshold": "scan_tokens", "current": 2, "best": null, "gain": 0.0, "costs": [] }),
        ];
        assert_eq!(
            row("Apple M4 Max", &done),
            r#"("Apple M4 Max", &[("split_groups", 4), ("fixed_from", u32::MAX)]),"#
        );
        let lines: Vec<String> = done.iter().filter_map(line).collect();
        assert_eq!(
            lines,
            [
                "split_groups: 2; 4 takes 20.0 % less (2: 1.500, 4: 1.000)",
                "tile_groups: 2; stays (2: 1.500, 8: 1.000)",
                "fixed_from: 2; none takes 10.0 % less (2: 1.500, none: 1.000)",
                "scan_tokens: 2; nothing here hangs on it",
            ]
        );
        assert_eq!(row("Apple M1", &[]), r#"("Apple M1", &[]),"#);
    }
}
