//! What `fit` says: the plan before its time is spent, and the result.

use longdraft_models::disk::readable_bytes;
use longdraft_report::words::clock;
use longdraft_train::checkpoint::CheckpointState;
use serde_json::Value;

use super::answers::Cleaned;
use super::comparing::Compared;
use super::divergence::Diverged;
use super::expect::Range;
use super::measure::Machine;
use super::prompts::Split;
use super::rules::{Plan, WORTH};
use super::search::{Choice, Tried};
use super::stages::Stage;
use super::training;
use super::trial::Trial;
use crate::terminal::counted;

/// Plain steps of a pass over four rows, from which passes and not training are why drafts do not pay.
const DEAR: f64 = 1.6;

/// What was found among the prompts.
pub(super) fn prompts(split: &Split) {
    let Split { source, training, shipped, held_out, general, duplicates, unusable, alike } = split;
    let added = if *shipped > 0 {
        format!(", and {shipped} that the program carries, because there are few")
    } else {
        String::new()
    };
    let left_out: Vec<String> = [
        (counted(*duplicates, "duplicate"), *duplicates),
        (format!("{} without a prompt", counted(*unusable, "row")), *unusable),
        (format!("{alike} about the same as one that is set aside"), *alike),
    ]
    .into_iter()
    .filter(|(_, count)| *count > 0)
    .map(|(what, _)| what)
    .collect();
    let left_out = if left_out.is_empty() {
        String::new()
    } else {
        format!("; left out: {}", left_out.join(", "))
    };
    let general = if *general > 0 {
        format!(" (and {general} of the program's own, to compare)")
    } else {
        String::new()
    };
    errln!(
        "[prompts] {source}: {held_out} set aside to prove the result{general}, {training} to learn from{added}{left_out}"
    );
}

/// What the target takes here, where answers have so many tokens.
pub(super) fn machine(machine: &Machine, of_answer: f64) {
    let ms = |rows| 1e3 * machine.pass(rows);
    errln!(
        "[measure] a plain step takes {:.1} ms ({:.0} tok/s), a pass over 4 rows {:.1} ms, over 8 {:.1}, over 16 {:.1}; a \
         prompt is read at {:.0} tok/s, {} answers at a time are written at {:.0}",
        ms(1),
        1.0 / machine.step().max(1e-9),
        ms(4),
        ms(8),
        ms(16),
        1.0 / machine.prefill.max(1e-9),
        machine.batch(),
        machine.answers_of_row() * of_answer / machine.row(of_answer).max(1e-9)
    );
    if let Some(lookup) = machine.lookup_range() {
        errln!(
            "[measure] prompt lookup alone, which needs no training: {} times as fast here",
            measured(lookup)
        );
    }
}

/// A measured value with its interval.
fn measured(Range { low, middle, high }: Range) -> String {
    format!("{middle:.2} [{low:.2}, {high:.2}]")
}

fn range(range: Range) -> String {
    format!("{:.2} ({:.2} to {:.2})", range.middle, range.low, range.high)
}

/// What will be done and what to expect.
pub(super) fn plan(plan: &Plan, (machine, trial): (&Machine, &Trial), free: Option<u64>) {
    errln!(
        "[measure] training learns {:.0} tok/s, the target's features are made at {:.0}; a round's draft of {} proposals takes \
         {:.1} ms",
        1.0 / trial.step.max(1e-9),
        1.0 / trial.capture.max(1e-9),
        plan.most,
        1e3 * trial.seconds
    );
    if let Some(long) = trial.long {
        errln!(
            "[measure] in rows of {} tokens training learns {:.0} tok/s, features are made at {:.0}",
            long.row_tokens,
            1.0 / long.step.max(1e-9),
            1.0 / long.capture.max(1e-9)
        );
    }
    outln!("plan: a draft of method {}, chains of {}", plan.method, plan.draft_len);
    if let Some(size) = plan.proposed {
        outln!("  proposes the {size} most frequent tokens");
    }
    phases(plan);
    let free = free.map_or_else(String::new, |free| format!(" of {} free", readable_bytes(free)));
    outln!(
        "  needs {} of disk{free}, {} of memory",
        readable_bytes(plan.disk),
        readable_bytes(plan.memory)
    );
    expected(plan, machine);
}

