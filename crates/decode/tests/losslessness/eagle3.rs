//! What EAGLE-3 computes while decoding is what it computes in training: test-time steps.

use candle_core::D;
use longdraft_decode::drafter::{Eagle3Model, ModelDrafter};
use longdraft_kernels::linear::linear;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::Draft;
use longdraft_models::draft::eagle3::{Eagle3Draft, TestTimeSteps};
use longdraft_models::target_model::{PackedSequence, Taps, Target};

use crate::answers::{generate, options, prompt};
use crate::models::{eagle3, shapes, target};
use crate::noted::{Noted, Notes, first_path};

/// Most likely continuations along `path` by test-time steps of the row before the root.
fn steps(
    target: &Target,
    draft: &Eagle3Draft,
    tokens: &[TargetTokenId],
    path: &[TargetTokenId],
) -> Vec<TargetTokenId> {
    let ids: Vec<u32> = tokens.iter().chain(path).map(|token| token.0).collect();
    let position_ids: Vec<u32> = (0..ids.len() as u32).collect();
    let sequence = PackedSequence { document_ids: vec![0; ids.len()], position_ids, ids };
    let features = target.forward(&sequence, &Taps::of(&draft.taps())).expect("features");
    let aux = features.hidden_of(&draft.config().target_layers).expect("aux");
    let mut unrolled = TestTimeSteps::new(draft, &sequence, &aux).expect("steps");
    (0..path.len())
        .map(|_| {
            let hidden = unrolled.step(&[tokens.len() as u32 - 2]).expect("step");
            let normed = draft.head_input(&hidden).expect("norm");
            let logits = linear(&normed, draft.head().expect("head"), None).expect("logits");
            let best = logits.argmax(D::Minus1).and_then(|b| b.to_vec1::<u32>()).expect("best");
            draft.vocabulary().kept()[best[0] as usize]
        })
        .collect()
}

#[test]
fn every_round_proposes_what_test_time_steps_predict() {
    for (seed, length, shape) in [(1, 1, 2), (2, 9, 2), (3, 40, 2), (4, 300, 1), (6, 9, 3)] {
        let target = target("qwen3", 16, (2, 2), seed);
        let draft = eagle3(&target, seed);
        let notes = Notes::default();
        let model = Eagle3Model::new(&draft, &target).expect("model");
        let noted = Noted::new(Box::new(ModelDrafter::new(model)), &notes);
        let mut options = options(16);
        options.shape = shapes()[shape].clone();
        generate(&target, Some(Box::new(noted)), &prompt(length, seed), &options);
        let notes = notes.borrow();
        assert!(notes.proposed.len() > 3);
        for (tokens, tree) in notes.proposed.iter().filter(|(_, tree)| !tree.is_empty()) {
            // The likeliest child of a node is its first: beams are sorted.
            let path: Vec<_> = first_path(tree).into_iter().map(|(token, _)| token).collect();
            assert_eq!(steps(&target, &draft, tokens, &path), path, "{} tokens", tokens.len());
        }
    }
}
