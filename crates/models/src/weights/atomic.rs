//! Files that are complete or not there.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use super::temporary::temporary;
use crate::error::ModelError;

/// As everywhere in this crate, but for a caller's own errors.
type Result<T, E = ModelError> = std::result::Result<T, E>;

/// Writes beside, syncs and renames, so that a reader never sees half a file.
///
/// # Errors
/// - the folder cannot be written or is full; the temporary file is removed
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    write_atomically_with(path, |file| file.write_all(bytes).map_err(ModelError::io(path)))
}

/// The same with what `write` puts into the file.
///
/// # Errors
/// - those of `write`, and as [`write_atomically`]
pub fn write_atomically_with<T, E: From<ModelError>>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    let temporary = temporary(path, "", ".tmp");
    let all = || -> Result<T, E> {
        let fail = |error: std::io::Error| E::from(ModelError::io(path)(error));
        let mut file = BufWriter::new(File::create(&temporary).map_err(fail)?);
        let written = write(&mut file)?;
        let file = file.into_inner().map_err(|error| fail(error.into_error()))?;
        file.sync_all().map_err(fail)?;
        std::fs::rename(&temporary, path).map_err(fail)?;
        Ok(written)
    };
    all().inspect_err(|_| {
        // Nothing more can be done about a file that stays.
        let _ = std::fs::remove_file(&temporary);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_leaves_the_old_file_and_no_other() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("file");
        write_atomically(&path, b"old").expect("written");
        let failed = write_atomically_with(&path, |file| {
            file.write_all(b"half").map_err(ModelError::io(&path))?;
            Err::<(), _>(ModelError::Tokenizer("no more".into()))
        });
        assert!(failed.is_err());
        assert_eq!(std::fs::read(&path).expect("file"), b"old");
        assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 1);
        assert!(write_atomically(&folder.path().join("none/file"), b"new").is_err());
    }
}
