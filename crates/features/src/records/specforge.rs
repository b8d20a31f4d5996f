//! What SpecForge writes: one `torch.save` of a document each.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `input_ids`, `loss_mask` | `[T]` or `[1, T]` i64 | zeros after the document are padding |
//! | `aux_hidden_state` (EAGLE-3), `hidden_states` (block drafts) | `[1, T, L·H]` | tapped layers side by side |
//! | `hidden_state` (EAGLE-3), `target_last_hidden_states` (DSpark) | `[1, T, H]` | after the final norm |
//!
//! The pickles are read by a machine that builds tensors and calls nothing.

use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::pth::PthSource;

use super::{Captured, Format, RecordDocument, problem};
use crate::error::Result;

/// Names of the tapped layers.
const LAYERS: [&str; 2] = ["aux_hidden_state", "hidden_states"];

/// Names of the states after the final norm.
const LAST: [&str; 2] = ["hidden_state", "target_last_hidden_states"];

/// Files of a document each.
pub(super) struct Saved(pub(super) Vec<PathBuf>);

impl Format for Saved {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn document(&self, index: usize) -> Result<RecordDocument> {
        document(&self.0[index])
    }

    fn captured(&self, index: usize, (tokens, hidden): (usize, usize)) -> Result<Captured> {
        let source = PthSource::open(&self.0[index])?;
        let present =
            |names: [&'static str; 2]| names.into_iter().find(|name| source.shape(name).is_some());
        let layers = present(LAYERS).map(|name| {
            let states = states(&source, name, tokens)?;
            let width = states.dims()[1];
            if width == 0 || !width.is_multiple_of(hidden) {
                let text = format!("`{name}` of width {width} where layers have {hidden} each");
                return Err(problem(source.path(), text));
            }
            Ok((name, states.reshape((tokens, width / hidden, hidden))?))
        });
        let last = present(LAST).map(|name| {
            let states = states(&source, name, tokens)?;
            let width = states.dims()[1];
            if width == hidden {
                return Ok((name, states));
            }
            let text = format!("`{name}` of width {width} where {hidden} is needed");
            Err(problem(source.path(), text))
        });
        Ok(Captured { layers: layers.transpose()?, last: last.transpose()? })
    }
}

/// Ids and mask of a record, without the padding after its last token: ids of zero that are not learned.
fn document(path: &Path) -> Result<RecordDocument> {
    let source = PthSource::open(path)?;
    for name in ["input_ids", "loss_mask"] {
        let shape = source.shape(name).unwrap_or_default();
        if !matches!(shape[..], [_] | [1, _]) {
            let text = format!("`{name}` {shape:?} where [T] or [1, T] is needed");
            return Err(problem(path, text));
        }
    }
    let ids = source.load_integers("input_ids")?;
    let mask = source.load_integers("loss_mask")?;
    if ids.len() != mask.len() {
        return Err(problem(path, format!("{} ids and a mask of {}", ids.len(), mask.len())));
    }
    let padding = ids.iter().zip(&mask).rev().take_while(|(id, mask)| (**id, **mask) == (0, 0));
    let tokens = ids.len() - padding.count();
    let place = path.display().to_string();
    RecordDocument::of_numbers(place, &ids[..tokens], Some(&mask[..tokens]))
}

/// The states of the first `tokens` tokens of a `[1, T, W]` or `[T, W]` tensor.
fn states(source: &PthSource, name: &str, tokens: usize) -> Result<Tensor> {
    let found = source.shape(name).unwrap_or_default();
    let (held, width) = match found[..] {
        [1, held, width] | [held, width] if held >= tokens => (held, width),
        _ => {
            let text = format!("`{name}` {found:?} where [1, {tokens} or more, width] is needed");
            return Err(problem(source.path(), text));
        }
    };
    let all = source.load(name, DType::F32)?;
    Ok(all.reshape((held, width))?.narrow(0, 0, tokens)?.contiguous()?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use longdraft_models::weights::pth::save;

    use super::*;

    fn write(path: &Path, ids: &[i64], mask: &[i64]) {
        let tensor = |values: &[i64]| {
            Tensor::from_slice(values, values.len(), &Device::Cpu).expect("tensor")
        };
        let tensors = [("input_ids", ids), ("loss_mask", mask)];
        save(path, &tensors.map(|(name, values)| (name.to_owned(), tensor(values))))
            .expect("written");
    }

    #[test]
    fn padding_goes_and_nonsense_is_named() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("data_0.ckpt");
        write(&path, &[5, 0, 7, 0, 0, 0], &[0, 0, 1, 1, 0, 0]);
        let found = document(&path).expect("a record");
        assert_eq!(found.ids, [5, 0, 7, 0]);
        assert_eq!(found.loss_mask.as_deref(), Some(&[false, false, true, true][..]));
        for (ids, mask, text) in [
            (&[1, 2][..], &[1][..], "2 ids and a mask of 1"),
            (&[1, -2], &[1, 1], "below 0"),
            (&[1, 2], &[1, 2], "neither 0 nor 1"),
        ] {
            write(&path, ids, mask);
            let error = document(&path).expect_err("refused").to_string();
            assert!(error.contains(text) && error.contains("data_0.ckpt"), "{error}");
        }
    }
}
