//! Sending an export to the Hugging Face hub, with a model card made from its manifest.

pub mod card;
mod client;
mod package;
mod public;

pub use crate::hub_name::{HUB_NAME, is_hub_name, loaded};
pub use client::{Client, HubError, Sent};
pub use package::{Content, LeftOut, Package, Upload};

/// Name of the model card.
pub const CARD: &str = "README.md";
