//! Arguments about drafting and verification, which several commands share.

use std::path::{Path, PathBuf};

use longdraft_decode::DraftShape;
use longdraft_models::DeviceChoice;

use super::{CacheChoice, TemplateArguments, WeightDtype};

/// Tokens proposed per round where nothing else is said.
const DRAFT_LEN: usize = 4;

/// Arguments about drafting and verification.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Drafting")]
pub(crate) struct DecodingArguments {
    /// Draft of any method: a run, a curriculum, a checkpoint, or a draft folder or file.
    #[arg(long, group = "draft_model")]
    pub(crate) draft: Option<PathBuf>,
    /// Draft with the target's own block for prediction of several tokens (MTP), in place of a draft. It lies in the
    /// files of Qwen3-Next, Qwen3.5, GLM-4.5 and DeepSeek-V3.
    #[arg(long, group = "draft_model")]
    pub(crate) mtp: bool,
    /// Also propose what followed the last tokens where they stood earlier in the text: `switch` (the
    /// default: in the draft's place where it finds much) or `merge` (both in one tree). Works without
    /// a draft, too.
    #[arg(long, value_name = "HOW", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "switch")]
    pub(crate) lookup: Option<LookupChoice>,
    /// Lookup also looks in the answers of these rows, best the target's own to other prompts, as `data
    /// regenerate` writes them. May be given several times.
    #[arg(long, value_name = "FILE", requires = "lookup")]
    pub(crate) datastore: Vec<PathBuf>,
    /// Tokens proposed per round.
    #[arg(long, default_value_t = DRAFT_LEN)]
    pub(crate) draft_len: usize,
    /// A tree instead of a chain: `static` (4,16,16,16,16) or `static:4,8,8` (nodes of each level);
    /// `dynamic` or `dynamic:WIDTH,DEPTH,BUDGET` (10,6,60; confidence decides); `sampled:3,2,1`
    /// (children drawn at each level, at a temperature).
    #[arg(long, value_name = "TREE", value_parser = parse_tree, conflicts_with = "draft_len")]
    pub(crate) tree: Option<DraftShape>,
    /// Propose no further where a draft with a confidence head (DSpark) gives its next token a smaller chance
    /// to be kept than this; 0 never stops.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub(crate) confidence_threshold: f64,
    /// Keep only the most likely tokens, this many.
    #[arg(long, help_heading = "Sampling")]
    pub(crate) top_k: Option<usize>,
    /// Keep the most likely tokens until their mass reaches this.
    #[arg(long, default_value_t = 1.0, help_heading = "Sampling")]
    pub(crate) top_p: f64,
    /// Keep tokens at least this likely, relative to the most likely one.
    #[arg(long, default_value_t = 0.0, help_heading = "Sampling")]
    pub(crate) min_p: f64,
    /// Key of all random draws.
    #[arg(long, default_value_t = 0, help_heading = "Sampling")]
    pub(crate) seed: u64,
    /// At a temperature: `ratio` accepts most, `match` gives the tokens of plain sampling with the
    /// same seed. With both, tokens are distributed as the target's own.
    #[arg(long, default_value = "ratio")]
    pub(crate) verify: VerifyChoice,
    /// Propose only these tokens (GLIDE, block drafts without a head of their own, --mtp): a file with a token id a line,
    /// with counts if you like.
    #[arg(long, value_name = "FILE", requires = "draft_model")]
    pub(crate) draft_vocab: Option<PathBuf>,
    /// Of them, the first, or the most frequent if there are counts. Without the file: those that
    /// the draft's training text had most (GLIDE, block drafts without a head of their own).
    #[arg(long, value_name = "N", requires = "draft_model")]
    pub(crate) draft_vocab_size: Option<usize>,
    /// How the target is held.
    #[command(flatten)]
    pub(crate) held: OpenOptions,
    /// What its chat template is given.
    #[command(flatten)]
    pub(crate) template: TemplateArguments,
    /// `measured` drafts as much as pays by measured times, and not at all where it does not;
    /// `fixed` always drafts the whole layout. [default: measured; fixed for eval decode]
    #[arg(long)]
    pub(crate) pace: Option<PaceChoice>,
}

/// How a target is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::Args)]
pub struct OpenOptions {
    /// How to hold the target's weights.
    #[arg(long, default_value = "stored", help_heading = None)]
    pub dtype: WeightDtype,
    /// How to hold keys and values of the context: auto (f16 beside quantised blocks, on an NVIDIA GPU bf16
    /// there and with `--dtype bf16`, else f32), f32, f16, q8 (a byte a value and a scale for 32: half of f16).
    #[arg(long, default_value = "auto", help_heading = None)]
    pub cache: CacheChoice,
    /// Where to compute: auto (a GPU if there is one), cpu, cuda:0, metal:0.
    #[arg(long, default_value = "auto", help_heading = None)]
    pub device: DeviceChoice,
}

