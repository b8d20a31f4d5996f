//! Folders of block drafts, checked key by key and tensor by tensor.

use longdraft_models::draft::block::{BlockConfig, LayerKind, tensor_specs};
use serde_json::Value;

use super::described;
use crate::checks::{Checks, Effect, nearest, values};

/// The object of the keys that other models do not have.
const OWN: &str = "dflash_config";

/// Keys that some reader takes from another place, or has another default for.
const WRITTEN: [(&str, &str); 8] = [
    ("block_size", "readers look for it here or in `dflash_config`"),
    ("num_target_layers", "the converter cannot tell the layers"),
    ("layer_types", "older switches are read differently"),
    ("rope_theta", "vLLM takes 1e6 for it, llama.cpp 1e4"),
    ("rope_parameters", "newer readers look for the rotary base here"),
    ("head_dim", "it is not hidden_size / num_attention_heads everywhere"),
    ("tie_word_embeddings", "its default differs by reader"),
    ("vocab_size", "the mask token cannot be checked"),
];

/// Keys of the same kind in [`OWN`].
const WRITTEN_INSIDE: [&str; 3] = ["block_size", "target_layer_ids", "mask_token_id"];

/// Tensors that make a reader share nothing with the target, or draft from another vocabulary.
const FOREIGN: [(&str, &str); 4] = [
    ("d2t", "a reduced vocabulary needs a head of its own"),
    ("t2d", "a reduced vocabulary needs a head of its own"),
    ("mask_hidden", "vLLM refuses it"),
    ("mask_embedding", "vLLM puts it in the mask token's place"),
];

/// The target's tensors, which some trainers write along and readers share anyway.
const FROZEN: [&str; 2] = ["embed_tokens.weight", "lm_head.weight"];

pub(super) fn check(checks: &mut Checks<'_>) {
    if !checks.config.is_object() {
        return;
    }
    keys(checks);
    let config = match described(checks) {
        Ok(Some(config)) => config,
        Ok(None) => return,
        Err(error) => {
            return checks.error(
                "sizes",
                "config.json",
                error.to_string(),
                "the network of a block draft",
                Effect::Rejects,
                "the network cannot be built, or is another one",
            );
        }
    };
    causality(checks, &config);
    layout(checks, &config);
    layers(checks, &config);
    target(checks, &config);
    tensors(checks, &config);
    checks.sizes = Some(Box::new(config));
}

fn keys(checks: &mut Checks<'_>) {
    for (key, why) in WRITTEN {
        if checks.config.get(key).is_none_or(Value::is_null) {
            checks.error(
                "missing-key",
                format!("config.json: `{key}`"),
                "missing",
                "a value",
                Effect::Garbage,
                why,
            );
        }
    }
    for key in WRITTEN_INSIDE {
        if checks.config[OWN].get(key).is_none_or(Value::is_null) {
            checks.error(
                "missing-key",
                format!("config.json: `{OWN}.{key}`"),
                "missing",
                "a value",
                Effect::Garbage,
                "readers look for it here, and have defaults of their own",
            );
        }
    }
}

/// Readers run sliding layers causally unless they are told, and full ones not.
fn causality(checks: &mut Checks<'_>, config: &BlockConfig) {
    let slides = config.layers.contains(&LayerKind::Sliding);
    let said = ["is_causal", "causal"]
        .iter()
        .any(|key| checks.config[*key].is_boolean() || checks.config[OWN][*key].is_boolean());
    let mixed = slides && config.layers.contains(&LayerKind::Full);
    if slides && !mixed && !said {
        checks.error(
            "causality",
            "config.json: `is_causal`",
            "missing for a draft of sliding layers",
            "true or false, as it was trained",
            Effect::Garbage,
            "blocks run causally, and a draft trained otherwise loses acceptance without a message",
        );
    }
}

/// Whether slot 0 proposes is a default that differs by reader.
fn layout(checks: &mut Checks<'_>, config: &BlockConfig) {
    let key = "sample_from_anchor";
    let said =
        [&checks.config[key], &checks.config[OWN][key]].iter().find_map(|value| value.as_bool());
    let wanted = config.chain.is_some();
    if said.is_some_and(|said| said != wanted) || (wanted && said.is_none()) {
        checks.error(
            "layout",
            format!("config.json: `{key}`"),
            said.map_or_else(|| "missing".to_owned(), |said| said.to_string()),
            wanted.to_string(),
            Effect::Garbage,
            "slots propose the token beside their own, and nearly nothing is accepted",
        );
    }
}

