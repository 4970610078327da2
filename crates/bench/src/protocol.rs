//! The protocol: points one after another, rounds within a point, engines alternating within a round.

use crate::engine::{Engine, Phase, Point, Trouble};
use crate::stats::{Summary, mean, median};

/// The ten lengths of a frontier.
pub const LENGTHS: [usize; 10] =
    [256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072];

/// What is measured, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Lengths of prompts.
    pub prefill: Vec<usize>,
    /// Contexts to decode after.
    pub decode: Vec<usize>,
    /// Tokens decoded for one measurement.
    pub decode_tokens: usize,
    /// Untimed runs before the rounds of a point.
    pub warm_up: usize,
    /// Measurements of each engine at a point.
    pub rounds: usize,
}

impl Protocol {
    /// Both frontiers up to `max` tokens.
    pub fn frontiers(max: usize) -> Self {
        let lengths: Vec<usize> = LENGTHS.into_iter().filter(|n| *n <= max).collect();
        let decode = lengths.clone();
        Self { prefill: lengths, decode, decode_tokens: 64, warm_up: 1, rounds: 5 }
    }

    /// Its points: all prompts, then all contexts, so that the phases never mix.
    pub fn points(&self) -> Vec<Point> {
        let tokens = self.decode_tokens;
        let prefill = self.prefill.iter().map(|&tokens| Point::Prefill { tokens });
        let decode = self.decode.iter().map(|&context| Point::Decode { context, tokens });
        prefill.chain(decode).collect()
    }

    /// The longest session that it needs.
    pub fn context(&self) -> usize {
        self.points().into_iter().map(Point::room).max().unwrap_or(1)
    }
}

/// One engine at one point.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cell {
    /// Seconds, one a round.
    pub seconds: Vec<f64>,
    /// Why there are fewer than rounds.
    pub trouble: Option<Trouble>,
}

impl Cell {
    /// Its seconds, if all rounds went well.
    pub fn complete(&self) -> Option<&[f64]> {
        (self.trouble.is_none() && !self.seconds.is_empty()).then_some(&self.seconds)
    }
}

/// All engines at one point.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredPoint {
    /// The point.
    pub point: Point,
    /// One for each engine.
    pub cells: Vec<Cell>,
}

impl MeasuredPoint {
    /// Tokens a second of an engine.
    pub fn speed(&self, engine: usize) -> Option<Summary> {
        Summary::inverse(self.cells[engine].complete()?, self.point.tokens() as f64)
    }

    /// Median seconds of an engine.
    pub fn seconds(&self, engine: usize) -> Option<f64> {
        median(self.cells[engine].complete()?)
    }

    /// How many times as fast the first engine is as another, round by round.
    pub fn ratios(&self, engine: usize) -> Option<Vec<f64>> {
        let (own, other) = (self.cells[0].complete()?, self.cells[engine].complete()?);
        Some(own.iter().zip(other).map(|(own, other)| other / own).collect())
    }

    /// The median of [`ratios`](Self::ratios) with its extremes.
    pub fn ratio(&self, engine: usize) -> Option<Summary> {
        Summary::of(&self.ratios(engine)?)
    }
}

/// All that was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Names of the engines; the others are compared with the first.
    pub engines: Vec<String>,
    /// What each was exactly.
    pub facts: Vec<Vec<(String, String)>>,
    /// The points, in the order they were measured.
    pub points: Vec<MeasuredPoint>,
}

impl Measured {
    /// Points of a phase.
    pub fn phase(&self, phase: Phase) -> impl Iterator<Item = &MeasuredPoint> {
        self.points.iter().filter(move |p| p.point.phase() == phase)
    }

    /// The mean of the ratios of a phase's points, and of how many it is.
    pub fn mean_ratio(&self, phase: Phase, engine: usize) -> Option<(f64, usize)> {
        let ratios: Vec<f64> =
            self.phase(phase).filter_map(|p| Some(p.ratio(engine)?.median)).collect();
        Some((mean(&ratios)?, ratios.len()))
    }

    /// Whether someone ended it before its end.
    pub fn interrupted(&self) -> bool {
        let interrupted = |c: &Cell| c.trouble == Some(Trouble::Interrupted);
        self.points.iter().any(|p| p.cells.iter().any(interrupted))
    }
}

/// Whoever follows a run.
pub trait Watch {
    /// A measurement begins. `round` is `None` while the engine warms up.
    fn begins(&mut self, _point: Point, _engine: &str, _round: Option<usize>) {}
}

impl Watch for () {}

/// Measures all points. In even rounds the engines take turns in their order, in odd ones in reverse, so that no
/// one always follows the same other. An engine in trouble is left out of the rest of its point, never of the
/// next one. An interruption ends the run with what there is.
pub fn run(
    engines: &mut [&mut dyn Engine],
    protocol: &Protocol,
    watch: &mut dyn Watch,
) -> Measured {
    let mut measured = Measured {
        engines: engines.iter().map(|e| e.name().to_owned()).collect(),
        facts: Vec::new(),
        points: Vec::new(),
    };
    for point in protocol.points() {
        measured.points.push(run_point(engines, protocol, point, watch));
        if measured.interrupted() {
            break;
        }
    }
    // Afterwards: some are known only then.
    measured.facts = engines.iter().map(|e| e.facts()).collect();
    measured
}

fn run_point(
    engines: &mut [&mut dyn Engine],
    protocol: &Protocol,
    point: Point,
    watch: &mut dyn Watch,
) -> MeasuredPoint {
    let mut cells = vec![Cell::default(); engines.len()];
    for (engine, cell) in engines.iter_mut().zip(&mut cells) {
        for _ in 0..protocol.warm_up {
            if cell.trouble.is_none() {
                watch.begins(point, engine.name(), None);
                cell.trouble = engine.warm_up(point).err();
            }
        }
    }
    for round in 0..protocol.rounds {
        for i in order(engines.len(), round) {
            let interrupted = cells.iter().any(|c| c.trouble == Some(Trouble::Interrupted));
            if cells[i].trouble.is_some() || interrupted {
                continue;
            }
            watch.begins(point, engines[i].name(), Some(round));
            match engines[i].measure(point).and_then(plausible) {
                Ok(seconds) => cells[i].seconds.push(seconds),
                Err(trouble) => cells[i].trouble = Some(trouble),
            }
        }
    }
    if cells.iter().any(|c| c.trouble == Some(Trouble::Interrupted)) {
        // Rounds that were not reached are no measurements.
        for cell in cells.iter_mut().filter(|c| c.seconds.len() < protocol.rounds) {
            cell.trouble.get_or_insert(Trouble::Interrupted);
        }
    }
    MeasuredPoint { point, cells }
}

fn order(engines: usize, round: usize) -> Vec<usize> {
    match round % 2 {
        0 => (0..engines).collect(),
        _ => (0..engines).rev().collect(),
    }
}

fn plausible(seconds: f64) -> Result<f64, Trouble> {
    match seconds.is_finite() && seconds > 0.0 {
        true => Ok(seconds),
        false => Err(Trouble::Failed(format!("it reported {seconds} s, which is no time"))),
    }
}
