//! The GLIDE objective on tiny random targets.

use longdraft_kernels::graph::Backward;
use std::sync::Arc;

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_features::{TeacherFeatures, run_target};
use longdraft_models::draft::Draft;
use longdraft_models::draft::glide::{Compat, FinalNorm, GlideConfig, GlideDraft};
use longdraft_models::draft::{Init, VocabularyMap};
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_models::{TargetConfig, TargetTokenId};
use longdraft_parallel::Gradients;
use longdraft_train::method::glide::{GlideObjective, GlideObjectiveConfig};
use longdraft_train::objective::{Objective, SoftTargetKind, TailKind};
use serde_json::json;

const TOKENS: usize = 40;

fn target(mlp_bias: bool) -> Arc<Target> {
    let config = json!({
        "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 50,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "initializer_range": 0.3,
        "mlp_bias": mlp_bias
    });
    let config = TargetConfig::from_json(&config).expect("valid");
    Arc::new(Target::random(config, 3, &TargetOptions::default()).expect("target"))
}

fn objective(
    target: &Arc<Target>,
    compat: Option<Compat>,
    final_norm: FinalNorm,
    config: GlideObjectiveConfig,
) -> GlideObjective {
    let mut glide = GlideConfig::for_target(target.config(), compat);
    glide.final_norm = final_norm;
    glide.self_window = 12;
    let draft = GlideDraft::initialise(&glide, target, Init::Random, 5).expect("draft");
    GlideObjective::new(Arc::clone(target), draft, config)
}

/// Two documents and two tokens of padding; most rows learned.
fn batch() -> Batch {
    let documents: Vec<i32> =
        (0..TOKENS).map(|t| if t >= 38 { -1 } else { i32::from(t >= 17) }).collect();
    Batch {
        ids: (0..TOKENS as u32).map(|t| t * 7 % 50).collect(),
        position_ids: (0..TOKENS as u32).map(|t| if t >= 17 { t - 17 } else { t + 30 }).collect(),
        learned: (0..TOKENS as u32 - 1)
            .filter(|&t| {
                let t = t as usize;
                documents[t] >= 0 && documents[t] == documents[t + 1] && !t.is_multiple_of(6)
            })
            .collect(),
        document_ids: documents,
        ..Batch::default()
    }
}

/// Of the tokens of [`batch`].
fn delays() -> Vec<u32> {
    (0..TOKENS as u32).map(|t| 1 + t % 5).collect()
}

#[test]
fn every_trained_tensor_gets_a_gradient_in_every_mode() {
    let soft = |kind| GlideObjectiveConfig { soft_targets: kind, top_k: 8, ..Default::default() };
    let hard = GlideObjectiveConfig { soft_weight: 0.0, ..Default::default() };
    let renormalise =
        GlideObjectiveConfig { tail: TailKind::Renormalise, ..soft(SoftTargetKind::TopK) };
    for mlp_bias in [false, true] {
        let target = target(mlp_bias);
        for (compat, norm, config, trained) in [
            (Some(Compat::Longspec), FinalNorm::None, hard.clone(), 16),
            (None, FinalNorm::None, soft(SoftTargetKind::Full), 16),
            (None, FinalNorm::Target, soft(SoftTargetKind::TopK), 16),
            (None, FinalNorm::Trained, renormalise.clone(), 17),
        ] {
            let objective = objective(&target, compat, norm, config);
            let batch = batch();
            let features = run_target(&target, &batch, None, &objective.needs()).expect("features");
            let loss = objective.loss((&batch, &delays()), &features, true).expect("loss");
            assert_eq!(loss.denominator, batch.learned.len());
            let parameters = objective.draft().parameters();
            let mut gradients = Gradients::new(parameters);
            let store = loss.numerator.expect("learned").gradients().expect("backward");
            gradients.add(parameters, store).expect("gradients");
            let mut reached = 0;
            for (index, parameter) in parameters.iter().enumerate() {
                let name = &parameter.name;
                match gradients.get(index).expect("values") {
                    Some(gradient) => {
                        assert!(!parameter.dead, "dead `{name}` has a gradient");
                        assert!(gradient.iter().all(|g| g.is_finite()), "`{name}` is not finite");
                        // A key bias moves all scores of a query alike only without rotation.
                        assert!(gradient.iter().any(|g| *g != 0.0), "`{name}` gets only zeros");
                        reached += 1;
                    }
                    None => assert!(parameter.dead, "`{name}` gets no gradient"),
                }
            }
            assert_eq!(reached, trained + if mlp_bias { 3 } else { 0 });
        }
    }
}

