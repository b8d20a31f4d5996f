//! What the terms of an estimate are functions of.

use std::collections::BTreeMap;
use std::sync::Arc;

use longdraft_features::store::StoreDtype;
use longdraft_features::{FeatureMode, TeacherKind};
use longdraft_kernels::matrix::BlockFormat;
use longdraft_models::target_model::{Layers, Tap};
use longdraft_models::weights::TensorSpec;
use longdraft_models::{StepProducts, TargetConfig};
use longdraft_parallel::{Reduction, StatePlace};
use longdraft_train::Result;
use longdraft_train::config::TrainConfig;
use longdraft_train::footprint::{F32, Footprint, Row, RowMemory};
use longdraft_train::optim::MatrixUpdate;

use crate::layout::Layout;
use crate::optimizer::Parameters;
use crate::place::{Places, Updates};
use crate::target::Held;

/// Names of the target's ends.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A stage, as far as its costs depend on it.
#[derive(Debug, Clone)]
pub struct Workload {
    pub(crate) target: TargetConfig,
    pub(crate) layers: Layers,
    pub(crate) draft: Arc<dyn Footprint>,
    pub(crate) row_tokens: u64,
    /// Tokens of a document, if a row holds several.
    pub(crate) document_tokens: Option<u64>,
    /// Rows of a step over all ranks.
    pub(crate) rows_per_step: u64,
    pub(crate) features: FeatureMode,
    pub(crate) products: StepProducts,
    /// What a store holds states as.
    pub(crate) stored_as: StoreDtype,
    pub(crate) zero: longdraft_parallel::ZeroStage,
    pub(crate) bucket_bytes: u64,
    pub(crate) reduction: Reduction,
    pub(crate) whole_tensors: bool,
    pub(crate) state_in_file: bool,
    pub(crate) layout: Layout,
    /// Types of the target's matrices by their names, where it is held as its files hold it and these are known.
    pub(crate) stored: Option<Arc<BTreeMap<String, &'static str>>>,
    /// Rows that `train.features: memory` keeps, where they are known.
    pub(crate) training_rows: Option<u64>,
    pub(crate) extent: Extent,
}

/// How long a run is, at most: by steps, or tokens, or epochs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    steps: Option<u64>,
    tokens: Option<u64>,
    epochs: f64,
}

impl Extent {
    /// Passes over so many rows, if they are full.
    pub(crate) fn epochs(&self, rows: u64, (rows_per_step, row_tokens): (u64, u64)) -> f64 {
        let rows = rows.max(1) as f64;
        match (self.steps, self.tokens) {
            (Some(steps), _) => steps as f64 * rows_per_step as f64 / rows,
            (None, Some(tokens)) => tokens as f64 / row_tokens.max(1) as f64 / rows,
            (None, None) => self.epochs.max(0.0),
        }
    }
}

impl Workload {
    /// The stage of a configuration over a target of these sizes.
    ///
    /// # Errors
    /// - the draft that is asked for does not fit the target
    pub fn new(config: &TrainConfig, target: TargetConfig, layout: Layout) -> Result<Self> {
        let draft = config.draft.method.footprint(&config.teacher, &target)?;
        let run = &config.train;
        Ok(Self {
            extent: Extent { steps: run.steps, tokens: run.tokens, epochs: run.epochs },
            layers: config.needed_layers(),
            row_tokens: config.data.row_tokens as u64,
            document_tokens: None,
            rows_per_step: config.train.rows_of_a_step(config.data.row_tokens) as u64,
            features: config.train.features.clone(),
            products: config.products,
            stored_as: config.capture.dtype,
            zero: config.parallel.zero_stage(),
            bucket_bytes: config.parallel.bucket_bytes as u64,
            reduction: config.parallel.reduction,
            whole_tensors: config.optimizer.matrices == MatrixUpdate::Muon,
            state_in_file: config.parallel.optimizer_state == StatePlace::File,
            target,
            draft,
            layout,
            stored: None,
            training_rows: None,
        })
    }

    /// The same with a target that main memory holds as its files do: types of its matrices as files write them (`Q4_K`,
    /// `BF16`), by published names. Without them every matrix takes [`Layout::target_value_bytes`].
    #[must_use]
    pub fn with_stored(self, types: Option<BTreeMap<String, &'static str>>) -> Self {
        Self { stored: types.map(Arc::new), ..self }
    }

    /// How the target's matrices are held.
    pub(crate) fn held(&self) -> Held {
        match &self.stored {
            Some(types) => Held::AsStored(Arc::clone(types)),
            None => Held::Alike(self.layout.target_value_bytes as u64),
        }
    }

