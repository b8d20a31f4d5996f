//! What is wrong with a request, in OpenAI's shape.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use longdraft_decode::DecodeError;
use longdraft_models::ModelError;
use serde_json::{Value, json};

pub(crate) type Result<T> = std::result::Result<T, ApiError>;

/// An answer that is an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    /// The field that it is about.
    param: Option<String>,
    message: String,
    /// Seconds after which it is worth asking again.
    retry_after: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
        let message = message.into();
        Self { status, kind, code: None, param: None, message, retry_after: None }
    }

    /// A field has a value that cannot be.
    pub(crate) fn field(param: &str, message: impl Into<String>) -> Self {
        Self { param: Some(param.to_owned()), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// Too many answers wait.
    pub(crate) fn busy(retry_after: u64) -> Self {
        let message = "the server is busy: no more answers or tokens can wait";
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, message);
        let code = Some("rate_limit_exceeded");
        Self { kind: "requests", code, retry_after: Some(retry_after), ..error }
    }

    /// The server ends.
    pub(crate) fn ending() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down")
    }

    pub(crate) fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// As the body of an answer or an event.
    pub(crate) fn to_json(&self) -> Value {
        let Self { kind, code, param, message, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = axum::body::Body::from(self.to_json().to_string());
        let mut response = (self.status, body).into_response();
        let json = HeaderValue::from_static("application/json");
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}

impl From<DecodeError> for ApiError {
    fn from(error: DecodeError) -> Self {
        use DecodeError as E;
        let message = error.to_string();
        match error {
            E::PromptTooLong { .. } => {
                Self::new(StatusCode::BAD_REQUEST, message).code("context_length_exceeded")
            }
            // A bias may leave no distribution.
            E::EmptyPrompt
            | E::UnknownToken { .. }
            | E::Sampling(_)
            | E::Shape(_)
            | E::Grammar(_)
            | E::NoDistribution => Self::new(StatusCode::BAD_REQUEST, message),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        }
    }
}

impl From<ModelError> for ApiError {
    /// Of a template or tokenizer that refuses what a request has.
    fn from(error: ModelError) -> Self {
        let status = match error {
            // Of what the machine does beside it, too.
            ModelError::Rendering(_) => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::BAD_REQUEST,
        };
        Self::new(status, error.to_string())
    }
}
