//! Windows through a model, and the sums.

use longdraft_kernels::linear_cross_entropy::{Inputs, linear_cross_entropy};
use longdraft_kernels::rows::select_rows;

use super::Window;
use crate::error::{Result, refused};
use crate::language_model::{LanguageModel, Layout};
use crate::target_model::{PackedSequence, Tap, Taps, Target};

/// A model that predicts.
pub trait Scorer {
    /// `−log p` in nats of the scored targets of some windows, one after the other; `window` is
    /// the configured length, whatever that of a short last one.
    ///
    /// # Errors
    /// - an id lies outside the vocabulary
    fn nll(&self, tokens: &[u32], windows: &[Window], window: usize) -> Result<Vec<f64>>;
}

/// Inputs of the windows end to end, rows that are scored, and their labels.
fn gather(tokens: &[u32], windows: &[Window]) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let (mut inputs, mut rows, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    for window in windows {
        let first = inputs.len();
        inputs.extend(&tokens[window.start..window.start + window.length]);
        rows.extend(window.scored.clone().map(|position| (first + position) as u32));
        let targets = window.start + 1 + window.scored.start..window.start + 1 + window.scored.end;
        labels.extend(&tokens[targets]);
    }
    (inputs, rows, labels)
}

impl Scorer for LanguageModel {
    fn nll(&self, tokens: &[u32], windows: &[Window], window: usize) -> Result<Vec<f64>> {
        let (inputs, rows, labels) = gather(tokens, windows);
        let lengths: Vec<usize> = windows.iter().map(|window| window.length).collect();
        let layout = Layout::new(self.config(), &lengths, window)?;
        let hidden = self.hidden(&inputs, &layout)?;
        Ok(self.cross_entropy(&select_rows(&hidden, &rows)?, &labels)?.rows.hard)
    }
}

/// A Llama- or Qwen-family model.
pub struct TargetScorer<'a>(pub &'a Target);

impl Scorer for TargetScorer<'_> {
    fn nll(&self, tokens: &[u32], windows: &[Window], _: usize) -> Result<Vec<f64>> {
        let (inputs, rows, labels) = gather(tokens, windows);
        let lengths = || windows.iter().map(|window| window.length);
        let sequence = PackedSequence {
            ids: inputs,
            position_ids: lengths().flat_map(|length| 0..length as u32).collect(),
            document_ids: (0..).zip(lengths()).flat_map(|(id, n)| vec![id; n]).collect(),
        };
        let features = self.0.forward(&sequence, &Taps::of(&[Tap::FinalHidden]))?;
        let hidden = features.final_hidden()?;
        let (states, head) = (select_rows(hidden, &rows)?, self.0.hold_ends()?.loss_head()?);
        let inputs = Inputs::of_labels(&states, &head, &labels).bent(self.0.bend());
        let output = linear_cross_entropy(&inputs)?;
        Ok(output.rows.hard)
    }
}

/// Sums over scored targets.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Score {
    /// `Σ −log p` in nats.
    pub nll_sum: f64,
    /// Scored targets.
    pub tokens: u64,
    /// Targets of the stream.
    pub total_tokens: u64,
    /// Bytes of the scored targets.
    pub bytes: u64,
    /// Windows.
    pub windows: u64,
}

impl Score {
    /// Nats a target.
    pub fn loss(&self) -> f64 {
        self.nll_sum / self.tokens.max(1) as f64
    }

    /// `Σ nll / ln 2 / Σ bytes`; infinite without a byte.
    pub fn bits_per_byte(&self) -> f64 {
        if self.bytes == 0 {
            return f64::INFINITY;
        }
        self.nll_sum / std::f64::consts::LN_2 / self.bytes as f64
    }
}

