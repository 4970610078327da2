//! Copies of a session's state away from the device.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use lily_device::{KvPart, Output, Plan, SlotId, Snapshot};
use lily_ops::plan::PAGE_TOKENS;

use crate::engine::{Engine, next_epoch};
use crate::error::EngineError;
use crate::session::{Session, Timings};

/// Checkpoints a session keeps; the one not used for longest goes first.
pub const MAX_CHECKPOINTS: usize = 4;

/// Bytes that the checkpoints of one session may take in host memory.
pub const MAX_CHECKPOINT_BYTES: usize = 512 << 20;

/// Bytes of a snapshot of `tokens` tokens of a plan: state and cache, and the tokens themselves. One that shares
/// the cache of its first tokens with another takes less.
pub fn snapshot_bytes(plan: &Plan, tokens: usize) -> u64 {
    state_bytes(plan, tokens).saturating_add(kv_bytes(plan, tokens))
}

/// Bytes of what a snapshot shares with no other.
fn state_bytes(plan: &Plan, tokens: usize) -> u64 {
    let fixed = (plan.state.recurrent_bytes() + plan.state.conv_bytes()) as u64;
    fixed.saturating_add(tokens as u64 * size_of::<u32>() as u64)
}

/// Bytes of K and V of so many tokens.
fn kv_bytes(plan: &Plan, tokens: usize) -> u64 {
    let per_token = plan.state.page_bytes() / PAGE_TOKENS;
    (tokens as u64).saturating_mul(per_token as u64)
}

/// Host memory for the snapshots of an engine: what is set aside, and what is in use.
#[derive(Debug)]
pub(crate) struct HostMemory {
    used: AtomicU64,
    cap: u64,
}

impl HostMemory {
    pub fn new(cap: u64) -> Self {
        Self { used: AtomicU64::new(0), cap }
    }

    /// Takes `bytes` until what is returned is dropped.
    fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reserved, EngineError> {
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.cap);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => Ok(Reserved { memory: Arc::clone(self), bytes }),
            Err(used) => Err(EngineError::SnapshotMemory { need: bytes, used, cap: self.cap }),
        }
    }
}

#[derive(Debug)]
struct Reserved {
    memory: Arc<HostMemory>,
    bytes: u64,
}

impl Reserved {
    /// Takes a part of it out.
    fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { memory: Arc::clone(&self.memory), bytes }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.memory.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// K and V of the tokens `from..to` of a prompt, behind those of the tokens before them. What was computed once is
/// kept once: snapshots of a prompt, and of those that go on from it, share it.
#[derive(Debug)]
pub(crate) struct Span {
    from: usize,
    pub to: usize,
    bytes: Vec<u8>,
    before: Option<Arc<Span>>,
    reserved: Reserved,
}

impl Span {
    /// From the last tokens to the first.
    fn chain(self: &Arc<Self>) -> impl Iterator<Item = &Arc<Self>> {
        std::iter::successors(Some(self), |span| span.before.as_ref())
    }
}

impl Drop for Span {
    /// One after the other: a long conversation has more of them than a thread's stack has room for calls.
    fn drop(&mut self) {
        let mut next = self.before.take();
        while let Some(mut span) = next.and_then(Arc::into_inner) {
            next = span.before.take();
        }
    }
}

/// The state of a snapshot without K and V, and the memory that it is counted in.
#[derive(Debug)]
struct Kept {
    snapshot: Snapshot,
    reserved: Reserved,
}

/// A state inside a step that is to be kept, with its memory.
#[derive(Debug)]
pub(crate) struct Mark {
    /// Tokens in the state.
    position: usize,
    reserved: Reserved,
    /// What snapshots alive have of the tokens before the step.
    shared: Option<Arc<Span>>,
}

/// A session at one moment, in host memory: cheap to clone, exact, restorable into any session of an engine
/// with the same plan. A generation that was running continues in the restored session.
#[derive(Clone, Debug)]
pub struct SessionSnapshot {
    tokens: Arc<[u32]>,
    pending: Arc<[u32]>,
    last_sampled: Option<u32>,
    timings: Timings,
    epoch: u64,
    state: Arc<Kept>,
    kv: Arc<Span>,
}

impl SessionSnapshot {
    /// The tokens in the state.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The device state but for K and V.
    pub fn state(&self) -> &Snapshot {
        &self.state.snapshot
    }

