//! DSpark's heads: a chain adds to a slot's logits what the token before it says, and a confidence tells
//! how likely the target is to keep the slot's token.
//!
//! ```text
//! z_k     = W h_k + W2 m_k            e = W1[y_k], y_k the token before the one that slot k proposes
//! vanilla   m = e
//! gated     m = σ(W_g [h; e] + b_g) ⊙ e
//! rnn       [g|c|o] = W_j [s; e; h] + b_j;  s' = σ(g) ⊙ s + (1 − σ(g)) ⊙ tanh(c);  m = tanh(o)
//! ĉ_k     = w · [h_k; e] + b          or w · h_k + b
//! ```
//!
//! Slot 0 proposes too: slot k proposes the token k + 1 places after the anchor (arXiv 2607.05147).

use candle_core::Tensor;
use longdraft_kernels::graph::{cat, narrow, node};
use longdraft_kernels::rows::select_rows;

use super::config::{BlockConfig, ChainKind, ChainSizes};
use super::model::BlockDraft;
use crate::draft::DraftWeights;
use crate::error::Result;
use crate::weights::TensorSpec;

const EMBEDDING: &str = "markov_head.markov_w1.weight";
/// The module of `W1`, `[V, r]`.
pub(super) const EMBEDDING_MODULE: &str = "markov_head.markov_w1";
/// The module of `W2`, `[Vd, r]`.
pub(super) const OUTPUT: &str = "markov_head.markov_w2";
const GATE: &str = "markov_head.gate_proj";
const JOINT: &str = "markov_head.joint_proj";
/// The module of `w`, `[1, H + r]` or `[1, H]`.
pub(super) const CONFIDENCE: &str = "confidence_head.proj";

/// The heads' tensors in a draft.
pub(super) fn tensor_specs(sizes: ChainSizes, config: &BlockConfig) -> Vec<TensorSpec> {
    let ChainSizes { rank, kind, confidence } = sizes;
    let hidden = config.hidden_size;
    let mut all = Vec::new();
    if rank > 0 {
        all.push(TensorSpec::embedding(EMBEDDING, &[config.vocab_size, rank]));
        all.push(TensorSpec::head(format!("{OUTPUT}.weight"), &[config.draft_vocab_size, rank]));
    }
    let mut affine = |module: &str, outputs: usize, inputs: usize| {
        all.push(TensorSpec::new(format!("{module}.weight"), &[outputs, inputs]));
        all.push(TensorSpec::new(format!("{module}.bias"), &[outputs]));
    };
    match kind {
        ChainKind::Gated if rank > 0 => affine(GATE, rank, hidden + rank),
        ChainKind::Rnn if rank > 0 => affine(JOINT, 3 * rank, 2 * rank + hidden),
        _ => {}
    }
    if let Some(reads_token) = confidence {
        affine(CONFIDENCE, 1, hidden + if reads_token { rank } else { 0 });
    }
    all
}

/// The sequential heads of a draft.
#[derive(Clone, Copy)]
pub struct Chain<'a> {
    weights: &'a DraftWeights,
    sizes: ChainSizes,
}

/// What the slots of one place in their blocks add to their logits, and hand on.
pub struct ChainStep {
    /// `m`, `[B, r]`
    pub mixed: Tensor,
    /// What the next slots read, where the head has a state.
    pub state: Option<Tensor>,
}

impl BlockDraft {
    /// The draft's sequential heads, if it has them.
    pub fn chain(&self) -> Option<Chain<'_>> {
        Some(Chain { weights: &self.weights, sizes: self.config.chain? })
    }
}

impl Chain<'_> {
    /// Whether tokens before a slot change its logits.
    pub fn is_sequential(&self) -> bool {
        self.sizes.rank > 0
    }

    /// `W2`, `[Vd, r]` in f32.
    ///
    /// # Errors
    /// - the head has rank 0, or a draft with a head of its own is held for proposing alone
    pub fn output(&self) -> Result<&Tensor> {
        self.weights.tensor(&format!("{OUTPUT}.weight"))
    }

    /// `W2 m` over all tokens that the draft proposes, as the matrix is held.
    ///
    /// # Shapes
    /// - `mixed`: `[B, r]` → `[B, Vd]`
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn logits(&self, mixed: &Tensor) -> Result<Tensor> {
        self.weights.project(mixed, OUTPUT)
    }

    /// Whether a slot reads more of the slots before it than the last token.
    pub fn is_recurrent(&self) -> bool {
        self.is_sequential() && self.sizes.kind == ChainKind::Rnn
    }

    /// `e = W1[y]` of tokens, `[B]` → `[B, r]`; `None` where the head has rank 0.
    ///
    /// # Errors
    /// - an id lies outside of the vocabulary
    pub fn embed(&self, before: &[u32]) -> Result<Option<Tensor>> {
        if !self.is_sequential() {
            return Ok(None);
        }
        Ok(Some(select_rows(self.weights.tensor(EMBEDDING)?, before)?))
    }

    /// One slot of each of `B` blocks, after a slot that left `state`.
    ///
    /// # Shapes
    /// - `states`: `[B, H]`, `embedded`: `[B, r]` of [`Self::embed`]
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn step(
        &self,
        state: Option<&Tensor>,
        states: &Tensor,
        embedded: &Tensor,
    ) -> Result<ChainStep> {
        let gated = || -> Result<Tensor> {
            let gate = self.weights.project(&cat(&[states, embedded], 1)?, GATE)?;
            Ok((sigmoid(&gate)? * embedded)?)
        };
        match self.sizes.kind {
            ChainKind::Vanilla => Ok(ChainStep { mixed: embedded.clone(), state: None }),
            ChainKind::Gated => Ok(ChainStep { mixed: gated()?, state: None }),
            ChainKind::Rnn => self.recurrent(state, states, embedded),
        }
    }

    fn recurrent(
        &self,
        state: Option<&Tensor>,
        states: &Tensor,
        embedded: &Tensor,
    ) -> Result<ChainStep> {
        let rank = self.sizes.rank;
        let zeros = embedded.zeros_like()?.detach();
        let state = state.unwrap_or(&zeros);
        let all = self.weights.project(&cat(&[state, embedded, states], 1)?, JOINT)?;
        let part = |i: usize| narrow(&all, 1, i * rank, rank);
        let (gate, candidate, mixed) = (sigmoid(&part(0)?)?, part(1)?.tanh()?, part(2)?.tanh()?);
        let kept = (&gate * state)?;
        let state = (kept + (gate.affine(-1.0, 1.0)? * candidate)?)?;
        Ok(ChainStep { mixed, state: Some(node(&state)?) })
    }

    /// `ĉ`, the logit of the chance that a slot's token is kept; `None` without such a head.
    ///
    /// # Shapes
    /// - `states`: `[B, H]`, `embedded`: `[B, r]` of [`Self::embed`] → `[B]`
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn confidence(&self, states: &Tensor, embedded: Option<&Tensor>) -> Result<Option<Tensor>> {
        let Some(reads_token) = self.sizes.confidence else { return Ok(None) };
        let input = match embedded.filter(|_| reads_token) {
            Some(embedded) => cat(&[states, embedded], 1)?,
            None => states.clone(),
        };
        Ok(Some(self.weights.project(&input, CONFIDENCE)?.squeeze(1)?))
    }
}

/// `1 / (1 + e^{−x})`
fn sigmoid(x: &Tensor) -> candle_core::Result<Tensor> {
    // tanh neither overflows nor loses the gradient's sign.
    ((x * 0.5)?.tanh()? + 1.0)? * 0.5
}
