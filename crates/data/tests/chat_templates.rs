//! Loss masks under the kinds of chat templates that models ship: what is learned is what the
//! assistant said, with its end of turn, and nothing else.

use std::ops::Range;

use longdraft_data::TextEncoder;
use longdraft_data::conversation::Conversation;
use longdraft_data::template::chat::{ChatLayout, Turns};
use longdraft_models::tokenizer::ChatTemplate;
use proptest::prelude::*;
use serde_json::{Map, json};

/// Contents as they are; a system turn of its own when none is given.
const CHATML: &str = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Contents trimmed, no white space after a turn.
const LLAMA3: &str = "{{ bos_token }}{% for m in messages %}\
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";

/// Thinking is kept after the last question only; the last turn always has a thinking block;
/// tool calls and their results.
const QWEN3: &str = "{% set ns = namespace(last=0) %}\
{% for m in messages %}{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}\
{% for m in messages %}\
{% if m.role == 'assistant' %}\
{% set content = m.content %}{% set thought = '' %}\
{% if m.reasoning_content %}{% set thought = m.reasoning_content %}\
{% elif '</think>' in content %}{% set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\
{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}\
{{ '<|im_start|>assistant\\n' }}\
{% if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{% else %}{{ content }}{% endif %}\
{% for call in m.tool_calls or [] %}{% set call = call.function or call %}{{ '\\n<tool_call>\\n{\"name\": \"' + call.name + '\", \"arguments\": ' }}{{ call.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}\
{{ '<|im_end|>\\n' }}\
{% elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}\
{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Instructions in brackets, no words of the template before an answer.
const LLAMA2: &str = "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>' + messages[0].content + '<</SYS>>' %}{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}\
{% for m in rest %}{% if m.role == 'user' %}{{ '<s>[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' </s>' }}{% endif %}{% endfor %}";

/// The generation prompt opens a thought that finished turns do not show.
const R1: &str = "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<A>' + m.content.split('</think>')[-1] + '<end>' }}{% else %}{{ '<U>' + m.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<A><think>\\n' }}{% endif %}";

/// Looks at how contents begin.
const PREFIX_TEST: &str = "{% for m in messages %}{% if m.content.startswith('!') %}{{ '[' + m.role + '/loud]' }}{% else %}{{ '[' + m.role + ']' }}{% endif %}{{ m.content }}{{ '#' }}{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}";

/// The prompt opens a thought, which is shown of the last turn alone.
const THINKS: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{% if m.role == 'assistant' %}{% set rest = m.content.split('</think>')[-1].lstrip('\\n') %}\
{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}\
{% if loop.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' + rest }}{% else %}{{ rest }}{% endif %}\
{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}";

/// A mark of its own ends the whole text.
const PHI: &str = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}";

struct Bytes(ChatTemplate);

impl Bytes {
    fn new(template: &str) -> Self {
        let mut tokens = Map::new();
        tokens.insert("bos_token".into(), "<|begin_of_text|>".into());
        Self(ChatTemplate::new(template, tokens).expect("a template"))
    }

    fn locate(&self, conversation: &Conversation) -> Result<Turns, String> {
        ChatLayout::probe(self)?.locate(conversation, self)
    }

    /// The learned texts of a conversation.
    #[track_caller]
    fn learned(&self, conversation: &Conversation) -> Vec<String> {
        let turns = self.locate(conversation).expect("turns");
        texts(&turns.text, &turns.assistant)
    }
}

fn texts(text: &str, ranges: &[Range<usize>]) -> Vec<String> {
    ranges.iter().map(|range| text[range.clone()].to_owned()).collect()
}

impl TextEncoder for Bytes {
    fn encode(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>), String> {
        Ok((text.bytes().map(u32::from).collect(), (0..text.len()).map(|i| i..i + 1).collect()))
    }

    fn render_chat(&self, conversation: &Conversation, prompt: bool) -> Result<String, String> {
        self.0
            .render_messages(&conversation.messages, conversation.tools.as_ref(), prompt)
            .map_err(|error| error.to_string())
    }

    fn chat_fingerprint(&self) -> Option<String> {
        Some("a template".to_owned())
    }

    fn end_of_text(&self) -> Option<u32> {
        None
    }

    fn vocabulary(&self) -> usize {
        256
    }

    fn fingerprint(&self) -> String {
        String::new()
    }
}

fn dialogue() -> Conversation {
    Conversation::of(&[("user", " a\n"), ("assistant", " b "), ("user", "c"), ("assistant", "d")])
}

