//! MPI.

use super::finding::Finding;
use super::program::{Answer, ask};

const CHECK: &str = "mpi";

pub(super) fn examine() -> Vec<Finding> {
    let library = longdraft_parallel::mpi_library();
    vec![judge(&ask("mpirun", &["--version"]), library.as_deref())]
}

/// Judges what mpirun says, beside the library that this build calls.
fn judge(answer: &Answer, library: Option<&str>) -> Finding {
    let install = "only needed to start ranks by MPI (`--ranks`, torchrun and srun do without): install Open MPI or MPICH, or \
                   load the cluster's module, and see that mpirun is on the PATH";
    match answer {
        Answer::Absent => Finding::note(CHECK, "no mpirun on the PATH", install),
        Answer::Failed(cause) => {
            Finding::note(CHECK, format!("mpirun --version failed: {cause}"), install)
        }
        Answer::Said(text) => match (version(text), library) {
            (Some(version), Some(library)) => {
                Finding::ok(CHECK, format!("{version}; this build uses {library}"))
            }
            (Some(version), None) => Finding::note(
                CHECK,
                format!("{version}; this build is made without MPI"),
                "only needed to start ranks by MPI: build longdraft with --features mpi",
            ),
            (None, _) => Finding::note(CHECK, "mpirun is there, its version is unknown", install),
        },
    }
}

/// Name and version as Open MPI, MPICH (Hydra) and Intel MPI print them.
fn version(text: &str) -> Option<String> {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty())?;
    if first.starts_with("HYDRA") {
        let version = text.lines().find_map(|line| line.trim().strip_prefix("Version:"))?;
        return Some(format!("MPICH (Hydra) {}", version.trim()));
    }
    if let Some(rest) = first.strip_prefix("mpirun (Open MPI) ") {
        return Some(format!("Open MPI {rest}"));
    }
    first.contains("MPI").then(|| first.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn versions_of_the_usual_kinds_are_read() {
        let cases = [
            ("mpirun (Open MPI) 4.1.6\n\nReport bugs to the list\n", "Open MPI 4.1.6"),
            (
                "HYDRA build details:\n    Version:                                 4.2.0\n",
                "MPICH (Hydra) 4.2.0",
            ),
            (
                "Intel(R) MPI Library for Linux* OS, Version 2021.11\n",
                "Intel(R) MPI Library for Linux* OS, Version 2021.11",
            ),
        ];
        for (text, want) in cases {
            assert_eq!(version(text).as_deref(), Some(want));
        }
        for text in ["", "usage: mpirun\n", "HYDRA build details:\n"] {
            assert_eq!(version(text), None, "{text}");
        }
    }

    #[test]
    fn a_missing_mpi_is_no_problem() {
        for answer in [Answer::Absent, Answer::Failed("exit 1".into()), Answer::Said(String::new())]
        {
            assert_eq!(judge(&answer, None).status, Status::Note);
        }
    }

    #[test]
    fn a_build_without_mpi_is_told_from_one_with_it() {
        let answer = Answer::Said("mpirun (Open MPI) 4.1.6\n".to_owned());
        assert_eq!(judge(&answer, None).status, Status::Note);
        assert_eq!(judge(&answer, Some("Open MPI v4.1.6")).status, Status::Ok);
    }
}
