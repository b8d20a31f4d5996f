//! Block drafts as GGUF files, as llama.cpp reads them: one architecture for all kinds.
//!
//! Layers count as states that enter one ([`crate::ids::EnteredLayerId`]). Rows of q and k are in the order of the
//! published files. Which heads there are, the tensors say; whether slot 0 proposes is a key that is true
//! where it is absent, and read only where there is a chain.

use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Tensor};
use longdraft_kernels::bend::Bend;

use super::chain;
use super::config::{
    BlockConfig, ChainKind, ChainSizes, ConvolutionSizes, LayerKind, SelectorSizes, no_embeddings,
};
use super::files::{CHAINED, EXTENDED, FROZEN, PLAIN};
use super::key_names::{BEND, BLOCK_SIZE, CONVOLUTION, FROM_ANCHOR, SELECTOR};
use super::selector::{HIDDEN_PROJECTION, PREDECESSORS, SUCCESSORS};
use crate::config::{RopeParameters, TargetConfig, limits};
use crate::draft::DraftKind;
use crate::draft::gguf::{DIVISORS, DraftGguf};
use crate::draft::vocabulary::MAP;
use crate::error::{ModelError, Problems, Result, without_backtrace};
use crate::weights::WeightSource;
use crate::weights::gguf::header::{Header, StoredTensor};

/// `general.architecture` of such files.
pub const ARCHITECTURE: &str = PLAIN.name;

/// The mask token among the keys of the target's tokenizer.
pub const MASK_TOKEN: &str = "tokenizer.ggml.mask_token_id";

/// First tensor of a chain.
const CHAIN: &str = "markov_w1.weight";
/// The head that tells the chance of acceptance.
const CONFIDENCE: &str = "conf_proj.weight";

/// Modules or tensors outside of layers: name in files, published name.
const NAMES: [(&str, &str); 12] = [
    ("fc", "fc"),
    ("enc.output_norm", "hidden_norm"),
    ("output_norm", "norm"),
    ("markov_w1", chain::EMBEDDING_MODULE),
    ("markov_w2", chain::OUTPUT),
    ("conf_proj", chain::CONFIDENCE),
    ("selector_hidden", HIDDEN_PROJECTION),
    ("selector_predecessor.weight", PREDECESSORS),
    ("selector_successor.weight", SUCCESSORS),
    ("token_embd.weight", FROZEN[0]),
    ("output.weight", FROZEN[1]),
    (MAP[0], MAP[0]),
];

/// The same inside of a layer.
const LAYER_NAMES: [(&str, &str); 15] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("attn_conv_base", "attention_conv.base_kernel"),
    ("attn_conv_proj", "attention_conv.kernel_projection"),
    ("ffn_conv_base", "mlp_conv.base_kernel"),
    ("ffn_conv_proj", "mlp_conv.kernel_projection"),
];

/// The name in files of a published tensor.
pub fn stored_name(published: &str) -> Option<String> {
    match published.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
        Some((layer, rest)) => Some(format!(
            "blk.{layer}.{}",
            renamed(rest, LAYER_NAMES.iter().map(|(a, b)| (*b, *a)))?
        )),
        None => renamed(published, NAMES.iter().map(|(a, b)| (*b, *a))),
    }
}

/// The published name of a file's tensor.
fn published_name(stored: &str) -> Option<String> {
    match stored.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, rest)) => {
            Some(format!("layers.{layer}.{}", renamed(rest, LAYER_NAMES.iter().copied())?))
        }
        None => renamed(stored, NAMES.iter().copied()),
    }
}

/// A name by a table of whole tensors, and of modules whose `weight` or `bias` it is.
fn renamed<'a>(name: &str, mut table: impl Iterator<Item = (&'a str, &'a str)>) -> Option<String> {
    table.find_map(|(from, to)| match name.strip_prefix(from)? {
        "" => Some(to.to_owned()),
        rest @ (".weight" | ".bias") => Some(format!("{to}{rest}")),
        _ => None,
    })
}

/// Tensors of a draft's GGUF file under their published names.
pub struct GgufBlockSource(DraftGguf);

