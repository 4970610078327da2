//! The protocol with engines whose speed is known.

use std::cell::RefCell;
use std::rc::Rc;

use lily_bench::ablate::{self, Ablated, Switch};
use lily_bench::floors::{Limits, Work};
use lily_bench::report::{Floors, as_json, plots, tables};
use lily_bench::results::figures;
use lily_bench::{Engine, Measured, Missing, Phase, Point, Protocol, Trouble, Watch, run};

type Log = Rc<RefCell<Vec<String>>>;

/// An engine whose every measurement takes a time that a function tells: of the point, and of how often it was
/// measured before.
struct Fake<F> {
    name: &'static str,
    seconds: F,
    measured: Vec<Point>,
    log: Log,
}

impl<F: FnMut(Point, usize) -> Result<f64, Trouble>> Fake<F> {
    fn new(name: &'static str, log: &Log, seconds: F) -> Self {
        Self { name, seconds, measured: Vec::new(), log: Rc::clone(log) }
    }

    fn next(&mut self, point: Point) -> Result<f64, Trouble> {
        let before = self.measured.iter().filter(|p| **p == point).count();
        self.measured.push(point);
        self.log.borrow_mut().push(self.name.to_owned());
        (self.seconds)(point, before)
    }
}

impl<F: FnMut(Point, usize) -> Result<f64, Trouble>> Engine for Fake<F> {
    fn name(&self) -> &str {
        self.name
    }

    fn facts(&self) -> Vec<(String, String)> {
        vec![("version".into(), "1".into())]
    }

    fn warm_up(&mut self, _: Point) -> Result<(), Trouble> {
        self.log.borrow_mut().push(format!("warm {}", self.name));
        Ok(())
    }

    fn prefill(&mut self, tokens: usize) -> Result<f64, Trouble> {
        self.next(Point::Prefill { tokens })
    }

    fn decode(&mut self, context: usize, tokens: usize) -> Result<f64, Trouble> {
        self.next(Point::Decode { context, tokens })
    }
}

fn protocol(prefill: &[usize], decode: &[usize], rounds: usize) -> Protocol {
    let (prefill, decode) = (prefill.to_vec(), decode.to_vec());
    Protocol { prefill, decode, decode_tokens: 10, warm_up: 1, rounds }
}

fn log() -> Log {
    Log::default()
}

#[test]
fn medians_are_of_the_rounds() {
    let log = log();
    // Rounds of 1, 5, 2, 100 and 3 seconds for each 100 tokens: the median is 3.
    let times = [1.0, 5.0, 2.0, 100.0, 3.0];
    let mut engine =
        Fake::new("lily", &log, |p, round| Ok(times[round] * p.tokens() as f64 / 100.0));
    let measured = run(&mut [&mut engine], &protocol(&[200], &[50], 5), &mut ());
    assert_eq!(measured.points.len(), 2);
    let prefill = &measured.points[0];
    assert_eq!(prefill.cells[0].seconds, [2.0, 10.0, 4.0, 200.0, 6.0]);
    let speed = prefill.speed(0).unwrap();
    assert_eq!((speed.median, speed.min, speed.max), (100.0 / 3.0, 1.0, 100.0));
    let decode = &measured.points[1];
    assert_eq!(decode.point, Point::Decode { context: 50, tokens: 10 });
    assert!((decode.speed(0).unwrap().median - 100.0 / 3.0).abs() < 1e-9);
    assert_eq!(log.borrow().iter().filter(|l| *l == "warm lily").count(), 2);
}

#[test]
fn engines_take_turns_and_change_places() {
    let log = log();
    let mut a = Fake::new("a", &log, |_, _| Ok(1.0));
    let mut b = Fake::new("b", &log, |_, _| Ok(1.0));
    let mut c = Fake::new("c", &log, |_, _| Ok(1.0));
    let three: &mut [&mut dyn Engine] = &mut [&mut a, &mut b, &mut c];
    run(three, &protocol(&[8], &[], 3), &mut ());
    let order = log.borrow().join(" ");
    assert_eq!(order, "warm a warm b warm c a b c c b a a b c");
}

