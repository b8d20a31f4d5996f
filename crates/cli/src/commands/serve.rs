//! `longdraft serve`: answers requests over HTTP, several at a time, with a draft or without.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use longdraft_decode::BatchEngine;
use longdraft_decode::drafter::Proposer;
use longdraft_server::{
    Access, Drafts, Lessons, Limits, Model, OpenDraft, ServeError, Settings, check_origins, serve,
};

use crate::cli::{PaceChoice, ServeArguments};
use crate::commands::learn::{self, Learner};
use crate::decoding::{Models, holdings, stop_tokens};
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;

/// Variable with the key that requests have to carry.
const KEY: &str = "LONGDRAFT_API_KEY";
/// First port that takes no rights.
const FREE_FOR_ALL: u16 = 1024;

/// Serves until a signal asks to end.
pub(crate) fn run(arguments: &ServeArguments, json: bool) -> Result<()> {
    let decoding = &arguments.decoding;
    let limits = [arguments.max_tokens, arguments.max_request_tokens, arguments.max_total_tokens];
    if arguments.parallel == 0 || limits.contains(&Some(0)) {
        return Err(Failure::usage("--parallel and limits of tokens must be at least 1"));
    }
    check_named(arguments)?;
    let defaults = decoding.options(arguments.temperature, PaceChoice::Measured)?;
    let key = key(arguments)?;
    learn::check(arguments)?;
    if arguments.learning.learn.is_none() {
        decoding.warn_of_unused_layout();
    }
    // Before anything large is read.
    let listener = listen(&addresses(&arguments.host, arguments.port)?)?;
    let mut models = decoding.open(&arguments.target)?;
    let mut learner = Learner::open(arguments, &models)?;
    if let Some(learner) = &mut learner {
        models.grown = learner.grown();
        models.take(learner.proposer(&models)?);
    }
    let models = Arc::new(models);
    errln!(
        "{}; drafts: {}",
        holdings(&models.target, models.draft.as_deref()),
        decoding.drafter_parts(&models)
    );
    let drafters = (0..arguments.parallel).map(|_| decoding.drafter(&models));
    let engine = BatchEngine::new(&models.target, drafters.collect::<Result<_>>()?);
    let model = model(arguments, &models);
    let limits = Limits {
        queue: arguments.queue,
        max_tokens: arguments.max_tokens.unwrap_or(model.context),
        request_tokens: arguments.max_request_tokens,
        total_tokens: arguments.max_total_tokens,
        body: arguments.max_body.saturating_mul(1024),
        grace: Duration::from_secs(arguments.grace),
    };
    let address = listener.local_addr().map_err(Failure::work)?;
    let is_local = address.ip().is_loopback();
    if key.is_none() && !is_local {
        errln!("warning: whoever reaches {} may ask: --api-key KEY lets in few", address.ip());
    }
    let name = Some(arguments.host.clone());
    let access = Access { key, origins: arguments.allow_origin.clone(), is_local, name };
    let interrupts = Interrupts::listen();
    if json {
        outjson!({ "model": model.name, "address": format!("http://{address}") });
    } else {
        outln!("{} answers at http://{address}", model.name);
    }
    crate::terminal::flush();
    let (control, inbox) = longdraft_server::channel();
    let drafts = drafts(arguments, &models);
    let (lessons, lesson) = match learner {
        Some(learner) => {
            let (lessons, served) = Lessons::new();
            let board = Arc::clone(&lessons.board);
            (Some(lessons), Some(learner.start(&models, control, (served, board))?))
        }
        None => (None, None),
    };
    let hides_lookup = models.grown.is_some();
    let settings = Settings { model, defaults, limits, access, lessons, hides_lookup };
    let asked = interrupts.clone();
    let parts = (engine, drafts, inbox);
    let served = serve(settings, listener, parts, &models.tokenizer, move || asked.asked());
    if let Some(lesson) = lesson {
        lesson.end();
    }
    served?;
    Err(interrupts.failure())
}

/// Refuses what no request could ever have or name: an empty name of the model, bodies of no bytes, and origins that are none.
fn check_named(arguments: &ServeArguments) -> Result<()> {
    if arguments.name.as_ref().is_some_and(|name| name.trim().is_empty()) {
        return Err(Failure::usage("--name is empty").hint("leave it out, or give a name"));
    }
    if arguments.max_body == 0 {
        return Err(Failure::usage("--max-body must be at least 1"));
    }
    Ok(check_origins(&arguments.allow_origin)?)
}

