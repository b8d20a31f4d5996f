//! Combinations that make no sense.

use super::{SourceConfig, TrainConfig};
use crate::optim::MatrixUpdate;

impl TrainConfig {
    /// Everything that makes no sense, by dotted key.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut require = |holds: bool, problem: &str| {
            if !holds {
                problems.push(problem.to_owned());
            }
        };
        require(!self.data.train.is_empty(), "`data.train` must name at least one source");
        require(self.data.row_tokens >= 2, "`data.row_tokens` must be at least 2");
        require(
            (0.0..=1.0).contains(&self.data.max_bad_rows),
            "`data.max_bad_rows` must be between 0 and 1",
        );
        require(self.train.rows_per_step > 0, "`train.rows_per_step` must be at least 1");
        require(self.train.log_every > 0, "`train.log_every` must be at least 1");
        require(self.train.save_every > 0, "`train.save_every` must be at least 1");
        let run = &self.train;
        require(
            run.save_minutes >= 0.0 && run.save_minutes.is_finite(),
            "`train.save_minutes` must be 0 or more",
        );
        require(run.steps != Some(0), "`train.steps` must be above 0");
        require(run.tokens != Some(0), "`train.tokens` must be above 0");
        require(run.epochs > 0.0 && run.epochs.is_finite(), "`train.epochs` must be above 0");
        require(
            run.steps.is_none() || run.tokens.is_none(),
            "`train.tokens` and `train.steps` are two budgets: give one of them",
        );
        require(run.tokens_per_step != Some(0), "`train.tokens_per_step` must be above 0");
        require(
            run.max_minutes.is_none_or(|minutes| minutes > 0.0),
            "`train.max_minutes` must be above 0",
        );
        require(self.capture.shard_mib > 0, "`capture.shard_mib` must be at least 1");
        require(
            run.features.store() != Some(""),
            "`train.features` is `online`, `memory`, or the place of a store",
        );
        require(
            run.features.store().is_none() || run.target_loss_every == 0,
            "`train.target_loss_every` needs the target's layers, which stored features spare: set 0",
        );
        require(run.patience != Some(0), "`train.patience` must be above 0");
        require(
            run.patience.is_none() || run.evaluate_every > 0,
            "`train.patience` counts evaluations: set `train.evaluate_every`",
        );
        let rate = self.schedule.learning_rate;
        require(rate > 0.0 && rate.is_finite(), "`schedule.learning_rate` must be positive");
        require(
            (0.0..=1.0).contains(&self.schedule.warmup_ratio),
            "`schedule.warmup_ratio` must be between 0 and 1",
        );
        problems.extend(self.optimizer_problems());
        problems.extend(self.draft.method.problems(self));
        let sources = self.data.train.iter().chain(&self.data.held_out);
        problems.extend(sources.flat_map(SourceConfig::problems));
        problems.extend(self.parallel.problems());
        problems.extend(self.tracking.problems());
        problems
    }

    fn optimizer_problems(&self) -> Vec<String> {
        let optimizer = &self.optimizer;
        let unit = 0.0..1.0;
        let betas = unit.contains(&optimizer.betas.0) && unit.contains(&optimizer.betas.1);
        let published = self.draft.compat.is_some() || self.objective.eagle3.compat.is_some();
        let checks = [
            (betas, "`optimizer.betas` must lie in [0, 1)"),
            (unit.contains(&optimizer.momentum), "`optimizer.momentum` must lie in [0, 1)"),
            (optimizer.clip_norm > 0.0, "`optimizer.clip_norm` must be positive"),
            (
                !published || optimizer.matrices == MatrixUpdate::Adamw,
                "published trainers use AdamW alone: set `optimizer.matrices: adamw`",
            ),
        ];
        let wrong = checks.into_iter().filter(|(holds, _)| !holds);
        wrong.map(|(_, problem)| problem.to_owned()).collect()
    }
}
