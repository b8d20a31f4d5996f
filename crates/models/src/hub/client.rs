//! Requests to a hub: the list of files, what is known of one, its bytes.

use std::fmt::Display;
use std::time::Duration;

use serde::Deserialize;
use ureq::http::{Method, Request, Response, header};
use ureq::{Agent, Body};
use url::Url;

use super::cache::Cache;
use super::endpoint::{Endpoint, has_login, is_confidential};
use super::http::{agent, header_text, refusal};
use super::login::Login;
use super::names::{is_key, is_repository, is_revision};
use super::words::printable;
use super::{Variables, environment};
use crate::error::{ModelError, Result};

/// For the next bytes of an answer.
const SILENCE: Duration = Duration::from_mins(1);
/// Servers that one request is sent on to.
const REDIRECTS: usize = 10;
/// Bytes of a list of files.
const LONGEST_LIST: u64 = 256 << 20;
/// What helps where nothing better is known.
const REMEDY: &str = "check the network, HF_ENDPOINT and HF_TOKEN, or give a local folder or file";

/// What a repository holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Weights, a tokenizer, a configuration.
    Model,
    /// Text.
    DataSet,
}

impl Kind {
    /// As paths of the API and folders of the cache begin.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::DataSet => "datasets",
        }
    }

    /// As messages call it.
    fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::DataSet => "data set",
        }
    }
}

/// Files of a repository at one commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listing {
    /// The commit; may be part of a path.
    pub(crate) commit: String,
    /// Names as the hub gives them: not to be trusted.
    pub(crate) names: Vec<String>,
}

/// What the hub tells of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Metadata {
    /// Entity tag of the content; may be part of a path.
    pub(super) tag: String,
    /// Whether the tag is the SHA-256 sum of a large file.
    pub(super) is_sum: bool,
    /// Bytes, if they were told.
    pub(super) size: Option<u64>,
}

