//! How each engine is told to serve a target with a draft.

use std::collections::BTreeMap;

use crate::Profile;

/// Command lines by engine; `DIR` stands for the exported folder.
pub fn for_profile(
    profile: Profile,
    target: &str,
    draft_len: usize,
    gguf: &str,
) -> BTreeMap<String, String> {
    let vllm = format!(
        "vllm serve {target} --speculative-config '{{\"method\": \"eagle3\", \"model\": \"DIR\", \
         \"num_speculative_tokens\": {draft_len}}}'"
    );
    let sglang = format!(
        "python3 -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \
         --speculative-draft-model-path DIR --speculative-num-steps {draft_len} \
         --speculative-eagle-topk 1 --speculative-num-draft-tokens {}",
        draft_len + 1
    );
    let llamacpp = format!(
        "llama-server -m TARGET.gguf -md DIR/{gguf} --spec-type draft-eagle3 --spec-draft-n-max \
         {draft_len}"
    );
    let convert =
        "python3 convert_hf_to_gguf.py DIR --target-model-dir TARGET --outfile draft.gguf";
    let own = format!("longdraft generate --target {target} --draft DIR --prompt TEXT");
    let mut all = BTreeMap::from([("longdraft".to_owned(), own)]);
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
