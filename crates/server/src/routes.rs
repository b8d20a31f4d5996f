//! Paths, who may ask at them, and what is answered.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, MatchedPath, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use longdraft_models::tokenizer::TextTokenizer;
use serde::Deserialize;
use serde_json::{Value, json};
use subtle::ConstantTimeEq;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::answer::{Chunks, Head, stream, whole};
use crate::app::{App, seconds_since_1970};
use crate::entry::Entry;
use crate::error::{ApiError, Result};
use crate::request::{
    Asked, ChatRequest, CompletionRequest, Prompt, fields, json_of, refuse_unsupported, require_ids,
};
use crate::{Access, ServeError, Settings};

type Shared = State<Arc<App>>;
/// Makes a request into what is asked for.
type Read = fn(&Value, &Settings, &TextTokenizer) -> Result<Asked>;

/// Paths that want no key: they tell nothing.
const OPEN: [&str; 2] = ["/", "/health"];
/// What the page may do: what it has in itself, and ask this server.
pub(crate) const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// All paths.
///
/// # Errors
/// - an origin that may ask is none
pub(crate) fn router(app: Arc<App>) -> std::result::Result<Router, ServeError> {
    let cors = cors(&app.settings.access)?;
    let body = app.settings.limits.body;
    let router = Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/reload", post(reload))
        .route("/learning", get(learning))
        .route("/", get(page))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(body))
        .layer(from_fn_with_state(Arc::clone(&app), guard));
    Ok(match cors {
        Some(cors) => router.layer(cors),
        None => router,
    }
    .with_state(app))
}

/// What lets pages of other origins ask, if any may.
fn cors(access: &Access) -> std::result::Result<Option<CorsLayer>, ServeError> {
    let origins = read_origins(&access.origins)?;
    if origins.is_empty() {
        return Ok(None);
    }
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins)
    };
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        // Clients send headers of their own (`x-stainless-*`); the origins say who may.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER]);
    Ok(Some(layer))
}

/// Origins as browsers send them: a scheme, a host and perhaps a port, in small letters; `null` stands for files, and
/// `*` for all.
///
/// # Errors
/// - a text is no origin, such as a page's whole address: nothing would ever equal it
pub(crate) fn read_origins(
    origins: &[String],
) -> std::result::Result<Vec<HeaderValue>, ServeError> {
    let read = |origin: &String| {
        let parts = origin.split_once("://");
        let has_host = parts.is_some_and(|(scheme, host)| {
            !scheme.is_empty() && !host.is_empty() && !host.contains(['/', '?', '#', '@', '*', ' '])
        });
        let value = if has_host || origin == "*" || origin == "null" {
            origin.to_ascii_lowercase().parse::<HeaderValue>().ok()
        } else {
            None
        };
        value.ok_or_else(|| ServeError::Origin(origin.clone()))
    };
    origins.iter().map(read).collect()
}

/// Lets those in who may ask, and counts what they are answered.
async fn guard(State(app): Shared, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>();
    let path = path.map_or("other", MatchedPath::as_str).to_owned();
    let access = &app.settings.access;
    let response = match &access.key {
        Some(key) if !OPEN.contains(&path.as_str()) && !has_key(request.headers(), key) => {
            let message = "a key is needed: Authorization: Bearer KEY";
            let error = ApiError::new(StatusCode::UNAUTHORIZED, message);
            error.code("invalid_api_key").into_response()
        }
        None if access.is_local
            && !names_this_machine(request.headers(), access.name.as_deref()) =>
        {
            let message =
                "the host must be localhost or a loopback address; with a key any will do";
            ApiError::new(StatusCode::FORBIDDEN, message).into_response()
        }
        _ => next.run(request).await,
    };
    app.meters().answered(&path, response.status().as_u16());
    response
}

/// Whether the request carries the key. How long that takes tells nothing of the key but its length.
fn has_key(headers: &HeaderMap, key: &str) -> bool {
    let value = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
    let given = match value.split_at_checked("Bearer ".len()) {
        Some((scheme, given)) if scheme.eq_ignore_ascii_case(b"Bearer ") => given,
        _ => return false,
    };
    given.ct_eq(key.as_bytes()).into()
}

/// Whether the host that a request names, if it names one, is this machine from within, or has the name that its user gave.
pub(crate) fn names_this_machine(headers: &HeaderMap, given: Option<&str>) -> bool {
    let Some(host) = headers.get(header::HOST) else { return true };
    let host = host.to_str().unwrap_or_default();
    let has_port = |(_, port): &(&str, &str)| port.parse::<u16>().is_ok();
    let name = host.rsplit_once(':').filter(has_port).map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let mut known = ["localhost"].into_iter().chain(given);
    known.any(|known| name.eq_ignore_ascii_case(known))
        || address.is_ok_and(|address| address.is_loopback())
}

