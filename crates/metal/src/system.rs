//! What the system tells of itself, outside Metal.

/// The system, as far as the driver's decisions depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct System {
    /// Version of macOS: major and minor.
    pub os: (u32, u32),
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes that the GPU may keep, as set by hand; `None` or 0: the system's default.
    pub wired_limit: Option<u64>,
    /// GPU cores, where they can be counted.
    pub gpu_cores: Option<u32>,
}

/// `26.2.1` to `(26, 2)`.
pub fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.trim().split('.');
    let major = parts.next()?.parse().ok()?;
    let minor = parts.next().map_or(Some(0), |m| m.parse().ok())?;
    Some((major, minor))
}

/// macOS's version, from what the system says it is and from its kernel's version. To a program that was made for older systems
/// macOS tells a version that such programs understand (10.16, 16.0 for 26.0); the kernel's is always its own, and counts one
/// less: 25.2 is that of 26.2.
pub fn os_version(told: (u32, u32), kernel: Option<(u32, u32)>) -> (u32, u32) {
    // No system has ever been called so.
    let is_made_up = told >= (10, 16) && told.0 < 11 || (16..26).contains(&told.0);
    match kernel {
        Some((major, minor)) if is_made_up && major >= 25 => (major + 1, minor),
        Some((major, minor)) if is_made_up && major >= 20 => (major - 9, minor),
        _ => told,
    }
}

/// The GPU's cores in what `ioreg -rc AGXAccelerator` prints.
pub fn gpu_cores(text: &str) -> Option<u32> {
    let line = text.lines().find(|l| l.contains("\"gpu-core-count\""))?;
    line.split_once('=')?.1.trim().parse().ok().filter(|n| *n > 0)
}

#[cfg(target_os = "macos")]
impl System {
    /// Asks the kernel.
    pub fn read() -> Self {
        let versions = [c"kern.osproductversion", c"kern.osrelease"];
        let [told, kernel] = versions.map(|name| text(name).as_deref().and_then(version));
        let number = |name| bytes(name).map(|b| little_endian(&b));
        // Metal does not count cores; the registry does.
        let listed = std::process::Command::new("/usr/sbin/ioreg")
            .args(["-rc", "AGXAccelerator", "-d", "1"])
            .output();
        Self {
            os: os_version(told.unwrap_or((0, 0)), kernel),
            memory: number(c"hw.memsize").unwrap_or(0),
            wired_limit: number(c"iogpu.wired_limit_mb").map(|n| n.saturating_mul(1 << 20)),
            gpu_cores: listed.ok().and_then(|o| gpu_cores(&String::from_utf8_lossy(&o.stdout))),
        }
    }
}

/// Numbers of the kernel have 4 or 8 bytes.
#[cfg(any(target_os = "macos", test))]
fn little_endian(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    let len = bytes.len().min(8);
    all[..len].copy_from_slice(&bytes[..len]);
    u64::from_le_bytes(all)
}

#[cfg(target_os = "macos")]
fn text(name: &std::ffi::CStr) -> Option<String> {
    let mut bytes = bytes(name)?;
    bytes.retain(|b| *b != 0);
    String::from_utf8(bytes).ok()
}

/// A variable of the kernel.
#[cfg(target_os = "macos")]
fn bytes(name: &std::ffi::CStr) -> Option<Vec<u8>> {
    let mut buffer = vec![0u8; 256];
    let mut len = buffer.len();
    // SAFETY: the name ends in a zero byte; the kernel writes at most `len` bytes and says how many; nothing is set.
    let rc = unsafe {
        libc::sysctlbyname(
            name.as_ptr(),
            buffer.as_mut_ptr().cast(),
            &mut len,
            std::ptr::null_mut(),
            0,
        )
    };
    (rc == 0).then(|| {
        buffer.truncate(len);
        buffer
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        let table = [
            ("26.2", Some((26, 2))),
            ("26.2.1\n", Some((26, 2))),
            ("15", Some((15, 0))),
            ("14.7.10", Some((14, 7))),
            ("", None),
            ("x.1", None),
            ("26.x", None),
        ];
        for (text, want) in table {
            assert_eq!(version(text), want, "{text:?}");
        }
    }

    #[test]
    fn made_up_versions_are_seen_through() {
        let table = [
            ((26, 2), Some((25, 2)), (26, 2)),
            ((27, 1), Some((26, 1)), (27, 1)),
            ((15, 5), Some((24, 5)), (15, 5)),
            ((14, 7), None, (14, 7)),
            ((16, 0), Some((25, 2)), (26, 2)),
            ((16, 0), Some((26, 0)), (27, 0)),
            ((10, 16), Some((23, 4)), (14, 4)),
            ((10, 16), Some((25, 2)), (26, 2)),
            ((16, 0), None, (16, 0)),
            ((10, 15), Some((19, 6)), (10, 15)),
            ((0, 0), Some((25, 2)), (0, 0)),
        ];
        for (told, kernel, want) in table {
            assert_eq!(os_version(told, kernel), want, "{told:?} {kernel:?}");
        }
    }

    #[test]
    fn cores() {
        let text = "+-o AGXAcceleratorG16X  <class AGXAcceleratorG16X>\n    {\n      \"gpu-core-count\" = 40\n    }\n";
        assert_eq!(gpu_cores(text), Some(40));
        assert_eq!(gpu_cores("\"gpu-core-count\" = none"), None);
        assert_eq!(gpu_cores(""), None);
    }

    #[test]
    fn numbers_of_four_and_of_eight_bytes() {
        assert_eq!(little_endian(&[1, 2, 0, 0]), 513);
        assert_eq!(little_endian(&(1u64 << 40).to_le_bytes()), 1 << 40);
    }
}
