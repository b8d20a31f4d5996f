//! What requests to a hub have in common, those that read and those that write.

use std::time::Duration;

use ureq::http::{Response, header};
use ureq::{Agent, Body};

use super::endpoint::Endpoint;
use super::words::printable;

/// To reach a server.
const CONNECT: Duration = Duration::from_secs(20);
/// Bytes that are read of an error's text.
const LONGEST_ERROR: u64 = 64 << 10;

/// Sends requests to an endpoint. Redirects and refusals are answers like others, and no proxy stands before this
/// machine; `silence` is how long the next bytes of an answer may take.
pub fn agent(endpoint: &Endpoint, silence: Option<Duration>) -> Agent {
    let mut config = Agent::config_builder()
        .timeout_connect(Some(CONNECT))
        .timeout_per_read(silence)
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false);
    if endpoint.is_local() {
        config = config.proxy(None);
    }
    config.build().new_agent()
}

/// Why a hub refuses, fit for a terminal and without `secrets`.
pub fn refusal(response: &mut Response<Body>, secrets: &[&str]) -> String {
    // A HEAD has no body: the reason stands in a header.
    let told = response.headers().get("x-error-message").map(header_text);
    let body = response.body_mut().with_config().limit(LONGEST_ERROR).lossy_utf8(true);
    let text = told.or_else(|| body.read_to_string().ok()).unwrap_or_default();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    printable(value["error"].as_str().unwrap_or(&text), secrets)
}

pub(super) fn header_text(value: &header::HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}
