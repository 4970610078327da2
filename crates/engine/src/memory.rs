//! How much memory the machine has, as far as the system tells.

/// Memory of the machine, or of the container the process runs in. `None` where it is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Bytes in all: physical memory or the container's limit, whichever is less.
    pub total: Option<u64>,
    /// Bytes that can be allocated now without swapping; file pages count, as they can be dropped.
    pub available: Option<u64>,
}

impl Machine {
    /// A machine that tells nothing: no budget is refused for its sake.
    pub const UNKNOWN: Self = Self { total: None, available: None };

    /// The machine this process runs on.
    pub fn detect() -> Self {
        detect()
    }
}

#[cfg(target_os = "linux")]
fn detect() -> Machine {
    linux::detect(std::path::Path::new("/proc"), std::path::Path::new("/sys/fs/cgroup"))
}

#[cfg(target_os = "macos")]
#[allow(unsafe_code)]
fn detect() -> Machine {
    let mut bytes = 0u64;
    let mut size = std::mem::size_of::<u64>();
    // SAFETY: the name is a C string, `bytes` is writable for the `size` bytes given, and nothing is set.
    let rc = unsafe {
        libc::sysctlbyname(
            c"hw.memsize".as_ptr(),
            (&raw mut bytes).cast(),
            &raw mut size,
            std::ptr::null_mut(),
            0,
        )
    };
    let known = rc == 0 && size == std::mem::size_of::<u64>();
    Machine { total: known.then_some(bytes), available: None }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn detect() -> Machine {
    Machine::UNKNOWN
}

#[cfg(any(target_os = "linux", test))]
mod linux {
    use std::fs::read_to_string;
    use std::path::{Path, PathBuf};

    use super::Machine;

    /// Names of one version of the memory controller's files.
    struct Controller {
        limit: &'static str,
        usage: &'static str,
        file_pages: [&'static str; 2],
    }

    const V1: Controller = Controller {
        limit: "memory.limit_in_bytes",
        usage: "memory.usage_in_bytes",
        file_pages: ["total_active_file", "total_inactive_file"],
    };
    const V2: Controller = Controller {
        limit: "memory.max",
        usage: "memory.current",
        file_pages: ["active_file", "inactive_file"],
    };

    /// Reads `/proc` and `/sys/fs/cgroup`, given as paths so that tests can write their own.
    pub fn detect(proc: &Path, cgroup: &Path) -> Machine {
        let meminfo = read_to_string(proc.join("meminfo")).unwrap_or_default();
        let kib = |name: &str| field(&meminfo, name).map(|k| k * 1024);
        let mut machine = Machine { total: kib("MemTotal:"), available: kib("MemAvailable:") };
        let limits = read_to_string(proc.join("self/limits")).unwrap_or_default();
        if let Some(space) = soft_limit(&limits, "Max address space") {
            lower(&mut machine.total, space);
            lower(&mut machine.available, space);
        }
        if let Some(data) = soft_limit(&limits, "Max data size") {
            lower(&mut machine.available, data);
        }
        let membership = read_to_string(proc.join("self/cgroup")).unwrap_or_default();
        for line in membership.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
                continue;
            };
            if controllers.is_empty() {
                apply(&mut machine, &V2, cgroup, path);
            } else if controllers.split(',').any(|c| c == "memory") {
                apply(&mut machine, &V1, &cgroup.join("memory"), path);
            }
        }
        machine
    }

    fn lower(known: &mut Option<u64>, bound: u64) {
        *known = Some(known.map_or(bound, |k| k.min(bound)));
    }

    /// A soft limit of the process in bytes, if it has one (`ulimit`).
    fn soft_limit(limits: &str, name: &str) -> Option<u64> {
        let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// Lowers the machine's memory to what the group at `path` and all groups above it allow.
    fn apply(machine: &mut Machine, files: &Controller, root: &Path, path: &str) {
        for group in groups(root, path) {
            let read = |file| read_to_string(group.join(file)).ok();
            // "max" is no limit; version 1 has a huge number instead, which lowers nothing.
            let limit = read(files.limit).and_then(|l| l.trim().parse::<u64>().ok());
            let Some(limit) = limit.filter(|&l| machine.total.is_none_or(|t| l < t)) else {
                continue;
            };
            lower(&mut machine.total, limit);
            let usage = read(files.usage).and_then(|u| u.trim().parse::<u64>().ok()).unwrap_or(0);
            let stat = read("memory.stat").unwrap_or_default();
            let droppable = files.file_pages.iter().filter_map(|n| field(&stat, n)).sum();
            lower(&mut machine.available, limit.saturating_sub(usage.saturating_sub(droppable)));
        }
    }

    /// The directory of a group and of all above it. Inside a container the path may be that of the host,
    /// which does not exist here: its missing directories have no files and are passed over.
    fn groups(root: &Path, path: &str) -> Vec<PathBuf> {
        let inside = Path::new(path.trim_start_matches('/'));
        if inside.components().any(|c| c.as_os_str() == "..") {
            return vec![root.to_path_buf()];
        }
        inside.ancestors().map(|a| root.join(a)).collect()
    }

    /// The number after `name` at the start of a line.
    fn field(text: &str, name: &str) -> Option<u64> {
        text.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
        })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        const MEMINFO: &str = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable:   600 kB\n";

        /// Detects on a file tree.
        fn on(files: &[(&str, &str)]) -> Machine {
            let dir = tempfile::tempdir().unwrap();
            for (name, text) in files {
                let file = dir.path().join(name);
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(file, text).unwrap();
            }
            detect(&dir.path().join("proc"), &dir.path().join("cg"))
        }

        fn machine(total: u64, available: u64) -> Machine {
            Machine { total: Some(total), available: Some(available) }
        }

        #[test]
        fn plain_machine() {
            assert_eq!(on(&[("proc/meminfo", MEMINFO)]), machine(1_024_000, 614_400));
            assert_eq!(on(&[]), Machine::UNKNOWN);
        }

        #[test]
        fn cgroup_v2_of_the_process_and_above_it() {
            let files = [
                ("proc/meminfo", MEMINFO),
                ("proc/self/cgroup", "0::/a/b\n"),
                ("cg/a/b/memory.max", "max\n"),
                ("cg/a/memory.max", "500000\n"),
                ("cg/a/memory.current", "300000\n"),
                ("cg/a/memory.stat", "anon 1\nactive_file 50000\ninactive_file 150000\nx 9\n"),
            ];
            assert_eq!(on(&files), machine(500_000, 400_000));
        }

        #[test]
        fn cgroup_v1_beside_a_version_2_without_memory() {
            let files = [
                ("proc/meminfo", MEMINFO),
                ("proc/self/cgroup", "4:cpu,memory:/host/only\n0::/\n"),
                ("cg/memory/memory.limit_in_bytes", "400000"),
                ("cg/memory/memory.usage_in_bytes", "100000"),
                ("cg/memory/memory.stat", "active_file 7\ntotal_active_file 60000\n"),
            ];
            assert_eq!(on(&files), machine(400_000, 360_000));
        }

        #[test]
        fn limits_that_limit_nothing() {
            let files = [
                ("proc/meminfo", MEMINFO),
                ("proc/self/cgroup", "4:memory:/\n0::/../..\nbroken\n"),
                ("cg/memory/memory.limit_in_bytes", "9223372036854771712"),
                ("cg/memory.max", "nonsense"),
            ];
            assert_eq!(on(&files), machine(1_024_000, 614_400));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    fn this_machine_has_memory() {
        assert!(Machine::detect().total.unwrap() > 1 << 26);
    }
}
