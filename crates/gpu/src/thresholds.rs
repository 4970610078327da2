//! Numbers at which policies change from one form to another: what a device may want otherwise.
//!
//! Kernels fix the rest: the height of tiles, tokens of the smallest split, a chunk of the recurrence, threadgroup memory of
//! products by matrix units; and what only CUDA has is a constant beside its policy (widths of tiles by matrix units, blocks a threadgroup). `lily doctor --self-test --measure` measures each threshold on both sides and proposes rows for
//! the table below.

use crate::profile::{Platform, Profile};

/// Every policy's thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Thresholds {
    /// A prompt's step of so many rows at most is multiplied by vectors, row by row; of more by tiles. Decode steps always
    /// go by vectors: a row's bits must not depend on how many there are.
    pub vector_rows: u32,
    /// Likewise its experts: row by row, or grouped by expert.
    pub expert_rows: u32,
    /// Lanes that share a row of a matrix at most.
    pub gemv_lanes: u32,
    /// Simdgroups of a threadgroup of vectors, which share the work of fetching x.
    pub gemv_simds: u32,
    /// A core's threads divided by those of vectors that it runs at once, whose registers are many.
    pub gemv_share: u32,
    /// A norm is repeated by every threadgroup that reads it for so many rows at most.
    pub norm_rows: u32,
    /// Likewise, where the launch has so many simdgroups a core at most.
    pub norm_groups: u32,
    /// Threadgroups a core from which on tiles are 64 columns wide, not 32.
    pub tile_groups: u32,
    /// Threadgroups a core that the splits of one slot's cache make.
    pub split_groups: u32,
    /// From so many tokens on a slot's splits are whole pages, where the shape allows.
    pub fixed_from: u32,
    /// Query rows of a simdgroup of flash attention: 8 or 16. CUDA has 16 only.
    pub flash_rows: u32,
    /// Simdgroups a core from which on a simdgroup convolves more rows.
    pub conv_groups: u32,
    /// Simdgroups a core from which on a simdgroup of the scan keeps more rows of the state.
    pub scan_groups: u32,
    /// Tokens of a dispatch of the scan at most: the state goes through memory between two.
    pub scan_tokens: u32,
    /// With `mma.sync`: rows from which on a segment goes through the recurrence chunk by chunk.
    pub chunked_from: u32,
}

impl Thresholds {
    /// Chosen on an H200, where each was better than its neighbours.
    const H200: Self = Self {
        vector_rows: 8,
        expert_rows: 8,
        gemv_lanes: 32,
        gemv_simds: 8,
        gemv_share: 4,
        // By matrix units the norm of more rows costs more than a launch.
        norm_rows: 2,
        norm_groups: 512,
        tile_groups: 2,
        // Two hide each other's memory latency; more only make more partial sums: 1,032 bytes for a head and split against
        // 65,536 of K and V.
        split_groups: 2,
        fixed_from: 32 << 10,
        // mma.sync has tiles of 16 rows, and 255 registers hold 16 · 256 sums and as many queries.
        flash_rows: 16,
        // 16 a core hide the latency of memory, 64 are what a multiprocessor holds.
        conv_groups: 16,
        scan_groups: 12,
        scan_tokens: u32::MAX,
        chunked_from: 32,
    };

    /// Reckoned for Apple's GPUs; none was measured.
    const APPLE: Self = Self {
        // 8 rows are 64 registers of sums for a head of 256; 16 would be 128, which Apple's cores spill.
        flash_rows: 8,
        // Nothing may keep the screen waiting, and a segment's tokens cannot be shared by dispatches that run at once.
        scan_tokens: 1024,
        ..Self::H200
    };

    /// Those of a device: its platform's, and what a sweep on it has changed.
    pub fn of(platform: Platform, name: &str) -> Self {
        Self::with_rows(platform, name, DEVICES)
    }

    fn with_rows(platform: Platform, name: &str, devices: &[Row]) -> Self {
        let mut all = match platform {
            Platform::Metal | Platform::MetalTensor => Self::APPLE,
            Platform::Cuda | Platform::Host | Platform::HostUnits => Self::H200,
        };
        let rows = devices.iter().filter(|(device, _)| *device == name);
        for (threshold, value) in rows.flat_map(|(_, row)| row.iter()) {
            if let Some(t) = Threshold::named(threshold) {
                *(t.field)(&mut all) = *value;
            }
        }
        all
    }

    /// Sets one by name.
    pub fn set(&mut self, name: &str, value: u32) -> Result<(), String> {
        let Some(t) = Threshold::named(name) else {
            let names: Vec<&str> = ALL.iter().map(|t| t.name).collect();
            return Err(format!("there is no threshold {name}; there are {}", names.join(", ")));
        };
        if !(t.takes)(value) {
            return Err(format!("{name} cannot be {value}: {}", t.about));
        }
        *(t.field)(self) = value;
        Ok(())
    }
}

