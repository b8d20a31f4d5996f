//! Rotary parameters as the files spell them.

#[cfg(test)]
mod tests;

use candle_core::Result as TensorResult;
use longdraft_kernels::rope::{Rope, RopeScaling};
use serde_json::{Value, json};

use super::json_keys::Keys;
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
    pub(crate) fn check(&self, problems: &mut Problems) {
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
            let range = 1.0..=limits::CONTEXT as f64;
            limits::within(problems, ORIGINAL_CONTEXT, original_context, &range);
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

    /// Whether a draft with this rotation keeps it beside a target with another one. Divisors are a GGUF file's form of
    /// a rule that the target's other files name, which exports need.
    pub fn is_kept_beside(&self, target: &Self) -> bool {
        self.divisors.is_none() || target.divisors.is_some()
    }

    /// The same without a factor on cos and sin.
    pub(super) fn of_unit_length(&self) -> Self {
        let mut same = self.clone();
        if let RopeScaling::Yarn { attention_factor, .. } = &mut same.scaling {
            *attention_factor = 1.0;
        }
        same
    }

    /// From `rope_theta` and [`rotary_keys`], whose base wins; 10 000 if neither says one.
    pub(crate) fn from_json(
        config: &Value,
        max_position_embeddings: usize,
        problems: &mut Problems,
    ) -> Self {
        Self::from_json_or(10_000.0, config, max_position_embeddings, problems)
    }

    /// Reads the rotation of a draft: all its layers have the same one, which turns whole heads. `rope_parameters` may be
    /// a map by the kinds of layers, of which the draft has `kinds`. Divisors have a key of ours.
    pub(crate) fn of_draft(
        config: &Value,
        (context, kinds): (usize, &[&str]),
        problems: &mut Problems,
    ) -> Self {
        let mut config = config.clone();
        read_attn_factor(&mut config);
        let config = &config;
        let of_kind =
            |kind: &&str| config.get("rope_parameters")?.get(*kind).filter(|of| of.is_object());
        let own: Vec<&Value> = kinds.iter().filter_map(of_kind).collect();
        let any = || LAYER_KINDS.iter().filter_map(of_kind).collect();
        let own: Vec<&Value> = if own.is_empty() { any() } else { own };
        // A draft's own context may be shorter than its target's.
        if own.iter().copied().chain(rotary_keys(config)).any(|keys| kind_of(keys) == DYNAMIC) {
            problems.push("rope scaling `dynamic` of a draft is not supported");
        }
        if let Some(share) = turning_in_part(config) {
            problems.push(format!(
                "`{TURNING}` = {share} of a draft is not supported: engines turn that part of a head, drafts turn \
                 whole heads here"
            ));
        }
        let mut ropes = Vec::new();
        for of in own {
            let mut flat = config.clone();
            flat["rope_parameters"] = of.clone();
            ropes.push(Self::from_json(&flat, context, problems));
        }
        if ropes.iter().any(|other| *other != ropes[0]) {
            problems
                .push("`rope_parameters` differ between kinds of layers: a draft has one rotation");
        }
        let rope = match ropes.into_iter().next() {
            Some(first) => first,
            None => Self::from_json(config, context, problems),
        };
        rope.check(problems);
        let mut keys = Keys::of(config);
        keys.check_rotary_kinds();
        let divisors = keys.numbers(DIVISORS);
        problems.0.append(&mut keys.into_problems().0);
        Self { divisors, ..rope }
    }

    /// What a draft's `config.json` says beside `rope_parameters`, which `config` has: the older spelling, and divisors.
    /// Readers take an absent key for none; some refuse null.
    pub(crate) fn write_beside(&self, config: &mut Value) {
        let rope = config["rope_parameters"].clone();
        if rope["rope_type"] != "default" {
            config["rope_scaling"] = rope;
        }
        if let Some(divisors) = &self.divisors {
            config[DIVISORS] = json!(divisors);
        }
    }

    /// The same with another base where a file says none.
    pub(super) fn from_json_or(
        absent: f64,
        config: &Value,
        max_position_embeddings: usize,
        problems: &mut Problems,
    ) -> Self {
        let nested = rotary_keys(config);
        let theta = nested.into_iter().chain([config]).find_map(|keys| stated(keys, "rope_theta"));
        let theta = theta.map_or(absent, |theta| theta.as_f64().unwrap_or(f64::NAN));
        if !(theta.is_finite() && theta > 0.0) {
            problems.push(format!("`rope_theta` = {theta} is not positive"));
        }
        let scaling = nested.map_or(RopeScaling::None, |nested| {
            let all = Value::from(max_position_embeddings);
            // What stands at top level wins.
            let original =
                [config, nested].into_iter().find_map(|keys| stated(keys, ORIGINAL_CONTEXT));
            scaling_from_json(nested, original.unwrap_or(&all), problems)
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

/// The kinds of layers by which `rope_parameters` may be given.
pub(crate) const LAYER_KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// The kind of scaling that begins beyond `max_position_embeddings` and grows with the sequence (NTK).
const DYNAMIC: &str = "dynamic";
/// The key of a draft's divisors, which other engines do not read.
const DIVISORS: &str = "rope_divisors";
/// The key of the longest sequence before stretching.
const ORIGINAL_CONTEXT: &str = "original_max_position_embeddings";

/// The object of rotary parameters, if there is one: `rope_scaling`, or the newer `rope_parameters` where that is left
/// out or empty.
pub(super) fn rotary_keys(config: &Value) -> Option<&Value> {
    let mut objects =
        ["rope_scaling", "rope_parameters"].into_iter().filter_map(|key| config.get(key));
    objects.find(|value| value.as_object().is_some_and(|keys| !keys.is_empty()))
}

/// The key of the share of a head that turns.
pub(super) const TURNING: &str = "partial_rotary_factor";

/// The share of a head that turns, at top level or beside a base, unless it is the whole head.
pub(super) fn turning_in_part(config: &Value) -> Option<&Value> {
    let map = config.get("rope_parameters");
    let by_kind = LAYER_KINDS.into_iter().map(|kind| map?.get(kind));
    let places = [Some(config), config.get("rope_scaling"), map].into_iter().chain(by_kind);
    let mut shares = places.flatten().filter_map(|keys| keys.get(TURNING));
    shares.find(|share| !share.is_null() && share.as_f64() != Some(1.0))
}

/// A key's value, if it is there and not null.
fn stated<'a>(keys: &'a Value, key: &str) -> Option<&'a Value> {
    keys.get(key).filter(|value| !value.is_null())
}

/// A length in tokens as files spell it: without a fraction, if it has none.
fn whole(length: f64) -> Value {
    if length.fract() == 0.0 && (0.0..1e15).contains(&length) {
        (length as u64).into()
    } else {
        length.into()
    }
}

/// The kind of scaling that rotary parameters name.
pub(super) fn kind_of(value: &Value) -> &str {
    let mut names = ["rope_type", "type"].into_iter().filter_map(|key| value.get(key));
    names.find_map(Value::as_str).unwrap_or("default")
}

fn scaling_from_json(value: &Value, original: &Value, problems: &mut Problems) -> RopeScaling {
    let kind = kind_of(value);
    let optional = |key: &str| value.get(key).and_then(Value::as_f64);
    let mut required = |key: &str| {
        let number = if key == ORIGINAL_CONTEXT { original.as_f64() } else { optional(key) };
        let number = number.filter(|x| x.is_finite() && *x > 0.0);
        if number.is_none() {
            problems.push(format!("rope scaling `{kind}` needs a positive `{key}`"));
        }
        number.unwrap_or(1.0)
    };
    match kind {
        "default" => RopeScaling::None,
        // Plain up to `max_position_embeddings`, where every context ends.
        DYNAMIC => {
            required("factor");
            if stated(value, "alpha").is_some() {
                problems.push("rope scaling `dynamic` by `alpha` is not supported");
            }
            RopeScaling::None
        }
        "linear" => RopeScaling::Linear { factor: required("factor") },
        "llama3" => RopeScaling::Llama3 {
            factor: required("factor"),
            low_freq_factor: required("low_freq_factor"),
            high_freq_factor: required("high_freq_factor"),
            original_context: required(ORIGINAL_CONTEXT),
        },
        "yarn" => {
            let factor = required("factor");
            RopeScaling::Yarn {
                factor,
                beta_fast: optional("beta_fast").unwrap_or(32.0),
                beta_slow: optional("beta_slow").unwrap_or(1.0),
                original_context: required(ORIGINAL_CONTEXT),
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
                "unknown rope scaling `{other}` (known: default, linear, dynamic, llama3, yarn)"
            ));
            RopeScaling::None
        }
    }
}

/// YaRN as the keys of a GGUF file say it; `number` reads those of `rope.scaling`. `yarn_log_multiplier` is the
/// `mscale_all_dim` of other files, whose `mscale` is 1. `attn_factor` multiplies all of it.
pub(super) fn yarn_of_gguf(
    number: impl Fn(&str) -> Option<f64>,
    (factor, context): (f64, usize),
    truncate: bool,
) -> RopeScaling {
    let all = number("yarn_log_multiplier").filter(|all| *all != 0.0);
    let own = yarn_attention_factor(factor, number("yarn_attn_factor"), all.map(|_| 1.0), all);
    RopeScaling::Yarn {
        factor,
        beta_fast: number("yarn_beta_fast").unwrap_or(32.0),
        beta_slow: number("yarn_beta_slow").unwrap_or(1.0),
        original_context: number("original_context_length").unwrap_or(context as f64),
        attention_factor: number("attn_factor").unwrap_or(1.0) * own,
        truncate,
    }
}

/// YaRN's factor on cos and sin where a draft's file says it as engines do: `attn_factor` multiplies the usual one. The
/// whole factor wins.
fn read_attn_factor(config: &mut Value) {
    for key in ["rope_parameters", "rope_scaling"] {
        let number = |name: &str| config.get(key)?.get(name)?.as_f64();
        let (Some(share), Some(factor), None) =
            (number("attn_factor"), number("factor"), number("attention_factor"))
        else {
            continue;
        };
        let usual = yarn_attention_factor(factor, None, None, None);
        config[key]["attention_factor"] = (share * usual).into();
    }
}

/// YaRN's factor on cos and sin: as given, from the two `mscale`s if neither is 0, or `0.1 ln(factor) + 1`.
pub(super) fn yarn_attention_factor(
    factor: f64,
    given: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
) -> f64 {
    let [mscale, all] = [mscale, mscale_all_dim].map(|m| m.filter(|m| *m != 0.0));
    match (given, mscale, all) {
        (Some(given), _, _) => given,
        (None, Some(m), Some(all)) => yarn_growth(factor, m) / yarn_growth(factor, all),
        _ => yarn_growth(factor, 1.0),
    }
}

/// `0.1 m ln(factor) + 1`; 1 for contexts that are not stretched.
pub(super) fn yarn_growth(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}
