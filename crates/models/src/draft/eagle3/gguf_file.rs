//! EAGLE-3 drafts as GGUF files of architecture `eagle3`, as llama.cpp reads them.
//!
//! Against the published names: rows of q and k are interleaved, `d2t` holds absolute target ids,
//! layers count as states that enter one ([`EnteredLayerId`]).

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::rope::RopeScaling;

use super::config::{Eagle3Config, TAPPED_LAYERS};
use crate::config::{RopeParameters, TargetConfig};
use crate::error::{ModelError, Problems, Result};
use crate::ids::{EnteredLayerId, LayerId};
use crate::weights::WeightSource;
use crate::weights::file::WeightFile;
use crate::weights::gguf::half_split_row;
use crate::weights::gguf::header::{ElementType, Header, StoredTensor};

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
pub struct GgufDraftSource {
    file: WeightFile,
    header: Header,
}

impl GgufDraftSource {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// - unreadable, not GGUF, or of another architecture
    pub fn open(path: &Path) -> Result<Self> {
        let file = WeightFile::open(path)?;
        let header = Header::read_from(file.reader(), file.length())
            .map_err(|problems| ModelError::Invalid { path: path.to_path_buf(), problems })?;
        match header.text("general.architecture") {
            Some(ARCHITECTURE) => Ok(Self { file, header }),
            other => {
                let found = other.unwrap_or("none");
                let problem = format!("a GGUF file of architecture {found}, no EAGLE-3 draft");
                Err(ModelError::invalid(path, problem))
            }
        }
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
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
        let header = &self.header;
        let key = |name: &str| format!("{ARCHITECTURE}.{name}");
        let mut size = |name: &str, default: Option<usize>| {
            let found = header.number(&key(name)).filter(|x| *x >= 1.0).map(|x| x as usize);
            found.or(default).unwrap_or_else(|| {
                problems.push(format!("`{}` is missing or no size", key(name)));
                1
            })
        };
        let hidden_size = size("embedding_length", None);
        let num_attention_heads = size("attention.head_count", None);
        let head_dim =
            size("attention.key_length", Some((hidden_size / num_attention_heads.max(1)).max(1)));
        let rows = |name: &str| header.tensors.get(name).and_then(|t| t.shape.first().copied());
        let vocab_size =
            size("vocab_size", target.map(|t| t.vocab_size).or(rows("token_embd.weight")));
        let context = size("context_length", target.map(|t| t.max_position_embeddings));
        let mut config = Eagle3Config {
            hidden_size,
            target_hidden_size: size("target_hidden_size", Some(hidden_size)),
            intermediate_size: size("feed_forward_length", None),
            num_attention_heads,
            num_key_value_heads: size("attention.head_count_kv", Some(num_attention_heads)),
            head_dim,
            vocab_size,
            draft_vocab_size: rows("d2t").unwrap_or(vocab_size),
            rms_norm_eps: header
                .number(&key("attention.layer_norm_rms_epsilon"))
                // Stored in 32 bits: 1e-5 comes back as 9.999999747e-6.
                .map_or(1e-6, |eps| (eps as f32).to_string().parse().unwrap_or(eps)),
            rope: RopeParameters::plain(10_000.0),
            dynamic_ntk: None,
            max_position_embeddings: context,
            target_layers: [LayerId(0); TAPPED_LAYERS],
            fc_norm: false,
            norm_output: false,
            norm_before_residual: header.flag(&key("norm_before_residual")).unwrap_or(false),
            embed_proj: false,
            attention_window: None,
            initializer_range: 0.02,
        };
        if size("block_count", Some(1)) != 1 {
            problems.push("drafts of more than one layer are not supported");
        }
        if header.flag(&key("norm_before_fc")).unwrap_or(false) {
            problems.push("`eagle3.norm_before_fc` = true is not supported");
        }
        config.rope = self.rope(context, &mut problems);
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
        let stored = LAYER_KEYS.iter().find_map(|key| self.header.metadata.get(*key).map(|_| *key));
        let Some(key) = stored else {
            let layers = target.ok_or_else(|| format!("`{}` is missing", LAYER_KEYS[0]))?;
            return Eagle3Config::published_layers(layers.num_hidden_layers)
                .map_err(|problems| problems.to_string());
        };
        let ids = self.header.integers(key).unwrap_or_default();
        let output = |id: &i64| EnteredLayerId(usize::try_from(*id).ok()?).output();
        let layers: Option<Vec<LayerId>> = ids.iter().map(output).collect();
        layers
            .and_then(|layers| layers.try_into().ok())
            .ok_or_else(|| format!("`{key}` = {ids:?} are not three layers"))
    }

