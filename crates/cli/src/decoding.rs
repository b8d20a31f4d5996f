//! What `generate` and `eval decode` have in common: whose proposals, laid out how, tested how.

mod text;

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::DType;
use longdraft_decode::drafter::{
    AnyDraft, Combination, CombinedDrafter, Datastore, Drafter, GrownDatastore, LookupDrafter,
    ModelDrafter, MtpModel, Proposer, ReducedHead, drafter_of,
};
use longdraft_decode::{DecodeError, DecodeOptions, Pacing, READ_ALONE, Sampling, VerifyRule};
use longdraft_kernels::matrix::block_products_on;
use longdraft_models::disk::readable_bytes;
use longdraft_models::draft::{Draft, HeldAs, TOKEN_COUNTS_FILE};
use longdraft_models::target_model::{CacheType, MtpBlock, Target, TargetOptions};
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_models::{ModelError, Precision};
use longdraft_records::decode::{DrafterParts, Lookup};

use crate::cli::{
    CacheChoice, DecodingArguments, LookupChoice, OpenOptions, PaceChoice, VerifyChoice,
    WeightDtype,
};
use crate::datastore;
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};
use crate::model_source::no_target;
use crate::status::Waiting;
use crate::threads::own_threads;

pub(crate) use text::{encode_chat, encode_chat_with, encode_text, finish, stop_tokens, stops};

/// Tokens of the context whose cache is told, where the target has as many.
pub(crate) const SAID_CONTEXT: usize = 32_768;

/// An opened target with what may draft for it.
pub(crate) struct Models {
    pub(crate) target: Arc<Target>,
    pub(crate) tokenizer: Arc<TextTokenizer>,
    pub(crate) draft: Option<Arc<dyn Draft>>,
    /// The target's own block, where it drafts.
    mtp: Option<MtpBlock>,
    head: Option<Arc<ReducedHead>>,
    datastore: Option<Arc<Datastore>>,
    /// Texts that lookup finds and that are added meanwhile.
    pub(crate) grown: Option<Arc<GrownDatastore>>,
}

impl Models {
    /// Trained values of the draft model, if there is one.
    pub(crate) fn draft_parameters(&self) -> Option<usize> {
        self.draft.as_ref().map(|draft| draft.parameter_count())
    }

    /// Has another draft propose through its own head, if there is one.
    pub(crate) fn take(&mut self, proposer: Option<Proposer>) {
        if let Some(Proposer { draft, head }) = proposer {
            (self.draft, self.head) = (Some(draft), head);
        }
    }

    /// Opens another draft, on any thread while a command decodes.
    pub(crate) fn open_another(
        &self,
        decoding: &DecodingArguments,
        source: &DraftSource,
    ) -> Result<Proposer> {
        let open = || decoding.proposer(source, &self.target);
        own_threads(rayon::current_num_threads())?.install(open)
    }
}

impl DecodingArguments {
    /// Warns of a layout that is asked for where nothing drafts.
    pub(crate) fn warn_of_unused_layout(&self) {
        if self.has_unused_layout() {
            errln!("warning: --draft-len and --tree do nothing without --draft, --mtp or --lookup");
        }
    }

    /// Opens target, tokenizer and draft.
    pub(crate) fn open(&self, target: &str) -> Result<Models> {
        // Before anything large is read.
        let source = self.draft_source()?;
        self.proposed_tokens(source.as_ref(), self.draft_vocab_size)?;
        let _waiting = Waiting::start("opening the target");
        // The tokenizer first: what building it takes is free again when the weights come.
        let tokenizer = Target::open_tokenizer(target).map_err(no_target(target))?;
        let tokenizer = self.template.apply(tokenizer)?;
        // Whether there is a block is known before the target is read.
        let mtp = self.open_block(target)?;
        let target = open_target(target, self.held)?;
        let draft = source.as_ref().map(|source| open_draft(source, &target)).transpose()?;
        self.with((Arc::new(target), Arc::new(tokenizer)), source.as_ref(), (draft, mtp))
    }

    /// The target's own block, if it is to draft.
    pub(crate) fn open_block(&self, target: &str) -> Result<Option<MtpBlock>> {
        if !self.mtp {
            return Ok(None);
        }
        open_mtp(target, &target_options(self.held)?).map(Some)
    }

