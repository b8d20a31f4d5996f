//! From logits to the distribution that tokens follow.
//!
//! Bias and penalties, temperature, then top-k, top-p and min-p, then softmax over what is left; ties
//! at a border go to the lower id. Temperature 0 is the arg max, a path of its own.

use std::borrow::Cow;
use std::collections::BTreeMap;

use longdraft_models::TargetTokenId;
use serde::{Deserialize, Serialize};

use crate::error::{DecodeError, Result};

/// How tokens are chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sampling {
    /// 0: the most likely token.
    pub temperature: f64,
    /// Keep only this many tokens.
    pub top_k: Option<usize>,
    /// Keep the most likely tokens until their mass reaches this.
    pub top_p: f64,
    /// Keep tokens at least this likely, relative to the most likely one.
    pub min_p: f64,
    /// Taken off the logits of tokens that the answer has already.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub presence_penalty: f64,
    /// Taken off the logit of a token for every time that the answer has it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub frequency_penalty: f64,
    /// Added to logits, by token.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub bias: BTreeMap<TargetTokenId, f32>,
}

/// How often an answer has each of its tokens.
pub type Counts = BTreeMap<TargetTokenId, u32>;

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            bias: BTreeMap::new(),
        }
    }
}

impl Sampling {
    /// Plain sampling at a temperature.
    pub fn at(temperature: f64) -> Self {
        Self { temperature, ..Self::default() }
    }

    /// Whether the most likely token is taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether the values make sense.
    ///
    /// # Errors
    /// - `temperature` not in 0..=100, `top_k` = 0, `top_p` not in (0, 1], `min_p` not in [0, 1], a penalty
    ///   not in -100..=100, a bias that is NaN or +∞
    pub fn check(&self) -> Result<()> {
        let wrong = |what: String| Err(DecodeError::Sampling(what));
        if !(0.0..=100.0).contains(&self.temperature) {
            return wrong(format!("a temperature of {} is not in 0..=100", self.temperature));
        }
        if self.top_k == Some(0) {
            return wrong("top-k must keep at least 1 token".into());
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong(format!("a top-p of {} is not in (0, 1]", self.top_p));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return wrong(format!("a min-p of {} is not in [0, 1]", self.min_p));
        }
        for penalty in [self.presence_penalty, self.frequency_penalty] {
            if !(-100.0..=100.0).contains(&penalty) {
                return wrong(format!("a penalty of {penalty} is not in -100..=100"));
            }
        }
        let is_none = |bias: f32| bias.is_nan() || bias == f32::INFINITY;
        if let Some((token, bias)) = self.bias.iter().find(|(_, bias)| is_none(**bias)) {
            return wrong(format!("a bias of {bias} for token {} is not a number", token.0));
        }
        Ok(())
    }

