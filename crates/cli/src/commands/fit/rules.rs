//! The rules that choose: which method, and how the time is parted. What is expected of a draft stands in
//! [`expect`](super::expect).

use longdraft_models::TargetConfig;
use longdraft_models::target_model::tensor_specs;
use longdraft_plan::{Layout, Workload};
use longdraft_serving::{Profile, serves};
use longdraft_train::config::TrainConfig;
use longdraft_train::method::{self, Method, Recipe, Room, Round};
use serde::{Deserialize, Serialize};

use super::answers::MOST_OF_A_PROMPT;
use super::expect::{Costs, MOST_LIKELY, Range, chance, tau, together};
use super::measure::{Machine, Trial};
use super::search;
use super::training::evaluations;

/// A draft may pay if the upper end of its range is at least so many times as fast as plain decoding.
pub(super) const WORTH: f64 = 1.05;
/// Passes over the same answers that drafts gain from: the measured ones had two or three.
const EPOCHS: f64 = 3.0;
pub(super) const MOST_EPOCHS: f64 = 8.0;
/// Of the budget, what proof and export may take, and least seconds.
const PROOF: (f64, f64) = (0.15, 4.0);
/// Answers of the proof, over all ways and both with the draft and without, and seconds of export.
const PROOF_ANSWERS: f64 = 256.0;
pub(super) const EXPORT: f64 = 30.0;
/// Tokens of an answer, of the most that it may have, where none was counted yet.
const ANSWER: f64 = 0.6;
/// Answers that a draft is trained on at least.
pub(super) const LEAST_ANSWERS: usize = 8;
/// Seconds of a budget below which rows are short.
const SHORT: f64 = 600.0;
/// Tokens of the longest rows: their memory is that of a few layers, and a document beyond is cut.
const LONGEST_ROW: usize = 16384;

/// A method that could be taken.
pub(super) struct Candidate {
    pub(super) method: &'static Method,
    pub(super) recipe: Recipe,
}

/// What will be done, and what is expected of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) method: String,
    pub(super) row_tokens: usize,
    /// Answers that are asked for in all, and their tokens.
    pub(super) answers: usize,
    pub(super) answer_tokens: f64,
    pub(super) epochs: f64,
    pub(super) steps: u64,
    /// Seconds of the phases.
    pub(super) answering: f64,
    #[serde(default)]
    pub(super) search: f64,
    pub(super) training: f64,
    pub(super) proof: f64,
    /// Proposals of a round that are expected to be best, and that the draft is trained for.
    pub(super) draft_len: usize,
    pub(super) most: usize,
    /// Tokens that are proposed, if not all.
    pub(super) proposed: Option<usize>,
    pub(super) tau: Range,
    /// Of the draft alone, and with lookup beside it, where that was measured.
    pub(super) speed_up: Range,
    #[serde(default)]
    pub(super) with_lookup: Option<Range>,
    /// Bytes on disk and in memory at most.
    pub(super) disk: u64,
    pub(super) memory: u64,
    /// Whether features of all rows are kept in memory.
    pub(super) keeps_features: bool,
}

/// The methods that fit a target, its engines and a wish.
pub(super) fn candidates(
    room: &Room<'_>,
    engines: &[Profile],
    wanted: Option<&str>,
) -> Vec<Candidate> {
    let fits = |method: &&Method| {
        wanted.is_none_or(|name| name == method.name())
            && engines.iter().all(|engine| serves(method.name(), *engine))
    };
    let recipe =
        |method: &'static Method| Some(Candidate { method, recipe: method.fresh().recipe(room)? });
    Method::all().filter(fits).filter_map(recipe).collect()
}

/// The candidate that is expected to bring most, by its sizes: nothing of it was run yet.
pub(super) fn best(
    candidates: Vec<Candidate>,
    machine: &Machine,
    room: &Room<'_>,
) -> Option<Candidate> {
    let Room { target, seconds, .. } = *room;
    let score = |candidate: &Candidate| {
        let Candidate { method, recipe } = candidate;
        let config = probe(method, recipe, room.row_tokens)?;
        let per_token = match Workload::new(&config, target.clone(), Layout::of(1, 1)) {
            Ok(workload) => workload.estimate().operations_per_token,
            Err(_) => return None,
        };
        let tokens = seconds * 1e9 * machine.gflops / per_token.max(1.0);
        let chance = chance(recipe.evidence, tokens)?.middle;
        let draft = |n: usize| predicted_draft(recipe, &config, target, machine, n);
        let costs = Costs { machine, draft: &draft, most: recipe.round.most, surcharge: 1.0 };
        // Of two that do not pay the better one.
        Some(costs.fastest(|n| tau(chance, n)).1)
    };
    let mut scored: Vec<(f64, Candidate)> = candidates
        .into_iter()
        // What was never measured is taken only if it is asked for alone.
        .map(|candidate| (score(&candidate).unwrap_or(0.0), candidate))
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    scored.into_iter().next().map(|(_, candidate)| candidate)
}

