//! Blocks of tokens that a model proposes in one pass.

use longdraft_decode::drafter::{BlockDrafter, BlockModel, DraftContext, Drafted, Drafter, Plan};
use longdraft_decode::draws::CounterDraws;
use longdraft_decode::{DraftShape, Pacing, Result, Sampling, VerifyRule};
use longdraft_kernels::random::CounterRng;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;

use crate::models::{VOCABULARY, generate, options, prompt, shapes, target};

const BLOCK: usize = 5;

/// Logits that depend on the root's place, the depth and the token before.
#[derive(Default)]
struct Table {
    root: usize,
    depth: usize,
}

impl BlockModel for Table {
    fn vocabulary(&self) -> Option<&VocabularyMap> {
        None
    }

    fn block_len(&self) -> usize {
        BLOCK
    }

    fn begin(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn run(&mut self, context: DraftContext<'_>, depth: usize) -> Result<()> {
        self.root = context.tokens.len();
        self.depth = depth;
        Ok(())
    }

    fn logits(&self, path: &[TargetTokenId]) -> Result<Vec<f32>> {
        let (depth, before) = (path.len(), path[path.len() - 1]);
        assert!((1..=self.depth).contains(&depth), "{depth} of {}", self.depth);
        let key = [self.root as u64, depth as u64, u64::from(before.0)];
        let mut rng = CounterRng::new(5, "block", &key);
        Ok((0..VOCABULARY).map(|_| (2.0 * rng.normal()) as f32).collect())
    }
}

#[test]
fn a_block_changes_no_token() {
    let target = target("llama", 16, (2, 2), 72);
    let prompt = prompt(9, 3);
    for (temperature, pacing) in [
        (0.0, Pacing::Fixed),
        (0.0, Pacing::Measured),
        (0.8, Pacing::Fixed),
        (0.8, Pacing::Measured),
    ] {
        let mut options = options(40);
        options.sampling = Sampling { temperature, ..Sampling::default() };
        options.rule = VerifyRule::Match;
        let plain = generate(&target, None, &prompt, &options);
        options.pacing = pacing;
        for shape in shapes() {
            options.shape = shape.clone();
            let drafter = Box::new(BlockDrafter::new(Table::default()));
            let drafted = generate(&target, Some(drafter), &prompt, &options);
            assert_eq!(plain.tokens, drafted.tokens, "{shape:?} at {temperature}");
        }
    }
}

#[test]
fn a_round_is_one_block_and_no_deeper() {
    let target = target("llama", 16, (2, 2), 72);
    let cache = target.new_cache().expect("cache");
    let tokens = prompt(6, 72);
    let mut drafter = BlockDrafter::new(Table::default());
    for (drawn, shape) in [
        (false, DraftShape::Chain { length: 9 }),
        (false, DraftShape::Static { widths: vec![2; 8] }),
        (true, DraftShape::Sampled { children: vec![2, 2, 1, 1, 1, 1, 1] }),
    ] {
        let mut plan = Plan {
            shape: &shape,
            drawn,
            sampling: &Sampling { temperature: 1.0, ..Sampling::default() },
            round: 1,
            draws: &mut CounterDraws::new(0, &[]),
            worth: None,
            paid: true,
            drafted: Drafted::Nothing,
        };
        let context = DraftContext { target: &target, cache: &cache, tokens: &tokens };
        let tree = drafter.propose(context, &mut plan).expect("proposals");
        assert_eq!((tree.depth(), plan.drafted), (BLOCK, Drafted::Block), "{shape:?}");
    }
}
