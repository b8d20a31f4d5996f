//! `longdraft serve`: answers requests over HTTP, several at a time, with a draft or without.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use longdraft_decode::BatchEngine;
use longdraft_server::{Access, Limits, Model, ServeError, Settings, serve};
use serde_json::json;

use crate::cli::ServeArguments;
use crate::decoding::{Models, PaceChoice, holdings, stop_tokens};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;

/// Variable with the key that requests have to carry.
const KEY: &str = "LONGDRAFT_API_KEY";

/// Serves until a signal asks to end.
pub(crate) fn run(arguments: &ServeArguments, json: bool) -> Result<()> {
    let decoding = &arguments.decoding;
    let limits = [arguments.max_tokens, arguments.max_request_tokens, arguments.max_total_tokens];
    if arguments.parallel == 0 || limits.contains(&Some(0)) {
        return Err(Failure::usage("--parallel and limits of tokens must be at least 1"));
    }
    let defaults = decoding.options(arguments.temperature, PaceChoice::Measured)?;
    // Before anything large is read.
    let listener = listen(SocketAddr::new(arguments.host, arguments.port))?;
    let models = decoding.open(&arguments.target)?;
    errln!("{}; drafts: {}", holdings(&models.target), decoding.drafter_name(&models));
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
    let key = arguments.api_key.clone().or_else(|| std::env::var(KEY).ok());
    let key = key.filter(|key| !key.is_empty());
    if key.is_none() && !arguments.host.is_loopback() {
        errln!("warning: whoever reaches {} may ask: --api-key KEY lets in few", arguments.host);
    }
    let is_local = arguments.host.is_loopback();
    let access = Access { key, origins: arguments.allow_origin.clone(), is_local };
    let address = listener.local_addr().map_err(Failure::work)?;
    let interrupts = Interrupts::listen();
    if json {
        outln!("{}", json!({ "model": model.name, "address": format!("http://{address}") }));
    } else {
        outln!("{} answers at http://{address}", model.name);
    }
    crate::terminal::flush();
    let settings = Settings { model, defaults, limits, access };
    let asked = interrupts.clone();
    serve(settings, listener, engine, &models.tokenizer, move || asked.asked())?;
    Err(interrupts.failure())
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).map_err(|error| {
        Failure::usage(format!("{address}: {error}"))
            .hint("another program may answer there: give another --port, or 0 for a free one")
    })
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
