//! The hub's HTTP API: make a repository, upload large files, commit.
//!
//! ```text
//! POST /api/repos/create                       409 if it is there
//! POST /api/models/REPO/preupload/REVISION     which files are large
//! POST /REPO.git/info/lfs/objects/batch        where they go, and which are there already
//! PUT  each of them, whole or in parts         to addresses of another host: without the token
//! POST /api/models/REPO/commit/REVISION        one line a file
//! ```
//!
//! Redirects are not followed: what is written has one place.

use std::io::{Read, Seek, SeekFrom};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use longdraft_models::hub::{Endpoint, Token, agent, is_confidential, printable, refusal};
use serde_json::{Value, json};
use ureq::http::Response;
use ureq::{Agent, Body};
use url::Url;

use super::{Content, Upload};

/// Bytes that the hub looks at to tell text from binary.
const SAMPLE: usize = 512;
/// Bytes that are read of an answer.
const LONGEST: u64 = 64 << 20;
/// Branch that is written.
const REVISION: &str = "main";

/// Why the hub could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The address would carry the token in the clear.
    #[error("{0}: a token is sent over https only")]
    Insecure(String),
    /// The hub could not be reached.
    #[error("{step}: {reason}")]
    Transport {
        /// What was being done.
        step: String,
        /// What the client said.
        reason: String,
    },
    /// The hub refused.
    #[error("{step}: the hub answered {status}: {reason}")]
    Refused {
        /// What was being done.
        step: String,
        /// HTTP status.
        status: u16,
        /// What it said.
        reason: String,
    },
    /// The hub answered something else than its API says.
    #[error("{step}: unexpected answer: {reason}")]
    Unexpected {
        /// What was being done.
        step: String,
        /// What is missing.
        reason: String,
    },
    /// A file could not be read.
    #[error("{name}: {source}")]
    File {
        /// Its name.
        name: String,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
}

type Result<T> = std::result::Result<T, HubError>;
type Request = ureq::RequestBuilder<ureq::typestate::WithBody>;
type Answer = std::result::Result<Response<Body>, ureq::Error>;

/// What was sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sent {
    /// Large files uploaded.
    pub uploaded: usize,
    /// Large files that the hub had already.
    pub known: usize,
    /// Small files in the commit itself.
    pub small: usize,
    /// Address of the commit, if the hub said it.
    pub commit: Option<String>,
}

/// A repository of models on a hub.
pub struct Client {
    agent: Agent,
    endpoint: Endpoint,
    token: Token,
    repo: String,
}

impl Client {
    /// A client for `repo` (`org/name`).
    ///
    /// # Errors
    /// - the endpoint is not https and not this machine
    pub fn new(endpoint: Endpoint, token: Token, repo: &str) -> Result<Self> {
        if !endpoint.may_see_token() {
            return Err(HubError::Insecure(endpoint.to_string()));
        }
        // An answer may come as late as the hub has checked all files.
        let agent = agent(&endpoint, None);
        Ok(Self { agent, endpoint, token, repo: repo.to_owned() })
    }

    /// Makes the repository if it is not there, uploads what is new and commits everything at once.
    ///
    /// # Errors
    /// - the hub cannot be reached or refuses; nothing is committed then
    pub fn send(&self, uploads: &[Upload], summary: &str, private: bool) -> Result<Sent> {
        self.create(private)?;
        let large = self.large(uploads)?;
        let (lfs, small): (Vec<&Upload>, Vec<&Upload>) =
            uploads.iter().partition(|upload| large.contains(&upload.name));
        let mut sent = Sent { small: small.len(), ..Sent::default() };
        if !lfs.is_empty() {
            self.upload(&lfs, &mut sent)?;
        }
        sent.commit = self.commit(&lfs, &small, summary)?;
        Ok(sent)
    }

