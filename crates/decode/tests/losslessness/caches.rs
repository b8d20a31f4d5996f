//! Caches of keys, values and states: what is cut or copied goes on as if nothing had been after.

use longdraft_models::target_model::{Extension, KvCache, Tap, Taps, Target};

use crate::answers::prompt;
use crate::models::{RECURRENT, VOCABULARY, extend_tree, target};

/// The bits of the state of every layer.
fn states(cache: &KvCache) -> Vec<Option<(Vec<f32>, Vec<f32>)>> {
    let owned = |(window, matrix): (&[f32], Vec<f32>)| (window.to_vec(), matrix);
    (0..3).map(|layer| cache.state(layer).map(owned)).collect()
}

/// Reads on up to a length; final hidden states of what was read, `[T, H]`.
fn read(
    target: &Target,
    tokens: &[u32],
    cache: &mut KvCache,
    to: usize,
    is_text: bool,
) -> Vec<Vec<f32>> {
    let from = cache.len();
    let position_ids: Vec<u32> = (from as u32..to as u32).collect();
    let ids = &tokens[from..to];
    let tokens = Extension { ids, position_ids: &position_ids, parents: None, is_text, cache };
    let taps = Taps::of(&[Tap::FinalHidden]);
    let features = target.extend_each(&mut [tokens], &taps).expect("a pass");
    features.final_hidden().expect("tapped").to_vec2().expect("values")
}

#[test]
fn states_are_cut_where_there_is_one_and_go_on_as_if_nothing_had_been_after() {
    for (family, seed) in RECURRENT.into_iter().cycle().zip(40..46) {
        let target = target(family, 16, (2, 2), seed);
        let tokens: Vec<u32> = prompt(90, seed).iter().map(|token| token.0).collect();
        let taps = Taps::of(&[Tap::FinalHidden]);
        let extend = |cache: &mut KvCache, to: usize, is_text: bool| {
            read(&target, &tokens, cache, to, is_text).pop().expect("a row")
        };
        let plain = |length: usize| {
            let mut cache = target.new_cache().expect("cache");
            let last = (1..=length).map(|to| extend(&mut cache, to, false)).last();
            (states(&cache), last.expect("a row"))
        };
        let mut cache = target.new_cache().expect("cache");
        let reads = [20, 36, 50, 61, 62, 70];
        let last = reads.map(|to| extend(&mut cache, to, true));
        assert_eq!((states(&cache), last[5].clone()), plain(70), "{family}");
        // The last token of the last pass, which was text; then the last rows of a pass that was not.
        cache.truncate(69);
        assert_eq!((cache.len(), states(&cache)), (69, plain(69).0), "{family}");
        extend(&mut cache, 80, false);
        cache.truncate(75);
        assert_eq!((cache.len(), states(&cache)), (75, plain(75).0), "{family}");
        assert_eq!(extend(&mut cache, 81, false), plain(81).1, "{family}");
        // Further back: where states were put aside, of which a few are kept.
        let mut wanted = 68;
        let mut before = cache.len();
        while wanted > 0 {
            cache.truncate(wanted);
            assert!(cache.len() <= wanted && cache.len() < before, "{family}");
            before = cache.len();
            assert!(before == 0 || reads.contains(&(before + 1)), "{family} {before}");
            if before > 0 {
                assert_eq!(states(&cache), plain(before).0, "{family}");
                assert_eq!(extend(&mut cache, before + 5, false), plain(before + 5).1, "{family}");
            }
            wanted = before.saturating_sub(1);
        }
        cache.truncate(0);
        assert_eq!(extend(&mut cache, 9, false), plain(9).1, "{family}");
        // Nothing else can be taken back, and no pass follows a tree without a path.
        assert!(cache.compact(4, &[0]).is_err() && cache.compact(0, &[1, 2]).is_err());
        let tree = [None, Some(0), Some(0)];
        extend_tree(&target, (&[1, 2, 3], &[9, 10, 10]), &tree, &mut cache).expect("tree");
        assert!(target.extend(&[1], &[12], &mut cache, &taps).is_err());
        assert!(cache.compact(9, &[0, 1, 2]).is_err());
        cache.compact(9, &[0, 2]).expect("a path");
        target.extend(&[1], &[11], &mut cache, &taps).expect("goes on");
        assert!(target.extend(&[VOCABULARY as u32], &[12], &mut cache, &taps).is_err());
        target.extend(&[1], &[12], &mut cache, &taps).expect("goes on after a wrong token");
    }
}

/// A copy is what the other cache would be if it were cut, and the other one stays.
#[test]
fn a_copied_cache_is_a_cut_one() {
    for (seed, family) in (50..).zip(RECURRENT.into_iter().chain(["llama", "qwen3"])) {
        let target = target(family, 16, (2, 2), seed);
        let tokens: Vec<u32> = prompt(90, seed).iter().map(|token| token.0).collect();
        let read = |cache: &mut KvCache, to: usize, is_text: bool| {
            read(&target, &tokens, cache, to, is_text)
        };
        let whole = || {
            let mut cache = target.new_cache().expect("cache");
            for to in [20, 36, 50] {
                read(&mut cache, to, true);
            }
            read(&mut cache, 58, false);
            cache
        };
        let other = whole();
        let mut copy = target.new_cache().expect("cache");
        // What it held before is gone.
        read(&mut copy, 70, true);
        for length in [58, 57, 52, 49, 40, 30, 5, 0] {
            let mut cut = whole();
            cut.truncate(length);
            copy.copy_prefix(&other, length).expect("copied");
            assert_eq!((copy.len(), other.len()), (cut.len(), 58), "{family} {length}");
            assert_eq!(states(&copy), states(&cut), "{family} {length}");
            let to = cut.len() + 7;
            assert_eq!(read(&mut copy, to, false), read(&mut cut, to, false), "{family} {length}");
            assert_eq!(states(&other), states(&whole()), "{family} {length}");
        }
    }
}
