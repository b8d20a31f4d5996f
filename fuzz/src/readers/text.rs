//! Tokenizers and chat templates.

use longdraft_models::tokenizer::{ChatTemplate, Message, SentencePieces, TextTokenizer};
use serde_json::{Map, Value, json};

use crate::fixtures::{CHAT_TEMPLATE, write_tokenizer};
use crate::scratch;

const TEXT: &str = "  the cat's mat\n\n<s>7 + 15 = 22 \u{e9}\u{1F600} \u{2581}ab<|im_start|>";

/// Encodes and decodes, as prompts and answers are.
pub(super) fn use_tokenizer(tokenizer: &TextTokenizer) {
    let mut ids = vec![0, 1, 3, 200, u32::MAX];
    if let Ok(encoded) = tokenizer.encode(TEXT) {
        ids.extend(encoded.ids);
    }
    let _ = (tokenizer.decode(&ids, false), tokenizer.decode(&ids, true));
    let mut stream = tokenizer.stream();
    for id in ids {
        let _ = (stream.push(id), tokenizer.token(id), tokenizer.is_special(id));
    }
    let _ = stream.finish();
    let _ = (tokenizer.special_ids(), tokenizer.is_byte_level(), tokenizer.fingerprint());
    if let Some(template) = tokenizer.chat_template() {
        use_template(template);
    }
}

/// Renders conversations, as training and serving do.
fn use_template(template: &ChatTemplate) {
    let turns = [("system", "be kind"), ("user", " hi\n"), ("assistant", "<b>"), ("user", "more")];
    let messages = turns.map(|(role, content)| Message::new(role, content));
    let _ = template.render(&messages, true);
    let fields = |message: &Message| -> Map<String, Value> {
        json!({"role": message.role, "content": message.content, "tool_calls": [{"n": 1}]})
            .as_object()
            .cloned()
            .unwrap_or_default()
    };
    let fields: Vec<_> = messages.iter().map(fields).collect();
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let _ = template.render_generated(&fields, Some(&tools));
}

fn folder(name: &str, file: &str, bytes: &[u8]) -> bool {
    let folder = scratch::folder_with(name, write_tokenizer, file, bytes);
    let Ok(tokenizer) = TextTokenizer::from_folder(&folder) else { return false };
    use_tokenizer(&tokenizer);
    true
}

/// Reads `tokenizer.json`.
pub(super) fn tokenizer_json(bytes: &[u8]) -> bool {
    folder("tokenizer", "tokenizer.json", bytes)
}

pub(super) fn tokenizer_files() -> Vec<Vec<u8>> {
    let vocabulary =
        json!({"<unk>": 0, "<s>": 1, "a": 2, "b": 3, "ab": 4, "\u{2581}": 5, "<0x41>": 6});
    let special = json!({
        "id": 1, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false
    });
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    });
    let bpe = json!({
        "type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]], "byte_fallback": true,
        "unk_token": "<unk>", "fuse_unk": false, "dropout": null, "ignore_merges": false
    });
    let unigram = json!({
        "type": "Unigram", "unk_id": 0, "byte_fallback": false,
        "vocab": [["<unk>", 0.0], ["a", -1.0], ["ab", -2.0], ["\u{2581}", -0.5]]
    });
    let word_piece = json!({
        "type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": vocabulary
    });
    let word_level = json!({"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"});
    let strip = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    ]});
    let metaspace = json!({
        "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true
    });
    let split = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\p{L}+|\\s+(?!\\S)|\\s+"}, "behavior": "Isolated",
         "invert": false},
        {"type": "Digits", "individual_digits": true}, byte_level
    ]});
    let normalizers = json!({"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Prepend", "prepend": "\u{2581}"}, {"type": "Lowercase"},
        {"type": "Strip", "strip_left": true, "strip_right": false},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    ]});
    let template = json!({
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    });
    let whole = |model: &Value, parts: [&Value; 4]| {
        let [normalizer, pre_tokenizer, post_processor, decoder] = parts;
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special],
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "post_processor": post_processor, "decoder": decoder, "model": model
        })
        .to_string()
        .into_bytes()
    };
    let none = Value::Null;
    vec![
        whole(&bpe, [&none, &byte_level, &none, &byte_level]),
        whole(&bpe, [&normalizers, &none, &template, &strip]),
        whole(&unigram, [&none, &metaspace, &none, &metaspace]),
        whole(
            &word_piece,
            [
                &normalizers,
                &split,
                &none,
                &json!({"type": "WordPiece",
            "prefix": "##", "cleanup": true}),
            ],
        ),
        whole(&word_level, [&none, &json!({"type": "Whitespace"}), &template, &none]),
    ]
}

