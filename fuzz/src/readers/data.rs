//! Rows and tokens that are trained on.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{Int32Builder, ListBuilder};
use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_ipc::writer::{FileWriter, StreamWriter};
use longdraft_data::prepare::{PrepareOptions, Source, prepare};
use longdraft_data::quarantine::Quarantine;
use longdraft_data::reader::{SourceReader, read_source};
use longdraft_data::token_stream::{TokenStream, write_shard};
use longdraft_data::{SourceConfig, TextEncoder};
use longdraft_train::stage::Encoder;
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};

use crate::fixtures::{CHAT_TOKENIZER, TARGET};
use crate::scratch;

/// Rows that are read of a file: a few bytes may stand for very many.
const MOST_ROWS: usize = 1000;

fn encoder() -> Encoder<'static> {
    Encoder::new(&CHAT_TOKENIZER, TARGET.config())
}

/// Reads rows whose format is recognised, and makes documents of them.
fn rows(path: PathBuf) -> bool {
    let config = SourceConfig { path: path.clone(), ..SourceConfig::default() };
    let encoder = encoder();
    let Ok(reader) = SourceReader::open(&config, vec![path], &encoder) else { return false };
    let Ok(rows) = reader.rows() else { return false };
    let mut whole = true;
    for row in rows.take(MOST_ROWS) {
        match row {
            Ok(row) => drop(reader.outcome(&row)),
            Err(_) => whole = false,
        }
    }
    whole
}

/// Reads JSON rows, one a line.
pub(super) fn jsonl(bytes: &[u8]) -> bool {
    rows(scratch::file("rows.jsonl", bytes))
}

/// Rows of every format that is recognised.
fn formats() -> Vec<Value> {
    let turns = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]);
    vec![
        json!({"text": "the cat sat on the mat"}),
        json!({"messages": turns, "tools": [{"name": "f"}]}),
        json!({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a"}],
               "system": "be kind"}),
        json!({"instruction": "add", "input": "1 2", "output": "3"}),
        json!({"question": "1 + 2?", "answer": "it is\n#### 3"}),
        json!({"prompt": "the", "completion": " cat", "chosen": "a", "rejected": "b"}),
        json!({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}),
        json!({"source": "the", "target": "cat", "context": "mat", "response": "no"}),
    ]
}

pub(super) fn jsonl_files() -> Vec<Vec<u8>> {
    let twice = |row: &Value| format!("{row}\n\n{row}\n").into_bytes();
    formats()[..5].iter().chain(&formats()[6..7]).map(twice).collect()
}

/// Reads JSON rows in one list.
pub(super) fn json(bytes: &[u8]) -> bool {
    rows(scratch::file("rows.json", bytes))
}

pub(super) fn json_files() -> Vec<Vec<u8>> {
    let list = |row: &Value| json!([row, row]).to_string().into_bytes();
    formats()[..3].iter().map(list).collect()
}

/// Reads compressed rows; the first bytes tell the compression.
pub(super) fn compressed_rows(bytes: &[u8]) -> bool {
    if bytes.starts_with(&[0x1f, 0x8b]) {
        return rows(scratch::file("rows.jsonl.gz", bytes));
    }
    rows(scratch::file("rows.txt.zst", bytes)) | rows(scratch::file("rows.jsonl.zst", bytes))
}

pub(super) fn compressed_files() -> Vec<Vec<u8>> {
    let plain = jsonl_files().remove(0);
    let zstd = zstd::encode_all(plain.as_slice(), 3).expect("in memory");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).expect("in memory");
    vec![zstd, gzip.finish().expect("in memory")]
}

/// Reads a Parquet file.
pub(super) fn parquet(bytes: &[u8]) -> bool {
    rows(scratch::file("rows.parquet", bytes))
}

fn parquet_file(compression: Compression, dictionary: bool) -> Vec<u8> {
    let schema = "message rows { required binary text (UTF8); required int64 number;
        required group turns (LIST) { repeated group list { required binary element (UTF8); } } }";
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let properties = WriterProperties::builder().set_compression(compression);
    let properties = Arc::new(properties.set_dictionary_enabled(dictionary).build());
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, properties).expect("a writer");
    for group in 0..2_i64 {
        let mut rows = writer.next_row_group().expect("a row group");
        let texts: Vec<ByteArray> = ["the cat", "the mat"].iter().map(|t| (*t).into()).collect();
        let mut column = rows.next_column().expect("a column").expect("text");
        column.typed::<ByteArrayType>().write_batch(&texts, None, None).expect("texts");
        column.close().expect("closed");
        let mut column = rows.next_column().expect("a column").expect("number");
        column.typed::<Int64Type>().write_batch(&[group, 7], None, None).expect("numbers");
        column.close().expect("closed");
        let mut column = rows.next_column().expect("a column").expect("turns");
        let turns: Vec<ByteArray> = ["x", "y", "z"].iter().map(|turn| (*turn).into()).collect();
        let (defined, repeated) = ([1, 1, 1], [0, 1, 0]);
        let typed = column.typed::<ByteArrayType>();
        typed.write_batch(&turns, Some(&defined), Some(&repeated)).expect("turns");
        column.close().expect("closed");
        rows.close().expect("closed");
    }
    writer.into_inner().expect("closed")
}

