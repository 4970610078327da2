//! States of prompt prefixes, kept for later prompts.

use lily_engine::SessionSnapshot;

/// Snapshots of prefixes, within a bound of bytes; the one not used for longest goes first.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    entries: Vec<Entry>,
    cap: u64,
    /// Bytes of the entries; what they share counts once.
    bytes: u64,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    snapshot: SessionSnapshot,
    used: u64,
}

impl PrefixCache {
    pub fn new(cap: u64) -> Self {
        Self { cap, ..Self::default() }
    }

    /// Bytes that the snapshots take.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Snapshots kept.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    fn count(&mut self) {
        self.bytes = SessionSnapshot::bytes_of(self.entries.iter().map(|e| &e.snapshot));
    }

    /// Whether a snapshot of that size is ever kept.
    pub fn takes(&self, bytes: u64) -> bool {
        bytes <= self.cap
    }

    /// Whether exactly this prefix is kept.
    pub fn has(&self, tokens: &[u32]) -> bool {
        self.entries.iter().any(|e| e.snapshot.tokens() == tokens)
    }

    /// Length of the longest kept prefix that leaves at least one token to compute.
    pub fn longest(&self, tokens: &[u32]) -> usize {
        self.best(tokens).map_or(0, |at| self.entries[at].snapshot.tokens().len())
    }

    /// The longest kept prefix that leaves at least one token to compute.
    pub fn find(&mut self, tokens: &[u32]) -> Option<SessionSnapshot> {
        let at = self.best(tokens)?;
        self.clock += 1;
        self.entries[at].used = self.clock;
        Some(self.entries[at].snapshot.clone())
    }

    fn best(&self, tokens: &[u32]) -> Option<usize> {
        let fits = |e: &Entry| {
            let seen = e.snapshot.tokens();
            seen.len() < tokens.len() && tokens.starts_with(seen)
        };
        let found = self.entries.iter().enumerate().filter(|(_, e)| fits(e));
        found.max_by_key(|(_, e)| e.snapshot.tokens().len()).map(|(at, _)| at)
    }

    /// Whether there is room for so many bytes more.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.bytes.saturating_add(bytes) <= self.cap
    }

    /// Keeps a snapshot, whatever has to go for it.
    pub fn insert(&mut self, snapshot: SessionSnapshot) {
        self.remove(snapshot.tokens());
        self.clock += 1;
        self.entries.push(Entry { snapshot, used: self.clock });
        self.count();
        while self.bytes > self.cap && self.entries.len() > 1 && self.evict() {}
    }

    /// Forgets the one not used for longest. `false`: there is none.
    pub fn evict(&mut self) -> bool {
        let oldest = self.entries.iter().enumerate().min_by_key(|(_, e)| e.used);
        let at = oldest.map(|(at, _)| at);
        let gone = at.map(|at| self.entries.swap_remove(at));
        self.count();
        gone.is_some()
    }

    /// Forgets one prefix.
    pub fn remove(&mut self, tokens: &[u32]) {
        self.entries.retain(|e| e.snapshot.tokens() != tokens);
        self.count();
    }

    pub fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }
}
