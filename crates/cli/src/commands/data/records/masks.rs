//! Which tokens of a record are learned: engines capture states and do not know.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use longdraft_data::source::{data_files, read_rows};
use longdraft_data::template::{Example, Template};
use longdraft_features::records::RecordDocument;

use crate::cli::DataRecordsArguments;
use crate::failure::{Failure, Result};

/// Loss masks by the tokens that they belong to.
pub(super) enum Masks {
    /// The records' own.
    Own,
    /// Every token is learned.
    All,
    /// Those of a prepared data set.
    Rows { path: PathBuf, by_tokens: HashMap<Vec<u32>, Vec<bool>> },
}

impl Masks {
    /// As the command says; without a word those of the Arrow data set in the records' folder or the one above it,
    /// where speculators keeps it.
    pub(super) fn of(arguments: &DataRecordsArguments) -> Result<Self> {
        if arguments.learn_all {
            return Ok(Self::All);
        }
        let beside = || {
            let folder = &arguments.folder;
            let above =
                folder.canonicalize().ok().and_then(|path| Some(path.parent()?.to_path_buf()));
            [Some(folder.clone()), above].into_iter().flatten().find(|folder| holds_arrow(folder))
        };
        match arguments.masks.clone().or_else(beside) {
            Some(path) => Self::read(path),
            None => Ok(Self::Own),
        }
    }

    fn read(path: PathBuf) -> Result<Self> {
        let mut by_tokens = HashMap::new();
        let (ids, loss_mask) = ("input_ids".to_owned(), "loss_mask".to_owned());
        let template = Template::Tokens { ids, loss_mask };
        for file in mask_files(&path)? {
            for row in read_rows(&file)? {
                let mut row = row?.parse()?;
                row.value("loss_mask")?;
                if let Example::Tokens { ids, loss_mask } = template.example(&mut row)? {
                    by_tokens.insert(ids, loss_mask);
                }
            }
        }
        Ok(Self::Rows { path, by_tokens })
    }

    /// The mask of a document. It fails where neither the record nor the data set has one.
    pub(super) fn of_document<'a>(
        &'a self,
        document: &'a RecordDocument,
    ) -> Result<Cow<'a, [bool]>> {
        match (self, &document.loss_mask) {
            (Self::All, _) => Ok(vec![true; document.ids.len()].into()),
            (Self::Rows { path, by_tokens }, None) => {
                let mask = by_tokens.get(&document.ids).map(|mask| mask.as_slice().into());
                mask.ok_or_else(|| {
                    Failure::work(format!(
                        "{}: no row of {} has its {} tokens",
                        document.place,
                        path.display(),
                        document.ids.len()
                    ))
                    .hint("name the prepared data whose tokens were captured in --masks")
                })
            }
            (_, Some(mask)) => Ok(mask.as_slice().into()),
            (Self::Own, None) => Err(Failure::work(format!(
                "{}: the record does not say which tokens are learned",
                document.place
            ))
            .hint(
                "name the prepared data set in --masks (a folder of .arrow files, or rows with input_ids and \
                 loss_mask), or learn every token with --learn-all",
            )),
        }
    }
}

/// Files of a data set: of a folder the Arrow files that stand in it, for records may lie below.
fn mask_files(path: &Path) -> Result<Vec<PathBuf>> {
    if holds_arrow(path) { arrow_files(path) } else { Ok(data_files(path)?) }
}

fn holds_arrow(folder: &Path) -> bool {
    arrow_files(folder).is_ok_and(|files| !files.is_empty())
}

fn arrow_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let fail = Failure::at(folder);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.extension().is_some_and(|extension| extension == "arrow") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
