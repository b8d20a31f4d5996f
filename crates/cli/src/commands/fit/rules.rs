//! The rules that choose: which method is taken, and what a plan says. How its time is parted stands in
//! [`parting`](super::parting), what is expected of its draft, and the data that this rests on, in
//! [`expect`](super::expect).

use longdraft_models::TargetConfig;
use longdraft_models::target_model::tensor_specs;
use longdraft_plan::{Layout, Workload};
use longdraft_serving::{Profile, serves};
use longdraft_train::config::TrainConfig;
use longdraft_train::method::{self, Method, Recipe, Room, Round};
use serde::{Deserialize, Serialize};

use super::expect::{Costs, MOST_LIKELY, Range, chance, tau, together};
use super::measure::Machine;
use super::parting::{Budget, of_answer, parted};
use super::stages::Stage;
use super::trial::Trial;

/// A draft may pay if the upper end of its range is at least so many times as fast as plain decoding.
pub(super) const WORTH: f64 = 1.05;

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
    /// The stages of a training of long rows; `steps` are those of all. None where it has but one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) stages: Vec<Stage>,
    /// Seconds of the phases; those of the training are with its features and measurements.
    pub(super) answering: f64,
    pub(super) search: f64,
    /// Whether the search keeps features of its rows in memory.
    pub(super) search_keeps_features: bool,
    pub(super) training: f64,
    pub(super) proof: f64,
    /// Proposals of a round that are expected to be best, and that the draft is trained for.
    pub(super) draft_len: usize,
    pub(super) most: usize,
    /// Tokens that are proposed, if not all.
    pub(super) proposed: Option<usize>,
    /// As the proof reports it: at measured pace, and of a full chain every round.
    pub(super) tau: Range,
    pub(super) full_tau: Range,
    /// Of the draft alone at measured pace, and with lookup beside it, where that was measured.
    pub(super) speed_up: Range,
    pub(super) with_lookup: Option<Range>,
    /// Tokens of the answers and their prompts, which are learned, too, and most bytes of features in memory at a time:
    /// known while the plan is made.
    #[serde(skip)]
    pub(super) text_tokens: f64,
    #[serde(skip)]
    pub(super) features: u64,
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

/// What rounds of `draft` seconds cost, of `most` proposals at most.
fn costs<'a>(
    machine: &'a Machine,
    trial: &Trial,
    draft: &'a dyn Fn(usize) -> f64,
    most: usize,
) -> Costs<'a> {
    Costs { machine, draft, most, surcharge: trial.surcharge(machine, most) }
}

impl Plan {
    /// Parts the time, and says what to expect of a draft that learns so much.
    pub(super) fn new(
        candidate: &Candidate,
        machine: &Machine,
        trial: &Trial,
        budget: &Budget,
    ) -> Self {
        let recipe = &candidate.recipe;
        let parted = parted(recipe.starts.len(), machine, trial, budget);
        let learned = parted.epochs * parted.text_tokens;
        let steps = if parted.stages.is_empty() {
            (learned / budget.row_tokens as f64).ceil().max(1.0) as u64
        } else {
            parted.stages.iter().map(|stage| stage.steps).sum()
        };
        // Every stage keeps its own.
        let checkpoints = 4 * parted.stages.len().max(1) as u64;
        let answers_of_row = machine.answers_of_row();
        let plan = Self {
            method: candidate.method.name().to_owned(),
            row_tokens: budget.row_tokens,
            answer_tokens: parted.answers as f64 * answers_of_row * of_answer(budget.max_tokens),
            steps,
            most: recipe.round.most,
            proposed: trial.proposed,
            disk: checkpoints * trial.checkpoint + (parted.text_tokens * 16.0) as u64,
            memory: trial.memory + parted.features,
            ..parted
        };
        let unknown = Range { low: 0.0, middle: 0.0, high: MOST_LIKELY / 2.0 };
        let chance = chance(recipe.evidence, budget.learned + learned).unwrap_or(unknown);
        plan.expecting(chance, machine, trial)
    }

    /// The same with what a draft brings whose proposals hold with a chance.
    fn expecting(self, chance: Range, machine: &Machine, trial: &Trial) -> Self {
        let most = self.most;
        let draft = |n: usize| trial.draft(n, most);
        let costs = costs(machine, trial, &draft, most);
        let speed_up = chance.map(|chance| costs.paced(chance).1);
        let with_lookup = machine.lookup_range().map(|lookup| Range {
            low: together(speed_up.low, lookup.low),
            middle: together(speed_up.middle, lookup.middle),
            high: together(speed_up.high, lookup.high),
        });
        Self {
            draft_len: costs.fastest(|n| tau(chance.middle, n)).0,
            tau: chance.map(|chance| costs.paced(chance).0),
            full_tau: chance.map(|chance| tau(chance, most)),
            speed_up,
            with_lookup,
            ..self
        }
    }

    /// The chains that are best by what was measured in the end: shares of rounds in which so many proposals
    /// held, first one first.
    pub(super) fn best_chain(&self, survival: &[f64], machine: &Machine, trial: &Trial) -> usize {
        let draft = |n: usize| trial.draft(n, self.most);
        let costs = costs(machine, trial, &draft, self.most);
        costs.fastest(|n| 1.0 + survival.iter().take(n).sum::<f64>()).0
    }