impl GgufBlockSource {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// - unreadable, not GGUF, or of another architecture
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self(DraftGguf::open(path, ARCHITECTURE, "block")?))
    }

    /// The header.
    pub fn header(&self) -> &Header {
        self.0.header()
    }

    /// The kind of draft, by its tensors and keys.
    pub(super) fn kind(&self) -> &'static DraftKind {
        let tensors = &self.header().tensors;
        if tensors.contains_key(CHAIN) {
            return &CHAINED;
        }
        let extended = [SELECTOR[0], CONVOLUTION[0]];
        if extended.iter().any(|key| self.0.number(key).is_some()) {
            return &EXTENDED;
        }
        if self.0.flag(FROM_ANCHOR) == Some(true) { &CHAINED } else { &PLAIN }
    }

    /// Sizes and switches. What files leave to the target is taken from it; without one the target's
    /// layers are counted up to the one above the last that is read.
    ///
    /// # Errors
    /// - a list of every missing, unusable or unsupported key
    pub fn config(
        &self,
        target: Option<&TargetConfig>,
    ) -> std::result::Result<BlockConfig, Problems> {
        let mut problems = Problems::default();
        let file = &self.0;
        let mut size = |name: &str, default| file.size(name, default, &mut problems);
        let hidden_size = size("embedding_length", None);
        let num_attention_heads = size("attention.head_count", None);
        let default_head_dim = (hidden_size / num_attention_heads.max(1)).max(1);
        let max_position_embeddings =
            size("context_length", target.map(|target| target.max_position_embeddings));
        let known = target.map(|target| target.vocab_size).or_else(|| self.tokens());
        let vocab_size = size("vocab_size", known);
        let mut config = BlockConfig {
            hidden_size,
            intermediate_size: size("feed_forward_length", None),
            num_attention_heads,
            num_key_value_heads: size("attention.head_count_kv", Some(num_attention_heads)),
            head_dim: size("attention.key_length", Some(default_head_dim)),
            vocab_size,
            draft_vocab_size: file.rows(MAP[0]).unwrap_or(vocab_size),
            rms_norm_eps: file.rms_norm_eps(),
            rope: RopeParameters::plain(10_000.0),
            max_position_embeddings,
            attention_bias: false,
            // A list of absurd length is refused by its number, which is kept one above the limit.
            layers: vec![LayerKind::Full; size("block_count", None).min(limits::LAYERS + 1)],
            sliding_window: None,
            is_causal: Some(file.flag("attention.causal").unwrap_or(false)),
            block_size: size(BLOCK_SIZE, None),
            mask_token_id: 0,
            target_layers: file.layers(&file.key("target_layers")).unwrap_or_default(),
            num_target_layers: 0,
            convolution: None,
            selector: None,
            chain: None,
            bend: Bend::default(),
            // No key of such files says so.
            embedding_scale: None,
            initializer_range: 0.02,
        };
        // The first size says whether the part is there.
        let mut sizes =
            |names: [&str; 2]| file.number(names[0]).map(|_| names.map(|name| size(name, None)));
        config.convolution = sizes(CONVOLUTION)
            .map(|[kernel_size, group_size]| ConvolutionSizes { kernel_size, group_size });
        config.selector = sizes(SELECTOR).map(|[rank, top_k]| SelectorSizes { rank, top_k });
        config.rope = file.rope(max_position_embeddings, &mut problems);
        config.num_target_layers = target.map_or_else(
            || config.target_layers.last().map_or(1, |last| last.0.saturating_add(2)),
            |target| target.num_hidden_layers,
        );
        self.read_mask_token(&mut config, &mut problems);
        self.read_windows(&mut config, &mut problems);
        self.read_chain(&mut config, &mut problems);
        // 0 is none.
        let [multiplier, softcap] = ["logit_scale", BEND[1]].map(|key| {
            let number = file.number(key).filter(|number| *number != 0.0)?;
            limits::scale(&mut problems, &file.key(key), number)
        });
        config.bend = Bend { divisor: multiplier.map_or(1.0, f64::recip), softcap };
        if problems.0.is_empty() {
            problems = config.problems();
        }
        if problems.0.is_empty()
            && let Err(error) = config.rope.build(config.head_dim)
        {
            problems.push(without_backtrace(error));
        }
        if problems.0.is_empty() { Ok(config) } else { Err(problems) }
    }

    /// Tokens that the file's own tensors or its tokenizer count.
    fn tokens(&self) -> Option<usize> {
        let listed = self.header().metadata.get("tokenizer.ggml.tokens");
        let listed = listed.and_then(|tokens| tokens.to_vec().ok()).map(Vec::len);
        self.0.rows("token_embd.weight").or(self.0.rows(CHAIN)).or(listed)
    }

    fn read_mask_token(&self, config: &mut BlockConfig, problems: &mut Problems) {
        let found = self.header().number(MASK_TOKEN).filter(|id| *id >= 0.0);
        match found {
            Some(id) => config.mask_token_id = id as u32,
            None => problems.push(format!("`{MASK_TOKEN}` is missing")),
        }
        let key = self.0.key("target_layers");
        if config.target_layers.is_empty() {
            let found = self.header().integers(&key);
            let reason = no_embeddings(found.as_ref().is_some_and(|ids| ids.contains(&0)));
            let told =
                format!("`{key}` = {found:?} is not a list of layers, counted from 1{reason}");
            problems.push(told);
        }
    }

    /// Which layers slide: those that a list of switches names.
    fn read_windows(&self, config: &mut BlockConfig, problems: &mut Problems) {
        let window = self.0.number("attention.sliding_window").filter(|window| *window > 0.0);
        let Some(window) = window else { return };
        config.sliding_window = Some(window as usize);
        let key = self.0.key("attention.sliding_window_pattern");
        let pattern = self.header().metadata.get(&key).and_then(|value| value.to_vec().ok());
        let slides = |value: &Value| match value.to_bool() {
            Ok(true) => Some(LayerKind::Sliding),
            Ok(false) => Some(LayerKind::Full),
            Err(_) => None,
        };
        let kinds: Option<Vec<LayerKind>> =
            pattern.and_then(|values| values.iter().map(slides).collect());
        match kinds {
            Some(kinds) if kinds.len() == config.layers.len() => config.layers = kinds,
            _ => problems.push(format!(
                "`{key}` is not a list of {} times true or false",
                config.layers.len()
            )),
        }
    }

    /// A chain by its tensors; the switch alone makes one without a head.
    fn read_chain(&self, config: &mut BlockConfig, problems: &mut Problems) {
        let width = |name: &str| self.header().tensors.get(name)?.shape.last().copied();
        let said = self.0.flag(FROM_ANCHOR);
        let rank = match (width(CHAIN), said) {
            (Some(rank), None | Some(true)) => rank,
            (None, Some(true)) => 0,
            (None, None | Some(false)) => return,
            (Some(_), Some(false)) => {
                let key = self.0.key(FROM_ANCHOR);
                return problems.push(format!("`{key}` = false is not supported beside `{CHAIN}`"));
            }
        };
        let confidence = width(CONFIDENCE).map(|width| width != config.hidden_size);
        config.chain = Some(ChainSizes { rank, kind: ChainKind::Vanilla, confidence });
    }

    fn stored(&self, published: &str) -> Option<&StoredTensor> {
        self.header().tensors.get(&stored_name(published)?)
    }

    fn find(&self, published: &str) -> Result<&StoredTensor> {
        let none = || ModelError::invalid(self.0.path(), format!("no tensor for `{published}`"));
        self.stored(published).ok_or_else(none)
    }
}