fn json_response(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

async fn chat(State(app): Shared, entry: Entry) -> Result<Response> {
    ask(app, entry, ChatRequest::asked).await
}

async fn completions(State(app): Shared, entry: Entry) -> Result<Response> {
    ask(app, entry, CompletionRequest::asked).await
}

/// Has a request read, and then answered.
async fn ask(app: Arc<App>, Entry { body, place }: Entry, read: Read) -> Result<Response> {
    app.require_room()?;
    let read = move |app: &App| {
        let value = json_of(&body)?;
        require_model(app, &value)?;
        let asked = read(&value, &app.settings, &app.tokenizer)?;
        app.formed(asked, &value)
    };
    let asked = app.aside(place, read).await?;
    answer(app, asked).await
}

/// Refuses requests that are meant for another model.
fn require_model(app: &App, value: &Value) -> Result<()> {
    #[derive(Deserialize)]
    struct Named {
        model: Option<String>,
    }
    let Named { model } = fields(value)?;
    match model {
        Some(name) if name != app.settings.model.name => Err(no_model(app, &name)),
        _ => Ok(()),
    }
}

fn no_model(app: &App, name: &str) -> ApiError {
    let message =
        format!("the model `{name}` is not here; this one is `{}`", app.settings.model.name);
    ApiError::new(StatusCode::NOT_FOUND, message).code("model_not_found")
}

/// Has the decoder answer, and tells it whole or as a stream.
async fn answer(app: Arc<App>, mut asked: Asked) -> Result<Response> {
    let (telling, calls) = (asked.telling, asked.calls.take().map(Arc::new));
    let submitted = app.submit(asked)?;
    let kind = if telling.is_chat { "chatcmpl" } else { "cmpl" };
    let head = Head {
        id: format!("{kind}-{:x}-{:x}", app.began, submitted.number),
        created: seconds_since_1970(),
        model: app.settings.model.name.clone(),
        telling,
        calls,
    };
    if !telling.streams {
        return Ok(json_response(&whole(&head, submitted, &app.tokenizer).await?));
    }
    Ok(stream(Chunks::new(head, submitted), app))
}

fn description(app: &App) -> Value {
    let model = &app.settings.model;
    json!({
        "id": model.name, "object": "model", "created": app.began, "owned_by": "longdraft",
        "max_model_len": model.context,
    })
}

async fn models(State(app): Shared) -> Response {
    json_response(&json!({ "object": "list", "data": [description(&app)] }))
}

async fn model(State(app): Shared, Path(name): Path<String>) -> Result<Response> {
    if name != app.settings.model.name {
        return Err(no_model(&app, &name));
    }
    Ok(json_response(&description(&app)))
}

/// The tokens that a prompt or a conversation has, as the other paths take them.
async fn tokenize(State(app): Shared, Entry { body, place }: Entry) -> Result<Response> {
    #[derive(Deserialize)]
    struct Text {
        #[serde(alias = "content")]
        prompt: Option<String>,
        add_special_tokens: Option<bool>,
    }
    let read = move |app: &App| {
        let value = json_of(&body)?;
        refuse_unsupported(&value)?;
        if value.get("messages").is_some() {
            return fields::<ChatRequest>(&value)?.prompt(&app.tokenizer);
        }
        let Text { prompt, add_special_tokens } = fields(&value)?;
        let problem = || ApiError::field("prompt", "prompt or messages: a text is needed");
        let prompt = Prompt::Text(prompt.ok_or_else(problem)?);
        let (cutter, starts) =
            ((&app.settings.model, &app.tokenizer), add_special_tokens.unwrap_or(true));
        Ok(prompt.tokens(cutter, starts)?.pop().unwrap_or_default())
    };
    let tokens = app.aside(place, read).await?;
    let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
    let context = app.settings.model.context;
    Ok(json_response(&json!({ "tokens": ids, "count": ids.len(), "max_model_len": context })))
}

async fn detokenize(State(app): Shared, Entry { body, place }: Entry) -> Result<Response> {
    #[derive(Deserialize)]
    struct Tokens {
        tokens: Vec<u32>,
    }
    let read = move |app: &App| {
        let Tokens { tokens } = fields(&json_of(&body)?)?;
        require_ids("tokens", &tokens, &app.settings.model)?;
        Ok(app.tokenizer.decode(&tokens, false)?)
    };
    let text = app.aside(place, read).await?;
    Ok(json_response(&json!({ "content": text })))
}

/// Opens the draft anew. The type of the body keeps pages of other origins out, as everywhere.
async fn reload(State(app): Shared, Entry { place, .. }: Entry) -> Result<Response> {
    Ok(json_response(&json!({ "status": "ok", "draft": app.reload(place).await? })))
}

/// What is learned of the answers.
async fn learning(State(app): Shared) -> Response {
    let lessons = app.settings.lessons.as_ref();
    let told = lessons.map(|lessons| lessons.board.learning().to_json());
    json_response(&told.unwrap_or_else(|| json!({ "doing": "off" })))
}

/// A chat in the browser.
async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
    ];
    (headers, include_str!("page.html")).into_response()
}

async fn health() -> Response {
    json_response(&json!({ "status": "ok" }))
}

async fn metrics(State(app): Shared) -> Result<Response> {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let text = app
        .meters()
        .to_text()
        .map_err(|error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

async fn unknown(request: Request) -> ApiError {
    let message = format!("there is no {} {}", request.method(), request.uri().path());
    ApiError::new(StatusCode::NOT_FOUND, message).code("unknown_url")
}

async fn wrong_method(request: Request) -> ApiError {
    let message = format!("{} is not for {}", request.method(), request.uri().path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

#[cfg(test)]
mod tests;
