//! Requests that join and leave between rounds: each as if it were alone.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use longdraft_decode::drafter::{AnyDraft, drafter_of};
use longdraft_decode::{
    BatchEngine, Committed, DecodeError, DecodeOptions, EndReason, Generation, LogProbs, Result,
    Sampling,
};
use longdraft_kernels::random::CounterRng;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::Draft;

use crate::answers::{generate, options, prompt};
use crate::batch::{Job, alone, jobs, places};
use crate::models::{Drafts, KINDS, Kind, drafter, with_drafts};

pub(crate) fn goes_on(_: usize, _: Committed, _: Option<&LogProbs>) -> ControlFlow<EndReason> {
    ControlFlow::Continue(())
}

/// Runs rounds until nothing runs; what came of each request.
pub(crate) fn outcomes(engine: &mut BatchEngine<'_>) -> BTreeMap<usize, Result<Generation>> {
    let mut ended = BTreeMap::new();
    while engine.running() > 0 {
        ended.extend(engine.round(&mut goes_on).expect("round"));
    }
    ended
}

/// The same of requests that do not fail.
pub(crate) fn finish(engine: &mut BatchEngine<'_>) -> BTreeMap<usize, Generation> {
    let ended = outcomes(engine).into_iter();
    ended.map(|(key, generation)| (key, generation.expect("generation"))).collect()
}

/// Runs jobs that come and go at random: each ends once, and as `alone`, or is left before that. `seen` is what does not
/// depend on time.
pub(crate) fn come_and_go<T: PartialEq + std::fmt::Debug>(
    what: &str,
    engine: &mut BatchEngine<'_>,
    (jobs, alone): (&[Job], &[Generation]),
    rng: &mut CounterRng,
    seen: impl Fn(&Generation) -> T,
) {
    let each: Vec<usize> = (0..jobs.len()).collect();
    let (mut waiting, mut gone) = (each.clone(), Vec::new());
    while gone.len() < jobs.len() {
        while engine.has_room() && !waiting.is_empty() && rng.below(3) > 0 {
            let key = waiting.swap_remove(rng.below(waiting.len() as u64) as usize);
            engine.join(key, &jobs[key].prompt, &jobs[key].options).expect("joined");
        }
        let key = rng.below(jobs.len() as u64) as usize;
        if rng.below(9) == 0
            && let Some(left) = engine.leave(key)
        {
            assert_eq!(left.end, EndReason::Interrupted);
            assert!(alone[key].tokens.starts_with(&left.tokens), "{what} {key}");
            gone.push(key);
        }
        for (key, found) in engine.round(&mut goes_on).expect("round") {
            let found = found.expect("generation");
            assert_eq!(found.end, alone[key].end, "{what} {key}");
            assert_eq!(seen(&found), seen(&alone[key]), "{what} {key}");
            gone.push(key);
        }
    }
    gone.sort_unstable();
    assert_eq!(gone, each, "each ends once");
}

#[test]
fn whoever_comes_and_goes_changes_nobody_else() {
    let mut jobs = jobs();
    // Longer than what is read beside others in a round, and than what is read at once.
    jobs.push(Job { prompt: prompt(300, 3), options: jobs[4].options.clone() });
    jobs.push(Job { prompt: prompt(700, 4), options: jobs[5].options.clone() });
    let targets = [
        ("llama", (4, 2)),
        ("qwen3_5_text", (2, 2)),
        ("qwen2", (2, 2)),
        ("lfm2", (1, 2)),
        ("qwen3", (3, 1)),
        ("qwen3_5_moe_text", (2, 1)),
        ("mistral_window", (2, 2)),
        ("gemma3_text", (1, 2)),
        ("llama4_text", (2, 1)),
    ];
    let kinds = KINDS.map(Some).into_iter().chain([None]);
    for (seed, (kind, (architecture, kv))) in kinds.zip(targets.into_iter().cycle()).enumerate() {
        let (target, drafts) = with_drafts(architecture, 16, kv, 1);
        let alone = alone(kind, &target, &drafts, &jobs);
        let mut rng = CounterRng::new(seed as u64, "arrivals", &[]);
        let mut engine = BatchEngine::new(&target, places(kind, 4, &target, &drafts));
        let what = format!("{architecture} {kind:?}");
        let seen = |of: &Generation| (of.tokens.clone(), of.metrics.accepted);
        come_and_go(&what, &mut engine, (&jobs, &alone), &mut rng, seen);
    }
}

