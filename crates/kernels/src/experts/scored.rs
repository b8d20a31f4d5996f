//! Routers whose scores are logistic, in groups of which some count (DeepSeek-V3,
//! <https://arxiv.org/abs/2412.19437>).
//!
//! With `s = σ(x Rᵀ)` and `r = s + c`: of `G` groups of experts those `g` count whose two best `r` sum highest;
//! among these the `k` best `r` are chosen. Weights are the `s` of the chosen, divided by their sum where they
//! are normalised, times a factor. Ties go to the lower one.

use candle_core::{DType, Result, Tensor, bail};

use super::Routes;

/// Added to the sum of weights before they are divided by it.
const EPS: f64 = 1e-20;

/// How such a router chooses.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// `c`, `[E]`: what enters the choice alone.
    pub correction: Vec<f32>,
    /// `G`
    pub groups: usize,
    /// `g`
    pub kept_groups: usize,
    /// Whether weights are divided by their sum.
    pub normalise: bool,
    /// Factor of weights.
    pub scale: f64,
}

impl Routes {
    /// The `per_row` best experts of every row by logistic scores.
    ///
    /// # Shapes
    /// - `logits`: `[R, E]`
    ///
    /// # Errors
    /// - `logits` is no matrix of `E` columns, groups do not divide `E` or are too few for `per_row`
    pub fn choose_scored(logits: &Tensor, per_row: usize, router: &Scored) -> Result<Self> {
        let (rows, count) = logits.dims2()?;
        let Scored { correction, groups, kept_groups, .. } = router;
        let divides = *groups > 0 && count.is_multiple_of(*groups) && correction.len() == count;
        let kept = if divides { kept_groups.min(groups) * (count / groups) } else { 0 };
        if per_row == 0 || per_row > kept {
            bail!(
                "experts: {per_row} of {kept_groups} of {groups} groups of {count} experts, {} corrections",
                correction.len()
            );
        }
        let logits = logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for logits in logits.chunks_exact(count) {
            let (chosen, of_row) = router.choose(logits, per_row);
            ids.extend(chosen);
            weights.extend(of_row);
        }
        Ok(Self::of_chosen(rows, count, per_row, (&ids, &weights)))
    }

    /// Weights times a factor of their expert, `[E]`.
    ///
    /// # Errors
    /// - there is not one factor an expert
    pub fn scaled_by(mut self, factors: &[f32]) -> Result<Self> {
        if factors.len() + 1 != self.starts.len() {
            bail!("experts: {} factors for {} experts", factors.len(), self.starts.len() - 1);
        }
        for (factor, visits) in factors.iter().zip(self.starts.windows(2)) {
            self.weights[visits[0]..visits[1]].iter_mut().for_each(|weight| *weight *= factor);
        }
        Ok(self)
    }
}

impl Scored {
    /// Experts of a row, the best first, and their weights.
    fn choose(&self, logits: &[f32], per_row: usize) -> (Vec<u32>, Vec<f32>) {
        let score = |z: &f32| (1.0 / (1.0 + (-f64::from(*z)).exp())) as f32;
        let scores: Vec<f32> = logits.iter().map(score).collect();
        let ranks: Vec<f32> = scores.iter().zip(&self.correction).map(|(s, c)| s + c).collect();
        let size = ranks.len() / self.groups;
        let of_group = |group: &[f32]| {
            let best = best(group.iter().copied(), 2);
            best.into_iter().map(|i| group[i]).sum::<f32>()
        };
        let groups = best(ranks.chunks_exact(size).map(of_group), self.kept_groups);
        let counts = |expert: usize| groups.contains(&(expert / size));
        let eligible: Vec<usize> = (0..ranks.len()).filter(|expert| counts(*expert)).collect();
        let chosen = best(eligible.iter().map(|expert| ranks[*expert]), per_row);
        let chosen: Vec<usize> = chosen.into_iter().map(|place| eligible[place]).collect();
        let total: f64 = chosen.iter().map(|expert| f64::from(scores[*expert])).sum();
        let total = if self.normalise { total + EPS } else { 1.0 };
        let weight = |expert: &usize| (f64::from(scores[*expert]) / total * self.scale) as f32;
        let weights = chosen.iter().map(weight).collect();
        (chosen.into_iter().map(|expert| expert as u32).collect(), weights)
    }
}

/// Places of the `count` largest values, the largest first; of equal ones the first.
fn best(values: impl Iterator<Item = f32>, count: usize) -> Vec<usize> {
    let values: Vec<f32> = values.collect();
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
    order.truncate(count);
    order
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn routes(logits: [f32; 6], router: &Scored, per_row: usize) -> Result<Vec<(usize, f32)>> {
        let row = Tensor::new(&[logits], &Device::Cpu)?;
        let routes = Routes::choose_scored(&row, per_row, router)?;
        let visits = routes.visits().enumerate().filter(|(_, visits)| !visits.is_empty());
        Ok(visits.map(|(expert, visits)| (expert, routes.weights[visits.start])).collect())
    }

    fn router() -> Scored {
        Scored { correction: vec![0.0; 6], groups: 3, kept_groups: 1, normalise: false, scale: 2.0 }
    }

    fn logistic(z: f32) -> f32 {
        1.0 / (1.0 + (-z).exp())
    }

    #[test]
    fn the_best_of_the_best_groups_are_chosen_by_corrected_scores() -> Result<()> {
        let near = |got: &[(usize, f32)], want: &[(usize, f32)]| {
            assert_eq!(got.len(), want.len(), "{got:?}");
            for ((expert, weight), (wanted, share)) in got.iter().zip(want) {
                assert!(expert == wanted && (weight - share).abs() < 1e-6, "{got:?} {want:?}");
            }
        };
        // The middle group's sum is highest, although the best expert stands in the first.
        let logits = [3.0, -3.0, 1.5, 1.0, 0.0, 0.0];
        let two = [(2, 2.0 * logistic(1.5)), (3, 2.0 * logistic(1.0))];
        near(&routes(logits, &router(), 2)?, &two);
        near(&routes(logits, &router(), 1)?, &two[..1]);
        // A correction moves the choice and leaves the weight.
        let mut corrected = router();
        corrected.correction[4] = 5.0;
        near(&routes(logits, &corrected, 1)?, &[(4, 1.0)]);
        let all = Scored { kept_groups: 3, normalise: true, scale: 1.0, ..router() };
        let sum = logistic(3.0) + logistic(1.5);
        near(&routes(logits, &all, 2)?, &[(0, logistic(3.0) / sum), (2, logistic(1.5) / sum)]);
        Ok(())
    }

    #[test]
    fn factors_of_experts_scale_weights() -> Result<()> {
        let row = Tensor::new(&[[1.0_f32, 0.0, 2.0], [0.0, 3.0, 1.0]], &Device::Cpu)?;
        let routes = Routes::choose(&row, 1, true)?.scaled_by(&[1.0, 3.0, 5.0])?;
        assert_eq!(routes.weights, [3.0, 5.0]);
        assert!(routes.scaled_by(&[1.0]).is_err());
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let logits = [0.0; 6];
        for wrong in [
            Scored { groups: 0, ..router() },
            Scored { groups: 4, ..router() },
            Scored { kept_groups: 0, ..router() },
            Scored { correction: vec![0.0; 5], ..router() },
        ] {
            assert!(routes(logits, &wrong, 1).is_err());
        }
        assert!(routes(logits, &router(), 3).is_err());
        assert!(routes(logits, &router(), 0).is_err());
    }
}
