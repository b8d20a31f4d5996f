//! Several requests at a time: each as if it were alone.

use std::ops::ControlFlow;

use longdraft_decode::drafter::Drafter;
use longdraft_decode::{
    BatchEngine, Committed, DecodeError, DecodeOptions, DraftShape, EndReason, Generation, Result,
    Sampling, VerifyRule,
};
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::Target;

use crate::answers::{generate, options, prompt};
use crate::models::{Drafts, KINDS, Kind, VOCABULARY, drafter, shapes, with_drafts};

/// A request.
pub(crate) struct Job {
    pub(crate) prompt: Vec<TargetTokenId>,
    pub(crate) options: DecodeOptions,
}

/// Runs all jobs, as many at a time as there are places; results in the order of jobs.
fn run(
    engine: &mut BatchEngine<'_>,
    jobs: &[Job],
    mut listener: impl FnMut(usize, Committed) -> ControlFlow<EndReason>,
) -> Vec<Result<Generation>> {
    let mut results: Vec<Option<Result<Generation>>> = jobs.iter().map(|_| None).collect();
    let mut waiting = jobs.iter().enumerate();
    loop {
        while engine.has_room()
            && let Some((index, job)) = waiting.next()
        {
            let joined = engine.join(index, &job.prompt, &job.options);
            results[index] = joined.err().map(Err);
        }
        if engine.running() == 0 {
            return results.into_iter().map(|result| result.expect("every job ends")).collect();
        }
        let heard = &mut |job, committed, _: Option<&_>| listener(job, committed);
        for (index, generation) in engine.round(heard).expect("round") {
            results[index] = Some(generation);
        }
    }
}

/// Jobs that differ in everything.
pub(crate) fn jobs() -> Vec<Job> {
    let shapes = shapes();
    let job = |index: usize| {
        let drawn = !index.is_multiple_of(3);
        let shape = match &shapes[index % shapes.len()] {
            // Draws need a chain or a sampled tree.
            shape @ (DraftShape::Static { .. } | DraftShape::Dynamic { .. }) if !drawn => shape,
            _ => &shapes[1],
        };
        let options = DecodeOptions {
            shape: shape.clone(),
            sampling: Sampling::at(if drawn { 0.9 } else { 0.0 }),
            rule: if index % 3 == 1 { VerifyRule::Match } else { VerifyRule::Ratio },
            seed: 5,
            confidence_threshold: if index.is_multiple_of(2) { 0.5 } else { 0.0 },
            request: vec![index as u64],
            ..options(1 + 5 * index)
        };
        Job { prompt: prompt(1 + 7 * index, index as u64), options }
    };
    (0..9).map(job).collect()
}

pub(crate) fn places<'a>(
    kind: Option<Kind>,
    count: usize,
    target: &'a Target,
    drafts: &'a Drafts,
) -> Vec<Option<Box<dyn Drafter + 'a>>> {
    (0..count).map(|_| kind.map(|kind| drafter(kind, target, drafts))).collect()
}

/// What comes of each job where nobody is beside it.
pub(crate) fn alone(
    kind: Option<Kind>,
    target: &Target,
    drafts: &Drafts,
    jobs: &[Job],
) -> Vec<Generation> {
    let of = |job: &Job| {
        let drafter = kind.map(|kind| drafter(kind, target, drafts));
        generate(target, drafter, &job.prompt, &job.options)
    };
    jobs.iter().map(of).collect()
}

#[test]
fn requests_of_a_batch_are_as_alone() {
    let jobs = jobs();
    let targets = [
        ("llama", (4, 2)),
        ("gemma2", (2, 2)),
        ("qwen2", (2, 2)),
        ("qwen3_5_text", (2, 2)),
        ("gemma3_text", (1, 2)),
        ("lfm2", (2, 1)),
        ("qwen3", (3, 1)),
        ("qwen3_next", (1, 2)),
        ("gpt_oss", (2, 2)),
        ("llama4_text", (1, 2)),
        ("phi3", (2, 2)),
        ("granite", (2, 1)),
        ("glm4", (1, 3)),
        ("olmo3", (2, 2)),
        ("smollm3", (1, 2)),
        ("glm4_moe", (2, 1)),
    ];
    let kinds = KINDS.map(Some).into_iter().chain([None]);
    for (kind, (architecture, kv)) in kinds.zip(targets.into_iter().cycle()) {
        let (target, drafts) = with_drafts(architecture, 16, kv, 1);
        let alone = alone(kind, &target, &drafts, &jobs);
        for count in [3, 16] {
            let mut engine = BatchEngine::new(&target, places(kind, count, &target, &drafts));
            let mut streamed = vec![Vec::new(); jobs.len()];
            let together = run(&mut engine, &jobs, |job, committed| {
                streamed[job].push(committed.token);
                ControlFlow::Continue(())
            });
            for ((alone, found), streamed) in alone.iter().zip(together).zip(streamed) {
                let found = found.expect("generation");
                assert_eq!(found.tokens, alone.tokens, "{architecture} {kind:?} {count}");
                assert_eq!(found.tokens, streamed);
                assert_eq!(found.end, alone.end);
                assert_eq!(found.metrics.accepted, alone.metrics.accepted);
            }
        }
    }
}

#[test]
fn a_prompt_that_does_not_fit_leaves_the_others_alone() {
    let (target, drafts) = with_drafts("llama", 16, (2, 1), 7);
    let job = |length| Job { prompt: prompt(length, 7), options: options(6) };
    // A tokenizer may know tokens that the target has not.
    let unknown = Job { prompt: vec![TargetTokenId(VOCABULARY as u32)], options: options(6) };
    let jobs = [job(0), job(5), job(100_000), job(9), unknown];
    let mut engine = BatchEngine::new(&target, places(Some(Kind::Glide), 2, &target, &drafts));
    let found = run(&mut engine, &jobs, |job, _| {
        if job == 3 { ControlFlow::Break(EndReason::StopString) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(found[0], Err(DecodeError::EmptyPrompt)));
    assert!(matches!(found[2], Err(DecodeError::PromptTooLong { .. })));
    assert!(matches!(found[4], Err(DecodeError::UnknownToken { .. })));
    let alone = generate(&target, None, &jobs[1].prompt, &jobs[1].options);
    assert_eq!(found[1].as_ref().expect("generation").tokens, alone.tokens);
    let ended = found[3].as_ref().expect("generation");
    assert_eq!((ended.tokens.len(), ended.end), (1, EndReason::StopString));
    let nowhere = BatchEngine::new(&target, Vec::new()).join(0, &jobs[1].prompt, &jobs[1].options);
    assert!(matches!(nowhere, Err(DecodeError::NoPlace)));
}
