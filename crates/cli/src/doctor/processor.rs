//! Cores, threads, instruction sets.

use longdraft_kernels::dispatch::{has_avx2_fma, has_avx512};
use longdraft_kernels::matrix::block_products;
use sysinfo::{CpuRefreshKind, RefreshKind, System};

use super::cgroup::Limits;
use super::finding::Finding;
use crate::terminal::counted;

/// What is known of cores and threads.
#[derive(Debug, Clone, Copy)]
struct Cores {
    physical: Option<usize>,
    logical: usize,
    /// That this process may use: affinity and quota are taken into account.
    available: usize,
    /// That commands run with.
    threads: usize,
    quota: Option<f64>,
}

/// Widest instruction set that the kernels are compiled for and this processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    Avx512,
    Avx2,
    Neon,
    Plain,
}

/// The processor's own name, where the system tells.
pub(crate) fn processor_name() -> Option<String> {
    brand(&system()?)
}

/// Logical processors of this machine, whatever this process is bound to; 0 where the system does not tell.
pub(crate) fn processors() -> usize {
    system().map_or(0, |system| system.cpus().len())
}

fn system() -> Option<System> {
    let refresh = RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing());
    System::new_with_specifics(refresh).ok()
}

fn brand(system: &System) -> Option<String> {
    let brand = system.cpus().first()?.brand().trim();
    (!brand.is_empty()).then(|| brand.to_owned())
}

pub(super) fn examine(limits: &Limits) -> Vec<Finding> {
    let system = system();
    let brand = system.as_ref().and_then(brand).unwrap_or_default();
    let logical = system.as_ref().map_or(0, |system| system.cpus().len());
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = Cores {
        physical: System::physical_core_count().ok(),
        logical: logical.max(available),
        available,
        threads: rayon::current_num_threads(),
        quota: limits.cpus,
    };
    vec![judge_cores(&brand, &cores), judge_threads(&cores), judge_width(width(), block_products())]
}

fn judge_cores(brand: &str, cores: &Cores) -> Finding {
    let brand = if brand.is_empty() { String::new() } else { format!("{brand}: ") };
    let physical = cores.physical.map_or_else(String::new, |count| format!("{count} cores, "));
    let available = if cores.available < cores.logical {
        format!(", {} of them for this process", cores.available)
    } else {
        String::new()
    };
    let quota = cores.quota.map_or_else(String::new, |quota| {
        format!("; the container may use the time of {quota:.1} of them")
    });
    let logical = cores.logical;
    let fact = format!("{brand}{physical}{logical} hardware threads{available}{quota}");
    Finding::ok("processor", fact)
}

fn judge_threads(cores: &Cores) -> Finding {
    let Cores { threads, available, .. } = *cores;
    let fact = format!("commands run with {}", counted(threads, "thread"));
    let most = cores.quota.map_or(available, |quota| available.min(quota.ceil().max(1.0) as usize));
    if threads > most {
        let fact = format!("{fact}, more than the {most} that can run at a time");
        return Finding::note(
            "threads",
            fact,
            format!("give --threads {most}: they slow each other"),
        );
    }
    if threads < most {
        let remedy = format!("unset RAYON_NUM_THREADS or give --threads {most} to use all");
        return Finding::note("threads", format!("{fact}; {most} could run at a time"), remedy);
    }
    Finding::ok("threads", fact)
}

fn width() -> Width {
    match (has_avx2_fma(), has_avx512()) {
        (_, true) => Width::Avx512,
        (true, false) => Width::Avx2,
        // Every such processor has it.
        _ if cfg!(target_arch = "aarch64") => Width::Neon,
        _ => Width::Plain,
    }
}

fn judge_width(width: Width, blocks: &str) -> Finding {
    let check = "instruction set";
    let ok = |name, numbers| {
        let fact = format!("{name}: kernels work on {numbers} numbers at a time");
        Finding::ok(check, format!("{fact}; quantised blocks are multiplied by {blocks}"))
    };
    match width {
        Width::Avx512 => ok("AVX-512", 16),
        Width::Avx2 => ok("AVX2 with FMA", 8),
        Width::Neon => ok("NEON", 4),
        Width::Plain => Finding::note(
            check,
            "neither AVX2 with FMA nor NEON: kernels run without wide instructions",
            "results are right but training is several times slower; take another machine, or a \
             virtual machine that passes the host's processor features on",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    fn cores(threads: usize, available: usize, quota: Option<f64>) -> Cores {
        Cores { physical: Some(4), logical: 8, available, threads, quota }
    }

    #[test]
    fn threads_are_measured_against_what_can_run() {
        let cases = [
            (cores(8, 8, None), Status::Ok),
            (cores(3, 8, Some(2.5)), Status::Ok),
            (cores(8, 8, Some(2.5)), Status::Note),
            (cores(4, 8, None), Status::Note),
            (cores(1, 1, Some(0.2)), Status::Ok),
        ];
        for (cores, status) in cases {
            assert_eq!(judge_threads(&cores).status, status, "{cores:?}");
        }
        let many = judge_threads(&cores(8, 8, Some(2.5)));
        assert!(many.remedy.is_some_and(|remedy| remedy.contains("--threads 3")));
    }

    #[test]
    fn limits_are_told() {
        let fact = judge_cores("Some CPU", &cores(2, 2, Some(1.5))).fact;
        for part in ["Some CPU: 4 cores, 8 hardware threads", "2 of them", "time of 1.5"] {
            assert!(fact.contains(part), "{part} not in {fact}");
        }
    }

    #[test]
    fn plain_loops_are_noted() {
        assert_eq!(judge_width(Width::Plain, "nothing").status, Status::Note);
        let found = judge_width(Width::Avx2, "AVX-VNNI");
        assert_eq!(found.status, Status::Ok);
        assert!(found.fact.contains("AVX2") && found.fact.ends_with("by AVX-VNNI"));
    }
}