impl DecodingArguments {
    /// Chains of a draft, in f32.
    pub(crate) fn chain(draft: &Path, draft_len: usize) -> Self {
        let draft = Some(draft.to_path_buf());
        let held = OpenOptions { dtype: WeightDtype::F32, ..OpenOptions::default() };
        Self { draft, draft_len, held, ..Self::plain() }
    }

    /// Plain decoding, as the commands do it without other words.
    pub(crate) fn plain() -> Self {
        Self {
            draft: None,
            mtp: false,
            lookup: None,
            datastore: Vec::new(),
            draft_len: DRAFT_LEN,
            tree: None,
            confidence_threshold: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            verify: VerifyChoice::Ratio,
            draft_vocab: None,
            draft_vocab_size: None,
            held: OpenOptions::default(),
            template: TemplateArguments::default(),
            pace: None,
        }
    }

    /// The same for plain decoding.
    pub(crate) fn without_drafts(self) -> Self {
        Self {
            draft: None,
            mtp: false,
            lookup: None,
            datastore: Vec::new(),
            draft_vocab: None,
            confidence_threshold: 0.0,
            ..self
        }
    }

    /// Layout of a round's proposals.
    pub(crate) fn shape(&self) -> DraftShape {
        self.tree.clone().unwrap_or(DraftShape::Chain { length: self.draft_len })
    }

    /// Whether a draft, lookup or both are asked for.
    pub(crate) fn drafts(&self) -> bool {
        self.has_model() || self.lookup.is_some()
    }

    /// Whether a layout is asked for where nothing drafts.
    pub(crate) fn has_unused_layout(&self) -> bool {
        !self.drafts() && (self.tree.is_some() || self.draft_len != DRAFT_LEN)
    }

    /// Whether a model drafts: a draft, or the target's own block.
    pub(crate) fn has_model(&self) -> bool {
        self.draft.is_some() || self.mtp
    }
}

/// How prompt lookup and a draft share a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LookupChoice {
    /// Both in one tree.
    Merge,
    /// Lookup in the draft's place where it finds much.
    Switch,
}

/// How proposals are tested at a temperature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum VerifyChoice {
    /// By the ratio of the probabilities that target and draft give.
    Ratio,
    /// By drawing from the target.
    Match,
}

/// Who decides how much is drafted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PaceChoice {
    /// The layout.
    Fixed,
    /// Measured times.
    Measured,
}

/// Reads a layout; see the help of `--tree`.
pub(crate) fn parse_tree(text: &str) -> Result<DraftShape, String> {
    let (rule, sizes) = text.split_once(':').map_or((text, None), |(rule, s)| (rule, Some(s)));
    let numbers = |sizes: &str| -> Result<Vec<usize>, String> {
        let number =
            |part: &str| part.trim().parse().map_err(|_| format!("`{part}` is not a number"));
        sizes.split(',').map(number).collect()
    };
    let shape = match (rule, sizes.map(numbers).transpose()?) {
        ("static", None) => DraftShape::Static { widths: DraftShape::STATIC.to_vec() },
        ("static", Some(widths)) => DraftShape::Static { widths },
        ("sampled", Some(children)) => DraftShape::Sampled { children },
        ("dynamic", None) => DraftShape::Dynamic { width: 10, depth: 6, budget: 60 },
        ("dynamic", Some(sizes)) => match sizes[..] {
            [width, depth, budget] => DraftShape::Dynamic { width, depth, budget },
            _ => return Err("`dynamic` takes WIDTH,DEPTH,BUDGET".into()),
        },
        _ => {
            return Err(
                "expected static, static:4,8,8, dynamic, dynamic:10,6,60 or sampled:3,2,1".into()
            );
        }
    };
    shape.check().map_err(|error| error.to_string())?;
    Ok(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_read_or_refused_with_a_reason() {
        let read = |text| parse_tree(text).expect("a tree").name();
        assert_eq!(read("static"), "tree-static 4,16,16,16,16");
        assert_eq!(read("static:4, 8"), "tree-static 4,8");
        assert_eq!(read("dynamic:3,4,12"), "tree-dynamic width 3 depth 4 budget 12");
        assert_eq!(read("sampled:3,2"), "tree-sampled(wor) 3,2");
        for (wrong, says) in [
            ("wide", "expected static"),
            ("sampled", "expected static"),
            ("static:4,x", "`x` is not a number"),
            ("static:4,0", "at least 1 node"),
            ("dynamic:3", "WIDTH,DEPTH,BUDGET"),
        ] {
            assert!(parse_tree(wrong).expect_err("refused").contains(says), "{wrong}");
        }
    }
}
