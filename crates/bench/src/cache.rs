//! How fast attention can read K and V at one length, each alone.

use lily_device::CacheRead;
use serde_json::{Value, json};

use crate::report::Table;
use crate::results::{Figure, significant};

/// Reads of K and V of one context.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheReads {
    /// Tokens of the context.
    pub context: usize,
    /// Each kind once, or why there is none.
    pub reads: Result<Vec<CacheRead>, String>,
}

fn name(read: &CacheRead) -> &'static str {
    if read.keys { "K" } else { "V" }
}

fn switch(read: &CacheRead) -> &'static str {
    if read.coalesced { "on" } else { "off" }
}

impl CacheReads {
    fn reads(&self) -> &[CacheRead] {
        self.reads.as_deref().unwrap_or_default()
    }

    fn of(&self, keys: bool, coalesced: bool) -> Option<&CacheRead> {
        self.reads().iter().find(|r| (r.keys, r.coalesced) == (keys, coalesced))
    }

    /// A table of all lengths.
    pub fn table(all: &[Self]) -> Table {
        let head = ["context", "coalesced_kv", "K GB/s", "V GB/s", "K us", "V us"];
        let mut rows = vec![head.map(String::from).to_vec()];
        let none = || "–".to_owned();
        for at in all {
            for coalesced in [true, false] {
                let part = |text: fn(&CacheRead) -> String| {
                    [true, false].map(|keys| at.of(keys, coalesced).map_or_else(none, text))
                };
                let mut row =
                    vec![at.context.to_string(), ["off", "on"][usize::from(coalesced)].into()];
                row.extend(part(|r| format!("{:.1}", rate(r) / 1e9)));
                row.extend(part(|r| format!("{:.2}", r.seconds / r.launches.max(1) as f64 * 1e6)));
                rows.push(row);
            }
        }
        let why = all.iter().filter_map(|at| Some((at.context, at.reads.as_ref().err()?)));
        let mut notes: Vec<String> =
            why.map(|(n, why)| format!("not measured at {n}: {why}")).collect();
        notes.push(
            "us: a layer; out of memory, no cache holds anything of it; distinct bytes".into(),
        );
        Table { title: "K and V, each read alone as attention reads them".into(), rows, notes }
    }

    /// Everything.
    pub fn json(&self) -> Value {
        let read = |r: &CacheRead| {
            json!({
                "what": name(r),
                "coalesced_kv": r.coalesced,
                "launches": r.launches,
                "bytes": r.bytes,
                "seconds": r.seconds,
                "bytes_per_second": rate(r),
            })
        };
        json!({
            "context": self.context,
            "reads": self.reads().iter().map(read).collect::<Vec<_>>(),
            "trouble": self.reads.as_ref().err(),
        })
    }

    /// Figures for the record, in GB/s.
    pub fn figures(&self) -> Vec<Figure> {
        let figure = |r: &CacheRead| Figure {
            what: format!(
                "{} of {} tokens alone, coalesced_kv {}",
                name(r),
                self.context,
                switch(r)
            ),
            value: significant(rate(r) / 1e9),
            unit: "GB/s".into(),
            rounds: Vec::new(),
        };
        self.reads().iter().map(figure).collect()
    }
}

/// Bytes a second.
fn rate(read: &CacheRead) -> f64 {
    match read.seconds > 0.0 {
        true => read.bytes as f64 / read.seconds,
        false => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads() -> CacheReads {
        let read = |keys, coalesced, seconds| CacheRead {
            keys,
            coalesced,
            launches: 10,
            bytes: 1 << 25,
            seconds,
        };
        let reads = vec![
            read(true, true, 1.0 / 65_536.0),
            read(false, true, 1.0 / 32_768.0),
            read(true, false, 1.0 / 16_384.0),
            read(false, false, 1.0 / 8_192.0),
        ];
        CacheReads { context: 3840, reads: Ok(reads) }
    }

    #[test]
    fn k_and_v_stand_apart_with_the_switch_and_without() {
        let failed = CacheReads { context: 8, reads: Err("no memory".into()) };
        let table = CacheReads::table(&[reads(), failed.clone()]);
        assert_eq!(table.rows[1], ["3840", "on", "2199.0", "1099.5", "1.53", "3.05"]);
        assert_eq!(table.rows[2], ["3840", "off", "549.8", "274.9", "6.10", "12.21"]);
        assert_eq!(table.rows[3], ["8", "on", "–", "–", "–", "–"]);
        assert_eq!(table.notes[0], "not measured at 8: no memory");
        let json = reads().json();
        assert_eq!(json["reads"][3]["what"], "V");
        assert_eq!(json["reads"][3]["coalesced_kv"], false);
        assert_eq!(json["reads"][3]["bytes_per_second"], f64::from(1 << 19) * f64::from(1 << 19));
        assert_eq!(
            (&json["trouble"], &failed.json()["trouble"]),
            (&Value::Null, &"no memory".into())
        );
        let figures = reads().figures();
        assert_eq!(figures[2].what, "K of 3840 tokens alone, coalesced_kv off");
        assert_eq!((figures[2].value.as_str(), figures.len()), ("549.76", 4));
        assert!(failed.figures().is_empty());
    }
}
