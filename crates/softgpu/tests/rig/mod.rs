//! Runs encoders alone: buffers filled from the host, one list, buffers read back.
#![allow(dead_code)] // each test uses a part

use std::sync::Arc;

use lily_gpu::kernels::common::SegmentEntry;
use lily_gpu::scratch::Scratch;
use lily_gpu::{
    Buffer, Context, DeviceWeight, Driver, Operand, Placement, Profile, Recorder, Shape, StepShape,
    Tables, Text, Tuning,
};
use lily_ops::{CaseWeight, ElementType, WeightFormat, WeightSpec};
use lily_softgpu::{Options, SoftDriver};

/// A driver, and tables of which a test fills those it needs.
pub struct Rig {
    pub driver: SoftDriver,
    pub tables: Tables,
    pub tuning: Tuning,
    pub shape: Shape,
}

impl Rig {
    pub fn new(seed: u32, profile: &str) -> Self {
        let options = Options {
            seed: Some(seed),
            profile: Profile {
                platform: lily_gpu::Platform::Host,
                ..Profile::named(profile).unwrap()
            },
            ..Options::default()
        };
        let mut driver = SoftDriver::new(options);
        let buffer = driver.allocate("nothing", 16, Placement::Device).unwrap();
        let none = Operand { buffer, offset: 0, bytes: 16, element: ElementType::U32 };
        let tables = Tables {
            segments: none,
            row_segments: none,
            tokens: none,
            output_rows: none,
            headers: none,
            pages: none,
            max_pages: 0,
            states: none,
            state_words: 0,
            conv_at: 0,
            kv: Vec::new(),
            rope: none,
        };
        Self { driver, tables, tuning: Tuning::default(), shape: Shape::default() }
    }

    /// A buffer with these bytes; what a kernel does not write shows as NaN.
    pub fn put<T: bytemuck::NoUninit>(&mut self, element: ElementType, data: &[T]) -> Operand {
        let data: &[u8] = bytemuck::cast_slice(data);
        let bytes = (data.len() as u64).max(16);
        let buffer = self.driver.allocate("operand", bytes, Placement::Shared).unwrap();
        self.driver.write(buffer, 0, data).unwrap();
        Operand { buffer, offset: 0, bytes, element }
    }

    /// A buffer of NaN.
    pub fn room(&mut self, element: ElementType, count: usize) -> Operand {
        let bytes = vec![0xFFu8; count * element.size()];
        self.put(element, &bytes)
    }

    pub fn f32(&mut self, x: &[f32]) -> Operand {
        self.put(ElementType::F32, x)
    }

    pub fn u32(&mut self, x: &[u32]) -> Operand {
        self.put(ElementType::U32, x)
    }

    pub fn bf16(&mut self, x: &[f32]) -> Operand {
        let bits: Vec<u16> = x.iter().map(|x| half::bf16::from_f32(*x).to_bits()).collect();
        self.put(ElementType::Bf16, &bits)
    }

    pub fn get<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(
        &mut self,
        operand: Operand,
        count: usize,
    ) -> Vec<T> {
        let mut data = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut data);
        self.driver.read(operand.buffer, operand.offset, bytes).unwrap();
        data
    }

    /// Elements as f32, whatever they are stored in.
    pub fn get_f32(&mut self, operand: Operand, count: usize) -> Vec<f32> {
        match operand.element {
            ElementType::Bf16 => {
                let bits: Vec<u16> = self.get(operand, count);
                bits.into_iter().map(|x| half::bf16::from_bits(x).to_f32()).collect()
            }
            _ => self.get(operand, count),
        }
    }

    /// One segment of one row a slot, slots in order.
    pub fn decode_segments(&mut self, slots: usize) {
        let entries: Vec<SegmentEntry> = (0..slots as u32)
            .map(|i| SegmentEntry { slot: i, first: i, rows: 1, first_output: i })
            .collect();
        self.tables.segments = self.put(ElementType::U32, &entries);
    }

    /// Records and runs; the kernels that ran, in order, and how many stages they made.
    pub fn run(
        &mut self,
        step: StepShape,
        record: impl FnOnce(&mut Recorder, &Context, &mut Scratch),
    ) -> (Vec<&'static str>, usize) {
        let profile = self.driver.profile().clone();
        let mut r = Recorder::default();
        let mut scratch = Scratch::default();
        let context = Context {
            profile: &profile,
            tuning: &self.tuning,
            shape: &self.shape,
            step,
            tables: &self.tables,
        };
        record(&mut r, &context, &mut scratch);
        let mut list = r.finish(true);
        let bytes = scratch.place(&mut list.clone(), Buffer(0), true).max(16);
        let arena = self.driver.allocate("scratch", bytes, Placement::Device).unwrap();
        self.driver.write(arena, 0, &vec![0xFF; bytes as usize]).unwrap();
        scratch.place(&mut list, arena, true);
        let kernels: Vec<&'static str> = list.dispatches.iter().map(|d| d.kernel).collect();
        let text = Arc::new(Text::new(profile.platform, &self.shape));
        list.pipelines = self.driver.pipelines(&text, &kernels).unwrap();
        let stages = list.stages.len();
        let submission = self.driver.submit(&Arc::new(list)).unwrap();
        self.driver.wait(submission).unwrap();
        (kernels, stages)
    }

    /// Weights in one slab, in order, as the checkpoint has them.
    pub fn weights(&mut self, specs: &[(WeightSpec, CaseWeight)]) -> Vec<DeviceWeight> {
        let mut slab: Vec<u8> = Vec::new();
        let mut matrices = Vec::new();
        for (spec, w) in specs {
            let at = slab.len().next_multiple_of(256) as u64;
            let (parts, matrix) = DeviceWeight::layout(spec, at);
            for (range, bytes) in parts.iter().zip([&w.codes, &w.scales, &w.biases]) {
                slab.resize(slab.len().max(range.end as usize), 0xFF);
                slab[range.start as usize..][..bytes.len()].copy_from_slice(bytes);
            }
            matrices.push((matrix, spec.bytes()));
        }
        let slab = self.put(ElementType::U32, &slab);
        let weight = |(matrix, bytes)| DeviceWeight { slab, matrix, matrices: 1, bytes };
        matrices.into_iter().map(weight).collect()
    }
}

/// A step of `rows` decode segments.
pub fn decode(rows: u32) -> StepShape {
    StepShape { segments: vec![1; rows as usize], outputs: rows, context: 1 }
}

/// A random weight.
pub fn weight(
    rng: &mut lily_ops::case::Seeded,
    format: WeightFormat,
    rows: usize,
    cols: usize,
) -> (WeightSpec, CaseWeight) {
    let scale = (cols as f32).sqrt().recip() * 1.7;
    let values: Vec<f32> = (0..rows * cols).map(|_| rng.unit() * scale).collect();
    let mut b = lily_ops::case::CaseBuilder::new::<lily_ops::ops::Linear>(
        "weight",
        &[(1, 0)],
        lily_ops::case::NO_STATE,
    );
    let x = b.input(lily_ops::Rows::Tokens, cols, 1.0);
    let weight = b.weight_with(format, 1, rows, cols, &values);
    let out = b.output(lily_ops::Rows::Tokens, rows, ElementType::F32);
    let activation = lily_ops::Activation::F32;
    let case = b.build(lily_ops::ops::Linear { x, weight, activation, out });
    (case.plan.weights[0].clone(), case.weights[0].clone())
}
