//! Weights in device memory: a few large buffers (slabs), filled once.

use std::ops::Range;

use lily_ops::quant::WeightRef;
use lily_ops::{ElementType, Op, Plan, WeightFormat, WeightId, WeightSpec};

use crate::driver::{Buffer, Driver, DriverError, Placement};
use crate::kernels::common::{DeviceWeight, SLAB_UNIT};
use crate::list::Operand;

/// Weights begin at whole multiples of this many bytes.
const ALIGNMENT: u64 = 256;

/// Bytes copied at once, so that a large tensor needs no copy of its own.
const CHUNK: usize = 64 << 20;

/// A weight's slab, the ranges of its parts, and its entry.
type Place = (usize, [Range<u64>; 3], crate::Matrix);

/// Where every weight of a plan lies.
#[derive(Clone, Debug)]
pub struct SlabLayout {
    /// Bytes of each slab.
    pub slabs: Vec<u64>,
    /// For each weight its slab, and its entry in it.
    places: Vec<Place>,
    /// How each weight is stored: vectors and convolution taps as f32, all else as in the checkpoint.
    stored: Vec<WeightSpec>,
}

impl SlabLayout {
    /// Places a plan's weights in the order it uses them. The weights of one layer share a slab, so that
    /// a kernel can reach several of them through one binding.
    pub fn new(plan: &Plan, max_buffer: u64) -> Result<Self, String> {
        // Entries count units of 16 bytes in 32 bits.
        let max_buffer = max_buffer.min(SLAB_UNIT << 32);
        let stored: Vec<WeightSpec> =
            (0..plan.weights.len()).map(|i| stored_spec(plan, WeightId(i as u32))).collect();
        let mut places: Vec<Option<Place>> = vec![None; stored.len()];
        let mut slabs = vec![0u64];
        for group in groups(plan) {
            let place = |start: u64| {
                let mut at = start;
                let mut list = Vec::new();
                for &w in &group {
                    let (parts, matrix) = DeviceWeight::layout(&stored[w], at);
                    at = parts[2].end.max(parts[0].end).next_multiple_of(ALIGNMENT);
                    list.push((w, parts, matrix));
                }
                (at, list)
            };
            let last = slabs.len() - 1;
            let (mut end, mut list) = place(slabs[last]);
            if end > max_buffer && slabs[last] > 0 {
                slabs.push(0);
                (end, list) = place(0);
            }
            if end > max_buffer {
                return Err(format!(
                    "the weights from {} on take {end} bytes together; a buffer of this device has at most {max_buffer}",
                    plan.weights[group[0]].role
                ));
            }
            let slab = slabs.len() - 1;
            slabs[slab] = end;
            for (w, parts, matrix) in list {
                places[w] = Some((slab, parts, matrix));
            }
        }
        let places = places.into_iter().flatten().collect();
        Ok(Self { slabs, places, stored })
    }

    /// Bytes of all slabs.
    pub fn bytes(&self) -> u64 {
        self.slabs.iter().sum()
    }

    /// The weights, in slabs that begin with the buffer `first`.
    pub fn weights(&self, plan: &Plan, buffers: &[Buffer]) -> Vec<DeviceWeight> {
        self.places
            .iter()
            .zip(&plan.weights)
            .map(|((slab, _, matrix), spec)| DeviceWeight {
                slab: Operand {
                    buffer: buffers[*slab],
                    offset: 0,
                    bytes: self.slabs[*slab],
                    element: ElementType::U32,
                },
                matrix: *matrix,
                matrices: spec.matrices as u32,
                bytes: spec.bytes(),
            })
            .collect()
    }

    /// Allocates the slabs and copies the weights into them.
    pub fn upload(
        &self,
        driver: &mut dyn Driver,
        plan: &Plan,
        weights: &[WeightRef],
    ) -> Result<Vec<DeviceWeight>, DriverError> {
        let mut buffers = Vec::new();
        for (i, bytes) in self.slabs.iter().enumerate() {
            let what = format!("weights, part {} of {}", i + 1, self.slabs.len());
            buffers.push(driver.allocate(&what, *bytes, Placement::Device)?);
        }
        for (i, weight) in weights.iter().enumerate() {
            let (slab, parts, _) = &self.places[i];
            let (spec, stored) = (&plan.weights[i], &self.stored[i]);
            let buffer = buffers[*slab];
            if spec.format != stored.format {
                let rows = (0..spec.matrices)
                    .flat_map(|m| (0..spec.rows).map(move |r| (m, r)))
                    .flat_map(|(m, r)| weight.row(spec, m, r))
                    .flat_map(f32::to_le_bytes)
                    .collect::<Vec<u8>>();
                driver.write(buffer, parts[0].start, &rows)?;
                continue;
            }
            let codes = spec.rows * spec.format.row_bytes(spec.cols);
            let scales = spec.rows * spec.format.scale_bytes(spec.cols);
            for (part, (bytes, len)) in
                [(weight.codes, codes), (weight.scales, scales), (weight.biases, scales)]
                    .into_iter()
                    .enumerate()
            {
                if len == 0 {
                    continue;
                }
                let stride = (parts[part].end - parts[part].start) / spec.matrices as u64;
                for m in 0..spec.matrices {
                    let from = &bytes[m * weight.strides[part]..][..len];
                    let mut to = parts[part].start + m as u64 * stride;
                    for chunk in from.chunks(CHUNK) {
                        driver.write(buffer, to, chunk)?;
                        to += chunk.len() as u64;
                    }
                }
            }
        }
        Ok(self.weights(plan, &buffers))
    }
}

/// Weights that should lie together: those of a layer, by first use; the rest one by one.
fn groups(plan: &Plan) -> Vec<Vec<usize>> {
    let mut groups: Vec<(Option<u32>, Vec<usize>)> = Vec::new();
    let mut seen = vec![false; plan.weights.len()];
    for node in plan.nodes() {
        for w in node.op.weights() {
            let w = w.0 as usize;
            if std::mem::replace(&mut seen[w], true) {
                continue;
            }
            match groups.last_mut() {
                Some((Some(layer), list)) if Some(*layer) == node.layer => list.push(w),
                _ => groups.push((node.layer, vec![w])),
            }
        }
    }
    groups.into_iter().map(|(_, list)| list).collect()
}

/// How a weight is stored on the device.
fn stored_spec(plan: &Plan, id: WeightId) -> WeightSpec {
    let spec = plan.weight(id).clone();
    let taps = plan.nodes().any(|n| matches!(&n.op, Op::CausalConv(op) if op.weight == id));
    match spec.format {
        WeightFormat::Dense(_) if spec.rows == 1 || taps => {
            WeightSpec { format: WeightFormat::Dense(ElementType::F32), ..spec }
        }
        _ => spec,
    }
}
