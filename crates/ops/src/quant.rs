//! The two quantizations: MLX affine weights, and int8 activations in groups of 64.
//!
//! These functions are the definition; device kernels reproduce them to the bit.

use crate::plan::{GROUP, WeightFormat, WeightSpec};
use crate::tensor::ElementType;
use half::bf16;

/// The bytes of one weight, borrowed, with the stride between stacked matrices in each part.
#[derive(Clone, Copy, Debug)]
pub struct WeightRef<'a> {
    /// Codes, or plain elements.
    pub codes: &'a [u8],
    /// bf16 scales; empty for dense weights.
    pub scales: &'a [u8],
    /// bf16 biases; empty for dense weights.
    pub biases: &'a [u8],
    /// Bytes from one stacked matrix to the next in `codes`, `scales` and `biases`.
    pub strides: [usize; 3],
}

impl WeightRef<'_> {
    /// Row `row` of matrix `matrix` as f32.
    pub fn row(&self, spec: &WeightSpec, matrix: usize, row: usize) -> Vec<f32> {
        let cols = spec.cols;
        let at = matrix * self.strides[0] + row * spec.format.row_bytes(cols);
        let codes = &self.codes[at..at + spec.format.row_bytes(cols)];
        match spec.format {
            WeightFormat::Affine { bits } => {
                let part = |bytes: &[u8], stride: usize, g: usize| {
                    bf16_at(&bytes[matrix * stride + row * spec.format.scale_bytes(cols)..], g)
                };
                (0..cols)
                    .map(|k| {
                        let scale = part(self.scales, self.strides[1], k / GROUP);
                        let bias = part(self.biases, self.strides[2], k / GROUP);
                        scale.mul_add(code_at(codes, bits, k) as f32, bias)
                    })
                    .collect()
            }
            WeightFormat::Dense(ElementType::Bf16) => {
                (0..cols).map(|k| bf16_at(codes, k)).collect()
            }
            WeightFormat::Dense(_) => (0..cols).map(|k| f32_at(codes, k)).collect(),
        }
    }

    /// Codes, scale and bias of group `group` of a 4- or 8-bit row.
    pub fn group(
        &self,
        spec: &WeightSpec,
        matrix: usize,
        row: usize,
        group: usize,
    ) -> ([u8; GROUP], f32, f32) {
        let WeightFormat::Affine { bits } = spec.format else {
            panic!("{} is not quantized", spec.role)
        };
        let codes =
            &self.codes[matrix * self.strides[0] + row * spec.format.row_bytes(spec.cols)..];
        let row_scales = row * spec.format.scale_bytes(spec.cols);
        (
            std::array::from_fn(|i| code_at(codes, bits, group * GROUP + i)),
            bf16_at(&self.scales[matrix * self.strides[1] + row_scales..], group),
            bf16_at(&self.biases[matrix * self.strides[2] + row_scales..], group),
        )
    }
}

/// Code `k` of a row: 4-bit codes lie low nibble first inside a byte, 8-bit codes in byte order.
fn code_at(codes: &[u8], bits: u8, k: usize) -> u8 {
    match bits {
        4 => (codes[k / 2] >> (4 * (k % 2))) & 15,
        _ => codes[k],
    }
}

/// Element `i` of little-endian bf16 bytes (at any alignment).
pub fn bf16_at(bytes: &[u8], i: usize) -> f32 {
    bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32()
}

/// Element `i` of little-endian f32 bytes (at any alignment).
pub fn f32_at(bytes: &[u8], i: usize) -> f32 {
    f32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
}

/// One group of 64 activations as int8: `x ≈ scale · code`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct I8Group {
    /// Codes in −127…127.
    pub codes: [i8; GROUP],
    /// Largest magnitude of the group divided by 127; NaN if any element was not finite.
    pub scale: f32,
    /// `scale · Σ codes`: what the weights' biases are multiplied with.
    pub sum: f32,
}

