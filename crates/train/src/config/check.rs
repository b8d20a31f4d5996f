//! Combinations that make no sense.

use longdraft_rules::{Check, Problem, Rules};

use super::{SourceConfig, TrainConfig};
use crate::limits;
use crate::optim::MatrixUpdate;

impl Check for TrainConfig {
    fn problems(&self) -> Vec<Problem> {
        let mut rules = Rules::default();
        self.data_rules(&mut rules);
        self.run_rules(&mut rules);
        self.budget_rules(&mut rules);
        self.feature_rules(&mut rules);
        self.schedule_rules(&mut rules);
        self.optimizer_rules(&mut rules);
        rules.require(
            (1..=limits::TOP_K).contains(&self.teacher.top_k),
            "teacher.top_k",
            "must be in 1 to 65536: `teacher.soft_targets: full` takes them all",
        );
        rules.add("parallel", self.parallel.problems());
        rules.add("tracking", self.tracking.problems());
        let mut problems = rules.into_problems();
        problems.extend(self.draft.method.problems(&self.context()));
        problems
    }
}

/// Rules of the keys that say in every configuration how often a run saves and logs, and how long it takes:
/// `saving` is `save_every` and `save_minutes`.
pub fn interval_rules(
    rules: &mut Rules,
    saving: (u64, f64),
    log_every: u64,
    max_minutes: Option<f64>,
) {
    let (save_every, save_minutes) = saving;
    rules.require(log_every > 0, "train.log_every", "must be at least 1");
    rules.require(save_every > 0, "train.save_every", "must be at least 1");
    rules.require(
        save_minutes >= 0.0 && save_minutes.is_finite(),
        "train.save_minutes",
        "must be 0 or more",
    );
    rules.require(
        max_minutes.is_none_or(|minutes| minutes > 0.0 && minutes <= limits::MINUTES),
        "train.max_minutes",
        "must be above 0, and at most ten years (5256000)",
    );
}

impl TrainConfig {
    fn data_rules(&self, rules: &mut Rules) {
        let data = &self.data;
        rules.require(!data.train.is_empty(), "data.train", "must name at least one source");
        rules.require(
            (2..=limits::ROW_TOKENS).contains(&data.row_tokens),
            "data.row_tokens",
            "must be in 2 to 4194304: no target reads longer rows",
        );
        rules.require(
            data.held_out_rows <= limits::ROWS,
            "data.held_out_rows",
            "must be at most 1048576: every evaluation runs all of them",
        );
        rules.require(
            (0.0..=1.0).contains(&data.max_bad_rows),
            "data.max_bad_rows",
            "must be between 0 and 1",
        );
        rules.add("data", source_problems("train", &data.train));
        rules.add("data", source_problems("held_out", &data.held_out));
    }

    fn run_rules(&self, rules: &mut Rules) {
        let run = &self.train;
        let saving = (run.save_every, run.save_minutes);
        interval_rules(rules, saving, run.log_every, run.max_minutes);
        rules.require(
            (1..=limits::ROWS).contains(&run.rows_per_step),
            "train.rows_per_step",
            "must be in 1 to 1048576: each row is a pass of the target",
        );
        rules.require(run.tokens_per_step != Some(0), "train.tokens_per_step", "must be above 0");
        rules.require_with(
            run.tokens_per_step
                .is_none_or(|tokens| tokens.div_ceil(self.data.row_tokens.max(1)) <= limits::ROWS),
            "train.tokens_per_step",
            &["data.row_tokens"],
            "must make at most 1048576 rows of `data.row_tokens`: each row is \
             a pass of the target",
        );
        rules.require(run.patience != Some(0), "train.patience", "must be above 0");
        rules.require_with(
            run.patience.is_none() || run.evaluate_every > 0,
            "train.patience",
            &["train.evaluate_every"],
            "counts evaluations: set `train.evaluate_every`",
        );
        rules.require_with(
            run.patience.is_none() || self.data.held_out_rows > 0 || !self.data.held_out.is_empty(),
            "train.patience",
            &["data.held_out_rows", "data.held_out"],
            "counts evaluations of held-out rows: set `data.held_out_rows`, or `data.held_out`",
        );
    }

