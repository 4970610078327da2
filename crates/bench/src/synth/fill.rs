//! Values: seeded streams of bytes, and what tensors make of them.

use half::bf16;

/// An endless seeded stream of random words, any of which can be computed alone: SplitMix64 over its index.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream(u64);

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Stream {
    /// The stream of a name under a seed.
    pub fn new(seed: u64, name: &str) -> Self {
        // FNV-1a; the seed is mixed first so that neighbouring seeds have nothing in common.
        let start = 0xCBF2_9CE4_8422_2325 ^ mix(seed.wrapping_add(GOLDEN));
        let hash =
            name.bytes().fold(start, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3));
        Self(mix(hash))
    }

    /// Word `i`.
    #[inline]
    pub fn word(self, i: u64) -> u64 {
        mix(self.0.wrapping_add(i.wrapping_mul(GOLDEN)))
    }

    /// Byte `i` of the words' little-endian bytes.
    #[inline]
    fn byte(self, i: u64) -> usize {
        (self.word(i / 8) >> (8 * (i % 8)) & 0xFF) as usize
    }

    /// Uniform in (0, 1).
    fn uniform(self, i: u64) -> f64 {
        ((self.word(i) >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    /// Nearly N(0, 1): the sum of four uniform numbers. Integers only, so the same on every machine.
    pub fn normal(self, i: u64) -> f64 {
        let w = self.word(i);
        let sum: u64 = (0..4).map(|k| w >> (16 * k) & 0xFFFF).sum();
        (sum as f64 - 2.0 * 65535.0) / 65536.0 * 3f64.sqrt()
    }
}

/// What the elements of a tensor are.
#[derive(Clone, Debug)]
pub(super) enum Fill {
    /// Uniform codes of an affine weight: random bytes.
    Codes,
    /// bf16 scales, or the biases that belong to them.
    Groups(Groups),
    /// bf16, normal.
    Normal { mean: f64, deviation: f64 },
    /// bf16, logarithm of a uniform number.
    LogUniform { low: f64, high: f64 },
}

/// Scales or biases of a matrix whose codes are uniform.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    /// Entries for each value of the byte that chooses one: bf16.
    tables: Vec<[u16; 256]>,
    /// Groups of a row, where each row has a table of its own.
    row_groups: u64,
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Scales,
    Biases,
}

impl Groups {
    /// For weights of about N(0, deviation²) from uniform codes of `bits` bits: `w = s · (code − middle)`.
    /// The scales vary by a quarter and have both signs, as real ones do. `gains` lengthen single rows.
    pub fn new(part: Part, bits: u8, deviation: f64, gains: &[f64], row_groups: u64) -> Self {
        let levels = f64::from(1u32 << bits);
        let (middle, spread) = ((levels - 1.0) / 2.0, ((levels * levels - 1.0) / 12.0).sqrt());
        // Root of the mean square of a number uniform in 0.75…1.25.
        let jitter_rms = (1.0f64 + 1.0 / 48.0).sqrt();
        let entry = |byte: usize, gain: f64| {
            let jitter = (0.75 + (byte >> 1) as f64 / 254.0) / jitter_rms;
            let sign = if byte & 1 == 0 { 1.0 } else { -1.0 };
            let scale = bf16::from_f64(sign * gain * deviation / spread * jitter);
            match part {
                Part::Scales => scale.to_bits(),
                Part::Biases => bf16::from_f64(-middle * scale.to_f64()).to_bits(),
            }
        };
        let table = |gain: f64| std::array::from_fn(|byte| entry(byte, gain));
        match gains {
            [] => Self { tables: vec![table(1.0)], row_groups: u64::MAX },
            _ => Self { tables: gains.iter().map(|&g| table(g)).collect(), row_groups },
        }
    }

    fn at(&self, stream: Stream, group: u64) -> u16 {
        self.tables[(group / self.row_groups) as usize][stream.byte(group)]
    }
}

impl Fill {
    /// Writes the tensor's bytes from `offset` on, which is a multiple of 8, as every chunk but the last is.
    pub fn fill(&self, stream: Stream, offset: u64, out: &mut [u8]) {
        debug_assert!(offset.is_multiple_of(8));
        if let Self::Codes = self {
            for (i, chunk) in (offset / 8..).zip(out.chunks_mut(8)) {
                chunk.copy_from_slice(&stream.word(i).to_le_bytes()[..chunk.len()]);
            }
            return;
        }
        for (i, chunk) in (offset / 2..).zip(out.chunks_exact_mut(2)) {
            chunk.copy_from_slice(&self.element(stream, i).to_le_bytes());
        }
    }

    fn element(&self, stream: Stream, i: u64) -> u16 {
        let value = match self {
            Self::Codes => return 0,
            Self::Groups(groups) => return groups.at(stream, i),
            Self::Normal { mean, deviation } => mean + deviation * stream.normal(i),
            Self::LogUniform { low, high } => (low + (high - low) * stream.uniform(i)).ln(),
        };
        bf16::from_f64(value).to_bits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_chunking_gives_the_same_bytes() {
        let groups = Groups::new(Part::Scales, 8, 0.1, &[1.0, 2.0, 3.0, 4.0], 16);
        let fills = [
            Fill::Codes,
            Fill::Groups(groups),
            Fill::Normal { mean: 1.0, deviation: 0.2 },
            Fill::LogUniform { low: 0.05, high: 4.0 },
        ];
        for fill in fills {
            let stream = Stream::new(3, "x");
            let mut whole = vec![0u8; 128];
            fill.fill(stream, 0, &mut whole);
            let mut parts = vec![0u8; 128];
            for (i, part) in parts.chunks_mut(40).enumerate() {
                fill.fill(stream, 40 * i as u64, part);
            }
            assert_eq!(whole, parts, "{fill:?}");
        }
    }

    #[test]
    fn streams_differ_by_name_and_seed() {
        let word = |seed, name| Stream::new(seed, name).word(0);
        assert_eq!(word(1, "a"), word(1, "a"));
        assert_ne!(word(1, "a"), word(1, "b"));
        assert_ne!(word(1, "a"), word(2, "a"));
        assert_ne!(Stream::new(1, "a").word(0), Stream::new(1, "a").word(1));
    }

    #[test]
    fn moments() {
        let stream = Stream::new(9, "moments");
        let n = 40_000;
        let check = |f: &dyn Fn(u64) -> f64, mean: f64, deviation: f64| {
            let x: Vec<f64> = (0..n).map(f).collect();
            let m = x.iter().sum::<f64>() / n as f64;
            let v = x.iter().map(|x| (x - m).powi(2)).sum::<f64>() / n as f64;
            assert!((m - mean).abs() < 0.02 * deviation.max(0.1), "mean {m}, not {mean}");
            assert!((v.sqrt() / deviation - 1.0).abs() < 0.02, "{} {deviation}", v.sqrt());
        };
        check(&|i| stream.normal(i), 0.0, 1.0);
        check(&|i| stream.uniform(i), 0.5, (1f64 / 12.0).sqrt());
        let codes = Stream::new(9, "codes");
        for bits in [4u8, 8] {
            let scales = Groups::new(Part::Scales, bits, 0.02, &[], 0);
            let biases = Groups::new(Part::Biases, bits, 0.02, &[], 0);
            let weight = |i: u64| {
                let value = |g: &Groups| bf16::from_bits(g.at(stream, i / 64)).to_f64();
                let code = codes.byte(i) & ((1 << bits) - 1);
                value(&scales) * code as f64 + value(&biases)
            };
            check(&weight, 0.0, 0.02);
        }
    }
}
