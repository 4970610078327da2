use lily_checkpoint::TensorBytes;
use lily_ops::WeightSpec;
use lily_ops::quant::WeightRef;

/// The bytes of one weight of a plan, as they lie in the checkpoint.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Codes, or plain elements.
    pub codes: TensorBytes,
    /// bf16 scales of a quantized weight.
    pub scales: Option<TensorBytes>,
    /// bf16 biases of a quantized weight.
    pub biases: Option<TensorBytes>,
    /// Bytes from one stacked matrix to the next in codes, scales and biases; larger than a matrix where
    /// the checkpoint interleaves two stacks.
    pub strides: [usize; 3],
}

impl Weight {
    /// The borrowed bytes.
    pub fn as_ref(&self) -> WeightRef<'_> {
        WeightRef {
            codes: self.codes.as_slice(),
            scales: self.scales.as_ref().map_or(&[], TensorBytes::as_slice),
            biases: self.biases.as_ref().map_or(&[], TensorBytes::as_slice),
            strides: self.strides,
        }
    }

    /// Checks that every stacked matrix of `spec` lies inside the bytes.
    pub fn check(&self, spec: &WeightSpec) -> Result<(), String> {
        let scales = spec.rows * spec.format.scale_bytes(spec.cols);
        let parts = [
            ("codes", Some(&self.codes), spec.rows * spec.format.row_bytes(spec.cols)),
            ("scales", self.scales.as_ref(), scales),
            ("biases", self.biases.as_ref(), scales),
        ];
        for (i, (what, bytes, matrix)) in parts.into_iter().enumerate() {
            let need = match matrix {
                0 => 0,
                _ => (spec.matrices - 1) * self.strides[i] + matrix,
            };
            let have = bytes.map_or(0, |b| b.len());
            if have < need {
                return Err(format!("{}: {what} hold {have} bytes, {need} are needed", spec.role));
            }
        }
        Ok(())
    }
}