/// A device by its profile's name, and its thresholds that differ from its platform's.
type Row = (&'static str, &'static [(&'static str, u32)]);

/// What sweeps have found. The H200's are its platform's.
const DEVICES: &[Row] = &[("NVIDIA H200", &[])];

/// A step whose kernels a threshold changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Point {
    /// A token for each of some slots, each `context` long after it.
    Decode {
        /// Slots.
        slots: u32,
        /// Tokens of each.
        context: u32,
    },
    /// The last rows of a prompt of `context` tokens.
    Prompt {
        /// Rows.
        rows: u32,
        /// Tokens of the slot after it.
        context: u32,
    },
}

impl std::fmt::Display for Point {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Decode { slots, context } => write!(f, "{slots} slots of {context} tokens"),
            Self::Prompt { rows, context } => write!(f, "{rows} rows of a prompt of {context}"),
        }
    }
}

/// One threshold: its place, what it may be, and what is to be measured where.
pub struct Threshold {
    /// Its name: that of the field.
    pub name: &'static str,
    /// Its place.
    pub field: fn(&mut Thresholds) -> &mut u32,
    /// What it may be, in words.
    pub about: &'static str,
    /// Whether it may be so much.
    pub takes: fn(u32) -> bool,
    /// Values that are worth a measurement on a device; fewer than two: there is nothing to choose.
    pub values: fn(&Profile) -> &'static [u32],
    /// Steps on both sides of it.
    pub points: &'static [Point],
}

impl Threshold {
    /// The threshold of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        ALL.iter().find(|t| t.name == name)
    }
}

const fn prompt(rows: u32, context: u32) -> Point {
    Point::Prompt { rows, context }
}

const fn decode(slots: u32, context: u32) -> Point {
    Point::Decode { slots, context }
}

/// Prompts' ends of few rows.
const FEW_ROWS: &[Point] = &[prompt(2, 1024), prompt(4, 1024), prompt(6, 1024), prompt(8, 1024)];
/// Decode steps of one and of more slots.
const FEW_SLOTS: &[Point] = &[decode(1, 1024), decode(2, 1024), decode(4, 1024), decode(8, 1024)];
const PROMPTS: &[Point] =
    &[prompt(32, 2048), prompt(64, 2048), prompt(128, 2048), prompt(512, 2048)];
const CACHES: &[Point] = &[decode(1, 1024), decode(1, 4096), decode(1, 16_384), decode(4, 4096)];
const LONG_CACHES: &[Point] =
    &[decode(1, 8192), decode(1, 16_384), decode(1, 32_768), decode(1, 65_536)];
const LONG_PROMPTS: &[Point] = &[prompt(64, 2048), prompt(512, 8192), prompt(2048, 8192)];

fn is_cuda(profile: &Profile) -> bool {
    profile.platform == Platform::Cuda
}

