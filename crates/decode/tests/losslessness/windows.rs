//! Caches of layers with a window hold the tokens that are seen again; nothing else changes.

use longdraft_decode::{DecodeOptions, DraftShape};
use longdraft_kernels::random::CounterRng;
use longdraft_models::target_model::{Extension, KvCache, PackedSequence, Tap, Taps, Target};

use crate::answers::{converse, generate, options, prompt};
use crate::models::{KINDS, Kind, VOCABULARY, drafter, shapes, target, with_drafts};

/// Families with windows or chunks.
const SLIDING: [&str; 12] = [
    "mistral_window",
    "ministral3_window",
    "mixtral_window",
    "qwen2_window",
    "qwen3_window",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "phi3_window",
    "gpt_oss",
    "smollm3",
    "llama4_text",
];

/// Tokens of the texts: many windows, and several tiles of keys, by which caches are cut.
const TEXT: usize = 900;

type Rows = Vec<Vec<f32>>;

/// A target, a text, and the final states of its tokens in one pass, which drops nothing.
struct Case {
    target: Target,
    text: Vec<u32>,
    whole: Rows,
}

impl Case {
    fn new(family: &str, seed: u64) -> Self {
        let target = target(family, 16, (2, 2), seed);
        let text: Vec<u32> = prompt(TEXT, seed).iter().map(|token| token.0).collect();
        let mut case = Self { target, text, whole: Vec::new() };
        let mut cache = case.cache();
        case.whole = case.read(&mut cache, TEXT);
        case
    }

    fn cache(&self) -> KvCache {
        let mut cache = self.target.new_cache().expect("cache");
        self.target.prepare_cache(&mut cache, TEXT);
        cache
    }

    /// Final states of rows that are appended.
    fn append(
        &self,
        cache: &mut KvCache,
        (ids, position_ids): (&[u32], &[u32]),
        parents: Option<&[Option<usize>]>,
    ) -> Rows {
        let taps = Taps::of(&[Tap::FinalHidden]);
        let rows = Extension { ids, position_ids, parents, is_text: false, cache };
        let features = self.target.extend_each(&mut [rows], &taps).expect("a pass");
        features.final_hidden().expect("tapped").to_vec2().expect("values")
    }

    /// Those of the text up to `to`.
    fn read(&self, cache: &mut KvCache, to: usize) -> Rows {
        let from = cache.len();
        let positions: Vec<u32> = (from as u32..to as u32).collect();
        self.append(cache, (&self.text[from..to], &positions), None)
    }

    /// Reads on and finds what the whole pass found.
    #[track_caller]
    fn check(&self, cache: &mut KvCache, to: usize) {
        let from = cache.len();
        assert_eq!(self.read(cache, to), self.whole[from..to], "{from}..{to}");
    }
}

#[test]
fn rows_have_the_bits_of_one_pass_over_the_whole_text() {
    for (seed, family) in (0..).zip(SLIDING.into_iter().cycle().take(24)) {
        let case = Case::new(family, seed);
        // Without any cache, too.
        let taps = Taps::of(&[Tap::FinalHidden]);
        let packed = case.target.forward(&PackedSequence::single(&case.text), &taps);
        let packed = packed.expect("a pass").final_hidden().expect("tapped").to_vec2::<f32>();
        assert_eq!(packed.expect("values"), case.whole, "{family}");
        let mut rng = CounterRng::new(seed, "pieces", &[]);
        let mut cache = case.cache();
        while cache.len() < TEXT {
            let most = [1, 7, 64, 512][rng.below(4) as usize];
            let to = (cache.len() + 1 + rng.below(most) as usize).min(TEXT);
            case.check(&mut cache, to);
        }
    }
}

