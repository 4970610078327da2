//! How much memory the GPU may keep, and what to do where it is too little.

use crate::family::Facts;
use crate::system::System;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Kept free beside what the driver allocates: pipelines, command buffers, the system's own.
const MARGIN: u64 = 256 * MIB;

/// What the system and other programs need at the least, when a higher limit is proposed.
fn reserve(memory: u64) -> u64 {
    (memory / 8).max(4 * GIB)
}

/// Memory that the GPU may keep resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    limit: u64,
    memory: u64,
}

impl Room {
    /// What a device may keep on a system: the limit that its owner has set, else what Metal recommends.
    pub fn of(facts: &Facts, system: &System) -> Self {
        let limit = system.wired_limit.filter(|n| *n > 0).unwrap_or(facts.working_set);
        Self { limit, memory: system.memory }
    }

    /// Bytes that may be allocated in sum.
    pub fn bytes(&self) -> u64 {
        self.limit.saturating_sub(MARGIN)
    }

    /// Why `need` bytes in sum cannot be kept and what helps, or `None` if they can.
    pub fn refusal(&self, need: u64) -> Option<String> {
        if need <= self.bytes() {
            return None;
        }
        let megabytes = need.saturating_add(MARGIN).div_ceil(MIB);
        let bearable = self.memory.saturating_sub(reserve(self.memory));
        Some(match megabytes.saturating_mul(MIB) <= bearable {
            true => format!(
                "the system lets the GPU keep {} MiB; until the next start this raises it: sudo sysctl iogpu.wired_limit_mb={megabytes}",
                self.limit / MIB
            ),
            false => format!(
                "the system lets the GPU keep {} MiB of this machine's {} MiB, and the rest would not be enough for everything else; ask for a shorter context, fewer sessions or a smaller model",
                self.limit / MIB,
                self.memory / MIB
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Family;

    fn room(memory: u64, working_set: u64, wired_limit: Option<u64>) -> Room {
        let facts = Facts {
            name: "Apple M4".into(),
            family: Family::Apple9,
            threadgroup_memory: 32768,
            max_buffer: working_set,
            working_set,
            unified: true,
        };
        Room::of(&facts, &System { os: (15, 0), memory, wired_limit, gpu_cores: None })
    }

    #[test]
    fn what_fits_and_what_is_proposed() {
        // Memory, recommended, limit set by hand (GiB), needed (MiB): refused?, the limit proposed.
        let table = [
            (32, 22, None, 22 * 1024 - 256, false, None),
            (32, 22, None, 22 * 1024 - 255, true, Some(22 * 1024 + 1)),
            (32, 22, None, 27 * 1024, true, Some(27 * 1024 + 256)),
            (32, 22, None, 28 * 1024, true, None),
            (32, 22, Some(28), 27 * 1024, false, None),
            // 0 is the system's word for its default.
            (32, 22, Some(0), 21 * 1024, false, None),
            (32, 22, Some(0), 23 * 1024, true, Some(23 * 1024 + 256)),
            // A limit set lower counts.
            (32, 22, Some(8), 9 * 1024, true, Some(9 * 1024 + 256)),
            // Small machines keep 4 GiB.
            (8, 5, None, 5 * 1024, true, None),
            (16, 11, None, 11 * 1024, true, Some(11 * 1024 + 256)),
            (16, 11, None, 12 * 1024, true, None),
            // Large ones an eighth.
            (64, 48, None, 56 * 1024 - 256, true, Some(56 * 1024)),
            (64, 48, None, 56 * 1024 - 255, true, None),
        ];
        for (memory, working_set, limit, need, refused, proposed) in table {
            let room = room(memory * GIB, working_set * GIB, limit.map(|n: u64| n * GIB));
            let refusal = room.refusal(need * MIB);
            assert_eq!(refusal.is_some(), refused, "{memory} {limit:?} {need}");
            let line = refusal.as_deref().and_then(|r| r.split("iogpu.wired_limit_mb=").nth(1));
            assert_eq!(line.map(|n| n.parse().unwrap()), proposed, "{memory} {limit:?} {need}");
        }
    }

    #[test]
    fn nothing_overflows() {
        assert!(room(u64::MAX, 1, None).refusal(u64::MAX).is_some());
        assert_eq!(room(0, 0, None).bytes(), 0);
    }
}
