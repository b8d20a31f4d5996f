//! How the time is parted: answers, the search for a start, training, proof.
//!
//! The proof has its share first, then the search, if half of the rest affords one. Of what is left, as many answers are
//! written as can be learned from in [`EPOCHS`] passes, [`MOST_OF_A_PROMPT`] of a prompt at most. Features of rows stay in
//! memory where they take at most [`OF_MEMORY`] of what is free, in the training as in its search; elsewhere they are made
//! anew in every step, which takes its time. How a training of long rows is parted again stands in [`stages`].

use super::answers::MOST_OF_A_PROMPT;
use super::measure::Machine;
use super::proof::of_prompt;
use super::rules::Plan;
use super::search;
use super::stages::{self, OfToken, Stage};
use super::training::evaluations;
use super::trial::Trial;

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
/// Share of the free memory that features may take.
const OF_MEMORY: f64 = 0.4;

/// What a plan is made from, beside the machine.
pub(super) struct Budget {
    pub(super) seconds: f64,
    pub(super) prompts: usize,
    pub(super) max_tokens: usize,
    /// Tokens that earlier rounds trained on.
    pub(super) learned: f64,
    /// Answers of earlier rounds.
    pub(super) answered: usize,
    /// Whether the draft goes on from another.
    pub(super) goes_on: bool,
    /// Tokens of a row, and the stages of a training of long ones.
    pub(super) row_tokens: usize,
    pub(super) stages: Vec<Stage>,
    pub(super) free_memory: Option<u64>,
}

impl Budget {
    /// Whether features of so many bytes may stay in memory.
    fn has_room(&self, bytes: u64) -> bool {
        self.free_memory.is_none_or(|free| (bytes as f64) < OF_MEMORY * free as f64)
    }

    /// Tokens of the rows that the training begins with, and the share of its tokens that it reads in them.
    fn first(&self) -> (usize, f64) {
        self.stages.first().map_or((self.row_tokens, 1.0), |stage| (stage.row_tokens, stage.share))
    }
}

/// Tokens of an answer that may have so many.
pub(super) fn of_answer(max_tokens: usize) -> f64 {
    ANSWER * max_tokens as f64
}

/// Tokens of a packed row: what most prompts and answers have, so that a draft learns to read as far back as it
/// will, and enough of short ones.
pub(super) fn row_tokens(seconds: f64, context: usize, long_text: usize) -> usize {
    let whole = long_text.min(LONGEST_ROW).next_power_of_two();
    whole.max(short_row(seconds)).min(context)
}

/// Tokens of a row that is as short as any.
pub(super) fn short_row(seconds: f64) -> usize {
    if seconds < SHORT { 512 } else { 1024 }
}

/// How a budget is parted, of a draft that may begin with so many things: a plan with its phases, answers and stages.
pub(super) fn parted(starts: usize, machine: &Machine, trial: &Trial, budget: &Budget) -> Plan {
    let proof = proof_seconds(machine, budget);
    let (first_row, first_share) = budget.first();
    let of_search = search::features(first_row, trial);
    let search_keeps_features = budget.has_room(of_search);
    // Known before it is known how much of the rest trains: half of it does.
    let starts = if budget.goes_on { 0 } else { starts };
    let cost = search::Cost::of(first_row, &trial.in_rows(first_row), search_keeps_features);
    let search = match search::Size::of(0.5 * (budget.seconds - proof), cost, starts) {
        Some(size) if budget.learned <= 0.0 => size.seconds(cost),
        _ => 0.0,
    };
    let rest = budget.seconds - proof - search;
    let kept = learned(rest, (machine, trial, budget), true);
    let of_training = (trial.features_of_token * kept.text_tokens) as u64;
    // Features of a text that is read once at most are not worth their room.
    let keeps_features = kept.epochs * first_share > 1.0 && budget.has_room(of_training);
    let plan = if keeps_features { kept } else { learned(rest, (machine, trial, budget), false) };
    let of_search = if search > 0.0 && search_keeps_features { of_search } else { 0 };
    let of_training = if keeps_features { of_training } else { 0 };
    let text = (plan.text_tokens, plan.epochs);
    let stages = stages::planned(&budget.stages, (trial, keeps_features), text, plan.training);
    let features = of_search.max(of_training);
    Plan { stages, search, search_keeps_features, proof, features, keeps_features, ..plan }
}

/// Seconds of the proof: of some answers with the prompts before them, as far as a share of the budget allows.
fn proof_seconds(machine: &Machine, budget: &Budget) -> f64 {
    let (share, least) = PROOF;
    let whole = PROOF_ANSWERS * of_prompt(budget.max_tokens, machine) + EXPORT;
    (share * budget.seconds).min(whole).max(least).min(budget.seconds / 2.0)
}

/// How answers and training part some seconds. Features are made once where they are kept, else whenever a token is
/// learned.
fn learned(rest: f64, (machine, trial, budget): (&Machine, &Trial, &Budget), keeps: bool) -> Plan {
    let of_answer = of_answer(budget.max_tokens);
    let of_text = machine.answers_of_row() * of_answer + machine.lengths.prompt;
    let OfToken { once, each } = OfToken::over(&budget.stages, trial, keeps);
    let learning = of_text * (once + EPOCHS * each);
    let affordable = rest / (machine.row(of_answer) + learning);
    let answers = (affordable as usize + budget.answered / 2)
        .clamp(LEAST_ANSWERS, (MOST_OF_A_PROMPT * budget.prompts).max(LEAST_ANSWERS));
    let new = answers.saturating_sub(budget.answered) as f64;
    let text_tokens = answers as f64 * of_text;
    let answering = (new * machine.row(of_answer)).min(0.6 * rest);
    let (row, _) = budget.first();
    let (_, measuring) = evaluations((text_tokens, rest - answering), row, &trial.in_rows(row));
    let left = (rest - answering - text_tokens * once - measuring).max(0.1 * rest);
    let epochs = (left / (text_tokens * each)).clamp(0.1, MOST_EPOCHS);
    let training = text_tokens * (once + epochs * each) + measuring;
    Plan { answers, epochs, answering, training, text_tokens, ..Plan::default() }
}

