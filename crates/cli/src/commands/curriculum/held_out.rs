//! Every stage's draft on every stage's held-out rows, as a table.

use longdraft_models::target_model::Target;
use longdraft_parallel::World;
use longdraft_train::stage::{Evaluator, RowMetrics};
use serde::{Deserialize, Serialize};

use super::opened::OpenTarget;
use crate::failure::Result;

/// Every stage's draft on every stage's held-out rows.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct HeldOutTable {
    stages: Vec<String>,
    /// By draft, then by text; nothing where a stage has no held-out rows.
    by_draft: Vec<Vec<Option<Cell>>>,
    gains_on_own_text: Vec<Gain>,
}

/// A draft on a text.
#[derive(Debug, Serialize, Deserialize)]
struct Cell {
    simulated_length: f64,
    /// 95 %
    interval: (f64, f64),
}

/// What a stage's draft gains on its own text over the draft before.
#[derive(Debug, Serialize, Deserialize)]
struct Gain {
    stage: String,
    #[serde(rename = "gain")]
    length: f64,
    /// 95 %
    interval: (f64, f64),
}

impl Cell {
    fn shown(&self) -> String {
        let (low, high) = self.interval;
        format!("{:.3} [{low:.3}, {high:.3}]", self.simulated_length)
    }
}

impl HeldOutTable {
    pub(super) fn measure(
        stages: Vec<String>,
        evaluators: &[Evaluator],
        mut target: OpenTarget,
        world: &World,
    ) -> Result<Self> {
        let mut by_text: Vec<Vec<RowMetrics>> = Vec::new();
        // From the last one, whose target is open.
        for (text, evaluator) in evaluators.iter().enumerate().rev() {
            let config = evaluator.config();
            let opened = target.of(config, world)?;
            let tokenizer = Target::open_tokenizer(&config.target)?;
            by_text.push(Evaluator::measure(evaluators, text, (&opened, &tokenizer))?);
        }
        by_text.reverse();
        Ok(Self::of(stages, &by_text))
    }

    fn of(stages: Vec<String>, by_text: &[Vec<RowMetrics>]) -> Self {
        let has_rows = |text: &[RowMetrics]| text.iter().any(|of_draft| of_draft.rows() > 0);
        let cell = |text: &Vec<RowMetrics>, draft: usize| {
            has_rows(text).then(|| Cell {
                simulated_length: text[draft].simulated_length(),
                interval: text[draft].interval(),
            })
        };
        let row = |draft| by_text.iter().map(|text| cell(text, draft)).collect();
        let gain = |stage: usize| {
            let text = &by_text[stage];
            let (length, interval) = text[stage].gain_over(&text[stage - 1]);
            Gain { stage: stages[stage].clone(), length, interval }
        };
        Self {
            by_draft: (0..stages.len()).map(row).collect(),
            gains_on_own_text: (1..stages.len())
                .filter(|stage| has_rows(&by_text[*stage]))
                .map(gain)
                .collect(),
            stages,
        }
    }

    pub(super) fn print(&self) {
        outln!("simulated acceptance length (greedy, 95 % interval) of each stage's draft on");
        outln!("each stage's held-out rows:");
        out!("{:>16}", "draft \\ text");
        self.stages.iter().for_each(|name| out!("  {name:>22}"));
        outln!();
        for (name, row) in self.stages.iter().zip(&self.by_draft) {
            out!("{name:>16}");
            for cell in row {
                let cell = cell.as_ref().map_or_else(|| "no rows".to_owned(), Cell::shown);
                out!("  {cell:>22}");
            }
            outln!();
        }
        for Gain { stage, length, interval: (low, high) } in &self.gains_on_own_text {
            outln!(
                "{stage} on its own text: {length:+.3} [{low:+.3}, {high:+.3}] over the draft before"
            );
        }
    }
}
