//! Requests that draft together: each proposes what it would propose alone, in passes that they share.

use std::cell::RefCell;
use std::rc::Rc;

use longdraft_decode::drafter::grow::Growth;
use longdraft_decode::drafter::{
    Beside, DraftContext, DraftModel, DraftRows, DraftState, Drafter, Forecast, Plan, Proposal,
    Shared, Turn, propose_each,
};
use longdraft_decode::{
    BatchEngine, DecodeOptions, DraftShape, Generation, Result, Sampling, Tree,
};
use longdraft_kernels::random::CounterRng;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::target_model::{Features, Tap};

use crate::answers::{options, prompt};
use crate::batch::{Job, alone, places};
use crate::engine::{come_and_go, goes_on};
use crate::models::{Drafts, KINDS, Kind, drafter, shapes, target, with_drafts};

/// The level of every pass over a draft, and the requests in it.
type Passes = Rc<RefCell<Vec<(usize, usize)>>>;

/// A drafter that notes the passes over its draft.
struct Counting<'a> {
    inner: Box<dyn Drafter + 'a>,
    vocabulary: Option<VocabularyMap>,
    block_len: Option<usize>,
    passes: Passes,
}

impl<'a> Counting<'a> {
    fn new(mut inner: Box<dyn Drafter + 'a>, passes: &Passes) -> Self {
        let model = inner.model().expect("a model");
        let (vocabulary, block_len) = (model.vocabulary().cloned(), model.block_len());
        Self { inner, vocabulary, block_len, passes: Rc::clone(passes) }
    }
}

impl Drafter for Counting<'_> {
    fn taps(&self) -> Vec<Tap> {
        self.inner.taps()
    }

    fn reads_last_layer(&self) -> bool {
        self.inner.reads_last_layer()
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.inner.begin(kept)
    }

    fn state(&self) -> DraftState<'_> {
        self.inner.state()
    }

    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        self.inner.take_over(rows, tokens)
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        self.inner.observe(tokens, features)
    }

    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        let alone = Proposal { drafter: self, context, plan, seconds: 0.0 };
        Ok(propose_each(&mut [alone])?.remove(0))
    }

    fn start(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Growth> {
        self.inner.start(context, plan)
    }

    fn model(&mut self) -> Option<&mut dyn DraftModel> {
        Some(self)
    }

    fn finish(&mut self, growth: Growth) -> Tree {
        self.inner.finish(growth)
    }
}

impl DraftModel for Counting<'_> {
    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.vocabulary.as_ref()
    }

    fn block_len(&self) -> Option<usize> {
        self.block_len
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.inner.begin(kept)
    }

    fn shared(&mut self) -> Option<Shared<'_>> {
        self.inner.model()?.shared()
    }

    fn read(&mut self, turn: Turn<'_>, beside: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        self.passes.borrow_mut().push((turn.asked.level(), 1 + beside.len()));
        self.inner.model().expect("a model").read(turn, beside)
    }
}

/// Requests of different lengths and layouts.
fn jobs(seed: u64, temperature: f64) -> Vec<Job> {
    let shapes = shapes();
    let job = |index: usize| {
        let options = DecodeOptions {
            shape: shapes[(seed as usize + 3 * index) % shapes.len()].clone(),
            sampling: Sampling::at(temperature),
            seed,
            request: vec![index as u64],
            confidence_threshold: if index.is_multiple_of(2) { 0.3 } else { 0.0 },
            ..options(3 + 4 * index)
        };
        Job { prompt: prompt(2 + 23 * index, seed + index as u64), options }
    };
    (0..6).map(job).collect()
}