pub(super) fn parquet_files() -> Vec<Vec<u8>> {
    vec![
        parquet_file(Compression::UNCOMPRESSED, false),
        parquet_file(Compression::SNAPPY, true),
        parquet_file(Compression::ZSTD(ZstdLevel::default()), true),
    ]
}

/// Reads an Arrow stream or file.
pub(super) fn arrow(bytes: &[u8]) -> bool {
    rows(scratch::file("rows.arrow", bytes))
}

pub(super) fn arrow_files() -> Vec<Vec<u8>> {
    let mut ids = ListBuilder::new(Int32Builder::new());
    ids.append_value([Some(5), Some(6)]);
    ids.append_value([Some(7)]);
    let (ids, text): (ArrayRef, ArrayRef) =
        (Arc::new(ids.finish()), Arc::new(StringArray::from(vec!["the cat", "the mat"])));
    let batch = RecordBatch::try_from_iter([("input_ids", ids), ("text", text)]).expect("a batch");
    let (mut stream, mut file) = (Vec::new(), Vec::new());
    let mut writer = StreamWriter::try_new(&mut stream, &batch.schema()).expect("a writer");
    writer.write(&batch).and_then(|()| writer.finish()).expect("in memory");
    let mut writer = FileWriter::try_new(&mut file, &batch.schema()).expect("a writer");
    writer.write(&batch).and_then(|()| writer.finish()).expect("in memory");
    vec![stream, file]
}

/// Reads a shard of pretraining's tokens.
pub(super) fn token_stream(bytes: &[u8]) -> bool {
    let path = scratch::file("tokens.bin", bytes);
    let Ok(stream) = TokenStream::open(&[path]) else { return false };
    let _ = stream.check(100);
    let _ = stream.read(0..stream.len().min(64));
    let _ = stream.read_wrapping(usize::MAX / 2, 64);
    let mut documents = 0_usize;
    let _ = stream.documents(|_| documents += 1);
    true
}

pub(super) fn token_streams() -> Vec<Vec<u8>> {
    vec![scratch::written("a.bin", |path| {
        write_shard(path, &[1, 5, 6, 1, 70, 71]).expect("written");
    })]
}

const SHARD: &str = "shard-00000.bin";
const INDEX: &str = "index.json";

/// Writes a folder of prepared tokens.
fn write_prepared(folder: &Path) {
    let text = folder.join("rows.jsonl");
    std::fs::write(&text, "{\"text\": \"the cat\"}\n{\"text\": \"on the mat\"}\n")
        .expect("written");
    let config = SourceConfig { path: "rows.jsonl".into(), ..SourceConfig::default() };
    let sources = [Source { config, paths: vec![text] }];
    let options =
        PrepareOptions { output: folder.to_path_buf(), shard_bytes: 1 << 20, max_bad_rows: 0.0 };
    prepare(&sources, &encoder(), &options, &mut |_| {}).expect("prepared");
}

fn prepared(folder: PathBuf) -> bool {
    let config = SourceConfig { path: folder.clone(), ..SourceConfig::default() };
    let mut quarantine = Quarantine::new(None, 0.0).expect("nothing to remove");
    read_source(&config, vec![folder], &encoder() as &dyn TextEncoder, &mut quarantine).is_ok()
}

/// Reads a shard of prepared tokens; its index says the hash that it has.
pub(super) fn data_shard(bytes: &[u8]) -> bool {
    let folder = scratch::folder_with("prepared", write_prepared, SHARD, bytes);
    let text = std::fs::read(folder.join(INDEX)).expect("an index");
    let mut index: Value = serde_json::from_slice(&text).expect("an index");
    index["shards"][0]["blake3"] = blake3::hash(bytes).to_hex().as_str().into();
    std::fs::write(folder.join(INDEX), index.to_string()).expect("written");
    prepared(folder)
}

pub(super) fn data_shards() -> Vec<Vec<u8>> {
    vec![scratch::made(SHARD, write_prepared)]
}

/// Reads the index of prepared tokens.
pub(super) fn data_index(bytes: &[u8]) -> bool {
    prepared(scratch::folder_with("prepared-index", write_prepared, INDEX, bytes))
}

pub(super) fn data_indices() -> Vec<Vec<u8>> {
    vec![scratch::made(INDEX, write_prepared)]
}
