//! Reading and writing shards.
//!
//! Tokens stay on disk and are read where they are needed, by position: a file that is cut while
//! it is in use is then an error, while a mapped one would end the process.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::error::{DataError, Result};

const MAGIC: i32 = 20_240_520;
const VERSION: i32 = 1;
const HEADER_BYTES: usize = 1024;
const TOKEN_BYTES: usize = 2;
/// Tokens that are read at once while checking.
const CHUNK: usize = 1 << 20;

/// One file of tokens.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
    tokens: usize,
}

impl Shard {
    /// Opens a file and checks header and length.
    fn open(path: &Path) -> Result<Self> {
        let fail = |problem: String| DataError::shards(path, problem);
        // Opening a pipe waits for its writer.
        if !std::fs::metadata(path).map_err(DataError::io(path))?.is_file() {
            return Err(fail("not a regular file".to_owned()));
        }
        let file = File::open(path).map_err(DataError::io(path))?;
        let bytes = file.metadata().map_err(DataError::io(path))?.len();
        if bytes < HEADER_BYTES as u64 {
            return Err(fail(format!("{bytes} bytes, a header alone has {HEADER_BYTES}")));
        }
        let mut header = [0; 12];
        read_at(&file, &mut header, 0).map_err(DataError::io(path))?;
        let field = |at: usize| {
            i32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        if field(0) != MAGIC {
            return Err(fail(format!("no token shard: it begins with {}, not {MAGIC}", field(0))));
        }
        if field(4) != VERSION {
            return Err(fail(format!("version {}, this build reads {VERSION}", field(4))));
        }
        let tokens = usize::try_from(field(8))
            .map_err(|_| fail(format!("a negative number of tokens, {}", field(8))))?;
        let expected = (HEADER_BYTES + TOKEN_BYTES * tokens) as u64;
        if bytes != expected {
            return Err(fail(format!("{bytes} bytes, {tokens} tokens take {expected}")));
        }
        Ok(Self { path: path.to_path_buf(), file, tokens })
    }

    /// Appends some tokens to `out`.
    fn read(&self, range: Range<usize>, out: &mut Vec<u16>) -> Result<()> {
        if range.end > self.tokens || range.start > range.end {
            let problem = format!("tokens {range:?} of {}", self.tokens);
            return Err(DataError::shards(&self.path, problem));
        }
        let mut bytes = vec![0; TOKEN_BYTES * range.len()];
        let offset = (HEADER_BYTES + TOKEN_BYTES * range.start) as u64;
        read_at(&self.file, &mut bytes, offset).map_err(DataError::io(&self.path))?;
        out.extend(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])));
        Ok(())
    }

    fn check(&self, vocabulary: usize) -> Result<()> {
        let mut chunk = Vec::new();
        for start in (0..self.tokens).step_by(CHUNK) {
            chunk.clear();
            self.read(start..(start + CHUNK).min(self.tokens), &mut chunk)?;
            if let Some(at) = chunk.iter().position(|id| usize::from(*id) >= vocabulary) {
                let problem = format!(
                    "token {} is {}, beyond the vocabulary of {vocabulary}",
                    start + at,
                    chunk[at]
                );
                return Err(DataError::shards(&self.path, problem));
            }
        }
        Ok(())
    }
}

#[cfg(unix)]
fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    file.read_exact_at(bytes, offset)
}

#[cfg(not(unix))]
fn read_at(mut file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(bytes)
}

/// Writes tokens one after the other; the header comes last, so that half a file is no shard.
pub struct ShardWriter {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    tokens: usize,
}

impl ShardWriter {
    /// Begins a file.
    ///
    /// # Errors
    /// - it cannot be made
    pub fn create(path: &Path) -> Result<Self> {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(".partial");
        let temporary = path.with_file_name(name);
        let mut file = BufWriter::new(File::create(&temporary).map_err(DataError::io(&temporary))?);
        file.write_all(&[0; HEADER_BYTES]).map_err(DataError::io(&temporary))?;
        Ok(Self { path: path.to_path_buf(), temporary, file, tokens: 0 })
    }

    /// Tokens so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Adds tokens.
    ///
    /// # Errors
    /// - the disk is full, or there are more tokens than a header can say
    pub fn write(&mut self, tokens: &[u16]) -> Result<()> {
        if i32::try_from(self.tokens + tokens.len()).is_err() {
            return Err(DataError::shards(&self.path, "more than 2^31 tokens"));
        }
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        self.file.write_all(&bytes).map_err(DataError::io(&self.temporary))?;
        self.tokens += tokens.len();
        Ok(())
    }