/// A configuration that has only a method's keys.
fn probe(method: &Method, recipe: &Recipe, row_tokens: usize) -> Option<TrainConfig> {
    let mut draft = recipe.draft.clone();
    draft.insert("method".into(), method.name().into());
    serde_json::from_value(serde_json::json!({
        "target": "", "output": "", "data": { "train": [], "row_tokens": row_tokens }, "draft": draft,
        "teacher": recipe.teacher,
    }))
    .ok()
}

/// Seconds of a draft's passes for `n` proposals, if its weights are read as fast as the target's.
fn predicted_draft(
    recipe: &Recipe,
    config: &TrainConfig,
    target: &TargetConfig,
    machine: &Machine,
    n: usize,
) -> f64 {
    let Ok(footprint) = config.draft.method.footprint(&config.teacher, target) else {
        return f64::INFINITY;
    };
    let values = |shape: &[usize]| shape.iter().map(|size| *size as f64).product::<f64>();
    let own: f64 = footprint.specs().iter().map(|spec| values(&spec.shape)).sum();
    let all: f64 = tensor_specs(target).iter().map(|spec| values(&spec.shape)).sum();
    let own_head = recipe.round.vocabulary.is_some();
    let proposed = proposed(recipe.round, target.vocab_size).unwrap_or(target.vocab_size);
    let head = if own_head { 0.0 } else { (proposed * target.hidden_size) as f64 };
    recipe.round.passes.count(n) as f64 * (own + head) / all.max(1.0) * machine.step()
}

/// Tokens that are proposed, where the draft leaves it open and the vocabulary is large.
pub(super) fn proposed(round: Round, vocabulary: usize) -> Option<usize> {
    method::proposed(vocabulary).filter(|_| round.vocabulary.is_none())
}

/// What a plan is made from, beside the machine.
pub(super) struct Budget {
    /// Seconds that are left.
    pub(super) seconds: f64,
    pub(super) prompts: usize,
    pub(super) max_tokens: usize,
    /// Tokens that earlier rounds trained on.
    pub(super) learned: f64,
    /// Answers of earlier rounds.
    pub(super) answered: usize,
    /// Whether the draft goes on from another.
    pub(super) goes_on: bool,
    /// Tokens of a row.
    pub(super) row_tokens: usize,
    pub(super) free_memory: Option<u64>,
}

/// Tokens of an answer that may have so many.
pub(super) fn of_answer(max_tokens: usize) -> f64 {
    ANSWER * max_tokens as f64
}

/// Tokens of a packed row: what most prompts and answers have, so that a draft learns to read as far back as it
/// will, and enough of short ones.
pub(super) fn row_tokens(seconds: f64, context: usize, long_text: usize) -> usize {
    let least = if seconds < SHORT { 512 } else { 1024 };
    long_text.next_power_of_two().clamp(least, LONGEST_ROW).min(context)
}

/// Seconds of the proof: of some answers with the prompts before them, as far as a share of the budget allows.
fn proof_seconds(machine: &Machine, budget: &Budget) -> f64 {
    let (share, least) = PROOF;
    let answer = 0.7 * budget.max_tokens.min(128) as f64 * machine.step();
    let whole = PROOF_ANSWERS * (answer + machine.prompt * machine.prefill) + EXPORT;
    (share * budget.seconds).min(whole).max(least).min(budget.seconds / 2.0)
}

/// How answers and training part some seconds.
struct Parts {
    /// Answers in all, and tokens of these and their prompts, which are learned, too.
    answers: usize,
    text_tokens: f64,
    /// Seconds in which they are written.
    answering: f64,
    epochs: f64,
    /// Seconds of the training with its features and measurements.
    training: f64,
}

impl Parts {
    /// Features are made once where they are kept, else whenever a token is learned.
    fn of(rest: f64, (machine, trial, budget): (&Machine, &Trial, &Budget), keeps: bool) -> Self {
        let of_answer = of_answer(budget.max_tokens);
        let of_text = of_answer + machine.prompt;
        let (once, each) =
            if keeps { (trial.capture, trial.step) } else { (0.0, trial.capture + trial.step) };
        let learning = of_text * (once + EPOCHS * each);
        let affordable = rest / (machine.answer(of_answer) + learning);
        let answers = (affordable as usize + budget.answered / 2)
            .clamp(LEAST_ANSWERS, (MOST_OF_A_PROMPT * budget.prompts).max(LEAST_ANSWERS));
        let new = answers.saturating_sub(budget.answered) as f64;
        let text_tokens = answers as f64 * of_text;
        let answering = (new * machine.answer(of_answer)).min(0.6 * rest);
        let (_, measuring) = evaluations((text_tokens, rest - answering), budget.row_tokens, trial);
        let left = (rest - answering - text_tokens * once - measuring).max(0.1 * rest);
        let epochs = (left / (text_tokens * each)).clamp(0.1, MOST_EPOCHS);
        let training = text_tokens * (once + epochs * each) + measuring;
        Self { answers, text_tokens, answering, epochs, training }
    }

