//! The Hugging Face hub: where it is, who the user is there, and files of it.
//!
//! A hub, or a mirror of it, is not trusted. Its names become paths only after a check, its words
//! are cleaned before they are printed, and the user's token goes to the endpoint alone.
//!
//! ```text
//! endpoint   HF_ENDPOINT: who may see the token, and over what
//! login      HF_TOKEN, HUGGING_FACE_HUB_TOKEN or the token file
//! names      what may become part of a path
//! words      text from outside, fit for a terminal
//! cache      HF_HOME/hub: blobs, snapshots, refs, as the hub's own clients keep them
//! http       what requests have in common
//! client     list of files, metadata of a file, redirects
//! fetch      one file into the cache, resumed
//! data_set   hf:// addresses
//! model      org/name and org/name:QUANTISATION: which files are the model
//! gguf_names GGUF files by quantisation and parts
//! ```

mod cache;
mod client;
mod data_set;
mod endpoint;
mod fetch;
mod gguf_names;
mod http;
mod login;
mod model;
mod names;
mod words;

use std::path::PathBuf;

pub use data_set::DataSetId;
pub use endpoint::{Endpoint, EndpointError, is_confidential};
pub use http::{agent, refusal};
pub use login::{Login, LoginError, Source, Token};
pub use model::{Fetched, ModelId};
pub use names::{is_file_name, is_repository, is_weight_file};
pub use words::printable;

pub(crate) use client::{Kind, Repository};

/// How much of a file is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived<'a> {
    /// As the repository calls it.
    pub name: &'a str,
    /// Bytes that are there, those of earlier downloads among them.
    pub bytes: u64,
    /// Bytes that it has, if the hub tells.
    pub of: Option<u64>,
}

/// Hears of what arrives: when a file begins, and after every piece.
pub type Tell<'a> = &'a mut dyn FnMut(Arrived<'_>);

/// Looks an environment variable up.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The process's own environment, empty variables left out.
pub fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

/// The folder of the hub's clients: `HF_HOME`, else `.cache/huggingface` in the user's home.
pub fn home(variables: Variables<'_>) -> Option<PathBuf> {
    let own = variables("HF_HOME").map(PathBuf::from);
    own.or_else(|| {
        let user = variables("HOME").or_else(|| variables("USERPROFILE"))?;
        Some(PathBuf::from(user).join(".cache").join("huggingface"))
    })
}
