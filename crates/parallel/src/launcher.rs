//! What launchers tell the processes that they start, and the MPI library of this build.
//!
//! MPI's launchers, `torchrun` (and all that set its variables, as Kubernetes' PyTorchJob), Slurm's `srun`, and
//! this program itself (`--ranks`).

use std::io::IsTerminal;

use crate::error::{ParallelError, Result};

/// Variables that hold the number of processes and this one's rank: Open MPI's, those of MPICH, Intel MPI and Slurm's
/// PMI, and MVAPICH's.
const MPI: [(&str, &str); 3] = [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
];

/// torchrun's variable for a process's place on its machine.
const LOCAL_RANK: &str = "LOCAL_RANK";

/// Variables that hold the number of processes that a launcher started, and this one's place on its machine: Open
/// MPI's, those of MPICH and Intel MPI, MVAPICH's, and those of Slurm's step. MPI's launchers may run within a step,
/// whose variables their processes then have.
const LOCAL: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
];

/// Name of the job, whose ranks take only each other. Where it is set, ranks meet over TCP although MPI started them.
pub(super) const JOB: &str = "LONGDRAFT_JOB";

/// Name of torchrun's job.
const TORCHRUN_JOB: &str = "TORCHELASTIC_RUN_ID";

/// Set for processes that the first rank started itself.
pub(super) const CHILD: &str = "LONGDRAFT_CHILD";

/// Port of the first rank where a launcher names none: PyTorch's.
const PORT: u16 = 29500;
/// Ports of Slurm's jobs, below those that systems give away by themselves.
const SLURM_PORTS: std::ops::Range<u64> = 15_000..30_000;

/// What the process's variables say of its launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Launch {
    /// None started it.
    Alone,
    /// MPI's, several or one.
    Mpi(usize),
    /// One whose ranks meet over TCP.
    Tcp(Place),
}

/// A rank of a job that meets over TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Name or address of the first rank's machine.
    pub(super) address: String,
    /// Where the first rank listens, or at the next free port.
    pub(super) port: u16,
    pub(super) job: String,
    /// Whether all ranks are on this machine, as a launcher says.
    pub(super) is_local: bool,
    /// Whether the first rank started this one, and listened before.
    pub(super) is_child: bool,
}

impl Launch {
    /// What this process's variables say; MPI's come first in a build that has it.
    ///
    /// # Errors
    /// - the variables of a launcher contradict each other, or one is missing
    pub fn read() -> Result<Self> {
        Self::of(of_launcher, cfg!(feature = "mpi"))
    }

    /// Refuses to work alone where `WORLD_SIZE` says that others do the same.
    ///
    /// # Errors
    /// - `WORLD_SIZE` is above 1, and no variable says which rank this is
    pub fn require_rank(&self) -> Result<()> {
        self.require_rank_of(&variable)
    }

