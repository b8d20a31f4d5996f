//! Parquet files, row by row.

use std::fs::File;
use std::path::Path;

use parquet::basic::Compression;
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row as ParquetRow};
use serde_json::{Map, Value};

use super::{Rows, guarded, rows_of_fields};
use crate::error::{DataError, Result};

/// What problems call these files.
const KIND: &str = "Parquet";

/// Rows of a file; nested lists and groups become JSON arrays and objects.
pub(super) fn read(path: &Path, file: File) -> Result<Rows> {
    let reader = guarded(KIND, || SerializedFileReader::new(file))
        .map_err(|problem| DataError::source(path, problem))?;
    require_codecs(path, reader.metadata())?;
    let reader: Box<dyn FileReader> = Box::new(reader);
    let mut rows = RowIter::from_file_into(reader);
    Ok(rows_of_fields(path, KIND, move || -> parquet::errors::Result<_> {
        Ok(rows.next().transpose()?.map(|row| fields_of(&row)))
    }))
}

/// Refuses a file with Brotli's compression before any row: it is not built in.
fn require_codecs(path: &Path, metadata: &ParquetMetaData) -> Result<()> {
    let mut columns = metadata.row_groups().iter().flat_map(RowGroupMetaData::columns);
    let is_brotli = |codec: Compression| matches!(codec, Compression::BROTLI(_));
    let Some(column) = columns.find(|column| is_brotli(column.compression())) else {
        return Ok(());
    };
    let column = column.column_path().string();
    let other = path.with_extension("zstd.parquet");
    // As texts, whose quotes and escapes Python reads.
    let [from, to] = [path, &other].map(|path| path.to_string_lossy());
    let problem = format!(
        "column `{column}` is compressed with Brotli, which is not read: rewrite the file with zstd or snappy, \
         and name the new one; in Python: import pyarrow.parquet as p; \
         p.write_table(p.read_table({from:?}), {to:?}, compression='zstd')"
    );
    Err(DataError::source(path, problem))
}

fn fields_of(row: &ParquetRow) -> Map<String, Value> {
    let fields = row.get_column_iter();
    fields.filter_map(|(name, field)| Some((name.clone(), value_of(field)?))).collect()
}

/// A field as JSON. Some writers do not say of texts that they are some: bytes that are UTF-8 are text, and others are
/// left out.
fn value_of(field: &Field) -> Option<Value> {
    match field {
        Field::Bytes(bytes) => bytes.as_utf8().ok().map(Value::from),
        Field::Group(row) => Some(Value::Object(fields_of(row))),
        Field::ListInternal(list) => {
            Some(list.elements().iter().map(|one| value_of(one).unwrap_or_default()).collect())
        }
        other => Some(other.to_json_value()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::read_jsonl;
    use super::*;
    use std::sync::Arc;

    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    const SCHEMA: &str = "message rows {
        required binary text (UTF8);
        required int64 number;
        required group turns (LIST) { repeated group list { required binary element; } }
    }";

    /// Two row groups of two rows each. Elements of `turns` are texts that the schema does not call so.
    fn write(path: &Path) {
        let schema = Arc::new(parse_message_type(SCHEMA).expect("schema"));
        let compression = parquet::basic::Compression::ZSTD(parquet::basic::ZstdLevel::default());
        let properties = WriterProperties::builder().set_compression(compression).build();
        let file = File::create(path).expect("create");
        let mut writer =
            SerializedFileWriter::new(file, schema, Arc::new(properties)).expect("writer");
        for group in 0..2_i64 {
            let mut rows = writer.next_row_group().expect("row group");
            let texts = [format!("a{group}"), format!("b{group}")];
            let bytes: Vec<ByteArray> = texts.iter().map(|t| t.as_str().into()).collect();
            let mut column = rows.next_column().expect("column").expect("text");
            column.typed::<ByteArrayType>().write_batch(&bytes, None, None).expect("texts");
            column.close().expect("close");
            let mut column = rows.next_column().expect("column").expect("number");
            let numbers = [2 * group, 2 * group + 1];
            column.typed::<Int64Type>().write_batch(&numbers, None, None).expect("numbers");
            column.close().expect("close");
            let mut column = rows.next_column().expect("column").expect("turns");
            let turns: Vec<ByteArray> = ["x", "y", "z"].iter().map(|t| (*t).into()).collect();
            column
                .typed::<ByteArrayType>()
                .write_batch(&turns, Some(&[1, 1, 1]), Some(&[0, 1, 0]))
                .expect("turns");
            column.close().expect("close");
            rows.close().expect("close");
        }
        writer.close().expect("close");
    }

    #[test]
    fn columns_become_fields_and_lists_arrays() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.parquet");
        write(&path);
        let rows: Vec<_> = read_jsonl(&path).expect("open").map(|r| r.expect("row")).collect();
        let texts: Vec<&str> = rows.iter().map(|row| row.text("text").expect("text")).collect();
        assert_eq!(texts, ["a0", "b0", "a1", "b1"]);
        assert_eq!(rows[3].fields["number"], 3);
        assert_eq!(rows[2].fields["turns"], serde_json::json!(["x", "y"]));
        assert_eq!(rows[3].origin(), "rows.parquet:4");
    }

    #[test]
    fn a_codec_that_is_not_read_is_named_with_its_remedy() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.parquet");
        write(&path);
        let mut bytes = std::fs::read(&path).expect("read");
        // After the column's path comes its codec: 6, zstd, and 4, Brotli, in zigzag.
        let (zstd, codec) = (b"\x06number\x15\x0c", b"\x06number\x15\x08");
        let found = bytes.windows(zstd.len()).position(|window| window == zstd);
        let at = found.expect("the codec");
        bytes[at..at + codec.len()].copy_from_slice(codec);
        std::fs::write(&path, bytes).expect("write");
        let told = read_jsonl(&path).err().expect("refused").to_string();
        for part in
            ["rows.parquet", "`number`", "Brotli", "read_table(\"", "rows.zstd.parquet", "zstd"]
        {
            assert!(told.contains(part), "{part}: {told}");
        }
    }

    #[test]
    fn damaged_files_are_errors_that_end_the_file() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.parquet");
        write(&path);
        let whole = std::fs::read(&path).expect("read");
        std::fs::write(&path, &whole[..whole.len() / 2]).expect("cut");
        assert!(read_jsonl(&path).err().expect("cut").to_string().contains("rows.parquet"));
        // Any single damaged byte gives rows or one error, and always an end.
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x55;
            std::fs::write(&path, bytes).expect("write");
            if let Ok(rows) = read_jsonl(&path) {
                assert!(rows.take(100).count() < 100, "byte {at}");
            }
        }
    }
}