#[test]
fn nodes_of_trees_have_the_bits_of_one_pass_and_rejected_ones_leave_no_trace() {
    for (seed, family) in (0..).zip(SLIDING.into_iter().cycle().take(24)) {
        let case = Case::new(family, seed);
        let mut rng = CounterRng::new(seed, "trees", &[]);
        let mut cache = case.cache();
        case.check(&mut cache, 240);
        while cache.len() + 40 < TEXT {
            let first = cache.len();
            // Node 0 is the text's next token; some others go on with the text, the rest are strangers.
            let (mut ids, mut positions, mut parents) = (Vec::new(), Vec::new(), Vec::new());
            let mut path: Vec<usize> = Vec::new();
            for node in 0..=rng.below(29) as usize {
                let goes_on = node == 0 || rng.below(3) == 0;
                let parent = if goes_on {
                    path.last().copied()
                } else {
                    Some(rng.below(node as u64) as usize)
                };
                let depth =
                    parent.map_or(0, |parent: usize| positions[parent] as usize + 1 - first);
                let stranger = (case.text[first + depth] + 1) % VOCABULARY as u32;
                ids.push(if goes_on { case.text[first + depth] } else { stranger });
                positions.push((first + depth) as u32);
                parents.push(parent);
                if goes_on {
                    path.push(node);
                }
            }
            let rows = case.append(&mut cache, (&ids, &positions), Some(&parents));
            for (depth, node) in path.iter().enumerate() {
                assert_eq!(rows[*node], case.whole[first + depth], "{family}: {node} at {first}");
            }
            let kept = 1 + rng.below(path.len() as u64) as usize;
            cache.compact(first, &path[..kept]).expect("a path");
            assert_eq!(cache.len(), first + kept);
            // And a chain of strangers, all of which are taken back.
            let (at, strangers) = (cache.len(), [1, 2, 3]);
            let positions: Vec<u32> = (at as u32..at as u32 + 3).collect();
            case.append(&mut cache, (&strangers, &positions), None);
            cache.compact(at, &[]).expect("nothing is kept");
            let to = cache.len() + 1 + rng.below(20) as usize;
            case.check(&mut cache, to);
        }
    }
}

#[test]
fn a_cache_is_cut_where_it_holds_what_is_seen_and_else_read_anew() {
    for (seed, family) in (0..).zip(SLIDING.into_iter().cycle().take(24)) {
        let case = Case::new(family, seed);
        let mut cache = case.cache();
        let (mut cut, mut anew) = (0, 0);
        for wanted in [890, 880, 640, 860, 520, 300, 40, 700, 5, 0] {
            for to in (cache.len()..TEXT).step_by(50).skip(1).chain([TEXT]) {
                case.check(&mut cache, to);
            }
            let told = cache.reusable(wanted);
            cache.truncate(wanted);
            assert_eq!(cache.len(), told, "{family} {wanted}");
            assert!([0, wanted].contains(&told), "{family} {wanted}: {told}");
            (cut, anew) = (cut + usize::from(told > 0), anew + usize::from(told == 0));
            let to = cache.len() + 9;
            case.check(&mut cache, to);
        }
        assert!(cut >= 2 && anew >= 3, "{family}: {cut} cut, {anew} read anew");
        for to in (50..=TEXT).step_by(50) {
            case.check(&mut cache, to);
        }
        let refused = cache.compact(10, &[0]).expect_err("dropped");
        assert!(refused.to_string().contains("layers with a window hold tokens from"), "{refused}");
        assert_eq!(cache.len(), TEXT);
    }
}

