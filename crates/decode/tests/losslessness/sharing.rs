//! Prompts that begin alike at several places: what one has read the others copy, and nothing else changes.

use std::collections::BTreeMap;

use longdraft_decode::drafter::{DraftContext, Drafter, Plan};
use longdraft_decode::{BatchEngine, DecodeOptions, Generation, Result, Tree};
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{CacheType, Target, TargetOptions};

use crate::answers::{generate, options, prompt};
use crate::batch::places;
use crate::engine::{finish, goes_on};
use crate::models::{Drafts, KINDS, Kind, RECURRENT, drafter, target, target_with, with_drafts};
use crate::noted::{Noted, Notes, Seen};

/// Tokens that prompts begin with alike: more than a round reads beside others.
const SYSTEM: usize = 200;

/// Ids and parents of a tree.
type Layout = (Vec<u32>, Vec<Option<usize>>);

/// Layouts by the text that they were proposed after.
type Proposed = BTreeMap<Vec<TargetTokenId>, Layout>;

fn layout((text, tree): (Vec<TargetTokenId>, Tree)) -> (Vec<TargetTokenId>, Layout) {
    (text, (tree.ids(), tree.parents()))
}

/// A request, the round before which it comes, and that before which its client goes, if it does.
#[derive(Clone)]
struct Arrival {
    at: usize,
    leaves: Option<usize>,
    prompt: Vec<TargetTokenId>,
    new_tokens: usize,
}

fn comes(at: usize, prompt: &[TargetTokenId], new_tokens: usize) -> Arrival {
    Arrival { at, leaves: None, prompt: prompt.to_vec(), new_tokens }
}

/// A prompt of `own` tokens after those that all begin with.
fn beginning(system: usize, own: usize, seed: u64) -> Vec<TargetTokenId> {
    [prompt(system, 100), prompt(own, seed)].concat()
}

/// Tokens that two prompts begin with alike.
fn alike(a: &[TargetTokenId], b: &[TargetTokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Targets and drafts of a run, and how many places it has.
#[derive(Clone, Copy)]
struct Setting<'a> {
    target: &'a Target,
    drafts: &'a Drafts,
    kind: Kind,
    places: usize,
}

impl Setting<'_> {
    /// What came of the requests, and what was seen.
    fn run(self, arrivals: &[Arrival], reuse_prefix: bool) -> (BTreeMap<usize, Generation>, Seen) {
        let Self { target, drafts, kind, places } = self;
        let notes = Notes::default();
        let noted = |_| -> Option<Box<dyn Drafter + '_>> {
            Some(Box::new(Noted::new(drafter(kind, target, drafts), &notes)))
        };
        let mut engine = BatchEngine::new(target, (0..places).map(noted).collect());
        let mut ended = BTreeMap::new();
        let mut round = 0;
        while ended.len() < arrivals.len() {
            for (key, arrival) in arrivals.iter().enumerate() {
                if arrival.leaves == Some(round) {
                    ended.insert(key, engine.leave(key).expect("it runs"));
                }
                if arrival.at == round {
                    let options = DecodeOptions { reuse_prefix, ..options(arrival.new_tokens) };
                    engine.join(key, &arrival.prompt, &options).expect("joined");
                }
            }
            for (key, generation) in engine.round(&mut goes_on).expect("round") {
                ended.insert(key, generation.expect("generation"));
            }
            round += 1;
        }
        drop(engine);
        (ended, notes.take())
    }

    /// Finds the answers and proposals of each request alone, and that what was not read is what was shared; tokens of
    /// that, by request.
    #[track_caller]
    fn check(self, arrivals: &[Arrival]) -> Vec<usize> {
        let ((shared, seen), (apart, all)) = (self.run(arrivals, true), self.run(arrivals, false));
        let mut proposed = Proposed::new();
        for (key, arrival) in arrivals.iter().enumerate() {
            let alone = [Arrival { at: 0, leaves: None, ..arrival.clone() }];
            let (alone, noted) = Setting { places: 1, ..self }.run(&alone, false);
            proposed.extend(noted.proposed.into_iter().map(layout));
            for found in [&shared[&key].tokens, &apart[&key].tokens] {
                let is_right = match arrival.leaves {
                    Some(_) => alone[&0].tokens.starts_with(found),
                    None => *found == alone[&0].tokens,
                };
                assert!(is_right, "{:?} {key}", self.kind);
            }
        }
        for (text, tree) in &seen.proposed.into_iter().map(layout).collect::<Proposed>() {
            assert_eq!(proposed.get(text), Some(tree), "{:?} {}", self.kind, text.len());
        }
        let reused: Vec<usize> = shared.values().map(|found| found.reused_tokens).collect();
        // How much one that leaves has read until then depends on who reads beside it.
        if arrivals.iter().all(|arrival| arrival.leaves.is_none()) {
            assert_eq!(seen.rows + reused.iter().sum::<usize>(), all.rows, "{:?}", self.kind);
        }
        reused
    }
}

