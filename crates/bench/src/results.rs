//! The record of what was measured: tab-separated files that only grow.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::protocol::Measured;

/// The columns.
pub const HEAD: &str = "date\tcommit\tmachine\tcommand\twhat\tvalue\tunit\trounds\tkept\twhy";

/// What all rows of a run share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Day, `2026-11-30`.
    pub date: String,
    /// Commit of the program.
    pub commit: String,
    /// The machine, in words.
    pub machine: String,
    /// The command that repeats it.
    pub command: String,
    /// Whether the figures stand, or the change that they are about stays.
    pub kept: bool,
    /// Why.
    pub why: String,
}

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What it is of.
    pub what: String,
    /// The figure, in words where there is none.
    pub value: String,
    /// Its unit.
    pub unit: String,
    /// The rounds that it is made of.
    pub rounds: Vec<f64>,
}

impl Run {
    /// A row. Tabs and line ends in texts become spaces.
    pub fn row(&self, figure: &Figure) -> String {
        let rounds: Vec<String> = figure.rounds.iter().map(|r| significant(*r)).collect();
        let kept = if self.kept { "yes" } else { "no" };
        let cells = [
            &self.date,
            &self.commit,
            &self.machine,
            &self.command,
            &figure.what,
            &figure.value,
            &figure.unit,
            &rounds.join(" "),
            kept,
            &self.why,
        ];
        cells.map(|c| c.replace(['\t', '\n', '\r'], " ")).join("\t")
    }

    /// Appends rows to a file, which gets its head if it is new.
    pub fn append(&self, path: &Path, figures: &[Figure]) -> io::Result<()> {
        if let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
            fs::create_dir_all(folder)?;
        }
        let mut file = OpenOptions::new().read(true).create(true).append(true).open(path)?;
        let mut text = String::new();
        if file.metadata()?.len() == 0 {
            text = format!("{HEAD}\n");
        } else if !ends_a_line(&mut file)? {
            // A program that was killed while it wrote: its row must not become part of this one.
            text.push('\n');
        }
        for figure in figures {
            text.push_str(&self.row(figure));
            text.push('\n');
        }
        // At once, so that two programs never mix within a row.
        file.write_all(text.as_bytes())
    }
}

fn ends_a_line(file: &mut File) -> io::Result<bool> {
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

/// Five significant digits.
pub fn significant(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let digits = 4 - value.abs().log10().floor() as i32;
    format!("{value:.*}", digits.clamp(0, 12) as usize)
}

/// The figures of a run: speeds with their rounds, ratios with theirs, means, and why there is none.
pub fn figures(measured: &Measured) -> Vec<Figure> {
    let mut figures = Vec::new();
    let mut add = |what: String, value: String, unit: &str, rounds: Vec<f64>| {
        figures.push(Figure { what, value, unit: unit.into(), rounds });
    };
    let own = &measured.engines[0];
    for point in &measured.points {
        for (i, name) in measured.engines.iter().enumerate() {
            let what = format!("{name}: {}", point.point);
            let cell = &point.cells[i];
            let tokens = point.point.tokens() as f64;
            let speeds = cell.seconds.iter().map(|s| tokens / s).collect();
            let value = match (point.speed(i), &cell.trouble) {
                (Some(speed), _) => significant(speed.median),
                (None, Some(trouble)) => trouble.to_string(),
                (None, None) => "not measured".to_owned(),
            };
            add(what, value, "tok/s", speeds);
            if let Some(ratios) = (i > 0).then(|| point.ratios(i)).flatten() {
                let value = point.ratio(i).map_or_else(String::new, |r| significant(r.median));
                add(format!("{own} / {name}: {}", point.point), value, "times", ratios);
            }
        }
    }
    for phase in [crate::Phase::Prefill, crate::Phase::Decode] {
        for (i, name) in measured.engines.iter().enumerate().skip(1) {
            if let Some((mean, n)) = measured.mean_ratio(phase, i) {
                let what = format!("{own} / {name}: {phase}, mean of {n} lengths");
                add(what, significant(mean), "times", Vec::new());
            }
        }
    }
    figures
}

/// Today in Greenwich.
pub fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    date_of(seconds)
}

/// The Gregorian date of a second since 1970 began.
fn date_of(seconds: u64) -> String {
    let mut days = seconds / 86_400;
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year:04}-{month:02}-{:02}", days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Run {
        Run {
            date: "2026-11-30".into(),
            commit: "abc1234".into(),
            machine: "a\tmachine".into(),
            command: "lily bench".into(),
            kept: true,
            why: "baseline\n".into(),
        }
    }

    #[test]
    fn rows_are_appended_below_one_head() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/results.tsv");
        let figure = Figure {
            what: "x".into(),
            value: "2".into(),
            unit: "tok/s".into(),
            rounds: vec![1.5, 2.0, 123_456.0],
        };
        run().append(&path, std::slice::from_ref(&figure)).unwrap();
        run().append(&path, &[figure.clone(), figure]).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert_eq!(lines[0], HEAD);
        assert_eq!(
            lines[1],
            "2026-11-30\tabc1234\ta machine\tlily bench\tx\t2\ttok/s\t1.5000 2.0000 123456\tyes\tbaseline "
        );
        for line in lines {
            assert_eq!(line.split('\t').count(), 10);
        }
    }

    #[test]
    fn a_row_that_broke_off_spoils_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results.tsv");
        fs::write(&path, format!("{HEAD}\n2026-11-30\tabc")).unwrap();
        let (what, value, unit) = ("x".into(), "2".into(), "s".into());
        let figure = Figure { what, value, unit, rounds: Vec::new() };
        run().append(&path, std::slice::from_ref(&figure)).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines, [HEAD, "2026-11-30\tabc", &run().row(&figure)]);
    }

    #[test]
    fn dates() {
        for (seconds, date) in [
            (0, "1970-01-01"),
            (86_399, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (1_709_164_800, "2024-02-29"),
            (1_709_251_200, "2024-03-01"),
            (1_767_225_599, "2025-12-31"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date_of(seconds), date, "{seconds}");
        }
    }

    #[test]
    fn digits() {
        for (value, text) in [
            (0.0, "0"),
            (83.214_59, "83.215"),
            (0.001_234_567, "0.0012346"),
            (9_876_543.0, "9876543"),
            (-1.5, "-1.5000"),
        ] {
            assert_eq!(significant(value), text);
        }
    }
}
