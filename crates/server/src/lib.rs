//! Answers over HTTP, as OpenAI's interface asks for them.
//!
//! Two halves that talk over channels. The HTTP side (`routes`, on threads of tokio) reads requests,
//! checks them and makes them into tasks; the decoder (`worker`, on the caller's thread) takes tasks
//! into a [`BatchEngine`] as places become free, and sends what is said token by token. A client that
//! goes away closes its channel, which frees the place. Another draft comes the same way (`drafts`). Nothing of what is asked or answered is logged;
//! with [`Settings::lessons`] it is handed to whoever learns of it.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod answer;
mod app;
mod connections;
mod drafts;
mod entry;
mod error;
mod events;
mod grammar;
mod lessons;
mod meters;
mod pages;
mod request;
mod routes;
mod tool_calls;
mod worker;

/// The example of the README is compiled with the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::serve::ListenerExt;
use futures_util::future::select;
use longdraft_decode::{BatchEngine, DecodeOptions};
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;

use app::App;
pub use pages::{Page, Pages, serve_pages};

pub use drafts::{Control, Drafts, Inbox, MakeDrafter, OpenDraft, SwapError, channel};
pub use lessons::{Board, Check, Learning, Lessons, Served, Training};

/// How often it is looked whether the server is to end.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Time for what was cut short to reach its clients.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Threads that render templates and tokenise.
const TOKENISING_THREADS: usize = 4;

/// The model that answers.
#[derive(Debug, Clone)]
pub struct Model {
    /// What requests call it.
    pub name: String,
    /// Longest text, prompt and answer, in tokens.
    pub context: usize,
    /// Tokens.
    pub vocabulary: usize,
    /// Start of a text, for models that want it.
    pub bos: Option<u32>,
    /// Tokens that end an answer.
    pub stop_tokens: Vec<TargetTokenId>,
}

/// What requests may ask for.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Answers that wait for a place; more are refused with 429.
    pub queue: usize,
    /// Tokens of an answer.
    pub max_tokens: usize,
    /// Tokens of a request: those of its prompts and those that its answers may have, together.
    pub request_tokens: Option<usize>,
    /// The same of all requests that run or wait; more are refused with 429.
    pub total_tokens: Option<usize>,
    /// Bytes of a request.
    pub body: usize,
    /// Time that running answers have to finish when the server is to end.
    pub grace: Duration,
}

/// Who may ask.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// The key that requests have to carry, if one is wanted.
    pub key: Option<String>,
    /// Pages of other origins that may ask, `*` for all.
    pub origins: Vec<String>,
    /// Without a key, requests must name this machine itself as their host: a page whose name was made
    /// to lead here names another one.
    pub is_local: bool,
    /// The name that the server was told to listen at: requests may name it, too.
    pub name: Option<String>,
}

/// What a server is told.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The model that answers.
    pub model: Model,
    /// What holds where a request says nothing.
    pub defaults: DecodeOptions,
    /// What requests may ask for.
    pub limits: Limits,
    /// Who may ask.
    pub access: Access,
    /// Who learns of the answers.
    pub lessons: Option<Lessons>,
    /// Lookup finds what stands in answers to others: no answer tells its tokens from a draft's.
    pub hides_lookup: bool,
}

/// Why a server cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The system gives no thread or socket.
    #[error("the server cannot start: {0}")]
    Start(#[from] std::io::Error),
    /// An origin that cannot stand in a header.
    #[error("`{0}` is not an origin: give one like http://localhost:3000, or *")]
    Origin(String),
}

/// Checks pages' origins that may ask, before anything large is read for them.
///
/// # Errors
/// - one is no origin, as browsers send them
pub fn check_origins(origins: &[String]) -> Result<(), ServeError> {
    routes::read_origins(origins).map(|_| ())
}

/// Serves at `listener` until `asked` says true; what runs then has [`Limits::grace`] to finish. The
/// decoder works on this thread, HTTP on others.
///
/// # Errors
/// - the system gives no threads, or an origin is none
pub fn serve<'a>(
    settings: Settings,
    listener: TcpListener,
    (engine, drafts, inbox): (BatchEngine<'a>, Drafts<'a>, Inbox),
    tokenizer: &TextTokenizer,
    asked: impl Fn() -> bool + Send + 'static,
) -> Result<(), ServeError> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(TOKENISING_THREADS)
        .thread_name("http")
        .enable_all()
        .build()?;
    let cut = Arc::new(AtomicBool::new(false));
    let lessons = settings.lessons.clone();
    let (grace, places, hides_lookup) =
        (settings.limits.grace, engine.places(), settings.hides_lookup);
    let Drafts { open, make } = drafts;
    let Inbox { line, receiver } = inbox;
    let app = App::new(settings, tokenizer.clone(), (places, open, line));
    let meters = app.meters();
    let router = routes::router(app)?;
    let ending = Arc::clone(&cut);
    let http = std::thread::Builder::new().name("http".to_owned()).spawn(move || {
        let served = runtime.block_on(listen(listener, router, (asked, grace), &ending));
        // Tasks whose clients do not read are dropped here, which ends the worker.
        runtime.shutdown_background();
        served
    })?;
    let told = (&*meters, lessons.as_ref(), hides_lookup);
    worker::work((engine, &*make), tokenizer, receiver, &cut, told);
    match http.join() {
        Ok(served) => Ok(served?),
        Err(_) => Err(std::io::Error::other("the HTTP thread failed").into()),
    }
}

/// Answers until it is asked to end, and all is answered or the time for that is over.
async fn listen(
    listener: TcpListener,
    router: axum::Router,
    (asked, grace): (impl Fn() -> bool + Send + 'static, Duration),
    cut: &AtomicBool,
) -> std::io::Result<()> {
    // Events are small, and none is to wait for the next one.
    let listener = tokio::net::TcpListener::from_std(listener)?.tap_io(|connection| {
        let _ = connection.set_nodelay(true);
    });
    let (tell, told) = tokio::sync::watch::channel(false);
    let server = connections::serve(listener, router, told, connections::HEAD_WITHIN);
    let deadline = async {
        while !asked() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        let _ = tell.send(true);
        tokio::time::sleep(grace).await;
        cut.store(true, Ordering::Relaxed);
        tokio::time::sleep(LAST_WORDS).await;
    };
    let (server, deadline) = (std::pin::pin!(server), std::pin::pin!(deadline));
    select(server, deadline).await;
    Ok(())
}
