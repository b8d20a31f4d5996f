//! Sampled texts with and without a draft, compared as samples: end to end, on a real small model
//! where it is there and on a random one always. A second plain run must not be told apart from
//! the first, a drafter that misstates its distribution must be.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use longdraft_decode::drafter::{
    Asked, Beside, Combination, CombinedDrafter, DraftContext, DraftModel, Drafter, Forecast,
    LookupDrafter, ModelDrafter, Plan, Turn,
};
use longdraft_decode::tree::Distribution;
use longdraft_decode::{DraftShape, Result, Sampling, SpeculativeDecoder, Tree};
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{PackedSequence, Tap, Taps, Target, TargetOptions};

use crate::answers::{decode, options};
use crate::models::target;

/// Texts a sample.
const TEXTS: usize = 500;
const LENGTH: usize = 5;

/// The target after two tokens alone: a draft that is neither useless nor perfect.
struct Bigrams<'a> {
    target: &'a Target,
    first: u32,
    logits: HashMap<u32, Vec<f32>>,
}

impl<'a> Bigrams<'a> {
    fn drafter(target: &'a Target, prompt: &[TargetTokenId]) -> Box<dyn Drafter + 'a> {
        let model = Self { target, first: prompt[0].0, logits: HashMap::new() };
        Box::new(ModelDrafter::new(model))
    }

    fn after(&mut self, token: u32) -> Vec<f32> {
        let (target, first) = (self.target, self.first);
        let logits = self.logits.entry(token).or_insert_with(|| {
            let (ids, position_ids) = (vec![first, token], vec![0, 1]);
            let sequence = PackedSequence { ids, position_ids, document_ids: vec![0, 0] };
            let taps = Taps::of(&[Tap::FinalHidden]);
            let features = target.forward(&sequence, &taps).expect("features");
            let hidden = features.final_hidden().and_then(|hidden| Ok(hidden.narrow(0, 1, 1)?));
            let ends = target.hold_ends().expect("ends");
            let logits = ends.logits(&hidden.expect("hidden")).expect("logits");
            logits.flatten_all().and_then(|logits| logits.to_vec1()).expect("logits")
        });
        logits.clone()
    }
}

impl DraftModel for Bigrams<'_> {
    fn read(&mut self, turn: Turn<'_>, _: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        let tokens: Vec<u32> = match turn.asked {
            Asked::Root { .. } => turn.context.tokens.iter().rev().take(1).map(|t| t.0).collect(),
            Asked::After { readings, .. } => readings.iter().map(|read| read.token.0).collect(),
        };
        Ok(vec![tokens.into_iter().map(|token| self.after(token).into()).collect()])
    }
}

/// Says that its proposals were less likely than they were, so that too many are accepted.
struct Misstating<'a>(Box<dyn Drafter + 'a>);

impl Drafter for Misstating<'_> {
    fn begin(&mut self, kept: usize) -> Result<()> {
        self.0.begin(kept)
    }

    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        let mut tree = self.0.propose(context, plan)?;
        for row in 0..tree.rows() {
            if let Some(distribution) = tree.distribution(row) {
                let smaller: Vec<f64> = distribution.iter().map(|q| 0.2 * q).collect();
                tree.set_distribution(row, Arc::new(Distribution::of(&smaller)));
            }
        }
        Ok(tree)
    }
}

/// Texts of a sample, by token and position.
type Sample = Vec<Vec<TargetTokenId>>;

fn sample(
    target: &Target,
    drafter: Option<Box<dyn Drafter + '_>>,
    shape: &DraftShape,
    prompt: &[TargetTokenId],
    seed: u64,
) -> Sample {
    let mut decoder = SpeculativeDecoder::new(target, drafter);
    let mut options = options(LENGTH);
    options.sampling = Sampling { top_k: Some(12), ..Sampling::at(1.0) };
    options.shape = shape.clone();
    options.seed = seed;
    options.reuse_prefix = true;
    (0..TEXTS)
        .map(|text| {
            options.request = vec![text as u64];
            decode(&mut decoder, prompt, &options).tokens
        })
        .collect()
}

