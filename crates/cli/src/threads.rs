//! Threads of this process, and of work beside a command.

use crate::failure::{Failure, Result};

/// Cores of this machine that the process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Most threads of a machine with so many cores: further ones only wait, and thousands take minutes to start.
fn most_threads(cores: usize) -> usize {
    (4 * cores).max(256)
}

/// Starts this process's threads; 0 are as many as it has cores.
/// It fails where there are too many, they have been started already, or cannot be.
pub(crate) fn start_threads(threads: usize) -> Result<()> {
    let most = most_threads(cores());
    if threads > most {
        return Err(Failure::usage(format!("{threads} threads: --threads is at most {most} here"))
            .hint("leave --threads out for one on every core"));
    }
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .map_err(|error| Failure::work(format!("cannot start {threads} threads: {error}")))
}

/// Threads of its own for work beside a command. The command holds one of the process's threads until it ends:
/// where that is the only one, a parallel loop of another thread would never begin.
/// It fails where the system gives no threads.
pub(crate) fn own_threads(threads: usize) -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|error| Failure::work(format!("cannot start {threads} more threads: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_machines_allow_many_threads_and_large_ones_four_a_core() {
        assert_eq!((most_threads(1), most_threads(64), most_threads(128)), (256, 256, 512));
        let failure = start_threads(most_threads(cores()) + 1).expect_err("too many");
        assert_eq!(failure.code(), 2);
        assert!(failure.message().contains("--threads is at most"), "{}", failure.message());
    }

    #[test]
    fn work_beside_a_command_has_threads_of_its_own() {
        let threads = rayon::current_num_threads() + 1;
        let own = own_threads(threads).expect("threads");
        assert_eq!(own.install(rayon::current_num_threads), threads);
    }
}