#[test]
fn packed_documents_lose_what_they_lose_alone() {
    let target = target(false);
    let config = GlideObjectiveConfig::default();
    let objective = objective(&target, None, FinalNorm::None, config);
    let whole = batch();
    let loss_of = |batch: &Batch, delays: &[u32]| {
        let features = run_target(&target, batch, None, &objective.needs()).expect("features");
        let metrics = objective.loss((batch, delays), &features, false).expect("loss").metrics;
        (metrics.hard_sum, metrics.soft_sum)
    };
    let part = |range: std::ops::Range<usize>| Batch {
        ids: whole.ids[range.clone()].to_vec(),
        position_ids: whole.position_ids[range.clone()].to_vec(),
        document_ids: whole.document_ids[range.clone()].to_vec(),
        learned: whole
            .learned
            .iter()
            .filter(|t| range.contains(&(**t as usize)))
            .map(|t| t - range.start as u32)
            .collect(),
        ..Batch::default()
    };
    let (hard, soft) = loss_of(&whole, &delays());
    let (first, second) =
        (loss_of(&part(0..17), &delays()[..17]), loss_of(&part(17..38), &delays()[17..38]));
    assert!((hard - first.0 - second.0).abs() < 1e-4 * hard);
    assert!((soft - first.1 - second.1).abs() < 1e-4 * soft);
}

#[test]
fn few_learned_rows_give_their_share_of_loss_and_gradients() {
    let target = target(false);
    let config = GlideObjectiveConfig::default();
    let objective = objective(&target, None, FinalNorm::Trained, config);
    let all = Batch { learned: (0..37).filter(|t| *t != 16).collect(), ..batch() };
    let of_kind = |few: bool| {
        let learned = all.learned.iter().copied().filter(|t| (t % 5 == 3) == few).collect();
        Batch { learned, ..all.clone() }
    };
    let parameters = objective.draft().parameters();
    let of = |batch: &Batch| {
        let features = run_target(&target, batch, None, &objective.needs()).expect("features");
        let loss = objective.loss((batch, &delays()), &features, true).expect("loss");
        let mut gradients = Gradients::new(parameters);
        let store = loss.numerator.expect("learned").gradients().expect("backward");
        gradients.add(parameters, store).expect("gradients");
        let of_parameter =
            |at| gradients.get(at).expect("values").map(std::borrow::Cow::into_owned);
        let gradients: Vec<_> = (0..parameters.len()).map(of_parameter).collect();
        (loss.metrics, gradients)
    };
    let (whole, few, rest) = (of(&all), of(&of_kind(true)), of(&of_kind(false)));
    assert!(few.0.rows < 9 && few.0.rows + rest.0.rows == whole.0.rows);
    let sum = few.0.soft_sum + rest.0.soft_sum;
    assert!((whole.0.soft_sum - sum).abs() < 1e-5 * sum, "{} {sum}", whole.0.soft_sum);
    for ((parameter, whole), parts) in
        parameters.iter().zip(&whole.1).zip(few.1.iter().zip(&rest.1))
    {
        let (Some(whole), (Some(few), Some(rest))) = (whole, parts) else {
            assert!(whole.is_none() && parts.0.is_none(), "`{}`", parameter.name);
            continue;
        };
        let largest = whole.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
        for (whole, sum) in whole.iter().zip(few.iter().zip(rest).map(|(a, b)| a + b)) {
            let name = &parameter.name;
            assert!((whole - sum).abs() < 1e-4 * largest, "`{name}`: {whole} {sum}");
        }
    }
}

