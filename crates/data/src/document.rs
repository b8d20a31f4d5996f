//! Tokens of one row with their loss mask.

use std::ops::Range;

use crate::encoder::TextEncoder;
use crate::source::PromptOverflow;
use crate::template::Rendered;

/// One training text. Its index in the data set keys its random draws.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Token ids, `[T]`.
    pub ids: Vec<u32>,
    /// Whether a token may be learned as a label, `[T]`.
    pub loss_mask: Vec<bool>,
    /// `file:line` that it came from.
    pub origin: String,
}

impl Document {
    /// Encodes a rendered row in one pass; a token is learned if it touches a learned byte.
    ///
    /// # Errors
    /// - the text cannot be encoded; the message says why
    pub fn from_rendered(
        rendered: &Rendered,
        origin: String,
        encoder: &dyn TextEncoder,
    ) -> std::result::Result<Self, String> {
        let (mut ids, offsets) = encoder.encode(&rendered.text)?;
        let mut loss_mask = mask(&offsets, &rendered.learned);
        if rendered.add_start
            && let Some(start) = encoder.start_of_text()
            && ids.first().is_some_and(|first| *first != start)
        {
            ids.insert(0, start);
            loss_mask.insert(0, false);
        }
        if rendered.append_end
            && let Some(end) = encoder.end_of_text()
        {
            ids.push(end);
            loss_mask.push(true);
        }
        Ok(Self { ids, loss_mask, origin })
    }

    /// Labels that can be learned: a first token has nothing before it to be predicted from.
    pub fn learned(&self) -> usize {
        self.loss_mask.iter().skip(1).filter(|learned| **learned).count()
    }

    /// Tokens before the first learned one.
    pub fn prompt_tokens(&self) -> usize {
        self.loss_mask.iter().position(|learned| *learned).unwrap_or(self.ids.len())
    }

    /// Whether the prompt has at most `max` tokens, after `overflow` was applied. A prompt that begins with `start`,
    /// the start token, still does.
    pub fn cap_prompt(&mut self, max: usize, overflow: PromptOverflow, start: Option<u32>) -> bool {
        let prompt = self.prompt_tokens();
        if prompt > max && overflow == PromptOverflow::TruncateLeft {
            let keeps_start = max > 0 && start.is_some() && self.ids.first().copied() == start;
            let first = usize::from(keeps_start);
            self.ids.drain(first..first + prompt - max);
            self.loss_mask.drain(first..first + prompt - max);
        }
        prompt <= max || overflow == PromptOverflow::TruncateLeft
    }
}

