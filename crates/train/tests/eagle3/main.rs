//! The EAGLE-3 objective on tiny random targets, beside a composed version of the published rules.

mod composed;
mod top_k;

use candle_core::{DType, Device, Tensor};
use composed::Composed;
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures, run_target};
use longdraft_kernels::graph::Backward;
use longdraft_kernels::random::CounterRng;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_models::{TargetConfig, TargetTokenId};
use longdraft_parallel::Gradients;
use longdraft_train::Share;
use longdraft_train::method::eagle3::{
    Eagle3Compat, Eagle3Loss, Eagle3Objective, Eagle3ObjectiveConfig, MaskRule, OovRows,
};
use longdraft_train::metrics::DraftMetrics;
use longdraft_train::objective::Objective;
use serde_json::json;

const VOCABULARY: usize = 31;
const TARGET_WIDTH: usize = 12;

fn random(purpose: &str, seed: u64, shape: &[usize]) -> Tensor {
    let mut rng = CounterRng::new(seed, purpose, &[]);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.normal() as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).expect("tensor")
}

fn draft_config() -> Eagle3Config {
    let value = json!({
        "hidden_size": TARGET_WIDTH, "intermediate_size": 20, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "vocab_size": VOCABULARY, "draft_vocab_size": 16,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "initializer_range": 0.3
    });
    Eagle3Config::from_json(&value, Some(8)).expect("valid")
}

fn head() -> Tensor {
    random("head", 1, &[VOCABULARY, TARGET_WIDTH])
}

fn objective(draft: &Eagle3Config, config: Eagle3ObjectiveConfig) -> Eagle3Objective {
    let kept = (0..16).map(|i| TargetTokenId(2 * i)).take(draft.draft_vocab_size).collect();
    let map = VocabularyMap::new(kept, VOCABULARY).expect("map");
    let embedding = random("embedding", 2, &[VOCABULARY, TARGET_WIDTH]);
    let draft = Eagle3Draft::initialise(draft, map, &embedding, 3).expect("draft");
    Eagle3Objective::new(draft, &head(), config).expect("objective")
}

/// Documents of these lengths with a prompt each and a hole in the long ones, then padding.
fn batch(lengths: &[usize], padding: usize) -> Batch {
    let mut batch = Batch::default();
    for (document, &length) in lengths.iter().enumerate() {
        let first = batch.ids.len() as u32;
        batch.ids.extend((0..length as u32).map(|t| (first + t) * 7 % VOCABULARY as u32));
        batch.position_ids.extend(0..length as u32);
        batch.document_ids.extend(std::iter::repeat_n(document as i32, length));
        let mask: Vec<bool> = (0..length).map(|t| t > 2 && t != 9).collect();
        let learned = (1..length).filter(|&t| mask[t]).map(|t| first + t as u32 - 1);
        batch.learned.extend(learned);
        batch.loss_mask.extend(mask);
    }
    batch.ids.extend(std::iter::repeat_n(0, padding));
    batch.position_ids.extend(std::iter::repeat_n(0, padding));
    batch.document_ids.extend(std::iter::repeat_n(-1, padding));
    batch.loss_mask.extend(std::iter::repeat_n(false, padding));
    batch
}

fn features(batch: &Batch, seed: u64) -> BatchFeatures {
    let tokens = batch.ids.len();
    BatchFeatures {
        part: None,
        last_kv: None,
        aux_hidden: Some(random("aux", seed, &[tokens, 3 * TARGET_WIDTH])),
        teacher: TeacherFeatures::EveryToken {
            hidden: random("final", seed, &[tokens, TARGET_WIDTH]),
        },
    }
}

