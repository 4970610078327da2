//! Bits do not depend on the path: chunking, threads, instruction set, batch mates, snapshots.

use std::sync::Arc;

use lily_checkpoint::Checkpoint;
use lily_conformance::fixture_path;
use lily_cpu::{CpuDevice, CpuOptions, Isa};
use lily_device::{
    Device, Input, KvPart, Limits, Output, Program, Segment, SegmentOut, SlotId, Step, StepError,
};
use lily_model::{Model, Precision};
use lily_ops::case::Seeded;
use lily_ops::sample::SampleParams;

const SLOT: SlotId = SlotId(0);
const LONGEST: usize = 1000;
const LENGTHS: [usize; 12] = [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, LONGEST];

struct Subject {
    name: String,
    model: Model,
    tokens: Vec<u32>,
}

impl Subject {
    fn new(name: &str, precision: Precision) -> Self {
        let checkpoint = match name {
            "demo" => lily_demo::open().expect("the demo model opens"),
            _ => Checkpoint::open(&fixture_path(name).join("mlx")).expect("the fixture opens"),
        };
        let model = lily_model::load(&checkpoint, precision).expect("the model loads");
        let mut rng = Seeded::new(name);
        let vocab = model.config.vocab_size as u32;
        let tokens = (0..LONGEST).map(|_| rng.bits() % vocab).collect();
        Self { name: format!("{name} {precision:?}"), model, tokens }
    }

    fn program(&self, isa: Isa, threads: usize, slots: usize) -> Box<dyn Program> {
        let device = CpuDevice::new(CpuOptions { threads: Some(threads), isa: Some(isa) });
        let limits = Limits::new(slots, 1024, LONGEST);
        let plan = Arc::clone(&self.model.plan);
        device.prepare(plan, self.model.weights.clone(), limits).expect("the plan is prepared")
    }

    /// Bits of the logits of the first `length` tokens, fed in chunks.
    fn logits(&self, program: &mut dyn Program, length: usize, chunk: usize) -> Vec<u32> {
        program.reset(SLOT).expect("the slot exists");
        let mut all = Vec::new();
        for part in self.tokens[..length].chunks(chunk) {
            all.extend(run(program, SLOT, part));
        }
        all
    }
}

/// Bits of the logits of some tokens of a slot.
fn run(program: &mut dyn Program, slot: SlotId, tokens: &[u32]) -> Vec<u32> {
    let step = Step::one(slot, Input::Tokens(tokens.to_vec()), Output::Logits);
    bits(&program.run(step).expect("the step runs").segments[0])
}

fn bits(out: &SegmentOut) -> Vec<u32> {
    match out {
        SegmentOut::Logits(x) => x.iter().map(|x| x.to_bits()).collect(),
        other => panic!("{other:?}"),
    }
}

/// The baseline is the longest prompt fed whole: since attention and recurrence are causal, the logits of
/// every shorter prompt are a prefix of it, bit for bit.
///
/// A prompt of another length in chunks differs from the longest one only in its last, shorter chunk: that one
/// is run from a snapshot of the chunks before (a test below holds snapshots to the bit).
fn check_paths(subject: &Subject, lengths: &[usize], chunks: &[usize]) {
    let vocab = subject.model.config.vocab_size;
    let longest = *lengths.iter().max().expect("a length");
    let mut baseline: Option<Vec<u32>> = None;
    let mut runs = 0;
    for isa in Isa::available() {
        for threads in 1..=3 {
            let mut program = subject.program(isa, threads, 2);
            let whole = subject.logits(&mut *program, longest, longest);
            let want = baseline.get_or_insert_with(|| whole.clone());
            let same = |got: &[u32], from: usize, tokens: usize, what: &str| {
                let want = &want[from * vocab..][..tokens * vocab];
                let at = got.iter().zip(want).position(|(a, b)| a != b);
                assert!(
                    at.is_none() && got.len() == want.len(),
                    "{}: {isa}, {threads} threads, {what}: token {:?} differs",
                    subject.name,
                    at.map(|i| from + i / vocab)
                );
            };
            same(&whole, 0, longest, "the longest whole");
            for &length in lengths.iter().filter(|l| **l < longest) {
                let whole = subject.logits(&mut *program, length, length);
                same(&whole, 0, length, "whole");
                runs += 1;
            }
            for &chunk in chunks {
                program.reset(SLOT).expect("the slot exists");
                for (i, part) in subject.tokens[..longest].chunks(chunk).enumerate() {
                    let from = i * chunk;
                    let last = |l: &&usize| **l > from && **l < from + part.len() && **l > chunk;
                    for &length in lengths.iter().filter(last) {
                        let snapshot = program.snapshot(SLOT).expect("usable");
                        program.restore(SlotId(1), &snapshot).expect("it fits");
                        let tail = run(&mut *program, SlotId(1), &subject.tokens[from..length]);
                        let what = format!("{length} tokens in chunks of {chunk}");
                        same(&tail, from, length - from, &what);
                        runs += 1;
                    }
                    let got = run(&mut *program, SLOT, part);
                    same(&got, from, part.len(), &format!("chunks of {chunk}"));
                }
                runs += 1;
            }
        }
    }
    println!("{}: {runs} runs alike", subject.name);
}

