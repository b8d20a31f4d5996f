//! A pretraining step: nine layers, 512 wide, 8 heads over 4, vocabulary 1024, tied head, softcap,
//! Muon and Adam; random tokens. Sequences go through the model one by one and their gradients add
//! up, as `train.micro_batch_tokens` does it: the same step with one sequence's activations.

use std::time::Instant;

use longdraft_models::language_model::{LanguageModel, LanguageModelConfig, Layout};
use longdraft_train::optim::{Gradients, Muon, MuonConfig};

use super::{Place, median};

/// Sequences of a step, as the other side's default.
pub(super) const SEQUENCES: usize = 4;

/// Seconds of a step of [`SEQUENCES`] sequences, the median of `steps` after one warm-up.
pub(super) fn step(sequence: usize, steps: usize) -> f64 {
    let config = LanguageModelConfig::default();
    let device = Place::target().device;
    let model = LanguageModel::initialise(&config, 0).expect("model");
    let model = model.to_device(&device).expect("model on its device");
    let parameters = model.parameters();
    let layout = Layout::new(&config, &[sequence], sequence).expect("layout");
    let optimizer = MuonConfig { matrix_lr: 0.02, clip_norm: 0.3, ..MuonConfig::default() };
    let mut optimizer = Muon::new(optimizer, parameters);
    let mut times = Vec::new();
    for step in 0..=steps {
        let id = |t: usize| ((t * 7919 + step * 104_729) % config.vocab_size) as u32;
        let tokens: Vec<u32> = (0..=SEQUENCES * sequence).map(id).collect();
        let started = Instant::now();
        let count = tokens.len() - 1;
        let mut gradients = Gradients::new(parameters);
        for row in 0..SEQUENCES {
            let (from, to) = (row * sequence, (row + 1) * sequence);
            let hidden = model.hidden(&tokens[from..to], &layout).expect("forward");
            let output = model.cross_entropy(&hidden, &tokens[from + 1..=to]).expect("loss");
            let share = (output.loss_sum / count as f64).expect("share of the mean");
            gradients.add(parameters, &share.backward().expect("backward")).expect("gradients");
        }
        optimizer.step(parameters, &gradients, 1.0).expect("step");
        if step > 0 {
            times.push(started.elapsed().as_secs_f64());
        }
    }
    median(&mut times)
}