#[test]
fn the_words_around_turns_are_found() {
    let layout = |template: &str| ChatLayout::probe(&Bytes::new(template)).expect("layout");
    let words = |template: &str| {
        let found = layout(template);
        (found.assistant_header, found.end_of_turn)
    };
    let found = layout(CHATML);
    assert_eq!(found.assistant_header, "<|im_start|>assistant\n");
    assert_eq!(found.end_of_turn, "<|im_end|>");
    assert_eq!(found.user_header, "<|im_start|>user\n");
    assert_eq!(layout(QWEN3), found);
    let header = "<|start_header_id|>assistant<|end_header_id|>\n\n";
    assert_eq!(words(LLAMA3), (header.to_owned(), "<|eot_id|>".to_owned()));
    assert_eq!(words(LLAMA2), (" [/INST]".to_owned(), " </s>".to_owned()));
    assert_eq!(words(R1), ("<A>".to_owned(), "<end>".to_owned()));
    assert!(ChatLayout::probe(&Bytes::new("nothing")).is_err());
}

#[test]
fn assistant_turns_are_learned_with_their_end_and_without_their_header() {
    assert_eq!(Bytes::new(CHATML).learned(&dialogue()), [" b <|im_end|>", "d<|im_end|>"]);
    assert_eq!(Bytes::new(LLAMA3).learned(&dialogue()), ["b<|eot_id|>", "d<|eot_id|>"]);
    assert_eq!(Bytes::new(LLAMA2).learned(&dialogue()), [" b </s>", " d </s>"]);
    // The empty thinking block of the last turn belongs to the prompt.
    assert_eq!(Bytes::new(QWEN3).learned(&dialogue()), [" b <|im_end|>", "d<|im_end|>"]);
    let system = Conversation::of(&[("system", "s"), ("user", "a"), ("assistant", "b")]);
    assert_eq!(Bytes::new(LLAMA2).learned(&system), [" b </s>"]);
    let empty = Conversation::of(&[("user", "a"), ("assistant", ""), ("assistant", "b")]);
    assert_eq!(Bytes::new(CHATML).learned(&empty), ["<|im_end|>", "b<|im_end|>"]);
}

#[test]
fn system_turns_are_given_or_added_and_found_either_way() {
    let kept = |template: &str, conversation: &Conversation| {
        let turns = Bytes::new(template).locate(conversation).expect("turns");
        texts(&turns.text, &turns.without_system()).concat()
    };
    let rest = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n";
    let plain = Conversation::of(&[("user", "a"), ("assistant", "b")]);
    let system = Conversation::of(&[("system", "s"), ("user", "a"), ("assistant", "b")]);
    for conversation in [&plain, &system] {
        assert_eq!(kept(CHATML, conversation), rest);
        assert_eq!(kept(QWEN3, conversation), rest.replace("\nb", "\n<think>\n\n</think>\n\nb"));
    }
    let late = Conversation::of(&[("user", "a"), ("system", "s"), ("assistant", "b")]);
    assert_eq!(kept(CHATML, &late), rest);
    let text = kept(LLAMA3, &system);
    assert!(text.starts_with("<|start_header_id|>user") && text.ends_with("b<|eot_id|>"), "{text}");
}

#[test]
fn dropped_thinking_is_absent_and_kept_thinking_is_learned() {
    let thought = "<think>\nhm\n</think>\n\n";
    let (b, d) = (format!("{thought}b"), format!("{thought}d"));
    let turns = [("user", "a"), ("assistant", b.as_str()), ("user", "c"), ("assistant", &d)];
    let conversation = Conversation::of(&turns);
    assert_eq!(
        Bytes::new(QWEN3).learned(&conversation),
        ["b<|im_end|>", "<think>\nhm\n</think>\n\nd<|im_end|>"]
    );
    assert_eq!(Bytes::new(R1).learned(&conversation), ["\n\nb<end>", "\n\nd<end>"]);
    let list = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "x"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "y"}
    ]);
    let conversation = Conversation::from_messages(list, None).expect("messages");
    assert_eq!(
        Bytes::new(QWEN3).learned(&conversation),
        ["b<|im_end|>", "<think>\ny\n</think>\n\nd<|im_end|>"]
    );
    // A template that knows no reasoning leaves it out.
    assert_eq!(Bytes::new(LLAMA3).learned(&conversation), ["b<|eot_id|>", "d<|eot_id|>"]);
}

#[test]
fn tool_calls_are_learned_and_results_are_not() {
    let arguments = "{\"zone\": \"<|im_end|>\", \"n\": 1}";
    let list = json!([
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"type": "function", "function": {"name": "now", "arguments": arguments}}]},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "It is noon."}
    ]);
    let tools = json!([{"name": "now", "description": "<|im_start|>assistant\n"}]);
    let conversation = Conversation::from_messages(list, Some(&tools)).expect("messages");
    let call = format!(
        "\n<tool_call>\n{{\"name\": \"now\", \"arguments\": {arguments}}}\n</tool_call><|im_end|>"
    );
    let learned = Bytes::new(QWEN3).learned(&conversation);
    assert_eq!(learned, [call, "It is noon.<|im_end|>".to_owned()]);
}

