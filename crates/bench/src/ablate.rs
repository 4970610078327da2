//! What each optimisation is worth: matched pairs of an engine with all of them and one without the one in question.

use serde_json::{Value, json};

use crate::engine::{Engine, Missing, Trouble};
use crate::protocol::{Measured, MeasuredPoint, Protocol, Watch, run};
use crate::report::{Table, as_json};
use crate::results::{Figure, significant};
use crate::stats::Summary;

/// An optimisation that can be left out.
pub struct Switch<'a> {
    /// Its name.
    pub name: String,
    /// Opens the engine without it.
    pub without: Box<dyn FnOnce() -> Result<Box<dyn Engine>, Trouble> + 'a>,
}

/// Measures the engine beside each that leaves something out, one pair after another. One that cannot be opened
/// becomes rows that say why; an interruption ends the run with what there is.
pub fn ablate(
    base: &mut dyn Engine,
    switches: Vec<Switch>,
    protocol: &Protocol,
    watch: &mut dyn Watch,
) -> Vec<Measured> {
    let mut results = Vec::new();
    for Switch { name, without } in switches {
        let mut other =
            without().unwrap_or_else(|trouble| Box::new(Missing::new(name.clone(), trouble)));
        let pair: &mut [&mut dyn Engine] = &mut [base, &mut *other];
        let mut measured = run(pair, protocol, watch);
        measured.engines[1] = name;
        let interrupted = measured.interrupted();
        results.push(measured);
        if interrupted {
            break;
        }
    }
    results
}

/// The table of all pairs.
pub fn table(title: &str, results: &[Measured]) -> Table {
    let head = ["switch", "measured", "effect", "least", "most", "so it"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for measured in results {
        for point in &measured.points {
            let mut row = vec![measured.engines[1].clone(), point.point.to_string()];
            match point.ratio(1) {
                Some(ratio) => {
                    row.extend([ratio.median, ratio.min, ratio.max].map(percent));
                    row.push(verdict(ratio).to_owned());
                }
                None => {
                    let why = point.cells.iter().find_map(|c| c.trouble.as_ref());
                    row.push(why.map_or("not measured".into(), ToString::to_string));
                }
            }
            rows.push(row);
        }
    }
    Table { title: title.to_owned(), rows, notes: Vec::new() }
}

/// Everything, rounds included.
pub fn json(results: &[Measured]) -> Value {
    let switch = |m: &Measured| json!({ "switch": m.engines[1], "measured": as_json(m, None) });
    results.iter().map(switch).collect()
}

fn percent(ratio: f64) -> String {
    format!("{:+.2} %", 100.0 * (ratio - 1.0))
}

/// Pairs that disagree about the sign decide nothing.
fn verdict(ratio: Summary) -> &'static str {
    match ratio {
        r if r.min > 1.0 => "pays",
        r if r.max < 1.0 => "costs",
        _ => "makes no difference",
    }
}

/// Figures for the record: the ratios of all pairs.
pub fn figures(results: &[Measured]) -> Vec<Figure> {
    let figure = |measured: &Measured, point: &MeasuredPoint| {
        let trouble = || point.cells.iter().find_map(|c| c.trouble.as_ref());
        let value = match point.ratio(1) {
            Some(ratio) => significant(ratio.median),
            None => trouble().map_or("not measured".to_owned(), ToString::to_string),
        };
        let what = format!("without {}: {}", measured.engines[1], point.point);
        let rounds = point.ratios(1).unwrap_or_default();
        Figure { what, value, unit: "times the time".into(), rounds }
    };
    results.iter().flat_map(|m| m.points.iter().map(move |p| figure(m, p))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_effect_within_its_spread_is_none() {
        let of = |values: &[f64]| verdict(Summary::of(values).unwrap());
        assert_eq!(of(&[1.02, 1.01, 1.05]), "pays");
        assert_eq!(of(&[0.98, 0.99]), "costs");
        assert_eq!(of(&[0.99, 1.20, 1.30]), "makes no difference");
        assert_eq!(percent(1.0825), "+8.25 %");
    }
}
