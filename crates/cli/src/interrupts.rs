//! Signals that ask a command to end: it finishes what is under way, saves, and tells by its exit
//! code which signal it was, as shells do: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};

use longdraft_parallel::World;
use longdraft_train::stage::Ending;

use crate::failure::{Failure, Result};

/// Number of the signal that Ctrl-C sends.
pub(crate) const INTERRUPT: i32 = 2;

/// Number of the signal that a closed terminal sends.
const HANGUP: i32 = 1;

/// The signal that this process was asked to end by.
#[derive(Debug, Clone, Default)]
pub(crate) struct Interrupts {
    /// 0 until there is one.
    signal: Arc<AtomicI32>,
}

impl Interrupts {
    /// Catches Ctrl-C, SIGTERM and SIGHUP from here on. A second Ctrl-C or SIGTERM quits at once; a
    /// second SIGHUP does not, for shell and kernel both send one when a terminal closes.
    pub(crate) fn listen() -> Self {
        static LISTENING: OnceLock<Interrupts> = OnceLock::new();
        let start = || {
            let interrupts = Self::default();
            if let Err(error) = catch(&interrupts) {
                errln!("warning: Ctrl-C and SIGTERM will not save: {error}");
            }
            interrupts
        };
        LISTENING.get_or_init(start).clone()
    }

    /// Asks as Ctrl-C does: a terminal that hands keys on as they are sends no signal.
    pub(crate) fn ask(&self) {
        if !self.note(INTERRUPT) {
            quit(INTERRUPT);
        }
    }

    /// Asks to end. To ask again changes nothing.
    pub(crate) fn ask_calmly(&self) {
        self.signal.store(INTERRUPT, Ordering::Relaxed);
    }

    /// Whether this process was asked to end.
    pub(crate) fn asked(&self) -> bool {
        self.signal.load(Ordering::Relaxed) != 0
    }

    /// Done for a run that finished. For one that stopped, the failure with the exit code of the signal
    /// that any rank got; every rank calls it.
    pub(crate) fn outcome(&self, ending: Ending, world: &World) -> Result<()> {
        if ending == Ending::Finished {
            return Ok(());
        }
        let mut signal = [self.signal.load(Ordering::Relaxed) as u64];
        world.all_reduce_max(&mut signal);
        let signal = if signal[0] == 0 { INTERRUPT } else { signal[0] as i32 };
        Err(Failure::interrupted(signal))
    }

    /// The same for a command that knows no ranks.
    pub(crate) fn failure(&self) -> Failure {
        match self.signal.load(Ordering::Relaxed) {
            0 => Failure::interrupted(INTERRUPT),
            signal => Failure::interrupted(signal),
        }
    }

    /// Takes note of a signal; `false` if it is the second that asks, which ends the process.
    fn note(&self, signal: i32) -> bool {
        let before = self.signal.load(Ordering::Relaxed);
        let first = before == 0;
        if first || before == HANGUP {
            self.signal.store(signal, Ordering::Relaxed);
        }
        if first {
            errln!("finishing what is under way (Ctrl-C again quits at once)");
        }
        first || before == HANGUP || signal == HANGUP
    }
}

/// Ends the process at once, with the terminal as it was.
fn quit(signal: i32) -> ! {
    crate::terminal::cover::uncover();
    std::process::exit(i32::from(Failure::interrupted(signal).code()))
}

/// Listens in a thread of its own: there it may print and take locks.
#[cfg(unix)]
fn catch(interrupts: &Interrupts) -> std::io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut wanted = vec![SIGINT, SIGTERM];
    if hangups_are_wanted() {
        wanted.push(SIGHUP);
    }
    let mut signals = signal_hook::iterator::Signals::new(wanted)?;
    let interrupts = interrupts.clone();
    let listen = move || {
        for signal in &mut signals {
            if !interrupts.note(signal) {
                quit(signal);
            }
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(listen).map(drop)
}

#[cfg(not(unix))]
fn catch(interrupts: &Interrupts) -> std::io::Result<()> {
    let interrupts = interrupts.clone();
    let listen = move || {
        if !interrupts.note(INTERRUPT) {
            quit(INTERRUPT);
        }
    };
    ctrlc::set_handler(listen).map_err(std::io::Error::other)
}

/// Whether SIGHUP has not been set to be ignored, as `nohup` does: such a run goes on when its terminal
/// goes. Where the system does not tell, the signal is left alone.
#[cfg(unix)]
fn hangups_are_wanted() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_signals(&status).is_some_and(|ignored| ignored >> (HANGUP - 1) & 1 == 0)
}

/// The mask of ignored signals in Linux's text about a process.
#[cfg(unix)]
fn ignored_signals(status: &str) -> Option<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_request_quits_but_not_a_second_hangup() {
        const TERMINATE: i32 = 15;
        let stays = |signals: &[i32]| {
            let interrupts = Interrupts::default();
            let stays: Vec<bool> = signals.iter().map(|signal| interrupts.note(*signal)).collect();
            assert!(interrupts.asked());
            stays
        };
        assert_eq!(stays(&[INTERRUPT, INTERRUPT]), [true, false]);
        assert_eq!(stays(&[TERMINATE, INTERRUPT]), [true, false]);
        assert_eq!(stays(&[HANGUP, HANGUP, TERMINATE, TERMINATE]), [true, true, true, false]);
        assert_eq!(stays(&[INTERRUPT, HANGUP]), [true, true]);
    }

    #[test]
    fn a_stopped_run_ends_with_the_code_of_its_signal() {
        let (interrupts, world) = (Interrupts::default(), World::single());
        assert!(interrupts.outcome(Ending::Finished, &world).is_ok());
        for (signal, code) in [(1, 129), (2, 130), (15, 143)] {
            interrupts.signal.store(signal, Ordering::Relaxed);
            let failure = interrupts.outcome(Ending::Stopped, &world).expect_err("stopped");
            assert_eq!((failure.code(), interrupts.failure().code()), (code, code));
        }
    }

    #[cfg(unix)]
    #[test]
    fn ignored_signals_are_read_from_the_status_of_a_process() {
        assert_eq!(ignored_signals("Name:\tx\nSigIgn:\t0000000000001001\n"), Some(0x1001));
        assert_eq!(ignored_signals("Name:\tx\n"), None);
    }
}
