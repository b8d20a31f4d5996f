//! What a block draft computes while decoding is what it computes in training.

use std::sync::Arc;

use candle_core::{D, Device, Tensor};
use longdraft_decode::drafter::{BlockDraftModel, ModelDrafter, ReducedHead};
use longdraft_decode::{Sampling, SpeculativeDecoder, Tree, VerifyRule};
use longdraft_kernels::top_k::row_top_k;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::block::{
    Anchor, BlockConfig, BlockDraft, Chain, ChainSizes, ConvolutionSizes, SelectorSizes, Visible,
};
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_models::target_model::{PackedSequence, Taps, Target};

use crate::answers::{decode, generate, options, prompt};
use crate::models::{
    VOCABULARY, dflash, dflash2, dspark, randomised, shapes, target, with_own_head,
};
use crate::noted::{Noted, Notes, first_path};

/// Most likely tokens of the block at the last of `tokens`, as training computes them from the
/// features of the whole text, and the chance of the path to each, if a head tells it. Only `kept`
/// tokens are proposed.
fn block(
    target: &Target,
    draft: &BlockDraft,
    tokens: &[TargetTokenId],
    kept: &[TargetTokenId],
) -> Vec<(TargetTokenId, Option<f64>)> {
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
    let allowed = (0..VOCABULARY as u32).map(|id| kept.contains(&TargetTokenId(id)));
    let mask = allowed.map(|is_kept| if is_kept { 0.0_f32 } else { f32::NEG_INFINITY });
    let mask = Tensor::from_vec(mask.collect(), VOCABULARY, &Device::Cpu).expect("mask");
    let ends = target.hold_ends().expect("ends");
    let logits = ends.logits(&states).and_then(|z| Ok(z.broadcast_add(&mask)?)).expect("logits");
    if let Some(chain) = draft.chain() {
        return chained(chain, &states, &logits, ids[root]);
    }
    let Some(selector) = draft.selector() else {
        let best = logits.argmax(D::Minus1).expect("best").to_vec1::<u32>().expect("tokens");
        return best[1..].iter().map(|token| (TargetTokenId(*token), None)).collect();
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
        walk.push((TargetTokenId(chosen), None));
    }
    walk
}

/// The walk of a chain from a token over the slots of a block.
fn chained(
    chain: Chain<'_>,
    states: &Tensor,
    logits: &Tensor,
    root: u32,
) -> Vec<(TargetTokenId, Option<f64>)> {
    let (mut state, mut token, mut chance) = (None, root, 1.0);
    let walk = (0..states.dim(0).expect("slots")).map(|slot| {
        let embedded = chain.embed(&[token]).expect("embedded").expect("a rank");
        let of_slot = states.narrow(0, slot, 1).expect("state");
        let step = chain.step(state.as_ref(), &of_slot, &embedded).expect("step");
        let added = chain.logits(&step.mixed).expect("added").detach();
        let sum = (logits.narrow(0, slot, 1).expect("logits") + added).expect("sum");
        let confidence = chain.confidence(&of_slot, Some(&embedded)).expect("confidence");
        let confidence = confidence.expect("a head").to_vec1::<f32>().expect("confidence")[0];
        chance /= 1.0 + (-f64::from(confidence)).exp();
        token = sum.argmax(D::Minus1).expect("best").to_vec1::<u32>().expect("tokens")[0];
        state = step.state;
        (TargetTokenId(token), Some(chance))
    });
    walk.collect()
}

/// A reduced head, and what it proposes.
fn reduced(target: &Target) -> (Arc<ReducedHead>, Vec<TargetTokenId>) {
    let kept: Vec<TargetTokenId> = (0..20).map(|i| TargetTokenId(i * 3)).collect();
    let map = VocabularyMap::new(kept.clone(), VOCABULARY).expect("map");
    (Arc::new(ReducedHead::new(target, map).expect("head")), kept)
}

#[test]
fn every_round_proposes_the_block_that_training_predicts() {
    for (seed, length, shape) in
        [(1, 1, 2), (2, 9, 2), (3, 40, 1), (4, 300, 1), (5, 7, 1), (6, 9, 3)]
    {
        let target = target("qwen3", 16, (2, 2), seed);
        let (head, few) = reduced(&target);
        let all: Vec<TargetTokenId> = (0..VOCABULARY as u32).map(TargetTokenId).collect();
        for draft in [dflash(&target, seed), dflash2(&target, seed), dspark(&target, seed)] {
            // The draft's own head proposes what the same rows of the target's do.
            let own = draft.selector().is_none();
            let own = own.then(|| with_own_head(&draft, &target, head.vocabulary()));
            for (kept, own) in [(&all, None), (&few, None), (&few, own.as_ref())] {
                let notes = Notes::default();
                let mut model =
                    BlockDraftModel::new(own.unwrap_or(&draft), &target).expect("model");
                if kept.len() == few.len() && own.is_none() {
                    model = model.with_head(Arc::clone(&head)).expect("head");
                }
                let noted = Noted::new(Box::new(ModelDrafter::new(model)), &notes);
                let mut options = options(16);
                options.shape = shapes()[shape].clone();
                generate(&target, Some(Box::new(noted)), &prompt(length, seed), &options);
                let notes = notes.borrow();
                assert!(notes.proposed.len() > 3);
                for (tokens, tree) in notes.proposed.iter().filter(|(_, tree)| !tree.is_empty()) {
                    let path = first_path(tree);
                    let block = block(&target, &draft, tokens, kept);
                    for ((token, found), (wanted, chance)) in path.iter().zip(&block) {
                        assert_eq!(token, wanted, "{} tokens", tokens.len());
                        let found = found.expect("a chance");
                        assert!(chance.is_none_or(|chance| (chance - found).abs() < 1e-6));
                    }
                }
            }
        }
    }
}