    fn require_rank_of(&self, variable: &impl Fn(&str) -> Option<String>) -> Result<()> {
        match (self, Variables(variable).number("WORLD_SIZE")) {
            (Self::Alone, Some(size)) if size > 1 && variable("RANK").is_none() => {
                Err(problem(format!(
                    "WORLD_SIZE={size} is set, but RANK is not: set RANK as well, or unset WORLD_SIZE"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Processes that were started together, this one among them.
    pub fn size(&self) -> usize {
        match self {
            Self::Alone => 1,
            Self::Mpi(size) => *size,
            Self::Tcp(place) => place.size,
        }
    }

    /// This process's place among those of its machine, from 0, where a launcher tells it: by `LOCAL_RANK`, else by the
    /// variable of the MPI launcher or of Slurm's step that started the ranks. `None` for one process, and for ranks
    /// that the first one started itself.
    ///
    /// # Errors
    /// - the variable holds no number
    pub fn local_rank(&self) -> Result<Option<usize>> {
        self.local_rank_of(&of_launcher)
    }

    fn local_rank_of(&self, variable: &impl Fn(&str) -> Option<String>) -> Result<Option<usize>> {
        let is_child = matches!(self, Self::Tcp(place) if place.is_child);
        if self.size() == 1 || is_child {
            return Ok(None);
        }
        Variables(variable).local_rank(self.size())
    }

    fn of(variable: impl Fn(&str) -> Option<String>, has_mpi: bool) -> Result<Self> {
        let variables = Variables(&variable);
        let mpi = variables.mpi();
        // Its agents may be processes of MPI's launchers.
        let has_job = variable(JOB).or_else(|| variable(TORCHRUN_JOB)).is_some();
        if let (Some((size, _)), true, false) = (mpi, has_mpi, has_job) {
            return Ok(Self::Mpi(size));
        }
        let place = match variables.torchrun()? {
            Some(place) => Some(place),
            // mpirun may have been started within a step of its own.
            None => variables.slurm()?.filter(|p| mpi.is_none_or(|(size, _)| size == p.size)),
        };
        match (place, mpi) {
            (Some(place), _) if place.size > 1 => Ok(Self::Tcp(place)),
            (_, Some((size, Some(rank)))) if size > 1 && variable("MASTER_ADDR").is_some() => {
                variables.place((rank, size), None, None).map(Self::Tcp)
            }
            (None, Some((size, _))) => Ok(Self::Mpi(size)),
            (Some(_), Some((size, _))) if size > 1 => Ok(Self::Mpi(size)),
            _ => Ok(Self::Alone),
        }
    }

    /// Processes on this machine, this one among them, that a launcher says it started; 1 where none says so.
    pub fn local_size(&self) -> usize {
        match self {
            Self::Tcp(_) => Variables(&variable).number("LOCAL_WORLD_SIZE").map_or(1, |n| n.max(1)),
            _ => 1,
        }
    }
}

/// A variable of this process.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The same, but for those of the job step that a shell on a terminal runs in.
fn of_launcher(name: &str) -> Option<String> {
    let is_of_shell = || {
        let has_terminal = std::env::var_os("SLURM_PTY_PORT").is_some();
        name.starts_with("SLURM_") && has_terminal && std::io::stdin().is_terminal()
    };
    variable(name).filter(|_| !is_of_shell())
}

struct Variables<'a, F>(&'a F);

impl<F: Fn(&str) -> Option<String>> Variables<'_, F> {
    fn number(&self, name: &str) -> Option<usize> {
        (self.0)(name)?.trim().parse().ok()
    }

    /// Processes that an MPI launcher started together, and this one's rank if it is told.
    fn mpi(&self) -> Option<(usize, Option<usize>)> {
        let known =
            MPI.iter().find_map(|(size, rank)| Some((self.number(size)?, self.number(rank))));
        known.or_else(|| {
            // PMIx names the rank alone; under Slurm the job step knows the rest.
            let rank = self.number("PMIX_RANK")?;
            Some((self.number("SLURM_STEP_NUM_TASKS").unwrap_or(1), Some(rank)))
        })
    }

    /// This process's place on its machine, of `size` that were started together.
    fn local_rank(&self, size: usize) -> Result<Option<usize>> {
        // A script within a step of one task starts ranks that all have the place of the script.
        let started = LOCAL.iter().filter(|(count, _)| self.number(count) == Some(size));
        let mut names = std::iter::once(LOCAL_RANK).chain(started.map(|(_, local)| *local));
        let told = names.find_map(|name| Some((name, (self.0)(name)?)));
        let Some((name, text)) = told else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|_| {
            problem(format!(
                "{name}={text} is not a number: set {name} to this process's place on its machine, from 0, or unset it"
            ))
        })
    }

    fn torchrun(&self) -> Result<Option<Place>> {
        let Some(size) = (self.0)("WORLD_SIZE") else { return Ok(None) };
        let Some(rank) = (self.0)("RANK") else { return Ok(None) };
        let pair = (rank.trim().parse(), size.trim().parse());
        let (Ok(rank), Ok(size)) = pair else {
            return Err(problem(format!("RANK={rank} and WORLD_SIZE={size} must be numbers")));
        };
        self.place((rank, size), None, None).map(Some)
    }

    fn slurm(&self) -> Result<Option<Place>> {
        let pair = (self.number("SLURM_PROCID"), self.number("SLURM_STEP_NUM_TASKS"));
        let (Some(rank), Some(size)) = pair else { return Ok(None) };
        let nodes = (self.0)("SLURM_STEP_NODELIST").or_else(|| (self.0)("SLURM_JOB_NODELIST"));
        let first = nodes.as_deref().and_then(first_node);
        self.place((rank, size), first, self.slurm_job()).map(Some)
    }

    /// The place of a rank; `first` is the first one's machine, and `job` name and port, where no variable says.
    fn place(
        &self,
        (rank, size): (usize, usize),
        first: Option<String>,
        job: Option<(String, u16)>,
    ) -> Result<Place> {
        if rank >= size {
            return Err(problem(format!("rank {rank} is not below the number of ranks, {size}")));
        }
        let address = (self.0)("MASTER_ADDR").filter(|text| !text.is_empty()).or(first);
        let address = match address {
            Some(address) => address,
            None if size == 1 => String::new(),
            None => {
                let text = format!(
                    "rank {rank} of {size}: MASTER_ADDR, the first rank's machine, is not set"
                );
                return Err(problem(text));
            }
        };
        let (of_slurm, port) = job.unwrap_or_else(|| (String::new(), PORT));
        let port = match (self.0)("MASTER_PORT") {
            Some(text) => {
                text.trim().parse().ok().filter(|port| *port > 0).ok_or_else(|| {
                    problem(format!("MASTER_PORT={text} is not a port (1 to 65535)"))
                })?
            }
            None => port,
        };
        // Jobs on one machine may share a name, and look for each other at neighbouring ports. Their own ports differ.
        let of_launcher = (self.0)(TORCHRUN_JOB).unwrap_or(of_slurm);
        let job = (self.0)(JOB).unwrap_or_else(|| format!("{of_launcher} {port}"));
        // torchrun itself listens at the port that it names.
        let is_taken = (self.0)("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|text| text == "True");
        let port = if is_taken { port.saturating_add(1) } else { port };
        let is_local = self.number("LOCAL_WORLD_SIZE") == Some(size);
        let is_child = (self.0)(CHILD).is_some();
        Ok(Place { rank, size, address, port, job, is_local, is_child })
    }

    /// Name of Slurm's step, and a port that other jobs and steps on the same machine hardly take.
    fn slurm_job(&self) -> Option<(String, u16)> {
        let (job, step) = (self.number("SLURM_JOB_ID")?, self.number("SLURM_STEP_ID").unwrap_or(0));
        let among = SLURM_PORTS.end - SLURM_PORTS.start;
        // Each looks at the next ports, too.
        let offset = (job as u64).wrapping_mul(61).wrapping_add(17 * step as u64) % among;
        let port = u16::try_from(SLURM_PORTS.start + offset).ok()?;
        Some((format!("slurm {job}.{step}"), port))
    }
}

/// The first machine of Slurm's list: `node[03-07,9],other` names `node03`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let Some(ranges) = rest.strip_prefix('[') else {
        return Some(name.to_owned()).filter(|name| !name.is_empty());
    };
    let (ranges, after) = ranges.split_once(']')?;
    let number: String = ranges.chars().take_while(char::is_ascii_digit).collect();
    let suffix = after.split(',').next().unwrap_or_default();
    (!number.is_empty() && !suffix.contains('[')).then(|| format!("{name}{number}{suffix}"))
}

fn problem(problem: String) -> ParallelError {
    ParallelError::Ranks { problem }
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
mod tests;
