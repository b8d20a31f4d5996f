//! Memory of this process.

/// Largest resident set so far in MiB; `None` where the system does not tell. One system call.
pub fn peak_resident_mib() -> Option<f64> {
    #[cfg(unix)]
    {
        use nix::sys::resource::{UsageWho, getrusage};
        // Apple counts bytes, everybody else KiB.
        let unit = if cfg!(target_vendor = "apple") { 1.0 } else { 1024.0 };
        let usage = getrusage(UsageWho::RUSAGE_SELF).ok()?;
        Some(usage.max_rss() as f64 * unit / (1024.0 * 1024.0))
    }
    #[cfg(not(unix))]
    None
}

/// Bytes that are resident now; `None` where the system does not tell.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_peak_holds_what_was_touched() {
        let before = peak_resident_mib().expect("Linux tells");
        let touched = vec![1_u8; 96 << 20];
        let after = peak_resident_mib().expect("Linux tells");
        let now = resident_bytes().expect("Linux tells") as f64 / (1024.0 * 1024.0);
        assert!(now >= 96.0 && now <= after + 1.0, "{now} MiB now, {after} MiB at most");
        assert!(touched.iter().map(|byte| usize::from(*byte)).sum::<usize>() == 96 << 20);
        assert!(after >= 96.0 && after >= before, "{before} MiB, then {after} MiB");
    }
}
