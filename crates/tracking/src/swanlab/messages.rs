//! The part of SwanLab's `record.proto` that a training run needs.

use crate::protobuf::messages;
use crate::timestamp::Timestamp;

/// `num` of the start record.
pub(super) const START: i64 = -1;
/// `num` of the finish record.
pub(super) const FINISH: i64 = -2;
/// `num` of the configuration's record.
pub(super) const CONFIG: i64 = -3;
/// `COLUMN_TYPE_SCALAR`.
pub(super) const SCALAR: i32 = 1;

messages! {
    /// One entry of a `.swanlab` file; exactly one of the messages is set.
    Record {
        /// From 1 for columns and scalars; the constants above for the others.
        [int64, tag = "1"] num: i64,
        [message, optional, tag = "2"] timestamp: Option<Timestamp>,
        [message, optional, tag = "10"] start: Option<Start>,
        [message, optional, tag = "11"] finish: Option<Finish>,
        [message, optional, tag = "12"] column: Option<Column>,
        [message, optional, tag = "13"] scalar: Option<Scalar>,
        [message, optional, tag = "20"] save: Option<Save>,
    }
    Start {
        [string, tag = "1"] project: String,
        [string, tag = "2"] workspace: String,
        [string, tag = "4"] name: String,
        [string, tag = "5"] description: String,
        [string, repeated, tag = "6"] tags: Vec<String>,
        [string, tag = "7"] group: String,
        [string, tag = "10"] id: String,
        [message, optional, tag = "12"] started_at: Option<Timestamp>,
    }
    Finish {
        /// 1 finished, 2 crashed, 3 aborted.
        [int32, tag = "1"] state: i32,
        [string, tag = "2"] error: String,
        [message, optional, tag = "3"] finished_at: Option<Timestamp>,
    }
    /// A metric that scalars may name from here on.
    Column {
        /// 1: the user's, 2: the system's.
        [int32, tag = "1"] class: i32,
        [int32, tag = "2"] kind: i32,
        [string, tag = "3"] key: String,
        [string, tag = "5"] section_name: String,
        /// 3: public.
        [int32, tag = "6"] section_type: i32,
    }
    Scalar {
        [string, tag = "1"] key: String,
        [int64, tag = "2"] step: i64,
        [int32, tag = "3"] kind: i32,
        [message, optional, tag = "4"] timestamp: Option<Timestamp>,
        [message, optional, tag = "5"] value: Option<ScalarValue>,
    }
    ScalarValue {
        [double, tag = "1"] number: f64,
    }
    /// A file of the run; the configuration's.
    Save {
        [string, tag = "1"] name: String,
        /// Found by its last part in the run's `files` folder.
        [string, tag = "2"] source_path: String,
        /// 1: the configuration.
        [int32, tag = "5"] kind: i32,
        [bytes = "vec", optional, tag = "6"] payload: Option<Vec<u8>>,
    }
}
