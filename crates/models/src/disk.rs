//! Room on disks.

use std::path::Path;

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
