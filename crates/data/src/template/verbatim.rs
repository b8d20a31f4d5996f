//! Answers as the target wrote them, thoughts and marks included.
//!
//! A chat template may show an answer otherwise than it was written: it drops thoughts, adds empty ones, or refuses the
//! marks of channels. A draft proposes what the target writes. So the last answer of a row that is marked `verbatim`
//! follows the prompt that the target had, if the template shows another text. The mark names the tokenizer and the
//! template that the answer was written with. With others the row is like any other.

use std::ops::Range;

use serde_json::{Map, Value, json};

use super::chat::ChatLayout;
use super::cut::{Cut, without};
use super::{Learn, Rendered};
use crate::conversation::Conversation;
use crate::encoder::TextEncoder;

/// What a prompt ends with that begins a thought; rows hold it as a part of the answer.
const OPENED_THOUGHT: &str = "<think>\n";
/// Field of a row.
const FIELD: &str = "verbatim";

/// How the last answer of a row was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verbatim {
    /// The stop token that ended it; nothing where it was cut off.
    pub end: Option<String>,
}

impl Verbatim {
    /// What a row says, if its answer was written with the same [`form`].
    pub(crate) fn of(fields: &Map<String, Value>, own: &str) -> Option<Self> {
        let mark = fields.get(FIELD)?;
        (mark["form"] == own).then(|| Self { end: mark["end"].as_str().map(str::to_owned) })
    }

    /// Marks a row whose last answer was written with a form.
    pub fn mark(&self, row: &mut Value, form: &str) {
        row[FIELD] = json!({ "form": form, "end": self.end });
    }

    /// Gives a row the mark of another.
    pub fn copy(from: &Value, to: &mut Value) {
        if let Some(mark) = from.get(FIELD) {
            to[FIELD] = mark.clone();
        }
    }
}

/// Tells what makes tokens of a conversation: fingerprints of the tokenizer and of the chat template with its variables.
pub fn form(tokenizer: &str, chat_template: Option<&str>) -> String {
    blake3::hash(format!("{tokenizer:?} {chat_template:?}").as_bytes()).to_hex()[..16].to_owned()
}

/// The last answer after its prompt; nothing where the template shows it so itself, or no prompt can be made.
pub(super) fn render(
    conversation: &Conversation,
    learn: Learn,
    (layout, cut): (&ChatLayout, &Cut),
    verbatim: &Verbatim,
    encoder: &dyn TextEncoder,
) -> Option<Rendered> {
    let (last, before) = conversation.messages.split_last()?;
    let content = last.get("content")?.as_str()?;
    let before = Conversation {
        messages: before.to_vec(),
        tools: conversation.tools.clone(),
        variables: conversation.variables.clone(),
    };
    if last.get("role")? != "assistant" || before.messages.is_empty() {
        return None;
    }
    let prompt = encoder.render_chat(&before, true).ok()?;
    let opens = prompt.trim_end().ends_with(OPENED_THOUGHT.trim_end());
    let own = content.strip_prefix(OPENED_THOUGHT).filter(|_| opens).unwrap_or(content);
    // Tokenizers take the space before an answer away, and templates bring it back.
    let shown = encoder.render_chat(conversation, false).unwrap_or_default();
    let shown = shown.strip_prefix(&prompt).unwrap_or_default();
    if shown.trim_start().starts_with(own.trim_start()) {
        return None;
    }
    let space = &shown[..shown.len() - shown.trim_start().len()];
    let has_space =
        own.starts_with(char::is_whitespace) || !shown.trim_start().starts_with(own.trim());
    let space = if has_space { "" } else { space };
    let end = verbatim.end.as_deref().unwrap_or_default();
    let text = [&prompt, space, own, end].concat();
    let answer = prompt.len()..text.len();
    let earlier: Vec<Range<usize>> = match learn {
        Learn::All => return Some(learned(text, std::iter::once(0..answer.end).collect())),
        Learn::Last | Learn::Answer => Vec::new(),
        Learn::Assistant | Learn::NoSystem => {
            let turns = layout.locate(&before, encoder).ok()?;
            if !prompt.starts_with(&turns.text) {
                return None;
            }
            let ends = cut.ends_of(layout, &turns);
            let all = if learn == Learn::Assistant {
                turns.assistant
            } else {
                let mut all = turns.without_system();
                all.push(turns.text.len()..prompt.len());
                all.retain(|range| !range.is_empty());
                all
            };
            without(&all, &ends)
        }
    };
    Some(learned(text, earlier.into_iter().chain([answer]).collect()))
}

