//! `longdraft watch`: a page of runs that updates while they go, for this machine alone.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use longdraft_models::sha256;
use longdraft_report::{Follower, Live, ReportError, Run, render_live};
use longdraft_server::{Page, Pages, serve_pages};
use minijinja::HtmlEscape;

use crate::cli::WatchArguments;
use crate::commands::serve::listen;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;

/// Variable with the program that shows pages, in place of the system's.
const BROWSER: &str = "BROWSER";
/// A page is made anew after so long at the soonest.
const FRESH: Duration = Duration::from_millis(500);
/// How long the end of a run is served to whoever watches, and how lately one must have asked.
const LAST_LOOK: Duration = Duration::from_secs(5);

/// Serves until a signal asks to end.
pub(crate) fn run(arguments: &WatchArguments, json: bool) -> Result<()> {
    let is_file = |folder: &&PathBuf| folder.exists() && !folder.is_dir();
    let files = arguments.runs.iter().filter(is_file);
    let files: Vec<String> =
        files.map(|file| format!("{}: this is no directory", file.display())).collect();
    if !files.is_empty() {
        return Err(Failure::usage(files.join("\n  "))
            .hint("give the folder of `longdraft fit`, of `train`, or of a curriculum"));
    }
    let interrupts = Interrupts::listen();
    let asked = interrupts.clone();
    let (address, thread) =
        start(&arguments.runs, arguments.port, Counter::default(), move || asked.asked())?;
    arguments.runs.iter().filter_map(|run| waits_for(run)).for_each(|what| errln!("{what}"));
    if json {
        outjson!({ "address": address });
    } else {
        outln!("watch at {address} (Ctrl-C ends this, not the run)");
    }
    crate::terminal::flush();
    if arguments.open {
        show(&address);
    }
    match thread.join() {
        Ok(served) => served.map_err(Failure::work)?,
        Err(_) => return Err(Failure::work("the pages could not be served")),
    }
    Err(interrupts.failure())
}

/// What is waited for where a run has no folder yet. One whose name is wrong is waited for, too.
fn waits_for(run: &Path) -> Option<String> {
    if run.is_dir() {
        return None;
    }
    let above =
        run.ancestors().skip(1).find(|above| !above.as_os_str().is_empty() && !above.is_dir());
    let above = above.map(|above| format!(" ({} is not there either)", above.display()));
    let above = above.unwrap_or_default();
    Some(format!("waiting for {}, which is not there yet{above}", run.display()))
}

/// When the page was asked for last, in milliseconds since a beginning.
#[derive(Clone)]
struct Counter {
    began: Instant,
    last: Arc<AtomicU64>,
}

impl Default for Counter {
    fn default() -> Self {
        Self { began: Instant::now(), last: Arc::default() }
    }
}

impl Counter {
    fn now(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }
}

/// A page beside a command.
pub(crate) struct Watched {
    counter: Counter,
    is_over: Arc<AtomicBool>,
    thread: Serving,
}

type Serving = std::thread::JoinHandle<std::io::Result<()>>;

/// Serves a page of a run beside the command that makes it, and shows it.
pub(crate) fn beside(folder: &Path) -> Result<Watched> {
    let (counter, is_over) = (Counter::default(), Arc::new(AtomicBool::new(false)));
    let asked = Arc::clone(&is_over);
    let (address, thread) =
        start(&[folder.to_path_buf()], 0, counter.clone(), move || asked.load(Ordering::Relaxed))?;
    errln!("watch at {address}");
    show(&address);
    Ok(Watched { counter, is_over, thread })
}

impl Watched {
    /// Lets whoever watches see the end.
    pub(crate) fn end(self) {
        let lately = LAST_LOOK.as_millis() as u64;
        let (last, now) = (self.counter.last.load(Ordering::Relaxed), self.counter.now());
        if last > 0 && now.saturating_sub(last) < lately {
            std::thread::sleep(LAST_LOOK);
        }
        self.is_over.store(true, Ordering::Relaxed);
        // Nothing is lost where this failed.
        let _ = self.thread.join();
    }
}