/// A long prompt is read in many rounds, and one that comes after it in a few.
#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    for (family, kind) in [("llama", Kind::Glide), ("qwen3_next", Kind::Mtp)] {
        let (target, drafts) = with_drafts(family, 16, (2, 2), 3);
        let mut engine = BatchEngine::new(&target, places(Some(kind), 3, &target, &drafts));
        // One that decodes, so that a round reads little; then the long prompt, and the short one.
        let jobs = [(prompt(9, 1), 90), (prompt(1300, 2), 4), (prompt(50, 3), 4)];
        let (mut ended, mut firsts) = (BTreeMap::new(), BTreeMap::new());
        for round in 0_usize.. {
            if let Some((prompt, count)) = jobs.get(round) {
                engine.join(round, prompt, &options(*count)).expect("joined");
            }
            let mut listen = |key: usize, _: Committed, _: Option<&LogProbs>| {
                firsts.entry(key).or_insert(round);
                ControlFlow::Continue(())
            };
            for (key, found) in engine.round(&mut listen).expect("round") {
                ended.insert(key, found.expect("generation").tokens);
            }
            if engine.running() == 0 {
                break;
            }
        }
        assert!(firsts[&2] <= 5 && firsts[&1] > 8, "{family} {kind:?} {firsts:?}");
        for (key, (prompt, count)) in jobs.iter().enumerate() {
            let alone = generate(&target, None, prompt, &options(*count));
            assert_eq!(ended[&key], alone.tokens, "{family} {kind:?} {key}");
        }
    }
}

#[test]
fn a_conversation_goes_on_where_its_text_is_kept() {
    for family in ["llama", "qwen3_next", "lfm2"] {
        check_conversations(family);
    }
}

fn check_conversations(family: &str) {
    let (target, drafts) = with_drafts(family, 16, (2, 2), 2);
    for kind in [None, Some(Kind::Eagle3), Some(Kind::MergedDflash)] {
        let mut engine = BatchEngine::new(&target, places(kind, 2, &target, &drafts));
        let reusing = |count| DecodeOptions { reuse_prefix: true, ..options(count) };
        let first: [Vec<TargetTokenId>; 2] = [prompt(90, 1), prompt(110, 2)];
        let mut conversations: Vec<Vec<TargetTokenId>> = first.to_vec();
        for turn in 0..3 {
            // In the other order every time.
            let order = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
            for key in order {
                engine.join(key, &conversations[key], &reusing(12)).expect("joined");
            }
            let Err(DecodeError::NoPlace) = engine.join(2, &first[0], &reusing(1)) else {
                panic!("there are two places")
            };
            for (key, found) in finish(&mut engine) {
                let text = &conversations[key];
                let alone = generate(&target, None, text, &options(12));
                assert_eq!(found.tokens, alone.tokens, "{kind:?} turn {turn}");
                assert_eq!(found.reused_tokens >= text.len() - 30, turn > 0, "{kind:?} {turn}");
                conversations[key].extend(found.tokens);
                conversations[key].extend(prompt(20, turn));
            }
        }
        // Without the wish nothing is kept.
        engine.join(0, &conversations[0], &options(3)).expect("joined");
        assert_eq!(finish(&mut engine)[&0].reused_tokens, 0);
    }
}

#[test]
fn a_request_that_cannot_go_on_fails_alone() {
    let (target, drafts) = with_drafts("qwen3", 16, (2, 1), 5);
    let mut engine = BatchEngine::new(&target, places(Some(Kind::Glide), 2, &target, &drafts));
    let ban = (0..61).map(|id| (TargetTokenId(id), f32::NEG_INFINITY)).collect();
    let sampling = Sampling { bias: ban, ..Sampling::default() };
    let banned = DecodeOptions { sampling, ..options(5) };
    engine.join(7, &prompt(9, 1), &banned).expect("joined");
    engine.join(8, &prompt(9, 2), &options(5)).expect("joined");
    let ended = outcomes(&mut engine);
    assert!(ended.len() == 2 && matches!(ended[&7], Err(DecodeError::NoDistribution)));
    assert_eq!(ended[&8].as_ref().expect("generation").tokens.len(), 5);
}

#[test]
fn log_probabilities_do_not_depend_on_who_proposed() {
    let (target, drafts) = with_drafts("qwen2", 16, (2, 2), 3);
    let sampling =
        Sampling { presence_penalty: 0.4, frequency_penalty: 0.3, ..Sampling::default() };
    let asked = DecodeOptions { log_probs: Some(3), sampling, ..options(25) };
    let told = |kind| {
        let mut engine = BatchEngine::new(&target, places(kind, 1, &target, &drafts));
        engine.join(0, &prompt(20, 3), &asked).expect("joined");
        let mut told = Vec::new();
        while engine.running() > 0 {
            let mut listen = |_, committed: Committed, log_probs: Option<&LogProbs>| {
                told.push((committed.token, log_probs.expect("asked for").clone()));
                ControlFlow::Continue(())
            };
            engine.round(&mut listen).expect("round");
        }
        told
    };
    let plain = told(None);
    assert_eq!(plain.len(), 25);
    for (token, log_probs) in &plain {
        assert_eq!(log_probs.top.len(), 3);
        let among = log_probs.top.iter().find(|(top, _)| top == token);
        assert!(among.is_none_or(|(_, log_prob)| log_prob.to_bits() == log_probs.own.to_bits()));
        assert!(log_probs.own <= log_probs.top[0].1 && log_probs.top[0].1 < 0.0);
    }
    for kind in [Kind::Glide, Kind::MergedEagle3, Kind::Lookup] {
        assert_eq!(told(Some(kind)), plain, "{kind:?}");
    }
}

