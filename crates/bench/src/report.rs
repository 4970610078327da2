//! What was measured as tables, JSON and plots.

use serde_json::{Value, json};

use crate::engine::Phase;
use crate::floors::{Limits, Work};
use crate::plot::{Curve, Plot};
use crate::protocol::{Measured, MeasuredPoint};
use crate::stats::Summary;

/// The floors of the measured points, and what they follow from.
#[derive(Clone, Debug, PartialEq)]
pub struct Floors {
    /// What the machine can do.
    pub limits: Limits,
    /// What each point cannot do without, in the order of [`Measured::points`].
    pub work: Vec<Work>,
}

impl Floors {
    /// Of all points that were measured.
    pub fn new(plan: &lily_ops::Plan, limits: Limits, measured: &Measured) -> Self {
        let work = measured.points.iter().map(|p| Work::of(plan, p.point)).collect();
        Self { limits, work }
    }

    /// Least seconds of a point.
    pub fn seconds(&self, point: usize) -> f64 {
        self.work[point].seconds(&self.limits)
    }
}

/// A table with what belongs above and below it.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// What it shows.
    pub title: String,
    /// Rows, the first of them its head.
    pub rows: Vec<Vec<String>>,
    /// Lines below it.
    pub notes: Vec<String>,
}

/// One table for each phase that was measured.
pub fn tables(measured: &Measured, floors: Option<&Floors>) -> Vec<Table> {
    [Phase::Prefill, Phase::Decode]
        .into_iter()
        .filter(|phase| measured.phase(*phase).next().is_some())
        .map(|phase| table(measured, floors, phase))
        .collect()
}

fn table(measured: &Measured, floors: Option<&Floors>, phase: Phase) -> Table {
    let mut rows = vec![head(measured, floors, phase)];
    let mut notes = Vec::new();
    for (i, point) in measured.points.iter().enumerate() {
        if point.point.phase() != phase {
            continue;
        }
        rows.push(row(measured, point, floors.map(|f| f.seconds(i))));
        for (name, cell) in measured.engines.iter().zip(&point.cells) {
            if let Some(trouble) = &cell.trouble {
                notes.push(format!("{name}, {}: {trouble}", point.point));
            }
        }
    }
    for (i, name) in measured.engines.iter().enumerate().skip(1) {
        notes.push(mean_line(measured, phase, i, name));
    }
    let rounds = measured.phase(phase).flat_map(|p| &p.cells).map(|c| c.seconds.len()).max();
    let rounds = rounds.unwrap_or(0);
    let title = format!("{phase}: tokens a second, median of {rounds} rounds ± half the spread");
    Table { title, rows, notes }
}

fn head(measured: &Measured, floors: Option<&Floors>, phase: Phase) -> Vec<String> {
    let mut head = vec![match phase {
        Phase::Prefill => "prompt".to_owned(),
        Phase::Decode => "context".to_owned(),
    }];
    for name in &measured.engines {
        head.push(name.clone());
        head.extend(floors.map(|_| "of floor".to_owned()));
    }
    let own = &measured.engines[0];
    head.extend(measured.engines.iter().skip(1).map(|name| format!("{own} / {name}")));
    head
}

fn row(measured: &Measured, point: &MeasuredPoint, floor: Option<f64>) -> Vec<String> {
    let mut row = vec![point.point.length().to_string()];
    for i in 0..measured.engines.len() {
        row.push(match point.speed(i) {
            Some(s) => format!("{} ± {:.1} %", speed(s.median), 50.0 * s.spread()),
            None => "no figure".to_owned(),
        });
        let of_floor = |floor| match point.seconds(i) {
            Some(seconds) => format!("{:.3}", floor / seconds),
            None => "–".to_owned(),
        };
        row.extend(floor.map(of_floor));
    }
    for i in 1..measured.engines.len() {
        row.push(point.ratio(i).map_or("–".to_owned(), ratio));
    }
    row
}

fn ratio(r: Summary) -> String {
    format!("{:.3} ({:.3} to {:.3}){}", r.median, r.min, r.max, verdict(r.median))
}

/// A loss is called one.
fn verdict(ratio: f64) -> &'static str {
    match ratio < 1.0 {
        true => " slower",
        false => "",
    }
}

fn mean_line(measured: &Measured, phase: Phase, engine: usize, name: &str) -> String {
    let own = &measured.engines[0];
    let of = measured.phase(phase).count();
    match measured.mean_ratio(phase, engine) {
        Some((mean, n)) => {
            format!("mean of {own} / {name} over {n} of {of} lengths: {mean:.3}{}", verdict(mean))
        }
        None => format!("mean of {own} / {name}: no length has figures of both"),
    }
}