impl WeightSource for GgufBlockSource {
    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Published names; tensors without one keep theirs, so that they are reported.
    fn names(&self) -> Vec<String> {
        let stored = self.header().tensors.keys().filter(|name| *name != DIVISORS);
        stored.map(|name| published_name(name).unwrap_or_else(|| name.clone())).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.stored(name).map(|tensor| tensor.shape.clone())
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        Ok(self.0.values(name, self.find(name)?)?.to_dtype(dtype)?)
    }

    /// `d2t` as the offsets that other formats hold.
    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        self.0.offsets(name, self.find(name)?)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use longdraft_kernels::rope::RopeScaling;

    use super::super::tests::toy;
    use super::super::weights::file_specs;
    use super::*;
    use crate::draft::block::BlockDraft;
    use crate::draft::files::{SavedDraft, open_weights};
    use crate::draft::{Draft, DraftKind};
    use crate::ids::LayerId;
    use crate::weights::gguf::write::save;

    type Keys = Vec<(String, Value)>;

    /// Keys of [`toy`] without biases.
    fn keys() -> Keys {
        let count = |size: u32| Value::U32(size);
        let own = [
            ("block_count", count(2)),
            ("context_length", count(64)),
            ("embedding_length", count(32)),
            ("feed_forward_length", count(48)),
            ("attention.head_count", count(4)),
            ("attention.head_count_kv", count(2)),
            ("attention.key_length", count(8)),
            ("attention.layer_norm_rms_epsilon", Value::F32(1e-6)),
            ("rope.freq_base", Value::F32(1e4)),
            ("vocab_size", count(40)),
            ("block_size", count(4)),
            ("target_layers", Value::Array(vec![Value::I32(2), Value::I32(4)])),
        ];
        let mut all: Keys = own.map(|(key, value)| (format!("{ARCHITECTURE}.{key}"), value)).into();
        all.push(("general.architecture".into(), Value::String(ARCHITECTURE.into())));
        all.push((MASK_TOKEN.into(), count(39)));
        all
    }