#[test]
fn a_fresh_selector_proposes_what_the_plain_draft_does() {
    let target = target("qwen3", 16, (2, 2), 8);
    let plain = dflash(&target, 8);
    let config = BlockConfig {
        convolution: Some(ConvolutionSizes { kernel_size: 2, group_size: 8 }),
        selector: Some(SelectorSizes { rank: 4, top_k: 3 }),
        ..plain.config().clone()
    };
    let table = target.hold_ends().and_then(|ends| ends.embedding()).expect("table");
    // Tensors of one name begin alike.
    let wide = BlockDraft::initialise(&config, &table, 8).expect("a draft");
    let [of_plain, of_wide] = [&plain, &wide].map(|draft| {
        let notes = Notes::default();
        let model = BlockDraftModel::new(draft, &target).expect("model");
        let noted = Noted::new(Box::new(ModelDrafter::new(model)), &notes);
        let mut options = options(16);
        options.shape = shapes()[1].clone();
        generate(&target, Some(Box::new(noted)), &prompt(9, 8), &options);
        let tokens =
            |(_, tree): &(_, Tree)| first_path(tree).into_iter().map(|(token, _)| token).collect();
        let proposed: Vec<Vec<TargetTokenId>> =
            notes.borrow().proposed.iter().map(tokens).collect();
        proposed
    });
    assert!(of_plain.iter().any(|proposed| proposed.len() > 1));
    assert_eq!(of_plain, of_wide);
}

#[test]
fn a_kept_context_proposes_what_a_fresh_one_does() {
    let target = target("qwen3", 16, (2, 2), 7);
    let (head, _) = reduced(&target);
    for draft in [dflash(&target, 6), dflash2(&target, 5), dspark(&target, 5)] {
        let noted = |notes: &Notes| {
            let model = BlockDraftModel::new(&draft, &target).expect("model");
            let model = model.with_head(Arc::clone(&head)).expect("head");
            Box::new(Noted::new(Box::new(ModelDrafter::new(model)), notes))
        };
        let mut options = options(20);
        options.reuse_prefix = true;
        options.shape = shapes()[3].clone();
        let kept_notes = Notes::default();
        let mut decoder = SpeculativeDecoder::new(&target, Some(noted(&kept_notes)));
        let mut text = prompt(20, 7);
        for turn in 0..4 {
            kept_notes.borrow_mut().proposed.clear();
            let kept = decode(&mut decoder, &text, &options);
            assert_eq!(kept.reused_tokens > 0, turn > 0);
            let fresh_notes = Notes::default();
            let fresh = generate(&target, Some(noted(&fresh_notes)), &text, &options);
            assert_eq!(kept.tokens, fresh.tokens, "turn {turn}");
            let (kept_notes, fresh_notes) = (kept_notes.borrow(), fresh_notes.borrow());
            assert_eq!(kept_notes.proposed, fresh_notes.proposed, "turn {turn}");
            text.extend(&kept.tokens);
            text.extend(prompt(5, turn));
            if turn == 1 {
                // History was edited in the middle: later keys are of no use.
                text[15] = TargetTokenId((text[15].0 + 1) % VOCABULARY as u32);
            } else if turn == 2 {
                text.truncate(12);
            }
        }
    }
}

#[test]
fn a_threshold_that_no_confidence_reaches_leaves_plain_steps() {
    for seed in 0..3 {
        let target = target("llama", 16, (2, 2), seed);
        let draft = dspark(&target, seed);
        for (temperature, shape) in [(0.0, 2), (0.0, 5), (0.9, 2), (0.9, 8)] {
            let mut options = options(24);
            options.sampling = Sampling::at(temperature);
            options.shape = shapes()[shape].clone();
            let plain = generate(&target, None, &prompt(9, seed), &options);
            options.confidence_threshold = 1.01;
            let model = BlockDraftModel::new(&draft, &target).expect("model");
            let drafter = Box::new(ModelDrafter::new(model));
            let cut = generate(&target, Some(drafter), &prompt(9, seed), &options);
            assert_eq!(cut.tokens, plain.tokens);
            let metrics = cut.metrics;
            assert_eq!((metrics.drafted, metrics.rounds), (0, 23));
            assert_eq!(metrics.plain_rounds, metrics.rounds);
        }
    }
}

#[test]
fn a_threshold_cuts_proposals_and_changes_no_token() {
    for seed in 0..3 {
        let target = target("llama", 16, (2, 2), seed);
        // Also of a head that reads no token, beside a chain or alone.
        let alone = |rank| {
            let mut config = dspark(&target, seed).config().clone();
            let confidence = Some(false);
            config.chain = config.chain.map(|chain| ChainSizes { rank, confidence, ..chain });
            randomised(&config, &target, seed)
        };
        for draft in [dspark(&target, seed), alone(4), alone(0)] {
            for shape in shapes() {
                let mut options = options(24);
                options.rule = VerifyRule::Match;
                options.shape = shape.clone();
                let plain = generate(&target, None, &prompt(9, seed), &options);
                let nodes = [0.0, 0.4, 0.6].map(|threshold| {
                    options.confidence_threshold = threshold;
                    let model = BlockDraftModel::new(&draft, &target).expect("model");
                    let drafter = Box::new(ModelDrafter::new(model));
                    let cut = generate(&target, Some(drafter), &prompt(9, seed), &options);
                    assert_eq!(cut.tokens, plain.tokens, "{shape:?}");
                    cut.metrics.nodes as f64 / cut.metrics.rounds as f64
                });
                assert!(nodes[0] > nodes[2], "{shape:?}: {nodes:?}");
            }
        }
    }
}
