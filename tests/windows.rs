//! Caches of layers with a window over the reference cases: what is dropped changes nothing.

use longdraft_kernels::random::CounterRng;
use longdraft_models::target_model::{
    CacheType, Extension, KvCache, Tap, Taps, Target, TargetOptions,
};

use crate::support::shared;

/// Cases with windows or chunks.
const CASES: [&str; 14] = [
    "gemma2",
    "gemma3",
    "gemma3_old_keys",
    "gemma3_old_keys_gguf",
    "gemma4",
    "gemma4_moe",
    "gpt_oss",
    "gpt_oss_mxfp4_gguf",
    "llama4",
    "mistral_window",
    "mixtral_window",
    "olmo3",
    "phi3_window",
    "qwen2_window",
];

/// Many windows of 16 to 32 tokens, and several of the tiles that keys are dropped by.
const TEXT: usize = 1100;

type Rows = Vec<Vec<f32>>;

fn append(
    target: &Target,
    cache: &mut KvCache,
    (ids, position_ids): (&[u32], &[u32]),
    parents: Option<&[Option<usize>]>,
) -> Rows {
    let rows = Extension { ids, position_ids, parents, is_text: false, cache };
    let features = target.extend_each(&mut [rows], &Taps::of(&[Tap::FinalHidden]));
    let features = features.expect("a pass");
    features.final_hidden().expect("tapped").to_vec2().expect("values")
}

/// Pieces, trees and strangers that are taken back have the rows of one pass, which drops nothing.
fn check(name: &str, target: &Target, seed: u64) {
    let vocabulary = target.config().vocab_size as u64;
    let mut rng = CounterRng::new(seed, "text", &[]);
    let text: Vec<u32> = (0..TEXT).map(|_| rng.below(vocabulary) as u32).collect();
    let fresh = || {
        let mut cache = target.new_cache().expect("cache");
        target.prepare_cache(&mut cache, TEXT);
        cache
    };
    let positions = |from: usize, to: usize| (from as u32..to as u32).collect::<Vec<u32>>();
    let whole = append(target, &mut fresh(), (&text, &positions(0, TEXT)), None);
    let mut cache = fresh();
    while cache.len() + 8 < TEXT {
        let at = cache.len();
        let most = [4, 300][rng.below(2) as usize];
        let to = (at + 1 + rng.below(most) as usize).min(TEXT - 8);
        let rows = append(target, &mut cache, (&text[at..to], &positions(at, to)), None);
        assert!(rows == whole[at..to], "{name}: {at}..{to}");
        // The text goes on at nodes 0, 2 and 3; then strangers.
        let at = to;
        let stranger = (text[at + 1] + 1) % vocabulary as u32;
        let ids = [text[at], stranger, text[at + 1], text[at + 2], stranger];
        let places = [0, 1, 1, 2, 3].map(|depth| (at + depth) as u32);
        let parents = [None, Some(0), Some(0), Some(2), Some(3)];
        let rows = append(target, &mut cache, (&ids, &places), Some(&parents));
        for (node, depth) in [(0, 0), (2, 1), (3, 2)] {
            assert!(rows[node] == whole[at + depth], "{name}: node {node} at {at}");
        }
        let kept = 1 + rng.below(3) as usize;
        cache.compact(at, &[0, 2, 3][..kept]).expect("a path");
        let at = cache.len();
        append(target, &mut cache, (&[1, 2, 3], &positions(at, at + 3)), None);
        cache.compact(at, &[]).expect("taken back");
    }
    // Far in front of every window: read anew.
    cache.truncate(100);
    assert_eq!(cache.len(), 0, "{name}");
    let rows = append(target, &mut cache, (&text[..200], &positions(0, 200)), None);
    assert!(rows == whole[..200], "{name}");
}

#[test]
fn reference_cases_have_the_same_bits_with_caches_that_drop_tokens() {
    let Some(cases) = shared("golden/targets") else { return };
    for (seed, name) in (0..).zip(CASES) {
        let model = cases.join(name).join("target");
        for (cache, as_stored) in
            [(CacheType::F32, false), (CacheType::F16, true), (CacheType::Q8, true)]
        {
            let options = TargetOptions { cache, as_stored, ..TargetOptions::default() };
            match Target::open_path(&model, &options) {
                Ok(target) => check(name, &target, seed),
                // Heads that are no whole blocks.
                Err(error) => assert!(
                    cache == CacheType::Q8 && error.to_string().contains("whole blocks"),
                    "{name}: {error}"
                ),
            }
        }
    }
}