    /// Bytes of the features of a text.
    fn features(text_tokens: f64, trial: &Trial) -> u64 {
        (trial.features_of_token * text_tokens) as u64
    }

    fn features_fit(&self, trial: &Trial, budget: &Budget) -> bool {
        let features = Self::features(self.text_tokens, trial);
        budget.free_memory.is_none_or(|free| features < free * 2 / 5)
    }
}

impl Plan {
    /// Parts the time: as many answers as can be learned from in [`EPOCHS`] passes, [`MOST_OF_A_PROMPT`] at most.
    pub(super) fn new(
        candidate: &Candidate,
        machine: &Machine,
        trial: &Trial,
        budget: &Budget,
    ) -> Self {
        let round = candidate.recipe.round;
        let proof = proof_seconds(machine, budget);
        // Known before it is known how much of the rest trains: half of it does.
        let starts = if budget.goes_on { 0 } else { candidate.recipe.starts.len() };
        let cost = search::Cost::of(budget.row_tokens, trial);
        let search = match search::Size::of(0.5 * (budget.seconds - proof), cost, starts) {
            Some(size) if budget.learned <= 0.0 => size.seconds(cost),
            _ => 0.0,
        };
        let rest = budget.seconds - proof - search;
        let kept = Parts::of(rest, (machine, trial, budget), true);
        // Features of a text that is read once at most are not worth their room.
        let keeps_features = kept.epochs > 1.0 && kept.features_fit(trial, budget);
        let parts =
            if keeps_features { kept } else { Parts::of(rest, (machine, trial, budget), false) };
        let Parts { answers, text_tokens, answering, epochs, training } = parts;
        let learned = epochs * text_tokens;
        let row_tokens = budget.row_tokens;
        let steps = (learned / row_tokens as f64).ceil().max(1.0) as u64;
        let features = Parts::features(text_tokens, trial);
        let all = budget.learned + learned;
        let chance = chance(candidate.recipe.evidence, all).unwrap_or(Range {
            low: 0.0,
            middle: 0.0,
            high: MOST_LIKELY / 2.0,
        });
        let draft = |n: usize| trial.draft(n, round.most);
        let surcharge = trial.surcharge(machine, round.most);
        let costs = Costs { machine, draft: &draft, most: round.most, surcharge };
        let (draft_len, _) = costs.fastest(|n| tau(chance.middle, n));
        let speed_up = chance.map(|chance| costs.paced(chance));
        Self {
            method: candidate.method.name().to_owned(),
            row_tokens,
            answers,
            answer_tokens: answers as f64 * of_answer(budget.max_tokens),
            epochs,
            steps,
            answering,
            search,
            training,
            proof,
            draft_len,
            most: round.most,
            proposed: trial.proposed,
            tau: chance.map(|chance| tau(chance, draft_len)),
            speed_up,
            with_lookup: machine.lookup.map(|lookup| speed_up.map(|draft| together(draft, lookup))),
            disk: 4 * trial.checkpoint + (text_tokens * 16.0) as u64,
            memory: trial.memory + if keeps_features { features } else { 0 },
            keeps_features,
        }
    }

    /// The chains that are best by what was measured in the end: shares of rounds in which so many proposals
    /// held, first one first.
    pub(super) fn best_chain(&self, survival: &[f64], machine: &Machine, trial: &Trial) -> usize {
        let draft = |n: usize| trial.draft(n, self.most);
        let surcharge = trial.surcharge(machine, self.most);
        let costs = Costs { machine, draft: &draft, most: self.most, surcharge };
        costs.fastest(|n| 1.0 + survival.iter().take(n).sum::<f64>()).0
    }

    /// Whether lookup alone, which needs no training, is as fast as the draft alone is expected to be.
    pub(super) fn lookup_is_better(&self, machine: &Machine) -> bool {
        machine.lookup.is_some_and(|lookup| lookup > 1.0 && lookup >= self.speed_up.middle)
    }

    /// Whether a draft may pay at all.
    pub(super) fn may_pay(&self) -> bool {
        self.speed_up.high >= WORTH
    }
}

/// The recipe of every method that has one, for a published target.
#[cfg(test)]
pub(super) fn recipes_of_all_methods() -> Vec<Recipe> {
    let target = longdraft_models::published::published_config("meta-llama/Llama-3.1-8B-Instruct");
    let target = target.expect("it is listed");
    let room = Room { target: &target, seconds: 7200.0, row_tokens: 1024 };
    Method::all().filter_map(|method| method.fresh().recipe(&room)).collect()
}

