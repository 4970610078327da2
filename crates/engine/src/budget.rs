//! Memory is budgeted before it is taken.

use std::fmt;

use lily_device::{Device, MemoryLimit, Plan};

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

    /// Mapped weights that are read for every token. What the device has copied was read once: the system takes its pages
    /// when memory is short.
    pub fn mapped(&self) -> u64 {
        self.weights.saturating_sub(self.copies)
    }

    /// Mapped weights that were read once.
    pub fn droppable(&self) -> u64 {
        self.weights - self.mapped()
    }

    /// Everything that must stay in memory.
    pub fn total(&self) -> u64 {
        self.mapped().saturating_add(self.anonymous())
    }

    /// What the device allocates: everything but snapshots and logits.
    pub fn on_device(&self) -> u64 {
        [self.kv, self.state, self.scratch].into_iter().fold(self.copies, u64::saturating_add)
    }

    /// Compares with what the machine has, and the device where that is less. Mapped weights beyond the host's memory
    /// would be read from the disk again for every token, so they count although they are not allocated, unless copies
    /// serve in their place.
    ///
    /// # Errors
    /// It does not fit.
    pub fn check(&self, machine: &Machine, limit: MemoryLimit) -> Result<(), MemoryRefusal> {
        let within = |bytes: u64, bound: Option<u64>| bound.is_none_or(|bound| bytes <= bound);
        let on_host =
            within(self.total(), machine.total) && within(self.anonymous(), machine.available);
        let fits = match limit {
            MemoryLimit::Host => on_host,
            MemoryLimit::HostWithin(bytes) => on_host && self.on_device() <= bytes,
            MemoryLimit::Own(bytes) => {
                let rest = self.snapshots.saturating_add(self.logits);
                self.on_device() <= bytes && within(rest, machine.available)
            }
        };
        match fits {
            true => Ok(()),
            false => Err(MemoryRefusal { budget: *self, machine: *machine, limit }),
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
    /// What there is for the device.
    pub limit: MemoryLimit,
}

impl MemoryRefusal {
    /// Whether no context is short enough.
    fn by_weights(&self) -> bool {
        let (mapped, copies) = (self.budget.mapped(), self.budget.copies);
        let on_host = self.machine.total.is_some_and(|t| mapped.saturating_add(copies) > t);
        match self.limit {
            MemoryLimit::Host => on_host,
            MemoryLimit::HostWithin(bytes) => on_host || copies > bytes,
            MemoryLimit::Own(bytes) => copies > bytes,
        }
    }
}

impl fmt::Display for MemoryRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = &self.budget;
        write!(f, "weights {}", Bytes(b.weights))?;
        if b.copies > 0 {
            write!(f, " (mapped; {} of it read once)", Bytes(b.droppable()))?;
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
        let known = |bytes: Option<u64>| bytes.map_or("unknown".into(), |b| Bytes(b).to_string());
        let available = known(self.machine.available);
        if let MemoryLimit::Own(bytes) = self.limit {
            let rest = b.snapshots.saturating_add(b.logits);
            write!(f, ": {} on the device, {} beside it; ", Bytes(b.on_device()), Bytes(rest))?;
            write!(f, "the device has {} free, the machine {available}; ", Bytes(bytes))?;
        } else {
            let (all, allocated) = (Bytes(b.total()), Bytes(b.anonymous()));
            write!(f, ": {all} in all, {allocated} of it allocated; ")?;
            let total = known(self.machine.total);
            write!(f, "the machine has {total}, of which available {available}; ")?;
        }
        if let MemoryLimit::HostWithin(bytes) = self.limit {
            write!(f, "the device may take {} for {}; ", Bytes(bytes), Bytes(b.on_device()))?;
        }
        match self.by_weights() {
            true => f.write_str("the weights alone do not fit: use a smaller model"),
            false => f.write_str(
                "use a shorter --context, fewer slots or a smaller --chunk (lily serve: --ctx, --parallel)",
            ),
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
        assert_eq!(need().check(&machine(23 * G, 3 * G), MemoryLimit::Host), Ok(()));
        assert!(need().check(&machine(23 * G - 1, 3 * G), MemoryLimit::Host).is_err());
        assert!(need().check(&machine(23 * G, 3 * G - 1), MemoryLimit::Host).is_err());
        // Copies are allocated, and the mapped weights are in nobody's way.
        let copied = Budget { copies: 20 * G, ..need() };
        assert_eq!((copied.mapped(), copied.droppable(), copied.total()), (0, 20 * G, 23 * G));
        assert!(copied.check(&machine(64 * G, 22 * G), MemoryLimit::Host).is_err());
        assert_eq!(copied.check(&machine(23 * G, 23 * G), MemoryLimit::Host), Ok(()));
        // Copies of some: the others stay mapped.
        let some = Budget { copies: 5 * G, ..need() };
        assert_eq!((some.mapped(), some.droppable(), some.total()), (15 * G, 5 * G, 23 * G));
        for more in [Budget { snapshots: G, ..need() }, Budget { logits: G, ..need() }] {
            assert_eq!(more.anonymous(), 4 * G);
            assert_eq!(more.check(&machine(24 * G, 4 * G), MemoryLimit::Host), Ok(()));
            assert!(more.check(&machine(24 * G, 4 * G - 1), MemoryLimit::Host).is_err());
        }
    }

    #[test]
    fn nothing_known_refuses_nothing() {
        assert_eq!(need().check(&Machine::UNKNOWN, MemoryLimit::Host), Ok(()));
        assert!(
            need().check(&Machine { total: None, available: Some(G) }, MemoryLimit::Host).is_err()
        );
        assert!(
            need().check(&Machine { total: Some(G), available: None }, MemoryLimit::Host).is_err()
        );
    }

    #[test]
    fn the_message_has_all_figures_and_a_hint_that_helps() {
        let text =
            need().check(&machine(22 * G, 2 * G), MemoryLimit::Host).unwrap_err().to_string();
        for part in ["20.0 GiB", "2.0 GiB", "512.0 MiB", "23.0 GiB", "3.0 GiB", "22.0 GiB"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(text.contains("shorter --context, fewer slots"), "{text}");
        assert!(!text.contains("snapshots") && !text.contains("logits"), "{text}");
        let more = Budget { snapshots: 3 * G, logits: 5 * G, ..need() };
        let text = more.check(&machine(22 * G, 2 * G), MemoryLimit::Host).unwrap_err().to_string();
        assert!(text.contains("snapshots 3.0 GiB, logits 5.0 GiB: 31.0 GiB in all"), "{text}");
        let text = need().check(&machine(8 * G, 2 * G), MemoryLimit::Host).unwrap_err().to_string();
        assert!(text.contains("smaller model"), "{text}");
        assert!(!text.contains("--context"), "{text}");
    }

    #[test]
    fn a_device_with_memory_of_its_own() {
        // The mapped weights are read once: they need not stay in the host's memory.
        let copied = Budget { copies: 20 * G, snapshots: 2 * G, ..need() };
        let host = machine(8 * G, 2 * G);
        assert_eq!(copied.on_device(), 23 * G);
        assert_eq!(copied.check(&host, MemoryLimit::Own(23 * G)), Ok(()));
        let refused =
            |machine: &Machine, limit| copied.check(machine, limit).unwrap_err().to_string();
        let text = refused(&host, MemoryLimit::Own(23 * G - 1));
        for part in
            ["23.0 GiB on the device", "2.0 GiB beside it", "the device has 23.0", "--context"]
        {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(refused(&host, MemoryLimit::Own(19 * G)).contains("smaller model"));
        let text = refused(&machine(8 * G, G), MemoryLimit::Own(23 * G));
        assert!(text.contains("the machine 1.0 GiB") && text.contains("--context"), "{text}");
        // What the host cannot tell refuses nothing; the device's figure still does.
        assert_eq!(copied.check(&Machine::UNKNOWN, MemoryLimit::Own(23 * G)), Ok(()));
        assert!(copied.check(&Machine::UNKNOWN, MemoryLimit::Own(G)).is_err());
    }

    #[test]
    fn a_device_that_may_take_part_of_the_hosts_memory() {
        // 20 GiB of weights copied once on a machine of 32: the copies and the mapped files need not fit together.
        let copied = Budget { copies: 20 * G, ..need() };
        let small = machine(32 * G, 24 * G);
        assert_eq!(copied.check(&small, MemoryLimit::HostWithin(24 * G)), Ok(()));
        assert!(copied.check(&small, MemoryLimit::HostWithin(22 * G)).is_err());
        let host = machine(64 * G, 32 * G);
        assert_eq!(need().check(&host, MemoryLimit::HostWithin(3 * G)), Ok(()));
        let refusal = need().check(&host, MemoryLimit::HostWithin(2 * G)).unwrap_err();
        let text = refusal.to_string();
        assert!(text.contains("the device may take 2.0 GiB for 3.0 GiB"), "{text}");
        assert!(text.contains("--context"), "{text}");
        assert!(need().check(&machine(22 * G, 32 * G), MemoryLimit::HostWithin(3 * G)).is_err());
    }

    #[test]
    fn units() {
        let text: Vec<String> =
            [0, 1023, 1536, 5 << 20, 3 << 40].map(|b| Bytes(b).to_string()).into();
        assert_eq!(text, ["0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3072.0 GiB"]);
    }
}
