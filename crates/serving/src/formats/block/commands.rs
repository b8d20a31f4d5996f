//! How each engine is told to serve a target with a block draft.

use std::collections::BTreeMap;

use longdraft_models::draft::block::BlockConfig;

use crate::Profile;
use crate::formats::Served;
use crate::hub_name::{HUB_NAME, loaded};

/// Command lines by engine; `DIR` stands for the exported folder. vLLM counts proposals, SGLang slots.
pub(super) fn for_profile(
    profile: Profile,
    [vllm, sglang, llamacpp]: [&str; 3],
    config: &BlockConfig,
    served: Served<'_>,
) -> BTreeMap<String, String> {
    let target = loaded(served.target, served.is_gguf);
    let proposals = config.proposals();
    let of_vllm = format!(
        "vllm serve {target} --speculative-config '{{\"method\": \"{vllm}\", \"model\": \"DIR\", \
         \"num_speculative_tokens\": {proposals}}}'"
    );
    let of_sglang = format!(
        "python3 -m sglang.launch_server --model-path {target} --speculative-algorithm {sglang} \
         --speculative-draft-model-path DIR --speculative-num-draft-tokens {}",
        config.block_size
    );
    let file = if target == HUB_NAME { served.target } else { "TARGET.gguf" };
    let (gguf, most) = (served.gguf, proposals);
    let of_llamacpp = if config.chain.is_some_and(|chain| chain.confidence.is_none()) {
        // Without a confidence there is nothing that could end a draft early.
        format!(
            "llama-server -m {file} -md DIR/{gguf} --spec-type {llamacpp} --spec-draft-n-max {most} \
             --spec-draft-p-min 0"
        )
    } else {
        format!(
            "llama-server -m {file} -md DIR/{gguf} --spec-type {llamacpp} --spec-draft-n-max {most}"
        )
    };
    let convert =
        "python3 convert_hf_to_gguf.py DIR --target-model-dir TARGET --outfile draft.gguf";
    let all = match profile {
        Profile::Vllm => vec![("vllm", of_vllm)],
        Profile::Sglang => vec![("sglang", of_sglang)],
        Profile::Hf => vec![("vllm", of_vllm), ("sglang", of_sglang)],
        Profile::LlamacppHf => vec![("llama.cpp", convert.to_owned())],
        Profile::Llamacpp => vec![("llama.cpp", of_llamacpp)],
        Profile::Speculators => vec![("vllm", "vllm serve DIR".to_owned())],
        Profile::Longspec => Vec::new(),
    };
    all.into_iter().map(|(engine, command)| (engine.to_owned(), command)).collect()
}