fn layers(checks: &mut Checks<'_>, config: &BlockConfig) {
    let ids: Vec<usize> = config.target_layers.iter().map(|layer| layer.0).collect();
    let exported = checks.manifest.as_ref().map(|manifest| manifest.target_layers.clone());
    if let Some(exported) = exported.filter(|exported| *exported != ids) {
        checks.error(
            "layers",
            format!("config.json: `{OWN}.target_layer_ids`"),
            format!("{ids:?}"),
            format!("{exported:?}, counted from 0, as they were exported"),
            Effect::Garbage,
            "the draft reads other layers, and accepts little without a message",
        );
    }
    if let Some(count) = checks.target_layers()
        && (count != config.num_target_layers || ids.last().is_some_and(|last| last + 1 >= count))
    {
        checks.error(
            "layers",
            format!("config.json: `{OWN}.target_layer_ids`, `num_target_layers`"),
            format!("{ids:?} of {}", config.num_target_layers),
            format!("layers below the last one of {count}, counted from 0"),
            Effect::Garbage,
            "the numbers are those of another target, or count from 1",
        );
    }
}

fn target(checks: &mut Checks<'_>, config: &BlockConfig) {
    let Some(target) = checks.target else { return };
    let wanted = target.config();
    let mut wrong = Vec::new();
    for (key, found, wanted) in [
        ("hidden_size", config.hidden_size, wanted.hidden_size),
        ("vocab_size", config.vocab_size, wanted.vocab_size),
    ] {
        if found != wanted {
            wrong.push((key, found.to_string(), wanted.to_string()));
        }
    }
    let mask = config.mask_token_id as usize;
    if mask >= wanted.vocab_size {
        wrong.push(("mask_token_id", mask.to_string(), "a row of the target's table".into()));
    }
    if wanted.eos_token_ids.contains(&config.mask_token_id) {
        wrong.push(("mask_token_id", mask.to_string(), "a token that texts do not hold".into()));
    }
    for (key, found, wanted) in wrong {
        checks.error(
            "not-the-target",
            format!("config.json: `{key}`"),
            found,
            wanted,
            Effect::Rejects,
            "the draft is another target's",
        );
    }
}

fn tensors(checks: &mut Checks<'_>, config: &BlockConfig) {
    let specs = tensor_specs(config);
    for spec in &specs {
        match checks.tensors.get(&spec.name).map(|tensor| tensor.shape.clone()) {
            None => checks.error(
                "missing-tensor",
                format!("tensor `{}`", spec.name),
                "missing",
                format!("shape {:?}", spec.shape),
                Effect::Rejects,
                "the network has it",
            ),
            Some(found) if found != spec.shape => checks.error(
                "shape",
                format!("tensor `{}`", spec.name),
                format!("shape {found:?}"),
                format!("{:?}", spec.shape),
                Effect::Rejects,
                "the parameter has another size",
            ),
            Some(_) => {}
        }
    }
    let found: Vec<_> = checks.tensors.values().cloned().collect();
    for tensor in found {
        if let Some((_, why)) = FOREIGN.iter().find(|(name, _)| *name == tensor.name) {
            checks.error(
                "foreign-tensor",
                format!("tensor `{}`", tensor.name),
                "not of this network",
                "the trained tensors alone",
                Effect::Garbage,
                why,
            );
        } else if !FROZEN.contains(&tensor.name.as_str())
            && !specs.iter().any(|spec| spec.name == tensor.name)
        {
            let near = nearest(&tensor.name, specs.iter().map(|spec| spec.name.as_str()));
            let hint = near.map(|near| format!(" (is `{near}` meant?)")).unwrap_or_default();
            checks.error(
                "unexpected-tensor",
                format!("tensor `{}`", tensor.name),
                format!("not of this network{hint}"),
                "the trained tensors alone: table and head are the target's",
                Effect::Garbage,
                "some readers ignore it without a message",
            );
        }
        if let Ok(bytes) = tensor.read() {
            values::check(checks, &tensor.name, &tensor.shape, &tensor.dtype, &bytes);
        }
    }
}
