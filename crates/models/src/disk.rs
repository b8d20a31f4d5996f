//! Room on disks, and sizes as people read them.

use std::path::Path;

/// Bytes in the largest unit of which there is one at least.
pub fn readable_bytes(bytes: u64) -> String {
    let (mut size, mut unit) = (bytes as f64, "B");
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if size < 1024.0 {
            break;
        }
        (size, unit) = (size / 1024.0, larger);
    }
    let digits = usize::from(matches!(unit, "GiB" | "TiB"));
    format!("{size:.digits$} {unit}")
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
        let shown = [0, 1023, 1024, 200 << 20, 3 << 29, 12 << 40].map(super::readable_bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1 KiB", "200 MiB", "1.5 GiB", "12.0 TiB"]);
        // A thousand times the largest unit is told in it.
        assert_eq!(super::readable_bytes(5000 << 40), "5000.0 TiB");
    }
}
