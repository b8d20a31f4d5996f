//! GLIDE steps: target online, with its own loss, or from kept features.

use std::sync::Arc;

use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures, run_target, sequence_of};
use longdraft_kernels::linear_cross_entropy::{Inputs, linear_cross_entropy};
use longdraft_models::draft::Init;
use longdraft_models::draft::glide::{Compat, GlideConfig, GlideDraft};
use longdraft_models::target_model::{Tap, Taps, Target};
use longdraft_train::method::glide::{GlideObjective, GlideObjectiveConfig};
use longdraft_train::objective::Objective;
use longdraft_train::optim::{AdamW, AdamWConfig};

use super::clock::{Timed, time};
use super::{Cases, Place, drafting, shape};
use crate::cli::benchmarking::GlideBenchArguments;
use crate::failure::{Failure, Result};

const DELAY: u32 = 2;
const LEARNING_RATE: f64 = 5e-4;

/// Every length with every number of documents, over one target.
pub(super) fn run(arguments: &GlideBenchArguments, cases: &mut Cases) -> Result<()> {
    let rows = &arguments.rows;
    let place = Place::open(&rows.bench)?;
    let target = Arc::new(shape::target(&rows.shape, &place)?);
    for &tokens in &rows.tokens {
        for &documents in &arguments.documents {
            let own = serde_json::json!({
                "shape": rows.shape.shape, "layers": target.config().num_hidden_layers,
                "documents": documents, "soft": arguments.soft, "cached": arguments.cached,
                "llm_loss": arguments.llm_loss,
            });
            let about = place.describe("glide", own);
            cases.steps(about, tokens, || steps(arguments, &place, &target, (tokens, documents)));
        }
    }
    Ok(())
}

fn steps(
    arguments: &GlideBenchArguments,
    place: &Place,
    target: &Arc<Target>,
    (tokens, documents): (usize, usize),
) -> Result<Timed> {
    let glide = GlideConfig::for_target(target.config(), Some(Compat::Longspec));
    // As real drafts start; nothing is drawn on the host.
    let draft = GlideDraft::initialise(&glide, target, Init::LastLayer, 1)?;
    let soft_weight =
        if arguments.soft { GlideObjectiveConfig::default().soft_weight } else { 0.0 };
    let config = GlideObjectiveConfig { soft_weight, ..Default::default() };
    let objective = GlideObjective::new(Arc::clone(target), draft, config);
    let parameters = objective.draft().parameters().to_vec();
    let mut optimizer = AdamW::new(AdamWConfig::default(), &parameters);
    let mut kept: Option<BatchFeatures> = None;
    let vocabulary = target.config().vocab_size;
    time(
        place,
        &arguments.rows.bench,
        |step| batch(tokens, documents, step, vocabulary),
        |batch| {
            let features = match kept.take().filter(|_| arguments.cached) {
                Some(features) => features,
                None if arguments.llm_loss => with_own_loss(target, &batch)?,
                None => run_target(target, &batch, None, &objective.needs())?,
            };
            let mean = || {
                let loss = objective.loss((&batch, &vec![DELAY; tokens]), &features, true)?;
                let sum = loss.numerator.ok_or_else(|| Failure::work("no row is learned"))?;
                Ok((sum / loss.denominator as f64)?)
            };
            let mean = drafting::update(&parameters, &mut optimizer, LEARNING_RATE, mean)?;
            kept = arguments.cached.then_some(features);
            Ok(Some(mean))
        },
    )
}

/// A row of documents of equal length, the last one with what is left over.
fn batch(tokens: usize, documents: usize, row: usize, vocabulary: usize) -> Result<Batch> {
    let length = tokens / documents;
    if length < 2 {
        let problem = format!("{documents} documents of a row of {tokens} tokens are too short");
        return Err(Failure::usage(problem).hint("give more --tokens or fewer --documents"));
    }
    let document = |t: usize| (t / length).min(documents - 1);
    let is_learned = |t: &usize| t + 1 < tokens && document(*t) == document(t + 1);
    Ok(Batch {
        ids: (0..tokens).map(|t| shape::token(t, row, vocabulary)).collect(),
        position_ids: (0..tokens).map(|t| (t - document(t) * length) as u32).collect(),
        document_ids: (0..tokens).map(|t| document(t) as i32).collect(),
        learned: (0..tokens).filter(is_learned).map(|t| t as u32).collect(),
        ..Batch::default()
    })
}

/// The target's features, and its loss of the row, which is thrown away.
fn with_own_loss(target: &Target, batch: &Batch) -> Result<BatchFeatures> {
    let taps = Taps::of(&[Tap::LastKv, Tap::FinalHidden]);
    let features = target.forward(&sequence_of(batch), &taps)?;
    let hidden = features.final_hidden()?;
    linear_cross_entropy(&Inputs::of_labels(
        &longdraft_kernels::rows::select_rows(hidden, &batch.learned)?,
        &target.hold_ends()?.head()?,
        &batch.labels(),
    ))?;
    let last_kv = Some(features.last_kv()?.clone());
    Ok(BatchFeatures { last_kv, aux_hidden: None, teacher: TeacherFeatures::None, part: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_share_a_row_and_learn_within_their_bounds() {
        let batch = batch(8, 3, 0, 512).expect("a row");
        assert_eq!(batch.document_ids, [0, 0, 1, 1, 2, 2, 2, 2]);
        assert_eq!(batch.position_ids, [0, 1, 0, 1, 0, 1, 2, 3]);
        assert_eq!(batch.learned, [0, 2, 4, 5, 6]);
        assert_eq!(super::batch(8, 5, 0, 512).expect_err("one token each").code(), 2);
    }
}
