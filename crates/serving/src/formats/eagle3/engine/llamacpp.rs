//! llama.cpp's loader of EAGLE-3 drafts, and of the folders that its converter takes.

use longdraft_models::draft::eagle3::gguf_file::TENSOR_NAMES;

use super::{Fate, SeenLayers, default_outputs};

/// Tensors that the target lends where the file has none, and those that are there for some drafts
/// only.
pub(crate) const OPTIONAL: [&str; 4] =
    ["output.weight", "token_embd.weight", "d2t", "rope_freqs.weight"];

/// What a tensor that nobody expects, or several layers, do.
pub(crate) const OTHER_COUNT: &str = "the number of tensors is not the one expected: loading ends";

/// What becomes of a tensor of a GGUF file.
pub(crate) fn fate(name: &str) -> Fate {
    if TENSOR_NAMES.iter().any(|(gguf, _)| *gguf == name) {
        Fate::Loaded(name.to_owned())
    } else {
        Fate::Rejected(OTHER_COUNT.into())
    }
}

/// Tensors without which loading ends.
pub(crate) fn required() -> impl Iterator<Item = &'static str> {
    TENSOR_NAMES.into_iter().map(|(name, _)| name).filter(|name| !OPTIONAL.contains(name))
}

/// The converter computes the layers anew, whatever a folder says.
pub(crate) fn folder_layers(target_layers: Option<usize>) -> SeenLayers {
    SeenLayers {
        outputs: default_outputs(target_layers),
        from: "its converter's own choice (2, n/2, n-3)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_tensors_end_loading_and_twelve_are_required() {
        assert!(matches!(fate("blk.0.attn_norm_2.weight"), Fate::Loaded(_)));
        assert!(matches!(fate("blk.0.attn_q.bias"), Fate::Rejected(_)));
        assert!(matches!(fate("t2d"), Fate::Rejected(_)));
        assert_eq!(required().count(), 12);
    }
}
