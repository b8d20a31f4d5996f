//! `config.json` of an EAGLE-3 draft, under the keys that engines read.
//!
//! Tapped layers stand in `eagle_config` as ids of the layers whose output is read; a list at the
//! top level counts the same tensors one higher, as states that enter the next layer.

use std::path::Path;

use serde_json::{Value, json};

use super::config::{Eagle3Config, TAPPED_LAYERS};
use crate::config::json_keys::Keys;
use crate::config::{LAYER_KINDS, RopeParameters};
use crate::draft::files::config_beside;
use crate::draft::speculators::flattened;
use crate::error::{Problems, without_backtrace};
use crate::ids::{EnteredLayerId, LayerId};

/// The key that lists tapped layers.
pub const LAYER_IDS: &str = "eagle_aux_hidden_state_layer_ids";

/// Architectures under which engines know the draft.
pub(super) const ARCHITECTURES: [&str; 4] =
    ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator"];

/// Switches of published variants that compute something else, with the value they must have.
const UNSUPPORTED: [(&str, bool); 4] = [
    ("attention_bias", false),
    ("mlp_bias", false),
    ("norm_before_fc", false),
    ("tie_word_embeddings", false),
];

impl Eagle3Config {
    /// Reads a draft's `config.json`. Without layer ids in it, those published for a target of
    /// `target_layers` layers are taken.
    ///
    /// # Errors
    /// - a list of every missing, unusable or unsupported key
    pub fn from_json(
        value: &Value,
        target_layers: Option<usize>,
    ) -> std::result::Result<Self, Problems> {
        let mut problems = Problems::default();
        let flat = flattened(value, &mut problems);
        let value = &flat;
        let mut keys = Keys::of(value);
        keys.problems = problems;
        for (key, wanted) in UNSUPPORTED {
            if keys.switch(key, wanted) != wanted {
                keys.problems.push(format!("`{key}` = {} is not supported", !wanted));
            }
        }
        if let Some(act) = keys.text("hidden_act")
            && act != "silu"
        {
            keys.problems.push(format!("`hidden_act` = \"{act}\" is not supported (silu is)"));
        }
        if keys.size_or("num_hidden_layers", Some(1)) != 1 {
            keys.problems.push("drafts of more than one layer are not supported");
        }
        let hidden_size = keys.size_or("hidden_size", None);
        let num_attention_heads = keys.size_or("num_attention_heads", None);
        let vocab_size = keys.size_or("vocab_size", None);
        let max_position_embeddings = keys.size_or("max_position_embeddings", Some(2048));
        let default_head_dim = hidden_size / num_attention_heads.max(1);
        let mut config = Self {
            hidden_size,
            target_hidden_size: keys.size_or("target_hidden_size", Some(hidden_size)),
            intermediate_size: keys.size_or("intermediate_size", None),
            num_attention_heads,
            num_key_value_heads: keys.size_or("num_key_value_heads", Some(num_attention_heads)),
            head_dim: keys.size_or("head_dim", Some(default_head_dim)),
            vocab_size,
            draft_vocab_size: keys.size_or("draft_vocab_size", Some(vocab_size)),
            rms_norm_eps: keys.number("rms_norm_eps", 1e-6),
            rope: RopeParameters::plain(10_000.0),
            dynamic_ntk: None,
            max_position_embeddings,
            target_layers: [LayerId(0); TAPPED_LAYERS],
            fc_norm: keys.switch("fc_norm", false),
            norm_output: keys.switch("norm_output", false),
            norm_before_residual: keys.switch("norm_before_residual", false),
            embed_proj: keys.switch("embed_proj", false),
            attention_window: attention_window(&mut keys),
            initializer_range: keys.number("initializer_range", 0.02),
        };
        match layer_ids(value, target_layers) {
            Ok((layers, _)) => config.target_layers = layers,
            Err(problem) => keys.problems.0.extend(problem.0),
        }
        config.read_rope(value, &mut keys.problems);
        config.checked(keys.into_problems())
    }

    fn read_rope(&mut self, value: &Value, problems: &mut Problems) {
        let mut value = value.clone();
        for key in ["rope_parameters", "rope_scaling"] {
            let kind = ["rope_type", "type"].iter().find_map(|name| value[key][*name].as_str());
            if kind != Some("dynamic") {
                continue;
            }
            let factor = value[key]["factor"].as_f64().filter(|f| f.is_finite() && *f > 0.0);
            if factor.is_none() {
                problems.push("rope scaling `dynamic` needs a positive `factor`");
            }
            self.dynamic_ntk = factor;
            value[key]["rope_type"] = "default".into();
        }
        let context = self.max_position_embeddings;
        let kind = value["layer_types"][0].as_str().unwrap_or(LAYER_KINDS[0]);
        self.rope = RopeParameters::of_draft(&value, (context, &[kind]), problems);
        if let Err(error) = self.rope.build(self.head_dim)
            && self.head_dim.is_multiple_of(2)
        {
            problems.push(without_backtrace(error));
        }
    }

