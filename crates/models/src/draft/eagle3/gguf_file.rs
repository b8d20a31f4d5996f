//! EAGLE-3 drafts as GGUF files of architecture `eagle3`, as llama.cpp reads them.
//!
//! Against the published names: rows of q and k are interleaved, `d2t` holds absolute target ids,
//! layers count as states that enter one ([`crate::ids::EnteredLayerId`]).

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::config::{Eagle3Config, TAPPED_LAYERS};
use crate::config::{RopeParameters, TargetConfig};
use crate::draft::gguf::{DIVISORS, DraftGguf};
use crate::error::{ModelError, Problems, Result};
use crate::ids::LayerId;
use crate::weights::WeightSource;
use crate::weights::gguf::half_split_row;
use crate::weights::gguf::header::{Header, StoredTensor};

/// `general.architecture` of such files.
pub const ARCHITECTURE: &str = "eagle3";

/// GGUF name and published name of every tensor but `d2t`.
pub const TENSOR_NAMES: [(&str, &str); 16] = [
    ("fc.weight", "fc.weight"),
    ("blk.0.attn_norm.weight", "midlayer.input_layernorm.weight"),
    ("blk.0.attn_norm_2.weight", "midlayer.hidden_norm.weight"),
    ("blk.0.attn_q.weight", "midlayer.self_attn.q_proj.weight"),
    ("blk.0.attn_k.weight", "midlayer.self_attn.k_proj.weight"),
    ("blk.0.attn_v.weight", "midlayer.self_attn.v_proj.weight"),
    ("blk.0.attn_output.weight", "midlayer.self_attn.o_proj.weight"),
    ("blk.0.ffn_norm.weight", "midlayer.post_attention_layernorm.weight"),
    ("blk.0.ffn_gate.weight", "midlayer.mlp.gate_proj.weight"),
    ("blk.0.ffn_up.weight", "midlayer.mlp.up_proj.weight"),
    ("blk.0.ffn_down.weight", "midlayer.mlp.down_proj.weight"),
    ("output_norm.weight", "norm.weight"),
    ("output.weight", "lm_head.weight"),
    ("token_embd.weight", "embed_tokens.weight"),
    ("d2t", "d2t"),
    ("rope_freqs.weight", "rope_freqs.weight"),
];

/// Keys of the layers, the newer one first.
pub const LAYER_KEYS: [&str; 2] = ["eagle3.target_layers", "eagle3.extract_layers"];

/// Whether a GGUF file says that it is such a draft.
pub fn is_at(file: &Path) -> bool {
    GgufDraftSource::open(file).is_ok()
}

/// Tensors of a draft's GGUF file under their published names.
pub struct GgufDraftSource(DraftGguf);