/// Part of a batch and its features: some documents.
fn part(
    batch: &Batch,
    features: &BatchFeatures,
    range: std::ops::Range<usize>,
) -> (Batch, BatchFeatures) {
    let rows = |tensor: &Tensor| tensor.narrow(0, range.start, range.len()).expect("rows");
    let TeacherFeatures::EveryToken { hidden } = &features.teacher else { panic!("teacher") };
    let learned = batch.learned.iter().filter(|t| range.contains(&(**t as usize)));
    let own = Batch {
        ids: batch.ids[range.clone()].to_vec(),
        position_ids: batch.position_ids[range.clone()].to_vec(),
        document_ids: batch.document_ids[range.clone()].to_vec(),
        loss_mask: batch.loss_mask[range.clone()].to_vec(),
        learned: learned.map(|t| t - range.start as u32).collect(),
        ..Batch::default()
    };
    let features = BatchFeatures {
        part: None,
        last_kv: None,
        aux_hidden: features.aux_hidden.as_ref().map(rows),
        teacher: TeacherFeatures::EveryToken { hidden: rows(hidden) },
    };
    (own, features)
}

/// A batch as a step of its own.
fn share(
    objective: &Eagle3Objective,
    batch: &Batch,
    features: &BatchFeatures,
    train: bool,
) -> Share {
    let prepared = objective.prepare(batch, features).expect("plan");
    let denominators = &prepared.denominators;
    objective.share(batch, features, &prepared, denominators, train).expect("share")
}

/// Loss and gradients by name, through plan and evaluation with the given denominators.
fn run(
    objective: &Eagle3Objective,
    batch: &Batch,
    features: &BatchFeatures,
    denominators: Option<&[f64]>,
) -> (f64, Gradients) {
    let plan = objective.plan(batch, features).expect("plan");
    let own = objective.denominators(&plan);
    let denominators = denominators.unwrap_or(&own);
    let outcome = objective.evaluate(batch, features, &plan, denominators, true).expect("outcome");
    let parameters = objective.eagle3().parameters();
    let mut gradients = Gradients::new(parameters);
    let loss = outcome.loss.map_or(0.0, |loss| {
        gradients.add(parameters, loss.gradients().expect("backward")).expect("gradients");
        f64::from(loss.to_scalar::<f32>().expect("scalar"))
    });
    (loss, gradients)
}

fn modes() -> Vec<Eagle3ObjectiveConfig> {
    let base = Eagle3ObjectiveConfig { ttt_steps: 4, kl_decay: 2.0, ..Default::default() };
    let mut all = Vec::new();
    for loss in [Eagle3Loss::Ce, Eagle3Loss::LkAlpha, Eagle3Loss::LkLambda] {
        let own = Eagle3ObjectiveConfig { loss, ..base.clone() };
        all.push(Eagle3ObjectiveConfig { compat: Some(Eagle3Compat::Specforge), ..own.clone() });
        all.push(Eagle3ObjectiveConfig { mask_rule: MaskRule::Input, ..own.clone() });
        all.push(Eagle3ObjectiveConfig { oov_rows: OovRows::Keep, ..own.clone() });
        all.push(own);
    }
    all
}

fn assert_close(name: &str, a: &[f32], b: &[f32], tolerance: f32) {
    let largest = b.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert!((x - y).abs() <= tolerance * largest.max(1e-3), "{name}[{i}]: {x} against {y}");
    }
    assert_eq!(a.len(), b.len());
}

#[test]
fn loss_and_gradients_match_the_composed_rules_in_every_mode() {
    let drafts = [
        draft_config(),
        Eagle3Config { fc_norm: true, norm_output: true, ..draft_config() },
        Eagle3Config { attention_window: Some(3), ..draft_config() },
        Eagle3Config { dynamic_ntk: Some(2.0), max_position_embeddings: 8, ..draft_config() },
    ];
    let lengths = [17, 11, 1, 4];
    let batch = batch(&lengths, 3);
    for (mode, draft) in modes().into_iter().zip(drafts.iter().cycle()) {
        let objective = objective(draft, mode.clone());
        let features = features(&batch, 5);
        let (loss, gradients) = run(&objective, &batch, &features, None);
        let composed =
            Composed::new(&objective).loss(&batch, &features, &lengths).expect("composed");
        let want = f64::from(composed.to_scalar::<f32>().expect("scalar"));
        assert!((loss - want).abs() < 1e-5 * want.abs(), "{mode:?}: {loss} against {want}");
        let store = composed.gradients().expect("backward");
        for (index, parameter) in objective.eagle3().parameters().iter().enumerate() {
            let name = format!("{mode:?} {}", parameter.name);
            let want = store.get(parameter.var.as_tensor()).expect("a composed gradient");
            let want = want.flatten_all().and_then(|g| g.to_vec1::<f32>()).expect("values");
            let got = gradients.get(index).expect("values").expect(&name);
            assert_close(&name, &got, &want, 2e-4);
        }
    }
}

