//! What is known of Apple's GPUs by name and family, and what each system version offers.

use lily_gpu::{Platform, Profile, Thresholds};

use crate::residency::Room;
use crate::system::System;

/// A GPU family. A device of a later family is one of all earlier ones too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// M1.
    Apple7,
    /// M2.
    Apple8,
    /// M3 and M4.
    Apple9,
    /// M5: matrix units that tensor operations reach.
    Apple10,
}

/// What a device says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// `Apple M4 Max`.
    pub name: String,
    /// Its family.
    pub family: Family,
    /// Bytes of threadgroup memory a threadgroup may have.
    pub threadgroup_memory: u64,
    /// Bytes of the largest buffer.
    pub max_buffer: u64,
    /// Bytes that it recommends to use at most.
    pub working_set: u64,
    /// Whether host and device share one memory.
    pub unified: bool,
}

impl Facts {
    /// Whether the device is that of a virtual machine: heaps and residency sets are not to be trusted there.
    pub fn is_paravirtual(&self) -> bool {
        self.name.contains("Paravirtual")
    }
}

/// What a system version offers, of what matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offers {
    /// Residency sets.
    pub residency_sets: bool,
    /// A math mode in place of the fast-math switch.
    pub math_mode: bool,
    /// Tensor operations on cooperative tensors, bf16 included.
    pub tensors: bool,
}

/// The oldest macOS whose shading language has bfloat: 3.1.
pub const OLDEST: (u32, u32) = (14, 0);

impl Offers {
    /// What `os` offers, or why Lily does not run on it.
    pub fn of(os: (u32, u32)) -> Result<Self, String> {
        if os < OLDEST {
            return Err(format!(
                "macOS {}.{} has no Metal Shading Language 3.1; {}.{} or later has",
                os.0, os.1, OLDEST.0, OLDEST.1
            ));
        }
        Ok(Self { residency_sets: os >= (15, 0), math_mode: os >= (15, 0), tensors: os >= (26, 2) })
    }
}

/// Whether tensor operations are worth a test. The Metal 4 family does not tell: M3 and M4 are of it too.
pub fn may_use_tensors(facts: &Facts, offers: &Offers) -> bool {
    facts.family >= Family::Apple10 && offers.tensors && !facts.is_paravirtual()
}

/// GPU cores at most, and bandwidth in GB/s, of the chips that are out.
const CHIPS: &[(&str, u32, f64)] = &[
    ("M1", 8, 68.0),
    ("M1 Pro", 16, 200.0),
    ("M1 Max", 32, 400.0),
    ("M1 Ultra", 64, 800.0),
    ("M2", 10, 100.0),
    ("M2 Pro", 19, 200.0),
    ("M2 Max", 38, 400.0),
    ("M2 Ultra", 76, 800.0),
    ("M3", 10, 100.0),
    ("M3 Pro", 18, 150.0),
    ("M3 Max", 40, 400.0),
    ("M3 Ultra", 80, 819.0),
    ("M4", 10, 120.0),
    ("M4 Pro", 20, 273.0),
    ("M4 Max", 40, 546.0),
    ("M5", 10, 153.0),
    ("M5 Pro", 20, 307.0),
    ("M5 Max", 40, 614.0),
];

/// Cores and bandwidth of a device: of its chip if that is known, else of the smallest of its family, so that a
/// policy errs towards less work at once.
fn chip(facts: &Facts) -> (u32, f64) {
    let name = facts.name.trim().strip_prefix("Apple ").unwrap_or(&facts.name);
    let known = CHIPS.iter().find(|(chip, _, _)| *chip == name);
    known.map_or_else(
        || match facts.family {
            Family::Apple7 => (8, 68.0),
            Family::Apple8 => (10, 100.0),
            Family::Apple9 => (10, 100.0),
            Family::Apple10 => (10, 153.0),
        },
        |(_, cores, bandwidth)| (*cores, *bandwidth),
    )
}

/// The profile of a device. `tensors`: whether its texts may use tensor operations.
pub fn profile(facts: &Facts, system: &System, room: &Room, tensors: bool) -> Profile {
    let (cores, bandwidth) = chip(facts);
    let platform = if tensors { Platform::MetalTensor } else { Platform::Metal };
    Profile {
        name: facts.name.clone(),
        platform,
        mma: false,
        wgmma: false,
        cores: system.gpu_cores.unwrap_or(cores),
        threadgroup_memory: facts.threadgroup_memory.min(u64::from(u32::MAX)) as u32,
        large_memory: 0,
        threads_per_core: 1024,
        max_buffer: facts.max_buffer,
        memory: room.bytes(),
        bandwidth: bandwidth * 1e9,
        macs: None,
        unified: facts.unified,
        thresholds: Thresholds::of(platform, facts.name.trim()),
    }
}

