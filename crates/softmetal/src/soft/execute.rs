//! Runs command buffers, one after another on the device's thread; what Metal does not order, in random order.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use lily_softgpu::{Access, Cell, Place, TrackedRange};
use objc2_metal::MTLCommandBufferStatus;

use super::caps::Fault;
use super::memory::Region;
use super::objects::{Argument, Command, CommandBuffer, Copy, Encoded, Failure, Launch, lock};
use super::rules::Rule;
use super::state::State;

/// What has run so far, as far as order matters.
pub(crate) struct Order {
    /// The number of the next dispatch.
    next: u32,
    /// The first dispatch that is not before an encoder that waits for a fence.
    fences: HashMap<u64, u32>,
    /// Kernels of numbers, for reports.
    names: Vec<String>,
    /// Who touched what, by buffer.
    cells: HashMap<u64, Vec<Cell>>,
    /// Seconds on the device's clock.
    clock: f64,
}

impl Default for Order {
    fn default() -> Self {
        let names = vec![String::new()];
        Self { next: 1, fences: HashMap::new(), names, cells: HashMap::new(), clock: 1.0 }
    }
}

fn order(state: &State) -> MutexGuard<'_, Order> {
    state.order.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `MTLCommandBufferError`: internal.
const INTERNAL: isize = 1;
/// Access revoked.
const REVOKED: isize = 4;
/// Out of memory.
const OUT_OF_MEMORY: isize = 8;
/// Invalid resource.
const INVALID: isize = 9;
/// Device removed.
const REMOVED: isize = 11;

fn failure(code: isize, text: &str) -> Failure {
    Failure { code, text: text.into() }
}

/// Runs a command buffer and ends it.
pub(crate) fn run(state: &Arc<State>, buffer: CommandBuffer) {
    let number = buffer.number;
    if (0..=number).any(|n| state.has_fault(Fault::Silent(n))) {
        // Nobody hears of it again.
        std::mem::forget(buffer);
        return;
    }
    let passed = state.pass(number);
    if !passed {
        state.violated(Rule::Held, format!("command buffer {number}: no next one was committed"));
    }
    let (encoded, invalid) = {
        let mut inner = lock(&buffer.of().inner);
        inner.status = MTLCommandBufferStatus::Scheduled.0;
        (std::mem::take(&mut inner.encoded), inner.invalid.clone())
    };
    let start = order(state).clock;
    let result = match (fault_of(state, &buffer), invalid) {
        (Some(failure), _) => {
            if state.has_fault(Fault::Killed(number)) {
                // As much of it as had run by then.
                let whole = encoded.iter().map(|e| e.commands.len()).sum::<usize>();
                let some = state.random(whole as u32) as usize;
                let _ = run_commands(state, &buffer, &encoded, some);
            }
            Err(failure)
        }
        (None, Some(text)) => Err(Failure { code: INVALID, text }),
        (None, None) => run_commands(state, &buffer, &encoded, usize::MAX),
    };
    let end = order(state).clock;
    drop(encoded);
    buffer.end([start, end], result);
}

const IGNORED: &str = "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)";

/// What goes wrong with a command buffer.
fn fault_of(state: &State, buffer: &CommandBuffer) -> Option<Failure> {
    let number = buffer.number;
    let queue = &buffer.of().queue;
    if (0..=number).any(|n| state.has_fault(Fault::Removed(n))) {
        return Some(failure(REMOVED, "the device was removed"));
    }
    if (0..=number).any(|n| state.has_fault(Fault::Revoked(n))) {
        return Some(failure(REVOKED, IGNORED));
    }
    if queue.failed.load(Ordering::Acquire) {
        return Some(failure(REVOKED, IGNORED));
    }
    let killed = state.has_fault(Fault::Killed(number));
    let starved = state.has_fault(Fault::OutOfMemory(number));
    if killed || starved {
        queue.failed.store(true, Ordering::Release);
    }
    if killed {
        let text = "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)";
        return Some(failure(INTERNAL, text));
    }
    let text = "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)";
    starved.then(|| failure(OUT_OF_MEMORY, text))
}

/// Runs up to `most` commands.
fn run_commands(
    state: &Arc<State>,
    buffer: &CommandBuffer,
    encoded: &[Encoded],
    most: usize,
) -> Result<(), Failure> {
    let mut left = most;
    check_released(state, buffer, encoded, "ran")?;
    for encoder in encoded {
        let result = run_encoder(state, encoder, &mut left);
        // A command buffer that fails releases who waits for it.
        let mut order = order(state);
        let next = order.next;
        order.fences.extend(encoder.updates.iter().map(|f| (*f, next)));
        drop(order);
        result?;
    }
    check_guards(state, encoded)?;
    check_released(state, buffer, encoded, "had completed")
}

