//! Mistakes made on purpose: so that tests can show that they would be seen.

use std::ops::Range;

use lily_gpu::Text;

/// A barrier, or a wait for copies, that is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The `tg_barrier()` or `simd_fence()`, or the wait for copies, in a line of a kernel file.
    Barrier {
        /// The kernel file.
        file: String,
        /// Its line, from 1.
        line: usize,
    },
    /// The barrier before this stage of every list, from 1.
    Stage(usize),
}

/// What is left out.
const SITES: [&str; 4] = ["tg_barrier()", "simd_fence()", "copy_wait()", "copy_wait_but_one()"];

impl Fault {
    /// `gemv.metal:237`, or `stage:3`.
    pub fn parse(text: &str) -> Option<Self> {
        let (file, number) = text.rsplit_once(':')?;
        let number = number.parse().ok()?;
        Some(match file {
            "stage" => Self::Stage(number),
            file => Self::Barrier { file: file.to_owned(), line: number },
        })
    }

    /// The text without the barrier, for some of its kernels; `None`: the text is as it was.
    pub(crate) fn text(&self, text: &Text, kernels: &[&str]) -> Option<Text> {
        let Self::Barrier { file, line } = self else { return None };
        let mut source = only(kernels);
        let start = format!("#line 1 \"{file}\"");
        let mut left = None;
        for text_line in text.source.lines() {
            left = match left {
                _ if text_line.starts_with(&start) => Some(*line),
                _ if text_line.starts_with("#line ") => None,
                Some(n) => usize::checked_sub(n, 1),
                None => None,
            };
            let here = left == Some(0);
            let edited = SITES.iter().fold(text_line.to_owned(), |line, s| line.replace(s, "0"));
            source += if here { &edited } else { text_line };
            source.push('\n');
        }
        Some(Text { platform: text.platform, source })
    }

    /// The stages without one of their boundaries.
    pub(crate) fn stages(&self, mut stages: Vec<Range<usize>>) -> Vec<Range<usize>> {
        if let Self::Stage(n) = self
            && (1..stages.len()).contains(n)
        {
            let end = stages.remove(*n).end;
            stages[*n - 1].end = end;
        }
        stages
    }
}

/// What makes a text one of these kernels alone, in front of it: fewer cost a compiler less.
pub(crate) fn only(kernels: &[&str]) -> String {
    let mut kernels = kernels.to_vec();
    kernels.sort_unstable();
    kernels.dedup();
    let keep = kernels.iter().map(|kernel| format!("#define EMU_KEEP_{kernel} 0,\n"));
    ["#define EMU_ONLY 1\n".into()].into_iter().chain(keep).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lily_gpu::Platform;

    #[test]
    fn a_barrier_goes_and_nothing_else() {
        let source = "h tg_barrier();\n#line 1 \"a.metal\"\ntg_barrier();\nx; tg_barrier();\n#line 1 \"b.metal\"\ny\ntg_barrier();\n";
        let text = Text { platform: Platform::Host, source: source.into() };
        let fault = Fault::parse("a.metal:2").unwrap();
        let got = fault.text(&text, &["k", "j", "k"]).unwrap().source;
        let head = "#define EMU_ONLY 1\n#define EMU_KEEP_j 0,\n#define EMU_KEEP_k 0,\n";
        assert_eq!(got, head.to_owned() + &source.replace("x; tg_barrier()", "x; 0"));
        let wait = Text { source: source.replace("x; tg_barrier", "x; copy_wait"), ..text.clone() };
        assert_eq!(fault.text(&wait, &["k", "j"]).unwrap().source, got);
        assert_eq!(Fault::parse("stage:2").unwrap().text(&text, &[]), None);
        assert_eq!(Fault::parse("a.metal"), None);
    }

    #[test]
    fn a_stage_joins_the_one_before_it() {
        let stages = || vec![0..2, 2..3, 3..7];
        assert_eq!(Fault::Stage(1).stages(stages()), [0..3, 3..7]);
        assert_eq!(Fault::Stage(2).stages(stages()), [0..2, 2..7]);
        assert_eq!(Fault::Stage(3).stages(stages()), stages());
    }
}
