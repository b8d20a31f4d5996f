//! Files mapped into memory, the one place of this crate with `unsafe`.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, UncheckedAdvice};

use crate::error::{ModelError, Result};

/// A read-only mapped file.
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(ModelError::io(path))?;
        let length = file.metadata().map_err(ModelError::io(path))?;
        if !length.is_file() {
            return Err(ModelError::invalid(path, "not a regular file"));
        }
        // SAFETY: the map is read-only. Another process that truncates the file while it is
        // mapped could fault us; like every loader that maps weights we take files to be stable.
        let map = unsafe { Mmap::map(&file) }.map_err(ModelError::io(path))?;
        Ok(Self { path: path.to_path_buf(), map })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Tells the system that the pages of `range` need not stay in memory.
    pub(crate) fn release(&self, range: Range<usize>) {
        const PAGE: usize = 4096;
        let start = range.start.next_multiple_of(PAGE);
        let end = range.end / PAGE * PAGE;
        if start < end {
            // SAFETY: a private read-only file mapping: dropped pages are read again from the
            // file when touched. Failure only costs memory.
            let _ = unsafe {
                self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start)
            };
        }
    }
}
