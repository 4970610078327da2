//! A driver with a kernel text, operands in it, and encoders run on them: for tests of kernels beside the plan's operations.
#![allow(dead_code)] // each test uses its part

use std::sync::Arc;

use lily_gpu::kernels::argument_structs;
use lily_gpu::scratch::Scratch;
use lily_gpu::text::{FILES, platform_header};
use lily_gpu::{
    Context, DeviceWeight, Driver, Operand, Placement, Platform, Profile, Recorder, Shape,
    StepShape, Tables, Text, Tuning,
};
use lily_ops::case::{CaseBuilder, NO_STATE};
use lily_ops::ops::ExpertsOut;
use lily_ops::plan::Rows;
use lily_ops::{Activation, CaseWeight, ElementType, HostTensor, WeightFormat, WeightSpec};
use lily_softgpu::{Options, SoftDriver};

/// A text of some files only, which compiles faster, with defines in front.
pub fn text_of(defines: &str, after_header: &str, files: &[&str]) -> Text {
    let mut source = Text::defines(&Shape::default()) + defines;
    source += platform_header("platform_cpu.h").expect("the host's header");
    source += after_header;
    source += &argument_structs();
    for (name, text) in FILES.iter().filter(|(name, _)| files.contains(name)) {
        source += &format!("\n#line 1 \"{name}\"\n{text}");
    }
    Text { platform: Platform::Host, source }
}

/// The files of matrix products, routing and experts.
pub const EXPERT_FILES: &[&str] = &[
    "common.metal",
    "gemv_dot.metal",
    "gemv.metal",
    "elementwise.metal",
    "tile_load.metal",
    "tile_simdgroup.h",
    "tile_mpp.h",
    "tile_plain.h",
    "gemm.metal",
    "route.metal",
    "moe.metal",
    "moe_decode.metal",
    "gemm_mma.metal",
    "gemm_wgmma.metal",
    "mma_slice.metal",
    "gemv_mma.metal",
    "moe_mma.metal",
];

/// A weight on the device and its elements.
pub struct TestWeight {
    /// On the device.
    pub device: DeviceWeight,
    /// As in a checkpoint.
    pub spec: WeightSpec,
    /// Its bytes.
    pub bytes: CaseWeight,
}

impl TestWeight {
    /// A row of a matrix, dequantized in f32.
    pub fn row(&self, matrix: usize, row: usize) -> Vec<f32> {
        self.bytes.as_ref().row(&self.spec, matrix, row)
    }

    /// A row as matrix tiles multiply it.
    pub fn row_bf16(&self, matrix: usize, row: usize) -> Vec<f32> {
        self.row(matrix, row).into_iter().map(|x| ElementType::Bf16.round(x)).collect()
    }
}

/// See the module.
pub struct Rig {
    pub driver: SoftDriver,
    text: Arc<Text>,
    pub tuning: Tuning,
    pub profile: Profile,
    seed: u64,
}

impl Rig {
    pub fn new(text: Text) -> Self {
        Self::with(text, Options::default())
    }

    pub fn with(text: Text, options: Options) -> Self {
        let profile = options.profile.clone();
        let driver = SoftDriver::new(options);
        Self { driver, text: Arc::new(text), tuning: Tuning::default(), profile, seed: 1 }
    }

