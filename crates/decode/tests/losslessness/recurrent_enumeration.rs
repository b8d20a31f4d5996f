//! The exact distribution of what is committed where the target is a real one with recurrent layers: its logits come
//! from passes over trees, and its states from what verification kept.

use std::cell::RefCell;
use std::collections::BTreeMap;

use longdraft_decode::grammar::SoFar;
use longdraft_decode::verifier::Verifier;
use longdraft_decode::{Origin, Sampling, Tree, VerifyRule};
use longdraft_models::target_model::{KvCache, Tap, Taps, Target, TargetOptions};
use longdraft_models::{TargetConfig, TargetTokenId};
use serde_json::json;

use crate::enumeration::{distribution_of, error};
use crate::models::extend_tree;

const WORDS: usize = 4;

fn toy(family: &str, seed: u64) -> Target {
    let config = json!({
        "model_type": family, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": WORDS,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "initializer_range": 0.7,
        "full_attention_interval": 2, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": false,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4,
        "linear_value_head_dim": 4, "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8
    });
    let config = TargetConfig::from_json(&config).expect("valid");
    Target::random(config, seed, &TargetOptions::default()).expect("target")
}

fn logits(
    target: &Target,
    ids: &[u32],
    parents: Option<&[Option<usize>]>,
    cache: &mut KvCache,
) -> Vec<Vec<f32>> {
    let first = cache.len() as u32;
    let mut positions: Vec<u32> = (first..first + ids.len() as u32).collect();
    let taps = Taps::of(&[Tap::FinalHidden]);
    let features = match parents {
        None => target.extend(ids, &positions, cache, &taps),
        Some(parents) => {
            for (row, parent) in parents.iter().enumerate() {
                positions[row] = parent.map_or(first, |parent| positions[parent] + 1);
            }
            extend_tree(target, (ids, &positions), parents, cache)
        }
    };
    let hidden = features.expect("a pass");
    let ends = target.hold_ends().expect("ends");
    ends.logits(hidden.final_hidden().expect("tapped"))
        .and_then(|l| Ok(l.to_vec2()?))
        .expect("logits")
}

/// A cache of all but the last token of a text, made by the rounds that committed it: chains and trees, of which
/// parts were taken back.
fn cache_of(target: &Target, text: &[u32]) -> KvCache {
    let mut cache = target.new_cache().expect("cache");
    let wanted = text.len() - 1;
    while cache.len() < wanted {
        let at = cache.len();
        let right = (wanted - at).min(2);
        // The right tokens are the second branch of a tree; strangers stand in the first.
        let mut ids = vec![text[at], 3, 3];
        let mut parents = vec![None, Some(0), Some(1)];
        let mut kept = vec![0];
        for token in &text[at + 1..at + right] {
            parents.push(Some(*kept.last().expect("a row")));
            kept.push(ids.len());
            ids.push(*token);
        }
        logits(target, &ids, Some(&parents), &mut cache);
        cache.compact(at, &kept).expect("a path");
    }
    cache
}

#[test]
fn rounds_over_a_recurrent_target_follow_its_distribution() {
    // Two children of the root, one of them with two of its own; and a chain.
    let trees: [&[(usize, u32)]; 3] =
        [&[(0, 1), (0, 2), (1, 0), (1, 3)], &[(0, 2), (1, 2)], &[(0, 0), (0, 1), (0, 2), (2, 1)]];
    for (seed, family) in ["qwen3_5_text", "lfm2", "qwen3_next"].into_iter().enumerate() {
        let target = toy(family, seed as u64 + 1);
        let sampling = Sampling::at(0.8);
        let plain = |text: &[u32]| -> Vec<f64> {
            let mut cache = target.new_cache().expect("cache");
            let rows = text.iter().map(|id| logits(&target, &[*id], None, &mut cache).pop());
            let last = rows.last().flatten().expect("a row");
            sampling.distribution(&last).expect("distribution")
        };
        for (shape, rule) in
            trees.into_iter().zip([VerifyRule::Match, VerifyRule::Ratio, VerifyRule::Match])
        {
            let known: RefCell<BTreeMap<Vec<u32>, Vec<Vec<f32>>>> = RefCell::default();
            let round = |text: &[u32]| {
                let mut tree = Tree::new(TargetTokenId(text[text.len() - 1]));
                for (parent, token) in shape {
                    tree.push(*parent, TargetTokenId(*token), 0.0, Origin::Draft);
                }
                let of_rows = known.borrow().get(text).cloned().unwrap_or_else(|| {
                    let mut cache = cache_of(&target, text);
                    let parents = tree.parents();
                    logits(&target, &tree.ids(), Some(&parents), &mut cache)
                });
                known.borrow_mut().insert(text.to_vec(), of_rows.clone());
                let verifier = Verifier { sampling: sampling.clone(), rule };
                let generated: Vec<TargetTokenId> =
                    text[1..].iter().map(|id| TargetTokenId(*id)).collect();
                distribution_of(|draws| {
                    let position = text.len() as u64;
                    let verdict = verifier.verify_after(
                        SoFar::of(&generated),
                        &tree,
                        &of_rows,
                        position,
                        draws,
                    );
                    let verdict = verdict.expect("verdict");
                    let path = verdict.path.iter().map(|row| tree.token(*row).0);
                    path.chain([verdict.next.0]).collect()
                })
            };
            let error = error(4, round, plain);
            assert!(error < 1e-12, "{family} {shape:?}: {error:e}");
        }
    }
}