#[test]
fn chunks_threads_and_instruction_sets_standard() {
    check_paths(&Subject::new("tiny-a", Precision::Standard), &LENGTHS, &[1, 7, 64, 512]);
}

#[test]
fn chunks_threads_and_instruction_sets_precise() {
    check_paths(&Subject::new("tiny-a", Precision::Precise), &[5, 65, 129], &[1, 7, 64]);
}

#[test]
fn chunks_threads_and_instruction_sets_real_head_sizes() {
    check_paths(&Subject::new("tiny-c", Precision::Standard), &[5, 65, 300], &[1, 7, 64]);
    check_paths(&Subject::new("demo", Precision::Standard), &[5, 130], &[1, 64]);
}

/// Four slots at different places, in steps that mix prefill and decode, against each slot alone; on the
/// portable instruction set too, and with more threads than processors.
#[test]
fn batch_mates_change_nothing() {
    for (name, precision) in [
        ("tiny-a", Precision::Standard),
        ("tiny-c", Precision::Standard),
        ("tiny-a", Precision::Precise),
        ("tiny-c", Precision::Precise),
    ] {
        let subject = Subject::new(name, precision);
        let alone = alone(&subject);
        let mut program = subject.program(Isa::detect(), 2, 4);
        for count in 1..=4 {
            check_batch(&subject, &alone, &mut *program, count);
        }
        let portable = "portable".parse().expect("every machine has it");
        check_batch(&subject, &alone, &mut *subject.program(portable, 3, 4), 4);
    }
}

/// Tokens that each of four slots takes in each of four steps.
const PARTS: [[usize; 4]; 4] = [[65, 1, 1, 1], [3, 70, 1, 1], [1, 1, 1, 129], [7, 1, 30, 2]];

/// The place in the subject's tokens where a slot begins.
fn start(slot: usize) -> usize {
    slot * 40
}

/// Logits of each slot and step, each slot in a program of its own.
fn alone(subject: &Subject) -> Vec<Vec<Vec<u32>>> {
    let slot = |slot: usize| {
        let mut program = subject.program(Isa::detect(), 2, 1);
        let mut at = start(slot);
        let step = |n: usize| {
            at += n;
            run(&mut *program, SLOT, &subject.tokens[at - n..at])
        };
        PARTS[slot].into_iter().map(step).collect()
    };
    (0..4).map(slot).collect()
}

/// The first `count` slots in one program.
fn check_batch(
    subject: &Subject,
    alone: &[Vec<Vec<u32>>],
    program: &mut dyn Program,
    count: usize,
) {
    let mut at: Vec<usize> = (0..4).map(start).collect();
    for slot in 0..4 {
        program.reset(SlotId(slot)).expect("the slot exists");
    }
    for step in 0..4 {
        // The slots of a step come in another order each time.
        let order: Vec<usize> = (0..count).map(|i| (i + step) % count).collect();
        let segments = order.iter().map(|&slot| {
            let n = PARTS[slot][step];
            at[slot] += n;
            Segment {
                slot: SlotId(slot as u32),
                input: Input::Tokens(subject.tokens[at[slot] - n..at[slot]].to_vec()),
                output: Output::Logits,
            }
        });
        let segments = segments.collect();
        let out = program.run(Step { segments }).expect("the step runs");
        for (&slot, got) in order.iter().zip(&out.segments) {
            assert!(
                bits(got) == alone[slot][step],
                "{}: slot {slot} of {count}, step {step}",
                subject.name
            );
        }
    }
}