    /// Writes the header and puts the file in its place.
    ///
    /// # Errors
    /// - the disk is full
    pub fn finish(self) -> Result<()> {
        use std::io::{Seek, SeekFrom};
        let io = || DataError::io(&self.temporary);
        let mut file = self.file.into_inner().map_err(|error| io()(error.into_error()))?;
        let mut header = Vec::new();
        for field in [MAGIC, VERSION, self.tokens as i32] {
            header.extend_from_slice(&field.to_le_bytes());
        }
        file.seek(SeekFrom::Start(0)).map_err(io())?;
        file.write_all(&header).map_err(io())?;
        file.sync_all().map_err(io())?;
        std::fs::rename(&self.temporary, &self.path).map_err(DataError::io(&self.path))
    }
}

/// Writes a whole shard.
///
/// # Errors
/// - as [`ShardWriter`]
pub fn write_shard(path: &Path, tokens: &[u16]) -> Result<()> {
    let mut writer = ShardWriter::create(path)?;
    writer.write(tokens)?;
    writer.finish()
}

/// Where true byte counts of a shard's tokens lie, a shard of the same length: `x.bin` has
/// `x.bytes.bin`.
pub fn sidecar_path(shard: &Path) -> PathBuf {
    shard.with_extension("bytes.bin")
}

fn is_sidecar(path: &Path) -> bool {
    path.to_string_lossy().ends_with(".bytes.bin")
}

