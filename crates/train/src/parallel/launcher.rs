//! The MPI library of this build, and what MPI launchers tell the processes that they start.

/// Variables that hold the number of processes: Open MPI, then MPICH, Intel MPI and Slurm's PMI.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"];

/// Processes that an MPI launcher started together with this one; `None` without a launcher.
pub fn launched_processes() -> Option<usize> {
    let said = |name: &&str| std::env::var(name).ok()?.trim().parse().ok();
    SIZES.iter().find_map(said).or_else(|| std::env::var_os("PMIX_RANK").map(|_| 1))
}

/// The MPI library that this build calls; `None` without one.
pub fn mpi_library() -> Option<String> {
    #[cfg(feature = "mpi")]
    {
        let text = ::mpi::environment::library_version().ok()?;
        // Open MPI adds its package and date behind a comma, MPICH its build in further lines.
        let name = text.trim_end_matches('\0').lines().next()?.split(',').next()?;
        Some(name.trim().to_owned())
    }
    #[cfg(not(feature = "mpi"))]
    None
}