/// Whether each token touches a learned byte; both lists ascend, so one pass does.
fn mask(offsets: &[Range<usize>], learned: &[Range<usize>]) -> Vec<bool> {
    let mut next = 0;
    offsets
        .iter()
        .map(|token| {
            while learned.get(next).is_some_and(|range| range.end <= token.start) {
                next += 1;
            }
            learned
                .get(next)
                .is_some_and(|range| token.start < range.end && token.end > range.start)
        })
        .collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::conversation::Conversation;
    use crate::encoder::GeneratedText;
    use proptest::prelude::*;

    /// Bytes as tokens, `<role>content|` as chat template, 256 as end of text.
    pub(crate) struct Bytes;

    impl TextEncoder for Bytes {
        fn encode(&self, text: &str) -> std::result::Result<(Vec<u32>, Vec<Range<usize>>), String> {
            Ok((text.bytes().map(u32::from).collect(), (0..text.len()).map(|i| i..i + 1).collect()))
        }

        fn render_chat(
            &self,
            conversation: &Conversation,
            prompt: bool,
        ) -> std::result::Result<String, String> {
            let mut text = String::new();
            for (index, message) in conversation.messages.iter().enumerate() {
                let content = message["content"].as_str().ok_or("no text")?;
                text += ["<", conversation.role(index), ">", content, "|"].concat().as_str();
            }
            if prompt {
                text.push_str("<assistant>");
            }
            Ok(text)
        }

        fn chat_fingerprint(&self) -> Option<String> {
            Some("a template".to_owned())
        }

        fn end_of_text(&self) -> Option<u32> {
            Some(256)
        }

        fn vocabulary(&self) -> usize {
            257
        }

        fn fingerprint(&self) -> String {
            "bytes".to_owned()
        }
    }

    pub(crate) type Render = fn(&Conversation, bool) -> std::result::Result<String, String>;
    type Generated = fn(&Conversation) -> std::result::Result<Option<GeneratedText>, String>;

    /// [`Bytes`] but for what a test gives it.
    pub(crate) struct Other {
        pub(crate) chat: Option<&'static str>,
        pub(crate) start: Option<u32>,
        pub(crate) render: Render,
        pub(crate) generated: Generated,
    }

    impl Default for Other {
        fn default() -> Self {
            let render: Render = |conversation, prompt| Bytes.render_chat(conversation, prompt);
            Self { chat: Some("another"), start: None, render, generated: |_| Ok(None) }
        }
    }

    impl TextEncoder for Other {
        fn encode(&self, text: &str) -> std::result::Result<(Vec<u32>, Vec<Range<usize>>), String> {
            Bytes.encode(text)
        }

        fn render_chat(
            &self,
            of: &Conversation,
            prompt: bool,
        ) -> std::result::Result<String, String> {
            (self.render)(of, prompt)
        }

        fn render_generated(
            &self,
            of: &Conversation,
        ) -> std::result::Result<Option<GeneratedText>, String> {
            (self.generated)(of)
        }

        fn chat_fingerprint(&self) -> Option<String> {
            self.chat.map(str::to_owned)
        }

        fn start_of_text(&self) -> Option<u32> {
            self.start
        }

        fn end_of_text(&self) -> Option<u32> {
            Bytes.end_of_text()
        }

        fn vocabulary(&self) -> usize {
            Bytes.vocabulary()
        }

        fn fingerprint(&self) -> String {
            Bytes.fingerprint()
        }
    }

    #[test]
    fn plain_text_begins_as_a_prompt_does() {
        let encoder = Other { chat: None, start: Some(1), ..Other::default() };
        let of = |text: &str, add_start| {
            let learned = std::iter::once(0..text.len()).collect();
            let rendered = Rendered { text: text.into(), learned, add_start, append_end: true };
            let document = Document::from_rendered(&rendered, String::new(), &encoder);
            document.map(|document| (document.ids, document.loss_mask)).expect("encoded")
        };
        assert_eq!(of("a", true), (vec![1, 97, 256], vec![false, true, true]));
        // A chat template says itself what it begins with, and so does a text.
        assert_eq!(of("a", false).0, [97, 256]);
        assert_eq!(of("\u{1}a", true).0, [1, 97, 256]);
        assert_eq!(of("", true).0, [256], "nothing is no text that begins");
    }

    fn document(mask: &[u8]) -> Document {
        Document {
            ids: (0..mask.len() as u32).collect(),
            loss_mask: mask.iter().map(|m| *m == 1).collect(),
            origin: String::new(),
        }
    }

    proptest! {
        #[test]
        fn the_mask_in_one_pass_equals_the_definition(
            cuts in proptest::collection::btree_set(0_usize..60, 0..20),
            borders in proptest::collection::btree_set(0_usize..60, 0..12),
        ) {
            let pairs = |points: &std::collections::BTreeSet<usize>, step: usize| {
                let points: Vec<usize> = points.iter().copied().collect();
                points.windows(2).step_by(step).map(|w| w[0]..w[1]).collect::<Vec<_>>()
            };
            let (tokens, learned) = (pairs(&cuts, 1), pairs(&borders, 2));
            let touches = |token: &Range<usize>| {
                learned.iter().any(|range| token.clone().any(|byte| range.contains(&byte)))
            };
            prop_assert_eq!(mask(&tokens, &learned), tokens.iter().map(touches).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_long_prompt_is_dropped_or_loses_its_first_tokens() {
        let mut kept = document(&[0, 0, 0, 1, 0, 1]);
        assert_eq!((kept.prompt_tokens(), kept.learned()), (3, 2));
        assert!(kept.cap_prompt(3, PromptOverflow::Drop, None));
        assert!(!kept.cap_prompt(2, PromptOverflow::Drop, None));
        let mut with_start = kept.clone();
        assert!(kept.cap_prompt(1, PromptOverflow::TruncateLeft, Some(9)));
        assert_eq!(kept.ids, [2, 3, 4, 5]);
        assert_eq!(kept.loss_mask, [false, true, false, true]);
        assert!(with_start.cap_prompt(2, PromptOverflow::TruncateLeft, Some(0)));
        assert_eq!(with_start.ids, [0, 2, 3, 4, 5]);
        assert_eq!(with_start.loss_mask, [false, false, true, false, true]);
    }
}