    /// Numbers in (-1, 1).
    pub fn random(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| {
                self.seed =
                    self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (self.seed >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn operand(&mut self, data: &[u8], element: ElementType) -> Operand {
        let bytes = data.len().max(16) as u64;
        let buffer = self.driver.allocate("operand", bytes, Placement::Device).expect("memory");
        self.driver.write(buffer, 0, data).expect("a write");
        Operand { buffer, offset: 0, bytes: data.len() as u64, element }
    }

    pub fn f32(&mut self, x: &[f32]) -> Operand {
        self.operand(bytemuck::cast_slice(x), ElementType::F32)
    }

    pub fn u32(&mut self, x: &[u32]) -> Operand {
        self.operand(bytemuck::cast_slice(x), ElementType::U32)
    }

    pub fn bf16(&mut self, x: &[f32]) -> Operand {
        let bytes: Vec<u8> = x
            .iter()
            .flat_map(|x| ((ElementType::Bf16.round(*x).to_bits() >> 16) as u16).to_le_bytes())
            .collect();
        self.operand(&bytes, ElementType::Bf16)
    }

    /// An operand of NaN.
    pub fn empty(&mut self, count: usize, element: ElementType) -> Operand {
        self.operand(&vec![0xFF; count * element.size()], element)
    }

    pub fn read(&mut self, operand: Operand) -> Vec<u8> {
        let mut bytes = vec![0; operand.bytes as usize];
        self.driver.read(operand.buffer, operand.offset, &mut bytes).expect("a read");
        bytes
    }

    pub fn read_u32(&mut self, operand: Operand) -> Vec<u32> {
        let bytes = self.read(operand);
        bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }

    /// f32 or bf16.
    pub fn read_f32(&mut self, operand: Operand) -> Vec<f32> {
        let bytes = self.read(operand);
        if operand.element == ElementType::F32 {
            return bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        }
        let wide = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        bytes.as_chunks().0.iter().map(wide).collect()
    }

    /// A random weight.
    pub fn weight(
        &mut self,
        format: WeightFormat,
        matrices: usize,
        rows: usize,
        cols: usize,
    ) -> TestWeight {
        let name = format!("{format:?}/{matrices}x{rows}x{cols}/{}", self.seed);
        let mut b = CaseBuilder::new::<ExpertsOut>(&name, &[(1, 0)], NO_STATE);
        let x = b.input(Rows::Routed(1), cols, 1.0);
        let ids = b.input_with(Rows::Tokens, 1, HostTensor::U32(vec![0]));
        let down = b.weight(format, matrices, rows, cols);
        let out = b.output(Rows::Routed(1), rows, ElementType::F32);
        let activation = Activation::F32;
        let case = b.build(ExpertsOut { x, ids, down, activation, out });
        let (spec, bytes) = (case.plan.weights[0].clone(), case.weights[0].clone());
        self.random(1);
        let (parts, matrix) = DeviceWeight::layout(&spec, 0);
        let end = parts[2].end.max(parts[0].end);
        let mut data = vec![0u8; end as usize];
        let lens = [spec.format.row_bytes(cols), spec.format.scale_bytes(cols)];
        for (i, from) in [&bytes.codes, &bytes.scales, &bytes.biases].into_iter().enumerate() {
            let (len, stride) =
                (rows * lens[i.min(1)], (parts[i].end - parts[i].start) as usize / matrices);
            for m in (0..matrices).filter(|_| len > 0) {
                let to = parts[i].start as usize + m * stride;
                data[to..to + len].copy_from_slice(&from[m * bytes.strides[i]..][..len]);
            }
        }
        let slab = self.operand(&data, ElementType::U32);
        let device = DeviceWeight { slab, matrix, matrices: matrices as u32, bytes: spec.bytes() };
        TestWeight { device, spec, bytes }
    }

    /// Records, places, runs; returns the kernels in order.
    pub fn run(
        &mut self,
        record: impl FnOnce(&mut Recorder, &Context, &mut Scratch),
    ) -> Vec<&'static str> {
        let none =
            Operand { buffer: lily_gpu::Buffer(0), offset: 0, bytes: 0, element: ElementType::U32 };
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
        let shape = Shape::default();
        let step = StepShape { segments: vec![1], outputs: 1, context: 1 };
        let (profile, tuning) = (self.profile.clone(), self.tuning);
        let context =
            Context { profile: &profile, tuning: &tuning, shape: &shape, step, tables: &tables };
        let mut recorder = Recorder::default();
        let mut scratch = Scratch::default();
        record(&mut recorder, &context, &mut scratch);
        let mut list = recorder.finish(tuning.concurrent);
        let bytes = scratch.place(&mut list.clone(), lily_gpu::Buffer(0), true);
        let arena =
            self.driver.allocate("scratch", bytes.max(16), Placement::Device).expect("memory");
        // Work space starts as NaN.
        self.driver.write(arena, 0, &vec![0xFF; bytes as usize]).expect("a write");
        scratch.place(&mut list, arena, true);
        let kernels: Vec<&'static str> = list.dispatches.iter().map(|d| d.kernel).collect();
        list.pipelines = self.driver.pipelines(&self.text, &kernels).expect("kernels");
        let submission = self.driver.submit(&Arc::new(list)).expect("a run");
        self.driver.wait(submission).expect("its end");
        kernels
    }
}

/// Fails unless each element is within `relative` of the largest wanted.
pub fn close(what: &str, got: &[f32], want: &[f32], relative: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= relative * largest, "{what}: element {i} is {g}, want {w}");
    }
}
