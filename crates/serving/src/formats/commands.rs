//! How each engine is told to serve a target with a draft.

use super::{Lines, Served};
use crate::Profile;
use crate::hub_name::{HUB_NAME, loaded};
use crate::shell::quoted;

/// What the command lines of a method's drafts have of their own.
pub(super) struct Own<'a> {
    /// The method's names for vLLM, SGLang and llama.cpp.
    pub(super) names: [&'a str; 3],
    /// Tokens that vLLM and llama.cpp propose in a round.
    pub(super) proposals: usize,
    /// How SGLang is told their number.
    pub(super) sglang: &'a str,
    /// What else llama.cpp is told.
    pub(super) llamacpp: &'a str,
}

/// Command lines by engine; `DIR` stands for the exported folder.
pub(super) fn lines(profile: Profile, served: Served<'_>, own: &Own<'_>) -> Lines {
    let target = quoted(loaded(served.target, served.is_gguf));
    let Own { names, proposals, sglang, llamacpp } = own;
    let vllm = format!(
        "vllm serve {target} --speculative-config '{{\"method\": \"{}\", \"model\": \"DIR\", \
         \"num_speculative_tokens\": {proposals}}}'",
        names[0]
    );
    let sglang = format!(
        "python3 -m sglang.launch_server --model-path {target} --speculative-algorithm {} \
         --speculative-draft-model-path DIR {sglang}",
        names[1]
    );
    let llamacpp = format!(
        "llama-server -m {} -md DIR/{} --spec-type {} --spec-draft-n-max {proposals}{llamacpp}",
        if target == HUB_NAME { quoted(served.target) } else { "TARGET.gguf".to_owned() },
        served.gguf,
        names[2]
    );
    let convert =
        "python3 convert_hf_to_gguf.py DIR --target-model-dir TARGET --outfile draft.gguf";
    let all = match profile {
        Profile::Vllm => vec![("vllm", vllm)],
        Profile::Sglang => vec![("sglang", sglang)],
        Profile::Hf => vec![("vllm", vllm), ("sglang", sglang)],
        Profile::LlamacppHf => vec![("llama.cpp", convert.to_owned())],
        Profile::Llamacpp => vec![("llama.cpp", llamacpp)],
        Profile::Speculators => vec![("vllm", "vllm serve DIR".to_owned())],
        Profile::Longspec => Vec::new(),
    };
    all.into_iter().map(|(engine, command)| (engine.to_owned(), command)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_given_a_target_that_they_can_load() {
        let own = Own { names: ["a", "b", "c"], proposals: 3, sglang: "--n 4", llamacpp: " --p 0" };
        let line = |profile, target, is_gguf, engine| {
            let served = Served { target, is_gguf, draft_len: 3, gguf: "d.gguf" };
            lines(profile, served, &own)[engine].clone()
        };
        let vllm = |target, is_gguf| line(Profile::Vllm, target, is_gguf, "vllm");
        assert!(vllm("/models/a.gguf", true).starts_with("vllm serve ORG/NAME "));
        assert!(vllm("org/a", true).starts_with("vllm serve org/a "));
        assert!(vllm("/models/a", false).starts_with("vllm serve /models/a "));
        let llamacpp = |target| line(Profile::Llamacpp, target, true, "llama.cpp");
        assert!(llamacpp("/models/a.gguf").contains("-m /models/a.gguf -md DIR/d.gguf"));
        assert!(llamacpp("/my models/a.gguf").contains("-m '/my models/a.gguf' -md DIR/d.gguf"));
        assert!(vllm("/my models/a", false).starts_with("vllm serve '/my models/a' "));
        assert!(llamacpp("org/a").contains("-m TARGET.gguf "));
        assert!(llamacpp("org/a").ends_with("--spec-type c --spec-draft-n-max 3 --p 0"));
        let sglang = line(Profile::Sglang, "org/a", false, "sglang");
        assert!(sglang.contains(" --speculative-algorithm b "), "{sglang}");
        assert!(sglang.ends_with(" DIR --n 4"), "{sglang}");
    }
}
