//! No operation of a run executes outside the kernel text: counted in what is submitted and in what is read back.

mod watch;

use std::collections::HashMap;

use lily_conformance::gpu::drawn;
use lily_device::{Input, Limits, Output, SlotId, Step};
use lily_gpu::Tuning;
use lily_gpu::fuse::groups;
use lily_model::{Model, Precision};
use lily_ops::sample::SampleParams;
use lily_ops::{Op, Plan};
use watch::Listed;

/// What follows the layers in a list.
#[derive(Clone, Copy, PartialEq)]
enum Head {
    /// Nothing is asked for.
    None,
    /// A token.
    Token,
}

/// The operations that no dispatch of a list is for. Each operation has a dispatch at least, of its own or of the chain that it is
/// part of.
fn missing(plan: &Plan, list: &Listed, decode: bool, head: Head) -> Vec<String> {
    let nodes: Vec<_> = plan.nodes().collect();
    let mut there: HashMap<(&str, Option<u32>), usize> = HashMap::new();
    list.ops.iter().for_each(|key| *there.entry(*key).or_default() += 1);
    let mut take = |name, layer| match there.get_mut(&(name, layer)) {
        Some(n) if *n > 0 => {
            *n -= 1;
            true
        }
        _ => false,
    };
    let mut missing = Vec::new();
    for group in groups(plan, &Tuning::default(), decode) {
        let all = group.nodes();
        if all[0] >= plan.body.len() && head == Head::None {
            continue;
        }
        let layer = nodes[all[0]].layer;
        if group.chain().is_some_and(|chain| take(chain, layer)) {
            continue;
        }
        for node in all.iter().map(|i| nodes[*i]) {
            // Of a decode step all rows go on, where they are.
            let stays = decode && matches!(node.op, Op::GatherRows(_));
            if !stays && !take(node.op.name(), layer) {
                missing.push(format!("{} of layer {layer:?}", node.op.name()));
            }
        }
    }
    let last = if head == Head::Token { "sample" } else { "finish" };
    if !take(last, None) {
        missing.push(last.into());
    }
    missing
}

fn demo() -> Model {
    let checkpoint = lily_demo::open().expect("the demo model opens");
    lily_model::load(&checkpoint, Precision::Standard).expect("the demo model loads")
}

const SLOT: SlotId = SlotId(0);

/// A prompt in two chunks, then tokens, greedy and drawn.
fn steps() -> Vec<(Step, bool, Head)> {
    let ids = |range: std::ops::Range<u32>| Input::Tokens(range.map(|i| 100 + 37 * i).collect());
    let greedy = || Output::Sample(SampleParams::GREEDY);
    [
        (ids(0..40), Output::None, false, Head::None),
        (ids(40..52), greedy(), false, Head::Token),
        (Input::LastSampled, greedy(), true, Head::Token),
        (Input::LastSampled, Output::Sample(drawn()), true, Head::Token),
        (Input::LastSampled, Output::None, true, Head::None),
    ]
    .into_iter()
    .map(|(input, output, decode, head)| (Step::one(SLOT, input, output), decode, head))
    .collect()
}

fn limits() -> Limits {
    Limits { undo: true, ..Limits::new(1, 256, 64) }
}

#[test]
fn every_operation_of_a_run_is_a_kernel() {
    let model = demo();
    let (mut program, log) = watch::prepare(&model, Tuning::default(), limits(), None);
    *log.lock().expect("no test panics here") = watch::Log::default();
    let steps = steps();
    for (step, ..) in &steps {
        program.run(step.clone()).expect("the step runs");
    }
    let log = log.lock().expect("no test panics here").clone();
    // Where the host steps in, a step is more than one list; where it chooses tokens, logits are read.
    assert_eq!(log.lists.len(), steps.len(), "a list a step");
    let host: Vec<_> = log.reads.iter().filter(|what| *what != "results").collect();
    assert_eq!((host.len(), log.reads.len()), (0, 3), "{host:?}");
    for (i, (list, (_, decode, head))) in log.lists.iter().zip(&steps).enumerate() {
        let missing = missing(&model.plan, list, *decode, *head);
        assert!(missing.is_empty(), "step {i}: {}", missing.join(", "));
        let operations = model.plan.nodes().count();
        println!("step {i}: {} dispatches for {operations} operations", list.ops.len());
    }
}

/// The same count finds what the host does.
#[test]
fn what_the_host_does_is_counted() {
    let model = demo();
    for (off, reads) in [("gpu_routing", "scratch"), ("token_handoff", "logits")] {
        let tuning = Tuning::without(off).expect("a switch");
        let (mut program, log) = watch::prepare(&model, tuning, limits(), None);
        *log.lock().expect("no test panics here") = watch::Log::default();
        let steps = steps();
        for (step, ..) in &steps {
            program.run(step.clone()).expect("the step runs");
        }
        let log = log.lock().expect("no test panics here").clone();
        assert!(log.lists.len() > steps.len(), "{off}: {} lists", log.lists.len());
        assert!(log.reads.iter().any(|what| what == reads), "{off}: {:?}", log.reads);
    }
}
