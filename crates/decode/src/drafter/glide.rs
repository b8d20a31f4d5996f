//! GLIDE: the draft's own window of keys, and the target's last-layer cache.
//!
//! The row of level `d` stands at token index `n + d − 1` (n: the root's index) and sees the
//! target's keys `0..n`, so its delay is exactly `d`, as in training.

use std::sync::Arc;

use candle_core::{D, Tensor};
use longdraft_kernels::attention::KeyRanges;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::glide::{CrossContext, GlideDraft, SelfKv};
use longdraft_models::target::{LastKv, Target};

use super::window::DraftWindow;
use super::{DraftContext, Drafter};
use crate::error::Result;

/// Drafts greedy chains with a GLIDE layer.
pub struct GlideDrafter<'a> {
    draft: &'a GlideDraft,
    window: DraftWindow,
    /// Keys and values of proposed tokens that the draft has run, oldest first.
    proposed: Vec<SelfKv>,
}

impl<'a> GlideDrafter<'a> {
    /// A drafter for one request at a time.
    ///
    /// # Errors
    /// - the device has no memory for the window
    pub fn new(draft: &'a GlideDraft, target: &Target) -> Result<Self> {
        let config = draft.config();
        let window = DraftWindow::new(
            config.self_window + 1,
            config.num_key_value_heads,
            config.head_dim,
            target.device(),
        )?;
        Ok(Self { draft, window, proposed: Vec::new() })
    }

    /// Keys and values of tokens from index `first` on.
    fn self_kv(&self, target: &Target, ids: &[u32], first: usize) -> Result<SelfKv> {
        let positions: Vec<u32> = (0..ids.len()).map(|i| (first + i) as u32).collect();
        let table = target.rope().table(&positions, target.device())?;
        Ok(self.draft.self_kv(&target.embed(ids)?, &table)?)
    }

    /// Most likely token after the one at `index`, which is the newest row of `keys`.
    fn next_token(
        &self,
        target: &Target,
        id: u32,
        index: usize,
        keys: &SelfKv,
        last_kv: &LastKv,
    ) -> Result<TargetTokenId> {
        let table = target.rope().table(&[index as u32], target.device())?;
        let held = keys.k.dim(0)?;
        let visible = held.saturating_sub(self.window.slots())..held;
        let verified = last_kv.k.dim(0)?;
        let cross =
            CrossContext { last_kv, ranges: Arc::new(KeyRanges::shared(&(0..verified), 1)) };
        let own = Arc::new(KeyRanges::shared(&visible, 1));
        let hidden =
            self.draft.forward_cached(&target.embed(&[id])?, &table, keys, &own, &cross)?;
        let best = target.logits(&hidden)?.argmax(D::Minus1)?.to_vec1::<u32>()?;
        Ok(TargetTokenId(best[0]))
    }
}

/// The first `tokens` rows.
fn narrow(keys: &SelfKv, tokens: usize) -> Result<SelfKv> {
    Ok(SelfKv { k: keys.k.narrow(0, 0, tokens)?, v: keys.v.narrow(0, 0, tokens)? })
}

/// Writes one token's keys and values behind the `at` that a buffer holds.
fn put(buffer: &SelfKv, at: usize, new: &SelfKv) -> Result<()> {
    let set = |buffer: &Tensor, new: &Tensor| buffer.slice_set(&new.contiguous()?, 0, at);
    set(&buffer.k, &new.k)?;
    set(&buffer.v, &new.v)?;
    Ok(())
}

impl Drafter for GlideDrafter<'_> {
    fn begin(&mut self, context: DraftContext<'_>) -> Result<()> {
        self.proposed.clear();
        let root = context.tokens.len() - 1;
        let first = root.saturating_sub(self.window.slots());
        self.window.restart_at(first);
        let prompt: Vec<u32> = context.tokens[first..root].iter().map(|token| token.0).collect();
        if !prompt.is_empty() {
            let kv = self.self_kv(context.target, &prompt, first)?;
            self.window.push(&kv)?;
        }
        Ok(())
    }

    fn propose(
        &mut self,
        context: DraftContext<'_>,
        draft_len: usize,
    ) -> Result<Vec<TargetTokenId>> {
        let target = context.target;
        let root = context.tokens.len() - 1;
        let (k, v) = context.cache.last_layer()?;
        let last_kv = LastKv { k, v };
        let mut id = context.tokens[root].0;
        let root_kv = self.self_kv(target, &[id], root)?;
        self.window.push(&root_kv)?;
        let held = self.window.held().len();
        let buffer = self.window.unrolled(draft_len)?;
        self.proposed.clear();
        let mut tokens = Vec::with_capacity(draft_len);
        for level in 0..draft_len {
            if level > 0 {
                let kv = self.self_kv(target, &[id], root + level)?;
                put(&buffer, held + level - 1, &kv)?;
                self.proposed.push(kv);
            }
            let keys = narrow(&buffer, held + level)?;
            let next = self.next_token(target, id, root + level, &keys, &last_kv)?;
            tokens.push(next);
            id = next.0;
        }
        Ok(tokens)
    }

    fn accept(&mut self, context: DraftContext<'_>, accepted: &[TargetTokenId]) -> Result<()> {
        let first = self.window.held().end;
        for (i, token) in accepted.iter().enumerate() {
            // The last proposal was never run by the draft.
            let kv = match self.proposed.get(i) {
                Some(kv) => kv.clone(),
                None => self.self_kv(context.target, &[token.0], first + i)?,
            };
            self.window.push(&kv)?;
        }
        Ok(())
    }
}
