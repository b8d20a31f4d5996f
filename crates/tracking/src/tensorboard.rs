//! TensorBoard event files: TFRecord frames of `tensorflow.Event` messages.
//!
//! A frame is the data's length (8 bytes, little endian), the masked CRC-32C of these 8 bytes (4),
//! the data, the masked CRC-32C of the data (4); `mask(c) = rotate_right(c, 15) + 0xa282ead8`.
//! Values are single precision, as in every TensorBoard scalar.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use prost::Message;

use super::error::{Result, TrackerError};
use super::protobuf::messages;
use super::{Moment, Outcome, Row, Run, Tracker};

const PREFIX: &str = "events.out.tfevents.";

messages! {
    Event {
        [double, tag = "1"] wall_time: f64,
        [int64, tag = "2"] step: i64,
        [string, optional, tag = "3"] file_version: Option<String>,
        [message, optional, tag = "5"] summary: Option<Summary>,
        [message, optional, tag = "7"] session_log: Option<SessionLog>,
        [message, optional, tag = "10"] source: Option<SourceMetadata>,
    }
    Summary {
        [message, repeated, tag = "1"] values: Vec<SummaryValue>,
    }
    SummaryValue {
        [string, tag = "1"] tag: String,
        [float, optional, tag = "2"] simple_value: Option<f32>,
        [message, optional, tag = "8"] tensor: Option<Tensor>,
        [message, optional, tag = "9"] metadata: Option<SummaryMetadata>,
    }
    /// A scalar string.
    Tensor {
        [int32, tag = "1"] dtype: i32,
        [message, optional, tag = "2"] shape: Option<Shape>,
        [bytes = "vec", repeated, tag = "8"] string_values: Vec<Vec<u8>>,
    }
    Shape {}
    SummaryMetadata {
        [message, optional, tag = "1"] plugin: Option<Plugin>,
        [int32, tag = "4"] data_class: i32,
    }
    Plugin {
        [string, tag = "1"] name: String,
    }
    SessionLog {
        [int32, tag = "1"] status: i32,
    }
    SourceMetadata {
        [string, tag = "1"] writer: String,
    }
}

/// `DT_STRING`.
const STRING: i32 = 7;
/// `DATA_CLASS_TENSOR`.
const TENSOR_CLASS: i32 = 2;
/// `SessionLog.START`: points of this and later steps in older files do not count.
const START: i32 = 1;

/// Writes one event file, from the first row on: a process that takes no step leaves none.
pub struct TensorBoard {
    path: PathBuf,
    start: Vec<Event>,
    file: Option<File>,
}

impl TensorBoard {
    /// Prepares a file in the run directory that begins with the run's configuration as a text.
    /// Points of older files after the resumed step will no longer count.
    pub fn new(run: &Run) -> Self {
        // A board reads files by name: a new one must come after all older ones.
        let after = newest_second(&run.directory).map_or(0, |second: u64| second.saturating_add(1));
        let second = run.started.seconds.max(after);
        let name = format!("{PREFIX}{second:010}.{}.{}.0", run.host, run.pid);
        let event = Event { wall_time: run.started.as_f64(), ..Event::default() };
        let step = run.resumed_step as i64 + 1;
        let text = format!("```json\n{:#}\n```", run.config);
        let start = vec![
            Event {
                file_version: Some("brain.Event:2".to_owned()),
                source: Some(SourceMetadata { writer: "longdraft".to_owned() }),
                ..event.clone()
            },
            Event { step, session_log: Some(SessionLog { status: START }), ..event.clone() },
            Event {
                step,
                summary: Some(Summary { values: vec![text_value("config", &text)] }),
                ..event
            },
        ];
        Self { path: run.directory.join(name), start, file: None }
    }

