//! What it takes to copy a session to the host's memory, and to go on from the copy.

use serde_json::{Value, json};

use crate::report::Table;
use crate::results::{Figure, significant};
use crate::stats::median;

/// A snapshot of one context, some times.
#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotTimes {
    /// Tokens of the context.
    pub context: usize,
    /// The times, or why there are none.
    pub times: Result<Moves, String>,
}

/// What the rounds took.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moves {
    /// Bytes of the copy.
    pub bytes: u64,
    /// Seconds of copying a session, each round's.
    pub to_host: Vec<f64>,
    /// Seconds of putting the copy into an empty session and decoding one token behind it, each round's.
    pub resumed: Vec<f64>,
}

impl SnapshotTimes {
    /// What, seconds, bytes.
    fn parts(&self) -> Vec<(&'static str, &[f64], u64)> {
        let Ok(m) = &self.times else { return Vec::new() };
        vec![
            ("to the host", m.to_host.as_slice(), m.bytes),
            ("back, and one token", m.resumed.as_slice(), m.bytes),
        ]
    }

    /// A table of all lengths.
    pub fn table(all: &[Self]) -> Table {
        let head = ["context", "MB", "to the host ms", "GB/s", "back, and one token ms", "GB/s"];
        let mut rows = vec![head.map(String::from).to_vec()];
        let mut notes = Vec::new();
        for at in all {
            if let Err(why) = &at.times {
                notes.push(format!("not measured at {}: {why}", at.context));
                continue;
            }
            let mut row = vec![at.context.to_string()];
            for (i, (_, seconds, bytes)) in at.parts().into_iter().enumerate() {
                if i == 0 {
                    row.push(format!("{:.1}", bytes as f64 / 1e6));
                }
                let seconds = middle(seconds);
                row.push(format!("{:.2}", seconds * 1e3));
                row.push(format!("{:.2}", rate(bytes, seconds) / 1e9));
            }
            rows.push(row);
        }
        Table { title: "snapshots of a session".into(), rows, notes }
    }

    /// Everything.
    pub fn json(&self) -> Value {
        let moves = self.times.as_ref().ok();
        json!({
            "context": self.context,
            "bytes": moves.map(|m| m.bytes),
            "to_host_seconds": moves.map(|m| &m.to_host),
            "resumed_seconds": moves.map(|m| &m.resumed),
            "trouble": self.times.as_ref().err(),
        })
    }

    /// Figures for the record, in seconds.
    pub fn figures(&self) -> Vec<Figure> {
        let figure = |(what, seconds, bytes): (&str, &[f64], u64)| Figure {
            what: format!("snapshot of {} tokens, {bytes} bytes: {what}", self.context),
            value: significant(middle(seconds)),
            unit: "s".into(),
            rounds: seconds.to_vec(),
        };
        self.parts().into_iter().map(figure).collect()
    }
}

/// The median; 0 without rounds.
fn middle(seconds: &[f64]) -> f64 {
    median(seconds).unwrap_or_default()
}

/// Bytes a second.
fn rate(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_a_length_and_a_note_for_trouble() {
        let moves = Moves {
            bytes: 1 << 20,
            to_host: vec![0.5, 0.25, 1.0],
            resumed: vec![0.125, 2.0, 0.25],
        };
        let good = SnapshotTimes { context: 64, times: Ok(moves) };
        let bad = SnapshotTimes { context: 8, times: Err("no memory".into()) };
        let table = SnapshotTimes::table(&[good.clone(), bad.clone()]);
        assert_eq!(table.rows[1], ["64", "1.0", "500.00", "0.00", "250.00", "0.00"]);
        assert_eq!((table.rows.len(), &table.notes[0][..]), (2, "not measured at 8: no memory"));
        assert_eq!(good.json()["resumed_seconds"][1], 2.0);
        assert_eq!(bad.json()["trouble"], "no memory");
        let figures = good.figures();
        assert_eq!(figures[0].what, "snapshot of 64 tokens, 1048576 bytes: to the host");
        assert_eq!((&figures[1].value[..], figures[1].rounds.len()), ("0.25000", 3));
        assert!(bad.figures().is_empty());
    }
}