    /// Bytes it takes of those set aside for snapshots, what it shares with others included.
    pub fn bytes(&self) -> u64 {
        Self::bytes_of([self])
    }

    /// Bytes that several take together; what they share counts once.
    pub fn bytes_of<'a>(snapshots: impl IntoIterator<Item = &'a Self>) -> u64 {
        let mut seen = BTreeSet::new();
        let mut bytes = 0;
        for snapshot in snapshots {
            if seen.insert(Arc::as_ptr(&snapshot.state).addr()) {
                bytes += snapshot.state.reserved.bytes;
            }
            // What is before a span that was seen was seen with it.
            let new = snapshot.kv.chain().take_while(|span| seen.insert(Arc::as_ptr(span).addr()));
            bytes += new.map(|span| span.reserved.bytes).sum::<u64>();
        }
        bytes
    }

    fn parts(&self) -> Vec<KvPart<'_>> {
        let mut parts: Vec<KvPart<'_>> = self
            .kv
            .chain()
            .map(|span| KvPart { from: span.from, to: span.to, bytes: &span.bytes })
            .collect();
        parts.reverse();
        parts
    }
}

impl Engine {
    /// Bytes of host memory that snapshots and checkpoints take at present.
    pub fn snapshot_bytes_used(&self) -> u64 {
        self.host_memory.used.load(Ordering::Relaxed)
    }

    /// The longest part of a session's K and V that snapshots alive have.
    fn shared(&self, session: &Session) -> Option<Arc<Span>> {
        self.copied.get(session.slot().0 as usize).and_then(Weak::upgrade)
    }

    /// Remembers which part of a slot's K and V snapshots have, if any.
    pub(crate) fn set_copied(&mut self, slot: SlotId, span: Weak<Span>) {
        if let Some(copied) = self.copied.get_mut(slot.0 as usize) {
            *copied = span;
        }
    }

    /// What snapshots have of the session's tokens is not more than the session has.
    pub(crate) fn forget_copied_beyond(&mut self, session: &Session) {
        if self.shared(session).is_some_and(|span| span.to > session.tokens.len()) {
            self.set_copied(session.slot(), Weak::new());
        }
    }

    /// Bytes that a [`snapshot`](Self::snapshot) of the session would take at present.
    pub fn snapshot_need(&self, session: &Session) -> u64 {
        let (state, kv) = self.needs(session, self.shared(session).as_deref());
        state.saturating_add(kv)
    }

    fn needs(&self, session: &Session, shared: Option<&Span>) -> (u64, u64) {
        let pending = session.pending.len() as u64 * size_of::<u32>() as u64;
        let new = session.tokens.len() - shared.map_or(0, |span| span.to);
        (state_bytes(self.plan(), session.tokens.len()) + pending, kv_bytes(self.plan(), new))
    }

    /// Copies a session. K and V that snapshots alive have already are not copied again.
    ///
    /// # Errors
    /// [`SnapshotMemory`](EngineError::SnapshotMemory) if it does not fit into
    /// [`EngineOptions::snapshot_bytes`](crate::EngineOptions::snapshot_bytes) beside those that are alive.
    pub fn snapshot(&mut self, session: &Session) -> Result<SessionSnapshot, EngineError> {
        self.usable(session)?;
        let before = self.shared(session);
        let (state, kv) = self.needs(session, before.as_deref());
        let mut reserved = self.host_memory.reserve(state.saturating_add(kv))?;
        let (from, to) = (before.as_ref().map_or(0, |span| span.to), session.tokens.len());
        let snapshot = self.program.snapshot_behind(session.slot(), from);
        let mut snapshot = self.note(session, snapshot)?;
        let bytes = std::mem::take(&mut snapshot.kv);
        let kv = match before {
            Some(before) if from == to => before,
            before => Arc::new(Span { from, to, bytes, before, reserved: reserved.split(kv) }),
        };
        self.set_copied(session.slot(), Arc::downgrade(&kv));
        Ok(SessionSnapshot {
            tokens: session.tokens.as_slice().into(),
            pending: session.pending.as_slice().into(),
            last_sampled: session.last_sampled,
            timings: session.timings,
            epoch: session.epoch,
            state: Arc::new(Kept { snapshot, reserved }),
            kv,
        })
    }