    /// The event file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends an event with one write, so that a kill tears at most the last frame, which readers
    /// pass over.
    fn write(&mut self, event: Event) -> Result<()> {
        let fail = |source| TrackerError::File { path: self.path.clone(), source };
        let mut events = Vec::new();
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                events.append(&mut self.start);
                let file = OpenOptions::new().write(true).create_new(true).open(&self.path);
                none.insert(file.map_err(fail)?)
            }
        };
        events.push(event);
        let bytes: Vec<u8> =
            events.iter().flat_map(|event| frame(&event.encode_to_vec())).collect();
        file.write_all(&bytes).map_err(fail)
    }
}

impl Tracker for TensorBoard {
    fn log(&mut self, row: &Row) -> Result<()> {
        let value = |(tag, value): &(String, f64)| SummaryValue {
            tag: tag.clone(),
            simple_value: Some(*value as f32),
            ..SummaryValue::default()
        };
        self.write(Event {
            wall_time: row.time.as_f64(),
            step: row.step as i64,
            summary: Some(Summary { values: row.scalars.iter().map(value).collect() }),
            ..Event::default()
        })
    }

    fn flush(&mut self) -> Result<()> {
        let synced = self.file.as_ref().map_or(Ok(()), File::sync_data);
        synced.map_err(TrackerError::file(&self.path))
    }

    fn finish(&mut self, _: Outcome, _: Moment) -> Result<Option<String>> {
        self.flush()?;
        Ok(None)
    }
}

/// A value of TensorBoard's text page, in Markdown.
fn text_value(tag: &str, text: &str) -> SummaryValue {
    SummaryValue {
        tag: tag.to_owned(),
        simple_value: None,
        tensor: Some(Tensor {
            dtype: STRING,
            shape: Some(Shape {}),
            string_values: vec![text.as_bytes().to_vec()],
        }),
        metadata: Some(SummaryMetadata {
            plugin: Some(Plugin { name: "text".to_owned() }),
            data_class: TENSOR_CLASS,
        }),
    }
}

/// The greatest time in the names of a folder's event files.
fn newest_second(directory: &Path) -> Option<u64> {
    let second = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()
    };
    std::fs::read_dir(directory).ok()?.filter_map(second).max()
}

fn frame(data: &[u8]) -> Vec<u8> {
    let masked = |bytes: &[u8]| {
        crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
    };
    let length = (data.len() as u64).to_le_bytes();
    [&length, &masked(&length)[..], data, &masked(data)].concat()
}

#[cfg(test)]
mod tests {
    use super::super::run::test_support::{row, run};
    use super::*;

    /// Frames of a file whose checksums hold.
    fn events(path: &Path) -> Vec<Event> {
        let bytes = std::fs::read(path).expect("file");
        let (mut rest, mut events) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().expect("eight")) as usize;
            let data = &rest[12..12 + length];
            assert_eq!(frame(data), &rest[..length + 16]);
            events.push(Event::decode(data).expect("an event"));
            rest = &rest[length + 16..];
        }
        events
    }

    #[test]
    fn checksums_are_masked_as_tfrecord_wants_them() {
        // The frame of the bytes "longdraft" as TensorBoard's own writer makes it.
        let expected =
            ["0900000000000000", FRAME_CHECKSUMS[0], "6c6f6e676472616674", FRAME_CHECKSUMS[1]];
        let hex: String = frame(b"longdraft").iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected.concat());
    }

    const FRAME_CHECKSUMS: [&str; 2] = ["37f97139", "d2ef2859"];

    #[test]
    fn a_resumed_run_starts_a_later_file_after_its_step() {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut first = TensorBoard::new(&run(dir.path(), 0));
        first.flush().expect("nothing to flush");
        assert!(!first.path().exists(), "a file without a step");
        first.log(&row(1)).expect("log");
        // The same second and process id: the name must still differ and sort after.
        let mut second = TensorBoard::new(&run(dir.path(), 5));
        second.log(&row(6)).expect("log");
        assert!(second.path() > first.path());
        assert_eq!(events(second.path())[1].step, 6);
    }
}