    fn budget_rules(&self, rules: &mut Rules) {
        let run = &self.train;
        rules.require(
            run.epochs > 0.0 && run.epochs <= limits::EPOCHS,
            "train.epochs",
            "must be above 0, and at most 1000000",
        );
        for (key, count) in [("train.steps", run.steps), ("train.tokens", run.tokens)] {
            rules.require(count != Some(0), key, "must be above 0");
            rules.require(
                count.is_none_or(|count| count <= limits::COUNT),
                key,
                "must be at most 2^53: progress is reckoned in f64",
            );
        }
        rules.require_with(
            run.steps.is_none() || run.tokens.is_none(),
            "train.tokens",
            &["train.steps"],
            "is a second budget beside `train.steps`: give one of them",
        );
    }

    fn feature_rules(&self, rules: &mut Rules) {
        let stored = self.train.features.store();
        rules.require(
            (1..=limits::SHARD_MIB).contains(&self.capture.shard_mib),
            "capture.shard_mib",
            "must be in 1 to 1048576 (1 TiB)",
        );
        rules.require(
            stored != Some(""),
            "train.features",
            "must be `online`, `memory`, or the place of a store",
        );
        rules.require_with(
            stored.is_none() || self.train.target_loss_every == 0,
            "train.target_loss_every",
            &["train.features"],
            "needs the target's layers, which stored features spare: set 0",
        );
    }

    fn schedule_rules(&self, rules: &mut Rules) {
        let rate = self.schedule.learning_rate;
        rules.require(
            rate > 0.0 && limits::is_f32(rate),
            "schedule.learning_rate",
            "must be positive, and a number of f32",
        );
        for (key, share) in [
            ("schedule.floor_ratio", self.schedule.floor_ratio),
            ("schedule.warmup_ratio", self.schedule.warmup_ratio),
        ] {
            rules.require((0.0..=1.0).contains(&share), key, "must be between 0 and 1");
        }
    }

    fn optimizer_rules(&self, rules: &mut Rules) {
        let optimizer = &self.optimizer;
        let unit = 0.0..1.0;
        let betas = unit.contains(&optimizer.betas.0) && unit.contains(&optimizer.betas.1);
        let published = self.draft.method.is_compat();
        let checks = [
            (betas, "betas", "must lie in [0, 1)"),
            (unit.contains(&optimizer.momentum), "momentum", "must lie in [0, 1)"),
            (
                optimizer.clip_norm > 0.0 && limits::is_f32(optimizer.clip_norm),
                "clip_norm",
                "must be positive, and a number of f32",
            ),
            (
                optimizer.eps >= 0.0 && limits::is_f32(optimizer.eps),
                "eps",
                "must be 0 or more, and a number of f32",
            ),
            (
                optimizer.weight_decay >= 0.0 && limits::is_f32(optimizer.weight_decay),
                "weight_decay",
                "must be 0 or more, and a number of f32",
            ),
            (
                !published || optimizer.matrices == MatrixUpdate::Adamw,
                "matrices",
                "must be `adamw`: published trainers use AdamW alone",
            ),
        ];
        for (holds, key, text) in checks {
            rules.require(holds, &format!("optimizer.{key}"), text);
        }
    }
}

/// What is wrong with the sources of a part, each with its path.
fn source_problems(part: &str, sources: &[SourceConfig]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        for problem in source.problems() {
            let text = format!("{} (of {})", problem.text, source.path.display());
            let problem = Problem { text, ..problem };
            problems.push(problem.under(&format!("{part}.{index}")));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn patience_needs_evaluations_of_held_out_rows() {
        let told = |evaluate_every: u64, data: Value| -> Vec<String> {
            let config: TrainConfig = serde_json::from_value(json!({
                "target": "model.gguf", "output": "runs/mine", "draft": { "method": "glide" },
                "data": data, "train": { "patience": 3, "evaluate_every": evaluate_every },
            }))
            .expect("a configuration");
            config.problems().iter().map(ToString::to_string).collect()
        };
        let train = json!([{ "path": "rows.jsonl" }]);
        let none = json!({ "train": train, "held_out_rows": 0 });
        let own = json!({ "train": train, "held_out_rows": 0, "held_out": train });
        assert_eq!(told(5, json!({ "train": train })), Vec::<String>::new());
        assert_eq!(told(5, own), Vec::<String>::new());
        let problems = told(5, none);
        assert!(problems.len() == 1 && problems[0].contains("data.held_out_rows"), "{problems:?}");
        let problems = told(0, json!({ "train": train }));
        assert!(problems.len() == 1 && problems[0].contains("evaluate_every"), "{problems:?}");
    }
}