/// Mistral's last layer has a window: a draft that reads it has all of it.
#[test]
fn the_last_layer_is_held_whole_for_drafts_that_read_it() {
    for family in ["mistral_window", "gpt_oss", "olmo3", "qwen3_window"] {
        let case = Case::new(family, 2);
        let read = |cache: &mut KvCache| {
            for to in (60..=TEXT).step_by(60) {
                case.check(cache, to);
            }
        };
        let (mut held, mut cache) = (case.cache(), case.cache());
        held.keep_last_layer().expect("empty");
        read(&mut held);
        read(&mut cache);
        assert!(cache.last_layer().is_err() && cache.keep_last_layer().is_err(), "{family}");
        let mut whole = case.cache();
        case.read(&mut whole, TEXT);
        let values = |cache: &KvCache| {
            let (k, v) = cache.last_layer().expect("held");
            [k, v].map(|t| t.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values"))
        };
        assert_eq!(values(&held), values(&whole), "{family}");
    }
}

#[test]
fn a_copied_prefix_goes_on_where_the_window_holds_what_is_seen() {
    for (seed, family) in (0..).zip(SLIDING) {
        let case = Case::new(family, seed);
        let (mut other, mut copy) = (case.cache(), case.cache());
        // It replaces what was held before.
        case.check(&mut copy, 300);
        for to in (50..=850).step_by(50) {
            case.check(&mut other, to);
        }
        for wanted in [850, 849, 700, 40] {
            let held = other.reusable(wanted);
            assert!(wanted < 849 || held == wanted, "{family} {wanted}: {held}");
            copy.copy_prefix(&other, wanted).expect("copied");
            assert_eq!((copy.len(), other.len()), (held, 850), "{family} {wanted}");
            case.check(&mut copy, held + 30);
        }
        case.check(&mut other, TEXT);
        // Not between caches that hold other things.
        let (mut held, mut cache) = (case.cache(), case.cache());
        held.keep_last_layer().expect("empty");
        case.check(&mut held, 30);
        let is_like = cache.is_like(&held);
        assert_eq!(cache.copy_prefix(&held, 20).is_ok(), is_like, "{family}");
        assert_eq!(cache.len(), if is_like { 20 } else { 0 }, "{family}");
        case.check(&mut cache, 30);
    }
}

#[test]
fn drafts_of_every_kind_are_lossless_over_texts_that_were_dropped() {
    let kinds =
        KINDS.into_iter().zip(SLIDING.into_iter().cycle()).zip(shapes().into_iter().cycle());
    for (seed, ((kind, family), shape)) in (0..).zip(kinds) {
        let (target, drafts) = with_drafts(family, 32, (2, 2), seed);
        let mut options = options(60);
        options.shape = shape;
        let text = prompt(700, seed);
        let plain = generate(&target, None, &text, &options);
        // Plain output is what the whole text says.
        let mut all: Vec<u32> = text.iter().chain(&plain.tokens).map(|token| token.0).collect();
        all.pop();
        let taps = Taps::of(&[Tap::FinalHidden]);
        let features = target.forward(&PackedSequence::single(&all), &taps).expect("a pass");
        let ends = target.hold_ends().expect("ends");
        let logits = ends.logits(features.final_hidden().expect("tapped")).expect("logits");
        let best = logits.argmax(1).and_then(|best| best.to_vec1::<u32>()).expect("ids");
        let tokens: Vec<u32> = plain.tokens.iter().map(|token| token.0).collect();
        assert_eq!(tokens, best[text.len() - 1..], "{family}");
        let drafted = generate(&target, Some(drafter(kind, &target, &drafts)), &text, &options);
        assert_eq!(drafted.tokens, plain.tokens, "{family} {kind:?}");
    }
}

#[test]
fn conversations_go_on_or_are_read_anew_as_their_windows_allow() {
    let kinds = [Kind::Glide, Kind::Merged, Kind::Eagle3, Kind::Dflash, Kind::Lookup];
    for (seed, family) in (2..).zip(SLIDING) {
        let kind = kinds[seed as usize % kinds.len()];
        let (target, drafts) = with_drafts(family, 32, (2, 2), seed);
        let shape = DraftShape::Static { widths: vec![3, 4] };
        let options = DecodeOptions { shape, ..options(30) };
        let (what, drafter) = (format!("{family} {kind:?}"), drafter(kind, &target, &drafts));
        // What is edited lies where windows do not reach any more.
        let reused = converse(&what, (&target, drafter), prompt(700, seed), options, (5, Some(2)));
        assert!(reused[1] > 700 && reused[2] > reused[1] && reused[4] > 800, "{family} {reused:?}");
        assert_eq!((reused[0], reused[3]), (0, 0), "{family}");
    }
}