    fn set(keys: &mut Keys, key: &str, value: Value) {
        keys.push((format!("{ARCHITECTURE}.{key}"), value));
    }

    /// Writes a network's tensors, each value its own, under `keys`.
    fn write(path: &Path, config: &BlockConfig, keys: &Keys) -> Vec<(String, Tensor)> {
        let tensors: Vec<(String, Tensor)> = (1..)
            .zip(file_specs(config))
            .map(|(number, spec)| {
                let count: usize = spec.shape.iter().product();
                let values: Vec<f32> =
                    (0..count).map(|i| (i % 97) as f32 / number as f32).collect();
                let tensor = Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu);
                (spec.name, tensor.expect("a tensor"))
            })
            .collect();
        // Every other token, by its id.
        let ids: Vec<i64> = (0..config.draft_vocab_size as i64).map(|i| 2 * i).collect();
        let ids = Tensor::new(ids, &Device::Cpu).expect("a map");
        let map = config.has_own_head().then(|| (MAP[0].to_owned(), ids));
        let stored: Vec<_> = tensors
            .iter()
            .chain(&map)
            .map(|(name, tensor)| (stored_name(name).expect("a name"), tensor.clone().into()))
            .collect();
        save(path, keys, &stored).expect("written");
        tensors
    }

    fn plain() -> BlockConfig {
        BlockConfig {
            attention_bias: false,
            is_causal: Some(false),
            initializer_range: 0.02,
            num_target_layers: 5,
            ..toy()
        }
    }

    #[test]
    fn files_of_every_kind_are_opened_with_their_sizes_and_values() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("draft.gguf");
        let windows = BlockConfig {
            layers: vec![LayerKind::Full, LayerKind::Sliding],
            sliding_window: Some(9),
            ..plain()
        };
        let mut of_windows = keys();
        set(&mut of_windows, "attention.sliding_window", Value::U32(9));
        let pattern = Value::Array(vec![Value::Bool(false), Value::Bool(true)]);
        set(&mut of_windows, "attention.sliding_window_pattern", pattern);
        let wide = BlockConfig {
            convolution: Some(ConvolutionSizes { kernel_size: 2, group_size: 8 }),
            selector: Some(SelectorSizes { rank: 6, top_k: 5 }),
            is_causal: Some(true),
            ..plain()
        };
        let mut of_wide = keys();
        for (key, size) in [
            ("conv_kernel_size", 2),
            ("conv_group_size", 8),
            ("selector_rank", 6),
            ("selector_top_k", 5),
        ] {
            set(&mut of_wide, key, Value::U32(size));
        }
        set(&mut of_wide, "attention.causal", Value::Bool(true));
        set(&mut of_wide, "sample_from_anchor", Value::Bool(false));
        let chain = |confidence| {
            let sizes = ChainSizes { rank: 6, kind: ChainKind::Vanilla, confidence };
            BlockConfig { chain: Some(sizes), ..plain() }
        };
        // Absent, the switch is true where there is a chain, and nothing otherwise.
        for (name, config, keys) in [
            ("dflash", plain(), keys()),
            ("dflash", windows, of_windows),
            ("dflash2", wide, of_wide),
            ("dspark", chain(Some(true)), keys()),
            ("dspark", chain(None), keys()),
            ("dflash", BlockConfig { draft_vocab_size: 20, ..plain() }, keys()),
            ("dspark", BlockConfig { draft_vocab_size: 20, ..chain(None) }, keys()),
        ] {
            let tensors = write(&path, &config, &keys);
            assert_eq!(DraftKind::at(&path).expect("a kind").name, name);
            assert_eq!(DraftKind::at(folder.path()).expect("a kind").name, name);
            let source = GgufBlockSource::open(&path).expect("opened");
            assert_eq!(source.config(None), Ok(config.clone()), "{name}");
            let table = Tensor::zeros((40, 32), DType::F32, &Device::Cpu).expect("a table");
            let source = open_weights(&path).expect("opened");
            let draft = BlockDraft::from_source(source.as_ref(), &config, &table).expect("a draft");
            let mut all = draft.weights().named();
            all.extend(draft.fixed_tensors().expect("a map").into_iter().take(1));
            for ((a, wanted), (b, found)) in tensors.iter().zip(all) {
                let bits = |tensor: &Tensor| {
                    tensor.detach().flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values")
                };
                assert_eq!((a, bits(wanted)), (&b, bits(&found)));
            }
            let kept = draft.vocabulary().map(|map| map.kept()[19].0);
            assert_eq!(kept, config.has_own_head().then_some(38));
            // A file is a draft to start from: another network is told.
            let saved = SavedDraft::at(&path);
            BlockDraft::check_file(&saved, &config).expect("the same network");
            let other = BlockConfig { target_layers: vec![LayerId(0), LayerId(3)], ..config };
            assert!(BlockDraft::check_file(&saved, &other).is_err());
        }
    }

    #[test]
    fn numbers_that_bend_logits_are_read_and_0_is_none() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("draft.gguf");
        let read = |scale: f32, softcap: f32| {
            let mut keys = keys();
            set(&mut keys, "logit_scale", Value::F32(scale));
            set(&mut keys, "final_logit_softcapping", Value::F32(softcap));
            write(&path, &plain(), &keys);
            GgufBlockSource::open(&path).expect("opened").config(None).expect("valid").bend
        };
        assert_eq!(read(0.25, 20.0), Bend { divisor: 4.0, softcap: Some(20.0) });
        assert_eq!(read(0.0, 0.0), Bend::default());
    }

    /// As in target files.
    #[test]
    fn a_factor_on_scores_takes_the_place_of_yarn_s_or_multiplies_it() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("draft.gguf");
        let usual = 0.1 * 4.0_f64.ln() + 1.0;
        let cases: [(&[&str], f64); 3] = [
            (&["rope.scaling.attn_factor"], 1.5 * usual),
            (&["rope.scaling.yarn_attn_factor"], 1.5),
            (&["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"], 2.25),
        ];
        for (factors, wanted) in cases {
            let mut keys = keys();
            set(&mut keys, "rope.scaling.type", Value::String("yarn".into()));
            set(&mut keys, "rope.scaling.factor", Value::F32(4.0));
            factors.iter().for_each(|key| set(&mut keys, key, Value::F32(1.5)));
            write(&path, &plain(), &keys);
            let source = GgufBlockSource::open(&path).expect("opened");
            let scaling = source.config(None).expect("valid").rope.scaling;
            let RopeScaling::Yarn { attention_factor, .. } = scaling else { panic!("{scaling:?}") };
            assert!((attention_factor - wanted).abs() < 1e-9, "{factors:?}: {attention_factor}");
        }
    }

    #[test]
    fn the_switch_alone_makes_a_chain_without_a_head() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("draft.gguf");
        let mut keys = keys();
        set(&mut keys, "sample_from_anchor", Value::Bool(true));
        write(&path, &plain(), &keys);
        let config = GgufBlockSource::open(&path).expect("opened").config(None).expect("valid");
        assert_eq!(config.chain.map(|chain| chain.rank), Some(0));
        assert_eq!((config.proposals(), plain().proposals()), (4, 3));
    }

    #[test]
    fn what_a_file_leaves_out_or_says_wrongly_is_named() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("draft.gguf");
        let read = |keys: &Keys| {
            write(&path, &plain(), keys);
            GgufBlockSource::open(&path).expect("opened").config(None)
        };
        for (key, part) in [
            ("embedding_length", "`dflash.embedding_length` is missing"),
            ("block_size", "`dflash.block_size` is missing"),
            ("target_layers", "`dflash.target_layers` = None"),
        ] {
            let mut keys = keys();
            keys.retain(|(name, _)| *name != format!("{ARCHITECTURE}.{key}"));
            let text = read(&keys).expect_err(key).to_string();
            assert!(text.contains(part), "{part} not in {text}");
        }
        for (key, value, part) in [
            (
                "target_layers",
                Value::Array(vec![Value::I32(0)]),
                "counted from 1: layer -1 is the output",
            ),
            (
                "attention.sliding_window",
                Value::U32(9),
                "`dflash.attention.sliding_window_pattern`",
            ),
            ("logit_scale", Value::F32(-0.2), "`dflash.logit_scale`"),
            ("final_logit_softcapping", Value::F32(f32::NAN), "softcapping`"),
            ("conv_kernel_size", Value::U32(2), "`dflash.conv_group_size` is missing"),
            ("block_count", Value::U32(u32::MAX), "num_hidden_layers"),
            ("rope.scaling.type", Value::String("longrope".into()), "longrope"),
        ] {
            let mut keys = keys();
            keys.retain(|(name, _)| *name != format!("{ARCHITECTURE}.{key}"));
            set(&mut keys, key, value);
            let text = read(&keys).expect_err(key).to_string();
            assert!(text.contains(part), "{part} not in {text}");
        }
        let mut keys = keys();
        keys.retain(|(name, _)| name != MASK_TOKEN);
        assert!(read(&keys).expect_err("no mask").to_string().contains(MASK_TOKEN));
    }

    #[test]
    fn every_tensor_has_a_name_in_files() {
        let chain = ChainSizes { rank: 4, kind: ChainKind::Vanilla, confidence: Some(true) };
        let extended = BlockConfig {
            convolution: Some(ConvolutionSizes { kernel_size: 2, group_size: 8 }),
            selector: Some(SelectorSizes { rank: 4, top_k: 4 }),
            ..toy()
        };
        for config in [extended, BlockConfig { chain: Some(chain), ..toy() }] {
            for spec in file_specs(&config) {
                let stored = stored_name(&spec.name).expect("a name");
                assert_eq!(
                    published_name(&stored).as_deref(),
                    Some(spec.name.as_str()),
                    "{stored}"
                );
            }
        }
        for (published, stored) in [
            ("hidden_norm.weight", "enc.output_norm.weight"),
            ("norm.weight", "output_norm.weight"),
            ("layers.1.self_attn.q_norm.weight", "blk.1.attn_q_norm.weight"),
            ("layers.0.mlp_conv.base_kernel", "blk.0.ffn_conv_base"),
            ("candidate_selector.successor_codebook", "selector_successor.weight"),
            ("confidence_head.proj.bias", "conf_proj.bias"),
        ] {
            assert_eq!(stored_name(published).as_deref(), Some(stored));
        }
        let gated = ChainSizes { rank: 4, kind: ChainKind::Gated, confidence: None };
        let config = BlockConfig { chain: Some(gated), ..toy() };
        let nameless = file_specs(&config).into_iter().filter(|s| stored_name(&s.name).is_none());
        assert_eq!(nameless.count(), 2, "the gate has no place in files");
    }
}
