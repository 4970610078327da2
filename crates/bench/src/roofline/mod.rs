//! Kernels alone, with weights that no cache holds, beside what their bytes take without arithmetic.
//!
//! Each kernel has two others beside it. Its *read-only twin* reads the same bytes straight through, in equal parts:
//! what a kernel bound by memory can reach at best. Its *no-arithmetic variant* divides them as the kernel does, in
//! its streams and tasks, and writes as much: what lies between the two is the price of the kernel's shape, what lies
//! between it and the kernel is that of its arithmetic.

mod cold;
mod cpu;
mod device;

use lily_device::Inside;
use serde_json::{Value, json};

pub use cpu::{CpuRoofline, Sizes};
pub use device::{by_operation, device_rows};

use crate::report::Table;
use crate::results::{Figure, significant};
use crate::stats::{Summary, median};

/// What is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// The kernel.
    Kernel,
    /// Its read-only twin.
    ReadOnly,
    /// Its bytes in its own order, without arithmetic.
    NoArithmetic,
}

/// A kernel's figures. Seconds are of one call, one a round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The kernel and its shape.
    pub kernel: String,
    /// Calls of a round.
    pub calls: u64,
    /// Bytes that a call moves.
    pub bytes: f64,
    /// Multiply-adds of a call, where they are known.
    pub macs: Option<f64>,
    /// Multiply-adds a second at best, for these element types.
    pub macs_per_second: Option<f64>,
    /// Seconds of the kernel.
    pub seconds: Vec<f64>,
    /// Of its read-only twin.
    pub read_only: Vec<f64>,
    /// Of its no-arithmetic variant.
    pub no_arithmetic: Vec<f64>,
    /// What a call takes inside the model, among the other kernels.
    pub inside: Inside,
}

impl Row {
    /// The least time of a call: that of its bytes or of its multiplications, whichever is longer.
    pub fn floor(&self, bytes_per_second: f64) -> f64 {
        (self.bytes / bytes_per_second).max(self.macs_floor())
    }

    /// The least time of its multiplications.
    fn macs_floor(&self) -> f64 {
        self.macs.zip(self.macs_per_second).map_or(0.0, |(n, rate)| n / rate)
    }

    /// Seconds of a call inside the model, if they were measured.
    fn seconds_inside(&self) -> Option<f64> {
        match self.inside {
            Inside::Seconds(seconds) => Some(seconds),
            _ => None,
        }
    }

    /// The least time over the time inside the model: none where the step takes no less without the kernel.
    fn of_limit_inside(&self, bytes_per_second: f64) -> Option<f64> {
        let seconds = self.seconds_inside().filter(|s| *s > 0.0)?;
        Some(self.floor(bytes_per_second) / seconds)
    }

    /// Which of the two is longer.
    pub fn bound(&self, bytes_per_second: f64) -> &'static str {
        match self.macs_floor() > self.bytes / bytes_per_second {
            true => "products",
            false => "bytes",
        }
    }
}

/// What the times inside a model are.
const INSIDE: &str = "inside: what the step takes less without the kernel's launches, of one of them; of the ten costliest kernels of a step";
/// Why a kernel has none.
const NEEDED: &str = "others read memory where the indices say that it writes";

/// All kernels of a machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Roofline {
    /// Where they ran.
    pub device: String,
    /// Bytes read in a second at best, measured in the same run.
    pub bytes_per_second: f64,
    /// How this and the rates of multiplication are known.
    pub how: String,
    /// The kernels.
    pub rows: Vec<Row>,
}

impl Roofline {
    /// The table.
    pub fn table(&self) -> Table {
        let mut head = vec![
            "kernel",
            "us",
            "spread",
            "GB/s",
            "GMAC/s",
            "of limit",
            "bound by",
            "read-only us",
            "no-arithmetic us",
        ];
        let inside = self.rows.iter().any(|row| row.inside != Inside::NotMeasured);
        if inside {
            head.extend(["inside us", "of limit inside"]);
        }
        let mut rows = vec![head.into_iter().map(String::from).collect()];
        rows.extend(self.rows.iter().map(|row| self.cells(row, inside)));
        let mut notes = vec![
            format!("read rate: {:.1} GB/s ({})", self.bytes_per_second / 1e9, self.how),
            "limit: the time of the bytes or that of the products, whichever is longer".to_owned(),
            "read-only: the same bytes straight through; no-arithmetic: as the kernel divides them"
                .to_owned(),
        ];
        if inside {
            notes.push(format!("{INSIDE}; –: {NEEDED}"));
        }
        Table { title: format!("kernels alone on {}, weights cold", self.device), rows, notes }
    }