#[test]
fn every_trained_tensor_gets_a_gradient_in_every_mode() {
    let narrow = Eagle3Config { hidden_size: 8, embed_proj: true, ..draft_config() };
    let normed = Eagle3Config { fc_norm: true, norm_output: true, ..draft_config() };
    for (draft, tensors) in [(draft_config(), 13), (normed, 16), (narrow, 14)] {
        for mode in modes() {
            let objective = objective(&draft, mode);
            let batch = batch(&[20, 13], 0);
            let (_, gradients) = run(&objective, &batch, &features(&batch, 6), None);
            let parameters = objective.draft().parameters();
            assert_eq!(parameters.len(), tensors);
            for (index, parameter) in parameters.iter().enumerate() {
                let name = &parameter.name;
                let gradient = gradients.get(index).expect("values");
                let gradient = gradient.unwrap_or_else(|| panic!("`{name}` gets none"));
                assert!(gradient.iter().all(|g| g.is_finite()), "`{name}` is not finite");
                assert!(gradient.iter().any(|g| *g != 0.0), "`{name}` gets only zeros");
            }
        }
    }
}

#[test]
fn packed_documents_lose_what_they_lose_alone() {
    for loss in [Eagle3Loss::Ce, Eagle3Loss::LkAlpha] {
        let mode = Eagle3ObjectiveConfig { ttt_steps: 3, loss, ..Default::default() };
        let objective = objective(&draft_config(), mode);
        let whole = batch(&[17, 12], 0);
        let features = features(&whole, 7);
        let plan = objective.plan(&whole, &features).expect("plan");
        let totals = objective.denominators(&plan);
        let (loss, gradients) = run(&objective, &whole, &features, None);
        let mut parts = 0.0;
        let mut sums = vec![vec![0.0_f32; 0]; objective.eagle3().parameters().len()];
        let mut rows = vec![0.0; totals.len()];
        for range in [0..17, 17..29] {
            let (batch, features) = part(&whole, &features, range);
            let own = objective.plan(&batch, &features).expect("plan");
            rows.iter_mut()
                .zip(own.counts())
                .for_each(|(sum, (_, learned))| *sum += learned as f64);
            let (loss, gradients) = run(&objective, &batch, &features, Some(&totals));
            parts += loss;
            for (index, sum) in sums.iter_mut().enumerate() {
                let gradient = gradients.get(index).expect("values").expect("gradient");
                sum.resize(gradient.len(), 0.0);
                sum.iter_mut().zip(gradient.iter()).for_each(|(sum, g)| *sum += g);
            }
        }
        assert_eq!(rows, totals);
        assert!((loss - parts).abs() < 1e-5 * loss.abs(), "{loss} against {parts}");
        for (index, sum) in sums.iter().enumerate() {
            let gradient = gradients.get(index).expect("values").expect("gradient");
            assert_close("gradient", &gradient, sum, 2e-4);
        }
    }
}

