//! What a device measured of its own steps, as tables.

use lily_device::{Inside, OperationTime, OperationTimes};
use serde_json::{Value, json};

use super::Row;
use crate::engine::Point;
use crate::report::Table;
use crate::results::{Figure, significant};

/// Seconds by operation of a point: the table, JSON, and figures for the record.
pub fn by_operation(point: Point, times: &OperationTimes) -> (Table, Value, Vec<Figure>) {
    (table(point, times), as_json(point, times), figures(point, times))
}

/// What a step takes besides its operations; none where it takes less, as side by side.
fn between(times: &OperationTimes) -> f64 {
    (times.seconds - times.sum()).max(0.0)
}

fn sorted(times: &OperationTimes) -> Vec<&OperationTime> {
    let mut list: Vec<&OperationTime> = times.operations.iter().collect();
    list.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    list
}

fn name(time: &OperationTime) -> String {
    match time.kernel == time.operation {
        true => time.operation.to_owned(),
        false => format!("{}: {}", time.operation, time.kernel),
    }
}

fn table(point: Point, times: &OperationTimes) -> Table {
    let head = ["operation", "calls", "seconds", "share", "GB/s"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let whole = times.seconds.max(times.sum());
    let share = |seconds: f64| match whole > 0.0 {
        true => format!("{:.1} %", 100.0 * seconds / whole),
        false => "–".to_owned(),
    };
    rows.extend(sorted(times).into_iter().map(|time| {
        let rate = match time.bytes {
            0 => "–".to_owned(),
            bytes => format!("{:.1}", bytes as f64 / time.seconds / 1e9),
        };
        let seconds = format!("{:.6}", time.seconds);
        vec![name(time), time.calls.to_string(), seconds, share(time.seconds), rate]
    }));
    let rest = between(times);
    let cells = |what: &str, seconds: f64| {
        vec![what.to_owned(), String::new(), format!("{seconds:.6}"), share(seconds)]
    };
    rows.push(cells("between operations", rest));
    rows.push(cells("all steps", times.seconds));
    let steps = times.steps;
    let steps = format!("{steps} step{}", if steps == 1 { "" } else { "s" });
    let what = "GB/s: of weights on the CPU, of all that is read and written on a GPU".to_owned();
    let trouble = times.trouble.iter().map(|why| format!("not all was measured: {why}"));
    let notes = trouble.chain([what]).collect();
    Table { title: format!("{point}: seconds by operation, {steps}"), rows, notes }
}

fn as_json(point: Point, times: &OperationTimes) -> Value {
    let operation = |time: &OperationTime| {
        json!({
            "operation": time.operation,
            "kernel": time.kernel,
            "calls": time.calls,
            "seconds": time.seconds,
            "bytes": time.bytes,
            "macs": time.macs,
        })
    };
    json!({
        "phase": point.phase().to_string(),
        "length": point.length(),
        "tokens": point.tokens(),
        "steps": times.steps,
        "seconds": times.seconds,
        "between_operations": between(times),
        "operations": sorted(times).into_iter().map(operation).collect::<Vec<_>>(),
        "trouble": times.trouble,
    })
}

fn figures(point: Point, times: &OperationTimes) -> Vec<Figure> {
    let figure = |what: &str, seconds: f64| Figure {
        what: format!("{point}: {what}"),
        value: significant(seconds),
        unit: "s".into(),
        rounds: Vec::new(),
    };
    let operations = sorted(times).into_iter().map(|t| figure(&name(t), t.seconds));
    operations.chain([figure("all steps", times.seconds)]).collect()
}

/// The kernels of a device's steps with their twins. `what` says which steps.
pub fn device_rows(what: &str, times: &OperationTimes) -> Vec<Row> {
    let row = |time: &&OperationTime| {
        let calls = time.calls.max(1) as f64;
        let twin = |seconds: fn(&lily_device::Twins) -> f64| {
            time.twins.iter().map(|t| seconds(t) / calls).collect::<Vec<f64>>()
        };
        Row {
            kernel: format!("{what}: {}", name(time)),
            calls: time.calls,
            bytes: time.bytes as f64 / calls,
            macs: (time.macs > 0).then_some(time.macs as f64 / calls),
            macs_per_second: times.matrix_rate,
            seconds: vec![time.seconds / calls],
            read_only: twin(|t| t.read_only),
            no_arithmetic: twin(|t| t.no_arithmetic),
            inside: match time.inside {
                Inside::Seconds(seconds) => Inside::Seconds(seconds / calls),
                other => other,
            },
        }
    };
    sorted(times).iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use lily_device::Twins;

    use super::*;

    const POINT: Point = Point::Decode { context: 512, tokens: 4 };

    fn times() -> OperationTimes {
        let mut times = OperationTimes { steps: 4, seconds: 4.0, ..OperationTimes::default() };
        for (operation, kernel, seconds, bytes) in
            [("embed", "embed", 0.5, 0), ("linear", "gemv", 2.0, 4_000_000_000)]
        {
            let twins = Some(Twins { read_only: seconds / 2.0, no_arithmetic: seconds });
            let macs = 4 * bytes;
            let inside = Inside::Seconds(seconds / 4.0);
            times.add(OperationTime {
                operation,
                kernel,
                calls: 8,
                seconds,
                bytes,
                macs,
                twins,
                inside,
            });
        }
        times
    }

    #[test]
    fn the_longest_comes_first_and_the_rest_is_told() {
        let (table, json, figures) = by_operation(POINT, &times());
        assert_eq!(table.title, "decode of 4 tokens after 512: seconds by operation, 4 steps");
        assert_eq!(table.rows[1], ["linear: gemv", "8", "2.000000", "50.0 %", "2.0"]);
        assert_eq!(table.rows[2], ["embed", "8", "0.500000", "12.5 %", "–"]);
        assert_eq!(table.rows[3], ["between operations", "", "1.500000", "37.5 %"]);
        assert_eq!(json["operations"][0]["kernel"], "gemv");
        assert_eq!((&json["phase"], &json["between_operations"]), (&"decode".into(), &1.5.into()));
        assert_eq!(figures[0].what, "decode of 4 tokens after 512: linear: gemv");
        assert_eq!(figures.len(), 3);
    }

    #[test]
    fn trouble_is_told() {
        let times = OperationTimes { trouble: Some("no memory".into()), ..times() };
        let (table, json, _) = by_operation(POINT, &times);
        assert_eq!(table.notes[0], "not all was measured: no memory");
        assert_eq!(json["trouble"], "no memory");
    }

    #[test]
    fn rows_are_of_one_call() {
        let times = OperationTimes { matrix_rate: Some(1e10), ..times() };
        let rows = device_rows("decode", &times);
        assert_eq!(rows[0].kernel, "decode: linear: gemv");
        assert_eq!((rows[0].bytes, &rows[0].seconds[..]), (5e8, &[0.25][..]));
        assert_eq!((rows[0].read_only[0], rows[0].no_arithmetic[0]), (0.125, 0.25));
        assert_eq!(rows[0].inside, Inside::Seconds(0.0625));
        // 2 G multiply-adds take longer than half a GB at 4 GB/s; a kernel without any has no such limit.
        assert_eq!(
            (rows[0].macs, rows[0].floor(4e9), rows[0].bound(4e9)),
            (Some(2e9), 0.2, "products")
        );
        assert_eq!((rows[1].macs, rows[1].bound(4e9)), (None, "bytes"));
    }
}