    fn cells(&self, row: &Row, inside: bool) -> Vec<String> {
        let none = || "–".to_owned();
        let micros = |seconds: &[f64]| median(seconds).map_or_else(none, |s| micros(s * 1e6));
        let Some(all) = Summary::of(&row.seconds) else {
            return vec![row.kernel.clone(), "not measured".into()];
        };
        let rate = |amount: f64| format!("{:.1}", amount / all.median / 1e9);
        let mut cells = vec![
            row.kernel.clone(),
            micros(&row.seconds),
            format!("± {:.1} %", 50.0 * all.spread()),
            rate(row.bytes),
            row.macs.map_or_else(none, rate),
            format!("{:.3}", row.floor(self.bytes_per_second) / all.median),
            row.bound(self.bytes_per_second).to_owned(),
            micros(&row.read_only),
            micros(&row.no_arithmetic),
        ];
        if inside {
            cells.extend(match row.inside {
                Inside::Seconds(seconds) => [
                    self::micros(seconds * 1e6),
                    row.of_limit_inside(self.bytes_per_second)
                        .map_or_else(none, |r| format!("{r:.3}")),
                ],
                Inside::Needed => [none(), none()],
                Inside::NotMeasured => [String::new(), String::new()],
            });
        }
        cells
    }

    /// Everything, rounds included.
    pub fn json(&self) -> Value {
        let row = |row: &Row| {
            let seconds = median(&row.seconds);
            json!({
                "kernel": row.kernel,
                "calls": row.calls,
                "bytes": row.bytes,
                "macs": row.macs,
                "macs_per_second_limit": row.macs_per_second,
                "seconds": row.seconds,
                "read_only_seconds": row.read_only,
                "no_arithmetic_seconds": row.no_arithmetic,
                "inside_seconds": row.seconds_inside(),
                "of_limit_inside": row.of_limit_inside(self.bytes_per_second),
                "not_inside": match row.inside {
                    Inside::Seconds(_) => None,
                    Inside::Needed => Some(NEEDED),
                    Inside::NotMeasured => Some("not measured"),
                },
                "bytes_per_second": seconds.map(|s| row.bytes / s),
                "macs_per_second": seconds.and_then(|s| Some(row.macs? / s)),
                "bound_by": row.bound(self.bytes_per_second),
                "of_limit": seconds.map(|s| row.floor(self.bytes_per_second) / s),
            })
        };
        json!({
            "device": self.device,
            "bytes_per_second": self.bytes_per_second,
            "how": self.how,
            "kernels": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }

    /// Figures for the record: the kernel's, its twin's and its variant's, in microseconds a call.
    pub fn figures(&self) -> Vec<Figure> {
        let figure = |what: String, seconds: &[f64]| {
            let rounds: Vec<f64> = seconds.iter().map(|s| s * 1e6).collect();
            let value = median(&rounds).map(significant)?;
            Some(Figure { what, value, unit: "us".into(), rounds })
        };
        let mut figures = vec![Figure {
            what: "read rate".into(),
            value: significant(self.bytes_per_second / 1e9),
            unit: "GB/s".into(),
            rounds: Vec::new(),
        }];
        for row in &self.rows {
            let parts = [
                ("", &row.seconds),
                (", read-only twin", &row.read_only),
                (", no arithmetic", &row.no_arithmetic),
            ];
            let name = |part: &str| format!("{}{part}", row.kernel);
            figures.extend(parts.into_iter().filter_map(|(part, s)| figure(name(part), s)));
            figures.extend(row.seconds_inside().and_then(|s| figure(name(", inside"), &[s])));
        }
        figures
    }
}

/// Microseconds with as many digits as mean something.
fn micros(us: f64) -> String {
    match us {
        us if us >= 1000.0 => format!("{us:.0}"),
        us if us >= 10.0 => format!("{us:.1}"),
        us => format!("{us:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roofline() -> Roofline {
        let row = Row {
            kernel: "gemv".into(),
            calls: 3,
            bytes: 2e9,
            macs: Some(1e9),
            macs_per_second: Some(1e9),
            seconds: vec![4.0, 2.0, 3.0],
            read_only: vec![1.0],
            no_arithmetic: Vec::new(),
            inside: Inside::NotMeasured,
        };
        let device = "cpu".to_owned();
        Roofline { device, bytes_per_second: 4e9, how: "read".into(), rows: vec![row] }
    }

    #[test]
    fn rates_and_fractions_follow_from_the_median() {
        let roofline = roofline();
        // 2 GB at 4 GB/s take half a second, 1 G multiply-adds at 1 G a second take a whole one.
        assert_eq!(roofline.rows[0].floor(4e9), 1.0);
        let cells = &roofline.table().rows[1];
        assert_eq!(cells[1..4], ["3000000", "± 33.3 %", "0.7"]);
        assert_eq!(cells[4..], ["0.3", "0.333", "products", "1000000", "–"]);
        let json = roofline.json();
        assert_eq!(json["kernels"][0]["bytes_per_second"], 2e9 / 3.0);
        assert_eq!(json["kernels"][0]["of_limit"], 1.0 / 3.0);
        assert_eq!(json["kernels"][0]["bound_by"], "products");
        // Without a rate of multiplications, or with fewer of them, the bytes are all that is known.
        let unknown = Row { macs_per_second: None, ..roofline.rows[0].clone() };
        assert_eq!((unknown.floor(4e9), unknown.bound(4e9)), (0.5, "bytes"));
        let few = Row { macs: Some(4e8), ..roofline.rows[0].clone() };
        assert_eq!((few.floor(4e9), few.bound(4e9)), (0.5, "bytes"));
    }

    #[test]
    fn what_was_measured_inside_stands_beside_it() {
        let mut roofline = roofline();
        let row = |inside| Row { inside, ..roofline.rows[0].clone() };
        // A kernel that others hide costs nothing: its share of the limit means nothing.
        roofline.rows =
            [Inside::Seconds(2.0), Inside::Seconds(-0.5), Inside::Needed, Inside::NotMeasured]
                .map(row)
                .into();
        let table = roofline.table();
        assert_eq!(table.rows[0][9..], ["inside us", "of limit inside"]);
        let cells: Vec<&[String]> = table.rows[1..].iter().map(|row| &row[9..]).collect();
        assert_eq!(cells[0], ["2000000", "0.500"]);
        assert_eq!(cells[1], ["-500000.00", "–"]);
        assert_eq!(
            (cells[2], cells[3]),
            (&["–", "–"].map(String::from)[..], &["", ""].map(String::from)[..])
        );
        assert!(table.notes.iter().any(|n| n.contains("inside: ") && n.contains("indices")));
        let json = roofline.json();
        let of = |i: usize, what: &str| json["kernels"][i][what].clone();
        assert_eq!((of(0, "inside_seconds"), of(0, "of_limit_inside")), (2.0.into(), 0.5.into()));
        assert_eq!(
            (of(1, "inside_seconds"), of(1, "of_limit_inside")),
            ((-0.5).into(), Value::Null)
        );
        assert_eq!((of(2, "inside_seconds"), of(2, "not_inside")), (Value::Null, NEEDED.into()));
        assert!(of(0, "not_inside").is_null() && of(3, "inside_seconds").is_null());
        let figures = roofline.figures();
        assert_eq!(figures.iter().filter(|f| f.what == "gemv, inside").count(), 2);
    }

    #[test]
    fn figures_are_those_that_were_measured() {
        let what: Vec<String> = roofline().figures().into_iter().map(|f| f.what).collect();
        assert_eq!(what, ["read rate", "gemv", "gemv, read-only twin"]);
        let mut none = roofline();
        none.rows[0].seconds.clear();
        assert_eq!(none.table().rows[1][1], "not measured");
    }
}
