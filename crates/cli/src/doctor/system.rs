//! What the system tells.

use std::fs;

/// The processor's name, or else the board's: Linux names no Arm processor.
#[cfg(not(target_os = "macos"))]
pub fn processor() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with("model name"));
    let name = line.and_then(|l| Some(l.split_once(':')?.1.to_owned()));
    let name = name.or_else(|| fs::read_to_string("/proc/device-tree/model").ok());
    name.map(|name| name.trim_matches([' ', '\t', '\0']).to_owned())
}

/// The processor's name.
#[cfg(target_os = "macos")]
pub fn processor() -> Option<String> {
    sysctl("machdep.cpu.brand_string")
}

/// A variable of the macOS kernel.
#[cfg(target_os = "macos")]
fn sysctl(name: &str) -> Option<String> {
    let output = std::process::Command::new("/usr/sbin/sysctl").args(["-n", name]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}

/// Cores of the machine that are switched on.
pub fn online_cores() -> Option<usize> {
    let text = fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
    text.trim().split(',').map(range).sum()
}

/// How many numbers `3` or `0-7` names.
fn range(text: &str) -> Option<usize> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
    last.checked_sub(first)?.checked_add(1)
}

/// A figure of `/proc/meminfo`, in bytes.
pub fn meminfo(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok()?.checked_mul(1024)
}

/// What the processor can do, of what matters here.
#[cfg(target_arch = "x86_64")]
pub fn features() -> Vec<&'static str> {
    let known = [
        ("avx", is_x86_feature_detected!("avx")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
        ("avxvnni", is_x86_feature_detected!("avxvnni")),
    ];
    known.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

/// What the processor can do, of what matters here.
#[cfg(target_arch = "aarch64")]
pub fn features() -> Vec<&'static str> {
    use std::arch::is_aarch64_feature_detected as has;
    let known = [
        ("neon", has!("neon")),
        ("dotprod", has!("dotprod")),
        ("fp16", has!("fp16")),
        ("i8mm", has!("i8mm")),
        ("bf16", has!("bf16")),
        ("sve", has!("sve")),
    ];
    known.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

/// What the processor can do, of what matters here.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn features() -> Vec<&'static str> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        assert_eq!(["0-7", "3", "x", "5-2", ""].map(range), [Some(8), Some(1), None, None, None]);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine() {
        assert!(online_cores() >= Some(1));
        assert!(meminfo("MemTotal:") > Some(1 << 26) && meminfo("Nonsense:").is_none());
    }
}
