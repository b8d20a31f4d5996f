//! Decisions from measured times never show in the output.

use longdraft_decode::drafter::{DraftContext, Drafted, Plan};
use longdraft_decode::draws::CounterDraws;
use longdraft_decode::{DraftShape, Origin, Pacing, Sampling, SpeculativeDecoder, VerifyRule};

use crate::answers::{decode, generate, options, prompt};
use crate::models::{KINDS, drafter, shapes, with_drafts};

#[test]
fn measured_pacing_changes_no_token() {
    let (target, drafts) = with_drafts("llama", 16, (2, 2), 71);
    for kind in KINDS {
        for (shape, temperature) in [(1, 0.0), (4, 0.0), (7, 0.7), (8, 0.7)] {
            let mut options = options(150);
            options.sampling = Sampling::at(temperature);
            options.rule = VerifyRule::Match;
            let plain = generate(&target, None, &prompt(9, 71), &options);
            options.shape = shapes()[shape].clone();
            options.pacing = Pacing::Measured;
            let drafter = drafter(kind, &target, &drafts);
            let mut decoder = SpeculativeDecoder::new(&target, Some(drafter));
            for _ in 0..2 {
                let paced = decode(&mut decoder, &prompt(9, 71), &options);
                assert_eq!(paced.tokens, plain.tokens, "{kind:?} {shape}");
                assert!(paced.metrics.rounds <= plain.metrics.rounds);
            }
        }
    }
}

#[test]
fn only_lookup_proposes_where_nothing_may_take_time() {
    let (target, drafts) = with_drafts("llama", 16, (2, 2), 72);
    let cache = target.new_cache().expect("cache");
    let text = prompt(6, 72).repeat(2);
    for kind in KINDS {
        let mut drafter = drafter(kind, &target, &drafts);
        drafter.begin(0).expect("begin");
        let (shape, sampling) = (DraftShape::Chain { length: 4 }, Sampling::default());
        let mut draws = CounterDraws::new(0, &[]);
        let mut plan = Plan { paid: false, ..Plan::filling(&shape, &sampling, &mut draws) };
        let context = DraftContext { target: &target, cache: &cache, tokens: &text };
        let tree = drafter.propose(context, &mut plan).expect("proposals");
        let found: Vec<_> = tree.nodes().iter().map(|node| (node.token, node.origin)).collect();
        let looks = kind.looks_up();
        let wanted: Vec<_> = text[..4].iter().map(|token| (*token, Origin::Lookup)).collect();
        assert_eq!(found, if looks { wanted } else { Vec::new() }, "{kind:?}");
        assert_eq!(plan.drafted, Drafted::Nothing, "{kind:?}");
    }
}
