//! A hub that runs on this machine, well-behaved or hostile.

use std::collections::BTreeMap;
use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::longdraft;
use super::server::{Asked, serve};

/// The program of a user without a login, whose files of the hub lie in `home`.
pub(crate) fn at_hub(arguments: &[&str], endpoint: &str, home: &Path) -> Command {
    let mut command = longdraft(arguments);
    command.env("HF_ENDPOINT", endpoint).env("HF_HOME", home);
    for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy", "HTTP_PROXY", "ALL_PROXY"] {
        command.env_remove(name);
    }
    command
}

/// Where its branches stand.
pub(crate) const COMMIT: &str = "0123abc";

/// What the stand-in has and does.
#[derive(Clone)]
pub(crate) struct Hub {
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    /// Names that the list has beside the files.
    pub(crate) listed: Vec<String>,
    pub(crate) commit: String,
    /// Entity tag of all files, in place of one for each.
    pub(crate) tag: Option<String>,
    /// Whether that is the sum of a large file.
    pub(crate) is_linked: bool,
    /// Where requests are sent on to: of all kinds, or for files only.
    pub(crate) redirect: Option<(String, bool)>,
    /// Status and body of every answer.
    pub(crate) refusal: Option<(&'static str, String)>,
    /// Bytes of a file after which the connection ends.
    pub(crate) cut: Option<usize>,
    pub(crate) knows_ranges: bool,
}

/// A request: method and path, authorization, range.
pub(crate) type Request = (String, Option<String>, Option<String>);
/// What was asked for.
pub(crate) type Log = Arc<Mutex<Vec<Request>>>;

impl Hub {
    pub(crate) fn of(files: BTreeMap<String, Vec<u8>>) -> Self {
        Self {
            files,
            listed: Vec::new(),
            commit: COMMIT.into(),
            tag: None,
            is_linked: false,
            redirect: None,
            refusal: None,
            cut: None,
            knows_ranges: true,
        }
    }

    pub(crate) fn of_folder(folder: &Path) -> Self {
        Self::of(super::files(&folder.display().to_string()))
    }

    /// A data set of one row.
    pub(crate) fn of_text(text: &str) -> Self {
        let row = format!("{}\n", json!({ "text": text }));
        Self::of(BTreeMap::from([("train.jsonl".to_owned(), row.into_bytes())]))
    }

    /// Serves until the test process ends; returns the endpoint.
    pub(crate) fn serve(self) -> (String, Log) {
        self.serve_at("127.0.0.1")
    }

    pub(crate) fn serve_at(self, host: &str) -> (String, Log) {
        let log = Log::default();
        let own = Arc::clone(&log);
        (serve(host, move |_, stream| self.answer(stream, &own)), log)
    }

    fn answer(&self, mut stream: TcpStream, log: &Log) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut asked = Asked::read(&mut reader)?;
        if asked.line.starts_with("CONNECT ") {
            write!(stream, "HTTP/1.1 200 OK\r\n\r\n")?;
            asked = Asked::read(&mut reader)?;
        }
        let kept = (asked.line.clone(), asked.header("authorization"), asked.header("range"));
        log.lock().expect("log").push(kept);
        let (method, path) = asked.line.split_once(' ').unwrap_or_default();
        let path = path
            .split_once("://")
            .map_or(path, |(_, rest)| rest.find('/').map_or("/", |start| &rest[start..]));
        let is_list = path.starts_with("/api/");
        let file = path.split_once("/resolve/").and_then(|(_, rest)| rest.split_once('/'));
        let name = file.map_or("", |(_, name)| name).replace("%20", " ");
        let mut more = String::new();
        let (status, body) = if let Some((status, body)) = &self.refusal {
            (*status, body.clone().into_bytes())
        } else if let Some((store, all)) = &self.redirect
            && (*all || !is_list)
        {
            more = format!("Location: {store}{path}\r\n");
            ("302 Found", Vec::new())
        } else if is_list {
            let names = self.files.keys().chain(&self.listed);
            let siblings: Vec<Value> = names.map(|name| json!({ "rfilename": name })).collect();
            let info = json!({ "siblings": siblings, "sha": self.commit });
            ("200 OK", info.to_string().into_bytes())
        } else {
            let start = asked.header("range").filter(|_| self.knows_ranges).and_then(|range| {
                range.strip_prefix("bytes=")?.split('-').next()?.parse::<usize>().ok()
            });
            match (self.files.get(&name), start) {
                (Some(bytes), Some(start)) => {
                    let size = bytes.len();
                    more = format!("Content-Range: bytes {start}-{}/{size}\r\n", size - 1);
                    ("206 Partial Content", bytes[start..].to_vec())
                }
                (Some(bytes), None) => ("200 OK", bytes.clone()),
                (None, _) => ("404 Not Found", Vec::new()),
            }
        };
        let tag = self.tag.clone();
        let tag = tag.unwrap_or_else(|| format!("tag-{name}").replace([' ', '/'], "_"));
        let kind = if self.is_linked { "x-linked-etag" } else { "etag" };
        write!(
            stream,
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\n{more}x-repo-commit: ../../../commit\r\n\
             {kind}: \"{tag}\"\r\nConnection: close\r\n\r\n",
            body.len()
        )?;
        match (method, self.cut) {
            ("HEAD", _) => Ok(()),
            (_, Some(cut)) if !is_list => stream.write_all(&body[..cut]),
            _ => stream.write_all(&body),
        }
    }
}
