//! How each engine is told to serve a target with an EAGLE-3 draft.

use std::collections::BTreeMap;

use crate::Profile;
use crate::hub_name::{HUB_NAME, loaded};

/// Command lines by engine; `DIR` stands for the exported folder.
pub(super) fn for_profile(
    profile: Profile,
    (name, is_gguf): (&str, bool),
    draft_len: usize,
    gguf: &str,
) -> BTreeMap<String, String> {
    let loaded = loaded(name, is_gguf);
    let vllm = format!(
        "vllm serve {loaded} --speculative-config '{{\"method\": \"eagle3\", \"model\": \"DIR\", \
         \"num_speculative_tokens\": {draft_len}}}'"
    );
    let sglang = format!(
        "python3 -m sglang.launch_server --model-path {loaded} --speculative-algorithm EAGLE3 \
         --speculative-draft-model-path DIR --speculative-num-steps {draft_len} \
         --speculative-eagle-topk 1 --speculative-num-draft-tokens {}",
        draft_len + 1
    );
    let llamacpp = format!(
        "llama-server -m {} -md DIR/{gguf} --spec-type draft-eagle3 --spec-draft-n-max \
         {draft_len}",
        if loaded == HUB_NAME { name } else { "TARGET.gguf" }
    );
    let convert =
        "python3 convert_hf_to_gguf.py DIR --target-model-dir TARGET --outfile draft.gguf";
    let mut all = BTreeMap::new();
    let mut add = |engine: &str, command: String| all.insert(engine.to_owned(), command);
    match profile {
        Profile::Vllm => {
            add("vllm", vllm);
        }
        Profile::Speculators => {
            add("vllm", "vllm serve DIR".into());
        }
        Profile::Sglang => {
            add("sglang", sglang);
        }
        Profile::Hf => {
            add("vllm", vllm);
            add("sglang", sglang);
        }
        Profile::Llamacpp => {
            add("llama.cpp", llamacpp);
        }
        Profile::LlamacppHf => {
            add("llama.cpp", convert.into());
        }
        Profile::Longspec => {}
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_given_a_target_that_they_can_load() {
        let vllm =
            |name, is_gguf| for_profile(Profile::Vllm, (name, is_gguf), 3, "")["vllm"].clone();
        assert!(vllm("/models/a.gguf", true).starts_with("vllm serve ORG/NAME "));
        assert!(vllm("org/a", true).starts_with("vllm serve org/a "));
        assert!(vllm("/models/a", false).starts_with("vllm serve /models/a "));
        let llamacpp =
            |name| for_profile(Profile::Llamacpp, (name, true), 3, "d.gguf")["llama.cpp"].clone();
        assert!(llamacpp("/models/a.gguf").contains("-m /models/a.gguf -md DIR/d.gguf"));
        assert!(llamacpp("org/a").contains("-m TARGET.gguf "));
    }
}