/// What a stage does with its micro-batches: one of them is too short for the later steps.
#[test]
fn shares_of_micro_batches_sum_to_the_loss_of_the_whole_step() {
    let mode = Eagle3ObjectiveConfig { ttt_steps: 4, ..Default::default() };
    let objective = objective(&draft_config(), mode);
    let whole = batch(&[20, 6, 17], 0);
    let all = features(&whole, 7);
    let prepared = objective.prepare(&whole, &all).expect("prepared");
    let denominators = prepared.denominators.clone();
    let loss = |batch: &Batch, features: &BatchFeatures| {
        let prepared = objective.prepare(batch, features).expect("prepared");
        let share = objective.share(batch, features, &prepared, &denominators, true);
        let share = share.expect("share");
        let loss = share.loss.map_or(0.0, |loss| loss.to_scalar::<f32>().expect("scalar"));
        (f64::from(loss), share.metrics, prepared.denominators)
    };
    let (whole_loss, whole_metrics, _) = loss(&whole, &all);
    let (mut sum, mut metrics) = (0.0, DraftMetrics::default());
    let mut counts = vec![0.0; denominators.len()];
    let mut empty = 0;
    for range in [0..20, 20..26, 26..43] {
        let (batch, features) = part(&whole, &all, range);
        let (loss, own, own_counts) = loss(&batch, &features);
        sum += loss;
        metrics.merge(&own);
        empty += own_counts.iter().filter(|count| **count == 0.0).count();
        counts.iter_mut().zip(own_counts).for_each(|(sum, count)| *sum += count);
    }
    assert!(empty > 0, "every part learns at every step: nothing is shown");
    assert_eq!(counts, denominators);
    assert!((sum - whole_loss).abs() < 1e-5 * whole_loss, "{sum} against {whole_loss}");
    assert!((metrics.loss() - whole_loss).abs() < 1e-5 * whole_loss);
    assert!((metrics.loss() - whole_metrics.loss()).abs() < 1e-6);
    assert_eq!(metrics.rows, whole_metrics.rows);
    assert_eq!(metrics.by_delay[3].rows, whole_metrics.by_delay[3].rows);
}

#[test]
fn batches_without_a_learned_row_lose_nothing() {
    let masked = |mut batch: Batch| {
        batch.loss_mask.fill(false);
        batch.learned.clear();
        batch
    };
    for mode in modes() {
        let objective = objective(&draft_config(), mode);
        for batch in [batch(&[1], 0), batch(&[1, 1], 1), masked(batch(&[9, 5], 2)), batch(&[], 4)] {
            let features = features(&batch, 8);
            let plan = objective.plan(&batch, &features).expect("plan");
            let denominators = objective.denominators(&plan);
            for train in [true, false] {
                let outcome = objective.evaluate(&batch, &features, &plan, &denominators, train);
                let outcome = outcome.expect("outcome");
                assert!(outcome.loss.is_none());
                assert_eq!(outcome.metrics.parts.len(), 4);
                assert!(outcome.metrics.loss().abs() < 1e-12);
            }
        }
    }
}

#[test]
fn evaluation_measures_what_training_does_without_a_gradient() {
    for mode in modes() {
        let objective = objective(&draft_config(), mode);
        let batch = batch(&[20, 13], 2);
        let features = features(&batch, 9);
        let plan = objective.plan(&batch, &features).expect("plan");
        let denominators = objective.denominators(&plan);
        let of = |train| {
            let outcome = objective.evaluate(&batch, &features, &plan, &denominators, train);
            let outcome = outcome.expect("outcome");
            (outcome.loss.expect("learned"), outcome.metrics)
        };
        let ((trained, a), (measured, b)) = (of(true), of(false));
        assert!(trained.track_op() && !measured.track_op());
        assert_eq!(a, b);
        let loss = f64::from(trained.to_scalar::<f32>().expect("scalar"));
        let reported = a.loss();
        assert!((loss - reported).abs() < 1e-5 * reported, "{loss} against {reported}");
    }
}