/// Probabilities of a row of logits.
fn softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::MIN, f64::max);
    let all: Vec<f64> = logits.iter().map(|z| (z - max).exp()).collect();
    let sum: f64 = all.iter().sum();
    all.iter().map(|e| e / sum).collect()
}

fn argmax(values: &[f64]) -> usize {
    (0..values.len()).max_by(|a, b| values[*a].total_cmp(&values[*b])).expect("values")
}

#[test]
fn a_draft_of_some_tokens_learns_the_target_rescaled_to_them() {
    let target = target(false);
    let config = GlideObjectiveConfig {
        soft_targets: SoftTargetKind::Full,
        soft_weight: 0.75,
        ..Default::default()
    };
    let kept: Vec<u32> = (0..50).filter(|id| id % 3 != 1).collect();
    let map = || {
        let kept = kept.iter().map(|id| TargetTokenId(*id)).collect();
        VocabularyMap::new(kept, 50).expect("map")
    };
    let objective_of = |config: &GlideObjectiveConfig| {
        let objective = objective(&target, None, FinalNorm::Target, config.clone());
        objective.with_vocabulary(map()).expect("tokens of the target")
    };
    let (objective, batch) = (objective_of(&config), batch());
    let features = run_target(&target, &batch, None, &objective.needs()).expect("features");
    let found = objective.loss((&batch, &delays()), &features, false).expect("loss").metrics;
    let states = objective.hidden((&batch, &delays()), &features, &mut Vec::new()).expect("states");
    let ends = target.hold_ends().expect("ends");
    let rows = |states: &Tensor| -> Vec<Vec<f64>> {
        let logits = ends.logits(states).and_then(|z| Ok(z.to_vec2::<f32>()?)).expect("logits");
        logits.iter().map(|row| row.iter().map(|z| f64::from(*z)).collect()).collect()
    };
    let learned = Tensor::new(batch.learned.as_slice(), states.device()).expect("rows");
    let draft = rows(&states.index_select(&learned, 0).expect("learned rows"));
    let TeacherFeatures::Full { hidden } = &features.teacher else { panic!("the whole teacher") };
    let teacher = rows(hidden);
    let (mut hard, mut soft, mut agree, mut acceptance, mut missed) = (0.0, 0.0, 0, 0.0, 0);
    for (draft, teacher) in draft.iter().zip(&teacher) {
        let of_kept: Vec<f64> = kept.iter().map(|id| draft[*id as usize]).collect();
        let (q, p) = (softmax(&of_kept), softmax(teacher));
        let p_kept: Vec<f64> = kept.iter().map(|id| p[*id as usize]).collect();
        let mass: f64 = p_kept.iter().sum();
        soft -= p_kept.iter().zip(&q).map(|(p, q)| p / mass * q.ln()).sum::<f64>();
        acceptance += p_kept.iter().zip(&q).map(|(p, q)| p.min(*q)).sum::<f64>();
        match kept.iter().position(|id| *id as usize == argmax(teacher)) {
            Some(label) => {
                hard -= q[label].ln();
                agree += usize::from(argmax(&q) == label);
            }
            None => missed += 1,
        }
    }
    assert!(missed > 3 && missed < batch.learned.len() / 2, "{missed}");
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-3 * b.abs().max(1.0), "{a} {b}");
    close(found.soft_sum, soft);
    close(found.hard_sum, hard);
    let by_delay = found.by_delay.iter();
    close(by_delay.clone().map(|counts| counts.acceptance_sum).sum(), acceptance);
    assert_eq!(by_delay.map(|counts| counts.top1_count).sum::<usize>(), agree);
    // All of the most likely tokens are the whole distribution.
    let top = GlideObjectiveConfig { soft_targets: SoftTargetKind::TopK, top_k: 50, ..config };
    let objective = objective_of(&top);
    let features = run_target(&target, &batch, None, &objective.needs()).expect("features");
    let of_top = objective.loss((&batch, &delays()), &features, false).expect("loss").metrics;
    close(of_top.soft_sum, soft);
    close(of_top.hard_sum, hard);
}

