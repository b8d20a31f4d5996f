//! MLflow's REST API, as far as a run needs it.

use std::thread::sleep;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use longdraft_models::hub::printable;
use serde_json::Value;

use crate::error::{Result, TrackerError};
use crate::run::Environment;

const CONNECT: Duration = Duration::from_secs(3);
const ANSWER: Duration = Duration::from_secs(10);

/// Pauses before a call is tried again.
const PAUSES: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(2)];

/// Speaks to one server.
pub(super) struct Client {
    agent: ureq::Agent,
    base: String,
    authorization: Option<String>,
}

/// Why a call did not succeed.
#[derive(Debug)]
enum Failure {
    /// No answer.
    Transport(String),
    /// An answer that says no: status, MLflow's error code and message.
    Refused(u16, String, String),
}

impl Failure {
    fn may_pass(&self) -> bool {
        match self {
            Self::Transport(_) => true,
            Self::Refused(status, ..) => *status == 429 || *status >= 500,
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Transport(problem) => f.write_str(problem),
            Self::Refused(status @ (401 | 403), ..) => write!(
                f,
                "no access ({status}): set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, \
                 or MLFLOW_TRACKING_TOKEN"
            ),
            Self::Refused(status, code, _) if code.is_empty() => {
                write!(f, "answers {status}; is this the address of an MLflow server?")
            }
            Self::Refused(status, code, message) => write!(f, "{status} {code} {message}"),
        }
    }
}

impl Client {
    /// A client for a server's address; credentials come from the environment.
    /// It fails where the address is not HTTP, or holds credentials.
    pub(super) fn new(uri: &str, environment: &Environment) -> Result<Self> {
        // The address itself is not repeated: it may hold a password.
        if uri.contains('@') {
            return Err(TrackerError::Setup(
                "the address holds a user or password: set MLFLOW_TRACKING_USERNAME and \
                 MLFLOW_TRACKING_PASSWORD instead"
                    .to_owned(),
            ));
        }
        if !uri.starts_with("http://") && !uri.starts_with("https://") {
            return Err(TrackerError::Setup(format!(
                "{uri}: only servers are supported: start one with `mlflow server` and set \
                 tracking.mlflow.uri to its http:// address"
            )));
        }
        let basic = || {
            let user = environment.get("MLFLOW_TRACKING_USERNAME")?;
            let password = environment.get("MLFLOW_TRACKING_PASSWORD").unwrap_or_default();
            Some(format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}"))))
        };
        let bearer = || Some(format!("Bearer {}", environment.get("MLFLOW_TRACKING_TOKEN")?));
        let config = ureq::Agent::config_builder()
            .timeout_connect(Some(CONNECT))
            .timeout_global(Some(ANSWER))
            .http_status_as_error(false)
            .build();
        Ok(Self {
            agent: config.new_agent(),
            base: uri.trim_end_matches('/').to_owned(),
            authorization: basic().or_else(bearer),
        })
    }

    /// The server's address.
    pub(super) fn base(&self) -> &str {
        &self.base
    }

    /// `GET` with a query; `None` if what it names does not exist.
    pub(super) fn get(&self, path: &str, query: (&str, &str)) -> Result<Option<Value>> {
        let call = || {
            let mut request = self.agent.get(self.url(path)).query(query.0, query.1);
            if let Some(authorization) = &self.authorization {
                request = request.header("Authorization", authorization);
            }
            answer(request.call())
        };
        match retry(call) {
            Ok(value) => Ok(Some(value)),
            Err(Failure::Refused(404, ..)) => Ok(None),
            Err(failure) => Err(self.error(&failure)),
        }
    }

    pub(super) fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let call = || {
            let mut request = self.agent.post(self.url(path));
            if let Some(authorization) = &self.authorization {
                request = request.header("Authorization", authorization);
            }
            answer(request.send_json(body))
        };
        retry(call).map_err(|failure| self.error(&failure))
    }

    fn url(&self, path: &str) -> String {
        format!("{}/api/2.0/mlflow/{path}", self.base)
    }

    /// A problem of this server, in words fit for a terminal.
    pub(super) fn error(&self, problem: &dyn std::fmt::Display) -> TrackerError {
        let login = self.authorization.as_deref().and_then(|text| text.split(' ').next_back());
        let problem = printable(&problem.to_string(), &[login.unwrap_or_default()]);
        TrackerError::Server { url: self.base.clone(), problem }
    }
}

fn retry(
    call: impl Fn() -> std::result::Result<Value, Failure>,
) -> std::result::Result<Value, Failure> {
    for pause in PAUSES {
        match call() {
            Err(failure) if failure.may_pass() => sleep(pause),
            done => return done,
        }
    }
    call()
}

fn answer(
    response: std::result::Result<ureq::http::Response<ureq::Body>, ureq::Error>,
) -> std::result::Result<Value, Failure> {
    let transport = |error: ureq::Error| Failure::Transport(error.to_string());
    let mut response = response.map_err(transport)?;
    let status = response.status().as_u16();
    let text = response.body_mut().read_to_string().map_err(transport)?;
    let value: Value = serde_json::from_str(&text).unwrap_or_default();
    if status < 400 {
        return Ok(value);
    }
    let field = |name: &str| value[name].as_str().unwrap_or_default().chars().take(200).collect();
    Err(Failure::Refused(status, field("error_code"), field("message")))
}
