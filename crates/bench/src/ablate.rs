//! What each optimisation is worth: matched pairs of an engine with all of them and one without the one in question.

use serde_json::{Value, json};

use crate::cache::CacheReads;
use crate::engine::{Engine, Missing, Trouble};
use crate::protocol::{Measured, MeasuredPoint, Protocol, Watch, run};
use crate::report::{Table, as_json};
use crate::results::{Figure, significant};
use crate::stats::Summary;

/// An optimisation that can be left out.
pub struct Switch<'a> {
    /// Its name.
    pub name: String,
    /// What both of its pair do without.
    pub beside: Vec<String>,
    /// Opens the engine without it.
    pub without: Box<dyn FnOnce() -> Result<Box<dyn Engine>, Trouble> + 'a>,
}

/// A pair, measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Ablated {
    /// What both do without.
    pub beside: Vec<String>,
    /// The engine with the optimisation, and the one without.
    pub measured: Measured,
    /// How fast K and V are read with the optimisation and without, each alone, where that was measured.
    pub cache: Vec<CacheReads>,
}

/// Measures the engine beside each that leaves something out, one pair after another. One that cannot be opened
/// becomes rows that say why; an interruption ends the run with what there is.
pub fn ablate(
    base: &mut dyn Engine,
    switches: Vec<Switch>,
    protocol: &Protocol,
    watch: &mut dyn Watch,
) -> Vec<Ablated> {
    let mut results = Vec::new();
    for Switch { name, beside, without } in switches {
        let mut other =
            without().unwrap_or_else(|trouble| Box::new(Missing::new(name.clone(), trouble)));
        let pair: &mut [&mut dyn Engine] = &mut [base, &mut *other];
        let mut measured = run(pair, protocol, watch);
        measured.engines[1] = name;
        let interrupted = measured.interrupted();
        results.push(Ablated { beside, measured, cache: Vec::new() });
        if interrupted {
            break;
        }
    }
    results
}

/// The table of all pairs.
pub fn table(title: &str, results: &[Ablated]) -> Table {
    let head = ["switch", "measured", "effect", "least", "most", "so it"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for Ablated { measured, .. } in results {
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
pub fn json(results: &[Ablated]) -> Value {
    let switch = |a: &Ablated| {
        json!({
            "switch": a.measured.engines[1],
            "beside": a.beside,
            "measured": as_json(&a.measured, None),
            "cache": a.cache.iter().map(CacheReads::json).collect::<Vec<_>>(),
        })
    };
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
pub fn figures(results: &[Ablated]) -> Vec<Figure> {
    let figure = |ablated: &Ablated, point: &MeasuredPoint| {
        let measured = &ablated.measured;
        let trouble = || point.cells.iter().find_map(|c| c.trouble.as_ref());
        let value = match point.ratio(1) {
            Some(ratio) => significant(ratio.median),
            None => trouble().map_or("not measured".to_owned(), ToString::to_string),
        };
        let both = match &ablated.beside[..] {
            [] => String::new(),
            others => format!(", both without {}", others.join(" and ")),
        };
        let what = format!("without {}: {}{both}", measured.engines[1], point.point);
        let rounds = point.ratios(1).unwrap_or_default();
        Figure { what, value, unit: "times the time".into(), rounds }
    };
    let of = |a: &Ablated| -> Vec<Figure> {
        let pairs = a.measured.points.iter().map(|p| figure(a, p));
        pairs.chain(a.cache.iter().flat_map(CacheReads::figures)).collect()
    };
    results.iter().flat_map(of).collect()
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
