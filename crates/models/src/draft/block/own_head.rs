//! A head of a draft's own: rows for the tokens that the draft proposes. It is not trained.

use std::path::Path;

use candle_core::Tensor;
use longdraft_kernels::matrix::Matrix;

use super::config::BlockConfig;
use crate::draft::weights::parameter;
use crate::draft::{DraftWeights, HeldAs, VocabularyMap};
use crate::error::{ModelError, Result};
use crate::weights::{TensorSpec, WeightSource};

/// The module of the head, `[Vd, H]`.
const MODULE: &str = "lm_head";

/// The head's tensor in files, where a draft has its own.
pub(super) fn tensor_spec(config: &BlockConfig) -> Option<TensorSpec> {
    let shape = [config.draft_vocab_size, config.hidden_size];
    config.has_own_head().then(|| TensorSpec::head(format!("{MODULE}.weight"), &shape))
}

/// Rows `[Vd, H]` that make logits of a draft's states, for some of the target's tokens.
pub struct OwnHead {
    vocabulary: VocabularyMap,
    /// One matrix, which may be held in fewer bits.
    weights: DraftWeights,
}

impl OwnHead {
    /// These rows `[Vd, H]`, in the order of the vocabulary's tokens.
    ///
    /// # Errors
    /// - there is not one row for every token
    pub fn new(vocabulary: VocabularyMap, rows: &Tensor) -> Result<Self> {
        let (found, width) = rows.dims2()?;
        if found != vocabulary.draft_size() {
            let problem = format!("a head of {found} rows for {} tokens", vocabulary.draft_size());
            return Err(ModelError::invalid(Path::new("draft configuration"), problem));
        }
        let spec = TensorSpec::head(format!("{MODULE}.weight"), &[found, width]);
        // The root of a norm is never taken: there is none.
        let weights = DraftWeights::new(vec![parameter(&spec, &rows.detach())?], 0.0);
        Ok(Self { vocabulary, weights })
    }

    /// Reads the head of a draft's files; `None` where it proposes through the target's.
    pub(super) fn read(
        source: &dyn WeightSource,
        config: &BlockConfig,
        value: impl Fn(&TensorSpec) -> Result<Tensor>,
    ) -> Result<Option<Self>> {
        let Some(spec) = tensor_spec(config) else { return Ok(None) };
        let read = |name: &str| source.shape(name).map(|_| source.load_integers(name)).transpose();
        let sizes = [config.draft_vocab_size, config.vocab_size];
        let Some(vocabulary) = VocabularyMap::read(source.path(), sizes, read)? else {
            return Ok(None);
        };
        Self::new(vocabulary, &value(&spec)?).map(Some)
    }

    /// The tokens that its rows stand for.
    pub fn vocabulary(&self) -> &VocabularyMap {
        &self.vocabulary
    }

    /// `[Vd, H]` in f32, without a gradient.
    ///
    /// # Errors
    /// - it is held for proposing alone
    pub fn rows(&self) -> Result<Tensor> {
        Ok(self.weights.tensor(&format!("{MODULE}.weight"))?.detach())
    }

    /// The same as it is held.
    pub(super) fn matrix(&self) -> Result<Matrix> {
        self.weights.matrix(MODULE)
    }

    /// Bytes of the rows as they are held.
    pub(super) fn held_bytes(&self) -> usize {
        self.weights.held_bytes()
    }

    /// Holds the rows in fewer bits alone, where they allow it.
    pub(super) fn hold_as(&mut self, how: HeldAs) -> Result<()> {
        self.weights.hold_as(how)
    }

    /// What files hold of it: its rows, and which tokens they stand for.
    pub(super) fn tensors(&self) -> Result<Vec<(String, Tensor)>> {
        let named = self.weights.named()?.into_iter();
        let mut all: Vec<_> = named.map(|(name, rows)| (name, rows.detach())).collect();
        all.extend(self.vocabulary.tensors()?);
        Ok(all)
    }
}
