//! Drafts as serving engines read them: exported folders, and a validator that needs no engine.
//!
//! One trained draft is rendered per [`Profile`]; [`verify::verify`] reads a folder back with the
//! rules of every engine's loader ([`formats`]) and lists all problems at once.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

pub mod checks;
mod error;
mod export;
mod folder;
pub mod formats;
pub mod hub;
mod hub_name;
mod language_model;
mod manifest;
pub mod parity;
mod profile;
mod shell;
mod target;
mod tokenizer;
pub mod verify;

pub use error::{Result, ServingError};
pub use export::{Exported, export, own_command, require_fit};
pub use formats::{ExportOptions, WeightType, format_of, serves};
pub use language_model::save_gguf;
pub use manifest::{MANIFEST_FILE, Manifest, Provenance, in_folder};
pub use profile::{Engine, Profile};
pub use shell::quoted;
pub use target::TargetFacts;
