//! Decisions from measured times never show in the output.

use longdraft_decode::{Pacing, Sampling, SpeculativeDecoder, VerifyRule};

use crate::models::{Drafts, KINDS, decode, drafter, generate, options, prompt, shapes, target};

#[test]
fn measured_pacing_changes_no_token() {
    let target = target("llama", 16, (2, 2), 71);
    let drafts = Drafts::new(&target, 71);
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