/// Quantizes one group: `scale = max|x| / 127`, `code = round_ties_even(x · (127 / max|x|))`.
///
/// A group that holds a NaN or an infinity gets the scale NaN, so that the result of the operation is NaN
/// instead of plausible. A group so small that `127 / max|x|` overflows counts as zero.
pub fn quantize_i8(x: &[f32]) -> I8Group {
    assert_eq!(x.len(), GROUP);
    if x.iter().any(|v| !v.is_finite()) {
        return I8Group { codes: [0; GROUP], scale: f32::NAN, sum: f32::NAN };
    }
    let max = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let inverse = 127.0 / max;
    if max == 0.0 || !inverse.is_finite() {
        return I8Group { codes: [0; GROUP], scale: 0.0, sum: 0.0 };
    }
    let codes: [i8; GROUP] =
        std::array::from_fn(|i| (x[i] * inverse).round_ties_even().clamp(-127.0, 127.0) as i8);
    let scale = max / 127.0;
    let total: i32 = codes.iter().map(|&c| c as i32).sum();
    I8Group { codes, scale, sum: scale * total as f32 }
}

/// Affine quantization of one group as MLX does it: codes, and scale and bias rounded to bf16 (as f32).
pub fn quantize_affine(w: &[f32], bits: u8) -> (Vec<u8>, f32, f32) {
    let n = ((1u32 << bits) - 1) as f32;
    let (lo, hi) = w.iter().fold((f32::MAX, f32::MIN), |(l, h), &x| (l.min(x), h.max(x)));
    let mut scale = ((hi - lo) / n).max(1e-7);
    let edge = if lo.abs() > hi.abs() {
        lo
    } else {
        scale = -scale;
        hi
    };
    let q0 = (edge / scale).round_ties_even();
    let mut bias = 0.0;
    if q0 != 0.0 {
        scale = edge / q0;
        bias = edge;
    }
    let codes =
        w.iter().map(|&x| ((x - bias) / scale).round_ties_even().clamp(0.0, n) as u8).collect();
    (codes, bf16::from_f32(scale).to_f32(), bf16::from_f32(bias).to_f32())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_example_of_the_format() {
        // Group 0 of the specification's worked example: scale 0x3DCD, bias 0xBF80, first word 0x21111000.
        let mut codes = vec![0u8; 32];
        codes[..4].copy_from_slice(&0x2111_1000u32.to_le_bytes());
        let spec = WeightSpec {
            role: "example".into(),
            class: "example",
            format: WeightFormat::Affine { bits: 4 },
            matrices: 1,
            rows: 1,
            cols: 64,
        };
        let w = WeightRef {
            codes: &codes,
            scales: &0x3DCDu16.to_le_bytes(),
            biases: &0xBF80u16.to_le_bytes(),
            strides: [0; 3],
        };
        let row = w.row(&spec, 0, 0);
        assert_eq!(row[..3], [-1.0; 3]);
        assert_eq!(row[3..7], [-0.899_902_34; 4]);
        assert_eq!(row[7], -0.799_804_7);
    }

    #[test]
    fn affine_codes_come_back() {
        let w: Vec<f32> = (0..64).map(|i| ((i * 37 % 64) as f32 - 20.0) * 0.05).collect();
        for bits in [4, 8] {
            let (codes, scale, bias) = quantize_affine(&w, bits);
            // Half a step, and what bf16 takes from scale and bias.
            let bound = 0.5 * scale.abs() + 2.0 * 2.2 / 256.0;
            for (c, x) in codes.iter().zip(&w) {
                assert!((scale * *c as f32 + bias - x).abs() <= bound, "{bits} bits");
            }
        }
    }

    #[test]
    fn int8_groups() {
        let mut x = [0f32; GROUP];
        assert_eq!(quantize_i8(&x).scale, 0.0);
        x[3] = -2.0;
        x[4] = 1.0;
        let g = quantize_i8(&x);
        assert_eq!((g.codes[3], g.codes[4]), (-127, 64));
        assert_eq!(g.sum, (2.0 / 127.0) * -63.0);
        x[9] = f32::INFINITY;
        assert!(quantize_i8(&x).scale.is_nan());
        assert_eq!(quantize_i8(&[1e-40; GROUP]).scale, 0.0);
    }
}
