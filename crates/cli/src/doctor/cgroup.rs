//! Limits that a container or a batch system sets through cgroup v2.
//!
//! A process belongs to one group (`0::/path` in `/proc/self/cgroup`); every group on the way up
//! may set limits, and the tightest one holds.

use std::path::{Path, PathBuf};

/// Tightest limits; none where nothing is limited, or where there are no cgroups.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Limits {
    /// Cores' worth of time.
    pub(crate) cpus: Option<f64>,
    /// Bytes that the group may hold, and how many of them are free or can be freed.
    pub(crate) memory: Option<(u64, u64)>,
}

impl Limits {
    /// Of the group that this process is in.
    pub(crate) fn of_this_process() -> Self {
        match std::fs::read_to_string("/proc/self/cgroup") {
            Ok(text) => Self::read(Path::new("/sys/fs/cgroup"), &text),
            Err(_) => Self::default(),
        }
    }

    /// `groups` is the text of `/proc/self/cgroup`; `root` is where cgroups are mounted.
    pub(crate) fn read(root: &Path, groups: &str) -> Self {
        let mut limits = Self::default();
        for folder in folders(root, groups) {
            let file = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
            if let Some(cpus) = file("cpu.max").and_then(|text| parse_cpu_max(&text)) {
                limits.cpus = Some(limits.cpus.map_or(cpus, |tighter| tighter.min(cpus)));
            }
            let Some(most) = file("memory.max").and_then(|text| parse_memory_max(&text)) else {
                continue;
            };
            let used = file("memory.current").and_then(|text| text.trim().parse().ok());
            let freeable = file("memory.stat").and_then(|text| stat(&text, "inactive_file"));
            let used = u64::saturating_sub(used.unwrap_or(0), freeable.unwrap_or(0));
            let here = (most, most.saturating_sub(used));
            limits.memory = Some(
                limits.memory.map_or(here, |other| (other.0.min(here.0), other.1.min(here.1))),
            );
        }
        limits
    }
}

/// The process's group and those above it. Inside a container the path may be that of the host,
/// of which only the mounted root is seen.
fn folders(root: &Path, groups: &str) -> Vec<PathBuf> {
    let Some(path) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return Vec::new();
    };
    let path = Path::new(path);
    let inside = path.components().all(|part| matches!(part, std::path::Component::Normal(_)));
    let path = if inside { path } else { Path::new("") };
    path.ancestors().map(|part| root.join(part)).collect()
}

/// `quota period` in microseconds; `max` is no limit.
fn parse_cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0.0 && quota > 0.0 && quota.is_finite()).then_some(quota / period)
}

/// Bytes; `max` is no limit.
fn parse_memory_max(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// A line `name value`.
fn stat(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, files: &[(&str, &str)]) {
        std::fs::create_dir_all(path).expect("folder");
        for (name, text) in files {
            std::fs::write(path.join(name), text).expect("file");
        }
    }

    #[test]
    fn the_tightest_limit_on_the_way_up_holds() {
        let dir = tempfile::tempdir().expect("tempdir");
        let root = dir.path();
        write(root, &[("cpu.max", "800000 100000\n")]);
        write(&root.join("pod"), &[("cpu.max", "250000 100000\n"), ("memory.max", "max\n")]);
        let files = [
            ("cpu.max", "max 100000\n"),
            ("memory.max", "1073741824\n"),
            ("memory.current", "805306368\n"),
            ("memory.stat", "anon 5\ninactive_file_x 7\ninactive_file 268435456\n"),
        ];
        write(&root.join("pod/job"), &files);
        let limits = Limits::read(root, "1:name=systemd:/x\n0::/pod/job\n");
        assert_eq!(limits.cpus, Some(2.5));
        assert_eq!(limits.memory, Some((1 << 30, 1 << 29)));
    }

    #[test]
    fn a_container_sees_its_limits_at_the_root() {
        let dir = tempfile::tempdir().expect("tempdir");
        write(dir.path(), &[("cpu.max", "150000 100000"), ("memory.max", "4096")]);
        for groups in ["0::/\n", "0::/../../kubepods/x\n", "0::/not/here\n"] {
            let limits = Limits::read(dir.path(), groups);
            assert_eq!((limits.cpus, limits.memory), (Some(1.5), Some((4096, 4096))), "{groups}");
        }
    }

    #[test]
    fn no_limits_are_none() {
        let dir = tempfile::tempdir().expect("tempdir");
        write(dir.path(), &[("cpu.max", "max 100000\n"), ("memory.max", "max\n")]);
        assert_eq!(Limits::read(dir.path(), "0::/\n"), Limits::default());
        // cgroup v1 only, and nonsense.
        assert_eq!(Limits::read(dir.path(), "4:memory:/docker/x\n"), Limits::default());
        write(dir.path(), &[("cpu.max", "lots 0\n"), ("memory.max", "-1\n")]);
        assert_eq!(Limits::read(dir.path(), "0::/\n"), Limits::default());
    }
}