/// The files that a path means: itself, every `.bin` of a folder, or those with the beginning and the end of a name
/// with a `*` (`data/train_*.bin`).
fn files_of(path: &Path) -> Result<Vec<PathBuf>> {
    let (folder, (beginning, end)) = if path.is_dir() {
        (path, ("", ""))
    } else {
        let ends = path.file_name().and_then(|name| name.to_str()?.split_once('*'));
        let Some(ends) = ends.filter(|_| !path.exists()) else {
            return Ok(vec![path.to_path_buf()]);
        };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        (folder.unwrap_or(Path::new(".")), ends)
    };
    let wanted = |file: &Path| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let rest = name.strip_prefix(beginning);
        let named = rest.is_some_and(|rest| rest.ends_with(end));
        named && file.extension().is_some_and(|e| e == "bin") && !is_sidecar(file)
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(DataError::io(folder))? {
        let file = entry.map_err(DataError::io(folder))?.path();
        if wanted(&file) {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(DataError::shards(path, "no .bin file is there"));
    }
    Ok(files)
}

/// Shards laid end to end.
#[derive(Debug)]
pub struct TokenStream {
    shards: Vec<Shard>,
    /// Where each shard ends.
    ends: Vec<usize>,
}

impl TokenStream {
    /// Opens files, every `.bin` of folders, and those that a name with a `*` means, in the order of their paths.
    ///
    /// # Errors
    /// - there is none, or one is no shard
    pub fn open(paths: &[PathBuf]) -> Result<Self> {
        let mut files = Vec::new();
        for path in paths {
            files.extend(files_of(path)?);
        }
        files.sort();
        let shards = files.iter().map(|path| Shard::open(path)).collect::<Result<Vec<_>>>()?;
        let mut end = 0;
        let ends = shards.iter().map(|shard| {
            end += shard.tokens;
            end
        });
        let ends: Vec<usize> = ends.collect();
        if ends.last().copied().unwrap_or(0) == 0 {
            let path = paths.first().cloned().unwrap_or_default();
            return Err(DataError::shards(path, "there are no tokens"));
        }
        Ok(Self { shards, ends })
    }

    /// Tokens of all shards.
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Whether there are none; an open stream has some.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// Reads every token and looks for ids beyond the vocabulary.
    ///
    /// # Errors
    /// - one is, with its place
    pub fn check(&self, vocabulary: usize) -> Result<()> {
        self.shards.iter().try_for_each(|shard| shard.check(vocabulary))
    }

    /// Some tokens, across shards.
    ///
    /// # Errors
    /// - the range leaves the stream, or a file cannot be read
    pub fn read(&self, range: Range<usize>) -> Result<Vec<u16>> {
        if range.end > self.len() {
            let path = self.shards[0].path.clone();
            return Err(DataError::shards(path, format!("tokens {range:?} of {}", self.len())));
        }
        let mut tokens = Vec::with_capacity(range.len());
        let mut at = range.start;
        while at < range.end {
            let index = self.ends.partition_point(|end| *end <= at);
            let start = self.ends[index] - self.shards[index].tokens;
            let end = range.end.min(self.ends[index]);
            self.shards[index].read(at - start..end - start, &mut tokens)?;
            at = end;
        }
        Ok(tokens)
    }

    /// Some tokens from `start` on, going on at the beginning after the end.
    ///
    /// # Errors
    /// - a file cannot be read
    pub fn read_wrapping(&self, start: usize, count: usize) -> Result<Vec<u16>> {
        let mut tokens = Vec::with_capacity(count);
        let mut at = start % self.len();
        while tokens.len() < count {
            let end = self.len().min(at + count - tokens.len());
            tokens.extend(self.read(at..end)?);
            at = 0;
        }
        Ok(tokens)
    }

    /// Calls `each` with every document: from one start token to before the next.
    ///
    /// # Errors
    /// - a file cannot be read
    pub fn documents(&self, mut each: impl FnMut(&[u16])) -> Result<()> {
        let mut document = Vec::new();
        for start in (0..self.len()).step_by(CHUNK) {
            for token in self.read(start..(start + CHUNK).min(self.len()))? {
                if token == super::START_OF_DOCUMENT && !document.is_empty() {
                    each(&document);
                    document.clear();
                }
                document.push(token);
            }
        }
        if !document.is_empty() {
            each(&document);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_read_across_borders_and_wrap() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        write_shard(&dir.path().join("b.bin"), &[5, 1, 6])?;
        write_shard(&dir.path().join("a.bin"), &[1, 2, 3])?;
        write_shard(&sidecar_path(&dir.path().join("a.bin")), &[0, 1, 1])?;
        let stream = TokenStream::open(&[dir.path().to_path_buf()])?;
        assert_eq!((stream.len(), stream.read(1..5)?), (6, vec![2, 3, 5, 1]));
        assert_eq!(stream.read_wrapping(4, 9)?, [1, 6, 1, 2, 3, 5, 1, 6, 1]);
        let mut documents = Vec::new();
        stream.documents(|document| documents.push(document.to_vec()))?;
        assert_eq!(documents, [vec![1, 2, 3, 5], vec![1, 6]]);
        assert!(stream.read(4..9).is_err() && stream.check(7).is_ok());
        let message = stream.check(6).expect_err("beyond").to_string();
        assert!(message.contains("b.bin: token 2 is 6, beyond the vocabulary of 6"), "{message}");
        Ok(())
    }

    #[test]
    fn a_star_names_the_shards_of_one_kind() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let shards = [("train_000001.bin", 3), ("train_000000.bin", 2), ("val_000000.bin", 4)];
        for (name, token) in shards {
            write_shard(&dir.path().join(name), &[1, token])?;
        }
        write_shard(&sidecar_path(&dir.path().join("train_000001.bin")), &[0, 1])?;
        let stream = TokenStream::open(&[dir.path().join("train_*.bin")])?;
        assert_eq!(stream.read(0..stream.len())?, [1, 2, 1, 3]);
        let none = TokenStream::open(&[dir.path().join("test_*.bin")]).expect_err("none");
        assert!(none.to_string().contains("no .bin file is there"), "{none}");
        Ok(())
    }

    #[test]
    fn faults_of_a_header_are_each_named() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("x.bin");
        write_shard(&path, &[1, 2, 3]).expect("written");
        let whole = std::fs::read(&path).expect("read");
        let with = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = whole.clone();
            change(&mut bytes);
            std::fs::write(&path, bytes).expect("write");
            Shard::open(&path).expect_err("a fault").to_string()
        };
        assert!(with(&|b| b[0] = 7).contains("no token shard"));
        assert!(with(&|b| b[4] = 2).contains("version 2"));
        assert!(with(&|b| b[8] = 4).contains("1030 bytes, 4 tokens take 1032"));
        assert!(with(&|b| b[11] = 0xFF).contains("negative"));
        assert!(with(&|b| b.truncate(1029)).contains("1029 bytes"));
        assert!(with(&|b| b.truncate(100)).contains("a header alone"));
        assert!(TokenStream::open(&[dir.path().join("none.bin")]).is_err());
        let empty = tempfile::tempdir().expect("tempdir");
        let message = TokenStream::open(&[empty.path().to_path_buf()]).expect_err("none");
        assert!(message.to_string().contains("no .bin file"));
    }
}