/// Donors that decode, and that have come further since.
#[test]
fn a_prefix_at_a_place_that_is_busy_is_copied() {
    let families = ["llama", "qwen3", "mistral_window", "phi3", "granite"];
    for (seed, (kind, family)) in (1..).zip(KINDS.into_iter().zip(families.into_iter().cycle())) {
        let (target, drafts) = with_drafts(family, 32, (2, 2), seed);
        let [a, b, c] = [20, 33, 27].map(|own| beginning(SYSTEM, own, own as u64));
        let setting = Setting { target: &target, drafts: &drafts, kind, places: 3 };
        let reused = setting.check(&[comes(0, &a, 60), comes(4, &b, 12), comes(12, &c, 9)]);
        let most = alike(&a, &c).max(alike(&b, &c));
        assert_eq!(reused, [0, alike(&a, &b) - 1, most - 1], "{family} {kind:?}");
    }
}

/// Every cache can be cut where the one that reads stops for those that wait.
#[test]
fn of_prompts_that_come_at_once_one_reads_what_they_share() {
    let families = ["llama", "qwen3_next", "mistral_window", "lfm2", "gemma3_text", "qwen3_5_text"];
    let kinds = [Kind::Mtp, Kind::Eagle3, Kind::Glide, Kind::Dflash, Kind::Lookup, Kind::Dspark];
    for (seed, (family, kind)) in (1..).zip(families.into_iter().zip(kinds)) {
        let (target, drafts) = with_drafts(family, 32, (2, 2), seed);
        let setting = Setting { target: &target, drafts: &drafts, kind, places: 4 };
        // Read at once, and in two pieces.
        for system in [SYSTEM, 600] {
            let own = [20, 45, 33, 1];
            let arrivals = own.map(|own| comes(0, &beginning(system, own, own as u64), 8));
            let reused = setting.check(&arrivals);
            assert_eq!(reused[0], 0);
            let is_shared = |count: &usize| (system - 1..system + 20).contains(count);
            assert!(reused[1..].iter().all(is_shared), "{family} {kind:?} {reused:?}");
        }
        // Answers to one prompt.
        let same = beginning(SYSTEM, 20, 1);
        let arrivals = [comes(0, &same, 8), comes(0, &same, 8)];
        assert_eq!(setting.check(&arrivals), [0, same.len() - 1], "{family} {kind:?}");
        // What little they share is not waited for.
        let arrivals = [20, 45].map(|own| comes(0, &beginning(40, own, own as u64), 8));
        assert_eq!(setting.check(&arrivals), [0, 0], "{family} {kind:?}");
    }
}

/// The one that reads goes on for many rounds, in which it drops states and rows of windows.
#[test]
fn what_is_shared_is_taken_before_the_one_that_reads_has_left_it() {
    for (family, kind) in [("qwen3_next", Kind::Mtp), ("gemma3_text", Kind::Glide)] {
        let (target, drafts) = with_drafts(family, 32, (2, 2), 6);
        let setting = Setting { target: &target, drafts: &drafts, kind, places: 3 };
        let [a, b] = [1100, 30].map(|own| beginning(SYSTEM, own, own as u64));
        let shared = SYSTEM - 1..SYSTEM + 20;
        let reused = setting.check(&[comes(0, &a, 8), comes(0, &b, 8)]);
        assert!(shared.contains(&reused[1]), "{family} {kind:?} {reused:?}");
        // Beside an answer a round reads 64 tokens, and what is left is not waited for if it is less.
        let other = prompt(20, 12);
        let reused = setting.check(&[comes(0, &other, 60), comes(3, &a, 8), comes(3, &b, 8)]);
        let shared = SYSTEM - 64..SYSTEM + 20;
        assert!(shared.contains(&reused[2]), "{family} {kind:?} {reused:?}");
    }
}

