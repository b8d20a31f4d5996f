//! The part of `wandb_internal.proto` that a training run needs.

use prost::Message;

use crate::timestamp::Timestamp;

/// One entry of a `.wandb` file; exactly one of the messages is set.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Record {
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
    #[prost(message, optional, tag = "2")]
    pub(super) history: Option<History>,
    #[prost(message, optional, tag = "3")]
    pub(super) summary: Option<Summary>,
    #[prost(message, optional, tag = "17")]
    pub(super) run: Option<RunRecord>,
    #[prost(message, optional, tag = "18")]
    pub(super) exit: Option<Exit>,
    #[prost(message, optional, tag = "21")]
    pub(super) header: Option<HeaderRecord>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderRecord {
    #[prost(message, optional, tag = "1")]
    pub(super) version: Option<Version>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Version {
    #[prost(string, tag = "1")]
    pub(super) producer: String,
    #[prost(string, tag = "2")]
    pub(super) min_consumer: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RunRecord {
    #[prost(string, tag = "1")]
    pub(super) run_id: String,
    #[prost(string, tag = "2")]
    pub(super) entity: String,
    #[prost(string, tag = "3")]
    pub(super) project: String,
    #[prost(message, optional, tag = "4")]
    pub(super) config: Option<Config>,
    #[prost(string, tag = "6")]
    pub(super) run_group: String,
    #[prost(string, tag = "8")]
    pub(super) display_name: String,
    #[prost(string, tag = "9")]
    pub(super) notes: String,
    #[prost(string, repeated, tag = "10")]
    pub(super) tags: Vec<String>,
    #[prost(string, tag = "13")]
    pub(super) host: String,
    #[prost(message, optional, tag = "17")]
    pub(super) start_time: Option<Timestamp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Config {
    #[prost(message, repeated, tag = "1")]
    pub(super) update: Vec<Item>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct History {
    #[prost(message, repeated, tag = "1")]
    pub(super) item: Vec<Item>,
    #[prost(message, optional, tag = "2")]
    pub(super) step: Option<Step>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Step {
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) update: Vec<Item>,
}

/// `ConfigItem`, `HistoryItem` and `SummaryItem`, which are laid out alike. A key holds `/` and
/// dots literally; `nested_key` would name a path.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Item {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(string, tag = "16")]
    pub(super) value_json: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Exit {
    #[prost(int32, tag = "1")]
    pub(super) exit_code: i32,
    #[prost(int32, tag = "2")]
    pub(super) runtime: i32,
}