/// Multiply-adds that a core does in a second on matrix tiles, low: a first guess that measured times correct.
const MACS_PER_CORE: f64 = 40e9;

/// Multiply-adds of a device in a second, as a first guess.
pub fn macs_per_second(profile: &Profile) -> f64 {
    f64::from(profile.cores.max(1)) * MACS_PER_CORE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(name: &str, family: Family) -> Facts {
        let name = name.into();
        let (max_buffer, working_set) = (38 << 30, 48 << 30);
        Facts { name, family, threadgroup_memory: 32768, max_buffer, working_set, unified: true }
    }

    fn system(os: (u32, u32)) -> System {
        System { os, memory: 64 << 30, wired_limit: None, gpu_cores: None }
    }

    #[test]
    fn chips_become_profiles() {
        // Name, family, cores, GB/s: those that are known by name, and strangers.
        let table = [
            ("Apple M1", Family::Apple7, 8, 68.0),
            ("Apple M1 Max", Family::Apple7, 32, 400.0),
            ("Apple M2 Ultra", Family::Apple8, 76, 800.0),
            ("Apple M3 Pro", Family::Apple9, 18, 150.0),
            ("Apple M4 Max", Family::Apple9, 40, 546.0),
            ("Apple M5", Family::Apple10, 10, 153.0),
            ("Apple M9 Max", Family::Apple10, 10, 153.0),
            ("Apple Paravirtual device", Family::Apple7, 8, 68.0),
            ("", Family::Apple8, 10, 100.0),
        ];
        for (name, family, cores, bandwidth) in table {
            let facts = facts(name, family);
            let system = system((26, 2));
            let p = profile(&facts, &system, &Room::of(&facts, &system), false);
            assert_eq!((p.cores, p.bandwidth / 1e9), (cores, bandwidth), "{name}");
            assert_eq!((p.threadgroup_memory, p.unified), (32768, true));
        }
    }

    #[test]
    fn counted_cores_go_before_the_table() {
        let facts = facts("Apple M4 Max", Family::Apple9);
        let system = System { gpu_cores: Some(32), ..system((15, 0)) };
        let room = Room::of(&facts, &system);
        assert_eq!(profile(&facts, &system, &room, false).cores, 32);
        assert_eq!(profile(&facts, &system, &room, true).platform, Platform::MetalTensor);
    }

    #[test]
    fn profiles_agree_with_those_known_by_name() {
        for (name, chip, family) in [
            ("m1-max", "Apple M1 Max", Family::Apple7),
            ("m2-max", "Apple M2 Max", Family::Apple8),
            ("m3-max", "Apple M3 Max", Family::Apple9),
            ("m4-max", "Apple M4 Max", Family::Apple9),
            ("m5", "Apple M5", Family::Apple10),
            ("m5-max", "Apple M5 Max", Family::Apple10),
        ] {
            let want = Profile::named(name).unwrap();
            let (facts, system) = (facts(chip, family), system((26, 2)));
            let tensors = may_use_tensors(&facts, &Offers::of(system.os).unwrap());
            let got = profile(&facts, &system, &Room::of(&facts, &system), tensors);
            let of = |p: &Profile| (p.cores, p.bandwidth, p.platform, p.threads_per_core);
            assert_eq!(of(&got), of(&want), "{name}");
        }
    }

    #[test]
    fn system_versions_gate_what_is_used() {
        let none = Offers { residency_sets: false, math_mode: false, tensors: false };
        let sets = Offers { residency_sets: true, math_mode: true, tensors: false };
        let table = [
            ((13, 6), None),
            ((14, 0), Some(none)),
            ((14, 7), Some(none)),
            ((15, 0), Some(sets)),
            ((26, 1), Some(sets)),
            ((26, 2), Some(Offers { tensors: true, ..sets })),
            ((27, 0), Some(Offers { tensors: true, ..sets })),
        ];
        for (os, want) in table {
            assert_eq!(Offers::of(os).ok(), want, "{os:?}");
        }
        assert!(Offers::of((13, 6)).unwrap_err().contains("14.0 or later"));
    }

    #[test]
    fn tensors_need_family_system_and_a_real_device() {
        let may = |name, family, os| {
            may_use_tensors(&facts(name, family), &Offers::of(os).expect("a version that runs"))
        };
        assert!(may("Apple M5", Family::Apple10, (26, 2)));
        assert!(!may("Apple M5", Family::Apple10, (26, 1)));
        assert!(!may("Apple M4 Max", Family::Apple9, (26, 2)));
        assert!(!may("Apple Paravirtual device", Family::Apple10, (26, 2)));
    }
}