    /// The same of a target, a draft and a block that are open.
    pub(crate) fn with(
        &self,
        (target, tokenizer): (Arc<Target>, Arc<TextTokenizer>),
        source: Option<&DraftSource>,
        (draft, mtp): (Option<Arc<dyn Draft>>, Option<MtpBlock>),
    ) -> Result<Models> {
        let head = self.head(&target, source, draft.as_deref())?;
        let datastore = match &self.datastore[..] {
            [] => None,
            paths => {
                let vocabulary = target.config().vocab_size;
                Some(Arc::new(datastore::open(paths, &tokenizer, vocabulary)?))
            }
        };
        let models = Models { target, tokenizer, draft, mtp, head, datastore, grown: None };
        if self.confidence_threshold > 0.0 {
            // Whether the draft can follow it is told before anything is asked of the target.
            self.drafter(&models)?;
        }
        Ok(models)
    }

    /// Opens a draft with the head that it proposes through, both held as the target is.
    pub(crate) fn proposer(&self, source: &DraftSource, target: &Target) -> Result<Proposer> {
        let draft = open_draft(source, target)?;
        let head = self.head(target, Some(source), Some(draft.as_ref()))?;
        Ok(Proposer { draft, head })
    }

    /// The head over fewer tokens that a draft or the target's own block proposes through, if there is one.
    fn head(
        &self,
        target: &Target,
        source: Option<&DraftSource>,
        draft: Option<&dyn Draft>,
    ) -> Result<Option<Arc<ReducedHead>>> {
        // Without other words a draft proposes what it learned to propose.
        let learned = draft.and_then(Draft::most_frequent);
        let size = self.draft_vocab_size.or(learned.filter(|_| self.draft_vocab.is_none()));
        let Some(path) = self.proposed_tokens(source, size)? else { return Ok(None) };
        if draft.is_some_and(|draft| draft.vocabulary().is_some()) {
            return Err(Failure::usage(
                "--draft-vocab and --draft-vocab-size are for drafts that propose through the \
                 target's head",
            )
            .hint("this one has a vocabulary of its own"));
        }
        Ok(Some(Arc::new(ReducedHead::open(target, &path, size)?)))
    }

    /// Where the draft lies, if one is asked for; told where the path only leads to it.
    pub(crate) fn draft_source(&self) -> Result<Option<DraftSource>> {
        let Some(path) = &self.draft else { return Ok(None) };
        let source = DraftSource::find(path)?;
        if source.place() != path {
            errln!("draft: {}", source.place().display());
        }
        Ok(Some(source))
    }

    /// The file that lists what a draft proposes, if that is not everything.
    fn proposed_tokens(
        &self,
        source: Option<&DraftSource>,
        size: Option<usize>,
    ) -> Result<Option<PathBuf>> {
        if self.mtp && self.draft_vocab_size.is_some() && self.draft_vocab.is_none() {
            return Err(Failure::usage("--draft-vocab-size counts the tokens of a draft's text")
                .hint("--mtp has none: give --draft-vocab FILE, too"));
        }
        let (Some(draft), Some(_), None) = (source, size, &self.draft_vocab) else {
            return Ok(self.draft_vocab.clone());
        };
        let counts = draft.folder().join(TOKEN_COUNTS_FILE);
        if counts.is_file() {
            return Ok(Some(counts));
        }
        Err(Failure::usage(format!("{}: no token counts are there", counts.display()))
            .hint("`longdraft extract` writes them beside a draft; or give --draft-vocab FILE"))
    }

    /// Options of a request at a temperature, without limits.
    pub(crate) fn options(&self, temperature: f64, pace: PaceChoice) -> Result<DecodeOptions> {
        let Self { top_k, top_p, min_p, seed, confidence_threshold, .. } = *self;
        let sampling = Sampling { temperature, top_k, top_p, min_p, ..Sampling::default() };
        sampling.check()?;
        require_draft_len(self.draft_len)?;
        let shape = self.shape();
        shape.check()?;
        if !(confidence_threshold >= 0.0 && confidence_threshold.is_finite()) {
            let problem =
                format!("--confidence-threshold {confidence_threshold} is not a probability");
            return Err(Failure::usage(problem).hint("give a number from 0 (off) to 1"));
        }
        Ok(DecodeOptions {
            shape,
            sampling,
            seed,
            confidence_threshold,
            rule: match self.verify {
                VerifyChoice::Ratio => VerifyRule::Ratio,
                VerifyChoice::Match => VerifyRule::Match,
            },
            pacing: match self.pace.unwrap_or(pace) {
                PaceChoice::Fixed => Pacing::Fixed,
                PaceChoice::Measured => Pacing::Measured,
            },
            ..DecodeOptions::default()
        })
    }