    fn rope(&self, context: usize, problems: &mut Problems) -> RopeParameters {
        let header = &self.header;
        let number = |name: &str| header.number(&format!("{ARCHITECTURE}.rope.{name}"));
        let factor = number("scaling.factor").unwrap_or(1.0);
        let scaling = match header.text("eagle3.rope.scaling.type") {
            None | Some("none") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor },
            Some("yarn") => RopeScaling::Yarn {
                factor,
                beta_fast: number("scaling.yarn_beta_fast").unwrap_or(32.0),
                beta_slow: number("scaling.yarn_beta_slow").unwrap_or(1.0),
                original_context: number("scaling.original_context_length")
                    .unwrap_or(context as f64),
                attention_factor: crate::config::rope::yarn_attention_factor(
                    factor,
                    number("scaling.attn_factor"),
                    None,
                    None,
                ),
                truncate: true,
            },
            Some(other) => {
                problems.push(format!("unknown rope scaling `{other}` (none, linear, yarn)"));
                RopeScaling::None
            }
        };
        let divisors = match self.header.tensors.get("rope_freqs.weight") {
            None => None,
            Some(tensor) if tensor.element == ElementType::F32 => {
                let value = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                match self.file.read(tensor.bytes.clone()) {
                    Ok(bytes) => Some(bytes.chunks_exact(4).map(value).collect()),
                    Err(error) => {
                        problems.push(error);
                        None
                    }
                }
            }
            Some(_) => {
                problems.push("tensor `rope_freqs.weight` is not f32");
                None
            }
        };
        RopeParameters { theta: number("freq_base").unwrap_or(10_000.0), scaling, divisors }
    }

    fn stored(&self, published: &str) -> Option<&StoredTensor> {
        let (name, _) = TENSOR_NAMES.iter().find(|(_, name)| *name == published)?;
        self.header.tensors.get(*name)
    }

    fn find(&self, published: &str) -> Result<&StoredTensor> {
        self.stored(published).ok_or_else(|| {
            ModelError::invalid(self.file.path(), format!("no tensor for `{published}`"))
        })
    }

    /// Row-major values; rows of q and k put back into half-split order.
    fn values(&self, published: &str, tensor: &StoredTensor) -> Result<Tensor> {
        let width = tensor.shape.last().copied().unwrap_or(1);
        let rows = tensor.shape.iter().product::<usize>() / width.max(1);
        let raw = self.file.read(tensor.bytes.clone())?;
        let values = tensor.element.widen(&raw).ok_or_else(|| {
            let problem = format!("tensor `{published}` is {:?}, not a weight", tensor.element);
            ModelError::invalid(self.file.path(), problem)
        })?;
        let values = Tensor::from_vec(values, (rows, width), &Device::Cpu)?;
        let interleaved =
            published.ends_with("q_proj.weight") || published.ends_with("k_proj.weight");
        let values = if interleaved {
            let heads = self.header.number("eagle3.attention.head_count").unwrap_or(1.0).max(1.0);
            let hidden = self.header.number("eagle3.embedding_length").unwrap_or(1.0);
            let head_dim = self.header.number("eagle3.attention.key_length");
            let head_dim = head_dim.unwrap_or(hidden / heads).max(1.0) as usize;
            if !head_dim.is_multiple_of(2) || !rows.is_multiple_of(head_dim) {
                let problem = format!("`{published}`: {rows} rows are no heads of {head_dim}");
                return Err(ModelError::invalid(self.file.path(), problem));
            }
            let mut order = vec![0_u32; rows];
            for stored in 0..rows {
                order[half_split_row(stored, head_dim)] = stored as u32;
            }
            values.index_select(&Tensor::from_vec(order, rows, &Device::Cpu)?, 0)?
        } else {
            values
        };
        Ok(values.reshape(tensor.shape.as_slice())?)
    }
}

impl WeightSource for GgufDraftSource {
    fn path(&self) -> &Path {
        self.file.path()
    }

    /// Published names; tensors without one keep theirs, so that they are reported.
    fn names(&self) -> Vec<String> {
        let published: BTreeMap<&str, &str> = TENSOR_NAMES.into_iter().collect();
        let name = |stored: &String| {
            published.get(stored.as_str()).map_or_else(|| stored.clone(), |name| (*name).to_owned())
        };
        // Frequencies belong to the configuration.
        let stored = self.header.tensors.keys().filter(|name| *name != "rope_freqs.weight");
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
        let tensor = self.find(name)?;
        let bytes = self.file.read(tensor.bytes.clone())?;
        let ids: Vec<i64> = match tensor.element {
            ElementType::I64 => bytes
                .chunks_exact(8)
                .filter_map(|b| b.try_into().ok().map(i64::from_le_bytes))
                .collect(),
            ElementType::I32 => bytes
                .chunks_exact(4)
                .filter_map(|b| b.try_into().ok().map(i32::from_le_bytes))
                .map(i64::from)
                .collect(),
            other => {
                let problem = format!("tensor `{name}` is {other:?}, integers expected");
                return Err(ModelError::invalid(self.file.path(), problem));
            }
        };
        Ok(ids.into_iter().zip(0_i64..).map(|(id, i)| id.saturating_sub(i)).collect())
    }
}