fn learned(text: String, learned: Vec<Range<usize>>) -> Rendered {
    Rendered { text, learned, add_start: false, append_end: false }
}

#[cfg(test)]
mod tests {
    use super::super::render_conversation;
    use super::*;
    use crate::document::tests::{Other, Render};

    /// A template that shows no thought without its end, trims answers, and refuses channels. Its prompt may open a
    /// thought.
    fn thinks(opens: bool) -> Other {
        let render: Render = if opens {
            |of, prompt| shown(of, prompt, "<A><think>\n")
        } else {
            |of, prompt| shown(of, prompt, "<A>")
        };
        Other { render, ..Other::default() }
    }

    fn shown(of: &Conversation, prompt: bool, header: &str) -> Result<String, String> {
        let last = of.messages.len() - 1;
        let mut parts = Vec::new();
        for (index, message) in of.messages.iter().enumerate() {
            let content = message["content"].as_str().unwrap_or_default();
            if content.contains("<|channel|>") {
                return Err("a channel".to_owned());
            }
            let rest = content.split("</think>").last().unwrap_or_default().trim();
            parts.push(match of.role(index) {
                "assistant" if index == last && !content.contains("</think>") => {
                    format!("<A><think></think>{}<end>", content.trim())
                }
                "assistant" if index == last => format!("<A>{}<end>", content.trim()),
                "assistant" => format!("<A>{rest}<end>"),
                role => format!("<{role}>{content}"),
            });
        }
        Ok(parts.concat() + if prompt { header } else { "" })
    }

    fn ended(end: Option<&str>) -> Verbatim {
        Verbatim { end: end.map(str::to_owned) }
    }

    /// Text and learned parts of a conversation that ends with `answer`.
    fn of(
        opens: bool,
        answer: &str,
        learn: Learn,
        (cut, end): (&Cut, Option<&str>),
    ) -> (String, Vec<String>) {
        let encoder = thinks(opens);
        let layout = ChatLayout::probe(&encoder).expect("layout");
        let turns = [("user", "q"), ("assistant", "x"), ("user", "r"), ("assistant", answer)];
        let conversation = Conversation::of(&turns);
        let rendered = render_conversation(
            &conversation,
            learn,
            Some(&layout),
            (cut, Some(&ended(end))),
            &encoder,
        );
        let Rendered { text, learned, .. } = rendered.expect("rendered");
        let parts = learned.iter().map(|range| text[range.clone()].to_owned()).collect();
        (text, parts)
    }

    #[test]
    fn a_cut_thought_follows_the_prompt_and_nothing_follows_it() {
        let cut = Cut::Each(vec![false, true]);
        for (opens, prompt) in [(false, "<A><think>\n"), (true, "<A><think>\n")] {
            let (text, learned) = of(opens, "<think>\nhm", Learn::Answer, (&cut, None));
            assert_eq!(text, format!("<user>q<A>x<end><user>r{prompt}hm"));
            let own = if opens { "hm" } else { "<think>\nhm" };
            assert_eq!(learned, [own]);
            let (_, learned) = of(opens, "<think>\nhm", Learn::Assistant, (&cut, None));
            assert_eq!(learned, ["x<end>", own]);
        }
    }