    /// Options of a request of so many tokens at most, which ends where the target ends a text.
    pub(crate) fn request(
        &self,
        (temperature, pace): (f64, PaceChoice),
        max_new_tokens: usize,
        target: &Target,
    ) -> Result<DecodeOptions> {
        let options = self.options(temperature, pace)?;
        Ok(DecodeOptions { max_new_tokens, stop_tokens: stop_tokens(target), ..options })
    }

    /// The drafter that is asked for, if any.
    pub(crate) fn drafter<'a>(&self, models: &'a Models) -> Result<Option<Box<dyn Drafter + 'a>>> {
        self.drafter_of(models, models.draft.as_deref().map(AnyDraft::from), models.head.as_ref())
    }

    /// The same with another draft.
    pub(crate) fn drafter_with<'a>(
        &self,
        models: &'a Models,
        Proposer { draft, head }: &Proposer,
    ) -> Result<Option<Box<dyn Drafter + 'a>>> {
        self.drafter_of(models, Some(AnyDraft::from(Arc::clone(draft))), head.as_ref())
    }

    fn drafter_of<'a>(
        &self,
        models: &'a Models,
        draft: Option<AnyDraft<'a>>,
        head: Option<&Arc<ReducedHead>>,
    ) -> Result<Option<Box<dyn Drafter + 'a>>> {
        let Models { target, mtp, .. } = models;
        let model: Option<Box<dyn Drafter>> = match (draft, mtp) {
            (Some(draft), _) => Some(drafter_of(draft, target, head)?),
            (None, Some(block)) => {
                Some(Box::new(ModelDrafter::new(MtpModel::new(block, target, head)?)))
            }
            (None, None) => None,
        };
        let tells = model.as_ref().is_some_and(|model| model.tells_confidence());
        if self.confidence_threshold > 0.0 && !tells {
            return Err(Failure::usage(
                "--confidence-threshold needs a draft with a confidence head",
            )
            .hint("--pace measured leaves out what does not pay with drafts of any kind"));
        }
        let lookup = || {
            let lookup = LookupDrafter::new().with_datastore(models.datastore.clone());
            lookup.with_grown(models.grown.clone())
        };
        Ok(match (model, self.lookup) {
            (Some(model), Some(how)) => {
                let combination = match how {
                    LookupChoice::Merge => Combination::Merge,
                    LookupChoice::Switch => Combination::Switch,
                };
                Some(Box::new(CombinedDrafter::new(model, lookup(), combination)))
            }
            (None, Some(_)) => Some(Box::new(lookup())),
            (model, None) => model,
        })
    }

    /// The drafter's parts, as records and reports name them.
    pub(crate) fn drafter_parts(&self, models: &Models) -> DrafterParts {
        let own = models.mtp.as_ref().map(|_| "mtp");
        let method = models.draft.as_ref().map(|draft| draft.method()).or(own);
        let head = models.head.as_ref().filter(|_| method.is_some());
        let store = models.datastore.as_ref().filter(|_| self.lookup.is_some());
        DrafterParts {
            method: method.map(str::to_owned),
            vocabulary: head.map(|head| head.vocabulary().draft_size()),
            lookup: self.lookup.map(|how| match (method, how) {
                (None, _) => Lookup::Alone,
                (Some(_), LookupChoice::Merge) => Lookup::Merged,
                (Some(_), LookupChoice::Switch) => Lookup::Switched,
            }),
            datastore: store.map(|store| datastore::describe(store)),
        }
    }
}

