//! Of the real model no command buffer is expected to take longer than macOS bears, on any chip, with any context.

use lily_bench::synth::Shape;
use lily_device::Limits;
use lily_gpu::program::{Head, Kind, Recording};
use lily_gpu::{CommandList, StepShape, Tuning};
use lily_metal::estimate::{Cost, Estimator, command_buffers};
use lily_metal::family::{Facts, Family, macs_per_second, profile};
use lily_metal::residency::Room;
use lily_metal::system::System;
use lily_model::{Precision, plan_of_config};
use lily_ops::plan::PAGE_TOKENS;

/// Seconds of a command buffer.
const LIMIT: f64 = 0.1;

/// Chips, their memory at most in GiB, and by how much kernels may be slower than guessed.
const CHIPS: [(&str, Family, u64, f64); 9] = [
    // Too small for the model; the guess must do for it all the same.
    ("Apple M1", Family::Apple7, 16, 1.0),
    ("Apple M1 Max", Family::Apple7, 64, 2.0),
    ("Apple M2", Family::Apple8, 24, 2.0),
    ("Apple M2 Ultra", Family::Apple8, 192, 2.0),
    ("Apple M3", Family::Apple9, 24, 2.0),
    ("Apple M4", Family::Apple9, 32, 2.0),
    ("Apple M4 Max", Family::Apple9, 128, 2.0),
    ("Apple M5", Family::Apple10, 32, 2.0),
    ("Apple M5 Max", Family::Apple10, 128, 2.0),
];

fn record(recording: &Recording, segments: Vec<u32>, outputs: u32, context: u32) -> CommandList {
    let rows: u32 = segments.iter().sum();
    let pages = segments.len() * (context as usize).div_ceil(PAGE_TOKENS);
    let limits = Limits {
        slots: segments.len(),
        context: context as usize,
        rows: rows as usize,
        outputs: outputs as usize,
        pages,
        undo: true,
    };
    let shape = StepShape { segments, outputs, context };
    let kind = Kind { shape, tables: 0, head: Head::Sample { greedy: false } };
    recording.record_virtual(&limits, &kind).expect("it can be recorded").0
}

/// The longest dispatch as it is, and the longest command buffer.
fn longest(estimator: &Estimator, list: &CommandList, slower: f64) -> (f64, f64) {
    let costs: Vec<(f64, u32)> = list
        .dispatches
        .iter()
        .map(|d| {
            let cost = Cost { pipeline: 0, traffic: d.traffic, work: d.work };
            (slower * estimator.seconds(&cost), d.most_parts())
        })
        .collect();
    let buffers = command_buffers(&costs, list.stages(), LIMIT);
    let pieces: usize = buffers.iter().map(Vec::len).sum();
    assert!(pieces >= costs.len(), "{pieces} pieces of {} dispatches", costs.len());
    let seconds = buffers.iter().map(|b| b.iter().map(|p| p.seconds).sum::<f64>());
    (costs.iter().map(|c| c.0).fold(0.0, f64::max), seconds.fold(0.0, f64::max))
}

#[test]
fn no_command_buffer_of_the_real_model_is_too_long() {
    let config = Shape::qwen3_6_35b_a3b(Shape::REAL_LAYERS).config();
    let plan = plan_of_config("real", &config, Precision::Standard).expect("the real config").1;
    let token = plan.state.kv_layers * 4 * plan.state.kv_heads * plan.state.head_dim;
    let mut cut = 0;
    for (name, family, gib, slower) in CHIPS {
        let memory = gib << 30;
        let facts = Facts {
            name: name.into(),
            family,
            threadgroup_memory: 32 << 10,
            max_buffer: 38 << 30,
            working_set: memory / 4 * 3,
            unified: true,
        };
        let system = System { os: (26, 2), memory, wired_limit: None, gpu_cores: None };
        let profile = profile(&facts, &system, &Room::of(&facts, &system), false);
        let estimator = Estimator::new(profile.bandwidth, macs_per_second(&profile));
        let recording =
            Recording::virtual_of(&plan, &Tuning::default(), &profile).expect("it is recorded");
        for context in (8..=18).map(|n| 1u32 << n) {
            let fits = memory / (u64::from(context) * token as u64);
            let mut steps = vec![vec![1], vec![context.min(4096)], vec![context.min(16_384)]];
            steps.extend((fits >= 8).then(|| vec![1; 8]));
            for segments in steps {
                let what = format!("{name}, segments of {segments:?}, {context} tokens");
                let list = record(&recording, segments.clone(), segments.len() as u32, context);
                let (dispatch, buffer) = longest(&estimator, &list, slower);
                assert!(buffer <= LIMIT * (1.0 + 1e-9), "{what}: {buffer} s");
                cut += usize::from(dispatch > LIMIT);
            }
        }
        // Scores of a prompt: logits of many rows.
        let list = record(&recording, vec![512], 64, 4096);
        assert!(longest(&estimator, &list, slower).1 <= LIMIT * (1.0 + 1e-9), "{name}: scores");
    }
    // Without cuts much of this would be too long.
    assert!(cut > 50, "{cut} steps with a dispatch that had to be cut");
}