/// How the server comes by another draft: the one that was learned last, or what `--draft` leads to then.
fn drafts<'a>(arguments: &'a ServeArguments, models: &'a Arc<Models>) -> Drafts<'a> {
    let decoding = &arguments.decoding;
    let may_come = decoding.draft.is_some() || arguments.learning.learn_method.is_some();
    let open = may_come.then(|| {
        let (decoding, models) = (decoding.clone(), Arc::clone(models));
        let learned = arguments.learning.learn.clone();
        let open = move || -> Result<Proposer> {
            let learned = learned.as_deref().and_then(learn::learned_draft);
            let source = match learned {
                Some(place) => Some(DraftSource::find(&place)?),
                None => decoding.draft_source()?,
            };
            let source = source.ok_or_else(|| Failure::usage("there is no draft yet"))?;
            models.open_another(&decoding, &source)
        };
        Arc::new(move || open().map_err(|failure| failure.message().to_owned())) as Arc<OpenDraft>
    });
    let make = move |proposer: &Proposer| {
        let drafter = decoding.drafter_with(models, proposer);
        drafter.map_err(|failure| failure.message().to_owned())
    };
    Drafts { open, make: Box::new(make) }
}

/// The key that requests have to carry, if one is wanted.
///
/// # Errors
/// - it is blank, as of a variable that is not set: everybody would be let in
fn key(arguments: &ServeArguments) -> Result<Option<String>> {
    let given = arguments.api_key.clone().map(|key| ("--api-key", key));
    // A variable without text is as good as none.
    let set = || std::env::var(KEY).ok().filter(|key| !key.is_empty()).map(|key| (KEY, key));
    let Some((name, key)) = given.or_else(set) else { return Ok(None) };
    if !key.trim().is_empty() {
        return Ok(Some(key));
    }
    let remedy = format!("give a key; to let everybody ask, leave --api-key out and unset {KEY}");
    Err(Failure::usage(format!("{name} is empty")).hint(remedy))
}

/// What an address or a name stands for, IPv4 first: most clients are given that of this machine.
/// It fails where nothing has that name.
fn addresses(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    let found = (host, port).to_socket_addrs().map(Iterator::collect::<Vec<SocketAddr>>);
    let problem = match found {
        Ok(mut addresses) if !addresses.is_empty() => {
            addresses.sort_by_key(SocketAddr::is_ipv6);
            return Ok(addresses);
        }
        Ok(_) => "nothing has that name".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(Failure::usage(format!("--host {host}: {problem}"))
        .hint("give an IP address, such as 127.0.0.1 or 0.0.0.0"))
}

/// Listens at the first of some addresses that this machine has. Where another program answers at one, clients of the
/// name would reach that one, so the next is not taken in its place.
pub(super) fn listen(addresses: &[SocketAddr]) -> Result<TcpListener> {
    let mut refused = None;
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
                refused = refused.or(Some((address, error)));
            }
            Err(error) => {
                refused = Some((address, error));
                break;
            }
        }
    }
    let Some((address, error)) = refused else {
        return Err(Failure::usage("there is no address to listen at"));
    };
    Err(Failure::usage(format!("{address}: {error}")).hint(remedy(error.kind(), address.port())))
}

/// What helps where a port cannot be listened at.
fn remedy(reason: ErrorKind, port: u16) -> &'static str {
    match reason {
        ErrorKind::PermissionDenied if port < FREE_FOR_ALL => {
            "ports below 1024 need root: give another --port"
        }
        ErrorKind::AddrNotAvailable => {
            "this machine has no such address: leave --host out, or give 0.0.0.0"
        }
        _ => "another program may answer there: give another --port, or 0 for a free one",
    }
}

/// How the model is described to clients.
fn model(arguments: &ServeArguments, models: &Models) -> Model {
    let config = models.target.config();
    let named = arguments.name.clone().unwrap_or_else(|| {
        let path = Path::new(&arguments.target);
        // A hub's name is no path.
        let stem = if path.is_file() { path.file_stem() } else { path.file_name() };
        let is_local = path.exists();
        let stem = stem.filter(|_| is_local).map(|stem| stem.to_string_lossy().into_owned());
        stem.unwrap_or_else(|| arguments.target.clone())
    });
    Model {
        name: named,
        context: config.max_position_embeddings,
        vocabulary: config.vocab_size,
        bos: config.bos_token_id,
        stop_tokens: stop_tokens(&models.target),
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        match error {
            ServeError::Origin(_) => Self::usage(error),
            _ => Self::work(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_is_that_of_the_cause() {
        assert!(remedy(ErrorKind::PermissionDenied, 80).contains("need root"));
        assert!(remedy(ErrorKind::AddrNotAvailable, 80).contains("no such address"));
        for (reason, port) in [(ErrorKind::AddrInUse, 80), (ErrorKind::PermissionDenied, 8080)] {
            assert!(remedy(reason, port).contains("another program"), "{reason} {port}");
        }
    }

    #[test]
    fn a_name_of_this_machine_is_an_address() {
        let found = addresses("localhost", 80).expect("every machine has that name");
        assert!(found.iter().all(|address| address.ip().is_loopback() && address.port() == 80));
        let failure = addresses("no where", 80).expect_err("no name of a machine");
        assert!(failure.message().contains("no where"), "{}", failure.message());
        assert!(failure.hint.is_some_and(|hint| hint.contains("IP address")));
    }
}