#[test]
fn a_restored_snapshot_equals_never_having_left() {
    for precision in [Precision::Standard, Precision::Precise] {
        check_restores(&Subject::new("tiny-c", precision));
    }
}

fn check_restores(subject: &Subject) {
    let mut program = subject.program(Isa::detect(), 2, 2);
    let whole = subject.logits(&mut *program, 320, 320);
    for cut in [1, 64, 255, 256, 300] {
        subject.logits(&mut *program, cut, 50);
        let snapshot = program.snapshot(SLOT).expect("the slot is usable");
        // Another timeline passes through the slot, and one more keeps its first pages.
        run(&mut *program, SLOT, &subject.tokens[500..700]);
        run(&mut *program, SlotId(1), &subject.tokens[..10]);
        program.reset(SLOT).expect("the slot exists");
        run(&mut *program, SlotId(1), &subject.tokens[10..300]);
        program.restore(SLOT, &snapshot).expect("the snapshot fits");
        let rest = run(&mut *program, SLOT, &subject.tokens[cut..320]);
        let vocab = subject.model.config.vocab_size;
        assert!(rest[..] == whole[cut * vocab..], "{}: cut at {cut}", subject.name);
        // The same bytes again: a snapshot of what was restored is the snapshot.
        program.restore(SlotId(1), &snapshot).expect("the snapshot fits");
        assert!(program.snapshot(SlotId(1)).expect("usable") == snapshot);
        program.reset(SlotId(1)).expect("the slot exists");
    }
}

#[test]
fn a_sampled_answer_goes_on_after_a_restore() {
    for precision in [Precision::Standard, Precision::Precise] {
        check_sampled_answer(&Subject::new("tiny-a", precision));
    }
}

fn check_sampled_answer(subject: &Subject) {
    let params = SampleParams {
        temperature: 1.0,
        top_k: 40,
        seed: 11,
        frequency_penalty: 0.5,
        ..SampleParams::GREEDY
    };
    let sample = |program: &mut dyn Program, slot, input| {
        let step = Step::one(slot, input, Output::Sample(params.clone()));
        match program.run(step).expect("the step runs").segments[..] {
            [SegmentOut::Sampled(ref sampled)] => sampled.id,
            ref other => panic!("{other:?}"),
        }
    };
    let mut program = subject.program(Isa::detect(), 2, 2);
    let mut ids = vec![sample(&mut *program, SLOT, Input::Tokens(subject.tokens[..20].to_vec()))];
    let mut snapshot = None;
    for i in 1..30 {
        if i == 12 {
            snapshot = Some(program.snapshot(SLOT).expect("usable"));
        }
        ids.push(sample(&mut *program, SLOT, Input::LastSampled));
    }
    program.restore(SlotId(1), &snapshot.expect("taken")).expect("the snapshot fits");
    let again: Vec<u32> =
        (12..30).map(|_| sample(&mut *program, SlotId(1), Input::LastSampled)).collect();
    assert_eq!(again, ids[12..], "{}", subject.name);
}

/// Decoding four slots in one step reads each dense weight once: as many bytes as one slot does.
#[test]
fn four_decoding_slots_read_each_dense_weight_once() {
    let subject = Subject::new("tiny-c", Precision::Standard);
    let decode = |slots: usize| -> Vec<u64> {
        let mut program = subject.program(Isa::detect(), 2, 4);
        let before = program.counters().weight_bytes;
        let segments = (0..slots).map(|slot| Segment {
            slot: SlotId(slot as u32),
            input: Input::Tokens(vec![subject.tokens[slot]]),
            output: Output::Sample(SampleParams::GREEDY),
        });
        program.run(Step { segments: segments.collect() }).expect("the step runs");
        let after = program.counters().weight_bytes;
        after.iter().zip(before).map(|(a, b)| a - b).collect()
    };
    let (one, four) = (decode(1), decode(4));
    let mut matrices = 0;
    for (i, spec) in subject.model.plan.weights.iter().enumerate() {
        let dense = spec.matrices == 1;
        if dense && one[i] > 0 {
            assert_eq!(one[i], spec.bytes(), "{}: one slot", spec.role);
            assert_eq!(four[i], one[i], "{}: four slots", spec.role);
            matrices += 1;
        }
        if !dense {
            // Of the experts, those that any of the four tokens selects, each once.
            assert!(four[i] <= spec.bytes() && four[i] >= one[i], "{}", spec.role);
            assert_eq!(one[i], 8 * spec.matrix_bytes(), "{}", spec.role);
        }
    }
    let linears = subject.model.plan.nodes().filter(|n| n.op.name() == "linear").count();
    assert_eq!(matrices, linears, "every linear operation was counted");
}

