//! The MPI library of this build, and what MPI launchers tell the processes that they start.

/// Variables that hold the number of processes: Open MPI's, those of MPICH, Intel MPI and Slurm's
/// PMI, and MVAPICH's.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"];

/// Processes that an MPI launcher started together with this one; `None` without a launcher.
pub fn launched_processes() -> Option<usize> {
    processes_of(|name| std::env::var(name).ok())
}

fn processes_of(variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let number = |name: &str| variable(name)?.trim().parse().ok();
    SIZES.iter().find_map(|name| number(name)).or_else(|| {
        // PMIx names the rank alone; under Slurm the job step knows the rest.
        variable("PMIX_RANK").map(|_| number("SLURM_STEP_NUM_TASKS").unwrap_or(1))
    })
}

/// The MPI library that this build calls; `None` without one.
pub fn mpi_library() -> Option<String> {
    #[cfg(feature = "mpi")]
    {
        let text = ::mpi::environment::library_version().ok()?;
        // Open MPI adds its package and date after a comma, MPICH its build in further lines.
        let name = text.trim_end_matches('\0').lines().next()?.split(',').next()?;
        Some(name.trim().to_owned())
    }
    #[cfg(not(feature = "mpi"))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_told_apart_from_plain_shells() {
        let of = |set: &[(&str, &str)]| {
            processes_of(|name| {
                let found = set.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("SLURM_STEP_NUM_TASKS", "4")]), None);
        assert_eq!(of(&[("OMPI_COMM_WORLD_SIZE", "3"), ("PMIX_RANK", "0")]), Some(3));
        assert_eq!(of(&[("PMI_SIZE", "2")]), Some(2));
        assert_eq!(of(&[("PMIX_RANK", "1"), ("SLURM_STEP_NUM_TASKS", "4")]), Some(4));
        assert_eq!(of(&[("PMIX_RANK", "0")]), Some(1));
    }
}
