//! What the terms of an estimate are functions of.

use longdraft_models::TargetConfig;
use longdraft_models::draft::{eagle3, glide};
use longdraft_models::target::Layers;
use longdraft_models::weights::TensorSpec;

use super::optimizer::Parameters;
use super::place::{Places, Updates};
use super::row::{Row, RowMemory};
use crate::config::{FeatureMode, TrainConfig};
use crate::error::Result;
use crate::features::TeacherKind;
use crate::method::DraftSizes;
use crate::objective::{OovRows, SoftTargetKind};
use crate::optim::MatrixUpdate;
use crate::parallel::{Reduction, StatePlace};

/// How processes share the work, beyond what the configuration says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Processes.
    pub ranks: usize,
    /// Processes that share a row.
    pub sequence: usize,
    /// Processes that share every layer of the target.
    pub tensor: usize,
    /// Threads of a process, whose products pack their operands; 0: an accelerator, which does not.
    pub threads: usize,
    /// Bytes of a value of the target's matrices.
    pub target_value_bytes: usize,
}

impl Layout {
    /// Processes of some threads that share rows of a step only, with the target in f32.
    pub fn of(ranks: usize, threads: usize) -> Self {
        Self { ranks, sequence: 1, tensor: 1, threads, target_value_bytes: 4 }
    }

    /// Whether models and activations lie in an accelerator's memory.
    pub(super) fn is_accelerator(&self) -> bool {
        self.threads == 0
    }
}

/// A stage, as far as its costs depend on it.
#[derive(Debug, Clone)]
pub struct Workload {
    pub(super) target: TargetConfig,
    pub(super) layers: Layers,
    pub(super) draft: DraftSizes,
    pub(super) specs: Vec<TensorSpec>,
    /// Test-time steps; 1 for GLIDE.
    pub(super) steps: usize,
    pub(super) row_tokens: u64,
    /// Rows of a step over all ranks.
    pub(super) rows_per_step: u64,
    pub(super) features: FeatureMode,
    pub(super) teacher: TeacherKind,
    /// Whether a rank needs the features of all its rows of a step before it learns the first.
    pub(super) holds_step: bool,
    pub(super) zero: crate::parallel::ZeroStage,
    pub(super) bucket_bytes: u64,
    pub(super) reduction: Reduction,
    pub(super) whole_tensors: bool,
    pub(super) state_in_file: bool,
    pub(super) layout: Layout,
    /// Rows that `train.features: memory` keeps, where they are known.
    pub(super) training_rows: Option<u64>,
}

impl Workload {
    /// The stage of a configuration over a target of these sizes.
    ///
    /// # Errors
    /// - the draft that is asked for does not fit the target
    pub fn new(config: &TrainConfig, target: TargetConfig, layout: Layout) -> Result<Self> {
        let draft = config.draft.method.sizes(config, &target)?;
        let specs = match &draft {
            DraftSizes::Glide(config) => glide::tensor_specs(config),
            DraftSizes::Eagle3(config) => eagle3::tensor_specs(config),
        };
        let objective = &config.objective;
        let top_k = objective.soft_targets == SoftTargetKind::TopK;
        let (steps, teacher, holds_step) = match &draft {
            DraftSizes::Glide(_) => {
                let teacher = match top_k {
                    _ if objective.soft_weight == 0.0 => TeacherKind::None,
                    true => TeacherKind::TopK(objective.top_k),
                    false => TeacherKind::Full,
                };
                (1, teacher, false)
            }
            DraftSizes::Eagle3(_) => {
                let teacher = if top_k {
                    TeacherKind::EveryTokenTopK(objective.top_k)
                } else {
                    TeacherKind::EveryToken
                };
                let eagle3 = &objective.eagle3;
                let of_masks = eagle3.compat.is_none() && eagle3.oov_rows == OovRows::Keep;
                (eagle3.ttt_steps, teacher, !of_masks)
            }
        };
        Ok(Self {
            layers: config.needed_layers(),
            specs,
            steps,
            row_tokens: config.data.row_tokens as u64,
            rows_per_step: config.train.rows_of_a_step(config.data.row_tokens) as u64,
            features: config.train.features.clone(),
            teacher,
            holds_step,
            zero: config.parallel.zero_stage(),
            bucket_bytes: config.parallel.bucket_bytes as u64,
            reduction: config.parallel.reduction,
            whole_tensors: config.optimizer.matrices == MatrixUpdate::Muon,
            state_in_file: config.parallel.optimizer_state == StatePlace::File,
            target,
            draft,
            layout,
            training_rows: None,
        })
    }