#[cfg(test)]
mod tests {
    use longdraft_train::method::{Evidence, Passes, Start};

    use super::*;

    const EVIDENCE: [Evidence; 2] = [
        Evidence { tokens: 1e5, draft_len: 4, tau: 1.25 },
        Evidence { tokens: 1e6, draft_len: 5, tau: 1.7 },
    ];

    fn machine(pass: f64) -> Machine {
        let passes = [1, 2, 4, 8].map(|rows| (rows, 1e-2 * (1.0 + pass * (rows - 1) as f64)));
        Machine { passes: passes.to_vec(), ..Machine::default() }
    }

    fn trial() -> Trial {
        Trial { step: 1e-3, capture: 5e-4, seconds: 2e-3, ..Trial::default() }
    }

    fn candidate() -> Candidate {
        let round = Round { most: 5, passes: Passes::EachToken, vocabulary: None };
        let recipe = Recipe {
            draft: serde_json::Map::new(),
            teacher: serde_json::Map::new(),
            starts: ["last_layer", "random"]
                .map(|init| Start { init, learning_rate: 1e-3 })
                .to_vec(),
            learning_rate: 1e-3,
            round,
            evidence: &EVIDENCE,
        };
        Candidate { method: Method::first(), recipe }
    }

    fn budget(seconds: f64) -> Budget {
        Budget {
            seconds,
            prompts: 3000,
            max_tokens: 256,
            learned: 0.0,
            answered: 0,
            goes_on: false,
            row_tokens: 1024,
            free_memory: None,
        }
    }

    #[test]
    fn cheap_passes_pay_and_those_bound_by_arithmetic_do_not() {
        let of = |pass: f64| Plan::new(&candidate(), &machine(pass), &trial(), &budget(7200.0));
        let (cheap, dear) = (of(0.02), of(1.0));
        assert!(cheap.may_pay() && cheap.speed_up.middle > 1.1, "{cheap:?}");
        assert!(!dear.may_pay(), "{dear:?}");
        assert!(cheap.draft_len > dear.draft_len);
        assert!(cheap.speed_up.low < cheap.speed_up.middle);
        // A pace leaves out what does not pay.
        assert!((dear.speed_up.middle - 1.0).abs() < 1e-9);
    }

    #[test]
    fn lookup_alone_is_named_where_it_is_better() {
        let of = |lookup| {
            let machine = Machine { lookup, ..machine(0.02) };
            let plan = Plan::new(&candidate(), &machine, &trial(), &budget(7200.0));
            (plan.lookup_is_better(&machine), plan.with_lookup.map(|range| range.middle > 1.5))
        };
        assert_eq!(of(None), (false, None));
        assert!(!of(Some(1.02)).0 && of(Some(2.5)) == (true, Some(true)));
    }

    #[test]
    fn the_time_is_parted_within_the_budget() {
        for seconds in [60.0, 600.0, 7200.0, 86400.0] {
            let plan = Plan::new(&candidate(), &machine(0.1), &trial(), &budget(seconds));
            let all = plan.answering + plan.search + plan.training + plan.proof;
            assert!(plan.search <= 0.06 * seconds && (plan.search > 0.0) == (seconds > 3600.0));
            assert!(all <= 1.02 * seconds, "{seconds}: {plan:?}");
            assert!(plan.steps > 0 && plan.answers >= LEAST_ANSWERS);
        }
    }

    #[test]
    fn chains_are_as_long_as_their_proposals_hold() {
        let plan = Plan { most: 5, ..Plan::default() };
        let best = |survival: &[f64]| plan.best_chain(survival, &machine(0.1), &trial());
        assert_eq!(best(&[0.9, 0.85, 0.8, 0.75, 0.7]), 5);
        assert_eq!(best(&[0.6, 0.05, 0.0, 0.0, 0.0]), 1);
    }

    #[test]
    fn rows_are_as_long_as_prompts_and_answers() {
        let of = |long_text| row_tokens(7200.0, 4096, long_text);
        assert_eq!((of(50), of(1500), of(100_000)), (1024, 2048, 4096));
        assert_eq!(row_tokens(60.0, 1 << 20, 1 << 18), LONGEST_ROW);
        assert_eq!((row_tokens(60.0, 300, 10), row_tokens(60.0, 4096, 10)), (300, 512));
    }

    #[test]
    fn vocabularies_that_training_fixes_stay() {
        let round = Round { most: 5, passes: Passes::OneBlock, vocabulary: None };
        assert_eq!(proposed(round, 49152), Some(8192));
        assert_eq!(proposed(Round { vocabulary: Some(100), ..round }, 49152), None);
    }
}
