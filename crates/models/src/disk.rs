//! Room on disks, and sizes as people read them.

use std::path::Path;

/// Bytes in MiB or GiB.
pub fn readable_bytes(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 { format!("{mib:.0} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

/// Free bytes for this user where a path lies, or will lie; `None` where the system does not tell.
pub fn free_bytes(path: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let absolute = std::path::absolute(path).ok()?;
        let existing = absolute.ancestors().find(|path| path.exists())?;
        let statistics = nix::sys::statvfs::statvfs(existing).ok()?;
        #[allow(clippy::useless_conversion, reason = "the width differs between systems")]
        let (blocks, size) =
            (u64::from(statistics.blocks_available()), u64::from(statistics.fragment_size()));
        blocks.checked_mul(size)
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        None
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn sizes_have_the_unit_that_fits() {
        assert_eq!(super::readable_bytes(3 << 29), "1.5 GiB");
        assert_eq!(super::readable_bytes(200 << 20), "200 MiB");
        assert_eq!(super::readable_bytes(0), "0 MiB");
    }
}