#[test]
fn a_place_that_is_free_keeps_its_text_when_another_one_is_empty() {
    let (target, drafts) = with_drafts("llama", 16, (2, 2), 3);
    for kind in [Kind::Glide, Kind::Eagle3, Kind::MergedDflash, Kind::Mtp] {
        let setting = Setting { target: &target, drafts: &drafts, kind, places: 2 };
        let [a, b] = [100, 30].map(|own| beginning(SYSTEM, own, own as u64));
        let answer = generate(&target, None, &a, &options(8)).tokens;
        let more = [a.clone(), answer, prompt(15, 9)].concat();
        let reused = setting.check(&[comes(0, &a, 8), comes(30, &b, 8), comes(60, &more, 8)]);
        assert_eq!(reused[..2], [0, alike(&a, &b) - 1], "{kind:?}");
        assert!(reused[2] > a.len(), "{kind:?} {reused:?}");
        // Where no place is empty, the one goes that was used longest ago: not the conversation's.
        let other = prompt(150, 11);
        let last = [more.clone(), prompt(9, 12)].concat();
        let before = [comes(0, &a, 8), comes(30, &b, 8), comes(60, &more, 8)];
        let after = [comes(90, &other, 8), comes(120, &last, 8)];
        let reused = setting.check(&[&before[..], &after].concat());
        assert!(reused[4] >= more.len() - 1, "{kind:?} {reused:?}");
    }
}

#[test]
fn who_goes_leaves_what_was_read_to_those_that_wait() {
    for (family, kind) in [
        ("llama", Kind::Glide),
        ("llama", Kind::Eagle3),
        ("qwen3_next", Kind::Dflash),
        ("gemma3_text", Kind::Dspark),
    ] {
        let (target, drafts) = with_drafts(family, 32, (2, 2), 2);
        let setting = Setting { target: &target, drafts: &drafts, kind, places: 2 };
        // In the middle of what the other one waits for: after a round of 512 tokens.
        let [a, b] = [60, 30].map(|own| beginning(700, own, own as u64));
        let leaves = Arrival { leaves: Some(1), ..comes(0, &a, 8) };
        assert_eq!(setting.check(&[leaves, comes(0, &b, 8)]), [0, 511], "{family} {kind:?}");
        // And when the other one has what it needs.
        let [a, b] = [20, 30].map(|own| beginning(SYSTEM, own, own as u64));
        let leaves = Arrival { leaves: Some(6), ..comes(0, &a, 60) };
        let reused = setting.check(&[leaves, comes(0, &b, 20)]);
        assert!(reused[1] >= SYSTEM - 1, "{family} {kind:?} {reused:?}");
    }
}

#[test]
fn what_a_window_has_dropped_is_read_again() {
    for (family, kind) in [
        ("mistral_window", Kind::Glide),
        ("gemma3_text", Kind::Eagle3),
        ("gpt_oss", Kind::Dflash),
        ("llama4_text", Kind::Lookup),
        ("llama", Kind::Glide),
    ] {
        let (target, drafts) = with_drafts(family, 32, (2, 2), 3);
        let setting = Setting { target: &target, drafts: &drafts, kind, places: 2 };
        let [a, b] = [500, 30].map(|own| beginning(SYSTEM, own, own as u64));
        let shared = alike(&a, &b) - 1;
        let late = if family == "llama" { shared } else { 0 };
        let reused = setting.check(&[comes(0, &a, 40), comes(4, &b, 9)]);
        assert_eq!(reused, [0, late], "{family} {kind:?}");
        let reused = setting.check(&[comes(0, &a, 40), comes(0, &b, 9)]);
        assert_eq!(reused, [0, shared], "{family} {kind:?}");
    }
}

#[test]
fn a_state_is_taken_over_where_there_is_one() {
    for (seed, family) in (1..).zip(RECURRENT) {
        let kind = [Kind::Eagle3, Kind::Glide, Kind::Lookup, Kind::Dflash][seed as usize % 4];
        let (target, drafts) = with_drafts(family, 16, (2, 2), seed);
        let setting = Setting { target: &target, drafts: &drafts, kind, places: 3 };
        // The first prompt is read at once, the second one beside an answer, 64 tokens at a time.
        let [a, b, c] = [20, 33, 27].map(|own| beginning(SYSTEM, own, own as u64));
        let reused = setting.check(&[comes(0, &a, 90), comes(2, &b, 20), comes(10, &c, 9)]);
        assert_eq!(reused, [0, 0, 191], "{family} {kind:?}");
    }
}

