//! The full-screen view of a run: a reader of its folder, as the page is, beside the work.
//!
//! It owns the terminal while it is up; what is printed meanwhile waits (`terminal/cover.rs`). However it
//! goes, by `q`, `p`, a signal, a panic or the end of the work, the terminal is as it was before.

mod draw;

use std::io::{IsTerminal, Stdout, stdout};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use longdraft_report::Follower;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode,
    enable_raw_mode, size,
};

use crate::interrupts::Interrupts;
use crate::terminal::cover::{cover, is_covered, last_lines, uncover};

/// Time between two pictures, and that a key waits at most.
const PICTURE: Duration = Duration::from_millis(500);
const KEY: Duration = Duration::from_millis(100);
/// Columns and rows below which lines tell more.
const LEAST: (u16, u16) = (30, 8);
/// Lines of what was said that are shown at most.
const SAID: usize = 3;

/// The view; dropping it takes it away.
pub(crate) struct Screen {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Screen {
    /// Covers the terminal with the view of a run's folder; `None` where lines are to be printed: no
    /// terminal on both sides, a very small or dumb one, `NO_COLOR`, no UTF-8.
    pub(crate) fn start(folder: &Path, interrupts: &Interrupts) -> Option<Self> {
        let is_terminal = stdout().is_terminal()
            && std::io::stderr().is_terminal()
            && std::io::stdin().is_terminal();
        let can = is_terminal
            && crate::terminal::wants_colours()
            && crate::status::writes_unicode()
            && size().is_ok_and(|(columns, rows)| columns >= LEAST.0 && rows >= LEAST.1);
        if !can || enter().is_err() {
            return None;
        }
        give_back_on_panic();
        cover(restore);
        let is_over = Arc::new(AtomicBool::new(false));
        let view = View {
            folder: folder.to_path_buf(),
            interrupts: interrupts.clone(),
            is_over: Arc::clone(&is_over),
            suspends: Suspends::listen(),
        };
        let thread = std::thread::Builder::new().name("view".to_owned()).spawn(move || view.run());
        let Ok(thread) = thread else {
            uncover();
            return None;
        };
        Some(Self { is_over, thread: Some(thread) })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A view that failed has given the terminal back.
            let _ = thread.join();
        }
        uncover();
    }
}

fn enter() -> std::io::Result<()> {
    enable_raw_mode()?;
    execute!(stdout(), EnterAlternateScreen).inspect_err(|_| restore())
}

/// An empty picture. `Terminal::clear` would ask the terminal where its cursor is, and some never answer.
fn empty() -> std::io::Result<Terminal<CrosstermBackend<Stdout>>> {
    execute!(stdout(), Clear(ClearType::All), Hide)?;
    Terminal::new(CrosstermBackend::new(stdout()))
}

/// The terminal as it was. Nothing can be told where that fails: it is gone then.
fn restore() {
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}

/// A panic tells where it was on a terminal that shows it.
fn give_back_on_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            uncover();
            before(panic);
        }));
    });
}

/// What a key asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    /// Stop the run so that it can go on.
    Stop,
    /// Lines in place of the view.
    Lines,
    Suspend,
}

fn wish(key: KeyEvent) -> Option<Wish> {
    let with_control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        _ if key.kind == KeyEventKind::Release => None,
        KeyCode::Char('q') if !with_control => Some(Wish::Stop),
        KeyCode::Char('c') if with_control => Some(Wish::Stop),
        KeyCode::Char('p') if !with_control => Some(Wish::Lines),
        KeyCode::Char('z') if with_control => Some(Wish::Suspend),
        _ => None,
    }
}

struct View {
    folder: PathBuf,
    interrupts: Interrupts,
    is_over: Arc<AtomicBool>,
    suspends: Suspends,
}

impl View {
    /// Shows pictures until it is over. Whatever fails, the work goes on with lines.
    fn run(self) {
        let _ = self.show();
        uncover();
    }

    fn show(&self) -> std::io::Result<()> {
        let mut terminal = empty()?;
        let mut follower = Follower::of(&self.folder);
        let mut drawn: Option<Instant> = None;
        while !self.is_over.load(Ordering::Relaxed) && is_covered() {
            if self.suspends.asked() {
                suspend()?;
                terminal = empty()?;
                drawn = None;
            }
            if drawn.is_none_or(|drawn| drawn.elapsed() >= PICTURE) {
                drawn = Some(Instant::now());
                let (_, live) = follower.look();
                let said = last_lines(SAID);
                terminal.draw(|frame| draw::draw(frame, live, &said))?;
            }
            if !event::poll(KEY)? {
                continue;
            }
            match event::read()? {
                Event::Resize(..) => drawn = None,
                Event::Key(key) => match wish(key) {
                    Some(Wish::Stop) => self.interrupts.ask(),
                    Some(Wish::Lines) => return Ok(()),
                    Some(Wish::Suspend) => self.suspends.ask(),
                    None => {}
                },
                _ => {}
            }
        }
        Ok(())
    }
}

/// Gives the terminal to the shell until it is given back.
fn suspend() -> std::io::Result<()> {
    restore();
    #[cfg(unix)]
    nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP)?;
    enter()
}

/// Whether the process is to be suspended: by a key, or as `kill -TSTP` asks. Without a view the signal
/// suspends by itself.
struct Suspends {
    asked: Arc<AtomicBool>,
    #[cfg(unix)]
    plainly: Arc<AtomicBool>,
    #[cfg(unix)]
    listener: Option<signal_hook::SigId>,
}

impl Suspends {
    #[cfg(unix)]
    fn listen() -> Self {
        use signal_hook::consts::SIGTSTP;
        use signal_hook::flag::{register, register_conditional_default};
        let (asked, plainly) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let _ = register_conditional_default(SIGTSTP, Arc::clone(&plainly));
        let listener = register(SIGTSTP, Arc::clone(&asked)).ok();
        Self { asked, plainly, listener }
    }

    #[cfg(not(unix))]
    fn listen() -> Self {
        Self { asked: Arc::new(AtomicBool::new(false)) }
    }

    fn ask(&self) {
        self.asked.store(cfg!(unix), Ordering::Relaxed);
    }

    /// Once for every time.
    fn asked(&self) -> bool {
        self.asked.swap(false, Ordering::Relaxed)
    }
}

#[cfg(unix)]
impl Drop for Suspends {
    fn drop(&mut self) {
        self.plainly.store(true, Ordering::Relaxed);
        self.listener.take().map(signal_hook::low_level::unregister);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_ask_for_what_the_view_says() {
        let key = |letter, modifiers| wish(KeyEvent::new(KeyCode::Char(letter), modifiers));
        let (none, control) = (KeyModifiers::NONE, KeyModifiers::CONTROL);
        assert_eq!((key('q', none), key('c', control)), (Some(Wish::Stop), Some(Wish::Stop)));
        assert_eq!((key('p', none), key('z', control)), (Some(Wish::Lines), Some(Wish::Suspend)));
        assert_eq!((key('c', none), key('q', control), key('x', none)), (None, None, None));
    }
}