/// Scratch does not grow with the context: a 4K prompt makes use of what the plan says, and the plan says
/// the same for 32K and 128K.
#[test]
fn scratch_is_bounded_by_the_chunk() {
    let subject = Subject::new("tiny-a", Precision::Standard);
    let device = CpuDevice::new(CpuOptions { threads: Some(2), isa: None });
    let need = |context| device.memory(&subject.model.plan, &Limits::new(1, context, 128));
    let scratch = need(4096).scratch;
    for context in [32 * 1024, 128 * 1024] {
        assert_eq!(need(context).scratch, scratch);
        assert!(need(context).kv > need(4096).kv);
    }
    let plan = Arc::clone(&subject.model.plan);
    let limits = Limits::new(1, 4096, 128);
    let mut program =
        device.prepare(plan, subject.model.weights.clone(), limits).expect("prepared");
    let mut marks = Vec::new();
    for round in 0..32 {
        let chunk = &subject.tokens[round * 16..][..128];
        let step = Step::one(SLOT, Input::Tokens(chunk.to_vec()), Output::Hold);
        program.run(step).expect("the step runs");
        marks.push(program.scratch_high_water());
    }
    assert_eq!(program.position(SLOT), Ok(4096));
    assert!(marks.iter().all(|m| *m == marks[0]), "scratch grows with the context: {marks:?}");
    assert!(marks[0] <= scratch, "{} bytes in use, {scratch} planned", marks[0]);
}

/// K and V that were copied part by part, each when the tokens after the part before it had been computed, are those
/// of the whole, and any state goes on from the parts up to it.
#[test]
fn a_cache_in_parts_is_the_whole_one() {
    for precision in [Precision::Standard, Precision::Precise] {
        let subject = Subject::new("tiny-c", precision);
        let mut program = subject.program(Isa::detect(), 2, 2);
        let all = subject.logits(&mut *program, 720, 720);
        let vocab = subject.model.config.vocab_size;
        program.reset(SLOT).expect("the slot exists");
        let (mut taken, mut from) = (Vec::new(), 0);
        for to in [1, 100, 256, 300, 300, 513, 700] {
            if to > from {
                run(&mut *program, SLOT, &subject.tokens[from..to]);
            }
            let snapshot = program.snapshot_behind(SLOT, from).expect("usable");
            let whole = program.snapshot(SLOT).expect("usable");
            assert_eq!(snapshot.recurrent, whole.recurrent);
            taken.push((from, snapshot, whole));
            from = to;
        }
        let parts: Vec<KvPart<'_>> = taken
            .iter()
            .map(|(from, s, _)| KvPart { from: *from, to: s.position, bytes: &s.kv })
            .collect();
        let other = SlotId(1);
        for (i, (_, snapshot, whole)) in taken.iter().enumerate() {
            program.restore_parts(other, snapshot, &parts[..=i]).expect("they fit");
            assert!(program.snapshot(other).expect("usable") == *whole, "{i}");
            let at = snapshot.position;
            let got = run(&mut *program, other, &subject.tokens[at..at + 20]);
            assert!(got == all[at * vocab..][..20 * vocab], "{i}");
        }
        // What is no whole cache changes nothing.
        let before = program.snapshot(other).expect("usable");
        let last = &taken[6].1;
        let twice = [&parts[..2], &parts[1..]].concat();
        let short = KvPart { bytes: &parts[0].bytes[1..], ..parts[0] };
        let short = [&[short], &parts[1..]].concat();
        for wrong in [&parts[1..], &parts[..6], &twice, &short, &[]] {
            match program.restore_parts(other, last, wrong) {
                Err(StepError::Refused(_)) => {}
                result => panic!("{result:?}"),
            }
        }
        assert!(program.snapshot(other).expect("usable") == before);
    }
}