#[test]
fn all_prompts_come_before_all_contexts() {
    let log = log();
    let mut engine = Fake::new("lily", &log, |_, _| Ok(1.0));
    let measured = run(&mut [&mut engine], &protocol(&[8, 16], &[8, 16], 2), &mut ());
    let phases: Vec<Phase> = engine.measured.iter().map(|p| p.phase()).collect();
    assert_eq!(phases[..4], [Phase::Prefill; 4]);
    assert_eq!(phases[4..], [Phase::Decode; 4]);
    assert_eq!(measured.phase(Phase::Decode).count(), 2);
}

#[test]
fn ratios_are_of_the_same_round() {
    let log = log();
    // The machine slows down by half from round to round; the other engine always takes three times as long.
    let slower = |round: usize| 2f64.powi(round as i32);
    let mut own = Fake::new("lily", &log, |_, round| Ok(slower(round)));
    let mut other = Fake::new("peer", &log, |p, round| {
        let factor = if p.length() == 32 { 0.5 } else { 3.0 };
        Ok(factor * slower(round))
    });
    let both: &mut [&mut dyn Engine] = &mut [&mut own, &mut other];
    let measured = run(both, &protocol(&[16, 32], &[64], 4), &mut ());
    assert_eq!(measured.points[0].ratios(1).unwrap(), [3.0; 4]);
    assert_eq!(measured.points[1].ratio(1).unwrap().median, 0.5);
    assert_eq!(measured.mean_ratio(Phase::Prefill, 1), Some((1.75, 2)));
    assert_eq!(measured.mean_ratio(Phase::Decode, 1), Some((3.0, 1)));
    let tables = tables(&measured, None);
    let row = &tables[0].rows[2];
    assert_eq!(row.last().unwrap(), "0.500 (0.500 to 0.500) slower");
    assert_eq!(tables[0].notes, ["mean of lily / peer over 2 of 2 lengths: 1.750"]);
}

fn failing() -> Measured {
    let log = log();
    let mut own = Fake::new("lily", &log, |_, _| Ok(2.0));
    let mut fails = Fake::new("fails", &log, |p, round| match (p, round) {
        (Point::Prefill { tokens: 32 }, 1) => Err(Trouble::Failed("out of memory".into())),
        _ => Ok(4.0),
    });
    let mut gone = Missing::new("gone", Trouble::Missing("no program".into()));
    let all: &mut [&mut dyn Engine] = &mut [&mut own, &mut fails, &mut gone];
    let measured = run(all, &protocol(&[16, 32, 64], &[], 3), &mut ());
    // Nobody asks again within the point.
    assert_eq!(fails.measured.iter().filter(|p| p.length() == 32).count(), 2);
    measured
}

#[test]
fn failing_and_missing_peers_are_rows() {
    let measured = failing();
    let broken = &measured.points[1];
    assert_eq!(broken.cells[0].complete(), Some(&[2.0; 3][..]));
    assert_eq!(broken.cells[1].seconds, [4.0]);
    assert_eq!((broken.speed(1), broken.ratio(1)), (None, None));
    assert_eq!(measured.mean_ratio(Phase::Prefill, 1), Some((2.0, 2)));
    assert_eq!(measured.mean_ratio(Phase::Prefill, 2), None);
    let table = tables(&measured, None).remove(0);
    assert_eq!(table.rows.len(), 4);
    assert_eq!(table.rows[2][1..], ["16.0 ± 0.0 %", "no figure", "no figure", "–", "–"]);
    let notes = table.notes.join("\n");
    assert!(notes.contains("fails, prefill of 32 tokens: failed: out of memory"), "{notes}");
    assert!(notes.contains("gone, prefill of 64 tokens: missing: no program"), "{notes}");
    assert!(notes.contains("lily / fails over 2 of 3 lengths: 2.000"), "{notes}");
    assert!(notes.contains("lily / gone: no length has figures of both"), "{notes}");
}

