//! Memory of the machine and of the container.

use longdraft_models::disk::readable_bytes;
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

use super::cgroup::Limits;
use super::finding::Finding;

const CHECK: &str = "memory";

/// Below this, even a target of 135 M parameters in f32 and its draft do not fit.
const SMALL: u64 = 2 << 30;

/// Below this no target fits.
const TINY: u64 = 128 << 20;

/// Bytes that this process may still take; `None` where the system does not tell.
pub(crate) fn available() -> Option<u64> {
    let left = Limits::of_this_process().memory.map_or(u64::MAX, |(_, left)| left);
    system().ok().map(|system| system.available_memory().min(left))
}

fn system() -> Result<System, sysinfo::Error> {
    let refresh = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    System::new_with_specifics(refresh)
}

pub(super) fn examine(limits: &Limits) -> Vec<Finding> {
    match system() {
        Ok(system) => vec![judge(system.total_memory(), system.available_memory(), limits)],
        Err(error) => {
            let remedy = "watch `memory_mib` in metrics.jsonl while training";
            vec![Finding::note(CHECK, format!("the system does not tell: {error}"), remedy)]
        }
    }
}

fn judge(total: u64, available: u64, limits: &Limits) -> Finding {
    let mut fact = format!("{} of {} available", readable_bytes(available), readable_bytes(total));
    let mut available = available;
    if let Some((most, free)) = limits.memory.filter(|(most, _)| *most < total) {
        let (most, left) = (readable_bytes(most), readable_bytes(free));
        fact = format!("{fact}; the container may hold {most}, {left} left");
        available = available.min(free);
    }
    if available < TINY {
        return Finding::problem(CHECK, fact, "end other programs or raise the container's limit")
            .blocking();
    }
    if available < SMALL {
        let remedy = "enough for the smallest targets only: end other programs, raise the \
                      container's limit, or shorten data.row_tokens";
        return Finding::note(CHECK, fact, remedy);
    }
    Finding::ok(CHECK, fact)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_container_counts_where_it_is_tighter() {
        let limited = |most, free| Limits { memory: Some((most, free)), ..Limits::default() };
        assert_eq!(judge(64 * GIB, 60 * GIB, &Limits::default()).status, Status::Ok);
        let tight = judge(64 * GIB, 60 * GIB, &limited(4 * GIB, GIB));
        assert_eq!((tight.status, tight.blocking), (Status::Note, false));
        assert!(tight.fact.contains("the container may hold 4.0 GiB, 1.0 GiB left"), "{tight:?}");
        assert!(judge(64 * GIB, 60 * GIB, &limited(GIB, 0)).blocking);
        // No limit at all is written as a huge one by some systems.
        assert_eq!(judge(8 * GIB, 4 * GIB, &limited(u64::MAX, u64::MAX)).status, Status::Ok);
    }
}
