//! What is read of a fit's state.

use longdraft_records::events::FitPhase;
use serde::Deserialize;

use super::recent::Recent;
use super::{Expected, Phase, Stand};

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct FitState {
    phase: Option<FitPhase>,
    pub(super) rounds: Vec<FitRound>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct FitRound {
    pub(super) plan: Option<FitPlan>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct FitPlan {
    answering: f64,
    search: f64,
    training: f64,
    proof: f64,
    pub(super) tau: Expected,
    pub(super) speed_up: Expected,
    stages: Vec<FitStage>,
}

/// A stage of the training, where it has some.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
struct FitStage {
    seconds: f64,
}

impl FitPlan {
    /// Seconds of the stages after so many ones.
    pub(super) fn after(&self, stages: usize) -> f64 {
        self.stages.iter().skip(stages).map(|stage| stage.seconds).sum()
    }

    fn of(&self, phase: FitPhase) -> Option<f64> {
        match phase {
            FitPhase::Answers => Some(self.answering),
            FitPhase::Training => Some(self.search + self.training),
            FitPhase::Proof => Some(self.proof),
            FitPhase::Measure | FitPhase::Delivery | FitPhase::Finished => None,
        }
    }
}

/// The phases of a fit, with what events tell of them.
pub(super) fn phases(fit: &FitState, plan: Option<&FitPlan>, recent: &Recent) -> Vec<Phase> {
    let phase = |name: FitPhase| Phase {
        name,
        stand: match fit.phase {
            Some(current) if name < current => Stand::Done,
            Some(current) if name == current => Stand::Now,
            _ => Stand::ToCome,
        },
        spent: recent.spent(name),
        planned: plan.and_then(|plan| plan.of(name)),
    };
    FitPhase::WITH_WORK.into_iter().map(phase).collect()
}
