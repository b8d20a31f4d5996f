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
        // A shell on a terminal has the variables of the job step that it runs in.
        let is_shell =
            std::env::var_os("SLURM_PTY_PORT").is_some() && std::io::stdin().is_terminal();
        let read =
            |name: &str| variable(name).filter(|_| !(is_shell && name.starts_with("SLURM_")));
        Self::of(read, cfg!(feature = "mpi"))
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
mod tests {
    use super::*;

    fn of(set: &[(&str, &str)], has_mpi: bool) -> Result<Launch> {
        let variable = |name: &str| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Launch::of(variable, has_mpi)
    }

    fn tcp(set: &[(&str, &str)]) -> Place {
        match of(set, false) {
            Ok(Launch::Tcp(place)) => place,
            other => panic!("{set:?}: {other:?}"),
        }
    }

    #[test]
    fn mpi_launchers_are_told_apart_from_plain_shells() {
        let of = |set: &[(&str, &str)]| of(set, true).expect("sound");
        assert_eq!(of(&[]), Launch::Alone);
        assert_eq!(of(&[("SLURM_STEP_NUM_TASKS", "4")]), Launch::Alone);
        let open = [("OMPI_COMM_WORLD_SIZE", "3"), ("PMIX_RANK", "0")];
        assert_eq!(of(&open), Launch::Mpi(3));
        assert_eq!(of(&[("PMI_SIZE", "2")]), Launch::Mpi(2));
        let slurm = [("PMIX_RANK", "1"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "1")];
        assert_eq!(of(&slurm), Launch::Mpi(4));
        assert_eq!(of(&[("PMIX_RANK", "0")]), Launch::Mpi(1));
        assert_eq!((of(&[]).size(), of(&slurm).size()), (1, 4));
    }

    #[test]
    fn torchruns_variables_name_a_place() {
        let set = [("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "77")];
        let place = tcp(&set);
        assert_eq!((place.rank, place.size, place.address.as_str(), place.port), (3, 8, "a", 77));
        // Two jobs of one machine are two, also where one takes the other's next port.
        let other = [&set[..3], &[("MASTER_PORT", "78")]].concat();
        assert_ne!(tcp(&other).job, place.job);
        let own = [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RUN_ID", "j")];
        let place = tcp(&[&set[..], &own].concat());
        assert_eq!((place.port, place.job.as_str()), (78, "j 77"), "torchrun listens at 77 itself");
        assert_eq!(tcp(&set[..3]).port, PORT);
        // One process is alone, wherever it would meet others.
        let one = [("RANK", "0"), ("WORLD_SIZE", "1")];
        assert_eq!(of(&one, false).expect("sound"), Launch::Alone);
        let lacks_rank = |set: &[(&str, &str)]| {
            let variable = |name: &str| {
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            };
            of(set, false).expect("sound").require_rank_of(&variable).is_err()
        };
        assert!(
            lacks_rank(&[("WORLD_SIZE", "2")])
                && lacks_rank(&[("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")])
        );
        assert!(!lacks_rank(&one) && !lacks_rank(&set) && !lacks_rank(&[("WORLD_SIZE", "1")]));
        for wrong in [
            &[("RANK", "0"), ("WORLD_SIZE", "2")][..],
            &[("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")],
            &[("RANK", "x"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")],
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "70000")],
        ] {
            assert!(of(wrong, false).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_job_of_its_own_goes_before_mpi() {
        let set = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("PMI_SIZE", "9")];
        assert_eq!(of(&set, true).expect("sound"), Launch::Mpi(9));
        let named = [&set[..], &[(JOB, "x")]].concat();
        let Ok(Launch::Tcp(place)) = of(&named, true) else { panic!("meets over TCP") };
        assert_eq!((place.rank, place.size, place.job.as_str()), (1, 2, "x"));
        // An agent of torchrun may be a process of MPI's launcher.
        let by_torchrun = [&set[..], &[(TORCHRUN_JOB, "y")]].concat();
        assert!(matches!(of(&by_torchrun, true), Ok(Launch::Tcp(_))));
    }

    #[test]
    fn builds_without_mpi_meet_over_tcp_where_the_first_machine_is_named() {
        let set = [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "2")];
        assert_eq!(of(&set, false).expect("sound"), Launch::Mpi(4));
        let place = tcp(&[&set[..], &[("MASTER_ADDR", "head")]].concat());
        assert_eq!((place.rank, place.size, place.address.as_str()), (2, 4, "head"));
    }

    #[test]
    fn slurm_names_rank_machine_and_a_port_of_the_step() {
        let set = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "6"),
            ("SLURM_STEP_NODELIST", "gpu[007-009,12],login"),
            ("SLURM_JOB_ID", "123456"),
        ];
        let place = tcp(&set);
        assert_eq!((place.rank, place.size, place.address.as_str()), (5, 6, "gpu007"));
        assert!(SLURM_PORTS.contains(&u64::from(place.port)));
        assert_eq!(place.job, format!("slurm 123456.0 {}", place.port));
        let next = tcp(&[&set[..], &[("SLURM_STEP_ID", "1")]].concat());
        assert_ne!(next.port, place.port);
        assert_eq!(tcp(&[&set[..], &[("MASTER_ADDR", "b")]].concat()).address, "b");
        // Variables of torchrun's kind within a job have nothing of a step, which may be another for each rank.
        let own = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "b")];
        let place = tcp(&[&set[..], &own].concat());
        assert_eq!((place.port, place.job.as_str()), (PORT, " 29500"));
    }

    #[test]
    fn mpirun_within_a_step_of_slurm_is_not_taken_for_the_step() {
        let step = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
        let mpi = [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "2")];
        let both = [&step[..], &mpi].concat();
        assert_eq!(of(&both, false).expect("sound"), Launch::Mpi(4));
        let place = tcp(&[&both[..], &[("MASTER_ADDR", "head")]].concat());
        assert_eq!((place.rank, place.size), (2, 4));
        assert_eq!(of(&step, false).expect("sound"), Launch::Alone);
    }

    #[test]
    fn the_first_node_of_a_list_is_found() {
        for (list, first) in [
            ("one", Some("one")),
            ("a1,a2", Some("a1")),
            ("n[1-3]", Some("n1")),
            ("n[04,7-9]-ib,m1", Some("n04-ib")),
            ("n[1-2]x[3-4]", None),
            ("n[", None),
            ("", None),
        ] {
            assert_eq!(first_node(list).as_deref(), first, "{list}");
        }
    }
}
