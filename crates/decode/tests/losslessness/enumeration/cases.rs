//! Cases of every kind of proposal.

use std::cell::Cell;

use longdraft_decode::drafter::{
    Asked, Beside, DraftContext, DraftModel, Drafter, Forecast, LookupChances, MatchClass,
    ModelDrafter, Turn, Worth,
};
use longdraft_decode::grammar::{Grammar, SoFar};
use longdraft_decode::verifier::Verifier;
use longdraft_decode::{Result, VerifyRule};
use longdraft_models::TargetConfig;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::target_model::{Target, TargetOptions};
use serde_json::json;

use super::*;
use crate::grammar::Thirds;

/// A draft that looks its logits up.
struct TableModel {
    table: Table,
    /// Where it tells a confidence: a function of the text before the token.
    confidence: bool,
    map: Option<VocabularyMap>,
    text: Vec<u32>,
    read: Vec<Vec<u32>>,
}

impl TableModel {
    fn forecast(&self, text: &[u32]) -> Forecast {
        let key: Vec<u64> = text.iter().map(|id| u64::from(*id)).collect();
        let chance = CounterRng::new(self.table.seed, "confidence", &key).uniform();
        let confidence = self.confidence.then_some(chance);
        Forecast { confidence, ..self.table.logits(text).into() }
    }
}

impl DraftModel for TableModel {
    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.map.as_ref()
    }

    fn read(&mut self, turn: Turn<'_>, _: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        let Asked::After { readings, .. } = turn.asked else {
            self.text = turn.context.tokens.iter().map(|token| token.0).collect();
            self.read = vec![self.text.clone()];
            return Ok(vec![vec![self.forecast(&self.text)]]);
        };
        let forecasts = readings.iter().map(|reading| {
            let mut text = self.read[reading.parent].clone();
            text.push(reading.token.0);
            self.read.push(text.clone());
            self.forecast(&text)
        });
        Ok(vec![forecasts.collect()])
    }
}

/// One way of decoding, over tables.
struct Case {
    target: Table,
    draft: Table,
    map: Option<VocabularyMap>,
    shape: DraftShape,
    of_target: Sampling,
    of_draft: Sampling,
    rule: VerifyRule,
    /// Lookup's proposal after every text.
    lookup: Option<Vec<u32>>,
    /// Where the draft tells a confidence: from which on it proposes, and what pays.
    confidence: Option<(f64, Option<Worth>)>,
    /// Whether the target's tokens follow [`Thirds`].
    has_grammar: bool,
    /// Tokens of the answer before the target's first 1.
    late_after: usize,
}

impl Case {
    /// Distribution of the tokens that one round after `text` commits.
    fn round(&self, carrier: &Target, text: &[u32]) -> BTreeMap<Vec<u32>, f64> {
        let tokens: Vec<TargetTokenId> = text.iter().map(|id| TargetTokenId(*id)).collect();
        let cache = carrier.new_cache().expect("cache");
        let verifier = Verifier { sampling: self.of_target.clone(), rule: self.rule };
        let fallbacks = Cell::new(0);
        let distribution = distribution_of(|draws| {
            let context = DraftContext { target: carrier, cache: &cache, tokens: &tokens };
            let (text, read) = (Vec::new(), Vec::new());
            let (table, map) = (self.draft, self.map.clone());
            let confidence = self.confidence.is_some();
            let model = TableModel { table, confidence, map, text, read };
            let mut plan = Plan {
                drawn: self.rule == VerifyRule::Ratio,
                worth: self.confidence.and_then(|(_, worth)| worth),
                confidence_threshold: self.confidence.map_or(0.0, |(threshold, _)| threshold),
                ..Plan::filling(&self.shape, &self.of_draft, draws)
            };
            let mut tree = ModelDrafter::new(model).propose(context, &mut plan).expect("tree");
            if let Some(lookup) = &self.lookup {
                let chain: Vec<TargetTokenId> = lookup.iter().map(|t| TargetTokenId(*t)).collect();
                tree.insert_chain(&chain, Origin::Lookup);
            }
            let logits: Vec<Vec<f32>> = (0..tree.rows())
                .map(|row| self.target.logits(&path_text(&tokens, &tree, row)))
                .collect();
            let position = tokens.len() as u64;
            // Token 0 is the prompt.
            let generated = &tokens[1..];
            let mut grammar = Thirds::after(self.target.vocabulary, generated);
            let grammar = self.has_grammar.then_some(&mut grammar as &mut dyn Grammar);
            let late = [TargetTokenId(1)];
            let left = self.late_after.saturating_sub(generated.len());
            let so_far = SoFar { grammar, late: &late, left, ..SoFar::of(generated) };
            let verdict = verifier.verify_after(so_far, &tree, &logits, position, plan.draws);
            let verdict = verdict.expect("verdict");
            fallbacks.set(fallbacks.get() + verdict.residual_fallbacks);
            let path = verdict.path.iter().map(|row| tree.token(*row).0);
            path.chain([verdict.next.0]).collect()
        });
        assert_eq!(fallbacks.get(), 0, "no residual may vanish");
        distribution
    }