/// A repository on the hub, at a branch, tag or commit.
pub(crate) struct Repository {
    agent: Agent,
    endpoint: Endpoint,
    login: Option<Login>,
    kind: Kind,
    id: String,
    revision: String,
    pub(super) cache: Cache,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Repository {
    /// As the environment says: `HF_ENDPOINT`, `HF_HOME` and the user's token. Nothing is sent.
    ///
    /// # Errors
    /// - `id` is no `org/name`, `revision` would leave its folder
    /// - the endpoint or the token is unusable, or no home folder is known
    pub(crate) fn open(kind: Kind, id: &str, revision: &str) -> Result<Self> {
        Self::with(&environment, kind, id, revision)
    }

    pub(super) fn with(
        variables: Variables<'_>,
        kind: Kind,
        id: &str,
        revision: &str,
    ) -> Result<Self> {
        let fail = |reason: String| ModelError::Hub {
            kind: kind.name(),
            repo: printable(id, &[]),
            reason,
            remedy: REMEDY.to_owned(),
        };
        if !is_repository(id) || !is_revision(revision) {
            let revision = printable(revision, &[]);
            return Err(fail(format!("not a repository and revision: `{revision}`")));
        }
        let endpoint = Endpoint::find(variables).map_err(|error| fail(error.to_string()))?;
        let login = Login::find(variables).map_err(|error| fail(error.to_string()))?;
        let cache = Cache::find(variables, kind, id)
            .ok_or_else(|| fail("no cache folder: neither HF_HOME nor HOME is set".into()))?;
        Ok(Self {
            agent: agent(&endpoint, Some(SILENCE)),
            login: login.filter(|_| endpoint.may_see_token()),
            endpoint,
            kind,
            id: id.to_owned(),
            revision: revision.to_owned(),
            cache,
        })
    }

    /// The branch, tag or commit that was asked for.
    pub(super) fn revision(&self) -> &str {
        &self.revision
    }

    /// An error of this repository, its text made fit for a terminal.
    pub(crate) fn error(&self, reason: impl Display) -> ModelError {
        self.error_with(reason, REMEDY)
    }

    /// The same with a way out of its own.
    pub(super) fn error_with(&self, reason: impl Display, remedy: impl Display) -> ModelError {
        let (reason, remedy) = (self.printed(reason), remedy.to_string());
        ModelError::Hub { kind: self.kind.name(), repo: self.id.clone(), reason, remedy }
    }

    /// Other files than those asked for; the same care.
    pub(super) fn other_files(&self, problem: impl Display, remedy: impl Display) -> ModelError {
        let (problem, remedy) = (self.printed(problem), self.printed(remedy));
        ModelError::HubFiles { kind: self.kind.name(), repo: self.id.clone(), problem, remedy }
    }

    fn printed(&self, text: impl Display) -> String {
        let secret = self.login.as_ref().map_or("", |login| login.token.secret());
        printable(&text.to_string(), &[secret])
    }

    /// The commit that the revision stands at, and its files.
    /// It fails where the hub cannot be reached, refuses, or answers something else.
    pub(crate) fn listing(&self) -> Result<Listing> {
        let (org, name) = self.id.split_once('/').unwrap_or_default();
        let path = ["api", self.kind.plural(), org, name, "revision", &self.revision];
        let address = self.endpoint.address(path);
        let mut response = self.request(&Method::GET, address, None)?.0;
        let info: Info = response
            .body_mut()
            .with_config()
            .limit(LONGEST_LIST)
            .read_json()
            .map_err(|error| self.error(format!("the list of files: {error}")))?;
        if !is_key(&info.sha) {
            return Err(self.error(format!("the hub names an impossible commit `{}`", info.sha)));
        }
        let names = info.siblings.into_iter().map(|file| file.rfilename).collect();
        Ok(Listing { commit: info.sha, names })
    }

    /// The commit that was fetched last, and those of its files that lie in the cache.
    pub(super) fn cached_listing(&self) -> Option<Listing> {
        let commit = self.cache.commit_of(&self.revision)?;
        Some(Listing { names: self.cache.names(&commit), commit })
    }

    /// What the hub tells of a file at a commit.
    pub(super) fn metadata(&self, commit: &str, name: &str) -> Result<Metadata> {
        let (_, told) = self.request(&Method::HEAD, self.file(commit, name), None)?;
        let Some(tag) = told.linked_tag.as_ref().or(told.tag.as_ref()) else {
            return Err(self.error(format!("{name}: the hub tells no entity tag")));
        };
        if !is_key(tag) {
            return Err(self.error(format!("{name}: impossible entity tag `{tag}`")));
        }
        let is_sum = tag.len() == 64 && told.linked_tag.is_some();
        Ok(Metadata { tag: tag.clone(), is_sum, size: told.size })
    }

    /// The bytes of a file from `start`: status 206 if the server left out those before.
    pub(super) fn bytes(&self, commit: &str, name: &str, start: u64) -> Result<Response<Body>> {
        let range = (start > 0).then_some(start);
        Ok(self.request(&Method::GET, self.file(commit, name), range)?.0)
    }

    fn file(&self, commit: &str, name: &str) -> Url {
        let above = (self.kind == Kind::DataSet).then_some("datasets");
        let parts = self.id.split('/').chain(["resolve", commit]).chain(name.split('/'));
        self.endpoint.address(above.into_iter().chain(parts))
    }

    /// Sends a request and follows it to other servers, which do not see the token. A `HEAD` stays
    /// with the endpoint: what it tells of a file counts, not what its store says.
    fn request(
        &self,
        method: &Method,
        mut address: Url,
        range: Option<u64>,
    ) -> Result<(Response<Body>, Told)> {
        let mut told = Told::default();
        for _ in 0..=REDIRECTS {
            let is_own = self.endpoint.is_own(&address);
            let response = self.send(method, &address, range, is_own)?;
            if is_own {
                told.read(&response);
            }
            if !response.status().is_redirection() {
                return Ok((self.accepted(response, is_own)?, told));
            }
            let next = self.next(&address, &response)?;
            if method == Method::HEAD && !self.endpoint.is_own(&next) {
                return Ok((response, told));
            }
            address = next;
        }
        Err(self.error(format!("more than {REDIRECTS} redirects")))
    }

    fn send(
        &self,
        method: &Method,
        address: &Url,
        range: Option<u64>,
        is_own: bool,
    ) -> Result<Response<Body>> {
        let mut request = Request::builder()
            .method(method)
            .uri(address.as_str())
            // Sizes and ranges are those of the file itself.
            .header(header::ACCEPT_ENCODING, "identity");
        if let (Some(login), true) = (&self.login, is_own) {
            request = request.header(header::AUTHORIZATION, login.token.authorization());
        }
        if let Some(start) = range {
            request = request.header(header::RANGE, format!("bytes={start}-"));
        }
        let request = request.body(()).map_err(|error| self.error(error))?;
        let host = address.host_str().unwrap_or_default();
        self.agent.run(request).map_err(|error| self.error(format!("{host}: {error}")))
    }

    /// Where an answer points to.
    fn next(&self, from: &Url, response: &Response<Body>) -> Result<Url> {
        let location = response.headers().get(header::LOCATION).map(header_text);
        let next = location.as_deref().and_then(|location| from.join(location).ok());
        let Some(next) = next else {
            return Err(self.error(format!("status {} without an address", response.status())));
        };
        let weaker = is_confidential(from) && !is_confidential(&next);
        if !matches!(next.scheme(), "http" | "https") || weaker || has_login(&next) {
            let host = next.host_str().unwrap_or_default();
            return Err(self.error(format!("refused a redirect to {}://{host}", next.scheme())));
        }
        Ok(next)
    }

    /// An answer that is no refusal.
    fn accepted(&self, mut response: Response<Body>, is_own: bool) -> Result<Response<Body>> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let reason = refusal(&mut response, &[]);
        let advice = match (status.as_u16(), &self.login) {
            (401 | 403, None) if !self.endpoint.may_see_token() => {
                " (no token was sent: it goes over https only)"
            }
            (401 | 403, None) => " (no token was sent: gated and private ones need HF_TOKEN)",
            (401 | 403, Some(_)) => " (the token may not read it)",
            _ => "",
        };
        let who = if is_own { "the hub" } else { "its store" };
        let reason = format!("{who} answered {}{advice}: {reason}", status.as_u16());
        Err(self.error_with(reason.trim_end_matches([':', ' ']), self.remedy(status.as_u16())))
    }