    /// The same, now that the text is read: it makes so many training rows.
    #[must_use]
    pub fn with_training_rows(self, rows: usize) -> Self {
        Self { training_rows: Some(rows as u64), ..self }
    }

    /// Whether the estimate lacks rows that are known only when the text is read.
    pub fn lacks_rows(&self) -> bool {
        self.features == FeatureMode::Memory && self.training_rows.is_none()
    }

    /// Ranks that share a row with one another.
    pub(super) fn parts(&self) -> u64 {
        self.layout.sequence.max(1) as u64
    }

    /// Ranks that share every layer of the target with one another.
    pub(super) fn tensor(&self) -> u64 {
        self.layout.tensor.max(1) as u64
    }

    /// Rows that fall to the rank with most of them.
    pub(super) fn own_rows(&self) -> u64 {
        let groups = (self.layout.ranks as u64 / self.parts()).max(1);
        self.rows_per_step.div_ceil(groups)
    }

    /// Rows of a step that a rank runs the target's layers over: where ranks share these, those of all of
    /// them.
    pub(super) fn run_rows(&self) -> u64 {
        (self.own_rows() * self.tensor()).min(self.rows_per_step)
    }

    /// A row as a rank sees it.
    pub(super) fn row(&self) -> Row {
        let tokens = self.row_tokens.div_ceil(self.parts());
        Row {
            tokens,
            learned: tokens,
            parts: self.parts(),
            teacher_logits: matches!(self.teacher, TeacherKind::Full | TeacherKind::EveryToken),
            threads: self.layout.threads,
        }
    }

    /// Memory of training on a row.
    pub(super) fn row_memory(&self) -> RowMemory {
        match &self.draft {
            DraftSizes::Glide(config) => super::glide::row_memory(config, &self.row()),
            DraftSizes::Eagle3(config) => {
                super::eagle3::row_memory(config, self.steps, &self.row())
            }
        }
    }

    pub(super) fn parameters(&self, row: &RowMemory) -> Parameters {
        Parameters {
            sizes: self.specs.iter().map(|spec| spec.shape.iter().product()).collect(),
            moments: self.specs.iter().map(|spec| self.moments_of(spec)).collect(),
            trained: row.weight_gradients / super::graph::F32,
            ranks: self.layout.ranks as u64,
            zero: self.zero,
            bucket_bytes: self.bucket_bytes,
            whole_tensors: self.whole_tensors,
            state_in_file: self.state_in_file,
        }
    }

    pub(super) fn places(&self) -> Places {
        let updates = Updates {
            zero: self.zero,
            reduction: self.reduction,
            by_muon: self.whole_tensors,
            state_in_file: self.state_in_file,
        };
        Places::of(&self.layout, updates)
    }

    /// Values that the optimizer keeps for an element: two moments, or Muon's sum.
    fn moments_of(&self, spec: &TensorSpec) -> u64 {
        let table = spec.name.contains("lm_head") || spec.name.contains("embed_tokens");
        if self.whole_tensors && spec.shape.len() == 2 && !table { 1 } else { 2 }
    }

    /// Values of the draft's matrices, without its head.
    pub(super) fn matrix_values(&self) -> f64 {
        let matrices = self.specs.iter().filter(|spec| spec.shape.len() == 2);
        matrices.map(|spec| spec.shape.iter().map(|size| *size as f64).product::<f64>()).sum()
    }
}