#[test]
fn caches_of_every_type_are_copied() {
    for (kind, cache) in [Kind::Glide, Kind::Dflash, Kind::Eagle3, Kind::Mtp]
        .into_iter()
        .flat_map(|kind| [CacheType::F32, CacheType::F16, CacheType::Q8].map(|cache| (kind, cache)))
    {
        let options = TargetOptions { cache, ..TargetOptions::default() };
        let target = target_with("llama", 32, (2, 2), 5, &options);
        let drafts = Drafts::new(&target, 5);
        let setting = Setting { target: &target, drafts: &drafts, kind, places: 2 };
        let [a, b] = [20, 30].map(|own| beginning(SYSTEM, own, own as u64));
        let reused = setting.check(&[comes(0, &a, 40), comes(5, &b, 20)]);
        assert_eq!(reused, [0, alike(&a, &b) - 1], "{kind:?} {cache:?}");
    }
}

/// A draft goes on from its own rows, and one that has none from the target's alone.
#[test]
fn rows_of_another_draft_are_not_taken_over() {
    let target = target("llama", 16, (2, 2), 4);
    let (old, new) = (Drafts::new(&target, 4), Drafts::new(&target, 7));
    let reusing = |count| DecodeOptions { reuse_prefix: true, ..options(count) };
    let [a, b] = [20, 30].map(|own| beginning(SYSTEM, own, own as u64));
    let shared = alike(&a, &b) - 1;
    for (before, after, reused) in [
        (Kind::Eagle3, Kind::Eagle3, 0),
        (Kind::Dflash, Kind::Dflash, 0),
        (Kind::Mtp, Kind::MergedMtp, 0),
        (Kind::Lookup, Kind::Eagle3, 0),
        (Kind::Eagle3, Kind::Glide, shared),
        (Kind::Glide, Kind::Lookup, shared),
    ] {
        let mut engine = BatchEngine::new(&target, places(Some(before), 2, &target, &old));
        engine.join(0, &a, &reusing(60)).expect("joined");
        for _ in 0..3 {
            assert!(engine.round(&mut goes_on).expect("round").is_empty());
        }
        engine.replace_drafters(places(Some(after), 2, &target, &new)).expect("replaced");
        engine.join(1, &b, &reusing(20)).expect("joined");
        let ended = finish(&mut engine);
        let alone = generate(&target, None, &b, &options(20));
        assert_eq!(ended[&1].tokens, alone.tokens, "{before:?} {after:?}");
        assert_eq!(ended[&1].reused_tokens, reused, "{before:?} {after:?}");
    }
}

/// Says nothing of what it holds.
struct Silent;

impl Drafter for Silent {
    fn propose(&mut self, context: DraftContext<'_>, _: &mut Plan<'_>) -> Result<Tree> {
        Ok(Tree::new(context.tokens[context.tokens.len() - 1]))
    }
}

#[test]
fn a_drafter_that_hands_nothing_on_reads_each_prompt_at_its_place() {
    let target = target("llama", 16, (2, 2), 1);
    let reusing = |count| DecodeOptions { reuse_prefix: true, ..options(count) };
    let [a, b, c] = [100, 110, 30].map(|own| beginning(SYSTEM, own, own as u64));
    let silent = || -> Option<Box<dyn Drafter>> { Some(Box::new(Silent)) };
    let mut engine = BatchEngine::new(&target, vec![silent(), silent()]);
    engine.join(0, &a, &reusing(5)).expect("joined");
    engine.join(1, &b, &reusing(5)).expect("joined");
    let ended = finish(&mut engine);
    assert_eq!([0, 1].map(|key| ended[&key].reused_tokens), [0, 0]);
    // It goes where it need not read all of it, although a place is empty.
    let mut engine = BatchEngine::new(&target, vec![silent(), silent()]);
    for (key, text, reused) in [(0, &a, 0), (1, &c, alike(&a, &c) - 1)] {
        engine.join(key, text, &reusing(5)).expect("joined");
        assert_eq!(finish(&mut engine)[&key].reused_tokens, reused);
    }
}
