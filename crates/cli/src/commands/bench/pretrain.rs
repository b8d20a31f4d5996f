//! A pretraining step: the default language model (nine layers, 512 wide, tied head, softcap), Muon
//! and Adam, random tokens. Sequences go through the model one by one and their gradients add up, as
//! `train.micro_batch_tokens` does it: the same step with one sequence's activations.

use longdraft_models::language_model::{LanguageModel, LanguageModelConfig, Layout};
use longdraft_parallel::Gradients;
use longdraft_pretrain::{Muon, MuonConfig};
use serde_json::json;

use super::clock::{Timed, time};
use super::{Cases, Place, shape};
use crate::cli::PretrainBenchArguments;
use crate::failure::{Failure, Result};

/// Every length.
pub(super) fn run(arguments: &PretrainBenchArguments, cases: &mut Cases) -> Result<()> {
    let place = Place::open(&arguments.bench)?;
    for &tokens in &arguments.tokens {
        let own = json!({ "sequence": tokens, "sequences": arguments.sequences });
        let about = place.describe("pretrain", own);
        cases.steps(about, tokens * arguments.sequences, || steps(arguments, &place, tokens));
    }
    Ok(())
}

fn steps(arguments: &PretrainBenchArguments, place: &Place, sequence: usize) -> Result<Timed> {
    let config = LanguageModelConfig::default();
    let model = LanguageModel::initialise(&config, 0)?.to_device(&place.device)?;
    let parameters = model.parameters();
    let layout = Layout::new(&config, &[sequence], sequence)?;
    let optimizer =
        MuonConfig { matrix_learning_rate: 0.02, clip_norm: 0.3, ..MuonConfig::default() };
    let mut optimizer = Muon::new(optimizer, parameters);
    let count = sequence * arguments.sequences;
    let prepare = |step| -> Result<Vec<u32>> {
        Ok((0..=count).map(|t| shape::token(t, step, config.vocab_size)).collect())
    };
    time(place, &arguments.bench, prepare, |tokens| {
        let mut gradients = Gradients::new(parameters);
        let mut mean: Option<candle_core::Tensor> = None;
        for row in 0..arguments.sequences {
            let (from, to) = (row * sequence, (row + 1) * sequence);
            let hidden = model.hidden(&tokens[from..to], &layout)?;
            let output = model.cross_entropy(&hidden, &tokens[from + 1..=to])?;
            let share = (output.loss_sum / count as f64)?;
            gradients.add_of(parameters, &share)?;
            let share = share.detach();
            mean = Some(match mean {
                None => share,
                Some(sum) => (sum + share)?,
            });
        }
        optimizer.step(parameters, &gradients, 1.0)?;
        Ok(Some(mean.ok_or_else(|| Failure::work("there are no sequences"))?))
    })
}
