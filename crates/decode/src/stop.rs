//! The text of an answer while it streams, and the strings that end it.

use longdraft_models::TargetTokenId;
use longdraft_models::error::Result;
use longdraft_models::tokenizer::{TextStream, TextTokenizer};

use crate::decoder::EndReason;

/// Holds back text that may be the start of a stop string.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    strings: Vec<String>,
    held: String,
}

/// What a piece of text came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Streamed {
    /// Text that is certain to stay.
    pub text: String,
    /// Whether a stop string was found after it.
    pub stopped: bool,
}

impl Streamed {
    /// Why the answer ended; this is its rest. The end of the text may complete a stop string: then the answer ended
    /// there, though the decoder had no room for more tokens.
    #[must_use]
    pub fn end(&self, of_decoder: EndReason) -> EndReason {
        match of_decoder {
            EndReason::TokenLimit | EndReason::ContextLimit if self.stopped => {
                EndReason::StopString
            }
            other => other,
        }
    }
}

impl StopStrings {
    /// Looks for these; empty ones never match.
    pub fn new(strings: impl IntoIterator<Item = String>) -> Self {
        let strings = strings.into_iter().filter(|string| !string.is_empty()).collect();
        Self { strings, held: String::new() }
    }

    /// Adds text; a match may begin in an earlier piece. Nothing is to be added after a match.
    pub fn push(&mut self, text: &str) -> Streamed {
        self.held.push_str(text);
        if let Some(at) = self.strings.iter().filter_map(|s| self.held.find(s.as_str())).min() {
            self.held.truncate(at);
            return Streamed { text: std::mem::take(&mut self.held), stopped: true };
        }
        let may_begin =
            |at: &usize| self.strings.iter().any(|string| string.starts_with(&self.held[*at..]));
        let keep = self.held.char_indices().map(|(at, _)| at).find(may_begin);
        let rest = self.held.split_off(keep.unwrap_or(self.held.len()));
        Streamed { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// What was held back when the text ended without a match.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// The text of an answer as its tokens come: whole characters, without the string that ends it.
pub struct AnswerText<'a> {
    /// None after a stop string.
    stream: Option<TextStream<'a>>,
    stops: StopStrings,
    /// Tokens in whose text no stop string is looked for.
    unstopped: usize,
    /// Characters so far.
    length: usize,
}

impl<'a> AnswerText<'a> {
    /// An answer that has no text yet, and ends where one of `stops` begins. Its text goes on where that of the
    /// tokens `before` ends, if there are some.
    ///
    /// # Errors
    /// - the tokenizer cannot decode them
    pub fn new(
        tokenizer: &'a TextTokenizer,
        before: Option<&[TargetTokenId]>,
        stops: &[String],
    ) -> Result<Self> {
        let stream = match before {
            Some(before) => {
                let ids: Vec<u32> = before.iter().map(|token| token.0).collect();
                tokenizer.stream_after(&ids)?
            }
            None => tokenizer.stream(),
        };
        let stops = StopStrings::new(stops.iter().cloned());
        Ok(Self { stream: Some(stream), stops, unstopped: 0, length: 0 })
    }

    /// The same where stop strings are looked for only in the text after so many tokens.
    #[must_use]
    pub fn unstopped(self, tokens: usize) -> Self {
        Self { unstopped: tokens, ..self }
    }

    /// Characters so far, with those that may be the start of a stop string.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Adds a token; the text that it makes certain. After a stop string nothing is added.
    ///
    /// # Errors
    /// - the tokenizer cannot decode it
    pub fn push(&mut self, id: u32) -> Result<Streamed> {
        let Some(stream) = &mut self.stream else {
            return Ok(Streamed { text: String::new(), stopped: true });
        };
        let text = stream.push(id)?;
        self.length += text.chars().count();
        let streamed = self.searched(text);
        self.unstopped = self.unstopped.saturating_sub(1);
        if streamed.stopped {
            self.stream = None;
        }
        Ok(streamed)
    }

    /// The rest where no stop string ended the text: what was held back, unfinished characters
    /// replaced. Nothing is to be added after it.
    ///
    /// # Errors
    /// - the tokenizer cannot decode it
    pub fn finish(&mut self) -> Result<Streamed> {
        let Some(stream) = self.stream.take() else {
            return Ok(Streamed { text: String::new(), stopped: true });
        };
        let mut rest = self.searched(stream.finish()?);
        if !rest.stopped {
            rest.text.push_str(&self.stops.finish());
        }
        Ok(rest)
    }

    /// What text comes to where stop strings may end it, or may not yet.
    fn searched(&mut self, text: String) -> Streamed {
        if self.unstopped > 0 {
            return Streamed { text, stopped: false };
        }
        self.stops.push(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text and whether it stopped, for every way of cutting `text` in two.
    fn all_cuts(text: &str, stops: &[&str]) -> (String, bool) {
        let outcome = |cut: usize| {
            let mut stop = StopStrings::new(stops.iter().map(|s| (*s).to_owned()));
            let (mut out, mut stopped) = (String::new(), false);
            for piece in [&text[..cut], &text[cut..]] {
                if !stopped {
                    let streamed = stop.push(piece);
                    out.push_str(&streamed.text);
                    stopped = streamed.stopped;
                }
            }
            if !stopped {
                out.push_str(&stop.finish());
            }
            (out, stopped)
        };
        let cuts: Vec<usize> = (0..=text.len()).filter(|at| text.is_char_boundary(*at)).collect();
        let first = outcome(cuts[0]);
        cuts.iter().for_each(|cut| assert_eq!(outcome(*cut), first, "{cut}"));
        first
    }

    #[test]
    fn a_stop_string_is_found_wherever_it_is_cut() {
        assert_eq!(all_cuts("one\n\ntwo", &["\n\n"]), ("one".into(), true));
        assert_eq!(all_cuts("aab", &["ab"]), ("a".into(), true));
        assert_eq!(all_cuts("ünd ööö", &["öö", "ö?"]), ("ünd ".into(), true));
        assert_eq!(all_cuts("no end", &["end."]), ("no end".into(), false));
        assert_eq!(all_cuts("text", &[""]), ("text".into(), false));
    }

    #[test]
    fn only_a_limit_gives_way_to_a_stop_string_of_the_rest() {
        let end = |stopped, end| Streamed { text: String::new(), stopped }.end(end);
        for limit in [EndReason::TokenLimit, EndReason::ContextLimit] {
            assert_eq!((end(true, limit), end(false, limit)), (EndReason::StopString, limit));
        }
        for other in [EndReason::StopToken, EndReason::StopString, EndReason::Interrupted] {
            assert_eq!(end(true, other), other);
        }
    }

    #[test]
    fn only_a_possible_start_is_held_back() {
        let mut stop = StopStrings::new(["</s>".to_owned()]);
        assert_eq!(stop.push("a <").text, "a ");
        assert_eq!(stop.push("/b").text, "</b");
    }
}