fn broken(state: &State, rule: Rule, what: String) -> Failure {
    Failure { code: INVALID, text: state.violated(rule, what) }
}

/// Without retained references, what is used must be there until the end.
fn check_released(
    state: &State,
    buffer: &CommandBuffer,
    encoded: &[Encoded],
    before: &str,
) -> Result<(), Failure> {
    if buffer.of().retains {
        return Ok(());
    }
    for command in encoded.iter().flat_map(|e| &e.commands) {
        if let Some(region) = command.regions().find(|r| r.is_released()) {
            let what = format!(
                "buffer {} of {} bytes, before command buffer {} {before}",
                region.id, region.bytes, buffer.number
            );
            return Err(broken(state, Rule::Released, what));
        }
        if let Command::Dispatch(launch) = command
            && launch.kernel.is_released()
        {
            let name = launch.kernel.name();
            let what =
                format!("the pipeline of {name}, before command buffer {} {before}", buffer.number);
            return Err(broken(state, Rule::Released, what));
        }
    }
    Ok(())
}

fn check_guards(state: &State, encoded: &[Encoded]) -> Result<(), Failure> {
    let regions = encoded.iter().flat_map(|e| &e.commands).flat_map(Command::regions);
    match regions.into_iter().find(|r| !r.is_intact()) {
        Some(region) => {
            let what = format!("buffer {} of {} bytes: written behind it", region.id, region.bytes);
            Err(broken(state, Rule::OutOfBounds, what))
        }
        None => Ok(()),
    }
}

/// Where an encoder stands.
#[derive(Clone, Copy)]
struct Position {
    fence: u32,
    encoder: u32,
    interval: u32,
}

fn run_encoder(state: &Arc<State>, encoder: &Encoded, left: &mut usize) -> Result<(), Failure> {
    let mut position = {
        let order = order(state);
        let fence = encoder.waits.iter().filter_map(|f| order.fences.get(f)).max();
        Position { fence: fence.copied().unwrap_or(0), encoder: order.next, interval: order.next }
    };
    for group in encoder.commands.split(|c| matches!(c, Command::Barrier)) {
        for i in shuffled(state, group.len()) {
            if *left == 0 {
                return Ok(());
            }
            *left -= 1;
            match &group[i] {
                Command::Dispatch(launch) => dispatch(state, launch, position)?,
                Command::Copy(copy) => copy_bytes(state, copy, position)?,
                Command::Barrier => {}
            }
        }
        position.interval = order(state).next;
    }
    Ok(())
}

fn shuffled(state: &State, count: usize) -> Vec<usize> {
    let mut list: Vec<usize> = (0..count).collect();
    for i in (1..count).rev() {
        list.swap(i, state.random(i as u32 + 1) as usize);
    }
    list
}

/// Takes the next number, for a dispatch or copy of that name.
fn number(state: &State, name: &str, position: Position) -> Place {
    let mut order = order(state);
    let number = order.next;
    order.next += 1;
    if state.caps.tracked {
        order.names.push(name.to_owned());
    }
    let Position { fence, encoder, interval } = position;
    Place { number, fence, encoder, interval }
}

/// The clock's time for a dispatch that no thread takes.
const LAUNCH_SECONDS: f64 = 1e-6;

fn dispatch(state: &Arc<State>, launch: &Launch, position: Position) -> Result<(), Failure> {
    let name = launch.kernel.name();
    let place = number(state, &name, position);
    let mut pointers: Vec<*mut c_void> = Vec::new();
    for argument in launch.arguments.iter().flatten() {
        pointers.push(match argument {
            Argument::Buffer(region, offset) => region.base.wrapping_add(*offset).cast(),
            Argument::Bytes(units, _) => units.as_ptr().cast_mut().cast(),
        });
    }
    let order_of_groups = Some(state.random(u32::MAX));
    let library = launch.kernel.library.clone();
    let mut run = || {
        // SAFETY: as many pointers as the kernel takes, to buffers that are alive and to as many bytes as it reads. That
        // kernels stay inside their buffers is what the tracked mode checks.
        unsafe {
            library.launch(
                &launch.kernel.name,
                launch.groups,
                launch.threads,
                &mut pointers,
                order_of_groups,
            )
        }
    };
    let (result, access) =
        if state.caps.tracked { tracked(state, launch, place, &mut run) } else { (run(), None) };
    state.launches[usize::from(launch.kernel.tensors)].fetch_add(1, Ordering::Relaxed);
    let threads = launch.groups.iter().map(|n| f64::from(*n)).product::<f64>();
    order(state).clock +=
        LAUNCH_SECONDS + threads * f64::from(launch.threads) * state.caps.thread_seconds;
    result.map_err(|why| broken(state, Rule::Kernel, format!("{name}: {why}")))?;
    match access {
        Some(access) => Err(reported(state, access, &name)),
        None => Ok(()),
    }
}

