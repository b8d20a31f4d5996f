//! `config.json` of a Hugging Face folder.

use serde_json::Value;

use super::families::{self, Defaults, Sizes};
use super::{Architecture, ExpertsConfig, RopeParameters, TargetConfig, limits};
use crate::error::Problems;

/// Reads keys, collecting what is wrong instead of stopping at the first.
pub(super) struct Keys<'a> {
    pub(super) value: &'a Value,
    pub(super) problems: Problems,
}

impl<'a> Keys<'a> {
    pub(super) fn of(value: &'a Value) -> Self {
        Self { value, problems: Problems::default() }
    }

    fn present(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    /// A key's object.
    pub(super) fn object(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| value.is_object())
    }

    /// Base and scaling of the rotary embedding of all layers.
    pub(super) fn rope(&mut self, sizes: Sizes) -> RopeParameters {
        let context = sizes.max_position_embeddings;
        let mut rope = RopeParameters::from_json(self.value, context, &mut self.problems);
        let objects = ["rope_parameters", "rope_scaling"].map(|key| self.object(key));
        let places = [Some(self.value), objects[0], objects[1]];
        let named = |place: &Value| place.get("rope_theta").is_some_and(|theta| !theta.is_null());
        if !places.into_iter().flatten().any(named) {
            rope.theta = Defaults::of(sizes.architecture).rope_theta;
        }
        rope
    }

