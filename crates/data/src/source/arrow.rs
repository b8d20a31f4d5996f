//! Arrow IPC streams and files, as `datasets.save_to_disk` writes them, row by row.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, RecordBatch};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, DataType};
use serde_json::{Map, Value};

use super::{MAX_ROW_BYTES, Rows, guarded, rows_of_fields};
use crate::error::{DataError, Result};

/// What problems call these files.
const KIND: &str = "Arrow";

/// How the file format, unlike the stream, begins.
const MAGIC: &[u8] = b"ARROW1";

/// Values of a row, at most.
const MOST_VALUES: usize = MAX_ROW_BYTES / 8;

type Batches = Box<dyn Iterator<Item = std::result::Result<RecordBatch, ArrowError>>>;

/// Rows of a file; lists and structs become JSON arrays and objects. Fields of other types (binary, times) are
/// left out.
pub(super) fn read(path: &Path, mut file: File) -> Result<Rows> {
    let mut start = Vec::new();
    let length = file.metadata().map_err(DataError::io(path))?.len();
    (&file).take(MAGIC.len() as u64).read_to_end(&mut start).map_err(DataError::io(path))?;
    file.seek(SeekFrom::Start(0)).map_err(DataError::io(path))?;
    let file = BufReader::new(file);
    let batches = guarded(KIND, || -> std::result::Result<Batches, ArrowError> {
        Ok(if start == MAGIC {
            Box::new(FileReader::try_new(file, None)?) as Batches
        } else {
            Box::new(StreamReader::try_new(file, None)?)
        })
    });
    let batches = batches.map_err(|problem| DataError::source(path, problem))?;
    let mut rows = ArrowRows { length, batches, batch: None };
    Ok(rows_of_fields(path, KIND, move || rows.next_fields()))
}

struct ArrowRows {
    /// Bytes of the file.
    length: u64,
    batches: Batches,
    /// The batch at hand and its next row.
    batch: Option<(RecordBatch, usize)>,
}

impl ArrowRows {
    /// The next row's fields; `None` at the end.
    fn next_fields(&mut self) -> std::result::Result<Option<Map<String, Value>>, ArrowError> {
        loop {
            if let Some((batch, row)) = &mut self.batch
                && *row < batch.num_rows()
            {
                *row += 1;
                return fields(batch, *row - 1).map(Some);
            }
            let Some(batch) = self.batches.next().transpose()? else { return Ok(None) };
            // A column of nulls takes no bytes, whatever its length.
            if batch.num_rows() as u64 > self.length {
                let text = format!("{} rows in a file of {} bytes", batch.num_rows(), self.length);
                return Err(ArrowError::IpcError(text));
            }
            self.batch = Some((batch, 0));
        }
    }
}

fn fields(batch: &RecordBatch, row: usize) -> std::result::Result<Map<String, Value>, ArrowError> {
    let (schema, mut left) = (batch.schema(), MOST_VALUES);
    let mut fields = Map::new();
    for (field, column) in schema.fields().iter().zip(batch.columns()) {
        if let Some(value) = value(column.as_ref(), row, &mut left)? {
            fields.insert(field.name().clone(), value);
        }
    }
    Ok(fields)
}

/// A value as JSON; `None` for a type that has no such form. `left` counts how many more may come.
fn value(
    array: &dyn Array,
    row: usize,
    left: &mut usize,
) -> std::result::Result<Option<Value>, ArrowError> {
    *left = left
        .checked_sub(1)
        .ok_or_else(|| ArrowError::IpcError(format!("a row of more than {MOST_VALUES} values")))?;
    if array.is_null(row) {
        return Ok(Some(Value::Null));
    }
    macro_rules! number {
        ($type:ty) => {
            Value::from(array.as_primitive::<$type>().value(row))
        };
    }
    Ok(Some(match array.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => Value::from(array.as_boolean().value(row)),
        DataType::Int8 => number!(Int8Type),
        DataType::Int16 => number!(Int16Type),
        DataType::Int32 => number!(Int32Type),
        DataType::Int64 => number!(Int64Type),
        DataType::UInt8 => number!(UInt8Type),
        DataType::UInt16 => number!(UInt16Type),
        DataType::UInt32 => number!(UInt32Type),
        DataType::UInt64 => number!(UInt64Type),
        DataType::Float32 => number!(Float32Type),
        DataType::Float64 => number!(Float64Type),
        DataType::Utf8 => Value::from(array.as_string::<i32>().value(row)),
        DataType::LargeUtf8 => Value::from(array.as_string::<i64>().value(row)),
        DataType::Utf8View => Value::from(array.as_string_view().value(row)),
        DataType::List(_) => list(array.as_list::<i32>().value(row).as_ref(), left)?,
        DataType::LargeList(_) => list(array.as_list::<i64>().value(row).as_ref(), left)?,
        DataType::FixedSizeList(..) => list(array.as_fixed_size_list().value(row).as_ref(), left)?,
        DataType::Struct(of) => {
            let mut fields = Map::new();
            for (field, column) in of.iter().zip(array.as_struct().columns()) {
                if let Some(value) = value(column.as_ref(), row, left)? {
                    fields.insert(field.name().clone(), value);
                }
            }
            Value::Object(fields)
        }
        _ => return Ok(None),
    }))
}