fn reported(state: &State, access: Access, name: &str) -> Failure {
    let does = if access.write != 0 { "writes" } else { "reads" };
    let at = format!("{name} {does} byte {} of buffer {}", access.offset, access.buffer);
    if access.kind == 2 {
        return broken(state, Rule::OutOfBounds, format!("{at}, which is not bound to it there"));
    }
    let other = order(state).names.get(access.other as usize).cloned().unwrap_or_default();
    broken(
        state,
        Rule::Unordered,
        format!("{at}, which {other} touches, and nothing orders the two"),
    )
}

/// The cells of a buffer, made the first time.
fn cells_of<'a>(cells: &'a mut HashMap<u64, Vec<Cell>>, region: &Region) -> &'a mut Vec<Cell> {
    cells.entry(region.id).or_insert_with(|| vec![Cell::default(); region.bytes.div_ceil(2) + 1])
}

/// Runs a dispatch with its accesses noted.
fn tracked<R>(
    state: &Arc<State>,
    launch: &Launch,
    place: Place,
    run: &mut dyn FnMut() -> R,
) -> (R, Option<Access>) {
    let all: Vec<Arc<Region>> = state.regions(|r| r.iter().filter_map(|r| r.upgrade()).collect());
    let mut order = order(state);
    let live: std::collections::HashSet<u64> = all.iter().map(|r| r.id).collect();
    order.cells.retain(|id, _| live.contains(id));
    let mut ranges: Vec<TrackedRange> = Vec::new();
    for region in &all {
        let bound = launch.arguments.iter().flatten().filter_map(|a| match a {
            Argument::Buffer(r, offset) if r.id == region.id => Some(*offset),
            _ => None,
        });
        let bound = bound.min();
        let start = region.base as usize;
        let cells = cells_of(&mut order.cells, region);
        ranges.push(TrackedRange {
            start,
            end: start + region.bytes + 256,
            bound_from: start + bound.unwrap_or(0),
            bound: u32::from(bound.is_some()),
            buffer: region.id as u32,
            cells: cells.as_mut_ptr(),
        });
    }
    ranges.sort_by_key(|r| r.start);
    // SAFETY: all buffers of the device, kept alive above, with their cells, which the lock keeps to this thread.
    unsafe { launch.kernel.library.tracked(&ranges, place, run) }
}

fn copy_bytes(state: &State, copy: &Copy, position: Position) -> Result<(), Failure> {
    let place = number(state, "a copy", position);
    let Copy { from, to, bytes } = copy;
    // SAFETY: both ranges were checked against their buffers and do not overlap.
    unsafe {
        let (from, to) = (from.0.base.add(from.1), to.0.base.add(to.1));
        std::ptr::copy_nonoverlapping(from, to, *bytes);
    }
    if !state.caps.tracked {
        return Ok(());
    }
    let beside = |other: u32| {
        let Place { number, fence, encoder, interval } = place;
        other > 0 && other != number && other >= fence && (other < encoder || other >= interval)
    };
    let mut order = order(state);
    let mut found = None;
    for cell in &mut cells_of(&mut order.cells, &from.0)[from.1 / 2..(from.1 + bytes) / 2] {
        found = found.or(beside(cell.writer).then_some((cell.writer, 0)));
        cell.readers = [place.number, cell.readers[0]];
    }
    for cell in &mut cells_of(&mut order.cells, &to.0)[to.1 / 2..(to.1 + bytes) / 2] {
        let others = [cell.writer, cell.readers[0], cell.readers[1]];
        found = found.or(others.into_iter().find(|o| beside(*o)).map(|o| (o, 1)));
        cell.writer = place.number;
    }
    drop(order);
    let Some((other, write)) = found else { return Ok(()) };
    let at = if write > 0 { to } else { from };
    let access = Access { kind: 1, buffer: at.0.id as u32, other, write, offset: at.1 as u64 };
    Err(reported(state, access, "a copy"))
}