/// Scores a stream of `N + 1` tokens. Windows go through in batches of about `batch_tokens`
/// inputs; sums are taken in the order of the windows. `each` hears every target's index and nll.
///
/// # Errors
/// - `bytes` is not one a target, a window leaves the stream, or the model fails
pub fn evaluate(
    scorer: &dyn Scorer,
    tokens: &[u32],
    bytes: &[u32],
    (windows, window): (&[Window], usize),
    batch_tokens: usize,
    each: &mut dyn FnMut(usize, f64),
) -> Result<Score> {
    let targets = tokens.len().saturating_sub(1);
    let fits = |w: &Window| w.start + w.length <= targets && w.scored.end <= w.length;
    if bytes.len() != targets || !windows.iter().all(fits) {
        let counts = bytes.len();
        return Err(refused(format!("{counts} byte counts and windows for {targets} targets")));
    }
    let mut score = Score { total_tokens: targets as u64, ..Score::default() };
    for batch in windows.chunks((batch_tokens / window.max(1)).max(1)) {
        let mut nll = scorer.nll(tokens, batch, window)?.into_iter();
        for window in batch {
            let targets = window.start + window.scored.start..window.start + window.scored.end;
            for (target, bytes) in targets.clone().zip(&bytes[targets]) {
                let nll = nll.next().unwrap_or(f64::NAN);
                score.nll_sum += nll;
                score.tokens += 1;
                score.bytes += u64::from(*bytes);
                each(target, nll);
            }
            score.windows += 1;
        }
    }
    Ok(score)
}

#[cfg(test)]
mod tests {
    use super::super::{Tail, plain_windows, sliding_windows};
    use super::*;
    use crate::language_model::tensor_specs;
    use crate::test_support::small_language_model;
    use crate::weights::memory::MemorySource;

    fn model() -> LanguageModel {
        let config = small_language_model();
        let source = MemorySource::random(&tensor_specs(&config), 0.4, 2).expect("tensors");
        LanguageModel::from_source(&config, &source).expect("model").frozen().expect("frozen")
    }

    #[test]
    fn batches_change_no_bit_and_every_target_is_heard_once() -> Result<()> {
        let tokens: Vec<u32> = (0..61).map(|i| (i * 7 + i * i) % 19).collect();
        let bytes = vec![2; 60];
        let model = model();
        let windows = sliding_windows(60, 16, 5, Tail::Score);
        let mut heard: Vec<Vec<(usize, f64)>> = Vec::new();
        let mut scores = Vec::new();
        for batch_tokens in [1, 40, 1000] {
            let mut all = Vec::new();
            let mut each = |target, nll| all.push((target, nll));
            let windows = (windows.as_slice(), 16);
            scores.push(evaluate(&model, &tokens, &bytes, windows, batch_tokens, &mut each)?);
            heard.push(all);
        }
        assert!(scores.iter().all(|score| *score == scores[0]));
        assert!(heard.iter().all(|all| *all == heard[0]));
        assert!(heard[0].iter().map(|pair| pair.0).eq(0..60));
        assert_eq!((scores[0].tokens, scores[0].bytes), (60, 120));
        let by_hand = scores[0].loss() / std::f64::consts::LN_2 * 60.0 / 120.0;
        assert!((scores[0].bits_per_byte() - by_hand).abs() < 1e-12);
        Ok(())
    }

    #[test]
    fn a_full_stride_is_plain_evaluation() -> Result<()> {
        let tokens: Vec<u32> = (0..50).map(|i| (i * 5) % 19).collect();
        let (bytes, model) = (vec![1; 49], model());
        let score = |windows: &[Window]| {
            evaluate(&model, &tokens, &bytes, (windows, 7), 100, &mut |_, _| {})
        };
        let plain = score(&plain_windows(49, 7))?;
        assert_eq!(plain, score(&sliding_windows(49, 7, 7, Tail::Score))?);
        assert_eq!((plain.tokens, plain.windows), (49, 7));
        let outside = [Window { start: 45, length: 7, scored: 0..7 }];
        assert!(score(&outside).is_err());
        Ok(())
    }
}
