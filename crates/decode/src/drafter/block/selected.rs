//! Slots whose token a selector chooses among few candidates, by the token before it. No other token
//! is proposed.

use candle_core::Tensor;
use longdraft_kernels::top_k::row_top_k;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::block::Selector;

use super::Chosen;
use super::model::{beyond, repeated};
use crate::drafter::{Forecast, Logits};
use crate::error::Result;

/// The candidates of a pass's slots.
pub(super) struct Selected {
    /// Columns of the logits, `K` a slot, most likely first.
    columns: Vec<u32>,
    /// Their logits.
    logits: Vec<f32>,
    /// The same as tokens of the target.
    ids: Vec<u32>,
    /// `K`, fewer than the selector's with a smaller head.
    each: usize,
    /// `W_h h` of the slots, `[G, r]`.
    projected: Tensor,
}

impl Selected {
    /// What a selector chooses among.
    ///
    /// # Shapes
    /// - `states`: `[G, H]`, `logits`: `[G, Vd]`; `kept`: what the columns stand for, if they are not
    ///   the target's tokens
    pub(super) fn new(
        selector: Selector<'_>,
        (states, logits): (&Tensor, &Tensor),
        kept: Option<&[TargetTokenId]>,
    ) -> Result<Self> {
        let columns = row_top_k(logits, selector.sizes().top_k)?.ids;
        let slots = logits.dim(0)?;
        let each = columns.len() / slots.max(1);
        let at = Tensor::from_slice(&columns, (slots, each), logits.device())?;
        let logits = logits.contiguous()?.gather(&at, 1)?.flatten_all()?.to_vec1()?;
        let ids = columns.iter().map(|column| match kept {
            Some(kept) => kept[*column as usize].0,
            None => *column,
        });
        let ids = ids.collect();
        let projected = selector.project(states)?.detach();
        Ok(Self { columns, logits, ids, each, projected })
    }

    /// What a slot says after each of the tokens before it.
    pub(super) fn forecasts(
        &self,
        selector: Selector<'_>,
        slot: usize,
        before: &[Chosen],
    ) -> Result<Vec<Forecast>> {
        let of_slot = slot * self.each..(slot + 1) * self.each;
        let columns = self.columns.get(of_slot.clone()).ok_or_else(|| beyond(slot))?;
        let logits = &self.logits[of_slot.clone()];
        let projected = repeated(&self.projected, slot, before.len())?;
        let tokens: Vec<u32> = before.iter().map(|chosen| chosen.token.0).collect();
        let ids = self.ids[of_slot].repeat(before.len());
        let preferences = selector.preferences(&projected, &tokens, &ids)?.detach();
        let forecast = |preferences: Vec<f32>| {
            let values = logits.iter().zip(preferences).map(|(logit, own)| logit + own);
            let logits = Logits::Some { columns: columns.to_vec(), values: values.collect() };
            Forecast { logits, confidence: None }
        };
        Ok(preferences.to_vec2()?.into_iter().map(forecast).collect())
    }
}