    /// What helps against a refusal.
    fn remedy(&self, status: u16) -> String {
        let parts = self.id.split('/');
        let above = (self.kind == Kind::DataSet).then_some("datasets");
        let page = self.endpoint.address(above.into_iter().chain(parts));
        match (status, &self.login) {
            // A hub says of what does not exist that it may not be seen, too.
            (401 | 403, None) => format!(
                "check the name; if it is gated or private, accept its terms at {page} and set HF_TOKEN"
            ),
            (401 | 403, Some(_)) => format!(
                "check the name; if it is gated, accept its terms at {page} with the token's user, or ask \
                 its owner"
            ),
            (404, None) => {
                format!("check the name at {page}; what is private is hidden without HF_TOKEN")
            }
            (404, Some(_)) => format!("check the name at {page}"),
            (429 | 500.., _) => "wait, and give the same command: it goes on from there".to_owned(),
            _ => REMEDY.to_owned(),
        }
    }
}

/// What the endpoint's own answers tell of a file.
#[derive(Debug, Default)]
struct Told {
    linked_tag: Option<String>,
    tag: Option<String>,
    size: Option<u64>,
}

impl Told {
    fn read(&mut self, response: &Response<Body>) {
        let header = |name: &str| response.headers().get(name).map(header_text);
        if self.linked_tag.is_none() {
            self.linked_tag = header("x-linked-etag").map(|tag| strip(&tag));
            let size = header("x-linked-size").and_then(|size| size.parse().ok());
            self.size = self.size.or(size);
        }
        self.tag = header("etag").map(|tag| strip(&tag)).or(self.tag.take());
        if response.status().is_success() {
            let size = || header("content-length")?.parse().ok();
            self.size = self.size.or_else(size);
        }
    }
}

/// An entity tag without its marks.
fn strip(tag: &str) -> String {
    tag.trim_start_matches("W/").trim_matches('"').to_owned()
}