    /// Logits with bias and penalties, `[V]`, after the tokens `before` of the answer. Tokens beyond the
    /// vocabulary are left out.
    ///
    /// `l'(x) = l(x) + bias(x) − frequency · n(x) − presence · [n(x) > 0]`, where `n(x)` counts x in
    /// `before` (OpenAI's definition).
    pub fn adjusted<'l>(
        &self,
        logits: &'l [f32],
        before: impl Iterator<Item = TargetTokenId>,
    ) -> Cow<'l, [f32]> {
        let mut counts = Counts::new();
        self.count(before, &mut counts);
        self.adjusted_by(logits, &counts)
    }

    /// The same after tokens that are counted already.
    pub(crate) fn adjusted_by<'l>(&self, logits: &'l [f32], counts: &Counts) -> Cow<'l, [f32]> {
        let mut adjusted = Cow::Borrowed(logits);
        let mut add = |token: TargetTokenId, value: f64| {
            if (token.0 as usize) < logits.len() {
                let logit = &mut adjusted.to_mut()[token.0 as usize];
                *logit = (f64::from(*logit) + value) as f32;
            }
        };
        self.bias.iter().for_each(|(token, bias)| add(*token, f64::from(*bias)));
        if self.has_penalties() {
            for (token, count) in counts {
                add(*token, -self.presence_penalty - self.frequency_penalty * f64::from(*count));
            }
        }
        adjusted
    }

    /// Counts tokens of an answer, if penalties ask how often it has them.
    pub(crate) fn count(&self, tokens: impl Iterator<Item = TargetTokenId>, counts: &mut Counts) {
        if self.has_penalties() {
            tokens.for_each(|token| *counts.entry(token).or_default() += 1);
        }
    }

    fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// The same with what penalties come to after the tokens of an answer as a part of the bias: for
    /// drafts, which propose several tokens from there on.
    pub(crate) fn for_drafts(&self, counts: &Counts) -> Cow<'_, Self> {
        if !self.has_penalties() {
            return Cow::Borrowed(self);
        }
        let mut folded = Self { presence_penalty: 0.0, frequency_penalty: 0.0, ..self.clone() };
        for (token, count) in counts {
            let penalty = self.presence_penalty + self.frequency_penalty * f64::from(*count);
            *folded.bias.entry(*token).or_default() -= penalty as f32;
        }
        Cow::Owned(folded)
    }

    /// The distribution of the next token, `[V]`, sums to 1; at temperature 0 one-hot. NaN never
    /// wins.
    ///
    /// # Errors
    /// - no logit is a number above −∞
    pub fn distribution(&self, logits: &[f32]) -> Result<Vec<f64>> {
        if self.is_greedy() {
            let mut distribution = vec![0.0; logits.len()];
            distribution[most_likely(logits)?.0 as usize] = 1.0;
            return Ok(distribution);
        }
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !largest.is_finite() {
            return Err(DecodeError::NoDistribution);
        }
        let weight = |logit: &f32| {
            let weight = (f64::from(*logit - largest) / self.temperature).exp();
            if weight.is_nan() { 0.0 } else { weight }
        };
        let mut weights: Vec<f64> = logits.iter().map(weight).collect();
        if self.top_k.is_some_and(|k| k < weights.len()) || self.top_p < 1.0 {
            self.truncate(&mut weights);
        }
        if self.min_p > 0.0 {
            let least = self.min_p * weights.iter().copied().fold(0.0, f64::max);
            weights.iter_mut().filter(|w| **w < least).for_each(|w| *w = 0.0);
        }
        normalise(&mut weights);
        Ok(weights)
    }

    /// Sets to 0 what top-k and top-p leave out. The border is looked for among the most likely
    /// tokens first, since it is seldom far.
    fn truncate(&self, weights: &mut [f64]) {
        let k = self.top_k.unwrap_or(usize::MAX).min(weights.len());
        let mut order: Vec<u32> = (0..weights.len() as u32).collect();
        let by_weight =
            |a: &u32, b: &u32| weights[*b as usize].total_cmp(&weights[*a as usize]).then(a.cmp(b));
        if k < order.len() {
            order.select_nth_unstable_by(k - 1, by_weight);
            order.truncate(k);
        }
        let mass: f64 = order.iter().map(|id| weights[*id as usize]).sum();
        let wanted = self.top_p * mass;
        let mut kept = order.len();
        let mut looked_at = if self.top_p < 1.0 { 64.min(kept) } else { 0 };
        while looked_at > 0 {
            if looked_at < order.len() {
                order.select_nth_unstable_by(looked_at - 1, by_weight);
            }
            order[..looked_at].sort_unstable_by(by_weight);
            let mut sum = 0.0;
            let crossing = order[..looked_at].iter().position(|id| {
                sum += weights[*id as usize];
                sum >= wanted
            });
            if let Some(crossing) = crossing {
                kept = crossing + 1;
                break;
            }
            if looked_at == order.len() {
                break;
            }
            looked_at = (4 * looked_at).min(order.len());
        }
        let mut keep = vec![false; weights.len()];
        order[..kept].iter().for_each(|id| keep[*id as usize] = true);
        weights.iter_mut().zip(keep).filter(|(_, keep)| !keep).for_each(|(w, _)| *w = 0.0);
    }
}

/// Divides by the sum and returns what it was; 0 is left alone.
pub fn normalise(weights: &mut [f64]) -> f64 {
    let total: f64 = weights.iter().sum();
    if total > 0.0 {
        weights.iter_mut().for_each(|w| *w /= total);
    }
    total
}

/// The most likely token; ties go to the lower id, NaN never wins.
///
/// # Errors
/// - no logit is a number above −∞
pub fn most_likely(logits: &[f32]) -> Result<TargetTokenId> {
    let token = argmax(logits);
    let is_number = logits.get(token.0 as usize).is_some_and(|logit| *logit > f32::NEG_INFINITY);
    if is_number { Ok(token) } else { Err(DecodeError::NoDistribution) }
}

/// As [`most_likely`]; the first token where no logit is a number.
pub fn argmax(logits: &[f32]) -> TargetTokenId {
    let mut best = (0, f32::NEG_INFINITY);
    // The largest of some lanes at a time, in vectors; its place where it is the largest so far.
    for (part, values) in logits.chunks(1024).enumerate() {
        let (groups, rest) = values.as_chunks::<16>();
        let mut lanes = [f32::NEG_INFINITY; 16];
        for group in groups {
            lanes.iter_mut().zip(group).for_each(|(lane, x)| *lane = larger(*lane, *x));
        }
        let largest = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |all, x| larger(all, *x));
        if largest > best.1
            && let Some(place) = values.iter().position(|x| *x >= largest)
        {
            best = (part * 1024 + place, largest);
        }
    }
    TargetTokenId(best.0 as u32)
}