#[test]
fn an_empty_step_of_compat_lambda_keeps_its_constant() {
    let mode = Eagle3ObjectiveConfig {
        compat: Some(Eagle3Compat::Specforge),
        loss: Eagle3Loss::LkLambda,
        kl_scale: 0.75,
        ttt_steps: 1,
        ..Default::default()
    };
    let objective = objective(&draft_config(), mode);
    let batch = batch(&[2], 0);
    let features = features(&batch, 10);
    let plan = objective.plan(&batch, &features).expect("plan");
    let outcome = objective.evaluate(&batch, &features, &plan, &[1.0], true).expect("outcome");
    assert!((outcome.metrics.loss() - 0.25).abs() < 1e-12);
}

#[test]
fn features_of_a_target_feed_the_trait() {
    let config = json!({
        "model_type": "llama", "hidden_size": TARGET_WIDTH, "intermediate_size": 20,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "initializer_range": 0.3
    });
    let config = TargetConfig::from_json(&config).expect("valid");
    let target = Target::random(config, 3, &TargetOptions::default()).expect("target");
    let draft = Eagle3Config::for_target(target.config(), VOCABULARY).expect("config");
    let map = VocabularyMap::identity(VOCABULARY);
    let ends = target.hold_ends().expect("ends");
    let (table, head) = (ends.embedding().expect("table"), ends.head().expect("head"));
    let draft = Eagle3Draft::initialise(&draft, map, &table, 4).expect("draft");
    let mode = Eagle3ObjectiveConfig { ttt_steps: 3, ..Default::default() };
    let objective = Eagle3Objective::new(draft, &head, mode).expect("objective");
    let batch = batch(&[15, 8], 1);
    let features = run_target(&target, &batch, None, &objective.needs()).expect("features");
    assert_eq!(features.aux_hidden().expect("tapped").dims(), [24, 3 * TARGET_WIDTH]);
    let share = share(&objective, &batch, &features, true);
    // Every token is in the vocabulary: what is supervised is learned.
    let plan = objective.plan(&batch, &features).expect("plan");
    assert!(plan.counts().iter().all(|(supervised, learned)| supervised == learned));
    assert_eq!(share.metrics.by_delay[0].rows, plan.counts()[0].0);
    let mean = share.loss.expect("learned").to_dtype(DType::F64).expect("f64");
    let mean = mean.to_scalar::<f64>().expect("scalar");
    assert!((mean - share.metrics.loss()).abs() < 1e-5 * mean);
}

#[test]
fn unfit_inputs_are_errors() {
    let objective = objective(&draft_config(), Eagle3ObjectiveConfig::default());
    let batch = batch(&[12], 0);
    let good = features(&batch, 11);
    let mut short = batch.clone();
    short.loss_mask.pop();
    let error = objective.plan(&short, &good).expect_err("refused").to_string();
    assert!(error.contains("11 mask bits for 12 tokens"), "{error}");
    for bad in [
        BatchFeatures { aux_hidden: None, ..good.clone() },
        BatchFeatures { teacher: TeacherFeatures::None, ..good.clone() },
    ] {
        let error = objective.plan(&batch, &bad).expect_err("refused").to_string();
        assert!(error.contains("the features lack"), "{error}");
    }
    let draft = || {
        let embedding = random("embedding", 2, &[VOCABULARY, TARGET_WIDTH]);
        let map = VocabularyMap::identity(VOCABULARY);
        let config = Eagle3Config { draft_vocab_size: VOCABULARY, ..draft_config() };
        Eagle3Draft::initialise(&config, map, &embedding, 3).expect("draft")
    };
    let narrow = random("head", 1, &[VOCABULARY - 1, TARGET_WIDTH]);
    assert!(Eagle3Objective::new(draft(), &narrow, Eagle3ObjectiveConfig::default()).is_err());
    for config in [
        Eagle3ObjectiveConfig { ttt_steps: 0, ..Default::default() },
        Eagle3ObjectiveConfig { step_weights: Some(vec![1.0; 3]), ..Default::default() },
        Eagle3ObjectiveConfig { kl_decay: f64::NAN, ..Default::default() },
    ] {
        assert!(Eagle3Objective::new(draft(), &head(), config).is_err());
    }
}
