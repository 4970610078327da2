//! Memory is budgeted before it is taken.

use std::fmt;

use lily_device::{Device, Plan};

use crate::engine::EngineOptions;
use crate::memory::Machine;

/// Bytes a plan needs on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// The weights, as they lie in the checkpoint: mapped file pages.
    pub weights: u64,
    /// Copies of weights that the device makes; 0 where it reads the mapped ones.
    pub copies: u64,
    /// KV pages of all slots.
    pub kv: u64,
    /// Recurrent and convolution state of all slots.
    pub state: u64,
    /// Values between operations, logits and the device's own work space.
    pub scratch: u64,
    /// Host memory for snapshots and checkpoints, at most.
    pub snapshots: u64,
    /// Logits that one step may return.
    pub logits: u64,
}

impl Budget {
    /// What is allocated, as opposed to mapped from files.
    pub fn anonymous(&self) -> u64 {
        [self.kv, self.state, self.scratch, self.snapshots, self.logits]
            .into_iter()
            .fold(self.copies, u64::saturating_add)
    }

    /// Everything.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.anonymous())
    }

    /// Compares with what the machine has. Weights beyond memory would be read from the disk again for
    /// every token, so they count although they are not allocated.
    pub fn check(&self, machine: &Machine) -> Result<(), MemoryRefusal> {
        let too_much = machine.total.is_some_and(|t| self.total() > t)
            || machine.available.is_some_and(|a| self.anonymous() > a);
        match too_much {
            true => Err(MemoryRefusal { budget: *self, machine: *machine }),
            false => Ok(()),
        }
    }
}

/// The budget of `plan` on `device` for an engine of these options. Allocates nothing.
pub fn budget(device: &dyn Device, plan: &Plan, options: &EngineOptions) -> Budget {
    let need = device.memory(plan, &options.limits());
    let row = plan.vocab as u64 * size_of::<f32>() as u64;
    Budget {
        weights: plan.weights.iter().map(|w| w.bytes()).sum(),
        copies: need.weights,
        kv: need.kv,
        state: need.state,
        scratch: need.scratch,
        snapshots: options.snapshot_bytes,
        logits: row.saturating_mul(options.logit_rows as u64),
    }
}

/// A budget that does not fit, with all figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRefusal {
    /// What is needed.
    pub budget: Budget,
    /// What there is.
    pub machine: Machine,
}

impl fmt::Display for MemoryRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = &self.budget;
        write!(f, "weights {}", Bytes(b.weights))?;
        if b.copies > 0 {
            write!(f, ", copies of weights {}", Bytes(b.copies))?;
        }
        write!(
            f,
            ", KV cache {}, recurrent state {}, scratch {}",
            Bytes(b.kv),
            Bytes(b.state),
            Bytes(b.scratch)
        )?;
        for (what, bytes) in [("snapshots", b.snapshots), ("logits", b.logits)] {
            if bytes > 0 {
                write!(f, ", {what} {}", Bytes(bytes))?;
            }
        }
        write!(f, ": {} in all, {} of it allocated; ", Bytes(b.total()), Bytes(b.anonymous()))?;
        let known = |bytes: Option<u64>| bytes.map_or("unknown".into(), |b| Bytes(b).to_string());
        write!(
            f,
            "the machine has {}, of which available {}; ",
            known(self.machine.total),
            known(self.machine.available)
        )?;
        match self.machine.total.is_some_and(|t| b.weights + b.copies > t) {
            true => f.write_str("the weights alone do not fit: use a smaller model"),
            false => f.write_str("use a shorter --context, fewer slots or a smaller --chunk"),
        }
    }
}

impl std::error::Error for MemoryRefusal {}

/// Prints bytes in a binary unit.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
        match units.into_iter().find(|(shift, _)| self.0 >> shift > 0) {
            Some((shift, unit)) => {
                write!(f, "{:.1} {unit}", self.0 as f64 / (1u64 << shift) as f64)
            }
            None => write!(f, "{} B", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 1 << 30;

    fn need() -> Budget {
        Budget {
            weights: 20 * G,
            copies: 0,
            kv: 2 * G,
            state: G / 2,
            scratch: G / 2,
            ..Budget::default()
        }
    }

    fn machine(total: u64, available: u64) -> Machine {
        Machine { total: Some(total), available: Some(available) }
    }

    #[test]
    fn what_fits_and_what_does_not() {
        assert_eq!(need().check(&machine(23 * G, 3 * G)), Ok(()));
        assert!(need().check(&machine(23 * G - 1, 3 * G)).is_err());
        assert!(need().check(&machine(23 * G, 3 * G - 1)).is_err());
        // Copies are allocated: they count twice over the mapped weights.
        let copied = Budget { copies: 20 * G, ..need() };
        assert!(copied.check(&machine(64 * G, 22 * G)).is_err());
        assert_eq!(copied.check(&machine(64 * G, 23 * G)), Ok(()));
        for more in [Budget { snapshots: G, ..need() }, Budget { logits: G, ..need() }] {
            assert_eq!(more.anonymous(), 4 * G);
            assert_eq!(more.check(&machine(24 * G, 4 * G)), Ok(()));
            assert!(more.check(&machine(24 * G, 4 * G - 1)).is_err());
        }
    }

    #[test]
    fn nothing_known_refuses_nothing() {
        assert_eq!(need().check(&Machine::UNKNOWN), Ok(()));
        assert!(need().check(&Machine { total: None, available: Some(G) }).is_err());
        assert!(need().check(&Machine { total: Some(G), available: None }).is_err());
    }

    #[test]
    fn the_message_has_all_figures_and_a_hint_that_helps() {
        let text = need().check(&machine(22 * G, 2 * G)).unwrap_err().to_string();
        for part in ["20.0 GiB", "2.0 GiB", "512.0 MiB", "23.0 GiB", "3.0 GiB", "22.0 GiB"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(text.contains("shorter --context, fewer slots"), "{text}");
        assert!(!text.contains("snapshots") && !text.contains("logits"), "{text}");
        let more = Budget { snapshots: 3 * G, logits: 5 * G, ..need() };
        let text = more.check(&machine(22 * G, 2 * G)).unwrap_err().to_string();
        assert!(text.contains("snapshots 3.0 GiB, logits 5.0 GiB: 31.0 GiB in all"), "{text}");
        let text = need().check(&machine(8 * G, 2 * G)).unwrap_err().to_string();
        assert!(text.contains("smaller model"), "{text}");
        assert!(!text.contains("--context"), "{text}");
    }

    #[test]
    fn units() {
        let text: Vec<String> =
            [0, 1023, 1536, 5 << 20, 3 << 40].map(|b| Bytes(b).to_string()).into();
        assert_eq!(text, ["0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3072.0 GiB"]);
    }
}
