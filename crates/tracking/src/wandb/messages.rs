//! The part of `wandb_internal.proto` that a training run needs.

use crate::protobuf::messages;
use crate::timestamp::Timestamp;

messages! {
    /// One entry of a `.wandb` file; exactly one of the messages is set.
    Record {
        [int64, tag = "1"] num: i64,
        [message, optional, tag = "2"] history: Option<History>,
        [message, optional, tag = "3"] summary: Option<Summary>,
        [message, optional, tag = "17"] run: Option<RunRecord>,
        [message, optional, tag = "18"] exit: Option<Exit>,
        [message, optional, tag = "21"] header: Option<HeaderRecord>,
    }
    HeaderRecord {
        [message, optional, tag = "1"] version: Option<Version>,
    }
    Version {
        [string, tag = "1"] producer: String,
        [string, tag = "2"] min_consumer: String,
    }
    RunRecord {
        [string, tag = "1"] run_id: String,
        [string, tag = "2"] entity: String,
        [string, tag = "3"] project: String,
        [message, optional, tag = "4"] config: Option<Config>,
        [string, tag = "6"] run_group: String,
        [string, tag = "8"] display_name: String,
        [string, tag = "9"] notes: String,
        [string, repeated, tag = "10"] tags: Vec<String>,
        [string, tag = "13"] host: String,
        [message, optional, tag = "17"] start_time: Option<Timestamp>,
    }
    Config {
        [message, repeated, tag = "1"] update: Vec<Item>,
    }
    History {
        [message, repeated, tag = "1"] item: Vec<Item>,
        [message, optional, tag = "2"] step: Option<Step>,
    }
    Step {
        [int64, tag = "1"] num: i64,
    }
    Summary {
        [message, repeated, tag = "1"] update: Vec<Item>,
    }
    /// `ConfigItem`, `HistoryItem` and `SummaryItem`, which are laid out alike. A key holds `/` and
    /// dots literally; `nested_key` would name a path.
    Item {
        [string, tag = "1"] key: String,
        [string, tag = "16"] value_json: String,
    }
    Exit {
        [int32, tag = "1"] exit_code: i32,
        [int32, tag = "2"] runtime: i32,
    }
}
