//! Rotary parameters as the files spell them.

use candle_core::Result as TensorResult;
use longdraft_kernels::rope::{Rope, RopeScaling};
use serde_json::{Value, json};

use super::limits;
use crate::error::Problems;

/// Base, scaling and per-frequency divisors of a target's rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeParameters {
    /// Base of the frequencies.
    pub theta: f64,
    /// Stretching rule.
    pub scaling: RopeScaling,
    /// Divisors of the frequencies, `[D/2]`, as GGUF files hold them instead of a rule.
    pub divisors: Option<Vec<f32>>,
}

impl RopeParameters {
    /// No scaling.
    pub fn plain(theta: f64) -> Self {
        Self { theta, scaling: RopeScaling::None, divisors: None }
    }

    /// Names numbers that would turn by infinite angles or none that are numbers.
    pub(super) fn check(&self, problems: &mut Problems) {
        limits::within(problems, "rope_theta", self.theta, &limits::ROPE_BASES);
        let scales: &[(&str, f64)] = match &self.scaling {
            RopeScaling::None => &[],
            RopeScaling::Linear { factor } => &[("factor", *factor)],
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, .. } => &[
                ("factor", *factor),
                ("low_freq_factor", *low_freq_factor),
                ("high_freq_factor", *high_freq_factor),
            ],
            RopeScaling::Yarn { factor, beta_fast, beta_slow, attention_factor, .. } => &[
                ("factor", *factor),
                ("beta_fast", *beta_fast),
                ("beta_slow", *beta_slow),
                ("attention_factor", *attention_factor),
            ],
        };
        for (name, number) in scales {
            limits::scale(problems, &format!("rope scaling: {name}"), *number);
        }
        if let RopeScaling::Llama3 { original_context, .. }
        | RopeScaling::Yarn { original_context, .. } = self.scaling
        {
            let name = "original_max_position_embeddings";
            limits::within(problems, name, original_context, &(1.0..=limits::CONTEXT as f64));
        }
    }

    /// Frequencies for a head dim.
    ///
    /// # Errors
    /// - the head dim is odd, the base is not positive, or the divisors do not fit
    pub fn build(&self, head_dim: usize) -> TensorResult<Rope> {
        let rope = Rope::new(head_dim, self.theta, self.scaling)?;
        match &self.divisors {
            Some(divisors) => rope.divided_by(divisors),
            None => Ok(rope),
        }
    }

    /// From `rope_theta`, `rope_scaling` or the newer `rope_parameters`.
    pub(crate) fn from_json(
        config: &Value,
        max_position_embeddings: usize,
        problems: &mut Problems,
    ) -> Self {
        let nested = ["rope_parameters", "rope_scaling"]
            .iter()
            .find_map(|key| config.get(*key).filter(|v| !v.is_null()));
        let theta = config
            .get("rope_theta")
            .or_else(|| nested.and_then(|n| n.get("rope_theta")))
            .and_then(Value::as_f64)
            .unwrap_or(10_000.0);
        if !(theta.is_finite() && theta > 0.0) {
            problems.push(format!("`rope_theta` = {theta} is not positive"));
        }
        let scaling = nested.map_or(RopeScaling::None, |nested| {
            scaling_from_json(nested, max_position_embeddings, problems)
        });
        Self { theta, scaling, divisors: None }
    }

    /// Rule and base under the published names; divisors have none.
    pub fn to_json(&self) -> Value {
        let mut value = match self.scaling {
            RopeScaling::None => json!({"rope_type": "default"}),
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                json!({
                    "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": whole(original_context)
                })
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_context,
                attention_factor,
                truncate,
            } => json!({
                "rope_type": "yarn", "factor": factor, "beta_fast": beta_fast,
                "beta_slow": beta_slow, "attention_factor": attention_factor,
                "original_max_position_embeddings": whole(original_context), "truncate": truncate
            }),
        };
        value["rope_theta"] = self.theta.into();
        value
    }
}

/// A length in tokens as files spell it: without a fraction, if it has none.
fn whole(length: f64) -> Value {
    if length.fract() == 0.0 && (0.0..1e15).contains(&length) {
        (length as u64).into()
    } else {
        length.into()
    }
}

fn scaling_from_json(
    value: &Value,
    max_position_embeddings: usize,
    problems: &mut Problems,
) -> RopeScaling {
    let kind = ["rope_type", "type"]
        .iter()
        .find_map(|key| value.get(*key).and_then(Value::as_str))
        .unwrap_or("default");
    let optional = |key: &str| value.get(key).and_then(Value::as_f64);
    let mut required = |key: &str| {
        let number = optional(key).filter(|x| x.is_finite() && *x > 0.0);
        if number.is_none() {
            problems.push(format!("rope scaling `{kind}` needs a positive `{key}`"));
        }
        number.unwrap_or(1.0)
    };
    match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: required("factor") },
        "llama3" => RopeScaling::Llama3 {
            factor: required("factor"),
            low_freq_factor: required("low_freq_factor"),
            high_freq_factor: required("high_freq_factor"),
            original_context: required("original_max_position_embeddings"),
        },
        "yarn" => {
            let factor = required("factor");
            RopeScaling::Yarn {
                factor,
                beta_fast: optional("beta_fast").unwrap_or(32.0),
                beta_slow: optional("beta_slow").unwrap_or(1.0),
                original_context: optional("original_max_position_embeddings")
                    .unwrap_or(max_position_embeddings as f64),
                attention_factor: yarn_attention_factor(
                    factor,
                    optional("attention_factor"),
                    optional("mscale"),
                    optional("mscale_all_dim"),
                ),
                truncate: value.get("truncate").and_then(Value::as_bool).unwrap_or(true),
            }
        }
        other => {
            problems.push(format!(
                "unknown rope scaling `{other}` (known: default, linear, llama3, yarn)"
            ));
            RopeScaling::None
        }
    }
}

/// YaRN's factor on cos and sin: as given, from the two `mscale`s, or `0.1 ln(factor) + 1`.
pub(crate) fn yarn_attention_factor(
    factor: f64,
    given: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
) -> f64 {
    let scaled = |m: f64| {
        if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
    };
    match (given, mscale, mscale_all_dim) {
        (Some(given), _, _) => given,
        (None, Some(m), Some(all)) => scaled(m) / scaled(all),
        _ => scaled(1.0),
    }
}