/// The larger number; NaN is none.
fn larger(most: f32, x: f32) -> f32 {
    if x > most { x } else { most }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_found_in_every_place() {
        assert_eq!(argmax(&[]), TargetTokenId(0));
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), TargetTokenId(0));
        for count in [1, 15, 16, 17, 1023, 1024, 1025, 3000] {
            for place in (0..count).step_by(7).chain([count - 1]) {
                let mut logits = vec![-1.0; count];
                (logits[place], logits[count / 2]) = (3.0, f32::NAN);
                logits[place] = 3.0;
                assert_eq!(argmax(&logits), TargetTokenId(place as u32), "{count} {place}");
                // Ties go to the lower id.
                logits[count - 1] = 3.0;
                assert_eq!(argmax(&logits), TargetTokenId(place as u32), "{count} {place}");
            }
        }
    }

    const LOGITS: [f32; 5] = [0.0, 2.0, 1.0, 2.0, f32::NEG_INFINITY];

    fn support(sampling: &Sampling) -> Vec<usize> {
        let distribution = sampling.distribution(&LOGITS).expect("distribution");
        assert!((distribution.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        (0..distribution.len()).filter(|i| distribution[*i] > 0.0).collect()
    }

    #[test]
    fn truncations_keep_what_they_say_and_break_ties_downwards() {
        let with =
            |top_k, top_p, min_p| support(&Sampling { top_k, top_p, min_p, ..Sampling::at(1.0) });
        assert_eq!(with(None, 1.0, 0.0), [0, 1, 2, 3]);
        assert_eq!(with(Some(1), 1.0, 0.0), [1]);
        assert_eq!(with(Some(3), 1.0, 0.0), [1, 2, 3]);
        // Masses .39 .39 .14 .05: the token that crosses stays.
        assert_eq!(with(None, 0.3, 0.0), [1]);
        assert_eq!(with(None, 0.5, 0.0), [1, 3]);
        assert_eq!(with(None, 0.9, 0.0), [1, 2, 3]);
        assert_eq!(with(Some(2), 0.4, 0.0), [1]);
        assert_eq!(with(None, 1.0, 0.3), [1, 2, 3]);
    }

    #[test]
    fn bias_and_penalties_move_the_logits_of_their_tokens() {
        let token = TargetTokenId;
        let before = || [token(1), token(3), token(1), token(9)].into_iter();
        let none = Sampling::at(1.0);
        assert!(matches!(none.adjusted(&LOGITS, before()), Cow::Borrowed(_)));
        let all = Sampling {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            bias: BTreeMap::from([(token(0), 3.0), (token(1), -100.0), (token(7), 1.0)]),
            ..none
        };
        let adjusted = all.adjusted(&LOGITS, before());
        assert_eq!(adjusted[..], [3.0, -99.0, 1.0, 1.25, f32::NEG_INFINITY]);
        let mut counts = Counts::new();
        all.count(before(), &mut counts);
        let folded = all.for_drafts(&counts);
        assert_eq!(folded.adjusted(&LOGITS, std::iter::empty()), adjusted);
        assert!(matches!(Sampling::at(1.0).for_drafts(&counts), Cow::Borrowed(_)));
    }

    #[test]
    fn a_long_tail_is_searched_to_the_border() {
        let flat = vec![0.0_f32; 1000];
        let sampling = Sampling { temperature: 1.0, top_p: 0.5, ..Sampling::default() };
        let distribution = sampling.distribution(&flat).expect("distribution");
        assert_eq!(distribution.iter().filter(|p| **p > 0.0).count(), 500);
        assert!(distribution[499] > 0.0 && distribution[500] == 0.0);
    }

    #[test]
    fn temperature_zero_is_the_arg_max_and_impossible_values_are_refused() {
        assert_eq!(
            Sampling::default().distribution(&LOGITS).expect("distribution"),
            [0.0, 1.0, 0.0, 0.0, 0.0]
        );
        for sampling in [Sampling::default(), Sampling::at(1.0)] {
            for logits in [vec![f32::NAN, f32::NEG_INFINITY], vec![f32::NAN; 3], vec![]] {
                assert!(sampling.distribution(&logits).is_err(), "{sampling:?} {logits:?}");
            }
        }
        for wrong in [
            Sampling::at(-1.0),
            Sampling::at(f64::NAN),
            Sampling { top_k: Some(0), ..Sampling::at(1.0) },
            Sampling { top_p: 0.0, ..Sampling::at(1.0) },
            Sampling { min_p: 2.0, ..Sampling::at(1.0) },
            Sampling { presence_penalty: f64::NAN, ..Sampling::at(1.0) },
            Sampling { frequency_penalty: -101.0, ..Sampling::at(1.0) },
            Sampling { bias: BTreeMap::from([(TargetTokenId(0), f32::NAN)]), ..Sampling::at(1.0) },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }
}
