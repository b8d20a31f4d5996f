//! A teacher of which only the most likely tokens are kept.

use longdraft_features::{BatchFeatures, TeacherFeatures};
use longdraft_kernels::top_k::{TopK, linear_top_k};
use longdraft_models::draft::Draft;
use longdraft_parallel::Gradients;
use longdraft_train::method::eagle3::{
    Eagle3Loss, Eagle3Objective, Eagle3ObjectiveConfig, OovRows, TeacherDistribution,
};
use longdraft_train::objective::{Objective, TailKind};

use super::{Tensor, VOCABULARY, batch, draft_config, features, head, objective, run, share};

fn configs() -> Vec<Eagle3ObjectiveConfig> {
    let base = Eagle3ObjectiveConfig { ttt_steps: 4, kl_decay: 2.0, ..Default::default() };
    let mut all = Vec::new();
    for loss in [Eagle3Loss::Ce, Eagle3Loss::LkAlpha, Eagle3Loss::LkLambda] {
        for oov_rows in [OovRows::Skip, OovRows::Keep] {
            all.push(Eagle3ObjectiveConfig { loss, oov_rows, ..base.clone() });
        }
    }
    all
}

fn with(config: &Eagle3ObjectiveConfig, k: usize, tail: TailKind) -> Eagle3Objective {
    objective(&draft_config(), config.clone())
        .with_distribution(TeacherDistribution::TopK { k, tail })
}

/// Largest difference of two sets of gradients, relative to the largest of the second.
fn difference(objective: &Eagle3Objective, a: &Gradients, b: &Gradients) -> f64 {
    let mut worst = 0.0_f64;
    for index in 0..objective.eagle3().parameters().len() {
        let [a, b] = [a, b].map(|all| all.get(index).expect("values").unwrap_or_default());
        assert!(a.len() == b.len() && !a.is_empty(), "a gradient is missing");
        let scale = b.iter().fold(1e-6_f32, |m, x| m.max(x.abs()));
        let error = a.iter().zip(b.iter()).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
        worst = worst.max(f64::from(error / scale));
    }
    worst
}

#[test]
fn as_many_tokens_as_the_vocabulary_has_are_the_whole_distribution() {
    let batch = batch(&[17, 5, 12], 3);
    let features = features(&batch, 5);
    for config in configs() {
        let whole = objective(&draft_config(), config.clone());
        let (loss, gradients) = run(&whole, &batch, &features, None);
        let measured = share(&whole, &batch, &features, false).metrics;
        for tail in [TailKind::Bucket, TailKind::Renormalise] {
            // More than there are is as many.
            let top = with(&config, VOCABULARY + 5, tail);
            let (top_loss, top_gradients) = run(&top, &batch, &features, None);
            assert!((top_loss - loss).abs() < 1e-5 * loss.abs(), "{config:?}: {top_loss} {loss}");
            let error = difference(&whole, &top_gradients, &gradients);
            assert!(error < 1e-4, "{config:?} {tail:?}: {error}");
            let metrics = share(&top, &batch, &features, false).metrics;
            for (a, b) in metrics.by_delay.iter().zip(&measured.by_delay) {
                assert_eq!((a.rows, a.top1_count), (b.rows, b.top1_count));
                assert!((a.acceptance_sum - b.acceptance_sum).abs() < 1e-3);
            }
        }
    }
}

#[test]
fn fewer_tokens_are_another_objective_with_less_known_acceptance() {
    let batch = batch(&[17, 12], 0);
    let features = features(&batch, 6);
    let config = Eagle3ObjectiveConfig { ttt_steps: 3, ..Default::default() };
    let loss = |objective: &Eagle3Objective| run(objective, &batch, &features, None).0;
    let whole = objective(&draft_config(), config.clone());
    let bucket = with(&config, 4, TailKind::Bucket);
    let dropped = with(&config, 4, TailKind::Renormalise);
    let losses = [loss(&whole), loss(&bucket), loss(&dropped)];
    assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    assert!((losses[0] - losses[1]).abs() > 1e-3 && (losses[1] - losses[2]).abs() > 1e-3);
    let accepted = |objective: &Eagle3Objective| {
        let metrics = share(objective, &batch, &features, false).metrics;
        metrics.by_delay.iter().map(|delay| delay.acceptance_sum).sum::<f64>()
    };
    assert!(accepted(&bucket) < accepted(&whole));
    // Held-out rows are measured with all of the distribution.
    let measured = |objective: &Eagle3Objective| {
        let metrics = objective.measure(&batch, &features).expect("metrics");
        (metrics.loss(), metrics.by_delay[0].acceptance_sum)
    };
    assert_eq!(measured(&bucket), measured(&whole));
}

#[test]
fn kept_entries_give_the_bits_of_those_of_the_states() {
    let batch = batch(&[17, 5, 12], 3);
    let features = features(&batch, 7);
    let TeacherFeatures::EveryToken { hidden } = &features.teacher else { panic!("teacher") };
    for config in configs() {
        let objective = with(&config, 6, TailKind::Bucket);
        let rows = objective.teacher_tokens(&batch);
        let chosen = Tensor::from_slice(&rows, rows.len(), hidden.device()).expect("rows");
        let chosen = hidden.index_select(&chosen, 0).expect("states");
        let entries = linear_top_k(&chosen, &head(), 6).expect("entries");
        let kept = |entries| BatchFeatures {
            teacher: TeacherFeatures::TopK { entries, k: 6, hidden: None },
            ..features.clone()
        };
        let stored = run(&objective, &batch, &kept(entries.clone()), None);
        let online = run(&objective, &batch, &features, None);
        assert_eq!(stored.0.to_bits(), online.0.to_bits());
        assert_eq!(difference(&objective, &stored.1, &online.1).to_bits(), 0);
        let mut short = entries;
        short.ids.pop();
        assert!(objective.plan(&batch, &kept(short)).is_err());
    }
    // Their distribution alone is no whole distribution.
    let whole = objective(&draft_config(), configs()[0].clone());
    let features = BatchFeatures {
        teacher: TeacherFeatures::TopK { entries: TopK::default(), k: 6, hidden: None },
        ..features.clone()
    };
    assert!(whole.plan(&batch, &features).is_err());
}