    /// Whether states inside a step can be [kept](Self::mark), with one step in flight at a time.
    pub fn marks(&self) -> bool {
        self.program.marks() && !self.overlaps()
    }

    /// Has the session's next step keep the states behind so many of its tokens each, ascending, so that it need not
    /// end there. What was asked for before is forgotten.
    ///
    /// # Errors
    /// [`SnapshotMemory`](EngineError::SnapshotMemory) if they do not fit beside what is alive; none is kept then.
    pub fn mark(&mut self, session: &mut Session, rows: &[usize]) -> Result<(), EngineError> {
        self.usable(session)?;
        if rows.is_empty() && session.marks.is_empty() {
            return Ok(());
        }
        session.marks.clear();
        let marked = self.program.mark(session.slot(), &[]);
        self.note(session, marked)?;
        let shared = self.shared(session);
        let mut from = shared.as_ref().map_or(0, |span| span.to);
        let mut marks = Vec::new();
        for rows in rows {
            let position = session.tokens.len() + rows;
            let new = kv_bytes(self.plan(), position.saturating_sub(from));
            let bytes = state_bytes(self.plan(), position).saturating_add(new);
            let reserved = self.host_memory.reserve(bytes)?;
            marks.push(Mark { position, reserved, shared: shared.clone() });
            from = position;
        }
        let marked = self.program.mark(session.slot(), rows);
        self.note(session, marked)?;
        session.marks = marks;
        Ok(())
    }

    /// The states that the session's last step [kept](Self::mark), in order, once. They are states of its prompt: an
    /// answer begins anew in them.
    pub fn take_marked(
        &mut self,
        session: &mut Session,
    ) -> Result<Vec<SessionSnapshot>, EngineError> {
        let mut marks = std::mem::take(&mut session.marks);
        let Some(first) = marks.first() else { return Ok(Vec::new()) };
        self.usable(session)?;
        let mut before = first.shared.clone();
        let from = before.as_ref().map_or(0, |span| span.to);
        let taken = self.program.take_marked(session.slot(), from);
        let taken = self.note(session, taken)?;
        let mut snapshots = Vec::new();
        for mut snapshot in taken {
            let to = snapshot.position;
            let Some(at) = marks.iter().position(|m| m.position == to) else { continue };
            let from = before.as_ref().map_or(0, |span| span.to);
            let mut reserved = marks.swap_remove(at).reserved;
            let bytes = std::mem::take(&mut snapshot.kv);
            let kept = reserved.split(kv_bytes(self.plan(), to - from));
            let kv = Arc::new(Span { from, to, bytes, before, reserved: kept });
            before = Some(Arc::clone(&kv));
            snapshots.push(SessionSnapshot {
                tokens: session.tokens[..to].into(),
                pending: [].into(),
                last_sampled: None,
                timings: Timings::default(),
                epoch: next_epoch(),
                state: Arc::new(Kept { snapshot, reserved }),
                kv,
            });
        }
        if let Some(last) = snapshots.last() {
            self.set_copied(session.slot(), Arc::downgrade(&last.kv));
        }
        Ok(snapshots)
    }

