//! GLM, GLM-4 and GLM-4.5 (Zeng et al. 2025, <https://arxiv.org/abs/2508.06471>): half of each head turns. In GLM and
//! GLM-4 neighbours turn together; GLM-4 has norms on both sides, GLM-4.5 experts chosen by corrected sigmoid scores.

use super::super::parts::{NormPlaces, QkNorm, Rotary, Router};
use super::{
    Architecture, Defaults, ExpertsConfig, GgufKeys, JsonKeys, Parts, Sizes, routed_experts,
};

/// The share of a head that turns.
const TURNING: f64 = 0.5;

pub(super) fn defaults(architecture: Architecture) -> Defaults {
    let common = Defaults {
        vocab_size: Some(151_552),
        max_position_embeddings: 131_072,
        reads_mlp_bias: false,
        ..Defaults::default()
    };
    if architecture == Architecture::Glm4Moe {
        let num_key_value_heads = Some(8);
        return Defaults { num_key_value_heads, norm_eps: ("rms_norm_eps", 1e-5), ..common };
    }
    Defaults {
        num_key_value_heads: Some(2),
        head_dim: Some(128),
        norm_eps: ("rms_norm_eps", 1.5625e-7),
        ..common
    }
}

fn parts(architecture: Architecture, dimensions: Option<usize>) -> Parts {
    let neighbours = architecture != Architecture::Glm4Moe;
    let norms = match architecture {
        Architecture::Glm4 => NormPlaces::BeforeAndAfterOfGlm,
        _ => NormPlaces::Before,
    };
    let rotary = Rotary { dimensions, neighbours, ..Rotary::default() };
    Parts { norms, rotary, ..Parts::default() }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> Parts {
    let turning = keys.turning(sizes, TURNING);
    let dimensions = Some(turning).filter(|turning| *turning < sizes.head_dim);
    let mut parts = parts(sizes.architecture, dimensions);
    if sizes.architecture != Architecture::Glm4Moe {
        return parts;
    }
    if keys.flag("use_qk_norm", false) {
        parts.qk_norm = QkNorm::PerHead;
    }
    parts.router = Router::Sigmoid {
        groups: keys.size("n_group").unwrap_or(1),
        kept_groups: keys.size("topk_group").unwrap_or(1),
        scale: keys.scale("routed_scaling_factor", Some(1.0)).unwrap_or(1.0),
    };
    parts
}

/// The experts of GLM-4.5, under DeepSeek's keys.
pub(in super::super) fn experts(keys: &mut JsonKeys<'_>) -> ExpertsConfig {
    routed_experts(keys, [128, 1408, 1])
}

pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    let dimensions = keys.turning(sizes.head_dim);
    let mut parts = parts(sizes.architecture, dimensions);
    if sizes.architecture != Architecture::Glm4Moe {
        // Files of models that also see have the rows in the order in which halves turn together.
        let sections = keys.integers("rope.dimension_sections").unwrap_or_default();
        let sees = matches!(sections[..], [first, second, ..] if first > 0 && second > 0);
        parts.rotary.neighbours = !sees;
        return parts;
    }
    if keys.has("blk.0.attn_q_norm.weight") {
        parts.qk_norm = QkNorm::PerHead;
    }
    // 2 is the sigmoid, which files without the key have, too.
    if keys.number("expert_gating_func").is_some_and(|kind| (kind - 2.0).abs() > 0.5) {
        keys.problems.push("`glm4moe.expert_gating_func` is not 2 (sigmoid)");
    }
    parts.router = Router::Sigmoid {
        groups: keys.whole("expert_group_count").unwrap_or(1),
        kept_groups: keys.whole("expert_group_used_count").unwrap_or(1),
        scale: keys.scale_or_none("expert_weights_scale").unwrap_or(1.0),
    };
    parts
}
