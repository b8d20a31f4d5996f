//! What mixes the tokens of a layer, where it is not plain attention.

use longdraft_kernels::recurrence::DeltaSizes;

use super::limits;
use crate::error::Problems;

/// What mixes the tokens of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mixer {
    /// Attention over keys and values of earlier tokens.
    #[default]
    Attention,
    /// A gated delta net: a state in place of keys.
    DeltaNet,
    /// A short convolution between two gates.
    Convolution,
}

/// Sizes of a gated delta net (Yang et al. 2024, <https://arxiv.org/abs/2412.06464>), and how files hold it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNetConfig {
    /// Heads and dims.
    pub sizes: DeltaSizes,
    /// Taps of the convolution before it.
    pub kernel: usize,
    /// Whether queries, keys, values and output gates are one projection with its rows by key head.
    pub grouped_inputs: bool,
    /// The same of `β` and `γ`.
    pub grouped_gates: bool,
    /// Whether files hold `−exp(A)` in place of `A`.
    pub negated_rates: bool,
}

impl DeltaNetConfig {
    /// Rows of the projection of queries, keys, values and gates.
    pub fn input_size(&self) -> usize {
        self.sizes.channels() + self.sizes.values()
    }

    fn validate(&self, problems: &mut Problems) {
        let DeltaSizes { key_heads, value_heads, key_dim, value_dim, .. } = self.sizes;
        let before = problems.0.len();
        limits::check(
            problems,
            &[
                ("linear_num_key_heads", key_heads, limits::HEADS),
                ("linear_num_value_heads", value_heads, limits::HEADS),
                ("linear_key_head_dim", key_dim, limits::HEAD_DIM),
                ("linear_value_head_dim", value_dim, limits::HEAD_DIM),
                ("linear_conv_kernel_dim", self.kernel, limits::TAPS),
            ],
        );
        if problems.0.len() > before {
            return;
        }
        if !value_heads.is_multiple_of(key_heads) {
            problems.push(format!(
                "`linear_num_key_heads` = {key_heads} does not divide `linear_num_value_heads` = {value_heads}"
            ));
        }
        limits::check(
            problems,
            &[
                ("linear channels", self.input_size(), limits::INNER),
                ("linear state", self.sizes.matrices(), limits::STATE),
            ],
        );
    }
}

/// A short convolution between two gates (LFM2): `C ∘ conv(B ∘ z)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConvolutionConfig {
    /// Taps.
    pub kernel: usize,
    /// Whether projections and convolution have biases.
    pub bias: bool,
}

/// Names what makes no sense of mixers and their sizes.
pub(super) fn validate(
    mixers: &[Mixer],
    delta_net: Option<&DeltaNetConfig>,
    convolution: Option<&ShortConvolutionConfig>,
    problems: &mut Problems,
) {
    if let Some(delta_net) = delta_net {
        delta_net.validate(problems);
    } else if mixers.contains(&Mixer::DeltaNet) {
        problems.push("layers of linear attention without sizes of it");
    }
    if let Some(convolution) = convolution {
        limits::check(problems, &[("conv_L_cache", convolution.kernel, limits::TAPS)]);
    } else if mixers.contains(&Mixer::Convolution) {
        problems.push("layers with a convolution without its size");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_do_not_divide_or_overflow_are_named() {
        let sizes =
            DeltaSizes { key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 8, tiled: false };
        let config = DeltaNetConfig {
            sizes,
            kernel: 4,
            grouped_inputs: false,
            grouped_gates: false,
            negated_rates: false,
        };
        let problems = |sizes, kernel| {
            let config = DeltaNetConfig { sizes, kernel, ..config };
            let mut problems = Problems::default();
            validate(&[Mixer::DeltaNet], Some(&config), None, &mut problems);
            problems
        };
        let told = |sizes, kernel| problems(sizes, kernel).to_string();
        assert_eq!(problems(sizes, 4), Problems::default());
        assert!(told(DeltaSizes { key_heads: 0, ..sizes }, 4).contains("linear_num_key_heads"));
        assert!(told(DeltaSizes { key_heads: 3, ..sizes }, 4).contains("does not divide"));
        assert!(told(sizes, 0).contains("linear_conv_kernel_dim"));
        assert!(told(sizes, 1 << 30).contains("linear_conv_kernel_dim"));
        let huge = DeltaSizes { key_dim: usize::MAX, value_dim: usize::MAX, ..sizes };
        assert!(told(huge, 4).contains("linear_key_head_dim"));
        let wide = DeltaSizes { value_heads: 4096, value_dim: 8192, key_dim: 8192, ..sizes };
        assert!(told(wide, 4).contains("linear state"));
        let mut missing = Problems::default();
        validate(&[Mixer::Convolution, Mixer::DeltaNet], None, None, &mut missing);
        assert_eq!(missing.0.len(), 2);
    }
}
