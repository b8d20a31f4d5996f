//! Combinations that make no sense.

use longdraft_models::Precision;
use longdraft_parallel::{StatePlace, ZeroStage};
use longdraft_rules::{Check, Problem, Rules};
use longdraft_train::config::interval_rules;
use longdraft_train::limits;

use super::{LengthPhase, PretrainConfig, WarmdownKind};

/// Tokens of an optimizer step.
const TOKENS_PER_STEP: usize = 1 << 30;

/// Tokens that go through the model at once.
const MICRO_BATCH_TOKENS: usize = 1 << 26;

impl Check for PretrainConfig {
    fn problems(&self) -> Vec<Problem> {
        let mut rules = Rules::default();
        self.model_rules(&mut rules);
        self.parallel_rules(&mut rules);
        self.data_rules(&mut rules);
        self.run_rules(&mut rules);
        self.length_rules(&mut rules);
        self.schedule_rules(&mut rules);
        self.evaluation_rules(&mut rules);
        rules.add("optimizer", self.optimizer.problems());
        rules.add("artifact.quantise", self.artifact.quantise.problems());
        rules.require(
            self.artifact.code_bytes <= limits::COUNT,
            "artifact.code_bytes",
            "must be at most 2^53",
        );
        rules.add("tracking", self.tracking.problems());
        rules.into_problems()
    }
}

impl PretrainConfig {
    fn model_rules(&self, rules: &mut Rules) {
        let model = self.model.problems();
        // Sizes within their limits can be multiplied.
        let values = if model.is_empty() { self.model.parameter_count() as u64 } else { 0 };
        rules.require_with(
            values <= limits::PARAMETERS,
            "model.hidden_size",
            &["model.num_hidden_layers", "model.mlp_mult"],
            format!(
                "makes with `model.num_hidden_layers` and `model.mlp_mult` {:.0} billion values, more than 17",
                values as f64 / 1e9
            ),
        );
        rules.add("model", model);
        rules.require(
            self.precision != Precision::Stored,
            "precision",
            "holds a draft's target as its file does: pretraining has none, set `auto`",
        );
    }

    fn parallel_rules(&self, rules: &mut Rules) {
        let parallel = &self.parallel;
        rules.add("parallel", parallel.problems());
        rules.require(
            parallel.zero_stage() != ZeroStage::Weights,
            "parallel.zero",
            "is 3, which spreads a draft and its target: pretraining has neither, set 0 or 1",
        );
        rules.require(
            parallel.sequence <= 1,
            "parallel.sequence",
            "cuts rows of drafts: pretraining needs 1",
        );
        rules.require(
            parallel.tensor <= 1,
            "parallel.tensor",
            "shares a draft's target: pretraining has none, set 1",
        );
        rules.require(
            parallel.optimizer_state == StatePlace::Memory,
            "parallel.optimizer_state",
            "is `file`, which is for drafts: pretraining needs `memory`",
        );
    }

    fn data_rules(&self, rules: &mut Rules) {
        rules.require(
            !self.data.train.is_empty(),
            "data.train",
            "must name at least one file or folder",
        );
        rules.require_with(
            self.data.held_out.is_empty() || self.data.tokenizer.is_some(),
            "data.held_out",
            &["data.tokenizer"],
            "is scored in bits per byte: set `data.tokenizer`",
        );
    }

    fn run_rules(&self, rules: &mut Rules) {
        let run = &self.train;
        rules.require(
            (1..=limits::COUNT).contains(&run.steps),
            "train.steps",
            "must be in 1 to 2^53: progress is reckoned in f64",
        );
        let saving = (run.save_every, run.save_minutes);
        interval_rules(rules, saving, run.log_every, run.max_minutes);
        let share = |share: f64| share > 0.0 && share <= 1.0;
        rules.require(run.ema_share.is_none_or(share), "train.ema_share", "must be in 0 to 1");
    }

    fn length_rules(&self, rules: &mut Rules) {
        let (run, row_tokens) = (&self.train, self.data.row_tokens);
        rules.require(
            (1..=MICRO_BATCH_TOKENS).contains(&run.micro_batch_tokens),
            "train.micro_batch_tokens",
            "must be in 1 to 67108864: they go through the model at once",
        );
        let whole = |row: usize, step: usize| {
            (1..=limits::ROW_TOKENS).contains(&row)
                && (1..=TOKENS_PER_STEP).contains(&step)
                && step.is_multiple_of(row)
        };
        rules.require(
            (1..=limits::ROW_TOKENS).contains(&row_tokens),
            "data.row_tokens",
            "must be in 1 to 4194304",
        );
        rules.require_with(
            whole(row_tokens, run.tokens_per_step),
            "train.tokens_per_step",
            &["data.row_tokens"],
            "must be a multiple of `data.row_tokens`, and at most 1073741824",
        );
        let phase = |phase: &LengthPhase| {
            (0.0..=1.0).contains(&phase.until)
                && whole(phase.row_tokens, phase.tokens_per_step.unwrap_or(run.tokens_per_step))
        };
        rules.require_with(
            run.phases.iter().all(phase) && run.phases.is_sorted_by_key(|phase| phase.until),
            "train.phases",
            &["train.tokens_per_step"],
            "need rising `until` in 0 to 1 and steps of whole rows",
        );
    }

    fn schedule_rules(&self, rules: &mut Rules) {
        let schedule = &self.schedule;
        rules.require_with(
            schedule.kind != WarmdownKind::WallClock || self.train.max_minutes.is_some(),
            "schedule.kind",
            &["train.max_minutes"],
            "is `wall_clock`, which needs `train.max_minutes`",
        );
        rules.require(
            schedule.decay_share > 0.0 && schedule.decay_share <= 1.0,
            "schedule.decay_share",
            "must be in 0 to 1",
        );
        rules.require(
            (0.0..=1.0).contains(&schedule.floor_ratio),
            "schedule.floor_ratio",
            "must be between 0 and 1",
        );
    }

    fn evaluation_rules(&self, rules: &mut Rules) {
        let evaluation = &self.evaluation;
        rules.require(
            (1..=MICRO_BATCH_TOKENS).contains(&evaluation.batch_tokens),
            "evaluation.batch_tokens",
            "must be in 1 to 67108864: they go through the model at once",
        );
        rules.require(
            evaluation.window.is_none_or(|window| (1..=limits::ROW_TOKENS).contains(&window)),
            "evaluation.window",
            "must be in 1 to 4194304",
        );
        let window = evaluation.window.unwrap_or(self.data.row_tokens);
        rules.require_with(
            evaluation.stride.is_none_or(|stride| (1..=window).contains(&stride)),
            "evaluation.stride",
            &["evaluation.window", "data.row_tokens"],
            "must be in 1 to the window",
        );
    }
}