    /// Tokens of the rows that the training begins with.
    pub(super) fn first_row(&self) -> usize {
        self.stages.first().map_or(self.row_tokens, |stage| stage.row_tokens)
    }

    /// Tokens of all steps.
    pub(super) fn learned(&self) -> f64 {
        let of = |steps: u64, row_tokens: usize| steps as f64 * row_tokens as f64;
        if self.stages.is_empty() {
            return of(self.steps, self.row_tokens);
        }
        self.stages.iter().map(|stage| of(stage.steps, stage.row_tokens)).sum()
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

    use super::super::parting::{LEAST_ANSWERS, budget};
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
    fn the_tau_that_is_said_is_that_of_the_proof() {
        let of = |pass: f64| Plan::new(&candidate(), &machine(pass), &trial(), &budget(7200.0));
        for pass in [0.02, 0.1, 0.3] {
            let plan = of(pass);
            let full = plan.full_tau;
            // Prompts have no tokens here.
            let learned = plan.epochs * plan.answer_tokens;
            let chance = chance(&EVIDENCE, learned).expect("measured");
            assert!((full.middle - tau(chance.middle, plan.most)).abs() < 1e-9, "{plan:?}");
            // A pace that drafts less has shorter chains, at most as long as full ones.
            assert!(plan.tau.middle <= full.middle && plan.tau.high <= full.high, "{plan:?}");
            let of_best = tau(chance.middle, plan.draft_len);
            assert!(plan.speed_up.middle <= 1.0 || (plan.tau.middle - of_best).abs() < 1e-9);
        }
        // Where nothing pays, a pass brings a token.
        assert!((of(1.0).tau.middle - 1.0).abs() < 1e-9 && of(1.0).full_tau.low > 1.0);
    }

    #[test]
    fn lookup_adds_its_gain_with_its_interval() {
        let (lookup, lookup_interval) = (Some(1.2), Some((1.1, 1.4)));
        let machine = Machine { lookup, lookup_interval, ..machine(0.02) };
        let known = Plan::new(&candidate(), &machine, &trial(), &budget(7200.0));
        let (draft, both) = (known.speed_up, known.with_lookup.expect("measured"));
        assert!((both.middle - draft.middle - 0.2).abs() < 1e-9, "{known:?}");
        assert!((both.low - draft.low - 0.1).abs() < 1e-9, "{known:?}");
        assert!((both.high - draft.high - 0.4).abs() < 1e-9, "{known:?}");
    }

    #[test]
    fn lookup_alone_is_named_where_it_is_better() {
        let of = |lookup: Option<f64>| {
            let lookup_interval = lookup.map(|lookup| (lookup, lookup));
            let machine = Machine { lookup, lookup_interval, ..machine(0.02) };
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
    fn a_plan_of_long_rows_tells_its_stages() {
        let stages = super::super::stages::of(8192, 1024, true);
        let budget = Budget { row_tokens: 8192, stages, ..budget(7200.0) };
        let plan = Plan::new(&candidate(), &machine(0.1), &trial(), &budget);
        assert_eq!((plan.stages.len(), plan.first_row(), plan.row_tokens), (3, 1024, 8192));
        let steps: u64 = plan.stages.iter().map(|stage| stage.steps).sum();
        assert!(plan.steps == steps && plan.stages.iter().all(|stage| stage.steps > 0), "{plan:?}");
        assert!(
            (plan.learned() / (plan.epochs * plan.answer_tokens) - 1.0).abs() < 0.2,
            "{plan:?}"
        );
        let text = serde_json::to_string(&plan).expect("written");
        let read: Plan = serde_json::from_str(&text).expect("read");
        let names: Vec<&str> = read.stages.iter().map(|stage| stage.name.as_str()).collect();
        assert_eq!(names, ["base", "long", "answers"]);
        // A plan of short rows has none.
        let short = serde_json::to_value(Plan { steps: 3, row_tokens: 10, ..Plan::default() });
        let short = short.expect("written");
        assert!(short.get("stages").is_none(), "{short}");
        let short: Plan = serde_json::from_value(short).expect("read");
        assert!(short.stages.is_empty() && (short.learned() - 30.0).abs() < 1e-9);
    }

    #[test]
    fn chains_are_as_long_as_their_proposals_hold() {
        let plan = Plan { most: 5, ..Plan::default() };
        let best = |survival: &[f64]| plan.best_chain(survival, &machine(0.1), &trial());
        assert_eq!(best(&[0.9, 0.85, 0.8, 0.75, 0.7]), 5);
        assert_eq!(best(&[0.6, 0.05, 0.0, 0.0, 0.0]), 1);
    }

    #[test]
    fn vocabularies_that_training_fixes_stay() {
        let round = Round { most: 5, passes: Passes::OneBlock, vocabulary: None };
        assert_eq!(proposed(round, 49152), Some(8192));
        assert_eq!(proposed(Round { vocabulary: Some(100), ..round }, 49152), None);
    }
}
