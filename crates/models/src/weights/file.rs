//! Weight files, read piece by piece.
//!
//! They are not mapped into memory: of a mapped file that shrinks the system takes the pages away,
//! and the next touch ends the process. A read of it is an error with the file's name, and costs
//! the same.

use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{ModelError, Result};
use crate::side_files::require_file;

/// Bytes that are read at a time where a tensor is converted while it is read; a multiple of every
/// element's size.
pub(crate) const PIECE: usize = 4 << 20;

/// A file that is open, of the length that it had then.
pub(crate) struct WeightFile {
    path: PathBuf,
    file: File,
    length: usize,
}

impl WeightFile {
    /// # Errors
    /// - unreadable, or no regular file
    pub(crate) fn open(path: &Path) -> Result<Self> {
        require_file(path)?;
        let file = File::open(path).map_err(ModelError::io(path))?;
        let metadata = file.metadata().map_err(ModelError::io(path))?;
        let length = usize::try_from(metadata.len())
            .map_err(|_| ModelError::invalid(path, "longer than this machine can address"))?;
        Ok(Self { path: path.to_path_buf(), file, length })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the file.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// From the file's start on, for headers.
    pub(crate) fn reader(&self) -> impl Read + '_ {
        BufReader::new(FromStart { file: &self.file, at: 0 })
    }

    /// The bytes of `range`, which nothing is allocated for unless the file holds them.
    /// It fails where the file ends before, or cannot be read.
    pub(crate) fn read(&self, range: Range<usize>) -> Result<Vec<u8>> {
        if range.end > self.length {
            return Err(self.cut_off());
        }
        let mut bytes = vec![0; range.len()];
        self.read_into(range.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Hands the bytes of `range` to `take`, piece by piece, each with its distance from the start.
    /// It fails as [`Self::read`] does.
    pub(crate) fn read_pieces(
        &self,
        range: Range<usize>,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        if range.end > self.length {
            return Err(self.cut_off());
        }
        let mut piece = vec![0; range.len().min(PIECE)];
        for start in (0..range.len()).step_by(PIECE) {
            let piece = &mut piece[..PIECE.min(range.len() - start)];
            self.read_into(range.start + start, piece)?;
            take(start, piece);
        }
        Ok(())
    }

    fn read_into(&self, start: usize, bytes: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(bytes, start as u64).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => self.cut_off(),
            _ => ModelError::io(&self.path)(error),
        })
    }

    fn cut_off(&self) -> ModelError {
        let problem = format!(
            "ends before its {} bytes: it was cut off after it was opened; start again with a whole \
             file",
            self.length
        );
        ModelError::invalid(&self.path, problem)
    }
}

/// Reads without the position that all users of a file share.
struct FromStart<'a> {
    file: &'a File,
    at: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        let read = self.file.read_at(bytes, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::files::open_weights;

    #[test]
    fn a_file_that_shrinks_is_an_error_that_names_it() -> Result<()> {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("weights");
        let whole: Vec<u8> = (0..PIECE + 10).map(|i| i as u8).collect();
        std::fs::write(&path, &whole).expect("written");
        let file = WeightFile::open(&path)?;
        assert_eq!(file.read(3..9)?, whole[3..9]);
        let mut pieces = Vec::new();
        file.read_pieces(1..whole.len(), |start, piece| pieces.push((start, piece.to_vec())))?;
        assert_eq!(pieces.iter().map(|(start, _)| *start).collect::<Vec<_>>(), [0, PIECE]);
        let read: Vec<u8> = pieces.into_iter().flat_map(|(_, piece)| piece).collect();
        assert_eq!(read, whole[1..]);
        File::options().write(true).open(&path).and_then(|f| f.set_len(5)).expect("cut");
        for error in [file.read(3..9).err(), file.read_pieces(0..9, |_, _| ()).err()] {
            let message = error.expect("cut off").to_string();
            assert!(message.contains("weights") && message.contains("was cut off"), "{message}");
        }
        assert_eq!(file.read(3..5)?, whole[3..5]);
        assert!(file.read(0..usize::MAX).is_err());
        assert!(WeightFile::open(folder.path()).is_err());
        Ok(())
    }

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let folder = tempfile::tempdir().expect("folder");
        for name in ["model.safetensors", "draft.pth"] {
            let path = folder.path().join(name);
            let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo");
            assert!(made.success());
            let error = open_weights(&path).err().expect("refused").to_string();
            assert!(error.contains(name) && error.contains("not a regular file"), "{error}");
        }
    }
}
