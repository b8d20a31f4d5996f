//! Folders that are complete or absent.

use std::fs::File;
use std::path::{Path, PathBuf};

use longdraft_models::paths::parent_of;
use longdraft_models::weights::temporary::temporary;

use crate::error::{Result, ServingError};

/// A folder that is being written beside its place.
pub(crate) struct NewFolder {
    place: PathBuf,
    temporary: PathBuf,
}

impl NewFolder {
    /// Starts one; what a killed process left is taken away.
    /// It fails where the place exists and is no folder that an export may replace, or cannot be written.
    pub(crate) fn at(place: &Path, may_replace: impl Fn(&Path) -> bool) -> Result<Self> {
        let occupied = place.exists()
            && std::fs::read_dir(place).map_or(true, |mut entries| entries.next().is_some());
        if occupied && !may_replace(place) {
            let problem = "is there and was not written by an export: name another folder";
            return Err(ServingError::io(place)(std::io::Error::other(problem)));
        }
        let parent = parent_of(place);
        std::fs::create_dir_all(parent).map_err(ServingError::io(parent))?;
        let temporary = temporary(place, ".", ".writing");
        let _ = std::fs::remove_dir_all(&temporary);
        std::fs::create_dir(&temporary).map_err(ServingError::io(&temporary))?;
        Ok(Self { place: place.to_path_buf(), temporary })
    }

    /// Where to write.
    pub(crate) fn path(&self) -> &Path {
        &self.temporary
    }

    /// Puts the folder in its place.
    pub(crate) fn finish(self) -> Result<()> {
        let fail = |path: &Path| ServingError::io(path.to_path_buf());
        for entry in std::fs::read_dir(&self.temporary).map_err(fail(&self.temporary))? {
            let path = entry.map_err(fail(&self.temporary))?.path();
            File::open(&path).and_then(|file| file.sync_all()).map_err(fail(&path))?;
        }
        let mut old = self.temporary.as_os_str().to_os_string();
        old.push(".old");
        let old = PathBuf::from(old);
        let _ = std::fs::remove_dir_all(&old);
        if self.place.exists() {
            std::fs::rename(&self.place, &old).map_err(fail(&self.place))?;
        }
        std::fs::rename(&self.temporary, &self.place).map_err(fail(&self.place))?;
        let _ = std::fs::remove_dir_all(&old);
        Ok(())
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.temporary);
    }
}
