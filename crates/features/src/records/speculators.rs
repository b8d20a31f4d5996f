//! What vLLM writes for speculators (`ExampleHiddenStatesConnector`): safetensors of a document each.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `token_ids` | `[T]` integers | |
//! | `hidden_states` | `[T, L, H]` f32, bf16 or f16 | outputs of the layers that were asked for, in that order, before any norm |
//! | `hidden_states_scales` | `[T, 1, 1]` f32 | beside 8-bit `hidden_states` only, which are refused |
//!
//! Which layers they are and which tokens are learned is not in the files. speculators appends the target's last
//! layer to those of the draft, and puts its final norm on it while it trains.

use std::path::PathBuf;

use candle_core::{DType, Tensor};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;

use super::{Captured, Format, RecordDocument, problem};
use crate::error::Result;

/// Types that states may have.
const TYPES: [&str; 3] = ["F32", "BF16", "F16"];

/// Files of a document each.
pub(super) struct Engine(pub(super) Vec<PathBuf>);

impl Format for Engine {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn document(&self, index: usize) -> Result<RecordDocument> {
        let source = SafetensorsSource::open_file(&self.0[index])?;
        let Some(shape) = source.shape("token_ids") else {
            let text = "no tensor `token_ids`: no record of an engine";
            return Err(problem(source.path(), text));
        };
        if !matches!(shape[..], [_] | [1, _]) {
            return Err(problem(
                source.path(),
                format!("`token_ids` {shape:?} where [T] is needed"),
            ));
        }
        let ids = source.load_integers("token_ids")?;
        shape_of(&source, ids.len())?;
        RecordDocument::of_numbers(source.path().display().to_string(), &ids, None)
    }

    fn captured(&self, index: usize, (tokens, hidden): (usize, usize)) -> Result<Captured> {
        let source = SafetensorsSource::open_file(&self.0[index])?;
        let (_, width) = shape_of(&source, tokens)?;
        if width != hidden {
            let text = format!("`hidden_states` of width {width}, and the target's have {hidden}");
            return Err(problem(source.path(), text));
        }
        let layers: Tensor = source.load("hidden_states", DType::F32)?;
        Ok(Captured { layers: Some(("hidden_states", layers)), last: None })
    }
}

/// `L` and `H` of `hidden_states`.
fn shape_of(source: &SafetensorsSource, tokens: usize) -> Result<(usize, usize)> {
    let name = "hidden_states";
    let Some(shape) = source.shape(name) else {
        return Err(problem(source.path(), format!("no tensor `{name}`: no record of an engine")));
    };
    let [held, layers, width] = shape[..] else {
        return Err(problem(
            source.path(),
            format!("`{name}` {shape:?} where [T, layers, H] is needed"),
        ));
    };
    if held != tokens || layers == 0 || width == 0 {
        let text = format!("`{name}` {shape:?} of {tokens} tokens");
        return Err(problem(source.path(), text));
    }
    let stored = source.stored_type(name).unwrap_or("other");
    if !TYPES.contains(&stored) {
        let text = format!("`{name}` is of type {stored}; F32, BF16 and F16 are read");
        return Err(problem(source.path(), text));
    }
    Ok((layers, width))
}