    /// The matrix that is the target's head.
    pub(crate) fn head_name(&self) -> &'static str {
        if self.target.tie_word_embeddings { EMBEDDING } else { HEAD }
    }

    /// Whether losses read the target's head as quantised blocks.
    fn has_stored_head(&self) -> bool {
        let Some(types) = &self.stored else { return self.layout.has_stored_head() };
        let stored = types.get(self.head_name()).copied();
        !self.layout.is_accelerator() && stored.and_then(BlockFormat::named).is_some()
    }

    /// The same, now that the text is read: it makes so many training rows.
    #[must_use]
    pub fn with_training_rows(self, rows: usize) -> Self {
        Self { training_rows: Some(rows as u64), ..self }
    }

    /// The same with rows of several documents, of so many tokens each: attention stays within them.
    #[must_use]
    pub fn with_documents(self, tokens: Option<u64>) -> Self {
        Self { document_tokens: tokens, ..self }
    }

    /// Tokens of a document: the row's unless it is said otherwise.
    pub(crate) fn document_tokens(&self) -> u64 {
        self.document_tokens.map_or(self.row_tokens, |tokens| tokens.min(self.row_tokens))
    }

    /// Whether the estimate lacks rows that are known only when the text is read.
    pub fn lacks_rows(&self) -> bool {
        self.features == FeatureMode::Memory && self.training_rows.is_none()
    }

    /// Ranks without a row in a step, which has fewer of them than there are groups of ranks.
    pub fn idle_ranks(&self) -> u64 {
        (self.layout.ranks as u64).saturating_sub(self.rows_per_step.saturating_mul(self.parts()))
    }

    /// Ranks that share a row with one another.
    pub(crate) fn parts(&self) -> u64 {
        self.layout.sequence.max(1) as u64
    }

    /// Ranks that share every layer of the target with one another.
    pub(crate) fn tensor(&self) -> u64 {
        self.layout.tensor.max(1) as u64
    }

    /// Rows that fall to the rank with most of them.
    pub(crate) fn own_rows(&self) -> u64 {
        let groups = (self.layout.ranks as u64 / self.parts()).max(1);
        self.rows_per_step.div_ceil(groups)
    }

    /// Rows of a step that a rank runs the target's layers over: where ranks share these, those of all of
    /// them.
    pub(crate) fn run_rows(&self) -> u64 {
        (self.own_rows() * self.tensor()).min(self.rows_per_step)
    }

    /// A row as a rank sees it.
    pub(crate) fn row(&self) -> Row {
        let tokens = self.row_tokens.div_ceil(self.parts());
        Row {
            tokens,
            learned: tokens,
            parts: self.parts(),
            teacher_logits: matches!(
                self.draft.teacher(),
                TeacherKind::Full | TeacherKind::EveryToken
            ),
            threads: self.layout.threads,
            half_products: self.layout.has_half_products(),
            stored_head: self.has_stored_head(),
            chunk_logits: self.layout.chunk_logits(!self.target.bend().is_plain()),
        }
    }

    pub(crate) fn row_memory(&self) -> RowMemory {
        self.draft.row_memory(&self.row())
    }

    /// Whether the draft reads the target's last keys and values, which parts of a row gather.
    pub(crate) fn taps_keys(&self) -> bool {
        self.draft.taps().contains(&Tap::LastKv)
    }

    /// Layers of the target whose outputs the draft reads.
    pub(crate) fn tapped_layers(&self) -> Vec<usize> {
        let layer = |tap: &Tap| match tap {
            Tap::Hidden(layer) => Some(layer.0),
            Tap::LastKv | Tap::FinalHidden => None,
        };
        self.draft.taps().iter().filter_map(layer).collect()
    }

    pub(crate) fn parameters(&self, row: &RowMemory) -> Parameters {
        let specs = self.draft.specs();
        Parameters {
            sizes: specs.iter().map(|spec| spec.shape.iter().product()).collect(),
            moments: specs.iter().map(|spec| self.moments_of(spec)).collect(),
            trained: row.weight_gradients / F32,
            ranks: self.layout.ranks as u64,
            zero: self.zero,
            bucket_bytes: self.bucket_bytes,
            whole_tensors: self.whole_tensors,
            state_in_file: self.state_in_file,
        }
    }

    pub(crate) fn places(&self) -> Places {
        let updates = Updates {
            reduction: self.reduction,
            by_muon: self.whole_tensors,
            state_in_file: self.state_in_file,
        };
        Places::of(&self.layout, updates)
    }

    /// Values that the optimizer keeps for an element: two moments, or Muon's sum.
    fn moments_of(&self, spec: &TensorSpec) -> u64 {
        if self.whole_tensors && spec.role.is_layer_matrix(spec.shape.len()) { 1 } else { 2 }
    }
}