#[test]
fn a_thought_that_the_prompt_opens_is_no_part_of_earlier_turns_and_of_no_empty_one() {
    let template = Bytes::new(THINKS);
    let thought = |answer: &str| format!("<think>\nso\n</think>\n\n{answer}");
    let (one, two) = (thought("b"), thought("d"));
    let turns = [("user", "a"), ("assistant", one.as_str()), ("user", "c"), ("assistant", &two)];
    let last = "so\n</think>\n\nd<|im_end|>";
    assert_eq!(template.learned(&Conversation::of(&turns)), ["b<|im_end|>", last]);
    // Data without thoughts teaches none, and not to end one at once either.
    assert_eq!(template.learned(&dialogue()), [" b <|im_end|>", "d<|im_end|>"]);
}

#[test]
fn an_empty_thought_of_the_prompt_is_no_part_of_earlier_turns() {
    // As Qwen3 without thinking: the prompt holds an empty thought.
    let closed = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}";
    let (turns, _) = QWEN3.rsplit_once("{% if add_generation_prompt %}").expect("a prompt");
    let template = Bytes::new(&[turns, closed].concat());
    let layout = ChatLayout::probe(&template).expect("layout");
    assert!(layout.assistant_header.ends_with("<think>\n\n</think>\n\n"), "{layout:?}");
    let turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")];
    assert_eq!(template.learned(&Conversation::of(&turns)), ["b<|im_end|>", "d<|im_end|>"]);
    // A thought of the last turn is learned from its beginning on.
    let turns = [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "<think>\nso\n</think>\n\nd"),
    ];
    let last = "<think>\nso\n</think>\n\nd<|im_end|>";
    assert_eq!(template.learned(&Conversation::of(&turns)), ["b<|im_end|>", last]);
}

#[test]
fn what_ends_the_whole_text_ends_no_turn() {
    let layout = ChatLayout::probe(&Bytes::new(PHI)).expect("layout");
    assert_eq!(layout.end_of_turn, "<|end|>");
    assert_eq!(Bytes::new(PHI).learned(&dialogue()), [" b <|end|>", "d<|end|>"]);
}

#[test]
fn templates_that_look_at_contents_are_followed_or_refused() {
    let turns = [("user", "!a"), ("assistant", "b"), ("user", "c"), ("assistant", "d!")];
    assert_eq!(Bytes::new(PREFIX_TEST).learned(&Conversation::of(&turns)), ["b#", "d!#"]);
    // Its header is another one there: better no row than a wrong mask.
    let loud = Conversation::of(&[("user", "a"), ("assistant", "!b")]);
    let problem = Bytes::new(PREFIX_TEST).locate(&loud).expect_err("unknown header");
    assert!(problem.contains("header of message 2"), "{problem}");
    let counting = "{% for m in messages %}{{ '[' + m.role + ']' }}{{ m.content | length }}{{ m.content + '#' }}{% endfor %}";
    let problem = Bytes::new(counting).locate(&loud).expect_err("changed");
    assert!(problem.contains("changes texts"), "{problem}");
}

/// Contents that try to look like the template's words.
fn content() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "a",
        "é",
        " ",
        "\n",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<|eot_id|>",
        "<|im_start|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "word",
        "{{",
        "<|begin_of_text|>",
    ]);
    prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

proptest! {
    /// With contents that hold the template's own words, every mask is the one that writing the
    /// conversation out by hand gives.
    #[test]
    fn masks_equal_those_written_by_hand(
        system in content(),
        turns in prop::collection::vec((content(), content()), 1..5),
        llama in any::<bool>(),
    ) {
        let mut conversation = Conversation::default();
        let (mut expected, mut learned) = (String::new(), Vec::new());
        if llama {
            expected.push_str("<|begin_of_text|>");
        }
        let answers = turns.iter().flat_map(|(u, a)| [("user", u), ("assistant", a)]);
        for (role, content) in [("system", &system)].into_iter().chain(answers) {
            conversation.push(role, content);
            let (header, content, end) = if llama {
                let header = format!("<|start_header_id|>{role}<|end_header_id|>\n\n");
                (header, content.trim(), "<|eot_id|>")
            } else {
                (format!("<|im_start|>{role}\n"), content.as_str(), "<|im_end|>")
            };
            expected += &header;
            let start = expected.len();
            expected += content;
            expected += end;
            if role == "assistant" {
                learned.push(start..expected.len());
            }
            if !llama {
                expected.push('\n');
            }
        }
        let encoder = Bytes::new(if llama { LLAMA3 } else { CHATML });
        let found = encoder.locate(&conversation).expect("turns");
        prop_assert_eq!(&found.text, &expected);
        prop_assert_eq!(found.assistant, learned);
    }
}