/// A slot holds its context and no more, whatever pages others leave.
#[test]
fn a_slot_holds_its_context() {
    let subject = Subject::new("tiny-c", Precision::Standard);
    let device = CpuDevice::new(CpuOptions { threads: Some(2), isa: None });
    let plan = Arc::clone(&subject.model.plan);
    let limits = Limits::new(3, 300, 512);
    assert_eq!((limits.pages, limits.slot_pages(), limits.slot_tokens()), (6, 2, 512));
    let mut program =
        device.prepare(plan, subject.model.weights.clone(), limits).expect("it is prepared");
    run(&mut *program, SLOT, &subject.tokens[..512]);
    let one = Step::one(SLOT, Input::Tokens(vec![1]), Output::Logits);
    match program.run(one) {
        Err(StepError::Refused(refusal)) => {
            let text = refusal.to_string();
            assert!(text.contains("513 tokens") && text.contains("512 a slot"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(program.position(SLOT).expect("usable"), 512);
    let mut roomy = subject.program(Isa::detect(), 2, 1);
    run(&mut *roomy, SLOT, &subject.tokens[..600]);
    let long = roomy.snapshot(SLOT).expect("usable");
    assert!(matches!(program.restore(SlotId(1), &long), Err(StepError::Refused(_))));
}

/// States kept on the way of a step are those of steps that end there, and keeping them changes nothing; with another
/// slot in the step that keeps others.
#[test]
fn states_inside_a_step_are_those_at_its_end() {
    for precision in [Precision::Standard, Precision::Precise] {
        let subject = Subject::new("tiny-c", precision);
        let mut plain = subject.program(Isa::detect(), 2, 2);
        let mut program = subject.program(Isa::detect(), 2, 2);
        let other = SlotId(1);
        let steps = [(30, 0), (470, 500), (40, 50)];
        let marks =
            [(vec![29, 30], vec![]), (vec![1, 100, 226, 227, 469], vec![499]), (vec![], vec![7])];
        let mut at = (0, 0);
        for (rows, marks) in steps.into_iter().zip(marks) {
            let mut segments = Vec::new();
            for (slot, from, n, marks) in
                [(SLOT, at.0, rows.0, &marks.0), (other, at.1, rows.1, &marks.1)]
            {
                program.mark(slot, marks).expect("they ascend");
                if n > 0 {
                    let input = Input::Tokens(subject.tokens[from..from + n].to_vec());
                    segments.push(Segment { slot, input, output: Output::Logits });
                }
            }
            let out = program.run(Step { segments }).expect("the step runs").segments;
            for (i, (slot, from, n, marks)) in
                [(SLOT, at.0, rows.0, &marks.0), (other, at.1, rows.1, &marks.1)]
                    .into_iter()
                    .enumerate()
            {
                let inside: Vec<usize> = marks.iter().copied().filter(|m| *m < n).collect();
                let taken = program.take_marked(slot, from).expect("usable");
                assert_eq!(taken.len(), inside.len());
                assert!(program.take_marked(slot, from).expect("usable").is_empty(), "once");
                let (mut got, mut begin) = (Vec::new(), 0);
                for (snapshot, end) in taken.iter().zip(&inside) {
                    got.extend(run(&mut *plain, slot, &subject.tokens[from + begin..from + end]));
                    let want = plain.snapshot_behind(slot, from + begin).expect("usable");
                    assert!(*snapshot == want, "{precision:?} {slot:?} {from} + {end}");
                    begin = *end;
                }
                if n > 0 {
                    got.extend(run(&mut *plain, slot, &subject.tokens[from + begin..from + n]));
                    assert!(got == bits(&out[i]), "{precision:?} {slot:?} {from}");
                }
            }
            at = (at.0 + rows.0, at.1 + rows.1);
        }
        assert!(program.snapshot(SLOT).expect("usable") == plain.snapshot(SLOT).expect("usable"));
        assert!(program.snapshot(other).expect("usable") == plain.snapshot(other).expect("usable"));
        for wrong in [&[0, 1][..], &[3, 3], &[4, 2]] {
            assert!(matches!(program.mark(SLOT, wrong), Err(StepError::Refused(_))));
        }
        // What was asked for goes with the slot's state.
        program.mark(SLOT, &[2]).expect("they ascend");
        program.reset(SLOT).expect("the slot exists");
        run(&mut *program, SLOT, &subject.tokens[..9]);
        assert!(program.take_marked(SLOT, 0).expect("usable").is_empty());
    }
}
