//! The quantizations: MLX affine weights, and activations of 8 or 15 bits in groups of 64.
//!
//! These functions are the definition; device kernels reproduce them to the bit.

use crate::plan::{Activation, GROUP, WeightFormat, WeightSpec};
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

/// One group of 64 quantized activations: `x ≈ scale · code`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizedGroup {
    /// Codes, up to the activation's [largest](Activation::largest_code) in magnitude.
    pub codes: [i16; GROUP],
    /// Largest magnitude of the group divided by the largest code; NaN if any element was not finite.
    pub scale: f32,
    /// `scale · Σ codes`: what the weights' biases are multiplied with.
    pub sum: f32,
}

/// Quantizes one group as [`Activation::I8G64`] does.
pub fn quantize_i8(x: &[f32]) -> QuantizedGroup {
    quantize_group(x, Activation::I8G64).expect("a quantized activation")
}

/// Quantizes one group as [`Activation::I16G64`] does.
pub fn quantize_i16(x: &[f32]) -> QuantizedGroup {
    quantize_group(x, Activation::I16G64).expect("a quantized activation")
}

/// Quantizes one group, with `n` the activation's largest code: `scale = max|x| / n`,
/// `code = round_ties_even(x · (n / max|x|))`. `None` for activations that are not quantized.
///
/// A group that holds a NaN or an infinity gets the scale NaN, so that the result of the operation is NaN
/// instead of plausible. A group so small that `n / max|x|` overflows counts as zero.
pub fn quantize_group(x: &[f32], activation: Activation) -> Option<QuantizedGroup> {
    assert_eq!(x.len(), GROUP);
    let n = f32::from(activation.largest_code()?);
    let without_codes = |scale| QuantizedGroup { codes: [0; GROUP], scale, sum: scale };
    if x.iter().any(|v| !v.is_finite()) {
        return Some(without_codes(f32::NAN));
    }
    let max = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let inverse = n / max;
    if max == 0.0 || !inverse.is_finite() {
        return Some(without_codes(0.0));
    }
    let codes: [i16; GROUP] =
        std::array::from_fn(|i| (x[i] * inverse).round_ties_even().clamp(-n, n) as i16);
    let scale = max / n;
    let total: i32 = codes.iter().map(|&c| i32::from(c)).sum();
    Some(QuantizedGroup { codes, scale, sum: scale * total as f32 })
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

    #[test]
    fn int16_groups() {
        let mut x = [0f32; GROUP];
        x[..6].copy_from_slice(&[-2.0, 2.0, 1.0, 1.5 / 8128.0, 2.5 / 8128.0, -2.5 / 8128.0]);
        let g = quantize_i16(&x);
        // Halves go to the even code.
        assert_eq!(g.codes[..6], [-16256, 16256, 8128, 2, 2, -2]);
        assert_eq!((g.scale, g.sum), (2.0 / 16256.0, 2.0 / 16256.0 * 8130.0));
        assert_eq!(quantize_i16(&[3e38; GROUP]).codes, [16256; GROUP]);
        // 16256 / x overflows for the first only.
        assert_eq!(quantize_i16(&[4e-35; GROUP]), quantize_i16(&[0.0; GROUP]));
        assert_eq!(quantize_i16(&[5e-35; GROUP]).codes, [16256; GROUP]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            x[63] = bad;
            let g = quantize_i16(&x);
            assert!(g.scale.is_nan() && g.sum.is_nan());
            assert_eq!(g.codes, [0; GROUP]);
        }
        assert_eq!(quantize_group(&x, Activation::F32), None);
    }
}
