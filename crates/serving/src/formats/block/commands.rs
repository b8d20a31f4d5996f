//! How each engine is told to serve a target with a block draft.

use std::collections::BTreeMap;

use longdraft_models::draft::block::BlockConfig;

use crate::Profile;
use crate::formats::Served;
use crate::hub_name::loaded;

/// Command lines by engine; `DIR` stands for the exported folder. vLLM counts proposals, SGLang slots.
pub(super) fn for_profile(
    profile: Profile,
    [vllm, sglang]: [&str; 2],
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
    let convert =
        "python3 convert_hf_to_gguf.py DIR --target-model-dir TARGET --outfile draft.gguf";
    let all = match profile {
        Profile::Vllm => vec![("vllm", of_vllm)],
        Profile::Sglang => vec![("sglang", of_sglang)],
        Profile::Hf => vec![("vllm", of_vllm), ("sglang", of_sglang)],
        Profile::LlamacppHf => vec![("llama.cpp", convert.to_owned())],
        _ => Vec::new(),
    };
    all.into_iter().map(|(engine, command)| (engine.to_owned(), command)).collect()
}