    fn error(&self, carrier: &Target, length: usize) -> f64 {
        let of_target = |text: &[u32]| {
            let before = text[1..].iter().map(|id| TargetTokenId(*id));
            let logits = self.target.logits(text);
            let last = text[1..].last().copied();
            let mut adjusted = self.of_target.adjusted(&logits, before).into_owned();
            for (id, logit) in adjusted.iter_mut().enumerate() {
                let is_early = id == 1 && text.len() <= self.late_after;
                if is_early || (self.has_grammar && !Thirds::allows(last, id as u32)) {
                    *logit = f32::NEG_INFINITY;
                }
            }
            self.of_target.distribution(&adjusted).expect("distribution")
        };
        error(length, |text| self.round(carrier, text), of_target)
    }
}

/// Lends its vocabulary size.
fn carrier(vocabulary: usize) -> Target {
    let config = json!({
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64
    });
    let config = TargetConfig::from_json(&config).expect("valid");
    Target::random(config, 0, &TargetOptions::default()).expect("target")
}

fn check(vocabulary: usize, length: usize, cases: u64, change: impl Fn(u64, &mut Case)) {
    let carrier = carrier(vocabulary);
    for seed in 0..cases {
        let holes = seed % 2 == 1;
        let mut case = Case {
            target: Table { seed, vocabulary, holes },
            draft: Table { seed: seed + 1_000_000, vocabulary, holes },
            map: None,
            shape: DraftShape::Chain { length: 2 },
            of_target: Sampling::at(1.0),
            of_draft: Sampling::at(1.0),
            rule: VerifyRule::Ratio,
            lookup: None,
            confidence: None,
            has_grammar: false,
            late_after: 0,
        };
        change(seed, &mut case);
        let error = case.error(&carrier, length);
        assert!(error < 1e-12, "case {seed}: {error:e}");
    }
}

/// Truncations that differ on the two sides.
fn truncated(seed: u64) -> Sampling {
    match seed % 4 {
        0 => Sampling::at(1.0),
        1 => Sampling { top_k: Some(2), ..Sampling::at(0.7) },
        2 => Sampling { top_p: 0.6, ..Sampling::at(1.5) },
        _ => Sampling { min_p: 0.4, top_p: 0.9, ..Sampling::at(0.5) },
    }
}

/// Two levels: a chain, drawn siblings, or the most likely tokens.
fn short(seed: u64) -> DraftShape {
    match seed % 3 {
        0 => DraftShape::Chain { length: 2 },
        1 => DraftShape::Sampled { children: vec![2, 1] },
        _ => DraftShape::Static { widths: vec![2, 2] },
    }
}

#[test]
fn drawn_chains_follow_the_distribution() {
    check(4, 3, 100, |seed, case| {
        case.shape = DraftShape::Chain { length: 1 + (seed % 3) as usize };
    });
}

#[test]
fn truncated_distributions_on_either_side_are_kept() {
    check(4, 2, 64, |seed, case| {
        (case.of_target, case.of_draft) = (truncated(seed), truncated(seed / 4));
    });
}

#[test]
fn bias_and_penalties_count_the_tokens_of_the_path() {
    check(3, 3, 60, |seed, case| {
        case.shape = short(seed);
        case.rule = if seed % 5 == 0 { VerifyRule::Match } else { VerifyRule::Ratio };
        case.lookup = (seed % 4 == 0).then(|| vec![1, 1]);
        case.of_draft.bias = [(TargetTokenId(2), -0.5), (TargetTokenId(1), 0.3)].into();
        case.of_target = Sampling {
            presence_penalty: [0.0, 0.7, -1.5][seed as usize % 3],
            frequency_penalty: [0.9, -0.4][seed as usize % 2],
            bias: [(TargetTokenId(1), 0.8), (TargetTokenId(9), 3.0)].into(),
            ..truncated(seed / 3)
        };
    });
}

