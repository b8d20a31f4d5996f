//! The objective from plain tensor ops, by the published rules.

use std::collections::HashMap;

use candle_core::{D, Device, Result, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures};
use longdraft_kernels::{linear, rms_norm, rope, swiglu};
use longdraft_models::TargetTokenId;
use longdraft_train::method::eagle3::{Eagle3Loss, Eagle3Objective, MaskRule, OovRows};

use super::{TARGET_WIDTH, head};

/// Each document alone, one masked attention over the
/// keys of all steps, full logits.
pub(crate) struct Composed<'a> {
    objective: &'a Eagle3Objective,
    weights: HashMap<String, Tensor>,
}

/// `Σ ℓ`, `Σ α` and `Σ M` of one step, all documents.
#[derive(Default)]
struct StepSums {
    cross_entropy: Option<Tensor>,
    log_alpha: Option<Tensor>,
    alpha: Option<Tensor>,
    rows: f64,
}

fn add(sum: &mut Option<Tensor>, term: Tensor) -> Result<()> {
    *sum = Some(match sum.take() {
        None => term,
        Some(sum) => (sum + term)?,
    });
    Ok(())
}

impl Composed<'_> {
    pub(crate) fn new(objective: &Eagle3Objective) -> Composed<'_> {
        let weights = objective.eagle3().named_tensors().expect("tensors").into_iter().collect();
        Composed { objective, weights }
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        rms_norm::reference(x, &self.weights[&format!("{name}.weight")], 1e-5)
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        linear::reference(x, &self.weights[&format!("{name}.weight")], None)
    }

    /// `h⁽ⁱ⁾` of one document, `[T, H]` a step.
    fn hidden(&self, ids: &[u32], aux: &Tensor) -> Result<Vec<Tensor>> {
        let draft = self.objective.eagle3();
        let config = draft.config();
        let tokens = ids.len();
        let mut state = if config.fc_norm {
            let third = |i: usize| {
                let layer = aux.narrow(1, i * TARGET_WIDTH, TARGET_WIDTH)?;
                self.norm(&layer, &format!("fc_norm.{i}"))
            };
            self.linear(&Tensor::cat(&[third(0)?, third(1)?, third(2)?], 1)?, "fc")?
        } else {
            self.linear(aux, "fc")?
        };
        let (mut keys, mut values, mut hidden) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..self.objective.config().ttt_steps {
            let shifted: Vec<u32> =
                (0..tokens).map(|t| ids.get(t + 1 + i).copied().unwrap_or(0)).collect();
            let embedded =
                self.norm(&draft.embed(&shifted).expect("ids"), "midlayer.input_layernorm")?;
            let input = Tensor::cat(&[embedded, self.norm(&state, "midlayer.hidden_norm")?], 1)?;
            let positions: Vec<u32> = (0..tokens).map(|t| (t + i) as u32).collect();
            let lengths = vec![(tokens + i) as u32; tokens];
            let table = draft.rope_table(&positions, &lengths).expect("table");
            let heads = |module: &str, count: usize| {
                let x = self.linear(&input, &format!("midlayer.self_attn.{module}"))?;
                x.reshape((tokens, count, config.head_dim))
            };
            let q = rope::reference(&heads("q_proj", config.num_attention_heads)?, &table)?;
            keys.push(rope::reference(&heads("k_proj", config.num_key_value_heads)?, &table)?);
            values.push(heads("v_proj", config.num_key_value_heads)?);
            let attended =
                self.attend(&q, &Tensor::cat(&keys, 0)?, &Tensor::cat(&values, 0)?, i)?;
            let attended = self.linear(&attended, "midlayer.self_attn.o_proj")?;
            let residual = (&state + attended)?;
            let normed = self.norm(&residual, "midlayer.post_attention_layernorm")?;
            let gated = swiglu::reference(
                &self.linear(&normed, "midlayer.mlp.gate_proj")?,
                &self.linear(&normed, "midlayer.mlp.up_proj")?,
            )?;
            let h = (residual + self.linear(&gated, "midlayer.mlp.down_proj")?)?;
            state = if config.norm_output { self.norm(&h, "norm")? } else { h.clone() };
            hidden.push(h);
        }
        Ok(hidden)
    }

    /// Causal over the first block of keys, the diagonals of the others.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, step: usize) -> Result<Tensor> {
        let config = self.objective.eagle3().config();
        let (tokens, heads, head_dim) = q.dims3()?;
        let window = config.attention_window.unwrap_or(usize::MAX);
        let mut mask = Vec::new();
        for t in 0..tokens {
            mask.extend((0..tokens).map(|s| if s <= t && t - s <= window { 0.0 } else { -1e30 }));
            for _ in 0..step {
                mask.extend((0..tokens).map(|s| if s == t { 0.0_f32 } else { -1e30 }));
            }
        }
        let mask = Tensor::from_vec(mask, (tokens, tokens * (step + 1)), q.device())?;
        let group = heads / config.num_key_value_heads;
        let mut out = Vec::new();
        for n in 0..heads {
            let of = |x: &Tensor, n: usize| x.narrow(1, n, 1)?.squeeze(1)?.contiguous();
            let (q, k, v) = (of(q, n)?, of(k, n / group)?, of(v, n / group)?);
            let scores = ((q.matmul(&k.t()?)? / (head_dim as f64).sqrt())? + &mask)?;
            out.push(log_softmax(&scores)?.exp()?.matmul(&v)?);
        }
        Tensor::cat(&out, 1)
    }

    /// The loss of documents `0..lengths.len()`.
    pub(crate) fn loss(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        lengths: &[usize],
    ) -> Result<Tensor> {
        let config = self.objective.config();
        let TeacherFeatures::EveryToken { hidden: teacher } = &features.teacher else {
            panic!("teacher")
        };
        let aux = features.aux_hidden.as_ref().expect("aux");
        let mut sums: Vec<StepSums> = Vec::new();
        sums.resize_with(config.ttt_steps, StepSums::default);
        let mut first = 0;
        for &length in lengths {
            let range = first..first + length;
            first += length;
            let (ids, mask) = (&batch.ids[range.clone()], &batch.loss_mask[range.clone()]);
            let hidden = self.hidden(ids, &aux.narrow(0, range.start, length)?)?;
            let teacher = teacher.narrow(0, range.start, length)?;
            for (i, (hidden, sums)) in hidden.iter().zip(&mut sums).enumerate() {
                self.add_rows(i, hidden, &teacher, mask, sums)?;
            }
        }
        let padded = (lengths.len() * lengths.iter().max().expect("documents")) as f64;
        let mut total = None;
        for (i, sums) in sums.iter().enumerate() {
            let (Some(ce), Some(log_alpha), Some(alpha)) =
                (&sums.cross_entropy, &sums.log_alpha, &sums.alpha)
            else {
                continue;
            };
            let mean_ce = if config.compat.is_some() { (ce / padded)? } else { (ce / sums.rows)? };
            let mean_alpha = (alpha / sums.rows)?;
            let loss = match config.loss {
                Eagle3Loss::Ce => mean_ce,
                Eagle3Loss::LkAlpha => (log_alpha / -sums.rows)?,
                Eagle3Loss::LkLambda => {
                    let decayed = (mean_alpha.detach() * -config.kl_decay)?.exp()?;
                    let mix = (decayed * config.kl_scale)?;
                    ((&mix * mean_ce)? + ((1.0 - &mix)? * (1.0 - mean_alpha)?)?)?
                }
            };
            add(&mut total, (loss * config.step_decay.powi(i as i32))?)?;
        }
        Ok(total.expect("learned rows"))
    }

    fn add_rows(
        &self,
        i: usize,
        hidden: &Tensor,
        teacher: &Tensor,
        mask: &[bool],
        sums: &mut StepSums,
    ) -> Result<()> {
        let config = self.objective.config();
        let length = mask.len();
        let map = self.objective.eagle3().vocabulary();
        let whole = teacher.matmul(&head().t()?)?;
        let best = whole.argmax(D::Minus1)?.to_vec1::<u32>()?;
        let learned = |t: usize| {
            let supervised = match (config.compat, config.mask_rule) {
                (Some(_), _) => t + i + 1 < length && mask[t + i],
                (None, MaskRule::Contiguous) => (1..i + 3).all(|j| t + j < length && mask[t + j]),
                (None, MaskRule::Input) => t + i + 1 < length && mask[t + i + 1],
            };
            let keep = config.compat.is_none() && config.oov_rows == OovRows::Keep;
            supervised && (keep || map.to_draft(TargetTokenId(best[t + i + 1])).is_some())
        };
        let rows: Vec<u32> = (0..length).filter(|&t| learned(t)).map(|t| t as u32).collect();
        if rows.is_empty() {
            return Ok(());
        }
        sums.rows += rows.len() as f64;
        let tensor = |ids: Vec<u32>| Tensor::from_slice(&ids, ids.len(), &Device::Cpu);
        let shifted = tensor(rows.iter().map(|t| t + 1 + i as u32).collect())?;
        let kept = tensor(map.kept().iter().map(|id| id.0).collect())?;
        let normed = self.norm(&hidden.index_select(&tensor(rows)?, 0)?, "norm")?;
        let log_q = log_softmax(&self.linear(&normed, "lm_head")?)?;
        let whole = whole.index_select(&shifted, 0)?;
        let p = log_softmax(&whole.index_select(&kept, 1)?)?.exp()?;
        let true_p = log_softmax(&whole)?.exp()?.index_select(&kept, 1)?;
        let alpha = true_p.minimum(&log_q.exp()?)?.sum(D::Minus1)?;
        add(&mut sums.cross_entropy, (p * log_q)?.sum_all()?.neg()?)?;
        add(&mut sums.log_alpha, alpha.log()?.sum_all()?)?;
        add(&mut sums.alpha, alpha.sum_all()?)
    }
}

fn log_softmax(x: &Tensor) -> Result<Tensor> {
    let shifted = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
    shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(D::Minus1)?.log()?)
}