    /// The keys of a `config.json`; rotary parameters stand in the old and the new spelling.
    pub fn to_json(&self) -> Value {
        let mut rope = self.rope.to_json();
        if let Some(factor) = self.dynamic_ntk {
            rope["rope_type"] = "dynamic".into();
            rope["factor"] = factor.into();
        }
        let mut value = json!({
            "architectures": [ARCHITECTURES[0]],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope.theta,
            "rope_parameters": rope,
            "attention_bias": false,
            "mlp_bias": false,
            "tie_word_embeddings": false,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": false,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "embed_proj": self.embed_proj,
            "initializer_range": self.initializer_range,
            "num_aux_hidden_states": TAPPED_LAYERS,
            "eagle_config": {
                "use_aux_hidden_state": true,
                LAYER_IDS: self.target_layers.map(|layer| layer.0),
            }
        });
        self.rope.write_beside(&mut value);
        if let Some(window) = self.attention_window {
            value["attention_window"] = window.into();
        }
        value
    }
}

/// Context tokens before its own that a token sees. A window of engines counts the token itself, and holds
/// where the layer's kind says so.
fn attention_window(keys: &mut Keys<'_>) -> Option<usize> {
    if keys.present("attention_window").is_some() {
        return Some(keys.size_or("attention_window", None));
    }
    let slides = keys.value["layer_types"][0] == "sliding_attention";
    slides.then(|| keys.size_or("sliding_window", None).saturating_sub(1))
}

/// Where a draft's layer ids come from, which decides how they count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerIdSource {
    /// `eagle_config`, outputs of layers.
    Nested,
    /// The top level, states that enter layers: one more.
    TopLevel,
    /// Both, and they agree.
    Both,
    /// Neither: the published choice for the target's number of layers.
    Published,
}

impl LayerIdSource {
    /// The convention in words.
    fn describe(self) -> &'static str {
        match self {
            Self::Nested => "ids in `eagle_config`, read as outputs of layers",
            Self::TopLevel => "ids at the top level, read as states that enter layers (one more)",
            Self::Both => "ids at the top level and one less in `eagle_config`, which agree",
            Self::Published => "no ids: the published layers 1, n/2 - 1, n - 4",
        }
    }
}

/// How the layer ids of a draft from elsewhere are read; nothing of our own drafts.
pub(super) fn reading(path: &Path) -> Option<&'static str> {
    let value = config_beside(path).filter(|value| !value["target_fingerprint"].is_string())?;
    // The number does not matter for where ids come from.
    layer_ids(&value, Some(32)).ok().map(|(_, source)| source.describe())
}

/// The layers whose output the draft reads.
fn layer_ids(
    value: &Value,
    target_layers: Option<usize>,
) -> std::result::Result<([LayerId; TAPPED_LAYERS], LayerIdSource), Problems> {
    let one = |problem: String| Problems(vec![problem]);
    let read = |list: &Value, id: fn(usize) -> Option<LayerId>| match list {
        Value::Null => Ok(None),
        list => {
            let ids: Option<Vec<LayerId>> = list
                .as_array()
                .and_then(|ids| ids.iter().map(|stored| id(stored.as_u64()? as usize)).collect());
            let ids = ids.and_then(|ids| <[LayerId; TAPPED_LAYERS]>::try_from(ids).ok());
            ids.map(Some).ok_or_else(|| one(format!("`{LAYER_IDS}` = {list} are not three layers")))
        }
    };
    let nested = read(&value["eagle_config"][LAYER_IDS], |id| Some(LayerId(id)))?;
    let top = read(&value[LAYER_IDS], |id| EnteredLayerId(id).output())?;
    match (nested, top) {
        (Some(nested), Some(top)) if nested != top => Err(one(format!(
            "`{LAYER_IDS}` contradict each other: {:?} in `eagle_config` (outputs of layers), {:?} \
             at the top level, one less",
            nested.map(|id| id.0),
            top.map(|id| id.0)
        ))),
        (Some(layers), Some(_)) => Ok((layers, LayerIdSource::Both)),
        (Some(layers), None) => Ok((layers, LayerIdSource::Nested)),
        (None, Some(layers)) => Ok((layers, LayerIdSource::TopLevel)),
        (None, None) => match target_layers {
            Some(layers) => Ok((Eagle3Config::published_layers(layers)?, LayerIdSource::Published)),
            None => Err(one(format!("`eagle_config.{LAYER_IDS}` is missing"))),
        },
    }
}

#[cfg(test)]
mod tests {
    use longdraft_kernels::rope::RopeScaling;