    /// `rope_parameters`, and in it those of full and of sliding layers where it is a map by kind.
    pub(super) fn ropes_by_kind(&self) -> (Option<&'a Value>, [Option<&'a Value>; 2]) {
        let map = self.object("rope_parameters");
        let of = |kind: &str| map.and_then(|map| map.get(kind)).filter(|value| value.is_object());
        (map, ["full_attention", "sliding_attention"].map(of))
    }

    /// A finite number, if there is one.
    pub(super) fn finite(&self, key: &str) -> Option<f64> {
        self.present(key).and_then(Value::as_f64).filter(|number| number.is_finite())
    }

    /// A positive number; null is none of it, and a key that is left out is `absent`.
    pub(super) fn scale(&mut self, key: &str, absent: Option<f64>) -> Option<f64> {
        let Some(value) = self.value.get(key) else { return absent };
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        if number.is_none() && !value.is_null() {
            self.problems.push(format!("`{key}` = {value} is not positive"));
        }
        limits::scale(&mut self.problems, key, number?)
    }

    /// A number of tokens from 1, whole or not, if there is one; what is wrong with another is told.
    pub(super) fn tokens_in(&mut self, key: &str) -> Option<f64> {
        let value = self.present(key)?;
        let most = limits::CONTEXT as f64;
        limits::within(&mut self.problems, key, value.as_f64().unwrap_or(f64::NAN), &(1.0..=most))
    }

    /// A list of numbers, if there is one.
    pub(super) fn numbers(&mut self, key: &str) -> Option<Vec<f32>> {
        let value = self.present(key)?;
        let numbers = value.as_array().and_then(|list| {
            list.iter().map(|number| number.as_f64().map(|number| number as f32)).collect()
        });
        if numbers.is_none() {
            self.problems.push(format!("`{key}` is no list of numbers"));
        }
        numbers
    }

    /// A flag a layer, of numbers or booleans, if there is a list.
    pub(super) fn each_layer(&mut self, key: &str, layers: usize) -> Option<Vec<bool>> {
        let listed = self.present(key)?;
        let one = |flag: &Value| flag.as_bool().or(flag.as_u64().map(|flag| flag != 0));
        let flags =
            listed.as_array().and_then(|list| list.iter().map(one).collect::<Option<Vec<_>>>());
        let Some(flags) = flags else {
            self.problems.push(format!("`{key}` is no list of flags"));
            return None;
        };
        if flags.len() != layers {
            self.problems.push(format!("`{key}` lists {} of {layers} layers", flags.len()));
            return None;
        }
        Some(flags)
    }

    /// Dimensions of a head that turn, of `partial_rotary_factor` at top level or beside the base.
    pub(super) fn turning(&mut self, sizes: Sizes, absent: f64) -> usize {
        const KEY: &str = "partial_rotary_factor";
        let nested = ["rope_parameters", "rope_scaling"].into_iter().find_map(|key| {
            self.object(key).and_then(|rope| rope.get(KEY)).filter(|value| !value.is_null())
        });
        let share = match nested.or_else(|| self.present(KEY)) {
            None => absent,
            Some(value) => value.as_f64().unwrap_or(f64::NAN),
        };
        let turning = (sizes.head_dim as f64 * share).floor();
        if !(share > 0.0 && share <= 1.0) || turning < 2.0 || turning % 2.0 != 0.0 {
            let head_dim = sizes.head_dim;
            self.problems.push(format!(
                "`{KEY}` = {share} leaves no even number of dimensions of a head of {head_dim} to turn"
            ));
            return sizes.head_dim;
        }
        turning as usize
    }

    /// `sliding_window` in tokens; null is none, and a key that is left out is `absent`.
    pub(super) fn window(&mut self, absent: Option<usize>) -> Option<usize> {
        match self.value.get("sliding_window") {
            None => absent,
            Some(_) => self.size_from_one("sliding_window"),
        }
    }

    /// A whole number from 1, if there is one; what is wrong with another is told.
    pub(super) fn size_from_one(&mut self, key: &str) -> Option<usize> {
        let size = self.size(key)?;
        limits::check(&mut self.problems, &[(key, size, limits::CONTEXT)]);
        Some(size.max(1))
    }

    /// Whether each layer slides, as `layer_types` lists them; none without the key.
    pub(super) fn layer_types(&mut self, layers: usize) -> Option<Vec<bool>> {
        self.layer_kinds(layers, &[("full_attention", false), ("sliding_attention", true)])
    }

    /// What `layer_types` says of each layer, of kinds by their names; none without the key.
    pub(super) fn layer_kinds<T: Copy>(
        &mut self,
        layers: usize,
        kinds: &[(&str, T)],
    ) -> Option<Vec<T>> {
        let listed = self.present("layer_types")?;
        let Some(listed) = listed.as_array() else {
            self.problems.push("`layer_types` is no list");
            return None;
        };
        if listed.len() != layers {
            let count = listed.len();
            self.problems.push(format!("`layer_types` lists {count} of {layers} layers"));
            return None;
        }
        let mut of_layers = Vec::with_capacity(listed.len());
        for (index, named) in listed.iter().enumerate() {
            let known = kinds.iter().find(|(name, _)| named.as_str() == Some(name));
            let Some((_, kind)) = known else {
                let names: Vec<&str> = kinds.iter().map(|(name, _)| *name).collect();
                let names = names.join(" and ");
                self.problems.push(format!(
                    "`layer_types[{index}]` = {named} is not supported ({names} are)"
                ));
                return None;
            };
            of_layers.push(*kind);
        }
        Some(of_layers)
    }

    pub(super) fn size(&mut self, key: &str) -> Option<usize> {
        let value = self.present(key)?;
        let size = value.as_u64().map(|n| n as usize);
        if size.is_none() {
            let message = format!("`{key}` = {value} is not a whole number");
            self.problems.push(message);
        }
        size.or(Some(1))
    }

    pub(super) fn required_size(&mut self, key: &str) -> usize {
        self.size(key).unwrap_or_else(|| {
            self.problems.push(format!("`{key}` is missing"));
            1
        })
    }

    /// A size that the family's class may know.
    fn size_or(&mut self, key: &str, known: Option<usize>) -> usize {
        match known {
            Some(known) => self.size(key).unwrap_or(known),
            None => self.required_size(key),
        }
    }

    fn number(&self, key: &str, default: f64) -> f64 {
        self.present(key).and_then(Value::as_f64).unwrap_or(default)
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> bool {
        self.present(key).and_then(Value::as_bool).unwrap_or(default)
    }

    fn token(&self, key: &str) -> Option<u32> {
        self.present(key).and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok())
    }

    /// A list of whole numbers.
    pub(super) fn sizes(&mut self, key: &str) -> Vec<usize> {
        let Some(value) = self.present(key) else {
            return Vec::new();
        };
        let sizes = value.as_array().and_then(|list| {
            list.iter().map(|size| size.as_u64().map(|size| size as usize)).collect()
        });
        let message = format!("`{key}` = {value} is no list of whole numbers");
        sizes.unwrap_or_else(|| {
            self.problems.push(message);
            Vec::new()
        })
    }

    /// Sizes of an architecture's experts. Newer files say `num_local_experts` where older ones say
    /// `num_experts`.
    fn experts(&mut self, architecture: Architecture) -> Option<ExpertsConfig> {
        if !architecture.is_mixture() {
            return None;
        }
        if architecture == Architecture::DeepseekV3 {
            return Some(families::deepseek::experts(self));
        }
        if architecture == Architecture::Gemma4 {
            return families::gemma4::experts(self);
        }
        if let Some(experts) = families::experts_of_json(self, architecture) {
            return Some(experts);
        }
        let mixtral = architecture == Architecture::Mixtral;
        let always = mixtral || architecture == Architecture::Qwen35Moe;
        let newer = architecture == Architecture::Qwen3Next;
        if newer && self.present("num_experts").and_then(Value::as_u64) == Some(0) {
            return None;
        }
        let count = self.size("num_experts").or_else(|| self.size("num_local_experts"));
        let num_experts = count.unwrap_or_else(|| {
            let name = if mixtral { "num_local_experts" } else { "num_experts" };
            self.problems.push(format!("`{name}` is missing"));
            1
        });
        let width = if mixtral { "intermediate_size" } else { "moe_intermediate_size" };
        let shared = architecture
            .has_shared_expert()
            .then(|| self.required_size("shared_expert_intermediate_size"));
        Some(ExpertsConfig {
            num_experts,
            num_experts_per_tok: self.required_size("num_experts_per_tok"),
            // A Mixtral's is reported as the MLP's.
            moe_intermediate_size: self.size(width).unwrap_or_else(|| {
                if !mixtral {
                    self.problems.push(format!("`{width}` is missing"));
                }
                1
            }),
            shared_expert_intermediate_size: shared,
            norm_topk_prob: always || self.flag("norm_topk_prob", newer),
            decoder_sparse_step: if architecture == Architecture::Qwen35Moe {
                1
            } else {
                self.size("decoder_sparse_step").unwrap_or(1)
            },
            mlp_only_layers: if architecture == Architecture::Qwen35Moe {
                Vec::new()
            } else {
                self.sizes("mlp_only_layers")
            },
        })
    }

    /// `I`; of files of nothing but experts, what a token visits of them.
    fn inner_width(
        &mut self,
        architecture: Architecture,
        defaults: &Defaults,
        experts: Option<&ExpertsConfig>,
    ) -> usize {
        let absent = match (architecture, experts) {
            (Architecture::Lfm2, _) => families::lfm::inner_width(self),
            (Architecture::Qwen35Moe, Some(experts)) => Some(experts.width_of_a_token()),
            _ => defaults.intermediate_size,
        };
        match absent {
            Some(width) if architecture == Architecture::Lfm2 => width,
            absent => self.size_or(defaults.mlp_width, absent),
        }
    }

    /// Bias on q, k and v, and on the attention's output.
    fn attention_biases(&self, architecture: Architecture) -> (bool, bool) {
        match architecture {
            Architecture::Qwen2 | Architecture::Glm4 => (self.flag("attention_bias", true), false),
            Architecture::Qwen2Moe => (self.flag("qkv_bias", true), false),
            Architecture::Glm4Moe => (self.flag("attention_bias", false), false),
            Architecture::Phi3 => (false, false),
            _ => {
                let bias = self.flag("attention_bias", architecture == Architecture::GptOss);
                (bias, bias)
            }
        }
    }

    /// One id or a list of them.
    fn tokens(&self, key: &str) -> Vec<u32> {
        let ids = match self.present(key) {
            Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).collect(),
            Some(id) => id.as_u64().into_iter().collect(),
            None => Vec::new(),
        };
        ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect()
    }
}

