//! Memory of small trainings beside what is planned.

use super::*;

#[test]
fn glide_takes_the_memory_that_is_planned() {
    assert_close("online", Shop::new().memory(&[]));
}

#[test]
fn glide_over_stored_features_takes_the_memory_that_is_planned() {
    let shop = Shop::new();
    let (config, place) =
        (shop.path("train.yaml"), format!("train.features={}", shop.path("store")));
    succeed(&["capture", &config, &place]);
    assert_close("offline", shop.memory(&[&place]));
}

#[test]
fn accumulated_rows_take_the_memory_that_is_planned() {
    assert_close("three rows", Shop::new().memory(&["train.rows_per_step=3", "train.steps=1"]));
}

#[test]
fn eagle3_takes_the_memory_that_is_planned() {
    assert_close("online", Shop::new().memory(&EAGLE3));
}

#[test]
fn eagle3_holding_a_step_takes_the_memory_that_is_planned() {
    let more = ["train.rows_per_step=6", "draft.ttt_steps=2", "train.steps=1"];
    assert_close("six rows held", Shop::new().memory(&[&EAGLE3[..], &more].concat()));
}

#[test]
fn eagle3_over_stored_features_takes_the_memory_that_is_planned() {
    let shop = Shop::new();
    let (config, place) =
        (shop.path("train.yaml"), format!("train.features={}", shop.path("store")));
    let more = [&EAGLE3[..], &[&place]].concat();
    succeed(&[&["capture", &config][..], &more].concat());
    assert_close("offline", shop.memory(&more));
}

#[test]
fn features_kept_in_memory_are_counted_once_the_rows_are_known() {
    let shop = Shop::new();
    let more = ["train.features=memory", "teacher.soft_targets=top_k", "teacher.top_k=8"];
    let config = shop.path("train.yaml");
    let text = succeed(&[&["train", &config, "--plan", "--gflops", "10"][..], &more].concat());
    let further = text.find("more for every further training row: `train.features: memory`");
    assert!(further.is_some() && further < text.find("decoding later caches"), "{text}");
    assert!(text.contains(" GFLOP a rank, "), "{text}");
}

#[test]
fn block_drafts_take_the_memory_that_is_planned() {
    let blocks = [
        "draft.layers=2",
        "draft.target_layers=[0,2]",
        "draft.blocks_per_row=64",
        "data.row_tokens=2048",
        "train.steps=1",
    ];
    let divergence = ["draft.soft_weight=1", "draft.loss=jsd", "draft.blocks_per_row=256"];
    let chain = ["draft.markov_rank=64", "draft.block_size=16", "draft.markov_head=rnn"];
    for (name, method, more) in [
        ("a step held", "dflash", &["draft.slot_weights=dpace", "train.rows_per_step=6"][..]),
        ("decay", "dflash", &[]),
        ("blocks by tokens", "dflash", &["draft.blocks_per_row=null", "draft.tokens_per_block=16"]),
        ("the target's distribution", "dflash", &["draft.soft_weight=0.8", "data.row_tokens=1024"]),
        ("its best tokens", "dflash", &["draft.soft_weight=1", "teacher.soft_targets=top_k"]),
        ("a divergence of whole distributions", "dflash", &divergence),
        ("a selector", "dflash2", &["draft.selector_rank=64"]),
        ("a chain", "dspark", &chain[..2]),
        ("a chain with a state", "dspark", &chain),
    ] {
        let method = format!("draft.method={method}");
        assert_close(name, Shop::new().memory(&[&blocks[..], &[&method], more].concat()));
    }
}

/// A short run of a small language model of either architecture.
#[test]
fn pretraining_takes_the_memory_that_is_planned() {
    for (architecture, rope) in [("llama", "{rule: none}"), ("baseline", "{}")] {
        let shop = Shop::new();
        let shard = shop.path("train.bin");
        let tokens: Vec<u16> = (0..40_000_u32).map(|i| (i * i % 250) as u16).collect();
        longdraft_data::token_stream::write_shard(Path::new(&shard), &tokens).expect("shard");
        let yaml = format!(
            "output: {}\nmodel: {{architecture: {architecture}, vocab_size: 258, num_hidden_layers: 3, \
             hidden_size: 256, num_attention_heads: 4, num_key_value_heads: 2, rope: {rope}}}\n\
             data: {{train: [{shard}], row_tokens: 512}}\ntrain: {{steps: 2, tokens_per_step: 8192, \
             micro_batch_tokens: 4096}}\n",
            shop.path("run")
        );
        let config = shop.path("pretrain.yaml");
        std::fs::write(&config, yaml).expect("config");
        let plan = plan(&["lm", "train", &config, "--json"], 1);
        let mut command = longdraft(&["lm", "train", &config, "--json"]);
        let output = succeeded(finished(exact_allocator(&mut command)));
        let answer = last_json(&stdout(&output));
        let measured = answer["peak_memory_mib"].as_f64().expect("Linux tells");
        assert_close(architecture, (mib(&plan["bytes"]), measured));
    }
}
