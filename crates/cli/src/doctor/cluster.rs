//! MPI.

use super::finding::Finding;
use super::program::{Answer, ask};

const CHECK: &str = "mpi";

pub(super) fn examine() -> Vec<Finding> {
    vec![judge(&ask("mpirun", &["--version"]))]
}

fn judge(answer: &Answer) -> Finding {
    let install = "only needed for several processes or machines: install Open MPI or MPICH, or \
                   load the cluster's module, and see that mpirun is on the PATH";
    match answer {
        Answer::Absent => Finding::note(CHECK, "no mpirun on the PATH", install),
        Answer::Failed(cause) => {
            Finding::note(CHECK, format!("mpirun --version failed: {cause}"), install)
        }
        Answer::Said(text) => match version(text) {
            Some(version) => Finding::ok(CHECK, version),
            None => Finding::note(CHECK, "mpirun is there, its version is unknown", install),
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
            assert_eq!(judge(&answer).status, Status::Note);
        }
    }
}
