//! Work on a thread of its own, while the caller's thread lets other Python threads run, hears signals and
//! calls Python's functions.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use longdraft::{Result, Stop};
use pyo3::prelude::*;

use crate::errors::{raised, refused};

/// Time between two looks for signals.
pub(crate) const TICK: Duration = Duration::from_millis(50);
/// What a call waits after Ctrl-C for the work to save and end.
const PATIENCE: Duration = Duration::from_millis(700);

/// Work whose callers did not wait for its end.
static LEFT: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());
/// The process that the threads belong to; 0 before there are any.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// What the work sends to the thread that waits for it.
enum Message<T> {
    /// Something happened; the answer says whether to go on.
    Event(String, Sender<bool>),
    /// The work ended.
    Done(Result<T>),
    /// It panicked.
    Fault(String),
}

/// Tells the waiting thread what happens.
pub(crate) struct Reporter<T> {
    messages: Sender<Message<T>>,
    stop: Stop,
}

impl<T> Reporter<T> {
    /// Tells an event and waits until Python has heard it. Nobody may listen any more.
    pub(crate) fn tell(&self, event: String) {
        let (answer, answered) = channel();
        if self.messages.send(Message::Event(event, answer)).is_ok() && answered.recv() == Ok(false)
        {
            self.stop.ask();
        }
    }
}

/// Refuses to work in a process that was forked from the one with the threads.
pub(crate) fn require_owner(py: Python<'_>) -> PyResult<()> {
    let own = std::process::id();
    match OWNER.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire) {
        Err(owner) if owner != own => Err(refused(
            py,
            "this process was forked from one in which longdraft had begun to work",
            "fork before the first call, or start processes with multiprocessing's `spawn`",
        )),
        _ => Ok(()),
    }
}

/// Does work to its end. Ctrl-C asks `stop`, and is raised within a second.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    stop: &Stop,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    run_heard(py, stop, None, move |_| work())
}

/// The same for work that tells of events, which `hear` gets one by one on this thread. It ends the work
/// by returning `False` or raising.
pub(crate) fn run_heard<T: Send + 'static>(
    py: Python<'_>,
    stop: &Stop,
    hear: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Reporter<T>) -> Result<T> + Send + 'static,
) -> PyResult<T> {
    require_owner(py)?;
    wait_for_left(py)?;
    let (messages, heard) = channel();
    let reporter = Reporter { messages: messages.clone(), stop: stop.clone() };
    let thread = std::thread::Builder::new().name("longdraft".to_owned()).spawn(move || {
        let ended = catch_unwind(AssertUnwindSafe(|| work(&reporter)));
        // Who no longer listens does not need the end.
        let _ = messages.send(match ended {
            Ok(ended) => Message::Done(ended),
            Err(panic) => Message::Fault(words(panic.as_ref())),
        });
    });
    let thread =
        thread.map_err(|error| refused(py, &format!("cannot start a thread: {error}"), ""))?;
    let mut call = Call { heard, stop, hear, raised: None };
    let ended = call.wait(py);
    if ended.is_err() && !thread.is_finished() {
        LEFT.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
    }
    ended
}

/// A call that waits for work.
struct Call<'a, 'py, T> {
    heard: Receiver<Message<T>>,
    stop: &'a Stop,
    hear: Option<&'a Bound<'py, PyAny>>,
    /// What Python's function raised.
    raised: Option<PyErr>,
}

impl<T: Send> Call<'_, '_, T> {
    fn wait(&mut self, py: Python<'_>) -> PyResult<T> {
        loop {
            match self.receive(py, TICK) {
                Ok(Message::Event(event, answer)) => {
                    // Work that no longer waits needs no answer.
                    let _ = answer.send(self.call(&event));
                }
                Ok(ended) => return self.end(py, ended),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(refused(py, "the work ended without a word", ""));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Err(signal) = py.check_signals() {
                self.stop.ask();
                self.wait_a_little(py);
                return Err(signal);
            }
        }
    }

    fn receive(
        &mut self,
        py: Python<'_>,
        time: Duration,
    ) -> std::result::Result<Message<T>, RecvTimeoutError> {
        let heard = &mut self.heard;
        py.detach(move || heard.recv_timeout(time))
    }

    /// Whether Python's function wants the work to go on.
    fn call(&mut self, event: &str) -> bool {
        let Some(hear) = self.hear.filter(|_| self.raised.is_none()) else { return true };
        match hear.call1((event,)).and_then(|answer| Ok(answer.is_none() || answer.is_truthy()?)) {
            Ok(goes_on) => goes_on,
            Err(error) => {
                self.raised = Some(error);
                false
            }
        }
    }

    fn end(&mut self, py: Python<'_>, ended: Message<T>) -> PyResult<T> {
        if let Some(error) = self.raised.take() {
            return Err(error);
        }
        match ended {
            Message::Done(done) => done.map_err(raised),
            Message::Fault(panic) => Err(refused(
                py,
                &format!("the work panicked: {panic}"),
                "this is a fault of the program: please report it",
            )),
            Message::Event(..) => Err(refused(py, "an event after the end", "")),
        }
    }

    /// Lets the work save and end, without a word to Python.
    fn wait_a_little(&mut self, py: Python<'_>) {
        let until = Instant::now() + PATIENCE;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            match self.receive(py, left) {
                Ok(Message::Event(_, answer)) => drop(answer.send(false)),
                _ => return,
            }
        }
    }
}

/// What a panic says.
fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// Waits for work that an interrupted call left: it saves, and then gives its run directory free.
fn wait_for_left(py: Python<'_>) -> PyResult<()> {
    loop {
        let is_done = {
            let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
            left.retain(|thread| !thread.is_finished());
            left.is_empty()
        };
        if is_done {
            return Ok(());
        }
        py.check_signals()?;
        py.detach(|| std::thread::sleep(TICK));
    }
}

/// Waits for what interrupted calls left under way, before the process ends.
#[pyfunction]
pub(crate) fn settle(py: Python<'_>) -> PyResult<()> {
    if OWNER.load(Ordering::Acquire) != std::process::id() {
        return Ok(());
    }
    wait_for_left(py)
}