impl From<DecodeError> for Failure {
    fn from(error: DecodeError) -> Self {
        use DecodeError as E;
        match &error {
            E::EmptyPrompt => Self::usage(error).hint("give some text"),
            E::PromptTooLong { .. } => Self::usage(error)
                .hint("shorten the prompt, or take a target with a longer context"),
            E::UnknownToken { .. } => {
                Self::usage(error).hint("leave the special token of that number out of the text")
            }
            E::Sampling(_) | E::Shape(_) => Self::usage(error),
            _ => Self::work(error),
        }
    }
}

/// Refuses proposals of no length.
pub(crate) fn require_draft_len(draft_len: usize) -> Result<()> {
    if draft_len > 0 {
        return Ok(());
    }
    Err(Failure::usage("--draft-len 0 drafts nothing")
        .hint("give at least 1; plain decoding takes no draft (`generate` has --no-draft)"))
}

/// Opens a draft, held as its target is.
pub(crate) fn open_draft(source: &DraftSource, target: &Target) -> Result<Arc<dyn Draft>> {
    let mut draft = source.open(target)?;
    // Where a device multiplies neither, the draft stays as it is.
    draft.hold_as(if target.holds_blocks() { HeldAs::Blocks } else { HeldAs::Halves })?;
    Ok(Arc::from(draft))
}

/// Opens a draft, held as its target is. It proposes what it learned to propose.
pub(crate) fn open_proposer(source: &DraftSource, target: &Target) -> Result<Proposer> {
    DecodingArguments::plain().proposer(source, target)
}

/// How a target is held as asked; the process's products follow it.
fn target_options(held: OpenOptions) -> Result<TargetOptions> {
    let as_stored = held.dtype == WeightDtype::Stored;
    let (dtype, precision) = match held.dtype {
        WeightDtype::F32 | WeightDtype::Stored => (DType::F32, Precision::F32),
        WeightDtype::Bf16 => (DType::BF16, Precision::Bf16),
        WeightDtype::F16 => (DType::F16, Precision::Bf16),
    };
    let device = held.device.open(0)?;
    precision.apply(&device);
    let cache = match held.cache {
        CacheChoice::Auto => CacheType::Auto,
        CacheChoice::F32 => CacheType::F32,
        CacheChoice::F16 => CacheType::F16,
        CacheChoice::Q8 => CacheType::Q8,
    };
    Ok(TargetOptions { dtype, device, as_stored, cache, ..TargetOptions::default() })
}

/// Opens a target, held as asked; the process's products follow it.
pub(crate) fn open_target(target: &str, held: OpenOptions) -> Result<Target> {
    let options = target_options(held)?;
    let target = Target::open(target, &options).map_err(no_target(target))?;
    if !target.widened().is_empty() {
        errln!(
            "note: {} weights are held in f32: blocks are multiplied on the CPU and on NVIDIA GPUs \
             from compute capability 8.0 on; --dtype bf16 takes half the memory",
            target.widened().join(", ")
        );
    }
    Ok(target)
}

/// The target's own block for prediction of several tokens.
fn open_mtp(target: &str, options: &TargetOptions) -> Result<MtpBlock> {
    Target::open_mtp(target, options).map_err(|error| match error {
        ModelError::Unrecognised { .. } => Failure::from(error).hint("leave out --mtp"),
        error => error.into(),
    })
}

/// How a target's matrices are held, and what the tensors of a draft take beside them.
pub(crate) fn holdings(target: &Target, draft: Option<&dyn Draft>) -> String {
    let of_type = |(name, bytes): &(&str, u64)| format!("{name} {}", readable_bytes(*bytes));
    let held: Vec<String> = target.held().iter().map(of_type).collect();
    let products = if target.holds_blocks() {
        format!("; blocks times activations of 8 bits by {}", block_products_on(target.device()))
    } else {
        String::new()
    };
    let of_draft = |draft: &dyn Draft| {
        let bytes = readable_bytes(draft.held_bytes() as u64);
        format!("; draft: {bytes}")
    };
    let draft = draft.map(of_draft).unwrap_or_default();
    let tokens = target.config().max_position_embeddings.min(SAID_CONTEXT);
    let bytes = readable_bytes(target.cache_bytes(tokens, READ_ALONE));
    format!(
        "weights: {}{products}{draft}; cache: {}, {bytes} for {tokens} tokens",
        held.join(", "),
        target.cache_type()
    )
}