#[test]
fn every_tensor_of_a_draft_of_some_tokens_gets_a_gradient() {
    let target = target(false);
    for (kind, soft_weight) in
        [(SoftTargetKind::Full, 0.9), (SoftTargetKind::TopK, 0.9), (SoftTargetKind::TopK, 0.0)]
    {
        let config = GlideObjectiveConfig {
            soft_targets: kind,
            soft_weight,
            top_k: 8,
            ..Default::default()
        };
        let kept = (0..20).map(|id| TargetTokenId(2 * id)).collect();
        let objective = objective(&target, None, FinalNorm::Trained, config);
        let map = VocabularyMap::new(kept, 50).expect("map");
        let objective = objective.with_vocabulary(map).expect("tokens of the target");
        let batch = batch();
        let features = run_target(&target, &batch, None, &objective.needs()).expect("features");
        let loss = objective.loss((&batch, &delays()), &features, true).expect("loss");
        let parameters = objective.draft().parameters();
        let mut gradients = Gradients::new(parameters);
        let store = loss.numerator.expect("learned").gradients().expect("backward");
        gradients.add(parameters, store).expect("gradients");
        for (index, parameter) in parameters.iter().enumerate() {
            let gradient = gradients.get(index).expect("values").expect("a gradient");
            let trains =
                gradient.iter().any(|g| *g != 0.0) && gradient.iter().all(|g| g.is_finite());
            assert!(trains, "{kind:?} {soft_weight}: `{}`", parameter.name);
        }
        // Held-out rows are measured at every delay, against the whole distribution.
        let held_out = run_target(&target, &batch, None, &objective.held_out_needs());
        let metrics = objective.measure(&batch, &held_out.expect("features")).expect("metrics");
        assert_eq!(metrics.rows, 5 * batch.learned.len());
        assert_eq!(metrics.by_delay.len(), 5);
    }
}

#[test]
fn drafts_of_another_shape_or_with_leftovers_are_refused_with_every_name() {
    let target = target(false);
    let glide = GlideConfig::for_target(target.config(), None);
    let draft = GlideDraft::initialise(&glide, &target, Init::LastLayer, 1).expect("draft");
    let mut tensors = draft.named_tensors().expect("tensors");
    tensors.retain(|(name, _)| name != "self_attn.o_proj.weight");
    let odd = tensors[0].1.narrow(0, 0, 5).expect("narrow");
    tensors[0].1 = odd;
    tensors.push(("mystery.weight".into(), tensors[1].1.clone()));
    let source = longdraft_models::weights::memory::MemorySource::new(
        tensors.into_iter().map(|(name, tensor)| (format!("draft_model.{name}"), tensor)),
    );
    let error = GlideDraft::from_source(&source, &glide, &target).err().expect("refused");
    // The norm that the prefix is found by is misshapen, not missing.
    for part in [
        "`draft_model.self_attn.o_proj.weight` [24, 24] is missing",
        "`draft_model.input_layernorm.weight` has shape [5], [24] expected",
        "`draft_model.mystery.weight` is unexpected",
    ] {
        assert!(error.to_string().contains(part), "{part} not in {error}");
    }
}

#[test]
fn published_prefixes_and_dead_tensors_are_read() {
    let target = target(false);
    let compat = GlideConfig::for_target(target.config(), Some(Compat::Longspec));
    let draft = GlideDraft::initialise(&compat, &target, Init::Random, 1).expect("draft");
    assert_eq!(draft.parameters().len(), 20);
    for prefix in ["", "draft_model.", "glide.", "module.draft_model."] {
        let named = draft.named_tensors().expect("tensors").into_iter();
        let source = longdraft_models::weights::memory::MemorySource::new(
            named.map(|(name, tensor)| (format!("{prefix}{name}"), tensor)),
        );
        let default = GlideConfig::for_target(target.config(), None);
        let read = GlideDraft::from_source(&source, &default, &target).expect("default mode");
        assert_eq!(read.parameters().len(), 16);
        let read = GlideDraft::from_source(&source, &compat, &target).expect("compat");
        assert_eq!(read.parameters().len(), 20);
    }
}