/// A budget of some seconds for the program's own prompts.
#[cfg(test)]
pub(super) fn budget(seconds: f64) -> Budget {
    Budget {
        seconds,
        prompts: 3000,
        max_tokens: 256,
        learned: 0.0,
        answered: 0,
        goes_on: false,
        row_tokens: 1024,
        stages: Vec::new(),
        free_memory: None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::lengths::Lengths;
    use super::super::trial::LongRows;
    use super::*;

    fn machine() -> Machine {
        let passes = [1, 2, 4, 8].map(|rows| (rows, 1e-2 * (1.0 + 0.1 * (rows - 1) as f64)));
        let lengths = Lengths { prompt: 40.0, first_prompt: 40.0, ..Lengths::default() };
        Machine { passes: passes.to_vec(), lengths, prefill: 1e-3, ..Machine::default() }
    }

    fn trial() -> Trial {
        Trial { step: 1e-3, capture: 5e-4, features_of_token: 4096.0, ..Trial::default() }
    }

    fn with_memory(free_memory: Option<u64>) -> Plan {
        let budget = Budget { free_memory, ..budget(7200.0) };
        parted(2, &machine(), &trial(), &budget)
    }

    #[test]
    fn features_stay_in_memory_where_they_have_room_also_those_of_a_search() {
        let known = with_memory(None);
        assert!(known.search > 0.0 && known.search_keeps_features && known.keeps_features);
        // The search learns from fewer rows than the training.
        let of_search = search::features(1024, &trial());
        assert!(known.features > of_search, "{} {of_search}", known.features);
        let middle = with_memory(Some(4 * of_search));
        assert!(middle.search_keeps_features && !middle.keeps_features && middle.search > 0.0);
        assert_eq!(middle.features, of_search);
        let none = with_memory(Some(2 * of_search));
        assert!(!none.search_keeps_features && !none.keeps_features && none.search > 0.0);
        assert_eq!(none.features, 0);
    }

    #[test]
    fn rows_of_several_turns_take_the_time_of_all_of_their_answers() {
        let of = |turns: f64| {
            let lengths = Lengths { turns, ..machine().lengths };
            let machine = Machine { lengths, ..machine() };
            parted(2, &machine, &trial(), &budget(7200.0))
        };
        let (one, four) = (of(1.0), of(4.0));
        assert!(four.answers * 3 < one.answers, "{} {}", one.answers, four.answers);
        let all = four.answering + four.search + four.training + four.proof;
        assert!(all <= 1.02 * 7200.0, "{all}");
        // The tokens that are learned stay about the same.
        assert!((0.8..1.25).contains(&(four.text_tokens / one.text_tokens)));
    }

    #[test]
    fn long_rows_take_stages_and_the_time_holds() {
        let lengths = Lengths { prompt: 5000.0, first_prompt: 5000.0, ..Lengths::default() };
        let machine = Machine { lengths, ..machine() };
        let long = LongRows { short: 1024, row_tokens: 8192, step: 2e-3, capture: 1e-3 };
        let trial = Trial { long: Some(long), ..trial() };
        for seconds in [1800.0, 7200.0, 86400.0] {
            let budget = Budget {
                row_tokens: 8192,
                stages: stages::of(8192, 1024, true),
                ..budget(seconds)
            };
            let parting = parted(2, &machine, &trial, &budget);
            let of_stages: f64 = parting.stages.iter().map(|stage| stage.seconds).sum();
            assert!((of_stages - parting.training).abs() < 1e-6 * seconds, "{seconds}");
            let all = parting.answering + parting.search + parting.training + parting.proof;
            assert!(all <= 1.02 * seconds && parting.stages.len() == 3, "{seconds}: {all}");
            // A plan in whole rows alone reads fewer tokens in the same time.
            let whole = Budget { stages: Vec::new(), ..budget };
            let dear =
                Trial { step: long.step, capture: long.capture, long: None, ..trial.clone() };
            let whole = parted(2, &machine, &dear, &whole);
            let tokens = |plan: &Plan| plan.epochs * plan.text_tokens;
            assert!(tokens(&parting) >= tokens(&whole), "{seconds}");
            assert!(whole.stages.is_empty());
        }
    }

    #[test]
    fn rows_are_as_long_as_prompts_and_answers() {
        let of = |long_text| row_tokens(7200.0, 4096, long_text);
        assert_eq!((of(50), of(1500), of(100_000)), (1024, 2048, 4096));
        assert_eq!(row_tokens(60.0, 1 << 20, 1 << 18), LONGEST_ROW);
        // Whatever `--max-tokens` says.
        let lengths = Lengths { long_prompt: 100, long_turns: 3, ..Lengths::default() };
        let endless = Machine { lengths, ..machine() }.long_row(of_answer(usize::MAX));
        assert_eq!(row_tokens(60.0, 1 << 20, endless), LONGEST_ROW);
        assert_eq!((row_tokens(60.0, 300, 10), row_tokens(60.0, 4096, 10)), (300, 512));
    }
}