#[test]
fn json_and_records_have_every_round_and_every_trouble() {
    let measured = failing();
    let json = as_json(&measured, None);
    assert_eq!(json["points"][1]["engines"][1]["seconds"][0], 4.0);
    assert_eq!(json["points"][1]["engines"][1]["trouble"], "failed: out of memory");
    assert_eq!(json["points"][0]["engines"][1]["ratios"][2], 2.0);
    assert_eq!(json["engines"][0]["facts"]["version"], "1");
    assert_eq!(json["means"][0]["ratio"], 2.0);
    let all = figures(&measured);
    let find = |what: &str| all.iter().find(|f| f.what == what).unwrap();
    assert_eq!(find("lily: prefill of 16 tokens").rounds, [8.0; 3]);
    assert_eq!(find("fails: prefill of 32 tokens").value, "failed: out of memory");
    assert_eq!(find("lily / fails: prefill of 64 tokens").rounds, [2.0; 3]);
    assert_eq!(find("lily / fails: prefill, mean of 2 lengths").value, "2.0000");
}

#[test]
fn times_that_are_none_are_troubles() {
    for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let log = log();
        let mut engine = Fake::new("odd", &log, |_, _| Ok(seconds));
        let measured = run(&mut [&mut engine], &protocol(&[16], &[], 3), &mut ());
        let cell = &measured.points[0].cells[0];
        assert!(matches!(cell.trouble, Some(Trouble::Failed(_))), "{cell:?}");
        assert!(cell.seconds.is_empty());
    }
}

#[test]
fn an_interruption_ends_the_run_and_keeps_what_there_is() {
    let log = log();
    let mut own = Fake::new("lily", &log, |p, round| match (p.length(), round) {
        (32, 1) => Err(Trouble::Interrupted),
        _ => Ok(1.0),
    });
    let mut peer = Fake::new("peer", &log, |_, _| Ok(1.0));
    let both: &mut [&mut dyn Engine] = &mut [&mut own, &mut peer];
    let measured = run(both, &protocol(&[16, 32, 64], &[16], 3), &mut ());
    assert!(measured.interrupted());
    assert_eq!(measured.points.len(), 2);
    assert!(measured.points[0].ratio(1).is_some());
    assert!(measured.points[1].ratio(1).is_none());
    // In the second round the peer came first.
    assert_eq!(peer.measured.iter().filter(|p| p.length() == 32).count(), 2);
}

#[test]
fn each_figure_is_a_fraction_of_its_floor() {
    let log = log();
    let mut own = Fake::new("lily", &log, |_, _| Ok(4.0));
    let measured = run(&mut [&mut own], &protocol(&[16], &[32], 3), &mut ());
    let limits = Limits { bytes_per_second: 100.0, macs_per_second: 1000.0, how: "as told".into() };
    let work = vec![Work { bytes: 50.0, macs: 1000.0 }, Work { bytes: 300.0, macs: 10.0 }];
    let floors = Floors { limits, work };
    let tables = tables(&measured, Some(&floors));
    assert_eq!(tables[0].rows[1][2], "0.250");
    assert_eq!(tables[1].rows[1][2], "0.750");
    let json = as_json(&measured, Some(&floors));
    assert_eq!(json["points"][1]["floor_seconds"], 3.0);
    assert_eq!(json["points"][1]["engines"][0]["of_floor"], 0.75);
    let plots = plots(&measured, Some(&floors), "a machine");
    assert_eq!(plots[0].0, "prefill.svg");
    let names: Vec<&str> = plots[0].1.curves.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["lily", "limit"]);
    // 16 tokens in 4 seconds, at least 1 second.
    assert_eq!(plots[0].1.curves[0].points, [(16.0, 4.0)]);
    assert_eq!(plots[0].1.curves[1].points, [(16.0, 16.0)]);
}

