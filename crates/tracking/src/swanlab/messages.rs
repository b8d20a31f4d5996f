//! The part of SwanLab's `record.proto` that a training run needs.

use prost::Message;

use crate::timestamp::Timestamp;

/// One entry of a `.swanlab` file; exactly one of the messages is set.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Record {
    /// From 1 for columns and scalars; the constants below for the others.
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
    #[prost(message, optional, tag = "2")]
    pub(super) timestamp: Option<Timestamp>,
    #[prost(message, optional, tag = "10")]
    pub(super) start: Option<Start>,
    #[prost(message, optional, tag = "11")]
    pub(super) finish: Option<Finish>,
    #[prost(message, optional, tag = "12")]
    pub(super) column: Option<Column>,
    #[prost(message, optional, tag = "13")]
    pub(super) scalar: Option<Scalar>,
    #[prost(message, optional, tag = "20")]
    pub(super) save: Option<Save>,
}

/// `num` of the start record.
pub(super) const START: i64 = -1;
/// `num` of the finish record.
pub(super) const FINISH: i64 = -2;
/// `num` of the configuration's record.
pub(super) const CONFIG: i64 = -3;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Start {
    #[prost(string, tag = "1")]
    pub(super) project: String,
    #[prost(string, tag = "2")]
    pub(super) workspace: String,
    #[prost(string, tag = "4")]
    pub(super) name: String,
    #[prost(string, tag = "5")]
    pub(super) description: String,
    #[prost(string, repeated, tag = "6")]
    pub(super) tags: Vec<String>,
    #[prost(string, tag = "7")]
    pub(super) group: String,
    #[prost(string, tag = "10")]
    pub(super) id: String,
    #[prost(message, optional, tag = "12")]
    pub(super) started_at: Option<Timestamp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Finish {
    /// 1 finished, 2 crashed, 3 aborted.
    #[prost(int32, tag = "1")]
    pub(super) state: i32,
    #[prost(string, tag = "2")]
    pub(super) error: String,
    #[prost(message, optional, tag = "3")]
    pub(super) finished_at: Option<Timestamp>,
}

/// A metric that scalars may name from here on.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Column {
    /// 1: the user's, 2: the system's.
    #[prost(int32, tag = "1")]
    pub(super) class: i32,
    #[prost(int32, tag = "2")]
    pub(super) kind: i32,
    #[prost(string, tag = "3")]
    pub(super) key: String,
    #[prost(string, tag = "5")]
    pub(super) section_name: String,
    /// 3: public.
    #[prost(int32, tag = "6")]
    pub(super) section_type: i32,
}

/// `COLUMN_TYPE_SCALAR`.
pub(super) const SCALAR: i32 = 1;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Scalar {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(int32, tag = "3")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "4")]
    pub(super) timestamp: Option<Timestamp>,
    #[prost(message, optional, tag = "5")]
    pub(super) value: Option<ScalarValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ScalarValue {
    #[prost(double, tag = "1")]
    pub(super) number: f64,
}

/// A file of the run; the configuration's.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Save {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    /// Found by its last part in the run's `files` folder.
    #[prost(string, tag = "2")]
    pub(super) source_path: String,
    /// 1: the configuration.
    #[prost(int32, tag = "5")]
    pub(super) kind: i32,
    #[prost(bytes = "vec", optional, tag = "6")]
    pub(super) payload: Option<Vec<u8>>,
}
