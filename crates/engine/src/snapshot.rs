//! Copies of a session's state away from the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lily_device::{Output, Plan, Snapshot};
use lily_ops::plan::PAGE_TOKENS;

use crate::engine::Engine;
use crate::error::EngineError;
use crate::session::{Session, Timings};

/// Checkpoints a session keeps; the one not used for longest goes first.
pub const MAX_CHECKPOINTS: usize = 4;

/// Bytes that the checkpoints of one session may take in host memory.
pub const MAX_CHECKPOINT_BYTES: usize = 512 << 20;

/// Bytes of a snapshot of `tokens` tokens of a plan: state and cache, and the tokens themselves.
pub fn snapshot_bytes(plan: &Plan, tokens: usize) -> u64 {
    let state = &plan.state;
    let per_token = state.page_bytes() / PAGE_TOKENS + size_of::<u32>();
    let fixed = (state.recurrent_bytes() + state.conv_bytes()) as u64;
    fixed.saturating_add((tokens as u64).saturating_mul(per_token as u64))
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

impl Drop for Reserved {
    fn drop(&mut self) {
        self.memory.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A snapshot and the memory that it is counted in.
#[derive(Debug)]
struct Kept {
    snapshot: Snapshot,
    reserved: Reserved,
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
}

impl SessionSnapshot {
    /// The tokens in the state.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The device state.
    pub fn state(&self) -> &Snapshot {
        &self.state.snapshot
    }

    /// Bytes it takes of those set aside for snapshots; its clones share them.
    pub fn bytes(&self) -> u64 {
        self.state.reserved.bytes
    }
}

impl Engine {
    /// Bytes of host memory that snapshots and checkpoints take at present.
    pub fn snapshot_bytes_used(&self) -> u64 {
        self.host_memory.used.load(Ordering::Relaxed)
    }

    /// Copies a session.
    ///
    /// # Errors
    /// [`SnapshotMemory`](EngineError::SnapshotMemory) if it does not fit into
    /// [`EngineOptions::snapshot_bytes`](crate::EngineOptions::snapshot_bytes) beside those that are alive.
    pub fn snapshot(&mut self, session: &Session) -> Result<SessionSnapshot, EngineError> {
        self.usable(session)?;
        let pending = session.pending.len() as u64 * size_of::<u32>() as u64;
        let bytes = snapshot_bytes(self.plan(), session.tokens.len()) + pending;
        let reserved = self.host_memory.reserve(bytes)?;
        let state = self.program.snapshot(session.slot());
        let state = self.note(session, state)?;
        Ok(SessionSnapshot {
            tokens: session.tokens.as_slice().into(),
            pending: session.pending.as_slice().into(),
            last_sampled: session.last_sampled,
            timings: session.timings,
            epoch: session.epoch,
            state: Arc::new(Kept { snapshot: state, reserved }),
        })
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
        let result = self.program.restore(session.slot(), snapshot.state());
        self.note(session, result)?;
        self.healed(session);
        session.tokens = snapshot.tokens.to_vec();
        session.pending = snapshot.pending.to_vec();
        session.flown.clear();
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
        let bytes = snapshot_bytes(self.plan(), session.tokens.len());
        let most = (MAX_CHECKPOINT_BYTES as u64).min(self.options().snapshot_bytes);
        if bytes > most {
            return Ok(false);
        }
        let taken = |session: &Session| -> u64 {
            session.checkpoints.iter().map(SessionSnapshot::bytes).sum()
        };
        while session.checkpoints.len() >= MAX_CHECKPOINTS || taken(session) + bytes > most {
            session.checkpoints.pop_front();
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