#[test]
fn each_proposes_what_it_would_alone_whoever_comes_and_goes() {
    for (seed, kind) in (0..).zip(KINDS) {
        let (target, drafts) =
            with_drafts(["qwen3", "llama", "qwen2"][seed as usize % 3], 16, (2, 2), seed);
        for temperature in [0.0, 0.9] {
            let jobs = jobs(seed, temperature);
            let alone = alone(Some(kind), &target, &drafts, &jobs);
            for count in [1, 2, 5] {
                let places = places(Some(kind), count, &target, &drafts);
                let mut engine = BatchEngine::new(&target, places);
                let mut rng = CounterRng::new(seed, "arrivals", &[count as u64]);
                let what = format!("{kind:?} of {count} at {temperature}");
                // Tokens, levels and nodes that were proposed, and those that were accepted.
                let seen = |of: &Generation| {
                    let metrics = &of.metrics;
                    (of.tokens.clone(), metrics.drafted, metrics.nodes, metrics.accepted)
                };
                come_and_go(&what, &mut engine, (&jobs, &alone), &mut rng, seen);
            }
        }
    }
}

#[test]
fn as_many_passes_run_as_the_longest_needs() {
    let (target, drafts) = with_drafts("qwen3", 16, (2, 2), 6);
    let lengths = [1, 3, 5, 2, 4];
    let levels = [Kind::Glide, Kind::GlideReduced, Kind::Eagle3, Kind::MergedEagle3, Kind::Mtp];
    let blocks = [Kind::Dflash, Kind::Dflash2Reduced, Kind::Dspark, Kind::MergedDspark];
    for (temperature, kind) in [0.0, 0.8].into_iter().cycle().zip(levels.into_iter().chain(blocks))
    {
        for count in [1, 2, 5] {
            let passes = Passes::default();
            let drafter = || Counting::new(drafter(kind, &target, &drafts), &passes);
            let places =
                (0..count).map(|_| Some(Box::new(drafter()) as Box<dyn Drafter + '_>)).collect();
            let mut engine = BatchEngine::new(&target, places);
            for (key, length) in lengths[..count].iter().enumerate() {
                let options = DecodeOptions {
                    shape: DraftShape::Chain { length: *length },
                    sampling: Sampling::at(temperature),
                    ..options(30)
                };
                engine.join(key, &prompt(5 + key, key as u64), &options).expect("joined");
            }
            engine.round(&mut goes_on).expect("prompts are read");
            assert!(passes.borrow().is_empty(), "{kind:?}");
            engine.round(&mut goes_on).expect("round");
            let longest = lengths[..count].iter().max().expect("some");
            let in_level = |level: usize| lengths[..count].iter().filter(|l| **l > level).count();
            let wanted: Vec<_> = (0..*longest).map(|level| (level, in_level(level))).collect();
            assert_eq!(*passes.borrow(), wanted, "{kind:?} of {count}");
        }
    }
}

#[test]
fn drafts_that_differ_share_no_pass() {
    let target = target("qwen3", 16, (2, 2), 1);
    let (one, other) = (Drafts::new(&target, 1), Drafts::new(&target, 2));
    let passes = Passes::default();
    let kinds = [Kind::Glide, Kind::GlideReduced, Kind::Eagle3, Kind::Dflash, Kind::Mtp];
    let of = |drafts| kinds.map(|kind| Counting::new(drafter(kind, &target, drafts), &passes));
    let drafters = of(&one).into_iter().chain(of(&other));
    let places: Vec<Option<Box<dyn Drafter + '_>>> =
        drafters.map(|drafter| Some(Box::new(drafter) as Box<dyn Drafter + '_>)).collect();
    let count = places.len();
    let mut engine = BatchEngine::new(&target, places);
    for key in 0..count {
        engine.join(key, &prompt(5 + key, 1), &options(9)).expect("joined");
    }
    for _ in 0..2 {
        engine.round(&mut goes_on).expect("round");
    }
    let passes = passes.borrow();
    assert_eq!(passes.iter().filter(|(level, _)| *level == 0).count(), count);
    assert!(passes.iter().all(|(_, requests)| *requests == 1), "{passes:?}");
}
