//! What a header says of the rotary embedding.

use longdraft_kernels::rope::RopeScaling;

use super::super::rope::yarn_of_gguf;
use super::super::{Architecture, RopeParameters, TargetConfig, families};
use super::Keys;

/// What YaRN's factor on scores is made of.
pub(in super::super) const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";
/// The rule that stretches frequencies by how often they turn.
const YARN: &str = "yarn";

impl<'a> Keys<'a> {
    /// Dimensions of a head that turn, if they are not all.
    pub(in super::super) fn turning(&mut self, head_dim: usize) -> Option<usize> {
        let turning = self.whole("rope.dimension_count")?;
        if turning > head_dim || !turning.is_multiple_of(2) {
            let prefix = self.prefix;
            self.problems.push(format!(
                "`{prefix}.rope.dimension_count` = {turning} is not an even part of a head of {head_dim}"
            ));
        }
        Some(turning).filter(|turning| *turning < head_dim)
    }

    /// Refuses heads that turn in part of a family that turns all of them.
    pub(super) fn check_turning(&mut self, config: &TargetConfig) {
        const KEY: &str = "rope.dimension_count";
        let is_read = config.parts.rotary.dimensions.is_some();
        if is_read || config.architecture == Architecture::Gemma4 {
            return;
        }
        let (prefix, head_dim) = (self.prefix, config.head_dim);
        if let Some(turning) = self.number(KEY)
            && (turning.is_nan() || (turning - head_dim as f64).abs() > 0.0)
        {
            self.problems.push(format!(
                "`{prefix}.{KEY}` = {turning} is not all of a head of {head_dim}, which is not supported"
            ));
        }
    }

    fn yarn(&self, factor: f64, context: usize) -> RopeScaling {
        // In files of `deepseek2` the two `mscale`s are the same, so they cancel each other.
        let has_multiplier = self.number(LOG_MULTIPLIER).is_some_and(|all| all != 0.0);
        let cancel = has_multiplier && self.prefix == "deepseek2";
        let number = |key: &str| match key {
            "yarn_attn_factor" if cancel => Some(1.0),
            _ => self.number(&format!("rope.scaling.{key}")),
        };
        // Without a key for it: published files of the family say so.
        yarn_of_gguf(number, (factor, context), self.prefix != "gpt-oss")
    }

    /// What frequencies are divided by, of which 0 is 1; older files have another name for it.
    fn rope_factor(&self) -> f64 {
        let names = ["rope.scaling.factor", "rope.scale_linear"];
        let factor = names.into_iter().find_map(|name| self.number(name));
        factor.filter(|factor| *factor != 0.0).unwrap_or(1.0)
    }

    /// What a context is stretched by, if by YaRN.
    pub(in super::super) fn yarn_factor(&self) -> Option<f64> {
        let is_yarn = self.rope_scaling() == Some(YARN);
        is_yarn.then(|| self.rope_factor())
    }

    /// Whether the file holds divisors for two lengths, and the family reads them.
    fn has_factors_by_length(&self) -> bool {
        self.prefix == "phi3" && families::FACTORS_BY_LENGTH.iter().all(|name| self.has(name))
    }

    fn rope_scaling(&self) -> Option<&'a str> {
        const KEY: &str = "rope.scaling.type";
        let rule = self.header.text(&format!("{}.{KEY}", self.prefix));
        if rule.is_none() {
            self.tell_if_there(KEY, "is not a text");
        }
        rule
    }

    /// Base and scaling of the rotary embedding; divisors are tensors.
    pub(crate) fn rope(&mut self, context: usize) -> RopeParameters {
        let theta = self.number("rope.freq_base").unwrap_or(10_000.0);
        let factor = self.rope_factor();
        let is_plain = (factor - 1.0).abs() <= f64::EPSILON;
        let scaling = match self.rope_scaling() {
            // A factor without a rule is linear.
            None | Some("linear") if !is_plain => RopeScaling::Linear { factor },
            None | Some("linear" | "none") => RopeScaling::None,
            // What tensors of the file hold.
            Some("longrope") if self.has_factors_by_length() => RopeScaling::None,
            Some(YARN) => self.yarn(factor, context),
            Some(other) => {
                let more = if self.prefix == "phi3" { ", longrope with its factors" } else { "" };
                self.problems.push(format!(
                    "unknown rope scaling `{other}` (known: none, linear, yarn{more})"
                ));
                RopeScaling::None
            }
        };
        self.check_factor();
        RopeParameters { theta, scaling, divisors: None }
    }

    /// Refuses a factor on cos and sin beside a rule that has none.
    fn check_factor(&mut self) {
        const KEY: &str = "rope.scaling.attn_factor";
        let is_read = self.rope_scaling() == Some(YARN) || self.has_factors_by_length();
        if let Some(factor) = self.number(KEY)
            && !is_read
            && (factor.is_nan() || (factor - 1.0).abs() > f64::EPSILON)
        {
            self.problems.push(format!(
                "`{}.{KEY}` = {factor} is supported beside the rope scaling `{YARN}` and divisors for two lengths only",
                self.prefix
            ));
        }
    }

    /// Rotary embedding of layers with windows, where it is another one: some files of families with a single base give
    /// these layers their own.
    pub(super) fn sliding_rope(&mut self, config: &TargetConfig) -> Option<RopeParameters> {
        let parts = &config.parts;
        let may_have = matches!(config.architecture, Architecture::Gemma2 | Architecture::GptOss);
        if parts.sliding_rope.is_some() || parts.window.is_none() {
            return parts.sliding_rope.clone();
        }
        let theta = self.positive("rope.freq_base_swa")?;
        if !may_have {
            if theta.to_bits() != config.rope.theta.to_bits() {
                let prefix = &self.prefix;
                self.problems.push(format!(
                    "`{prefix}.rope.freq_base_swa` = {theta} is not supported for this family"
                ));
            }
            return None;
        }
        let own = RopeParameters { theta, ..config.rope.clone() };
        Some(own).filter(|own| *own != config.rope)
    }
}
