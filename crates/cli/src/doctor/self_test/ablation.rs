//! Where each switch is measured: at the lengths for which the original published what its optimisations are worth.

use crate::options::DeviceName;

/// A switch, prompts, contexts, and the effect of each in per cent that was published for Apple silicon.
type Row = (&'static str, &'static [usize], &'static [usize], &'static [f64]);

const ROWS: &[Row] = &[
    ("dequantize_in_gemm", &[512], &[], &[77.4]),
    ("gpu_routing", &[512], &[], &[89.0]),
    ("adaptive_tiles", &[2048], &[], &[13.2]),
    ("register_scan", &[2048], &[], &[5.6]),
    ("coalesced_kv", &[], &[3840], &[2.1]),
    ("pack_heads", &[], &[32_768], &[23.8]),
    ("fixed_block", &[], &[32_768, 65_536, 131_072], &[7.7, 27.4, 40.2]),
    // The original has none of these.
    ("chunked_scan", &[2048], &[], &[]),
    ("matrix_attention", &[], &[32_768, 65_536, 131_072], &[]),
];

/// Where all others of a GPU are measured: chains of a decode step.
const CHAINS: &[usize] = &[4096];

/// Prompt and context lengths of the CPU's switches, which the original has not.
const CPU: &[usize] = &[512, 4096];

/// Switches that leave nothing out where there is no `mma.sync`.
const MMA: &[&str] = &["chunked_scan", "matrix_gemv", "matrix_attention"];

/// One measurement of a switch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    pub switch: &'static str,
    pub prefill: Vec<usize>,
    pub decode: Vec<usize>,
    /// The effect that was published, in per cent.
    pub published: Option<f64>,
    /// Left out on both sides: with it on, the switch would change nothing.
    pub without: Option<&'static str>,
}

/// The measurements of a device's switches, each at one length so that one that does not fit takes no other with it; or at the
/// `asked` lengths, all of them. `mma`: whether it has `mma.sync`.
pub fn pieces(
    device: DeviceName,
    names: Vec<&'static str>,
    asked: &[usize],
    mma: bool,
) -> Vec<Piece> {
    let gpu = device != DeviceName::Cpu;
    let mut all = Vec::new();
    for switch in names.into_iter().filter(|name| !gpu || mma || !MMA.contains(name)) {
        let without = (mma && switch == "register_scan").then_some("chunked_scan");
        let piece = Piece { switch, without, ..Piece::default() };
        let row = ROWS.iter().find(|row| row.0 == switch);
        match (asked, gpu, row) {
            ([], true, Some((_, prefill, decode, published))) => {
                let points = prefill.iter().map(|n| (vec![*n], Vec::new()));
                let points = points.chain(decode.iter().map(|n| (Vec::new(), vec![*n])));
                all.extend(points.enumerate().map(|(i, (prefill, decode))| {
                    let published = published.get(i).copied();
                    Piece { prefill, decode, published, ..piece.clone() }
                }));
            }
            ([], true, None) => all.push(Piece { decode: CHAINS.to_vec(), ..piece }),
            ([], false, _) => {
                all.push(Piece { prefill: CPU.to_vec(), decode: CPU.to_vec(), ..piece });
            }
            (asked, ..) => {
                all.push(Piece { prefill: asked.to_vec(), decode: asked.to_vec(), ..piece });
            }
        }
    }
    all
}

impl Piece {
    /// Leaves out lengths that are not below `most`; whether any is left.
    pub fn fits(&mut self, most: usize) -> bool {
        for lengths in [&mut self.prefill, &mut self.decode] {
            lengths.retain(|n| *n < most);
        }
        !(self.prefill.is_empty() && self.decode.is_empty())
    }

    /// What it is called in the report.
    pub fn name(&self) -> String {
        let list = |what: &str, lengths: &[usize]| match lengths {
            [] => String::new(),
            lengths => format!(" {what} {}", super::measure::list(lengths)),
        };
        format!("{}{}{}", self.switch, list("prefill", &self.prefill), list("decode", &self.decode))
    }
}

#[cfg(test)]
mod tests {
    use lily_gpu::Tuning;

    use super::*;
    use crate::bench::ablate::names;
    use crate::options::ComputeArgs;

    fn of(device: DeviceName, mma: bool, asked: &[usize]) -> Vec<Piece> {
        pieces(device, names(&ComputeArgs::on(device)), asked, mma)
    }

    #[test]
    fn every_switch_is_measured_where_the_original_was() {
        let metal = of(DeviceName::Metal, false, &[]);
        for (name, _) in Tuning::SWITCHES {
            let own: Vec<&Piece> = metal.iter().filter(|p| p.switch == *name).collect();
            assert_eq!(own.is_empty(), MMA.contains(name), "{name}");
            assert!(
                own.iter().all(|p| p.prefill.len() + p.decode.len() == 1 && p.without.is_none())
            );
        }
        let published: Vec<(String, f64)> =
            metal.iter().filter_map(|p| Some((p.name(), p.published?))).collect();
        let want = [
            ("dequantize_in_gemm prefill 512", 77.4),
            ("gpu_routing prefill 512", 89.0),
            ("adaptive_tiles prefill 2048", 13.2),
            ("register_scan prefill 2048", 5.6),
            ("coalesced_kv decode 3840", 2.1),
            ("pack_heads decode 32768", 23.8),
            ("fixed_block decode 32768", 7.7),
            ("fixed_block decode 65536", 27.4),
            ("fixed_block decode 131072", 40.2),
        ];
        assert_eq!(published, want.map(|(name, effect)| (name.to_owned(), effect)));
        assert!(metal.iter().any(|p| p.name() == "token_handoff decode 4096"));
    }

    #[test]
    fn matrix_units_have_switches_of_their_own() {
        let cuda = of(DeviceName::Cuda(0), true, &[]);
        assert!(MMA.iter().all(|name| cuda.iter().any(|p| p.switch == *name)));
        let scan = cuda.iter().find(|p| p.switch == "register_scan").unwrap();
        assert_eq!(scan.without, Some("chunked_scan"));
        assert!(cuda.iter().any(|p| p.switch == "early_starts"));
    }

    #[test]
    fn lengths_that_are_asked_for_go_before() {
        for (device, count) in
            [(DeviceName::Cpu, 4), (DeviceName::Metal, Tuning::SWITCHES.len() - 3)]
        {
            let asked = of(device, false, &[8, 16]);
            assert_eq!(asked.len(), count);
            assert!(asked.iter().all(|p| p.prefill == [8, 16] && p.decode == [8, 16]));
        }
        let mut own = of(DeviceName::Cpu, false, &[]);
        assert!(own.iter().all(|p| p.prefill == CPU && p.decode == CPU));
        assert!(own[0].fits(4096) && own[0].prefill == [512] && own[0].decode == [512]);
        assert!(!own[0].fits(512));
    }
}
