//! What a folder is written for, and the engines that read it.

use serde::{Deserialize, Serialize};

/// A program that serves or reads drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// llama.cpp.
    Llamacpp,
    /// The speculators library.
    Speculators,
    /// LongSpec's scripts.
    Longspec,
}

impl Engine {
    /// The name as its project writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::Llamacpp => "llama.cpp",
            Self::Speculators => "speculators",
            Self::Longspec => "LongSpec",
        }
    }
}

/// A layout of names, keys and conventions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// vLLM's plain folder.
    Vllm,
    /// SGLang's folder.
    Sglang,
    /// A GGUF file for llama.cpp.
    Llamacpp,
    /// A folder for llama.cpp's own converter.
    LlamacppHf,
    /// A plain folder for research code and for sharing.
    Hf,
    /// The folder of the speculators library, which vLLM serves by itself.
    Speculators,
    /// The published GLIDE layer.
    Longspec,
}

impl Profile {
    /// Every profile.
    pub const ALL: [Self; 7] = [
        Self::Vllm,
        Self::Sglang,
        Self::Llamacpp,
        Self::LlamacppHf,
        Self::Hf,
        Self::Speculators,
        Self::Longspec,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Llamacpp => "llamacpp",
            Self::LlamacppHf => "llamacpp-hf",
            Self::Hf => "hf",
            Self::Speculators => "speculators",
            Self::Longspec => "longspec",
        }
    }

    /// The profile of a name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|profile| profile.name() == name)
    }

    /// Which engines a folder of this profile has to work in.
    pub fn engines(self) -> &'static [Engine] {
        match self {
            Self::Vllm => &[Engine::Vllm],
            Self::Sglang => &[Engine::Sglang],
            Self::Llamacpp | Self::LlamacppHf => &[Engine::Llamacpp],
            Self::Hf => &[Engine::Vllm, Engine::Sglang],
            Self::Speculators => &[Engine::Speculators, Engine::Vllm],
            Self::Longspec => &[Engine::Longspec],
        }
    }

    /// Engine versions that the rules describe.
    pub fn compat(self) -> &'static str {
        match self {
            Self::Vllm | Self::Speculators => {
                "vLLM of mid 2026 (rules from its sources); speculators 0.9 (run)"
            }
            Self::Sglang => "SGLang of mid 2026 (rules from its sources)",
            Self::Llamacpp => "llama.cpp of October 2026 (run), GGUF version 3",
            Self::LlamacppHf => "llama.cpp's converter of mid 2026 (rules from its sources)",
            Self::Hf => "vLLM and SGLang of mid 2026 (rules from their sources)",
            Self::Longspec => "LongSpec's published scripts; PyTorch 2 (run)",
        }
    }

    /// Name of the decoder layer in tensor names.
    pub fn layer_prefix(self) -> &'static str {
        match self {
            Self::Vllm | Self::Speculators | Self::LlamacppHf => "layers.0.",
            Self::Sglang | Self::Hf | Self::Longspec => "midlayer.",
            Self::Llamacpp => "blk.0.",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for profile in Profile::ALL {
            assert_eq!(Profile::parse(profile.name()), Some(profile));
            let text = serde_json::to_string(&profile).expect("serialises");
            assert_eq!(text, format!("\"{}\"", profile.name()));
        }
        assert_eq!(Profile::parse("tensorrt"), None);
    }
}