fn start(
    folders: &[PathBuf],
    port: u16,
    counter: Counter,
    asked: impl Fn() -> bool + Send + 'static,
) -> Result<(String, Serving)> {
    let listener = listen(&[SocketAddr::from((Ipv4Addr::LOCALHOST, port))])?;
    let address = listener.local_addr().map_err(Failure::work)?;
    let thread = serve_pages(listener, pages(folders, counter), asked)?;
    Ok((format!("http://{address}/"), thread))
}

/// All runs at `/`; where there are several, each at `/run/N`, from 1.
fn pages(folders: &[PathBuf], counter: Counter) -> Box<Pages> {
    let mut followers: Vec<Follower> = folders.iter().map(|folder| Follower::of(folder)).collect();
    let mut kept: Vec<Option<(Instant, Page)>> = vec![None; followers.len() + 1];
    Box::new(move |path| {
        counter.last.store(counter.now().max(1), Ordering::Relaxed);
        let chosen = chosen(path, followers.len())?;
        let page = &mut kept[chosen];
        if let Some((when, page)) = page
            && when.elapsed() < FRESH
        {
            return Some(page.clone());
        }
        let some = match chosen.checked_sub(1) {
            Some(index) => &mut followers[index..=index],
            None => &mut followers[..],
        };
        let (mut runs, lives): (Vec<Run>, Vec<Live>) =
            some.iter_mut().map(|follower| follower.look().clone()).unzip();
        Run::tell_apart(&mut runs);
        let others = if chosen == 0 { lives.len() } else { 0 };
        let html = render_live(&runs, &lives, others).unwrap_or_else(told);
        let made = Page { tag: sha256::of_text(&html), html };
        *page = Some((Instant::now(), made.clone()));
        Some(made)
    })
}

/// A page that says what is wrong; the next one may be whole.
fn told(error: ReportError) -> String {
    let text = Failure::from(error).to_json().to_string();
    format!("<!DOCTYPE html><title>longdraft</title><p>{}</p>", HtmlEscape(&text))
}

/// 0 for all runs, or the number of one.
fn chosen(path: &str, count: usize) -> Option<usize> {
    if path == "/" {
        return Some(0);
    }
    let number = path.strip_prefix("/run/")?;
    let is_plain = number.len() <= 4 && number.bytes().all(|byte| byte.is_ascii_digit());
    let number = number.parse().ok().filter(|_| is_plain)?;
    (count > 1 && (1..=count).contains(&number)).then_some(number)
}

/// Asks the system to show a page. Where nothing does, the address is told anyway.
fn show(address: &str) {
    let mut programs: Vec<(String, &[&str])> = Vec::new();
    if let Ok(own) = std::env::var(BROWSER)
        && !own.is_empty()
    {
        programs.push((own, &[]));
    }
    programs.push(match std::env::consts::OS {
        "macos" => ("open".to_owned(), &[]),
        "windows" => ("cmd".to_owned(), &["/c", "start", ""]),
        _ => ("xdg-open".to_owned(), &[]),
    });
    let started = programs.into_iter().any(|(program, before)| {
        let mut command = Command::new(program);
        command.args(before).arg(address);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().is_ok()
    });
    if !started {
        errln!("note: no browser was found here: open the address by hand");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_waited_for_by_name() {
        let shelf = tempfile::tempdir().expect("folder");
        let (run, deep) = (shelf.path().join("run"), shelf.path().join("typo/run"));
        assert_eq!(waits_for(shelf.path()), None);
        let told = waits_for(&run).expect("it is not there");
        assert!(told.contains(&run.display().to_string()) && !told.contains("either"), "{told}");
        let told = waits_for(&deep).expect("it is not there");
        assert!(told.contains("typo is not there either"), "{told}");
        std::fs::create_dir(&run).expect("folder");
        assert_eq!(waits_for(&run), None);
    }

    #[test]
    fn only_pages_of_the_runs_are_there() {
        assert_eq!((chosen("/", 1), chosen("/", 3)), (Some(0), Some(0)));
        assert_eq!((chosen("/run/1", 3), chosen("/run/3", 3)), (Some(1), Some(3)));
        for path in
            ["/run/0", "/run/4", "/run/+1", "/run/", "/run/1/..", "/run/99999999999", "//", ""]
        {
            assert_eq!(chosen(path, 3), None, "{path}");
        }
        assert_eq!(chosen("/run/1", 1), None);
    }
}