/// Models whose `config.json` holds that of their text part as `text_config`, and the text part's
/// `model_type` if it names none.
const NESTED: [(&str, &str); 6] = [
    ("gemma4", "gemma4_text"),
    ("gemma3", "gemma3_text"),
    ("mistral3", "mistral"),
    ("qwen3_5", "qwen3_5_text"),
    ("qwen3_5_moe", "qwen3_5_moe_text"),
    ("llama4", "llama4_text"),
];

/// Keys that the outer configuration may hold for the text part.
const OUTER_KEYS: [&str; 4] =
    ["tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"];

/// The text part of a model that also sees.
fn text_part(value: &Value) -> Option<Value> {
    let name = value.get("model_type")?.as_str()?;
    let (_, inner) = NESTED.iter().find(|(outer, _)| *outer == name)?;
    let mut text = value.get("text_config")?.as_object()?.clone();
    text.entry("model_type").or_insert_with(|| (*inner).into());
    for key in OUTER_KEYS {
        if text.get(key).is_none_or(Value::is_null)
            && let Some(outer) = value.get(key)
        {
            text.insert(key.into(), outer.clone());
        }
    }
    Some(Value::Object(text))
}

pub(super) fn read(value: &Value) -> Result<TargetConfig, Problems> {
    match text_part(value) {
        Some(text) => read_text(&text),
        None => read_text(value),
    }
}

