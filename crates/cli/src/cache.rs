//! Where files that can be had again lie.

use std::path::PathBuf;

use crate::failure::{Failure, Result};

/// The user's cache folder for this program.
pub(crate) fn cache_folder() -> Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let base = variable("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".cache")));
    base.map(|base| base.join("longdraft")).ok_or_else(|| {
        Failure::usage("no cache folder: neither XDG_CACHE_HOME nor HOME is set")
            .hint("give a folder: longdraft fetch smollm2 FOLDER")
    })
}
