//! Embedding table and head of a target, its ends, for as long as they are held.
//!
//! Where ranks share the target's weights (`spread`) the ends are put together to be held, and let go of after.
//! So everything that reads them is asked of the guard that holds them.

use candle_core::Tensor;
use longdraft_kernels::log_sum_exp::{HeadSummary, bent_log_sum_exp};
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::top_k::{TopK, bent_top_k, row_top_k};

use super::Target;
use super::spread::Held;
use crate::error::Result;
use crate::ids::check_ids;

/// Rows whose logits exist at the same time where the head is held as quantised blocks.
const LOGIT_ROWS: usize = 64;

/// Embedding table and head of a target, whole as long as this lives.
pub struct Ends<'a> {
    target: &'a Target,
    embedding: Held<'a>,
    head: Held<'a>,
}

impl Target {
    /// Holds embedding table and head. Where ranks share the target's weights, all of them call it at the same
    /// time to put both together; while a rank holds them already, it may call it alone. Otherwise it costs
    /// nothing.
    ///
    /// # Errors
    /// - they cannot be put together
    pub fn hold_ends(&self) -> Result<Ends<'_>> {
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        Ok(Ends { target: self, embedding: self.embedding.hold()?, head: head.hold()? })
    }

    /// Rows of the embedding table in f32, as the first layer reads them.
    pub(super) fn embed(&self, embedding: &Held<'_>, ids: &[u32]) -> Result<Tensor> {
        check_ids(ids, self.config.vocab_size)?;
        let rows = embedding.matrix().rows(ids)?;
        Ok(match self.config.parts.embedding_scale {
            Some(scale) => (rows * scale)?,
            None => rows,
        })
    }
}

impl<'a> Ends<'a> {
    /// Whose they are.
    pub fn target(&self) -> &'a Target {
        self.target
    }

    /// Embedding table, `[V, H]`, as the file holds it: [`Self::embed`] scales where the family does.
    ///
    /// # Errors
    /// - it is quantised and there is no memory for its values
    pub fn embedding(&self) -> Result<Tensor> {
        self.embedding.tensor()
    }

    /// Embedding table as it is held. Drafts keep it, and read rows of it.
    pub fn embedding_matrix(&self) -> &Matrix {
        self.embedding.matrix()
    }

    /// Embeddings of `ids` in f32, as the first layer reads them.
    ///
    /// # Shapes
    /// - `ids`: `[T]` → `[T, H]`
    ///
    /// # Errors
    /// - an id lies outside the vocabulary
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        self.target.embed(&self.embedding, ids)
    }

    /// Output head, `[V, H]`; [`Target::bend`] makes logits of its products.
    ///
    /// # Errors
    /// - it is quantised and there is no memory for its values
    pub fn head(&self) -> Result<Tensor> {
        self.head.tensor()
    }

    /// Output head as losses read it, `[V, H]`: quantised blocks in main memory as they are held, else the tensor of
    /// [`Self::head`].
    ///
    /// # Errors
    /// - it is quantised on an accelerator that has no memory for its values
    pub fn loss_head(&self) -> Result<Matrix> {
        match self.head_matrix() {
            blocks @ Matrix::Quantised(_) => Ok(blocks.clone()),
            Matrix::Dense(_) | Matrix::OnGpu(_) => Ok(Matrix::Dense(self.head()?)),
        }
    }

    /// Output head as it is held; [`Target::bend`] makes logits of its products.
    pub fn head_matrix(&self) -> &Matrix {
        self.head.matrix()
    }

    /// Logits of final hidden states (after the final norm), in f32.
    ///
    /// # Shapes
    /// - `[T, H]` → `[T, V]`
    ///
    /// # Errors
    /// - the width differs
    pub fn logits(&self, final_hidden: &Tensor) -> Result<Tensor> {
        Ok(self.target.bend().of(self.head_matrix().linear(final_hidden, None)?)?)
    }

    /// The `k` most likely tokens after final hidden states, of `k` up to the vocabulary.
    ///
    /// # Shapes
    /// - `[R, H]` → `[R, k]`
    ///
    /// # Errors
    /// - as [`Self::head`], or the width differs
    pub fn top_k(&self, final_hidden: &Tensor, k: usize) -> Result<TopK> {
        let k = k.min(self.target.config.vocab_size);
        if !self.target.has_blocks {
            return Ok(bent_top_k(final_hidden, &self.head()?, k, self.target.bend())?);
        }
        let mut all = TopK::default();
        self.each_logits(final_hidden, |logits| {
            let TopK { ids, log_probs } = row_top_k(logits, k)?;
            all.ids.extend(ids);
            all.log_probs.extend(log_probs);
            Ok(())
        })?;
        Ok(all)
    }

    /// Normaliser and most likely token after final hidden states.
    ///
    /// # Shapes
    /// - `[R, H]` → `[R]`
    ///
    /// # Errors
    /// - as [`Self::head`], or the width differs
    pub fn head_summary(&self, final_hidden: &Tensor) -> Result<HeadSummary> {
        if !self.target.has_blocks {
            return Ok(bent_log_sum_exp(final_hidden, &self.head()?, self.target.bend())?);
        }
        let mut all = HeadSummary::default();
        self.each_logits(final_hidden, |logits| Ok(all.append(logits)?))?;
        Ok(all)
    }

    /// Logits of some rows at a time, from the head as it is held.
    fn each_logits(
        &self,
        final_hidden: &Tensor,
        mut of: impl FnMut(&Tensor) -> Result<()>,
    ) -> Result<()> {
        let rows = final_hidden.dim(0)?;
        for first in (0..rows).step_by(LOGIT_ROWS) {
            of(&self.logits(&final_hidden.narrow(0, first, LOGIT_ROWS.min(rows - first))?)?)?;
        }
        Ok(())
    }
}
