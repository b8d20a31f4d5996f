//! A head over the most frequent tokens: drafting reads fewer rows of it. The target's own head
//! stays whole, so that output is the same and only proposals are limited.

use std::path::Path;

use candle_core::Tensor;
use longdraft_kernels::matrix::Matrix;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::target_model::Target;
use longdraft_models::{ModelError, TargetTokenId};

use crate::error::Result;

/// Characters of a wrong line that are shown.
const SHOWN: usize = 40;

/// Rows of the target's head for some tokens.
pub struct ReducedHead {
    /// `[Vd, H]`
    matrix: Matrix,
    vocabulary: VocabularyMap,
}

impl ReducedHead {
    /// The rows of these tokens.
    ///
    /// # Errors
    /// - the map is for another vocabulary
    pub fn new(target: &Target, vocabulary: VocabularyMap) -> Result<Self> {
        let rows: Vec<u32> = vocabulary.kept().iter().map(|token| token.0).collect();
        Ok(Self { matrix: target.hold_ends()?.head_matrix().select(&rows)?, vocabulary })
    }

    /// Reads a list of tokens: a line each, the id and, if it is known, how often it occurs
    /// (separated by a space, tab or comma). With counts the `size` most frequent are kept, without
    /// the first `size`.
    ///
    /// # Errors
    /// - the file cannot be read, a line is no id with an optional count (its number is named), an
    ///   id is given twice or lies outside the vocabulary
    pub fn open(target: &Target, path: &Path, size: Option<usize>) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(ModelError::io(path))?;
        let mut entries: Vec<(u32, Option<u64>)> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            entries.push(entry(line).ok_or_else(|| {
                let (number, shown) = (number + 1, beginning(line));
                let problem = format!("line {number}: `{shown}` is no token id with a count");
                ModelError::invalid(path, problem)
            })?);
        }
        if entries.iter().all(|(_, count)| count.is_some()) {
            entries.sort_by_key(|(id, count)| (std::cmp::Reverse(*count), *id));
        }
        entries.truncate(size.unwrap_or(usize::MAX));
        let kept = entries.into_iter().map(|(id, _)| TargetTokenId(id)).collect();
        let vocabulary = VocabularyMap::new(kept, target.config().vocab_size)
            .map_err(|error| ModelError::invalid(path, error))?;
        Self::new(target, vocabulary)
    }

    /// `[Vd, H]`
    pub fn matrix(&self) -> &Matrix {
        &self.matrix
    }

    /// What its rows stand for.
    pub fn vocabulary(&self) -> &VocabularyMap {
        &self.vocabulary
    }
}

/// Logits of hidden states over a reduced head, or over the target's, `[R, H]` → `[R, Vd]`.
pub(super) fn head_logits(
    head: Option<&ReducedHead>,
    target: &Target,
    states: &Tensor,
) -> Result<Tensor> {
    Ok(target.bend().of(head_products(head, target, states)?)?)
}

/// What [`head_logits`] makes logits of.
pub(super) fn head_products(
    head: Option<&ReducedHead>,
    target: &Target,
    states: &Tensor,
) -> Result<Tensor> {
    // Nothing trains here: a head of quantised blocks takes no input that carries a gradient.
    let states = states.detach();
    Ok(match head {
        Some(head) => head.matrix().linear(&states, None)?,
        None => target.hold_ends()?.head_matrix().linear(&states, None)?,
    })
}

/// As much of a line as an error shows.
fn beginning(line: &str) -> String {
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line.to_owned(),
    }
}

fn entry(line: &str) -> Option<(u32, Option<u64>)> {
    let mut parts = line.split([' ', '\t', ',']).filter(|part| !part.is_empty());
    let id = parts.next()?.parse().ok()?;
    let count = parts.next().map(str::parse).transpose().ok()?;
    parts.next().is_none().then_some((id, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_line_is_shown_by_its_beginning() {
        let line = "é".repeat(SHOWN);
        assert_eq!(beginning(&line), line);
        assert_eq!(beginning(&format!("{line}x")), format!("{line}..."));
    }

    #[test]
    fn a_line_is_an_id_with_an_optional_count() {
        assert_eq!(entry("17"), Some((17, None)));
        assert_eq!(entry("17,\t5"), Some((17, Some(5))));
        for wrong in ["x", "1 2 3", "1 x", "-1", ""] {
            assert_eq!(entry(wrong), None, "{wrong}");
        }
    }
}
