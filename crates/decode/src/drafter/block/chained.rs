//! Slots to whose logits a chain adds what the tokens before them say, and how sure the draft is of them.

use candle_core::Tensor;
use longdraft_kernels::bend::Bend;
use longdraft_kernels::linear::linear;
use longdraft_kernels::rows::select_rows;
use longdraft_models::draft::block::Chain;

use super::Chosen;
use super::model::{beyond, repeated};
use crate::drafter::Forecast;
use crate::error::Result;

/// The slots of a pass.
pub(super) struct Chained {
    /// `[G, H]`
    states: Tensor,
    /// Logits of the head alone, `[Vd]` a slot. What the chain adds is not bent.
    logits: Vec<Vec<f32>>,
    /// The chain's own state after each of the tokens that the newest slot follows, `[N, r]`.
    carried: Option<Tensor>,
}

impl Chained {
    /// Slots with states `[G, H]` and products `[Vd]` of the head each.
    pub(super) fn new(states: Tensor, mut products: Vec<Vec<f32>>, bend: Bend) -> Self {
        products.iter_mut().for_each(|products| bend.bend(products));
        Self { states, logits: products, carried: None }
    }

    /// What a slot of each of several requests says after each of the tokens before it. `output` is the chain's matrix
    /// for the tokens of a reduced head, `[Vd, r]`. One product with the matrix serves all.
    pub(super) fn forecasts(
        requests: &mut [(&mut Self, &[Chosen])],
        slot: usize,
        (chain, output): (Chain<'_>, Option<&Tensor>),
    ) -> Result<Vec<Vec<Forecast>>> {
        let (mut tokens, mut states, mut carried) = (Vec::new(), Vec::new(), Vec::new());
        for (own, before) in requests.iter_mut() {
            own.logits.get(slot).ok_or_else(|| beyond(slot))?;
            tokens.extend(before.iter().map(|chosen| chosen.token.0));
            states.push(repeated(&own.states, slot, before.len())?);
            if let Some(state) = own.carried.take().filter(|_| slot > 0) {
                let rows: Vec<u32> = before.iter().map(|chosen| chosen.after as u32).collect();
                carried.push(select_rows(&state, &rows)?);
            }
        }
        let states = Tensor::cat(&states, 0)?;
        let carried = if carried.is_empty() { None } else { Some(Tensor::cat(&carried, 0)?) };
        let embedded = chain.embed(&tokens)?.ok_or_else(|| beyond(slot))?.detach();
        let step = chain.step(carried.as_ref(), &states, &embedded)?;
        let state = step.state.map(|state| state.detach());
        let mixed = step.mixed.detach();
        let sums = match output {
            Some(output) => linear(&mixed, output, None)?,
            None => chain.logits(&mixed)?,
        };
        let mut sums = sums.detach().to_vec2::<f32>()?.into_iter();
        let confidence = confidences(chain, &states, Some(&embedded))?;
        let mut confidence = confidence.into_iter().flatten();
        let (mut first, mut all) = (0, Vec::with_capacity(requests.len()));
        for (own, before) in requests {
            let rows = |state: &Tensor| state.narrow(0, first, before.len());
            own.carried = state.as_ref().map(rows).transpose()?;
            first += before.len();
            let of_head = &own.logits[slot];
            let forecasts = sums.by_ref().take(before.len()).map(|mut sum| {
                sum.iter_mut().zip(of_head).for_each(|(sum, logit)| *sum += logit);
                Forecast { confidence: confidence.next(), ..Forecast::from(sum) }
            });
            all.push(forecasts.collect());
        }
        Ok(all)
    }
}

/// `σ(ĉ)` of slots with states `[R, H]` after embedded tokens `[R, r]`; `None` without such a head. A head
/// that gives no number is not sure of anything.
pub(super) fn confidences(
    chain: Chain<'_>,
    states: &Tensor,
    embedded: Option<&Tensor>,
) -> Result<Option<Vec<f64>>> {
    let Some(logits) = chain.confidence(states, embedded)? else { return Ok(None) };
    let logits: Vec<f32> = logits.detach().to_vec1()?;
    let chance = |logit: &f32| {
        let chance = 1.0 / (1.0 + (-f64::from(*logit)).exp());
        if chance.is_nan() { 0.0 } else { chance }
    };
    Ok(Some(logits.iter().map(chance).collect()))
}