/// Smallest p-value of a two-sample chi-square test over positions, and pairs of positions: the
/// normal approximation of Wilson and Hilferty (1931).
fn smallest_p(a: &Sample, b: &Sample) -> f64 {
    let at = |text: &[TargetTokenId], cell: usize| match cell {
        0..LENGTH => (text[cell].0, 0),
        // Tokens alone may agree where their order does not.
        _ => (text[cell - LENGTH].0, text[cell - LENGTH + 1].0 + 1),
    };
    (0..2 * LENGTH - 1)
        .map(|cell| {
            let mut counts: BTreeMap<(u32, u32), [f64; 2]> = BTreeMap::new();
            for (side, texts) in [a, b].into_iter().enumerate() {
                texts
                    .iter()
                    .for_each(|text| counts.entry(at(text, cell)).or_default()[side] += 1.0);
            }
            let (many, few): (Vec<_>, Vec<_>) =
                counts.into_values().partition(|[a, b]| a + b >= 10.0);
            let pooled = few.iter().fold([0.0; 2], |sum, c| [sum[0] + c[0], sum[1] + c[1]]);
            let cells = many.into_iter().chain((pooled[0] + pooled[1] >= 10.0).then_some(pooled));
            let terms: Vec<f64> = cells.map(|[a, b]| (a - b).powi(2) / (a + b)).collect();
            upper_tail(terms.iter().sum(), terms.len() as f64 - 1.0)
        })
        .fold(1.0, f64::min)
}

fn upper_tail(chi_square: f64, degrees: f64) -> f64 {
    if degrees < 1.0 {
        return 1.0;
    }
    let spread = 2.0 / (9.0 * degrees);
    let z = ((chi_square / degrees).cbrt() - (1.0 - spread)) / spread.sqrt();
    // Abramowitz and Stegun 7.1.26.
    let x = z.abs() / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * x);
    let series = [1.061_405_429, -1.453_152_027, 1.421_413_741, -0.284_496_736, 0.254_829_592];
    let erfc = series.iter().fold(0.0, |sum, c| (sum + c) * t) * (-x * x).exp();
    if z > 0.0 { erfc / 2.0 } else { 1.0 - erfc / 2.0 }
}

/// Smallest p-value that passes for chance, over the tests of a comparison.
const FLAG: f64 = 1e-4;

fn compare(target: &Target, prompt: &[TargetTokenId]) {
    let model = || Bigrams::drafter(target, prompt);
    let chain = DraftShape::Chain { length: 3 };
    let plain = sample(target, None, &chain, prompt, 1);
    let again = smallest_p(&plain, &sample(target, None, &chain, prompt, 2));
    assert!(again > FLAG, "two plain samples are told apart: {again:e}");
    let merged =
        || Box::new(CombinedDrafter::new(model(), LookupDrafter::new(), Combination::Merge));
    let tree = DraftShape::Sampled { children: vec![3, 2, 1] };
    let drafters: [(Box<dyn Drafter>, &DraftShape); 3] =
        [(model(), &chain), (model(), &tree), (merged(), &tree)];
    for (case, (drafter, shape)) in drafters.into_iter().enumerate() {
        let drafted = sample(target, Some(drafter), shape, prompt, 3 + case as u64);
        let p = smallest_p(&plain, &drafted);
        assert!(p > FLAG, "case {case} is told apart from plain sampling: {p:e}");
    }
    let biased = sample(target, Some(Box::new(Misstating(model()))), &chain, prompt, 9);
    let p = smallest_p(&plain, &biased);
    assert!(p < FLAG, "a wrong distribution is not caught: {p:e}");
}

#[test]
fn tails_of_the_chi_square_distribution_are_right() {
    for (x, degrees, p) in [(3.841, 1.0, 0.05), (18.307, 10.0, 0.05), (29.588, 10.0, 0.001)] {
        let tail = upper_tail(x, degrees);
        assert!((tail - p).abs() < 0.1 * p, "{tail} {p}");
    }
}

#[test]
fn samples_of_a_random_target_agree() {
    let target = target("llama", 16, (2, 2), 91);
    compare(&target, &[3, 1, 4].map(TargetTokenId));
}

#[test]
fn samples_of_a_real_target_agree() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/stories260K");
    if !path.is_dir() {
        eprintln!("skipped: {} is not there", path.display());
        return;
    }
    let target = Target::open_path(&path, &TargetOptions::default()).expect("target");
    compare(&target, &[1, 403, 407, 261, 378].map(TargetTokenId));
}