    fn create(&self, private: bool) -> Result<()> {
        let (org, name) = self.repo.split_once('/').unwrap_or(("", &self.repo));
        let body = json!({"name": name, "organization": org, "type": "model", "private": private});
        let step = "making the repository";
        match self.post(step, "/api/repos/create", &body) {
            Err(HubError::Refused { status: 409, .. }) => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// Names of files that go to the large-file store.
    fn large(&self, uploads: &[Upload]) -> Result<Vec<String>> {
        let mut files = Vec::new();
        for upload in uploads {
            let sample = head(&upload.content)
                .map_err(|source| HubError::File { name: upload.name.clone(), source })?;
            let sample = BASE64_STANDARD.encode(sample);
            files.push(json!({"path": upload.name, "sample": sample, "size": upload.size}));
        }
        let path = format!("/api/models/{}/preupload/{REVISION}", self.repo);
        let step = "asking how to upload";
        let answer = self.post(step, &path, &json!({ "files": files }))?;
        let modes = answer["files"].as_array().ok_or_else(|| unexpected(step, "no `files`"))?;
        let large = modes.iter().filter(|file| file["uploadMode"] == "lfs");
        Ok(large.filter_map(|file| file["path"].as_str().map(str::to_owned)).collect())
    }

    fn upload(&self, files: &[&Upload], sent: &mut Sent) -> Result<()> {
        let step = "asking where large files go";
        let objects: Vec<Value> =
            files.iter().map(|file| json!({"oid": file.sha256, "size": file.size})).collect();
        let body = json!({
            "operation": "upload", "transfers": ["basic", "multipart"], "objects": objects,
            "hash_algo": "sha256"
        });
        let answer =
            self.post(step, &format!("/{}.git/info/lfs/objects/batch", self.repo), &body)?;
        let objects =
            answer["objects"].as_array().ok_or_else(|| unexpected(step, "no `objects`"))?;
        for file in files {
            let object = objects.iter().find(|object| object["oid"] == file.sha256.as_str());
            let object = object.ok_or_else(|| unexpected(step, "a file is not answered"))?;
            if let Some(message) = object["error"]["message"].as_str() {
                return Err(unexpected(step, &self.printable(message)));
            }
            let upload = &object["actions"]["upload"];
            let Some(address) = upload["href"].as_str() else {
                sent.known += 1;
                continue;
            };
            match upload["header"]["chunk_size"].as_str().and_then(|size| size.parse().ok()) {
                Some(size) => self.put_parts(file, address, &upload["header"], size)?,
                None => {
                    self.put(file, address, 0, file.size)?;
                }
            }
            if let Some(verify) = object["actions"]["verify"]["href"].as_str() {
                let body = json!({"oid": file.sha256, "size": file.size});
                let step = format!("confirming {}", file.name);
                self.read(&step, self.request(&step, verify)?.send_json(&body))?;
            }
            sent.uploaded += 1;
        }
        Ok(())
    }

    /// Sends a part of a file; returns its tag.
    fn put(&self, file: &Upload, address: &str, start: u64, length: u64) -> Result<String> {
        let step = format!("uploading {}", file.name);
        let failed = |source| HubError::File { name: file.name.clone(), source };
        let mut bytes = part(&file.content, start, length).map_err(failed)?;
        let request = self.authorized(&step, address, self.agent.put(address))?;
        let request = request.header("Content-Length", length.to_string());
        let response = request.send(ureq::SendBody::from_reader(&mut bytes));
        let response = self.accepted(&step, response)?;
        let tag = response.headers().get("etag").and_then(|tag| tag.to_str().ok());
        Ok(tag.unwrap_or_default().to_owned())
    }

    fn put_parts(&self, file: &Upload, done: &str, header: &Value, size: u64) -> Result<()> {
        let step = format!("uploading {}", file.name);
        let mut addresses: Vec<(u64, &str)> = header
            .as_object()
            .into_iter()
            .flatten()
            .filter_map(|(number, address)| Some((number.parse().ok()?, address.as_str()?)))
            .collect();
        addresses.sort_unstable();
        let count = if size == 0 { 0 } else { file.size.div_ceil(size) };
        if addresses.len() as u64 != count {
            return Err(unexpected(&step, "parts and addresses differ in number"));
        }
        let mut parts = Vec::new();
        for (index, (number, address)) in (0_u64..).zip(addresses) {
            let start = index * size;
            let tag = self.put(file, address, start, size.min(file.size - start))?;
            parts.push(json!({"partNumber": number, "etag": tag}));
        }
        let body = json!({"oid": file.sha256, "parts": parts});
        self.read(&step, self.request(&step, done)?.send_json(&body)).map(|_| ())
    }

    fn commit(&self, lfs: &[&Upload], small: &[&Upload], summary: &str) -> Result<Option<String>> {
        let mut lines =
            vec![json!({"key": "header", "value": {"summary": summary, "description": ""}})];
        for file in small {
            let bytes = file.content.read();
            let bytes =
                bytes.map_err(|source| HubError::File { name: file.name.clone(), source })?;
            let content = BASE64_STANDARD.encode(bytes);
            let value = json!({"content": content, "path": file.name, "encoding": "base64"});
            lines.push(json!({"key": "file", "value": value}));
        }
        for file in lfs {
            let value =
                json!({"path": file.name, "algo": "sha256", "oid": file.sha256, "size": file.size});
            lines.push(json!({"key": "lfsFile", "value": value}));
        }
        let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let address = format!("{}/api/models/{}/commit/{REVISION}", self.endpoint, self.repo);
        let step = "committing";
        let request = self.request(step, &address)?.content_type("application/x-ndjson");
        let answer = self.read(step, request.send(body.as_bytes()))?;
        Ok(answer["commitUrl"].as_str().map(|address| self.printable(address)))
    }

    fn post(&self, step: &str, path: &str, body: &Value) -> Result<Value> {
        let address = format!("{}{path}", self.endpoint);
        let mut request = self.request(step, &address)?;
        if path.contains("/info/lfs/") {
            let kind = "application/vnd.git-lfs+json";
            request = request.header("Accept", kind).content_type(kind);
        }
        self.read(step, request.send_json(body))
    }

    fn request(&self, step: &str, address: &str) -> Result<Request> {
        self.authorized(step, address, self.agent.post(address))
    }

    /// A request with the token, if it goes to the hub itself; an address in the clear is refused.
    fn authorized(&self, step: &str, address: &str, request: Request) -> Result<Request> {
        let url = Url::parse(address).ok().filter(is_confidential);
        let url = url.ok_or_else(|| unexpected(step, "the hub gives an address without https"))?;
        if !self.endpoint.is_own(&url) {
            return Ok(request);
        }
        Ok(request.header("Authorization", self.token.authorization()))
    }

    fn printable(&self, text: &str) -> String {
        printable(text, &[self.token.secret()])
    }

    fn accepted(&self, step: &str, response: Answer) -> Result<Response<Body>> {
        let mut response = response.map_err(|error| HubError::Transport {
            step: step.to_owned(),
            reason: self.printable(&error.to_string()),
        })?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let reason = if status.is_redirection() {
            "it points to another address: was the repository renamed?".to_owned()
        } else {
            refusal(&mut response, &[self.token.secret()])
        };
        Err(HubError::Refused { step: step.to_owned(), status: status.as_u16(), reason })
    }

    /// The JSON of an accepted answer; null if it has none.
    fn read(&self, step: &str, response: Answer) -> Result<Value> {
        let mut response = self.accepted(step, response)?;
        let body = response.body_mut().with_config().limit(LONGEST).lossy_utf8(true);
        let text = body.read_to_string().unwrap_or_default();
        Ok(serde_json::from_str(&text).unwrap_or_default())
    }
}

/// Some bytes from a place on.
fn part(content: &Content, start: u64, length: u64) -> std::io::Result<Box<dyn Read>> {
    Ok(match content {
        Content::Bytes(bytes) => {
            let mut all = std::io::Cursor::new(bytes.clone());
            all.set_position(start);
            Box::new(all.take(length))
        }
        Content::File(path) => {
            let mut file = std::fs::File::open(path)?;
            file.seek(SeekFrom::Start(start))?;
            Box::new(file.take(length))
        }
    })
}

fn head(content: &Content) -> std::io::Result<Vec<u8>> {
    match content {
        Content::Bytes(bytes) => Ok(bytes[..bytes.len().min(SAMPLE)].to_vec()),
        Content::File(path) => {
            let mut out = Vec::new();
            std::fs::File::open(path)?.take(SAMPLE as u64).read_to_end(&mut out)?;
            Ok(out)
        }
    }
}

fn unexpected(step: &str, reason: &str) -> HubError {
    HubError::Unexpected { step: step.to_owned(), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_the_same_of_a_file_and_of_what_is_made_here() {
        let bytes: Vec<u8> = (0..10).collect();
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), &bytes).expect("written");
        for content in [Content::Bytes(bytes.clone()), Content::File(file.path().to_path_buf())] {
            for (start, length) in [(0, 10), (0, 4), (4, 4), (8, 2)] {
                let mut read = Vec::new();
                let mut part = part(&content, start as u64, length as u64).expect("a part");
                part.read_to_end(&mut read).expect("read");
                assert_eq!(read, bytes[start..start + length], "{start} {length}");
            }
        }
    }
}