/// Whatever drafts, and whenever that changes, the answers stay; a request ends with what it began with.
#[test]
fn another_drafter_may_come_at_any_round() {
    let (target, drafts) = with_drafts("llama", 16, (2, 2), 4);
    let jobs: Vec<Job> = (0..12)
        .map(|key| Job { prompt: prompt(10 + key, key as u64), options: options(8 + key) })
        .collect();
    let alone = alone(None, &target, &drafts, &jobs);
    let mut engine = BatchEngine::new(&target, places(None, 3, &target, &drafts));
    let mut rng = CounterRng::new(4, "changes", &[]);
    let mut kinds = KINDS.into_iter().cycle();
    let mut waiting = 0..jobs.len();
    let mut ended = 0;
    while ended < jobs.len() {
        while engine.has_room()
            && rng.below(2) == 0
            && let Some(key) = waiting.next()
        {
            let options = DecodeOptions { reuse_prefix: true, ..jobs[key].options.clone() };
            engine.join(key, &jobs[key].prompt, &options).expect("joined");
        }
        if rng.below(3) == 0 {
            let kind = if rng.below(5) == 0 { None } else { kinds.next() };
            engine.replace_drafters(places(kind, 3, &target, &drafts)).expect("replaced");
        }
        for (key, found) in engine.round(&mut goes_on).expect("round") {
            assert_eq!(found.expect("generation").tokens, alone[key].tokens, "{key}");
            ended += 1;
        }
    }
    let few = places(None, 2, &target, &drafts);
    assert!(engine.replace_drafters(few).is_err(), "every place gets one");
}

/// A draft that everybody has proposes what one that is lent does, and goes when nobody uses it.
#[test]
fn a_shared_draft_proposes_the_same_and_is_let_go() {
    let (target, drafts) = with_drafts("llama", 16, (2, 2), 4);
    let lent: &dyn Draft = &drafts.eagle3;
    let shared: Arc<dyn Draft> = Arc::new(Drafts::new(&target, 4).eagle3);
    let of = |draft: AnyDraft<'_>| {
        let drafter = drafter_of(draft, &target, None).expect("drafter");
        generate(&target, Some(drafter), &prompt(20, 1), &options(30))
    };
    let (own, other) = (of(lent.into()), of(Arc::clone(&shared).into()));
    assert_eq!((own.tokens, own.metrics.nodes), (other.tokens, other.metrics.nodes));
    assert_eq!(Arc::strong_count(&shared), 1);
    let mut engine = BatchEngine::new(&target, places(None, 1, &target, &drafts));
    let drafter = || drafter_of(Arc::clone(&shared), &target, None).expect("drafter");
    engine.replace_drafters(vec![Some(drafter())]).expect("replaced");
    assert_eq!(Arc::strong_count(&shared), 2);
    engine.join(0, &prompt(5, 1), &options(9)).expect("joined");
    engine.replace_drafters(vec![None]).expect("replaced");
    assert_eq!(Arc::strong_count(&shared), 2, "the request still drafts with it");
    finish(&mut engine);
    assert_eq!(Arc::strong_count(&shared), 1);
}

/// So hot that the text hardly says what comes next: the draws do.
#[test]
fn a_text_that_goes_on_in_another_request_draws_anew() {
    let (target, drafts) = with_drafts("llama", 16, (2, 2), 1);
    for kind in [Kind::Glide, Kind::Dflash] {
        let options = DecodeOptions { sampling: Sampling::at(100.0), seed: 7, ..options(48) };
        let begun = prompt(8, 3);
        let of = |text: &[TargetTokenId]| {
            generate(&target, Some(drafter(kind, &target, &drafts)), text, &options)
        };
        let first = of(&begun);
        let second = of(&[&begun[..], &first.tokens].concat());
        assert!(first.metrics.accepted > 24, "{kind:?}: {}", first.metrics.accepted);
        let pairs = first.tokens.iter().zip(&second.tokens);
        let same = pairs.filter(|(one, other)| one == other).count();
        assert!(same < 12, "{kind:?}: {same} of 48 tokens are drawn as before");
    }
}