/// The phases with their time, a line each.
fn phases(plan: &Plan) {
    outln!(
        "  answers   {:>8}  {} answers of the target, some {:.0} k tokens",
        clock(plan.answering),
        plan.answers,
        plan.answer_tokens / 1e3
    );
    if plan.search > 0.0 {
        outln!("  start     {:>8}  short trainings, to find how best to begin", clock(plan.search));
    }
    let features = if plan.keeps_features { "kept in memory" } else { "made anew" };
    if plan.stages.is_empty() {
        outln!(
            "  training  {:>8}  {} steps of {} tokens, {:.1} times over the answers, features {features}",
            clock(plan.training),
            plan.steps,
            plan.row_tokens,
            plan.epochs
        );
    } else {
        outln!(
            "  training  {:>8}  {} stages, because rows are long; {:.1} times over the answers in all",
            clock(plan.training),
            plan.stages.len(),
            plan.epochs
        );
        for (index, stage) in plan.stages.iter().enumerate() {
            let features = if index == 0 { features } else { "made anew" };
            self::stage(stage, index, features);
        }
    }
    outln!(
        "  proof     {:>8}  with and without the draft, on prompts that were set aside",
        clock(plan.proof)
    );
}

/// A stage of the training with its time.
fn stage(stage: &Stage, index: usize, features: &str) {
    let learned = match (index, stage.answers_only) {
        (0, _) => "all text in short rows",
        (_, false) => "all text in whole rows",
        (_, true) => "the answers in whole rows",
    };
    outln!(
        "    {:<8}{:>8}  {learned}: {} steps of {} tokens, features {features}",
        stage.name,
        clock(stage.seconds),
        stage.steps,
        stage.row_tokens
    );
}

/// What the draft is expected to bring, in the quantities that the proof measures.
fn expected(plan: &Plan, machine: &Machine) {
    let full =
        format!(" (tau {} in full chains of {}, every round)", range(plan.full_tau), plan.most);
    outln!(
        "expected: tau {}, {} times as fast as plain decoding, both at measured pace{full}. Few drafts were measured so \
         far, all of one small target: the range is a guess from them, which the proof replaces",
        range(plan.tau),
        range(plan.speed_up)
    );
    let Some((lookup, both)) = machine.lookup_range().zip(plan.with_lookup) else { return };
    outln!(
        "with prompt lookup beside it, which alone is {} times as fast here: {} times",
        measured(lookup),
        range(both)
    );
    if plan.lookup_is_better(machine) {
        outln!(
            "note: prompt lookup alone, without any training, was measured to be as fast as this draft alone is expected \
             to be; the training pays only for what the draft adds to it"
        );
    }
}

/// Why nothing is trained, and what to do instead.
pub(super) fn does_not_pay(plan: &Plan, machine: &Machine, lookup: &str) {
    let dear = machine.pass(4) / machine.step().max(1e-9);
    let reason = if dear > DEAR {
        format!(
            "A pass over 4 rows takes {dear:.1} times a plain step, so that proposals cost almost what they save"
        )
    } else {
        format!(
            "In this time a draft is expected to learn no more than tau {:.2} in chains of {}; more --time may change \
             that",
            plan.full_tau.middle, plan.most
        )
    };
    outln!(
        "no draft is expected to pay here: at best {:.2} times as fast (less than {WORTH}). {reason}",
        plan.speed_up.high
    );
    outln!("{}:\n  {lookup}", instead(machine.lookup_range()));
    outln!("to train all the same, add --anyway");
}

/// What lookup alone, with such a speed-up, is good for in a draft's place.
fn instead(lookup: Option<Range>) -> String {
    let Some(lookup) = lookup.filter(|lookup| lookup.middle >= WORTH) else {
        return "prompt lookup costs nothing and helps where answers repeat their prompts"
            .to_owned();
    };
    let times = measured(lookup);
    if lookup.low > 1.0 {
        return format!("prompt lookup alone is {times} times as fast, without training");
    }
    format!(
        "prompt lookup alone, without training, was {times} times as fast on these prompts: they differ so much that \
         it may be slower on others"
    )
}