/// All thresholds.
pub const ALL: &[Threshold] = &[
    Threshold {
        name: "vector_rows",
        field: |t| &mut t.vector_rows,
        about: "1 to 8, the rows that kernels of vectors take",
        takes: |n| (1..=8).contains(&n),
        values: |_| &[1, 2, 4, 6, 8],
        points: FEW_ROWS,
    },
    Threshold {
        name: "expert_rows",
        field: |t| &mut t.expert_rows,
        about: "1 to 8, the rows that kernels of vectors take",
        takes: |n| (1..=8).contains(&n),
        values: |_| &[1, 2, 4, 6, 8],
        points: FEW_ROWS,
    },
    Threshold {
        name: "gemv_lanes",
        field: |t| &mut t.gemv_lanes,
        about: "a power of two up to 32",
        takes: |n| n.is_power_of_two() && n <= 32,
        values: |_| &[8, 16, 32],
        points: FEW_SLOTS,
    },
    Threshold {
        name: "gemv_simds",
        field: |t| &mut t.gemv_simds,
        about: "1 to 8 simdgroups",
        takes: |n| (1..=8).contains(&n),
        values: |_| &[2, 4, 8],
        points: FEW_SLOTS,
    },
    Threshold {
        name: "gemv_share",
        field: |t| &mut t.gemv_share,
        about: "1 to 16",
        takes: |n| (1..=16).contains(&n),
        values: |_| &[1, 2, 4, 8],
        points: FEW_SLOTS,
    },
    Threshold {
        name: "norm_rows",
        field: |t| &mut t.norm_rows,
        about: "0 to 8 rows; by matrix units 2 at most",
        takes: |n| n <= 8,
        values: |p| if p.mma { &[0, 1, 2] } else { &[0, 1, 2, 4, 8] },
        points: FEW_SLOTS,
    },
    Threshold {
        name: "norm_groups",
        field: |t| &mut t.norm_groups,
        about: "up to 65536 simdgroups a core",
        takes: |n| n <= 1 << 16,
        values: |_| &[0, 128, 512, 2048],
        points: &[decode(1, 1024), decode(2, 1024)],
    },
    Threshold {
        name: "tile_groups",
        field: |t| &mut t.tile_groups,
        about: "up to 1024 threadgroups a core",
        takes: |n| n <= 1024,
        // Tiles by matrix units have widths of their own.
        values: |p| if p.mma { &[] } else { &[1, 2, 4, 8] },
        points: PROMPTS,
    },
    Threshold {
        name: "split_groups",
        field: |t| &mut t.split_groups,
        about: "1 to 64 threadgroups a core",
        takes: |n| (1..=64).contains(&n),
        values: |_| &[1, 2, 4, 8],
        points: CACHES,
    },
    Threshold {
        name: "fixed_from",
        field: |t| &mut t.fixed_from,
        about: "256 tokens or more",
        takes: |n| n >= 256,
        values: |_| &[8192, 16_384, 32_768, 65_536, u32::MAX],
        points: LONG_CACHES,
    },
    Threshold {
        name: "flash_rows",
        field: |t| &mut t.flash_rows,
        about: "8 or 16 rows",
        takes: |n| n == 8 || n == 16,
        values: |p| if is_cuda(p) { &[16] } else { &[8, 16] },
        points: LONG_PROMPTS,
    },
    Threshold {
        name: "conv_groups",
        field: |t| &mut t.conv_groups,
        about: "1 to 256 simdgroups a core",
        takes: |n| (1..=256).contains(&n),
        values: |_| &[4, 8, 16, 32],
        points: LONG_PROMPTS,
    },
    Threshold {
        name: "scan_groups",
        field: |t| &mut t.scan_groups,
        about: "1 to 256 simdgroups a core",
        takes: |n| (1..=256).contains(&n),
        values: |_| &[3, 6, 12, 24],
        points: &[prompt(16, 2048), prompt(512, 2048), decode(4, 1024)],
    },
    Threshold {
        name: "scan_tokens",
        field: |t| &mut t.scan_tokens,
        about: "32 tokens or more",
        takes: |n| n >= 32,
        values: |p| if p.mma { &[] } else { &[256, 1024, 4096] },
        points: &[prompt(2048, 8192)],
    },
    Threshold {
        name: "chunked_from",
        field: |t| &mut t.chunked_from,
        about: "1 row or more",
        takes: |n| n >= 1,
        values: |p| if p.mma { &[16, 32, 64, 128] } else { &[] },
        points: &[prompt(16, 2048), prompt(32, 2048), prompt(64, 2048), prompt(128, 2048)],
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILES: [&str; 5] = ["m1-max", "m4-max", "m5", "h200", "softgpu"];

    #[test]
    fn each_name_is_its_own_field_and_takes_what_is_in_force() {
        for profile in PROFILES.map(|name| Profile::named(name).unwrap()) {
            let mut seen = std::collections::HashSet::new();
            for t in ALL {
                let mut changed = profile.thresholds;
                let now = *(t.field)(&mut changed);
                assert!((t.takes)(now), "{} of {} is {now}", t.name, profile.name);
                *(t.field)(&mut changed) ^= 1 << 20;
                assert!(seen.insert(changed), "{} is another one's field", t.name);
                assert!((t.values)(&profile).iter().all(|v| (t.takes)(*v)), "{}", t.name);
                assert!(!t.points.is_empty());
            }
            let fields = format!("{:?}", profile.thresholds).matches(": ").count();
            assert_eq!(ALL.len(), fields);
        }
    }

    #[test]
    fn what_matrix_units_do_without_has_no_values() {
        let values = |profile: &str, name: &str| {
            let profile = Profile::named(profile).unwrap();
            (Threshold::named(name).unwrap().values)(&profile).len()
        };
        for (name, without, with) in
            [("tile_groups", 4, 0), ("scan_tokens", 3, 0), ("chunked_from", 0, 4)]
        {
            assert_eq!((values("m4-max", name), values("h200", name)), (without, with), "{name}");
        }
    }

    #[test]
    fn a_devices_row_changes_its_platforms() {
        let rows: &[Row] = &[("Apple M4 Max", &[("split_groups", 4), ("vector_rows", 6)])];
        let of = |name| Thresholds::with_rows(Platform::Metal, name, rows);
        let want = Thresholds { split_groups: 4, vector_rows: 6, ..Thresholds::APPLE };
        assert_eq!((of("Apple M4 Max"), of("Apple M4")), (want, Thresholds::APPLE));
        for (_, row) in DEVICES {
            assert!(row.iter().all(|(n, v)| Threshold::named(n).is_some_and(|t| (t.takes)(*v))));
        }
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_can() {
        let mut t = Thresholds::H200;
        assert_eq!((t.set("gemv_lanes", 8), t.gemv_lanes), (Ok(()), 8));
        assert!(t.set("gemv_lanes", 12).unwrap_err().contains("power of two"));
        assert!(t.set("lanes", 12).unwrap_err().contains("gemv_lanes"));
        assert_eq!(t.gemv_lanes, 8);
    }
}