    use super::*;
    use crate::test_support::assert_refused;

    fn minimal() -> Value {
        json!({
            "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3,
            "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 200, "draft_vocab_size": 80,
            "max_position_embeddings": 128
        })
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut config = Eagle3Config::from_json(&minimal(), Some(32)).expect("valid");
        assert_eq!(config.target_layers.map(|id| id.0), [1, 15, 28]);
        assert_eq!(config.rope, RopeParameters::plain(10_000.0));
        let scalings = [
            RopeScaling::None,
            RopeScaling::Linear { factor: 2.0 },
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: 64.0,
            },
            RopeScaling::Yarn {
                factor: 4.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                original_context: 64.0,
                attention_factor: 1.25,
                truncate: false,
            },
        ];
        for scaling in scalings {
            config.rope = RopeParameters { theta: 5e5, scaling, divisors: None };
            config.fc_norm = !config.fc_norm;
            config.norm_before_residual = !config.norm_before_residual;
            config.attention_window = Some(7);
            assert_eq!(Eagle3Config::from_json(&config.to_json(), None), Ok(config.clone()));
        }
        config.rope = RopeParameters { divisors: Some(vec![2.0; 8]), ..RopeParameters::plain(1e4) };
        config.dynamic_ntk = Some(4.0);
        assert_eq!(Eagle3Config::from_json(&config.to_json(), None), Ok(config));
    }

    #[test]
    fn a_window_of_engines_counts_the_token_itself() {
        let mut value = minimal();
        let window = |value: &Value| {
            Eagle3Config::from_json(value, Some(32)).map(|config| config.attention_window)
        };
        value["sliding_window"] = json!(9);
        assert_eq!(window(&value), Ok(None), "no layer slides");
        value["layer_types"] = json!(["full_attention"]);
        assert_eq!(window(&value), Ok(None));
        value["layer_types"] = json!(["sliding_attention"]);
        assert_eq!(window(&value), Ok(Some(8)));
        value["attention_window"] = json!(7);
        assert_eq!(window(&value), Ok(Some(7)), "our own key");
        value["attention_window"] = Value::Null;
        value["sliding_window"] = json!(1);
        assert_refused(window(&value), &["`attention_window` = 0 is not between 1"]);
        value["sliding_window"] = json!(u64::MAX);
        assert!(window(&value).is_err());
        value["sliding_window"] = Value::Null;
        assert_refused(window(&value), &["`sliding_window` is missing"]);
    }

    #[test]
    fn layers_are_read_in_both_conventions_and_contradictions_are_refused() {
        let mut value = minimal();
        value[LAYER_IDS] = json!([2, 16, 29]);
        let ids = |value: &Value| {
            Eagle3Config::from_json(value, None).map(|config| config.target_layers.map(|id| id.0))
        };
        assert_eq!(ids(&value), Ok([1, 15, 28]));
        value["eagle_config"] = json!({LAYER_IDS: [1, 15, 28]});
        assert_eq!(ids(&value), Ok([1, 15, 28]));
        value["eagle_config"] = json!({LAYER_IDS: [2, 16, 29]});
        assert!(ids(&value).expect_err("refused").to_string().contains("contradict"));
        value[LAYER_IDS] = json!([2, 0, 29]);
        assert!(ids(&value).expect_err("refused").to_string().contains("not three layers"));
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let mut value = minimal();
        value["hidden_size"] = json!("wide");
        value["norm_before_fc"] = json!(true);
        value["num_hidden_layers"] = json!(2);
        value["fc_norm"] = json!("yes");
        value["norm_output"] = json!(1);
        value["hidden_act"] = json!(true);
        value["rope_scaling"] = json!({"rope_type": "dynamic"});
        assert_refused(
            Eagle3Config::from_json(&value, None),
            &[
                "`hidden_size` = \"wide\"",
                "`norm_before_fc` = true",
                "more than one layer",
                "`fc_norm` = \"yes\" is not true or false",
                "`norm_output` = 1 is not true or false",
                "`hidden_act` = true is not a text",
                "`dynamic` needs",
                "is missing",
            ],
        );
        let mut value = minimal();
        value["draft_vocab_size"] = json!(300);
        value["num_key_value_heads"] = json!(2);
        assert_refused(Eagle3Config::from_json(&value, Some(8)), &["exceeds", "does not divide"]);
    }

    #[test]
    fn absurd_sizes_are_refused_before_anything_is_made_of_them() {
        for key in ["hidden_size", "head_dim", "num_attention_heads", "vocab_size"] {
            for size in [1_u64 << 23, 1 << 32, u64::MAX - 1] {
                let mut value = minimal();
                value[key] = json!(size);
                assert_refused(Eagle3Config::from_json(&value, Some(32)), &[&size.to_string()]);
            }
        }
    }
}