/// Reads `tokenizer_config.json`, which may hold a chat template.
pub(super) fn tokenizer_config(bytes: &[u8]) -> bool {
    folder("tokenizer-config", "tokenizer_config.json", bytes)
}

pub(super) fn tokenizer_configs() -> Vec<Vec<u8>> {
    let token = json!({"content": "<s>", "special": true});
    let plain = json!({
        "add_bos_token": true, "bos_token": token, "eos_token": "</s>", "pad_token": null,
        "unk_token": "<unk>", "chat_template": CHAT_TEMPLATE
    });
    let named = json!([{"name": "default", "template": "{{ messages[0].content }}"}]);
    let list = json!({"chat_template": named});
    [plain, list].map(|config| config.to_string().into_bytes()).to_vec()
}

/// Reads a SentencePiece model.
pub(super) fn sentence_piece(bytes: &[u8]) -> bool {
    let path = scratch::file("tokenizer.model", bytes);
    let Ok(pieces) = SentencePieces::open(&path) else { return false };
    let _ = (pieces.control("<s>"), pieces.vocabulary());
    let Ok(tokenizer) = pieces.tokenizer() else { return false };
    use_tokenizer(&tokenizer);
    true
}

/// A SentencePiece model of a few pieces; `model_type` 1 is unigram, 2 is BPE.
pub(crate) fn sentence_piece_model(model_type: u8, characters: Option<&[u8]>) -> Vec<u8> {
    let field = |number: u8, bytes: &[u8]| {
        let mut out = vec![number << 3 | 2];
        let mut length = bytes.len();
        while length > 127 {
            out.push(length as u8 | 0x80);
            length >>= 7;
        }
        out.push(length as u8);
        out.extend(bytes);
        out
    };
    let piece = |text: &str, score: f32, kind: u8| {
        let mut out = field(1, text.as_bytes());
        out.push(2 << 3 | 5);
        out.extend(score.to_le_bytes());
        out.extend([3 << 3, kind]);
        field(1, &out)
    };
    let pieces = [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("</s>", 0.0, 3),
        ("<0x0A>", 0.0, 6),
        ("<|im_start|>", 0.0, 4),
        ("\u{2581}", -1.0, 1),
        ("a", -2.0, 1),
        ("b", -3.0, 1),
        ("ab", -0.5, 1),
        ("\u{2581}ab", -0.25, 1),
    ];
    let mut out: Vec<u8> =
        pieces.into_iter().flat_map(|(text, score, kind)| piece(text, score, kind)).collect();
    out.extend(field(2, &[3 << 3, model_type]));
    let mut normalizer = characters.map(|map| field(2, map)).unwrap_or_default();
    normalizer.extend([3 << 3, 1, 4 << 3, 1]);
    out.extend(field(3, &normalizer));
    out
}

pub(super) fn sentence_piece_models() -> Vec<Vec<u8>> {
    vec![sentence_piece_model(1, None), sentence_piece_model(2, None)]
}

/// Compiles a chat template and renders conversations with it.
pub(super) fn chat_template(bytes: &[u8]) -> bool {
    let Ok(source) = std::str::from_utf8(bytes) else { return false };
    let tokens = Map::from_iter([("bos_token".to_owned(), Value::from("<s>"))]);
    let Ok(template) = ChatTemplate::new(source, tokens) else { return false };
    use_template(&template);
    true
}

pub(super) fn chat_templates() -> Vec<Vec<u8>> {
    let tools = "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}\
        {% for m in messages if m.role != 'system' %}{% if loop.first %}{{ bos_token }}{% endif %}\
        {% set ns = namespace(n=0) %}{% set ns.n = ns.n + m.content.split(' ') | length %}\
        {%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{% endgeneration %}\
        {% else %}{{ m['content'] ~ '\\n' * 2 }}{% endif %}{% endfor %}";
    let refusing = "{% macro show(m, n=1) %}{{ m.role.upper() }}: {{ m.content[:20] }}{% endmacro %}\
        {% if messages | length > 9 %}{{ raise_exception('too many') }}{% endif %}\
        {% for i in range(0, messages | length, 2) %}{{ show(messages[i]) }}\
        {{ '%s' | format(i) }}{{ messages | map(attribute='role') | join(', ') }}{% endfor %}\
        {{ messages | selectattr('role', 'equalto', 'user') | list | batch(2) | list }}";
    [CHAT_TEMPLATE, tools, refusing].map(|source| source.as_bytes().to_vec()).to_vec()
}
