//! An EAGLE-3 step from given features, composed from the fused kernels: seven test-time steps,
//! draft vocabulary 8192 with a head of its own, every row learned.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{Device, Tensor, Var};
use longdraft_kernels::attention::{Delays, KeyRanges, attention};
use longdraft_kernels::linear::linear;
use longdraft_kernels::linear_cross_entropy::{Inputs, SoftTargets, Teacher, linear_cross_entropy};
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::rope::{Rope, RopeScaling, rope};
use longdraft_kernels::swiglu::swiglu;
use longdraft_kernels::top_k::linear_top_k;
use longdraft_models::draft::Parameter;
use longdraft_train::optim::{AdamW, AdamWConfig, Gradients};

use super::median;

const HIDDEN: usize = 576;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const WIDTH: usize = 1536;
const VOCABULARY: usize = 49_152;
const DRAFT_VOCABULARY: usize = 8192;
const TEST_TIME_STEPS: usize = 7;
const EPS: f64 = 1e-5;

fn random(deviation: f64, shape: &[usize]) -> Tensor {
    Tensor::randn(0.0_f32, deviation as f32, shape, &Device::Cpu).expect("random")
}

struct Step {
    parameters: Vec<Parameter>,
    by_name: HashMap<&'static str, Var>,
    embedding: Tensor,
    head: Tensor,
    rope: Rope,
}

impl Step {
    fn new() -> Self {
        let shapes: [(&'static str, &[usize]); 9] = [
            ("fc", &[HIDDEN, 3 * HIDDEN]),
            ("q", &[HEADS * HEAD_DIM, 2 * HIDDEN]),
            ("k", &[KV_HEADS * HEAD_DIM, 2 * HIDDEN]),
            ("v", &[KV_HEADS * HEAD_DIM, 2 * HIDDEN]),
            ("o", &[HIDDEN, HEADS * HEAD_DIM]),
            ("gate", &[WIDTH, HIDDEN]),
            ("up", &[WIDTH, HIDDEN]),
            ("down", &[HIDDEN, WIDTH]),
            ("lm_head", &[DRAFT_VOCABULARY, HIDDEN]),
        ];
        let matrices = shapes.map(|(name, shape)| (name, random(0.02, shape)));
        let ones = random(0.0, &[HIDDEN]).ones_like().expect("ones");
        let norms = ["norm_in", "norm_hidden", "norm_post", "norm"].map(|n| (n, ones.clone()));
        let by_name: HashMap<_, _> = matrices
            .into_iter()
            .chain(norms)
            .map(|(name, tensor)| (name, Var::from_tensor(&tensor).expect("variable")))
            .collect();
        let parameter = |(name, var): (&&str, &Var)| Parameter {
            name: (*name).to_owned(),
            var: var.clone(),
            decay: false,
            dead: false,
        };
        Self {
            parameters: by_name.iter().map(parameter).collect(),
            by_name,
            embedding: random(0.02, &[VOCABULARY, HIDDEN]),
            head: random(0.02, &[VOCABULARY, HIDDEN]),
            rope: Rope::new(HEAD_DIM, 100_000.0, RopeScaling::None).expect("rope"),
        }
    }

    fn weight(&self, name: &str) -> &Tensor {
        self.by_name[name].as_tensor()
    }

    /// `Σ_i 0.8^i · loss_i`, the mean of each over all tokens.
    fn loss(&self, ids: &[u32], aux: &Tensor, last: &Tensor) -> candle_core::Result<Tensor> {
        let tokens = ids.len();
        let heads = |x: Tensor, count: usize| x.reshape((tokens, count, HEAD_DIM));
        let norm = |x: &Tensor, name: &str| rms_norm(x, self.weight(name), EPS);
        // Which teacher rows count is decided over its whole vocabulary.
        linear_top_k(last, &self.head, 1)?;
        let teacher_head = self.head.narrow(0, 0, DRAFT_VOCABULARY)?;
        let context = KeyRanges::packed(&vec![0; tokens], None, Delays::Same(0));
        let mut hidden = linear(aux, self.weight("fc"), None)?;
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        let mut total: Option<Tensor> = None;
        for step in 0..TEST_TIME_STEPS {
            let id = |t: usize| ids.get(t + step).copied().unwrap_or(0);
            let shifted: Vec<u32> = (0..tokens).map(id).collect();
            let shifted = Tensor::from_vec(shifted, tokens, &Device::Cpu)?;
            let embedded = self.embedding.index_select(&shifted, 0)?;
            let input =
                Tensor::cat(&[norm(&embedded, "norm_in")?, norm(&hidden, "norm_hidden")?], 1)?;
            let positions: Vec<u32> = (0..tokens).map(|t| (t + step) as u32).collect();
            let table = self.rope.table(&positions, &Device::Cpu)?;
            let q = rope(&heads(linear(&input, self.weight("q"), None)?, HEADS)?, &table)?;
            keys.push(rope(&heads(linear(&input, self.weight("k"), None)?, KV_HEADS)?, &table)?);
            values.push(heads(linear(&input, self.weight("v"), None)?, KV_HEADS)?);
            let ranges = Arc::new(context.clone().with_own_columns(step));
            let (k, v) = (Tensor::cat(&keys, 0)?, Tensor::cat(&values, 0)?);
            let attended = attention(&q, &k, &v, &ranges)?.reshape((tokens, HEADS * HEAD_DIM))?;
            hidden = (hidden + linear(&attended, self.weight("o"), None)?)?;
            let normed = norm(&hidden, "norm_post")?;
            let gate = linear(&normed, self.weight("gate"), None)?;
            let gated = swiglu(&gate, &linear(&normed, self.weight("up"), None)?)?;
            hidden = (hidden + linear(&gated, self.weight("down"), None)?)?;
            let learned = tokens - step;
            let output = linear_cross_entropy(&Inputs {
                hidden: &norm(&hidden, "norm")?.narrow(0, 0, learned)?,
                head: self.weight("lm_head"),
                labels: &vec![0; learned],
                soft: SoftTargets::Full,
                soft_weight: 1.0,
                teacher: Some(Teacher {
                    hidden: &last.narrow(0, step, learned)?,
                    head: &teacher_head,
                }),
            })?;
            let term = (output.loss_sum * (0.8_f64.powi(step as i32) / tokens as f64))?;
            total = Some(match total {
                None => term,
                Some(total) => (total + term)?,
            });
        }
        total.ok_or_else(|| candle_core::Error::Msg("no steps".into()))
    }
}

/// Seconds of a step, the median of `steps` after one warm-up.
pub(super) fn step(tokens: usize, steps: usize) -> f64 {
    let model = Step::new();
    let mut optimizer =
        AdamW::new(AdamWConfig { clip_norm: 0.5, ..Default::default() }, &model.parameters);
    let mut times = Vec::new();
    for step in 0..=steps {
        let ids: Vec<u32> =
            (0..tokens).map(|t| ((t * 7919 + step * 104_729) % VOCABULARY) as u32).collect();
        let (aux, last) = (random(1.0, &[tokens, 3 * HIDDEN]), random(1.0, &[tokens, HIDDEN]));
        let started = Instant::now();
        let loss = model.loss(&ids, &aux, &last).expect("loss");
        let mut gradients = Gradients::new(&model.parameters);
        let store = loss.backward().expect("backward");
        gradients.add(&model.parameters, &store).expect("gradients");
        optimizer.step(&model.parameters, &gradients, 1e-4).expect("step");
        if step > 0 {
            times.push(started.elapsed().as_secs_f64());
        }
    }
    median(&mut times)
}
