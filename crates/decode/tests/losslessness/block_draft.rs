//! What a block draft computes while decoding is what it computes in training.

use std::rc::Rc;

use candle_core::{D, Tensor};
use longdraft_decode::drafter::{BlockDrafter, BlockDraftModel};
use longdraft_kernels::top_k::row_top_k;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::Draft;
use longdraft_models::draft::block::{Anchor, BlockDraft, Chain, Visible};
use longdraft_models::target::{PackedSequence, Taps, Target};

use crate::models::{dflash, dflash2, dspark, generate, options, prompt, shapes, target};
use crate::noted::{Noted, Notes, first_path};

/// Most likely tokens of the block at the last of `tokens`, as training computes them from the
/// features of the whole text.
fn block(target: &Target, draft: &BlockDraft, tokens: &[TargetTokenId]) -> Vec<TargetTokenId> {
    let (config, root) = (draft.config(), tokens.len() - 1);
    let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
    let positions: Vec<u32> = (0..ids.len() as u32).collect();
    let sequence = PackedSequence {
        document_ids: vec![0; ids.len()],
        position_ids: positions.clone(),
        ids: ids.clone(),
    };
    let features = target.forward(&sequence, &Taps::of(&draft.taps())).expect("features");
    let features = features.hidden_of(&config.target_layers).expect("features");
    let context = draft.context(&features, &positions).expect("context");
    let slots = config.block_size;
    let mut inputs = vec![config.mask_token_id; slots];
    inputs[0] = ids[root];
    let at: Vec<u32> = (root as u32..(root + slots) as u32).collect();
    let anchor = Anchor { index: root, document_start: 0 };
    let visible = Visible::new(config, &[anchor], slots, ids.len());
    let states = draft.blocks(&inputs, &at, &context, &visible).expect("states").detach();
    let logits = target.logits(&states).expect("logits");
    if let Some(chain) = draft.chain() {
        return chained(chain, &states, &logits, ids[root]);
    }
    let Some(selector) = draft.selector() else {
        let best = logits.argmax(D::Minus1).expect("best").to_vec1::<u32>().expect("tokens");
        return best[1..].iter().map(|token| TargetTokenId(*token)).collect();
    };
    let top = row_top_k(&logits, selector.sizes().top_k).expect("candidates");
    let (logits, mut chosen) = (logits.to_vec2::<f32>().expect("logits"), ids[root]);
    let mut walk = Vec::new();
    for (slot, candidates) in top.ids.chunks(selector.sizes().top_k).enumerate().skip(1) {
        let state = states.narrow(0, slot, 1).expect("state");
        let projected = selector.project(&state).expect("projected");
        let scores = selector.preferences(&projected, &[chosen], candidates).expect("scores");
        let scores = scores.detach().to_vec2::<f32>().expect("scores");
        let score = |place: &usize| logits[slot][candidates[*place] as usize] + scores[0][*place];
        let places = (0..candidates.len()).rev();
        let best = places.max_by(|a, b| score(a).total_cmp(&score(b))).expect("candidates");
        chosen = candidates[best];
        walk.push(TargetTokenId(chosen));
    }
    walk
}

/// The walk of a chain from a token over the slots of a block.
fn chained(chain: Chain<'_>, states: &Tensor, logits: &Tensor, root: u32) -> Vec<TargetTokenId> {
    let (mut state, mut token) = (None, root);
    let walk = (0..states.dim(0).expect("slots")).map(|slot| {
        let embedded = chain.embed(&[token]).expect("embedded").expect("a rank");
        let of_slot = states.narrow(0, slot, 1).expect("state");
        let step = chain.step(state.as_ref(), &of_slot, &embedded).expect("step");
        let added = chain.logits(&step.mixed).expect("added").detach();
        let sum = (logits.narrow(0, slot, 1).expect("logits") + added).expect("sum");
        token = sum.argmax(D::Minus1).expect("best").to_vec1::<u32>().expect("tokens")[0];
        state = step.state;
        TargetTokenId(token)
    });
    walk.collect()
}

#[test]
fn every_round_proposes_the_block_that_training_predicts() {
    for (seed, length, shape) in [(1, 1, 2), (2, 9, 2), (3, 40, 1), (4, 300, 1), (6, 9, 3)] {
        let target = target("qwen3", 16, (2, 2), seed);
        for draft in [dflash(&target, seed), dflash2(&target, seed), dspark(&target, seed)] {
            let notes = Notes::default();
            let model = BlockDraftModel::new(&draft, &target).expect("model");
            let noted = Noted { inner: BlockDrafter::new(model), notes: Rc::clone(&notes) };
            let mut options = options(16);
            options.shape = shapes()[shape].clone();
            generate(&target, Some(Box::new(noted)), &prompt(length, seed), &options);
            let notes = notes.borrow();
            assert!(notes.len() > 3);
            for (tokens, tree) in notes.iter().filter(|(_, tree)| !tree.is_empty()) {
                let path = first_path(tree);
                let block = block(&target, &draft, tokens);
                assert_eq!(path, block[..path.len()], "{} tokens", tokens.len());
            }
        }
    }
}
