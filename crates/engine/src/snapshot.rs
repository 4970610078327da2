//! Copies of a session's state away from the device.

use std::sync::Arc;

use lily_device::{Output, Snapshot};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::session::{Session, Timings};

/// Checkpoints a session keeps; the one not used for longest goes first.
pub const MAX_CHECKPOINTS: usize = 4;

/// Bytes that the checkpoints of one session may take in host memory.
pub const MAX_CHECKPOINT_BYTES: usize = 512 << 20;

/// A session at one moment, in host memory: cheap to clone, exact, restorable into any session of an engine
/// with the same plan. A generation that was running continues in the restored session.
#[derive(Clone, Debug)]
pub struct SessionSnapshot {
    tokens: Arc<[u32]>,
    pending: Arc<[u32]>,
    last_sampled: Option<u32>,
    timings: Timings,
    epoch: u64,
    state: Arc<Snapshot>,
}

impl SessionSnapshot {
    /// The tokens in the state.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The device state.
    pub fn state(&self) -> &Snapshot {
        &self.state
    }

    /// Bytes it takes.
    pub fn bytes(&self) -> usize {
        self.state.bytes() + (self.tokens.len() + self.pending.len()) * size_of::<u32>()
    }
}

impl Engine {
    /// Copies a session.
    pub fn snapshot(&mut self, session: &Session) -> Result<SessionSnapshot, EngineError> {
        self.usable(session)?;
        let state = self.program.snapshot(session.slot());
        let state = self.note(session, state)?;
        Ok(SessionSnapshot {
            tokens: session.tokens.as_slice().into(),
            pending: session.pending.as_slice().into(),
            last_sampled: session.last_sampled,
            timings: session.timings,
            epoch: session.epoch,
            state: Arc::new(state),
        })
    }

    /// Puts a session, poisoned or not, into the state of a snapshot.
    pub fn restore(
        &mut self,
        session: &mut Session,
        snapshot: &SessionSnapshot,
    ) -> Result<(), EngineError> {
        self.owned(session)?;
        let (position, tokens) = (snapshot.state.position, snapshot.tokens.len());
        if position != tokens {
            return Err(EngineError::SnapshotMismatch { position, tokens });
        }
        let context = self.options().context;
        let staged = tokens + snapshot.pending.len();
        if staged > context {
            return Err(EngineError::PromptTooLong { tokens: staged, context });
        }
        let result = self.program.restore(session.slot(), &snapshot.state);
        self.note(session, result)?;
        self.healed(session);
        session.tokens = snapshot.tokens.to_vec();
        session.pending = snapshot.pending.to_vec();
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
    /// [`MAX_CHECKPOINT_BYTES`] is not.
    pub fn checkpoint(&mut self, session: &mut Session) -> Result<bool, EngineError> {
        self.usable(session)?;
        while session.pending.len() > 1 {
            let rows = session.pending.len() - 1;
            let work = session.prefill_segment(rows.min(self.options().chunk), &Output::None);
            self.step(work.into_iter().collect())?;
        }
        let snapshot = self.snapshot(session)?;
        let kept = &mut session.checkpoints;
        kept.retain(|c| c.tokens != snapshot.tokens);
        if snapshot.bytes() > MAX_CHECKPOINT_BYTES {
            return Ok(false);
        }
        kept.push_back(snapshot);
        while kept.len() > MAX_CHECKPOINTS
            || kept.iter().map(SessionSnapshot::bytes).sum::<usize>() > MAX_CHECKPOINT_BYTES
        {
            kept.pop_front();
        }
        Ok(true)
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