/// The steps that a training has, and the seconds that are left for them.
pub(super) fn training(config: &Value, seconds: f64) {
    let steps = |stage: &Value| format!("{} steps", stage["train"]["steps"]);
    let of_stage = |stage: &Value| match stage["name"].as_str() {
        Some(name) => format!("{name} {}", steps(stage)),
        None => steps(stage),
    };
    let all: Vec<String> = training::stages(config).iter().map(of_stage).collect();
    errln!("[training] {}, {} left for them", all.join(", "), clock(seconds));
}

/// What is done about a training that diverged, in a stage if it has some: it goes on at a lower rate, from its good
/// checkpoint if there is one, or what there is of it is taken.
pub(super) fn diverged(
    stage: Option<&str>,
    diverged: &Diverged,
    (good, lower_rate): (Option<&CheckpointState>, Option<f64>),
    has_before: bool,
) {
    let next = match (good.map(|state| state.progress.step), lower_rate) {
        (Some(step), Some(rate)) => {
            format!("it goes on from step {step} at a lower learning rate, {rate:.2e}")
        }
        (None, Some(rate)) => format!("it begins anew at a lower learning rate, {rate:.2e}"),
        (Some(step), None) => format!("the draft of step {step}, which was good, is taken"),
        (None, None) if has_before => "the draft of the stage before is taken".to_owned(),
        (None, None) => {
            "no time or lower rate is left, so it is taken as it is: the proof shows its worth"
                .to_owned()
        }
    };
    let stage = stage.map_or_else(String::new, |name| format!("in stage {name}, "));
    errln!("note: the training diverged ({stage}{diverged}): {next}");
}

/// Which of two drafts is kept, the one of the newer round first.
pub(super) fn compared(found: &Compared, [newer, older]: [usize; 2], kept: usize) {
    let (tau, (low, high)) = (found.tau, found.interval);
    errln!(
        "[proof] tau {:.2} with the draft of round {newer}, {:.2} with that of round {older}, on the same {} prompts \
         (difference {:+.2} [{low:+.2}, {high:+.2}]): that of round {kept} is kept",
        tau[0],
        tau[1],
        found.prompts,
        found.gain()
    );
}

/// What the last of the short trainings came to.
pub(super) fn tried(found: &[Tried]) {
    let Some((Choice { init, rate }, loss)) = found.last() else { return };
    let init = init.as_ref().map_or_else(String::new, |init| format!("from {init}, "));
    let loss = loss.map_or("diverged".to_owned(), |loss| format!("held-out loss {loss:.4}"));
    errln!("[training] {init}learning rate {rate:.2e}: {loss}");
}

/// What became of the answers.
pub(super) fn cleaned(cleaned: &Cleaned) {
    let Cleaned { kept, tokens, empty, duplicates, endless, keeps_endless, cut } = cleaned;
    errln!(
        "[answers] {kept} answers, {tokens} tokens, are learned from; left out: {empty} empty, {duplicates} duplicates, {} \
         endless",
        if *keeps_endless { 0 } else { *endless }
    );
    if *keeps_endless {
        errln!(
            "warning: {endless} answers repeat themselves endlessly, and there are few others: the draft learns them, which \
             says little about real use"
        );
    }
    if cut * 2 > kept + endless {
        errln!(
            "note: {cut} answers did not end within --max-tokens: a model that is not made for chats may never end \
             them; the draft learns what there is"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookup_is_faster_only_where_the_interval_says_so() {
        let of = |low, middle, high| instead(Some(Range { low, middle, high }));
        let sure = of(1.2, 1.5, 1.9);
        assert!(sure.contains("is 1.50 [1.20, 1.90] times as fast"), "{sure}");
        let unsure = of(0.91, 2.96, 7.18);
        assert!(unsure.contains("was 2.96 [0.91, 7.18] times as fast"), "{unsure}");
        assert!(unsure.contains("may be slower"), "{unsure}");
        for little in [instead(None), of(0.9, 1.0, 1.1)] {
            assert!(little.contains("costs nothing"), "{little}");
        }
    }
}