    #[test]
    fn marks_that_the_template_refuses_are_learned_as_they_were_written() {
        let answer = "<|channel|>final<|message|>yes\n";
        // Another end than that of most turns.
        let whole = (&Cut::Nowhere, Some("<call>"));
        let (text, learned) = of(false, answer, Learn::Last, whole);
        assert_eq!(learned, [format!("{answer}<call>")]);
        assert!(text.ends_with(&learned[0]), "{text}");
        let (text, learned) = of(false, answer, Learn::All, whole);
        assert_eq!(learned, [text]);
        let (text, learned) = of(false, answer, Learn::NoSystem, whole);
        assert_eq!(learned.concat(), text);
    }

    #[test]
    fn what_the_template_shows_as_it_was_written_stays_its_text() {
        let encoder = thinks(false);
        let layout = ChatLayout::probe(&encoder).expect("layout");
        let end = ended(Some("<end>"));
        let of = |answer: &str, verbatim: Option<&Verbatim>| {
            let conversation = Conversation::of(&[("user", "q"), ("assistant", answer)]);
            let how = (&Cut::Nowhere, verbatim);
            let rendered =
                render_conversation(&conversation, Learn::Answer, Some(&layout), how, &encoder);
            let Rendered { text, learned, .. } = rendered.expect("rendered");
            learned.first().map(|range| (text.clone(), text[range.clone()].to_owned()))
        };
        let thought = "<think>so</think>yes";
        assert_eq!(of(thought, Some(&end)), of(thought, None));
        // Rows of others say nothing, and keep what the template makes of them.
        let plain = of("<think>so", None).expect("learned");
        assert!(plain.0.contains("<think></think><think>so"), "{plain:?}");
        // The template trims what it wrote at the end.
        let (_, learned) = of("<think>so</think>yes\n", Some(&end)).expect("learned");
        assert_eq!(learned, "<think>so</think>yes\n<end>");
    }

    #[test]
    fn a_space_that_tokenizers_take_away_is_that_of_the_template() {
        /// `[INST] question [/INST] answer </s>`
        fn turn(message: &Map<String, Value>) -> String {
            let content = message["content"].as_str().unwrap_or_default().trim();
            match message["role"].as_str() {
                Some("assistant") => format!(" {content} </s>"),
                _ => format!("[INST] {content} [/INST]"),
            }
        }

        let llama2 = Other {
            render: |of, _| Ok(of.messages.iter().map(turn).collect()),
            ..Other::default()
        };
        let layout = ChatLayout::probe(&llama2).expect("layout");
        let of = |answer: &str| {
            let conversation = Conversation::of(&[("user", "q"), ("assistant", answer)]);
            let (how, end) = ((&layout, &Cut::Nowhere), ended(Some("</s>")));
            render(&conversation, Learn::All, how, &end, &llama2).map(|rendered| rendered.text)
        };
        assert_eq!(of("Hello"), None);
        assert_eq!(of("Hello\n").as_deref(), Some("[INST] q [/INST] Hello\n</s>"));
    }

    #[test]
    fn a_mark_counts_where_the_answer_was_written_alike() {
        let mut row = json!({ "messages": [] });
        let own = form("tokens", Some("template"));
        let verbatim = ended(Some("<end>"));
        verbatim.mark(&mut row, &own);
        let mut copy = json!({});
        Verbatim::copy(&row, &mut copy);
        let of = |row: &Value, form: &str| Verbatim::of(row.as_object().expect("a row"), form);
        assert_eq!(of(&copy, &own), Some(verbatim));
        assert_eq!(of(&copy, &form("tokens", None)), None);
        for other in [json!({}), json!({ "verbatim": true }), json!({ "verbatim": { "form": 3 } })]
        {
            assert_eq!(of(&other, &own), None, "{other}");
        }
        assert_ne!(form("a", Some("b")), form("a\" Some(\"b\")", None));
    }
}
