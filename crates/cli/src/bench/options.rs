//! Options that the measuring commands share.

use std::fs;
use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Args;
use lily_bench::report::{Floors, Table, plots};
use lily_bench::{LENGTHS, Measured, Protocol, Watch};

use crate::failure::Failure;
use crate::options::count;
use crate::output::{Stdout, note_dimmed, table};

/// What is measured, and how often.
#[derive(Args, Clone, Debug)]
pub struct PointArgs {
    /// Measure both frontiers over 256, 512, 1K … up to N tokens. Lengths that the model was not made for are
    /// left out.
    #[arg(long, value_name = "N", default_value_t = LENGTHS[9], value_parser = count, help_heading = "Measuring")]
    pub max: usize,

    /// Measure prompts of these lengths instead of the frontiers, such as 512,2048.
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = count, help_heading = "Measuring")]
    pub prefill: Vec<usize>,

    /// Measure decoding after contexts of these lengths instead of the frontiers, such as 512,4096.
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = count, help_heading = "Measuring")]
    pub decode: Vec<usize>,

    /// Tokens decoded for one measurement.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = count, help_heading = "Measuring")]
    pub decode_tokens: usize,

    /// Measurements at each length; the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = count, help_heading = "Measuring")]
    pub rounds: usize,

    /// Untimed runs before the rounds of each length.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Measuring")]
    pub warm_up: usize,
}

impl PointArgs {
    /// The protocol for a model that was made for so many tokens.
    pub fn protocol(&self, most: usize) -> Result<Protocol, Failure> {
        let mut protocol = Protocol::frontiers(self.max);
        let asked = !self.prefill.is_empty() || !self.decode.is_empty();
        if asked {
            (protocol.prefill, protocol.decode) = (self.prefill.clone(), self.decode.clone());
        }
        protocol.decode_tokens = self.decode_tokens;
        (protocol.rounds, protocol.warm_up) = (self.rounds, self.warm_up);
        if !asked {
            protocol.prefill.retain(|n| *n < most);
            protocol.decode.retain(|n| n + self.decode_tokens < most);
        }
        let need = protocol.context();
        if need > most {
            return Err(Failure::usage(
                format!("{need} tokens are more than the {most} that the model was made for"),
                "measure shorter prompts and contexts",
            ));
        }
        match protocol.points().is_empty() {
            true => Err(Failure::usage("there is nothing to measure", "give a larger --max")),
            false => Ok(protocol),
        }
    }
}

/// What becomes of the figures.
#[derive(Args, Clone, Debug)]
pub struct OutArgs {
    /// Print one JSON object with every round.
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// Draw prefill.svg and decode.svg into DIR.
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub plots: Option<PathBuf>,

    /// Do not measure what the machine can do at best, and print no fractions of it.
    #[arg(long, help_heading = "Output")]
    pub no_floors: bool,

    /// Measure Lily's seconds by operation too, once at each length: of a whole prompt, and of up to 8 decoded
    /// tokens.
    #[arg(long, help_heading = "Output")]
    pub by_op: bool,

    /// Measure too how long a snapshot of each context takes: copied to the host's memory, and back until the next token.
    #[arg(long, help_heading = "Output")]
    pub snapshots: bool,

    #[command(flatten)]
    pub record: super::record::RecordArgs,
}

/// Prints tables.
pub fn print(out: &mut Stdout, tables: &[Table]) -> std::io::Result<()> {
    for part in tables {
        out.line(&format!("\n{}", part.title))?;
        out.text(&table(&part.rows))?;
        for note in &part.notes {
            out.line(&format!("  {note}"))?;
        }
    }
    Ok(())
}

/// Draws the plots, if they are wanted.
pub fn draw(
    args: &OutArgs,
    measured: &Measured,
    floors: Option<&Floors>,
    title: &str,
) -> Result<(), Failure> {
    let Some(dir) = &args.plots else { return Ok(()) };
    let failed = |error: std::io::Error| {
        let what = format!("{}: no plot could be written: {error}", dir.display());
        Failure::new(what, "name a folder that can be written to")
    };
    fs::create_dir_all(dir).map_err(failed)?;
    for (name, plot) in plots(measured, floors, title) {
        fs::write(dir.join(name), plot.svg()).map_err(failed)?;
    }
    Ok(())
}

/// Tells on a terminal what is being measured.
pub struct Told {
    pub rounds: usize,
    pub wanted: bool,
}

impl Watch for Told {
    fn begins(&mut self, point: lily_bench::Point, engine: &str, round: Option<usize>) {
        if self.wanted && std::io::stderr().is_terminal() {
            let round = match round {
                Some(n) => format!("round {} of {}", n + 1, self.rounds),
                None => "warming up".to_owned(),
            };
            note_dimmed(&format!("{point}: {engine}, {round}"));
        }
    }
}