    /// Puts a session, poisoned or not, into the state of a snapshot.
    pub fn restore(
        &mut self,
        session: &mut Session,
        snapshot: &SessionSnapshot,
    ) -> Result<(), EngineError> {
        self.land_abandoned();
        self.owned(session)?;
        self.settled(session)?;
        let (position, tokens) = (snapshot.state().position, snapshot.tokens.len());
        if position != tokens {
            return Err(EngineError::SnapshotMismatch { position, tokens });
        }
        let context = self.options().context;
        let staged = tokens + snapshot.pending.len();
        if staged > context {
            return Err(EngineError::PromptTooLong { tokens: staged, context });
        }
        let parts = snapshot.parts();
        let result = self.program.restore_parts(session.slot(), snapshot.state(), &parts);
        self.note(session, result)?;
        self.set_copied(session.slot(), Arc::downgrade(&snapshot.kv));
        self.healed(session);
        session.tokens = snapshot.tokens.to_vec();
        session.pending = snapshot.pending.to_vec();
        session.flown.clear();
        session.marks.clear();
        session.decoded_last = false;
        session.last_sampled = snapshot.last_sampled;
        session.timings = snapshot.timings;
        session.epoch = snapshot.epoch;
        Ok(())
    }

    /// Opens a session in the state of a snapshot.
    pub fn fork(&mut self, snapshot: &SessionSnapshot) -> Result<Session, EngineError> {
        let mut session = self.open_session()?;
        self.restore(&mut session, snapshot)?;
        Ok(session)
    }

    /// Keeps a copy of the state, so that a later prompt with the same beginning can start from it. Pending
    /// prompt tokens but the last are computed first. Tells whether it is kept: one larger than
    /// [`MAX_CHECKPOINT_BYTES`], or than what the snapshots of other sessions leave, is not.
    pub fn checkpoint(&mut self, session: &mut Session) -> Result<bool, EngineError> {
        self.usable(session)?;
        while session.pending.len() > 1 {
            let rows = session.pending.len() - 1;
            let work = session.prefill_segment(rows.min(self.options().chunk), &Output::None);
            self.step(work.into_iter().collect())?;
        }
        session.checkpoints.retain(|c| c.tokens[..] != session.tokens[..]);
        let most = (MAX_CHECKPOINT_BYTES as u64).min(self.options().snapshot_bytes);
        if snapshot_bytes(self.plan(), session.tokens.len()) > most {
            return Ok(false);
        }
        let taken = |session: &Session| SessionSnapshot::bytes_of(&session.checkpoints);
        while session.checkpoints.len() >= MAX_CHECKPOINTS
            || taken(session).saturating_add(self.snapshot_need(session)) > most
        {
            if session.checkpoints.pop_front().is_none() {
                break;
            }
        }
        loop {
            match self.snapshot(session) {
                Ok(snapshot) => {
                    session.checkpoints.push_back(snapshot);
                    return Ok(true);
                }
                Err(EngineError::SnapshotMemory { .. }) => {
                    if session.checkpoints.pop_front().is_none() {
                        return Ok(false);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Restores the state of a checkpoint, and only the state: the prompt is a new one.
    pub(crate) fn restore_checkpoint(
        &mut self,
        session: &mut Session,
        index: usize,
    ) -> Result<(), EngineError> {
        let snapshot = session.checkpoints[index].clone();
        let epoch = session.epoch;
        self.restore(session, &snapshot)?;
        session.renew(epoch);
        // The last one used is the last to go.
        session.checkpoints.remove(index);
        session.checkpoints.push_back(snapshot);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A conversation may have as many parts as tokens: they go without a call within a call each.
    #[test]
    fn a_long_chain_is_dropped() {
        let memory = Arc::new(HostMemory::new(1 << 40));
        let mut before = None;
        for from in 0..300_000 {
            let reserved = memory.reserve(2).expect("there is room");
            let (to, bytes) = (from + 1, vec![0; 2]);
            before = Some(Arc::new(Span { from, to, bytes, before, reserved }));
        }
        let middle = before.as_ref().and_then(|span| span.chain().nth(200_000)).cloned();
        drop(before);
        assert_eq!(memory.used.load(Ordering::Relaxed), 2 * 100_000);
        drop(middle);
        assert_eq!(memory.used.load(Ordering::Relaxed), 0);
    }
}
