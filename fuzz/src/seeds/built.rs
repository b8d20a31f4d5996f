//! Inputs that once did harm and are long, or a valid input with a change.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use crate::readers::blocks::{Entry, file, large_blocks, small_blocks};
use crate::readers::{READERS, other_export_configs, sentence_piece_model};

type Named = (&'static str, Vec<u8>);

/// The built seeds of a reader.
pub(super) fn of(name: &str) -> Vec<Named> {
    match name {
        "pickle" => pickles(),
        "configuration" => configurations(),
        "gguf" => gguf_files(),
        "target_config" => target_configs(),
        "hybrid_config" => hybrid_configs(),
        "eagle3_config" => changed_configs(name, EAGLE3_SIZES),
        "glide_config" => changed_configs(name, GLIDE_SIZES),
        "sentence_piece" => sentence_piece_models(),
        "tokenizer_json" => tokenizers(),
        "chat_template" => chat_templates(),
        "export_config" => {
            ["of-sglang", "of-speculators"].into_iter().zip(other_export_configs()).collect()
        }
        _ => Vec::new(),
    }
}

fn valid(name: &str) -> Vec<u8> {
    let reader = READERS.iter().find(|reader| reader.name == name).expect("a reader");
    (reader.valid)().remove(0)
}

/// Lists and dicts that grow while the memo holds them: copies of the whole for every item.
fn pickles() -> Vec<Named> {
    const ITEMS: usize = 300_000;
    let grown = |start: &[u8], item: &[u8]| [start, &item.repeat(ITEMS), b"."].concat();
    vec![
        ("append", grown(b"\x80\x02]", b"Na")),
        ("append-to-a-remembered-list", grown(b"\x80\x02]q\0", b"Na")),
        ("extend-a-remembered-list", grown(b"\x80\x02]q\0", b"(Ne")),
        ("set-items-of-a-remembered-dict", grown(b"\x80\x02}q\0", b"NNs")),
        ("remember-every-list", grown(b"\x80\x02]", b"\x94Na")),
    ]
}

/// References that double, a chain of them, and keys of very many parts.
fn configurations() -> Vec<Named> {
    const SMALL: &str = "target: a/b\noutput: x\ndata: {train: [{path: rows.jsonl}]}\n";
    let doubling: String = (0..40).map(|i| format!("k{}: ${{k{i}}}${{k{i}}}\n", i + 1)).collect();
    let maps: String =
        (0..40).map(|i| format!("k{}: {{a: ${{k{i}}}, b: ${{k{i}}}}}\n", i + 1)).collect();
    let chain: String = (0..20_000).map(|i| format!("k{}: ${{k{i}}}\n", i + 1)).collect();
    let key = vec!["a"; 15_000].join(".");
    let nested = |open: &str, close: &str| {
        format!("{SMALL}x: {}1{}\n", open.repeat(20_000), close.repeat(20_000))
    };
    let bytes = |text: String| text.into_bytes();
    vec![
        ("doubling-references", bytes(format!("{SMALL}k0: abcdefgh\n{doubling}"))),
        ("doubling-maps", bytes(format!("{SMALL}k0: {{c: 1}}\n{maps}"))),
        ("chain-of-references", bytes(format!("{SMALL}k0: 1\n{chain}"))),
        ("reference-of-references", bytes(format!("{SMALL}x: {}\n", "${".repeat(20_000)))),
        ("override-of-many-parts", bytes(format!("{SMALL}\0{key}=1"))),
        ("added-override-of-many-parts", bytes(format!("{SMALL}\0+{key}=1"))),
        ("removed-override-of-many-parts", bytes(format!("{SMALL}\0~{key}"))),
        ("override-of-nested-lists", bytes(format!("{SMALL}\0output={}", "[".repeat(20_000)))),
        ("nested-lists", bytes(nested("[", "]"))),
        ("nested-maps", bytes(nested("{a: ", "}"))),
        ("reference-of-many-parts", bytes(format!("{SMALL}x: ${{{key}}}\n"))),
        ("climbing-reference", bytes(format!("{SMALL}x: ${{{}a}}\n", ".".repeat(20_000)))),
    ]
}

/// `bytes` with the 4 bytes after `key` and a type of u32 replaced.
fn with_number(bytes: &[u8], key: &str, number: u32) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let place = bytes.windows(key.len()).position(|window| window == key.as_bytes());
    let at = place.expect("the key is there") + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn gguf_files() -> Vec<Named> {
    let whole = valid("gguf");
    let mut named = vec![
        ("no-alignment", with_number(&whole, "general.alignment", 0)),
        ("odd-alignment", with_number(&whole, "general.alignment", 3)),
        ("large-alignment", with_number(&whole, "general.alignment", u32::MAX)),
        ("very-many-layers", with_number(&whole, "llama.block_count", 1 << 24)),
        ("no-heads", with_number(&whole, "llama.attention.head_count", 0)),
        ("wide", with_number(&whole, "llama.embedding_length", u32::MAX)),
    ];
    for (name, part) in [("cut-in-tokens", 8), ("cut-in-tensors", 2), ("cut-at-the-start", 400)] {
        named.push((name, whole[..whole.len() / part].to_vec()));
    }
    named.extend(files_of_blocks());
    named
}

/// Blocks of every type that are cut, of another size than their tensor, or of impossible scales.
fn files_of_blocks() -> Vec<Named> {
    type Change = fn(&mut Entry);
    let changed = |change: Change, entries: fn() -> Vec<Entry>| {
        let mut entries = entries();
        // Norms come last and are no blocks.
        entries.iter_mut().filter(|entry| entry.element != 0).for_each(change);
        file(&entries)
    };
    let changes: [([&'static str; 2], Change); 9] = [
        (["large-blocks-of-ones", "small-blocks-of-ones"], |entry| entry.bytes.fill(0xFF)),
        (["large-blocks-of-zeros", "small-blocks-of-zeros"], |entry| entry.bytes.fill(0)),
        (["infinite-large-blocks", "infinite-small-blocks"], |entry| alternate(entry, 0x7C00)),
        (["large-blocks-of-least", "small-blocks-of-least"], |entry| alternate(entry, 0xFC00)),
        (["large-blocks-without-their-last-byte", "small-blocks-without-their-last-byte"], |e| {
            e.bytes.pop();
        }),
        (["half-of-large-blocks", "half-of-small-blocks"], |entry| {
            entry.bytes.truncate(entry.bytes.len() / 2);
        }),
        (["rows-of-parts-of-large-blocks", "rows-of-parts-of-small-blocks"], |entry| {
            entry.sizes[0] += 16;
        }),
        (["large-blocks-without-rows", "small-blocks-without-rows"], |entry| entry.sizes[1] = 0),
        (["large-blocks-of-absurd-rows", "small-blocks-of-absurd-rows"], |entry| {
            entry.sizes[1] = u64::MAX / 256;
        }),
    ];
    let both = |([large, small], change): ([&'static str; 2], Change)| {
        [(large, changed(change, large_blocks)), (small, changed(change, small_blocks))]
    };
    let of_types = [
        ("blocks-as-q8-k", 15),
        ("blocks-as-iq2-xxs", 16),
        ("blocks-as-nvfp4", 40),
        ("blocks-as-f32", 0),
        ("blocks-as-q6-k", 14),
        ("blocks-as-mxfp4", 39),
    ];
    let of_type = |(name, element): (&'static str, u32)| {
        let mut entries = large_blocks();
        entries.iter_mut().for_each(|entry| entry.element = element);
        (name, file(&entries))
    };
    let mut whole = file(&large_blocks());
    whole.truncate(whole.len() - 200);
    let cut = [("cut-in-the-last-blocks", whole)];
    changes.into_iter().flat_map(both).chain(of_types.map(of_type)).chain(cut).collect()
}

/// The same 16 bits over and over.
fn alternate(entry: &mut Entry, bits: u16) {
    let bytes = bits.to_le_bytes().into_iter().cycle();
    entry.bytes.iter_mut().zip(bytes).for_each(|(byte, bits)| *byte = bits);
}

/// The first valid configuration with other values.
fn changed(name: &str, changes: Value) -> Vec<u8> {
    let mut config: Value = serde_json::from_slice(&valid(name)).expect("JSON");
    let Value::Object(changes) = changes else { panic!("no keys: {changes}") };
    config.as_object_mut().expect("keys").extend(changes);
    config.to_string().into_bytes()
}

const LARGEST: u64 = 1 << 24;

fn target_configs() -> Vec<Named> {
    let of = |changes: Value| changed("target_config", changes);
    vec![
        ("very-many-layers", of(json!({"num_hidden_layers": LARGEST}))),
        (
            "very-many-experts",
            of(json!({"model_type": "mixtral", "num_local_experts": LARGEST,
                      "num_experts_per_tok": 2})),
        ),
        (
            "layers-of-experts",
            of(json!({"model_type": "qwen3_moe", "num_hidden_layers": 1 << 16,
                      "num_experts": 1 << 16, "num_experts_per_tok": 2, "moe_intermediate_size": 4})),
        ),
        (
            "very-many-windows",
            of(json!({"model_type": "gemma3_text", "num_hidden_layers": LARGEST})),
        ),
        ("long-window", of(json!({"model_type": "mistral", "sliding_window": 1_u64 << 60}))),
        (
            "kinds-of-other-layers",
            of(json!({"model_type": "gemma2", "layer_types": ["sliding_attention", 7]})),
        ),
        ("scale-of-nothing", of(json!({"model_type": "gemma2", "query_pre_attn_scalar": 1e-300}))),
        (
            "growth-beyond-numbers",
            of(json!({"model_type": "ministral3", "rope_parameters": {
                "rope_type": "default", "llama_4_scaling_beta": 1e300,
                "original_max_position_embeddings": 1}})),
        ),
        (
            "divisors-of-other-heads",
            of(json!({"model_type": "phi3", "partial_rotary_factor": 1e-9, "rope_scaling": {
                "type": "longrope", "short_factor": [0.0], "long_factor": [1e300]}})),
        ),
        (
            "groups-of-no-experts",
            of(json!({"model_type": "glm4_moe", "n_routed_experts": 1_u64 << 40,
                      "moe_intermediate_size": 4, "num_experts_per_tok": 2, "n_group": 0,
                      "n_shared_experts": u64::MAX, "first_k_dense_replace": u64::MAX})),
        ),
        (
            "unbounded-units",
            of(json!({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
                      "swiglu_limit": 1e300, "sliding_window": 0})),
        ),
        (
            "layers-of-no-chunks",
            of(json!({"model_type": "llama4_text", "intermediate_size_mlp": 16,
                      "attention_chunk_size": 0, "interleave_moe_layer_step": 0,
                      "moe_layers": [1_u64 << 40], "no_rope_layers": [1, 2, "x"]})),
        ),
        (
            "multipliers-of-nothing",
            of(
                json!({"model_type": "granite", "attention_multiplier": 1e-300, "logits_scaling": 0}),
            ),
        ),
        ("wide-heads", of(json!({"head_dim": 1_u64 << 32}))),
        ("long-context", of(json!({"max_position_embeddings": u64::MAX}))),
        ("wide", of(json!({"hidden_size": LARGEST, "num_attention_heads": LARGEST}))),
    ]
}

/// Sizes of recurrent layers, of latent rows, of shared keys.
fn hybrid_configs() -> Vec<Named> {
    let of = |changes: Value| changed("hybrid_config", changes);
    let of_model =
        |name: &str, key: &str, value: Value| of(json!({"model_type": name, key: value}));
    vec![
        ("no-key-heads", of(json!({"linear_num_key_heads": 0}))),
        ("key-heads-that-do-not-divide", of(json!({"linear_num_key_heads": 3}))),
        ("very-many-value-heads", of(json!({"linear_num_value_heads": LARGEST}))),
        ("wide-states", of(json!({"linear_key_head_dim": LARGEST}))),
        ("long-convolution", of(json!({"linear_conv_kernel_dim": LARGEST}))),
        ("no-convolution", of(json!({"linear_conv_kernel_dim": 0}))),
        ("no-interval", of(json!({"full_attention_interval": 0}))),
        ("nothing-turned", of(json!({"partial_rotary_factor": 1e-9}))),
        ("very-many-layers", of(json!({"num_hidden_layers": LARGEST}))),
        ("long-short-convolution", of_model("lfm2", "conv_L_cache", json!(LARGEST))),
        ("layers-that-do-not-attend", of_model("lfm2", "full_attn_idxs", json!([]))),
        ("wide-latent-rows", of_model("deepseek_v3", "kv_lora_rank", json!(LARGEST))),
        ("no-groups", of_model("deepseek_v3", "n_group", json!(0))),
        ("all-keys-shared", of_model("gemma4_text", "num_kv_shared_layers", json!(LARGEST))),
        ("wide-inputs", of_model("gemma4_text", "hidden_size_per_layer_input", json!(LARGEST))),
    ]
}

const EAGLE3_SIZES: &[(&str, &str)] = &[
    ("wide-heads", "head_dim"),
    ("very-many-heads", "num_attention_heads"),
    ("wide", "hidden_size"),
    ("very-wide-layer", "intermediate_size"),
    ("large-vocabulary", "vocab_size"),
    ("large-draft-vocabulary", "draft_vocab_size"),
    ("very-many-layers", "num_hidden_layers"),
    ("long-context", "max_position_embeddings"),
];

const GLIDE_SIZES: &[(&str, &str)] = &[
    ("large-window", "self_window"),
    ("long-drafts", "gamma"),
    ("wide-heads", "head_dim"),
    ("very-many-heads", "num_attention_heads"),
    ("very-wide-layer", "intermediate_size"),
];

/// The valid configuration with one size far too large, and with it 2^32.
fn changed_configs(name: &str, sizes: &[(&'static str, &str)]) -> Vec<Named> {
    let of = |size: u64| {
        move |&(named, key): &(&'static str, &str)| (named, changed(name, json!({key: size})))
    };
    let larger = sizes.iter().map(of(1 << 32)).map(|(named, bytes)| match named {
        "wide-heads" => ("heads-of-32-bits", bytes),
        "large-window" => ("window-of-32-bits", bytes),
        _ => ("", bytes),
    });
    sizes.iter().map(of(LARGEST)).chain(larger.filter(|(named, _)| !named.is_empty())).collect()
}

/// Tables of replaced characters that are none.
fn sentence_piece_models() -> Vec<Named> {
    let of = |table: &[u8]| sentence_piece_model(1, Some(table));
    let trie = |size: u32, unit: u32| {
        let mut table = size.to_le_bytes().to_vec();
        table.extend(unit.to_le_bytes().repeat(size as usize / 4));
        table.extend(b"a\0bc\0");
        table
    };
    vec![
        ("table-of-one-byte", of(&[1])),
        ("table-that-ends-early", of(&[0xFF; 20])),
        ("table-without-units", of(&[0; 8])),
        // 2^31 bytes are 4 GiB of units, 2^28 are 512 MiB.
        ("table-of-gigabytes", of(&[&0x7FFF_FFFF_u32.to_le_bytes()[..], &[0; 64]].concat())),
        ("table-of-half-a-gigabyte", of(&[&(1_u32 << 28).to_le_bytes()[..], &[0; 64]].concat())),
        ("table-of-zeros", of(&trie(64, 0))),
        ("table-of-ones", of(&trie(64, u32::MAX))),
        ("table-that-leads-out", of(&trie(64, 0x7FFF_FF00))),
        ("table-of-leaves", of(&trie(1024, 0x8000_0100))),
        ("table-that-points-beyond-its-texts", of(&trie(1024, 0x0000_0541))),
    ]
}

fn tokenizers() -> Vec<Named> {
    let with = |key: &str, part: Value| changed("tokenizer_json", json!({key: part}));
    let strip = |start: u64, stop: u64| {
        let strip = json!({"type": "Strip", "content": "a", "start": start, "stop": stop});
        with("decoder", strip)
    };
    let truncation = |length: u64, stride: u64| {
        let part = json!({"direction": "Right", "max_length": length,
                          "strategy": "LongestFirst", "stride": stride});
        with("truncation", part)
    };
    let padding = |length: u64| {
        with(
            "padding",
            json!({"strategy": {"Fixed": length}, "direction": "Right",
            "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}),
        )
    };
    let map = |size: u32| {
        let map = BASE64.encode([&size.to_le_bytes()[..], &[0; 64]].concat());
        with("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": map}))
    };
    vec![
        ("map-of-gigabytes", map(0x7FFF_FFFF)),
        ("map-of-half-a-gigabyte", map(1 << 28)),
        ("strip-more-than-is-there", strip(0, 5)),
        ("strip-more-than-memory", strip(u64::from(u32::MAX), u64::from(u32::MAX))),
        ("truncation-to-nothing", truncation(0, 0)),
        ("stride-of-all", truncation(2, 2)),
        ("padding-of-gigabytes", padding(1 << 40)),
        (
            "split-by-backtracking",
            with(
                "pre_tokenizer",
                json!({"type": "Split",
            "pattern": {"Regex": "(?=((.*)*)*)\\1(x+x+)+y"}, "behavior": "Isolated", "invert": false}),
            ),
        ),
        (
            "cut-to-chunks-of-none",
            with("pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
        ),
    ]
}

/// Templates that nest very deeply.
fn chat_templates() -> Vec<Named> {
    const DEPTH: usize = 20_000;
    let around = |open: &str, inner: &str, close: &str| {
        format!("{{{{ {}{inner}{} }}}}", open.repeat(DEPTH), close.repeat(DEPTH)).into_bytes()
    };
    vec![
        ("deep-expression", around("(", "1", ")")),
        ("deep-list", around("[", "", "]")),
        ("deep-negation", around("not ", "1", "")),
        ("deep-condition", "{% if 1 %}".repeat(DEPTH).into_bytes()),
        ("deep-loops", "{% for i in [1] %}".repeat(DEPTH).into_bytes()),
    ]
}
