//! `lily bench ablate` and `lily bench run --by-op` on the shared GPU kernels: each switch can be left out, and what is
//! measured is of the switch. A small model, thread by thread on the host.

use std::sync::Arc;

use lily_bench::ablate::{Ablated, Switch, ablate};
use lily_bench::cache::CacheReads;
use lily_bench::roofline::{by_operation, device_rows};
use lily_bench::synth::{Shape, Synth};
use lily_bench::{Engine, LilyEngine, Phase, Point, Protocol, SystemClock, Trouble};
use lily_checkpoint::Checkpoint;
use lily_device::Measure;
use lily_engine::{Cancel, Engine as Inner, EngineOptions, Machine};
use lily_gpu::{Driver, DriverError, GpuDevice, Tuning};
use lily_model::{Model, Precision, load};
use lily_softgpu::{Options, SoftDriver};

fn model() -> (tempfile::TempDir, Model) {
    let dir = tempfile::tempdir().unwrap();
    Synth::new(Shape::tiny()).write(dir.path(), |_, _| ()).unwrap();
    let model = load(&Checkpoint::open(dir.path()).unwrap(), Precision::Standard).unwrap();
    (dir, model)
}

fn engine(model: &Model, tuning: Tuning) -> LilyEngine {
    let options = Options::default();
    let profile = options.profile.clone();
    let open = move || -> Result<Box<dyn Driver>, DriverError> {
        Ok(Box::new(SoftDriver::new(options.clone())))
    };
    let device = GpuDevice::new(profile, tuning, Box::new(open));
    let (plan, weights) = (Arc::clone(&model.plan), model.weights.clone());
    let options = EngineOptions { undo: true, ..EngineOptions::new(256, 1, 32) };
    let inner = Inner::on_machine(&device, plan, weights, options, &Machine::UNKNOWN).unwrap();
    LilyEngine::new("all on", inner, Arc::new(SystemClock::new()), Cancel::new())
}

#[test]
fn every_switch_can_be_left_out() {
    let (_dir, model) = model();
    let mut base = engine(&model, Tuning::default());
    let switches = Tuning::SWITCHES.iter().map(|(name, _)| {
        let model = &model;
        let without = move || -> Result<Box<dyn Engine>, Trouble> {
            let tuning = Tuning::without(name).ok_or(Trouble::Failed("no switch".into()))?;
            Ok(Box::new(engine(model, tuning)))
        };
        Switch { name: (*name).into(), beside: Vec::new(), without: Box::new(without) }
    });
    let protocol =
        Protocol { prefill: vec![20], decode: vec![8], decode_tokens: 2, warm_up: 0, rounds: 1 };
    let results = ablate(&mut base, switches.collect(), &protocol, &mut ());
    assert_eq!(results.len(), Tuning::SWITCHES.len());
    for Ablated { measured, .. } in &results {
        for phase in [Phase::Prefill, Phase::Decode] {
            let name = &measured.engines[1];
            let point = measured.phase(phase).next().unwrap();
            assert!(point.ratio(1).is_some_and(|r| r.median > 0.0), "{name}: {point:?}");
        }
    }
}

#[test]
fn operations_of_both_phases_have_times_and_twins() {
    let (_dir, model) = model();
    let mut lily = engine(&model, Tuning::default());
    for point in [Point::Prefill { tokens: 40 }, Point::Decode { context: 8, tokens: 2 }] {
        let times = lily.operations(point, Measure::Twins).unwrap();
        // 40 tokens are two chunks of at most 32.
        assert_eq!((times.steps, &times.trouble), (2, &None), "{point}");
        let (table, json, figures) = by_operation(point, &times);
        assert_eq!(table.rows.len(), times.operations.len() + 3);
        assert_eq!(json["operations"].as_array().unwrap().len(), times.operations.len());
        assert_eq!(figures.len(), times.operations.len() + 1);
        let rows = device_rows("step", &times);
        assert!(rows.iter().all(|r| r.read_only[0] > 0.0 && r.no_arithmetic[0] > 0.0));
        let products = |row: &str| {
            let kernel = row.rsplit(": ").next().unwrap();
            kernel.contains("gem") || kernel.contains("experts")
        };
        assert!(rows.iter().all(|r| r.macs.is_some() || !products(&r.kernel)), "{rows:?}");
    }
    // Afterwards it is as fast as before, and measures nothing.
    assert!(lily.prefill(20).unwrap() > 0.0);
    assert_eq!(lily.inner().program().operation_times().steps, 0);
}

#[test]
fn k_and_v_of_a_context_are_read_alone() {
    let (_dir, model) = model();
    for tuning in [Tuning::default(), Tuning::without("coalesced_kv").unwrap()] {
        let mut lily = engine(&model, tuning);
        let CacheReads { context, reads } = lily.cache_reads(100);
        let reads = reads.unwrap();
        let state = model.plan.state;
        // K and V of the context and of the token after it, in each layer that has them.
        let token = (state.kv_heads * state.head_dim * 2) as u64;
        let kinds: Vec<(bool, bool)> = reads.iter().map(|r| (r.keys, r.coalesced)).collect();
        assert_eq!(kinds, [(true, true), (false, true), (true, false), (false, false)]);
        for read in reads {
            assert_eq!(read.launches as usize, state.kv_layers, "{read:?}");
            assert_eq!(read.bytes, 101 * token * read.launches, "{read:?}");
            assert!(read.seconds > 0.0, "{read:?}");
        }
        assert_eq!(context, 100);
        // It decodes on as before.
        assert!(lily.decode(100, 2).unwrap() > 0.0);
    }
}
