//! Which files a path stands for, and the reader that fits each.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use super::{Rows, arrow, csv, json, parquet, text};
use crate::error::{DataError, Result};

/// What a file's name says about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Lines,
    Json,
    Parquet,
    Arrow,
    Text,
    /// With the byte between two fields.
    Table(u8),
}

/// Compression by the last part of the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
    Zstd,
}

const KNOWN: &str =
    ".jsonl, .ndjson, .json, .csv, .tsv, .txt, .md (each also .gz or .zst), .parquet, .arrow";

fn kind(path: &Path) -> Option<(Kind, Compression)> {
    let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
    let (name, compression) = match name.rsplit_once('.')? {
        (rest, "gz") => (rest, Compression::Gzip),
        (rest, "zst") => (rest, Compression::Zstd),
        _ => (name.as_str(), Compression::None),
    };
    let kind = match name.rsplit_once('.')?.1 {
        "jsonl" | "ndjson" => Kind::Lines,
        "json" => Kind::Json,
        "txt" | "md" => Kind::Text,
        "csv" => Kind::Table(b','),
        "tsv" => Kind::Table(b'\t'),
        "parquet" if compression == Compression::None => Kind::Parquet,
        "arrow" if compression == Compression::None => Kind::Arrow,
        _ => return None,
    };
    Some((kind, compression))
}

/// Whether a file of a folder is data by its name: of a kind that can be read, and no description of the folder.
pub fn is_data_file(path: &Path) -> bool {
    kind(path).is_some() && !is_about(path)
}

/// Whether a file tells of the data beside it: a card, a licence, a list of the splits.
fn is_about(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let first = name.split('.').next().unwrap_or_default();
    match kind(path) {
        Some((Kind::Text, _)) => {
            ["readme", "license", "licence", "changelog", "citation"].contains(&first)
        }
        Some((Kind::Json, _)) => first == "dataset_infos",
        _ => false,
    }
}

/// The file itself, or every data file below a folder in the order of their paths; hidden files
/// and folders are passed over, and so is the JSON that describes Arrow files beside it.
///
/// # Errors
/// - the path cannot be read, is of no known kind, or a folder without data files
pub fn data_files(path: &Path) -> Result<Vec<PathBuf>> {
    let metadata = std::fs::metadata(path).map_err(DataError::io(path))?;
    if !metadata.is_dir() {
        return match kind(path) {
            Some(_) => Ok(vec![path.to_path_buf()]),
            None => Err(DataError::source(path, format!("unknown kind of file (known: {KNOWN})"))),
        };
    }
    let mut files = Vec::new();
    let mut folders = vec![path.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).map_err(DataError::io(&folder))? {
            let entry = entry.map_err(DataError::io(&folder))?;
            let path = entry.path();
            // A link to a folder is not followed: it could lead back here.
            let linked = entry.file_type().map_err(DataError::io(&path))?.is_symlink();
            if entry.file_name().to_string_lossy().starts_with('.') {
                continue;
            }
            if path.is_dir() {
                if !linked {
                    folders.push(path);
                }
            } else if is_data_file(&path) {
                files.push(path);
            }
        }
    }
    files.sort();
    let arrow: Vec<_> =
        files.iter().filter(|file| is_arrow(file)).map(|file| file.parent()).collect();
    let described = |file: &PathBuf| arrow.contains(&file.parent()) && is_description(file);
    let files: Vec<_> = files.iter().filter(|file| !described(file)).cloned().collect();
    if files.is_empty() {
        return Err(DataError::source(path, format!("no data file is there (known: {KNOWN})")));
    }
    Ok(files)
}

fn is_arrow(path: &Path) -> bool {
    kind(path).is_some_and(|(kind, _)| kind == Kind::Arrow)
}

/// Whether `datasets` writes a file of this name beside its Arrow files.
fn is_description(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    ["dataset_info.json", "state.json"].iter().any(|other| name == *other)
}

/// Rows of one file.
pub(super) fn open(path: &Path) -> Result<Rows> {
    let Some((kind, compression)) = kind(path) else {
        return Err(DataError::source(path, format!("unknown kind of file (known: {KNOWN})")));
    };
    // The first rows are read again, and a pipe or a device would have lost them.
    if !std::fs::metadata(path).map_err(DataError::io(path))?.is_file() {
        let problem = "its rows could be read only once: write them into a file, and give that";
        return Err(DataError::source(path, problem));
    }
    let file = File::open(path).map_err(DataError::io(path))?;
    if kind == Kind::Parquet {
        return parquet::read(path, file);
    }
    if kind == Kind::Arrow {
        return arrow::read(path, file);
    }
    let reader: Box<dyn BufRead + Send> = match compression {
        Compression::None => Box::new(BufReader::new(file)),
        Compression::Gzip => Box::new(BufReader::new(flate2::read::MultiGzDecoder::new(file))),
        Compression::Zstd => {
            let decoder = zstd::Decoder::new(file).map_err(DataError::io(path))?;
            Box::new(BufReader::new(decoder))
        }
    };
    match kind {
        Kind::Text => Ok(text::read(path, reader)),
        Kind::Json => json::read_any(path, reader),
        Kind::Table(delimiter) => csv::read(path, reader, delimiter),
        Kind::Lines | Kind::Parquet | Kind::Arrow => Ok(json::read_lines(path, reader, 1)),
    }
}
