//! Code of others over what others wrote, with an end: panics are errors, and what may take any time
//! or memory runs on a thread that is given up.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use longdraft_kernels::memory::Budget;

/// Stacks that are asked for, the first that can be had is taken. Values that nest deeply are
/// dropped and written by recursion; untouched pages cost addresses only.
const STACKS: [usize; 2] = [512 << 20, 8 << 20];

/// How long an answer is waited for at a time. Time is told by the number of such waits, so that a
/// process that was stopped and goes on has lost one of them.
const TICK: Duration = Duration::from_millis(100);
const TICKS_PER_SECOND: u32 = 10;

/// What a piece of work may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Bytes, where the program counts them ([`longdraft_kernels::memory::Allocator`]).
    pub(crate) bytes: usize,
    /// Time of a processor, where the system tells it (Linux): a busy machine takes none of it.
    pub(crate) processor: Duration,
    /// Seconds in all.
    pub(crate) seconds: u32,
}

/// Why there is no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// The message of a panic.
    Panic(String),
    /// The thread was given up, with what it holds: do not start another one.
    Limit(String),
}

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Panic(message) => write!(f, "its reader failed: {message}"),
            Self::Limit(problem) => f.write_str(problem),
        }
    }
}

/// The result, or the message of a panic, which is not printed.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, Stopped> {
    thread_local! {
        static QUIET: Cell<bool> = const { Cell::new(false) };
    }
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                print(panic);
            }
        }));
    });
    let before = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    QUIET.set(before);
    result.map_err(|panic| Stopped::Panic(message(panic.as_ref())))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}

/// Works on a thread of its own within the limits.
pub(crate) fn run<T: Send + 'static>(
    limits: Limits,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Stopped> {
    let budget = Budget::new(limits.bytes);
    let (sender, receiver) = sync_channel(1);
    let work = Arc::new(Mutex::new(Some(work)));
    let clock = Arc::new(OnceLock::new());
    let start = |stack: &usize| {
        let (work, sender, budget) = (Arc::clone(&work), sender.clone(), Arc::clone(&budget));
        let clock = Arc::clone(&clock);
        let task = move || {
            if let Some(own) = own_clock() {
                // The first thread that starts is the only one.
                let _ = clock.set(own);
            }
            let work = work.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(work) = work {
                // Nobody waits for an answer that comes too late.
                let _ = sender.send(caught(|| budget.within(work)));
            }
        };
        Builder::new().stack_size(*stack).spawn(task).ok()
    };
    if STACKS.iter().find_map(start).is_none() {
        return Err(Stopped::Panic(
            "no thread could be had: too little memory, or too many threads".to_owned(),
        ));
    }
    drop(sender);
    for _ in 0..limits.seconds * TICKS_PER_SECOND {
        match receiver.recv_timeout(TICK) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) if budget.is_exceeded() => {
                let mebibytes = limits.bytes >> 20;
                let problem = format!("it asks for more than {mebibytes} MiB of memory");
                return Err(Stopped::Limit(problem));
            }
            Err(RecvTimeoutError::Timeout) => {
                let used = clock.get().and_then(|clock| processor_time(clock));
                if used.is_some_and(|used| used >= limits.processor) {
                    budget.withdraw();
                    let seconds = limits.processor.as_secs_f64();
                    let problem = format!("it has not ended after {seconds} s of a processor");
                    return Err(Stopped::Limit(problem));
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Stopped::Panic("its thread is gone".to_owned()));
            }
        }
    }
    budget.withdraw();
    Err(Stopped::Limit(format!("it has not ended after {} seconds", limits.seconds)))
}

/// The file that tells what this thread has used, if the system has such files.
fn own_clock() -> Option<PathBuf> {
    let thread = std::fs::read_link("/proc/thread-self").ok()?;
    Some(Path::new("/proc").join(thread).join("stat"))
}

/// Time of a processor that a thread has used, of its own and of the system for it.
fn processor_time(clock: &Path) -> Option<Duration> {
    /// Of the kernel's interface, whatever its own clock does.
    const TICKS_PER_SECOND: u64 = 100;
    let text = std::fs::read_to_string(clock).ok()?;
    // The name of the thread stands in brackets and may hold anything.
    let (_, fields) = text.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11).map_while(|field| field.parse::<u64>().ok());
    Some(Duration::from_millis((times.next()? + times.next()?) * 1000 / TICKS_PER_SECOND))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { bytes: 64 << 20, processor: Duration::from_millis(500), seconds: 2 };

    #[test]
    fn results_and_panics_come_back() {
        assert_eq!(run(LIMITS, || 7), Ok(7));
        let panic = run(LIMITS, || -> u8 { panic!("on purpose {}", 7) });
        assert_eq!(panic, Err(Stopped::Panic("on purpose 7".to_owned())));
        assert_eq!(caught(|| -> u8 { panic!("here") }), Err(Stopped::Panic("here".to_owned())));
        assert_eq!(caught(|| 8), Ok(8));
    }

    #[test]
    fn what_takes_too_much_is_given_up() {
        let grown = run(LIMITS, || {
            let mut text = "x".to_owned();
            loop {
                text = format!("{text}{text}");
            }
        });
        let Err::<(), _>(Stopped::Limit(problem)) = grown else { panic!("{grown:?}") };
        assert!(problem.contains("more than 64 MiB"), "{problem}");
        let idle = run(LIMITS, || {
            loop {
                std::thread::park();
            }
        });
        let Err::<(), _>(Stopped::Limit(problem)) = idle else { panic!("{idle:?}") };
        assert!(problem.contains("not ended after 2 seconds"), "{problem}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn work_is_held_to_the_processor_time_that_it_uses() {
        let limits = Limits { seconds: 3600, ..LIMITS };
        let busy = run(limits, || {
            loop {
                drop(std::hint::black_box(Box::new([0_u8; 64])));
            }
        });
        let Err::<(), _>(Stopped::Limit(problem)) = busy else { panic!("{busy:?}") };
        assert!(problem.contains("not ended after 0.5 s of a processor"), "{problem}");
        // Waiting uses none.
        let waited = run(limits, || std::thread::sleep(Duration::from_secs(1)));
        assert_eq!(waited, Ok(()));
    }

    #[test]
    fn values_that_nest_deeply_fit_the_stack() {
        fn depth(left: u32) -> u32 {
            let kept = std::hint::black_box([left; 16]);
            if left == 0 { 0 } else { 1 + depth(left - 1).min(kept[3]) }
        }
        assert!(run(LIMITS, || depth(100_000)).is_ok());
    }
}