impl GgufDraftSource {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// - unreadable, not GGUF, or of another architecture
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self(DraftGguf::open(path, ARCHITECTURE, "EAGLE-3")?))
    }

    /// The header.
    pub fn header(&self) -> &Header {
        self.0.header()
    }

    /// Sizes and switches. What files leave to the target is taken from it.
    ///
    /// # Errors
    /// - a list of every missing or unusable key
    pub fn config(
        &self,
        target: Option<&TargetConfig>,
    ) -> std::result::Result<Eagle3Config, Problems> {
        let mut problems = Problems::default();
        let file = &self.0;
        let mut size = |name: &str, default| file.size(name, default, &mut problems);
        let hidden_size = size("embedding_length", None);
        let num_attention_heads = size("attention.head_count", None);
        let head_dim =
            size("attention.key_length", Some((hidden_size / num_attention_heads.max(1)).max(1)));
        let known = target.map(|t| t.vocab_size).or(file.rows("token_embd.weight"));
        let vocab_size = size("vocab_size", known);
        let context = size("context_length", target.map(|t| t.max_position_embeddings));
        let mut config = Eagle3Config {
            hidden_size,
            target_hidden_size: size("target_hidden_size", Some(hidden_size)),
            intermediate_size: size("feed_forward_length", None),
            num_attention_heads,
            num_key_value_heads: size("attention.head_count_kv", Some(num_attention_heads)),
            head_dim,
            vocab_size,
            draft_vocab_size: file.rows("d2t").unwrap_or(vocab_size),
            rms_norm_eps: file.rms_norm_eps(),
            rope: RopeParameters::plain(10_000.0),
            dynamic_ntk: None,
            max_position_embeddings: context,
            target_layers: [LayerId(0); TAPPED_LAYERS],
            fc_norm: false,
            norm_output: false,
            norm_before_residual: file.flag("norm_before_residual").unwrap_or(false),
            embed_proj: false,
            attention_window: None,
            initializer_range: 0.02,
        };
        if size("block_count", Some(1)) != 1 {
            problems.push("drafts of more than one layer are not supported");
        }
        if file.flag("norm_before_fc").unwrap_or(false) {
            problems.push("`eagle3.norm_before_fc` = true is not supported");
        }
        config.rope = file.rope(context, &mut problems);
        match self.layers(target) {
            Ok(layers) => config.target_layers = layers,
            Err(problem) => problems.push(problem),
        }
        if problems.0.is_empty() {
            problems = config.problems();
        }
        if problems.0.is_empty() { Ok(config) } else { Err(problems) }
    }

    fn layers(
        &self,
        target: Option<&TargetConfig>,
    ) -> std::result::Result<[LayerId; TAPPED_LAYERS], String> {
        let keys = &self.header().metadata;
        let Some(key) = LAYER_KEYS.iter().find(|key| keys.contains_key(**key)) else {
            let layers = target.ok_or_else(|| format!("`{}` is missing", LAYER_KEYS[0]))?;
            return Eagle3Config::published_layers(layers.num_hidden_layers)
                .map_err(|problems| problems.to_string());
        };
        let three = self.0.layers(key).and_then(|layers| layers.try_into().ok());
        three.ok_or_else(|| {
            let ids = self.header().integers(key).unwrap_or_default();
            format!("`{key}` = {ids:?} are not three layers")
        })
    }

    fn stored(&self, published: &str) -> Option<&StoredTensor> {
        let (name, _) = TENSOR_NAMES.iter().find(|(_, name)| *name == published)?;
        self.header().tensors.get(*name)
    }

    fn find(&self, published: &str) -> Result<&StoredTensor> {
        self.stored(published).ok_or_else(|| {
            ModelError::invalid(self.0.path(), format!("no tensor for `{published}`"))
        })
    }

    /// Row-major values; rows of q and k put back into half-split order.
    fn values(&self, published: &str, tensor: &StoredTensor) -> Result<Tensor> {
        let values = self.0.values(published, tensor)?;
        let interleaved =
            published.ends_with("q_proj.weight") || published.ends_with("k_proj.weight");
        if !interleaved {
            return Ok(values);
        }
        let heads = self.0.number("attention.head_count").unwrap_or(1.0).max(1.0);
        let hidden = self.0.number("embedding_length").unwrap_or(1.0);
        let head_dim = self.0.number("attention.key_length");
        let head_dim = head_dim.unwrap_or(hidden / heads).max(1.0) as usize;
        let rows = tensor.shape.first().copied().unwrap_or(1);
        if !head_dim.is_multiple_of(2) || !rows.is_multiple_of(head_dim) {
            let problem = format!("`{published}`: {rows} rows are not whole heads of {head_dim}");
            return Err(ModelError::invalid(self.0.path(), problem));
        }
        let mut order = vec![0_u32; rows];
        for stored in 0..rows {
            order[half_split_row(stored, head_dim)] = stored as u32;
        }
        Ok(values.index_select(&Tensor::from_vec(order, rows, &Device::Cpu)?, 0)?)
    }
}

impl WeightSource for GgufDraftSource {
    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Published names; tensors without one keep theirs, so that they are reported.
    fn names(&self) -> Vec<String> {
        let published: BTreeMap<&str, &str> = TENSOR_NAMES.into_iter().collect();
        let name = |stored: &String| {
            published.get(stored.as_str()).map_or_else(|| stored.clone(), |name| (*name).to_owned())
        };
        let stored = self.header().tensors.keys().filter(|name| *name != DIVISORS);
        stored.map(name).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.stored(name).map(|tensor| tensor.shape.clone())
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let tensor = self.find(name)?;
        Ok(self.values(name, tensor)?.to_dtype(dtype)?)
    }

    /// `d2t` as the offsets that other formats hold.
    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        self.0.offsets(name, self.find(name)?)
    }
}