#[test]
fn who_watches_is_told_everything() {
    struct Told(Vec<String>);
    impl Watch for Told {
        fn begins(&mut self, point: Point, engine: &str, round: Option<usize>) {
            self.0.push(format!("{engine} {} {round:?}", point.length()));
        }
    }
    let log = log();
    let mut own = Fake::new("lily", &log, |_, _| Ok(1.0));
    let mut told = Told(Vec::new());
    run(&mut [&mut own], &protocol(&[16], &[], 2), &mut told);
    assert_eq!(told.0, ["lily 16 None", "lily 16 Some(0)", "lily 16 Some(1)"]);
}

#[test]
fn ten_lengths_up_to_a_limit() {
    let all = Protocol::frontiers(131_072);
    assert_eq!((all.prefill.len(), all.decode.len()), (10, 10));
    assert_eq!((all.prefill[0], all.prefill[9]), (256, 131_072));
    let some = Protocol::frontiers(4096);
    assert_eq!(some.prefill, [256, 512, 1024, 2048, 4096]);
    assert_eq!(some.context(), 4096 + 64 + 1);
}

/// Leaving out `fusion` takes twice as long for prompts, `handoff` a little longer or shorter, and `broken` cannot be
/// had.
fn ablation(interrupt: bool) -> Vec<Ablated> {
    let log = log();
    let mut base = Fake::new("all on", &log, |_, _| Ok(1.0));
    let other = |name: &'static str, seconds: fn(Point, usize) -> Result<f64, Trouble>| {
        let log = Rc::clone(&log);
        let without: Box<dyn FnOnce() -> Result<Box<dyn Engine>, Trouble>> =
            Box::new(move || Ok(Box::new(Fake::new("without", &log, seconds))));
        let beside = if name == "handoff" { vec!["sampling".into()] } else { Vec::new() };
        Switch { name: name.into(), beside, without }
    };
    let broken = Box::new(|| Err(Trouble::Failed("no memory".into())));
    let first: fn(Point, usize) -> Result<f64, Trouble> = match interrupt {
        true => |_, _| Err(Trouble::Interrupted),
        false => |p, _| Ok(if p.phase() == Phase::Prefill { 2.0 } else { 0.5 }),
    };
    let switches = vec![
        other("fusion", first),
        Switch { name: "broken".into(), beside: Vec::new(), without: broken },
        other("handoff", |_, round| Ok(if round == 0 { 0.9 } else { 1.1 })),
    ];
    ablate::ablate(&mut base, switches, &protocol(&[16], &[32], 3), &mut ())
}

#[test]
fn each_switch_is_measured_in_pairs_with_all_on() {
    let results = ablation(false);
    assert_eq!(results.len(), 3);
    let rows = ablate::table("title", &results).rows;
    assert_eq!(
        rows[1],
        ["fusion", "prefill of 16 tokens", "+100.00 %", "+100.00 %", "+100.00 %", "pays"]
    );
    assert_eq!(rows[2][2..], ["-50.00 %", "-50.00 %", "-50.00 %", "costs"]);
    assert_eq!(rows[3][0..3], ["broken", "prefill of 16 tokens", "failed: no memory"]);
    assert_eq!(rows[5][2..], ["+10.00 %", "-10.00 %", "+10.00 %", "makes no difference"]);
    let figures = ablate::figures(&results);
    assert_eq!(figures[0].what, "without fusion: prefill of 16 tokens");
    assert_eq!((figures[0].value.as_str(), &figures[0].rounds[..]), ("2.0000", &[2.0; 3][..]));
    assert_eq!(figures[2].value, "failed: no memory");
    assert_eq!(figures[4].what, "without handoff: prefill of 16 tokens, both without sampling");
    let json = ablate::json(&results);
    assert_eq!(json[0]["switch"], "fusion");
    assert_eq!(
        (&json[0]["beside"], &json[2]["beside"]),
        (&serde_json::json!([]), &serde_json::json!(["sampling"]))
    );
    assert_eq!(json[0]["cache"], serde_json::json!([]));
}

#[test]
fn an_interruption_ends_an_ablation() {
    assert_eq!(ablation(true).len(), 1);
}