fn read_text(value: &Value) -> Result<TargetConfig, Problems> {
    let mut keys = Keys::of(value);
    let architecture = if let Some(name) = keys.present("model_type").and_then(Value::as_str) {
        Architecture::parse(name, &Architecture::NAMES, &mut keys.problems)
    } else {
        keys.problems.push("`model_type` is missing");
        Architecture::Llama
    };
    let defaults = Defaults::of(architecture);
    let (activation, known) = defaults.activation;
    if let Some(act) = keys.present(activation).and_then(Value::as_str)
        && act != known
    {
        let message = format!("`{activation}` = \"{act}\" is not supported ({known} is)");
        keys.problems.push(message);
    }
    let hidden_size = keys.required_size("hidden_size");
    let num_attention_heads = keys.size_or("num_attention_heads", defaults.num_attention_heads);
    let num_key_value_heads = match value.get("num_key_value_heads") {
        None => defaults.num_key_value_heads,
        Some(_) => keys.size("num_key_value_heads"),
    };
    let default_head_dim = defaults.head_dim.unwrap_or(hidden_size / num_attention_heads.max(1));
    let head_dim = match architecture {
        Architecture::DeepseekV3 => families::deepseek::head_dim(&mut keys),
        _ => keys.size("head_dim").unwrap_or(default_head_dim),
    };
    let (qkv_bias, attention_output_bias) = keys.attention_biases(architecture);
    let sizes = Sizes {
        architecture,
        hidden_size,
        num_hidden_layers: keys.required_size("num_hidden_layers"),
        num_attention_heads,
        head_dim,
        max_position_embeddings: keys
            .size("max_position_embeddings")
            .unwrap_or(defaults.max_position_embeddings),
    };
    families::check_quantisation(&mut keys, architecture);
    let (rope, parts) = families::of_json(&mut keys, sizes);
    let experts = keys.experts(architecture);
    let intermediate_size = keys.inner_width(architecture, &defaults, experts.as_ref());
    let (eps_key, eps) = defaults.norm_eps;
    let config = TargetConfig {
        architecture,
        hidden_size,
        intermediate_size,
        num_hidden_layers: sizes.num_hidden_layers,
        num_attention_heads,
        num_key_value_heads: num_key_value_heads.unwrap_or(num_attention_heads),
        head_dim,
        vocab_size: keys.size_or("vocab_size", defaults.vocab_size),
        max_position_embeddings: sizes.max_position_embeddings,
        rms_norm_eps: keys.number(eps_key, eps),
        rope,
        tie_word_embeddings: keys.flag(
            "tie_word_embeddings",
            // LFM2's older files have a name of their own.
            keys.flag("tie_embedding", defaults.tie_word_embeddings),
        ),
        qkv_bias,
        attention_output_bias,
        mlp_bias: defaults.reads_mlp_bias && keys.flag("mlp_bias", false),
        experts,
        initializer_range: keys.number("initializer_range", 0.02),
        bos_token_id: keys.token("bos_token_id"),
        eos_token_ids: keys.tokens("eos_token_id"),
        pad_token_id: keys.token("pad_token_id"),
        parts,
    };
    let mut problems = keys.problems;
    config.validate(&mut problems);
    if problems.0.is_empty() { Ok(config) } else { Err(problems) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::parts::{Parts, QueryGrowth};
    use super::*;
    use longdraft_kernels::rope::RopeScaling;

    fn llama() -> Value {
        json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 320, "rms_norm_eps": 1e-5, "eos_token_id": [1, 2]
        })
    }

    #[test]
    fn llama_defaults() {
        let config = read(&llama()).expect("valid");
        assert_eq!(
            (config.head_dim, config.qkv_bias, config.tie_word_embeddings),
            (16, false, false)
        );
        assert_eq!(config.eos_token_ids, [1, 2]);
        assert_eq!(config.rope, RopeParameters::plain(10_000.0));
    }

    #[test]
    fn qwen2_has_query_bias_without_output_bias_and_qwen3_its_own_head_dim() {
        let mut value = llama();
        value["model_type"] = json!("qwen2");
        let config = read(&value).expect("valid");
        assert!(config.qkv_bias && !config.attention_output_bias);
        value["model_type"] = json!("qwen3");
        let config = read(&value).expect("valid");
        assert!(
            config.qk_norm() == crate::config::QkNorm::PerHead
                && !config.qkv_bias
                && config.head_dim == 128
        );
    }

    #[test]
    fn llama_attention_bias_covers_the_output_projection() {
        let mut value = llama();
        value["attention_bias"] = json!(true);
        let config = read(&value).expect("valid");
        assert!(config.qkv_bias && config.attention_output_bias);
    }

    #[test]
    fn experts_are_read_from_both_spellings_and_checked() {
        let mut value = llama();
        value["model_type"] = json!("qwen3_moe");
        let text = read(&value).expect_err("no experts").to_string();
        for key in ["num_experts", "num_experts_per_tok", "moe_intermediate_size"] {
            assert!(text.contains(&format!("`{key}` is missing")), "{key} not in {text}");
        }
        value["num_local_experts"] = json!(8);
        value["num_experts_per_tok"] = json!(2);
        value["moe_intermediate_size"] = json!(24);
        let experts = read(&value).expect("valid").experts.expect("experts");
        assert_eq!((experts.num_experts, experts.norm_topk_prob), (8, false));
        value["num_experts"] = json!(1);
        value["mlp_only_layers"] = json!("all");
        value["decoder_sparse_step"] = json!(0);
        let text = read(&value).expect_err("invalid").to_string();
        for part in [
            "`num_experts_per_tok` = 2 exceeds `num_experts` = 1",
            "`mlp_only_layers` = \"all\"",
            "`decoder_sparse_step` = 0",
        ] {
            assert!(text.contains(part), "{part} not in {text}");
        }
    }

    #[test]
    fn a_mixtral_has_experts_as_wide_as_its_mlp_in_every_layer() {
        let mut value = llama();
        value["model_type"] = json!("mixtral");
        value["num_local_experts"] = json!(4);
        value["num_experts_per_tok"] = json!(2);
        let config = read(&value).expect("valid");
        let experts = config.experts.as_ref().expect("experts");
        assert_eq!((experts.moe_intermediate_size, experts.norm_topk_prob), (160, true));
        assert!((0..2).all(|layer| config.experts_in(layer).is_some()));
        value["sliding_window"] = json!(24);
        let config = read(&value).expect("valid");
        assert_eq!([0, 1, 2].map(|layer| config.window_of(layer)), [Some(24), Some(24), None]);
    }

    fn windows(value: &Value) -> Vec<Option<usize>> {
        let config = read(value).expect("valid");
        (0..config.num_hidden_layers).map(|layer| config.window_of(layer)).collect()
    }

    fn problem(value: &Value) -> String {
        read(value).expect_err("invalid").to_string()
    }

    #[test]
    fn windows_follow_the_family_unless_the_layers_are_listed() {
        let mut value = llama();
        value["num_hidden_layers"] = json!(4);
        value["model_type"] = json!("qwen3");
        value["sliding_window"] = json!(7);
        value["max_window_layers"] = json!(3);
        assert_eq!(windows(&value), [None; 4]);
        assert_eq!(read(&value).expect("valid").parts, Parts::default());
        value["use_sliding_window"] = json!(true);
        assert_eq!(windows(&value), [None, None, None, Some(7)]);
        value["layer_types"] =
            json!(["sliding_attention", "full_attention", "full_attention", "full_attention"]);
        assert_eq!(windows(&value), [Some(7), None, None, None]);
        let mut mistral = llama();
        mistral["model_type"] = json!("mistral");
        assert_eq!(windows(&mistral), [Some(4096); 2]);
        mistral["sliding_window"] = Value::Null;
        assert_eq!(windows(&mistral), [None; 2]);
        let mut gemma = llama();
        gemma["model_type"] = json!("gemma2");
        gemma["num_hidden_layers"] = json!(3);
        gemma["sliding_window"] = json!(5);
        assert_eq!(windows(&gemma), [Some(5), None, Some(5)]);
        gemma["model_type"] = json!("gemma3_text");
        gemma["sliding_window_pattern"] = json!(2);
        assert_eq!(windows(&gemma), [Some(5), None, Some(5)]);
    }

    #[test]
    fn hostile_windows_are_named_by_key() {
        let mut value = llama();
        value["model_type"] = json!("mistral");
        for window in [json!(0), json!(-3), json!("wide"), json!(1_u64 << 40)] {
            value["sliding_window"] = window.clone();
            let text = problem(&value);
            assert!(text.contains("`sliding_window`"), "{window}: {text}");
        }
        value["sliding_window"] = json!(9);
        value["layer_types"] = json!(["sliding_attention"]);
        assert!(problem(&value).contains("`layer_types` lists 1 of 2 layers"));
        value["layer_types"] = json!(["sliding_attention", "linear_attention"]);
        assert!(problem(&value).contains("`layer_types[1]` = \"linear_attention\""));
        value["layer_types"] = json!(["sliding_attention", "full_attention"]);
        value["sliding_window"] = Value::Null;
        assert!(problem(&value).contains("`sliding_window` is null"));
        value["model_type"] = json!("qwen2");
        assert!(problem(&value).contains("`use_sliding_window` is false"));
        value["model_type"] = json!("gemma3_text");
        value["layer_types"] = Value::Null;
        value["sliding_window"] = json!(9);
        value["sliding_window_pattern"] = json!(0);
        assert!(problem(&value).contains("`sliding_window_pattern` = 0"));
        let mut value = llama();
        value["use_sliding_window"] = json!(true);
        assert!(problem(&value).contains("`use_sliding_window` = true"));
        // So many layers are never listed.
        value["model_type"] = json!("mistral");
        value["num_hidden_layers"] = json!(1_u64 << 60);
        assert!(problem(&value).contains("`num_hidden_layers`"));
    }

    #[test]
    fn a_gemma_3_has_the_defaults_of_its_class_and_two_rotary_bases() {
        let mut value = json!({
            "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 160,
            "num_hidden_layers": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}
        });
        let config = read(&value).expect("valid");
        assert_eq!(
            (config.num_attention_heads, config.num_key_value_heads, config.head_dim),
            (8, 4, 256)
        );
        assert_eq!((config.vocab_size, config.tie_word_embeddings), (262_208, true));
        assert_eq!(config.rope.scaling, RopeScaling::Linear { factor: 8.0 });
        assert!((config.rope.theta - 1e6).abs() < 1e-9);
        assert_eq!(config.parts.sliding_rope, Some(RopeParameters::plain(1e4)));
        assert_eq!((config.parts.logits_softcap, config.parts.attention_softcap), (None, None));
        assert_eq!(config.parts.query_scalar, Some(256.0));
        value["rope_parameters"] = json!({
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}
        });
        let config = read(&value).expect("valid");
        assert_eq!(config.rope, RopeParameters::plain(5e5));
        assert_eq!(config.parts.sliding_rope, Some(RopeParameters::plain(2e4)));
        for (key, wrong) in [
            ("query_pre_attn_scalar", json!(0)),
            ("final_logit_softcapping", json!(-1.0)),
            ("final_logit_softcapping", json!("wide")),
            ("hidden_activation", json!("relu")),
            ("use_bidirectional_attention", json!(true)),
        ] {
            let mut value = value.clone();
            value[key] = wrong;
            assert!(problem(&value).contains(&format!("`{key}`")), "{key}");
        }
    }

    #[test]
    fn a_gemma_2_has_soft_caps_unless_they_are_null() {
        let mut value = llama();
        value["model_type"] = json!("gemma2");
        let parts = read(&value).expect("valid").parts;
        assert_eq!((parts.attention_softcap, parts.logits_softcap), (Some(50.0), Some(30.0)));
        value["attn_logit_softcapping"] = Value::Null;
        value["final_logit_softcapping"] = json!(6.0);
        let parts = read(&value).expect("valid").parts;
        assert_eq!((parts.attention_softcap, parts.logits_softcap), (None, Some(6.0)));
    }

    #[test]
    fn the_text_part_of_a_model_that_sees_is_read() {
        let mut text = llama();
        text["model_type"] = Value::Null;
        let text = text.as_object_mut().expect("an object");
        text.remove("model_type");
        text.remove("eos_token_id");
        let value = json!({
            "model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106],
            "vision_config": {"hidden_size": 32}
        });
        let config = read(&value).expect("valid");
        assert_eq!(config.architecture, Architecture::Gemma3);
        assert_eq!(config.eos_token_ids, [1, 106]);
        let value = json!({"model_type": "mistral3", "text_config": text});
        assert_eq!(read(&value).expect("valid").architecture, Architecture::Mistral);
        let value = json!({"model_type": "llava", "text_config": text});
        assert!(problem(&value).contains("unknown architecture `llava`"));
    }

    #[test]
    fn queries_of_a_ministral_grow() {
        let mut value = llama();
        value["model_type"] = json!("ministral3");
        value["rope_parameters"] = json!({
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 48, "mscale": 1.0, "mscale_all_dim": 1.0
        });
        let config = read(&value).expect("valid");
        assert_eq!(
            config.parts.query_growth,
            Some(QueryGrowth { beta: 0.1, original_context: 48.0, offset: 0, only_still: false })
        );
        assert_eq!((config.head_dim, config.window_of(0)), (128, None));
        for (key, wrong) in [
            ("llama_4_scaling_beta", json!("much")),
            ("original_max_position_embeddings", json!(0)),
        ] {
            let mut value = value.clone();
            value["rope_parameters"][key] = wrong;
            assert!(problem(&value).contains("`llama_4_scaling_beta` needs"), "{key}");
        }
    }

    #[test]
    fn scaling_is_read_from_both_spellings() {
        let mut value = llama();
        value["rope_scaling"] = json!({"type": "linear", "factor": 2.0});
        assert_eq!(read(&value).expect("valid").rope.scaling, RopeScaling::Linear { factor: 2.0 });
        value["rope_scaling"] = Value::Null;
        value["rope_parameters"] = json!({
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
        });
        let rope = read(&value).expect("valid").rope;
        assert!((rope.theta - 500_000.0).abs() < 1e-9);
        assert!(matches!(rope.scaling, RopeScaling::Llama3 { .. }));
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let value = json!({
            "model_type": "gpt9", "hidden_size": "big", "num_attention_heads": 3,
            "num_key_value_heads": 2, "intermediate_size": 0, "num_hidden_layers": 1,
            "rope_scaling": {"type": "dynamic"}, "rms_norm_eps": -1.0
        });
        let text = read(&value).expect_err("invalid").to_string();
        for part in [
            "unknown architecture `gpt9`",
            "`hidden_size`",
            "`vocab_size` is missing",
            "`intermediate_size` = 0",
            "does not divide",
            "unknown rope scaling `dynamic`",
            "`rms_norm_eps`",
        ] {
            assert!(text.contains(part), "{part} not in {text}");
        }
    }
}