#[test]
fn what_a_grammar_forbids_has_no_part_in_the_distribution() {
    check(5, 3, 48, |seed, case| {
        case.has_grammar = true;
        case.target.holes = false;
        case.shape = short(seed);
        case.rule = if seed % 5 == 0 { VerifyRule::Match } else { VerifyRule::Ratio };
        case.lookup = (seed % 4 == 0).then(|| vec![1, 2]);
        case.of_target = truncated(seed / 3);
    });
}

#[test]
fn late_tokens_have_no_part_in_the_distribution_until_they_may_come() {
    check(4, 3, 72, |seed, case| {
        case.late_after = 1 + (seed / 3) as usize % 2;
        (case.target.holes, case.has_grammar) = (false, seed % 9 == 4);
        case.shape = short(seed);
        case.rule = if seed % 5 == 0 { VerifyRule::Match } else { VerifyRule::Ratio };
        case.lookup = (seed % 4 == 0).then(|| vec![1, 1]);
        case.of_target = truncated(seed / 3);
    });
}

#[test]
fn drawn_trees_follow_the_distribution() {
    let layouts = [vec![2], vec![3], vec![2, 1], vec![1, 2], vec![2, 2]];
    check(3, 2, 40, |seed, case| {
        case.shape = DraftShape::Sampled { children: layouts[seed as usize % 5].clone() };
        case.of_target = truncated(seed / 5);
    });
}

#[test]
fn certain_trees_and_chains_follow_the_distribution() {
    let shapes = [
        DraftShape::Static { widths: vec![2, 3] },
        DraftShape::Dynamic { width: 2, depth: 3, budget: 5 },
        DraftShape::Chain { length: 3 },
        DraftShape::Sampled { children: vec![2, 2] },
    ];
    check(4, 3, 80, |seed, case| {
        case.shape = shapes[seed as usize % 4].clone();
        // Drawn layouts become certain where proposals are tested by matching.
        case.rule =
            if seed % 4 < 2 && seed % 8 < 4 { VerifyRule::Ratio } else { VerifyRule::Match };
        case.of_target = truncated(seed / 8);
    });
}

#[test]
fn lookup_beside_drawn_proposals_follows_the_distribution() {
    check(3, 2, 48, |seed, case| {
        case.shape = match seed % 3 {
            0 => DraftShape::Chain { length: 2 },
            1 => DraftShape::Sampled { children: vec![2] },
            _ => DraftShape::Sampled { children: vec![2, 1] },
        };
        case.lookup = Some(vec![(seed % 2) as u32, (seed % 3) as u32]);
    });
}

#[test]
fn a_smaller_draft_vocabulary_keeps_the_distribution() {
    check(5, 2, 40, |seed, case| {
        let kept = [vec![0, 3, 4], vec![1], vec![2, 4]][seed as usize % 3].clone();
        case.draft.vocabulary = kept.len();
        case.draft.holes = false;
        case.map = VocabularyMap::new(kept.into_iter().map(TargetTokenId).collect(), 5).ok();
        case.shape = match seed % 2 {
            0 => DraftShape::Chain { length: 2 },
            _ => DraftShape::Sampled { children: vec![2, 1] },
        };
    });
}

#[test]
fn proposals_cut_by_confidence_follow_the_distribution() {
    let shapes = [
        DraftShape::Chain { length: 3 },
        DraftShape::Sampled { children: vec![2, 1] },
        DraftShape::Dynamic { width: 2, depth: 2, budget: 4 },
    ];
    check(3, 3, 60, |seed, case| {
        case.shape = shapes[seed as usize % 3].clone();
        case.of_target = truncated(seed / 3);
        let lookup = LookupChances::new([[0.5; LookupChances::DEPTHS]; MatchClass::COUNT]);
        let worth = Worth { node: 0.3, jump: 0.0, level: 0.1, calibration: 1.2, gain: 0.5, lookup };
        case.confidence = Some(if seed % 2 == 0 { (0.5, None) } else { (0.0, Some(worth)) });
    });
}

#[test]
fn equal_and_disjoint_distributions_are_kept() {
    check(4, 2, 20, |seed, case| {
        if seed % 2 == 0 {
            case.draft = case.target;
        } else {
            case.of_target = Sampling { top_k: Some(1), ..Sampling::at(1.0) };
        }
        case.shape = DraftShape::Sampled { children: vec![2] };
    });
}