fn list(values: &dyn Array, left: &mut usize) -> std::result::Result<Value, ArrowError> {
    let mut all = Vec::new();
    for row in 0..values.len() {
        all.extend(value(values, row, left)?);
    }
    Ok(Value::Array(all))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::builder::{BooleanBuilder, Int32Builder, ListBuilder};
    use arrow_array::{ArrayRef, LargeStringArray, NullArray, StringViewArray};
    use arrow_ipc::writer::{FileWriter, StreamWriter};

    use super::super::read_jsonl;
    use super::*;

    /// Two rows of ids, masks and a text.
    fn batch() -> RecordBatch {
        let (mut ids, mut masks) =
            (ListBuilder::new(Int32Builder::new()), ListBuilder::new(BooleanBuilder::new()));
        ids.append_value([Some(5), Some(6)]);
        ids.append_value([Some(7)]);
        masks.append_value([Some(false), Some(true)]);
        masks.append_value([Some(true)]);
        let text = LargeStringArray::from(vec![Some("a"), None]);
        let columns: [(&str, ArrayRef); 3] = [
            ("input_ids", Arc::new(ids.finish())),
            ("loss_mask", Arc::new(masks.finish())),
            ("text", Arc::new(text)),
        ];
        RecordBatch::try_from_iter(columns).expect("a batch")
    }

    fn stream(batch: &RecordBatch) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = StreamWriter::try_new(&mut bytes, &batch.schema()).expect("a writer");
        writer.write(batch).expect("written");
        writer.finish().expect("written");
        bytes
    }

    fn read_all(bytes: &[u8]) -> Vec<std::result::Result<Value, String>> {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("data-00000-of-00001.arrow");
        std::fs::write(&path, bytes).expect("write");
        match read_jsonl(&path) {
            Ok(rows) => rows
                .map(|row| {
                    row.map(|row| Value::Object(row.fields)).map_err(|error| error.to_string())
                })
                .collect(),
            Err(error) => vec![Err(error.to_string())],
        }
    }

    #[test]
    fn streams_and_files_give_their_rows() {
        let batch = batch();
        let mut file = Vec::new();
        let mut writer = FileWriter::try_new(&mut file, &batch.schema()).expect("a writer");
        writer.write(&batch).expect("written");
        writer.finish().expect("written");
        for bytes in [stream(&batch), file] {
            let rows = read_all(&bytes);
            let wanted = [
                serde_json::json!({"input_ids": [5, 6], "loss_mask": [false, true], "text": "a"}),
                serde_json::json!({"input_ids": [7], "loss_mask": [true], "text": null}),
            ];
            assert_eq!(rows, wanted.map(Ok));
        }
    }

    #[test]
    fn views_of_texts_are_texts() {
        let long = "a text that is too long to stand in its view";
        let texts: ArrayRef = Arc::new(StringViewArray::from(vec!["a", long]));
        let batch = RecordBatch::try_from_iter([("text", texts)]).expect("a batch");
        let wanted = ["a", long].map(|text| Ok(serde_json::json!({ "text": text })));
        assert_eq!(read_all(&stream(&batch)), wanted);
    }

    #[test]
    fn damaged_files_are_errors_with_the_files_name() {
        let whole = stream(&batch());
        for length in [0, 3, 40, whole.len() / 2, whole.len() - 40] {
            let rows = read_all(&whole[..length]);
            let error = rows.last().expect("an item").as_ref().expect_err("cut off");
            assert!(error.contains("data-00000"), "{error}");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x55;
            assert!(read_all(&damaged).len() <= 3);
        }
        let nulls: ArrayRef = Arc::new(NullArray::new(1 << 40));
        let nulls = RecordBatch::try_from_iter([("nothing", nulls)]).expect("a batch");
        let rows = read_all(&stream(&nulls));
        assert!(rows[0].as_ref().expect_err("too many").contains("rows in a file of"));
    }
}