/// Tokens a second with as many digits as mean something.
pub fn speed(tokens_per_second: f64) -> String {
    match tokens_per_second {
        s if s >= 100.0 => format!("{s:.0}"),
        s if s >= 10.0 => format!("{s:.1}"),
        s => format!("{s:.2}"),
    }
}

/// Everything, raw rounds included.
pub fn as_json(measured: &Measured, floors: Option<&Floors>) -> Value {
    let points: Vec<Value> = measured
        .points
        .iter()
        .enumerate()
        .map(|(i, point)| point_json(measured, point, floors.map(|f| (f, i))))
        .collect();
    let engines: Vec<Value> = measured
        .engines
        .iter()
        .zip(&measured.facts)
        .map(|(name, facts)| {
            let facts: serde_json::Map<String, Value> =
                facts.iter().map(|(k, v)| (k.clone(), v.as_str().into())).collect();
            json!({ "name": name, "facts": facts })
        })
        .collect();
    json!({
        "engines": engines,
        "points": points,
        "means": means_json(measured),
        "limits": floors.map(|f| json!({
            "bytes_per_second": f.limits.bytes_per_second,
            "macs_per_second": f.limits.macs_per_second,
            "how": f.limits.how,
        })),
        "interrupted": measured.interrupted(),
    })
}

fn point_json(
    measured: &Measured,
    point: &MeasuredPoint,
    floors: Option<(&Floors, usize)>,
) -> Value {
    let floor = floors.map(|(f, i)| f.seconds(i));
    let cell = |(i, name): (usize, &String)| {
        let cell = &point.cells[i];
        let speed = point.speed(i);
        json!({
            "engine": name,
            "seconds": cell.seconds,
            "trouble": cell.trouble.as_ref().map(ToString::to_string),
            "tokens_per_second": speed.map(|s| s.median),
            "spread": speed.map(|s| s.spread()),
            "of_floor": floor.and_then(|f| Some(f / point.seconds(i)?)),
            "ratios": (i > 0).then(|| point.ratios(i)).flatten(),
            "ratio": (i > 0).then(|| point.ratio(i)).flatten().map(|r| r.median),
        })
    };
    json!({
        "phase": point.point.phase().to_string(),
        "length": point.point.length(),
        "tokens": point.point.tokens(),
        "floor_seconds": floor,
        "floor_bytes": floors.map(|(f, i)| f.work[i].bytes),
        "floor_macs": floors.map(|(f, i)| f.work[i].macs),
        "engines": measured.engines.iter().enumerate().map(cell).collect::<Vec<_>>(),
    })
}

fn means_json(measured: &Measured) -> Value {
    let mut means = Vec::new();
    for phase in [Phase::Prefill, Phase::Decode] {
        for (i, name) in measured.engines.iter().enumerate().skip(1) {
            if let Some((mean, lengths)) = measured.mean_ratio(phase, i) {
                means.push(json!({
                    "phase": phase.to_string(),
                    "engine": name,
                    "ratio": mean,
                    "lengths": lengths,
                }));
            }
        }
    }
    means.into()
}

/// One plot for each phase that was measured, with a name for its file.
pub fn plots(measured: &Measured, floors: Option<&Floors>, title: &str) -> Vec<(String, Plot)> {
    let plot = |phase: Phase| {
        let mut curves: Vec<Curve> = (0..measured.engines.len())
            .map(|i| Curve {
                name: measured.engines[i].clone(),
                points: curve(measured, phase, |_, p| Some(p.speed(i)?.median)),
            })
            .collect();
        if let Some(floors) = floors {
            let limit =
                |i: usize, p: &MeasuredPoint| Some(p.point.tokens() as f64 / floors.seconds(i));
            curves.push(Curve { name: "limit".into(), points: curve(measured, phase, limit) });
        }
        let x = match phase {
            Phase::Prefill => "tokens of the prompt",
            Phase::Decode => "tokens of the context",
        };
        let plot = Plot {
            title: format!("{phase}, {title}"),
            x: x.into(),
            y: "tokens a second".into(),
            curves,
        };
        (format!("{phase}.svg"), plot)
    };
    [Phase::Prefill, Phase::Decode]
        .into_iter()
        .filter(|phase| measured.phase(*phase).next().is_some())
        .map(plot)
        .collect()
}

fn curve(
    measured: &Measured,
    phase: Phase,
    value: impl Fn(usize, &MeasuredPoint) -> Option<f64>,
) -> Vec<(f64, f64)> {
    let points = measured.points.iter().enumerate();
    points
        .filter(|(_, p)| p.point.phase() == phase)
        .filter_map(|(i, p)| Some((p.point.length() as f64, value(i, p)?)))
        .collect()
}
