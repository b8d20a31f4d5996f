//! What a draft method minimises.

mod distributions;
mod soft_targets;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, FeatureNeeds, TeacherKind};
use longdraft_models::draft::Draft;

use crate::error::{Result, TrainError};
use crate::loss::Share;
use crate::metrics::{DraftMetrics, Quantities};

pub use distributions::TeacherDistribution;
pub(crate) use distributions::TopDistributions;
pub(crate) use soft_targets::mixed_in_words;
pub use soft_targets::{SoftTargetKind, TailKind, TeacherConfig};

/// What micro-batches are divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Normalisation {
    /// The learned rows of the whole optimizer step.
    WholeStep,
    /// Each by its own, and by the number of micro-batches: what the public trainers do.
    MeanOfBatches,
}

/// What is measured and learned of a micro-batch, known before the draft runs.
#[derive(Clone)]
pub struct Prepared {
    /// What each part of the loss is divided by: summed over the micro-batches of an optimizer
    /// step, or times their number, as [`Objective::normalisation`] says.
    pub denominators: Vec<f64>,
    /// What the objective that made this chose.
    plan: Arc<dyn Any>,
}

impl Prepared {
    /// Denominators, and what the objective wants back in [`Objective::share`].
    pub fn new(denominators: Vec<f64>, plan: impl Any) -> Self {
        Self { denominators, plan: Arc::new(plan) }
    }

    /// What an objective chose.
    ///
    /// # Errors
    /// - it is of another type, so that another objective made this
    pub fn plan<P: Any>(&self) -> Result<&P> {
        let problem =
            || TrainError::Unsupported { problem: "prepared by another objective".into() };
        self.plan.downcast_ref().ok_or_else(problem)
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").field("denominators", &self.denominators).finish_non_exhaustive()
    }
}

/// A draft with its loss. It cannot tell where features come from.
pub trait Objective {
    /// The draft being trained.
    fn draft(&self) -> &dyn Draft;

    /// Mutable access, for moving its weights.
    fn draft_mut(&mut self) -> &mut dyn Draft;

    /// What it needs of the target for every batch.
    fn needs(&self) -> FeatureNeeds;

    /// Says which optimizer step comes, from 1, and of how many: for losses that change over a run.
    fn begin_step(&mut self, _step: u64, _steps: u64) {}

    /// What micro-batches are divided by.
    fn normalisation(&self) -> Normalisation {
        Normalisation::WholeStep
    }

    /// A micro-batch's denominators, if its masks alone decide them.
    fn denominators_of_masks(&self, batch: &Batch) -> Option<Vec<f64>>;

    /// Whether [`Self::prepare`] runs the draft, which has to be whole then.
    fn prepares_with_draft(&self) -> bool {
        false
    }

    /// Finds what is learned of a micro-batch. Nobody holds the target's ends meanwhile.
    ///
    /// # Errors
    /// - the features are not those that [`Self::needs`] names, or shapes do not fit
    fn prepare(&self, batch: &Batch, features: &BatchFeatures) -> Result<Prepared>;

    /// A micro-batch's share of the loss of an optimizer step, `denominators` being the step's. All ranks hold the
    /// target's ends meanwhile, so that it can hold them whatever other ranks do.
    ///
    /// # Errors
    /// - as [`Self::prepare`]
    fn share(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        prepared: &Prepared,
        denominators: &[f64],
        train: bool,
    ) -> Result<Share>;

    /// What held-out rows need of the target.
    fn held_out_needs(&self) -> FeatureNeeds {
        self.needs()
    }

    /// What figures are measured against when the teacher has this form: that of [`Self::needs`]
    /// for training rows, that of [`Self::held_out_needs`] for held-out rows.
    fn quantities(&self, teacher: TeacherKind) -> Quantities;

    /// What figures of training rows are measured against.
    fn training_quantities(&self) -> Quantities {
        self.quantities(self.needs().teacher)
    }

    /// Counters of a held-out row, at every delay or step; where training rows are measured against
    /// something else, also as they are. The target's ends are held as for [`Self::share`].
    ///
    /// # Errors
    /// - as [`Self::prepare`], with [`Self::held_out_needs`]
    fn measure(&self, batch: &Batch, features: &BatchFeatures) -> Result<DraftMetrics>;

    /// Tokens of the longest chain that is trained for: delays or steps.
    fn draft_len(&self) -> usize;

    /// Tokens at which the teacher is read, ascending.
    fn teacher_tokens(&self, batch: &Batch) -> Vec<u32>;
}
