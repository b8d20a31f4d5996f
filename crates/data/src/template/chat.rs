//! Where the turns of a conversation stand in its rendered text.
//!
//! Chat templates are programs: they trim contents, drop the thinking of earlier turns, add
//! system turns. So turns are not found by searching for their contents, nor by rendering every
//! prefix. Each text of message `i` gets the private-use character `i` on both sides before a
//! second rendering; taken out again, the characters must leave the first rendering, and tell
//! where what is left of message `i` begins and ends. Around it stand the template's own words,
//! learned once from a probe: the header before an assistant's turn and the end-of-turn mark
//! after it. Two renderings a conversation, linear in its length.

use std::ops::Range;

use crate::conversation::Conversation;
use crate::encoder::TextEncoder;

/// First of the private-use characters (plane 16) that mark messages.
const FIRST_MARK: u32 = 0x10_0000;
const LAST_MARK: u32 = 0x10_FFFD;

/// What a template writes when there is nothing to think; it stands in the prompt of a model that
/// does not think, so it belongs to the header.
const EMPTY_THINKING: (&str, &str) = ("<think>", "</think>");

/// A template's words around turns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatLayout {
    /// Before an assistant's turn: what a generation prompt and a finished turn have in common.
    pub assistant_header: String,
    /// After an assistant's turn, without white space after it; may be empty.
    pub end_of_turn: String,
    /// Before a user's turn.
    pub user_header: String,
}

/// Turns of a rendered conversation, in bytes of its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turns {
    /// The rendered conversation.
    pub text: String,
    /// Assistant turns from after the header to the end of the end-of-turn mark, ascending.
    pub assistant: Vec<Range<usize>>,
    /// Which message of the assistant each of them is, from 0: a template may drop some.
    pub answers: Vec<usize>,
    /// The last message of the assistant, if the template shows it.
    pub last_assistant: Option<Range<usize>>,
    /// System turns with header and end-of-turn mark, ascending.
    pub system: Vec<Range<usize>>,
}

impl Turns {
    /// Everything outside of system turns.
    pub fn without_system(&self) -> Vec<Range<usize>> {
        let mut kept = Vec::new();
        let mut start = 0;
        for turn in &self.system {
            if start < turn.start {
                kept.push(start..turn.start);
            }
            start = start.max(turn.end);
        }
        if start < self.text.len() {
            kept.push(start..self.text.len());
        }
        kept
    }
}

impl ChatLayout {
    /// Renders short conversations to see what the template writes around turns.
    ///
    /// # Errors
    /// - the template refuses a question and its answer, or hides them
    pub fn probe(encoder: &dyn TextEncoder) -> Result<Self, String> {
        let [u, a, v] = [0, 1, 2].map(|i| mark(i).map(String::from)).map(Option::unwrap_or_default);
        let render = |turns: &[(&str, &str)], prompt: bool| {
            encoder.render_chat(&Conversation::of(turns), prompt)
        };
        let hidden = || "the chat template does not show a question and its answer".to_owned();
        let split = |text: &str, at: &str| {
            text.split_once(at).map(|(l, r)| (l.to_owned(), r.to_owned())).ok_or_else(hidden)
        };
        let (before, after) = split(&render(&[("user", &u), ("assistant", &a)], false)?, &u)?;
        let (between, tail) = split(&after, &a)?;
        let (_, prompt) = split(&render(&[("user", &u)], true)?, &u)?;
        let user_tail = match render(&[("user", &u)], false) {
            Ok(text) => split(&text, &u)?.1,
            Err(_) => String::new(),
        };
        let common = common_prefix(&between, &prompt);
        let header = common.strip_prefix(user_tail.as_str()).unwrap_or(common);
        let assistant_header = if header.is_empty() { common } else { header }.to_owned();
        let mut end_of_turn = tail.trim_end().to_owned();
        let user_header = match render(&[("user", &u), ("assistant", &a), ("user", &v)], false) {
            Ok(text) => {
                let between = split(&split(&text, &a)?.1, &v)?.0;
                if !between.starts_with(&end_of_turn) {
                    // What ends the whole text is no part of a turn.
                    let of_turn = whole_words(common_prefix(&end_of_turn, &between)).trim_end();
                    if !of_turn.is_empty() {
                        end_of_turn = of_turn.to_owned();
                    }
                }
                let rest = between.strip_prefix(tail.as_str());
                rest.or(between.strip_prefix(end_of_turn.as_str())).unwrap_or(&between).to_owned()
            }
            Err(_) => before,
        };
        Ok(Self { assistant_header, end_of_turn, user_header })
    }

    /// Renders a conversation and finds its turns. A turn, or a part of one, that the template
    /// drops is absent.
    ///
    /// # Errors
    /// - the template refuses the messages, or changes texts so that their place is not certain
    pub fn locate(
        &self,
        conversation: &Conversation,
        encoder: &dyn TextEncoder,
    ) -> Result<Turns, String> {
        let text = encoder.render_chat(conversation, false)?;
        let marks = Marks::find(conversation, &text, encoder)?;
        let mut turns = Turns {
            text,
            assistant: Vec::new(),
            answers: Vec::new(),
            last_assistant: None,
            system: Vec::new(),
        };
        let (mut cursor, mut answer) = (0, 0);
        for index in 0..conversation.messages.len() {
            match conversation.role(index) {
                "assistant" => {
                    let turn = self.assistant_turn(&turns.text, &marks, index, cursor)?;
                    if let Some(turn) = &turn {
                        cursor = turn.end;
                        turns.assistant.push(turn.clone());
                        turns.answers.push(answer);
                    }
                    answer += 1;
                    turns.last_assistant = turn;
                }
                "system" | "developer" => {
                    let turn = self.system_turn(&turns.text, &marks, index);
                    turns.system.extend(turn);
                }
                _ => {}
            }
        }
        if conversation.role(0) != "system" && conversation.role(0) != "developer" {
            // A system turn that the template adds by itself.
            turns.system.splice(0..0, self.before_first_turn(&turns.text, &marks, 0));
        }
        turns.system.sort_by_key(|turn| turn.start);
        Ok(turns)
    }

    /// The end-of-turn marks at the ends of turns.
    pub(super) fn ends(&self, text: &str, turns: &[Range<usize>]) -> Vec<Range<usize>> {
        let mark = self.end_of_turn.as_str();
        let end = |turn: &Range<usize>| {
            let words = text[turn.clone()].trim_end();
            let before = words.strip_suffix(mark).filter(|_| !mark.is_empty())?;
            Some(turn.start + before.len()..turn.end)
        };
        turns.iter().filter_map(end).collect()
    }

    fn assistant_turn(
        &self,
        text: &str,
        marks: &Marks,
        index: usize,
        cursor: usize,
    ) -> Result<Option<Range<usize>>, String> {
        let low = marks.end_before(index).max(cursor);
        let high = marks.start_after(index, low).unwrap_or(text.len());
        let own = marks.spans[index].as_ref();
        match own {
            Some(own) if own.start < low || own.end > high => {
                return Err(format!("the chat template moves message {}", index + 1));
            }
            // Nothing is left of it.
            None if marks.had_text[index] => return Ok(None),
            _ => {}
        }
        let header = &self.assistant_header;
        let limit = own.map_or(high, |own| own.start);
        let found = |header: &str| {
            let at = text[low..limit].find(header).filter(|_| !header.is_empty())?;
            Some(low + at + header.len())
        };
        // A thought that the prompt opens, or an empty one, is not shown of earlier turns.
        let (open, close) = EMPTY_THINKING;
        let without_thought = || {
            let words = header.trim_end();
            let words = words.strip_suffix(close).map_or(words, str::trim_end);
            found(words.strip_suffix(open)?)
        };
        let start = match (found(header).or_else(without_thought), own) {
            (Some(start), _) => start,
            (None, None) => return Ok(None),
            (None, Some(own)) if marks.both_sides && own.start < own.end => own.start,
            (None, Some(_)) => {
                return Err(format!("the header of message {} cannot be found", index + 1));
            }
        };
        let own_end = own.map_or(start, |own| own.end.max(start));
        let limit = if own.is_some() { own_end } else { high };
        let start = skip_empty_thinking(text, header, start, limit);
        let rest = own_end.max(start);
        let end = match text[rest..high].find(self.end_of_turn.as_str()) {
            Some(at) if !self.end_of_turn.is_empty() => rest + at + self.end_of_turn.len(),
            _ => rest,
        };
        Ok(Some(start..end))
    }

    /// From its header, which is taken to begin where the turn before it ends, to its end mark and
    /// the white space there.
    fn system_turn(&self, text: &str, marks: &Marks, index: usize) -> Option<Range<usize>> {
        if index == 0 {
            return self.before_first_turn(text, marks, 1);
        }
        let own = marks.spans[index].clone()?;
        let start = match marks.spans[..index].iter().flatten().map(|span| span.end).max() {
            Some(previous) => self.end_behind(text, previous, own.start),
            None => own.start,
        };
        let high = marks.start_after(index, own.end).unwrap_or(text.len());
        Some(start..self.end_behind(text, own.end, high))
    }

    /// What stands before the header of the first turn from message `first` on: the start of the
    /// text, and the system turn that is given or that the template adds by itself.
    fn before_first_turn(&self, text: &str, marks: &Marks, first: usize) -> Option<Range<usize>> {
        let next = marks.spans[first.min(marks.spans.len())..].iter().flatten().next();
        let limit = next.map_or(text.len(), |span| span.start);
        let given = marks.spans[..first].iter().flatten().map(|span| span.end).max();
        let from = given.unwrap_or(0).min(limit);
        let header = &self.user_header;
        let found = text[from..limit].find(header.as_str()).filter(|_| !header.is_empty());
        let end = match (found, given) {
            (Some(at), _) => from + at,
            (None, Some(own)) => self.end_behind(text, own, limit),
            (None, None) => 0,
        };
        (end > 0).then_some(0..end)
    }

    /// After the end-of-turn mark that follows `from`, and the white space after it.
    fn end_behind(&self, text: &str, from: usize, high: usize) -> usize {
        if from >= high || self.end_of_turn.is_empty() {
            return from.min(high);
        }
        match text[from..high].find(self.end_of_turn.as_str()) {
            Some(at) => {
                let end = from + at + self.end_of_turn.len();
                end + text[end..high].len() - text[end..high].trim_start().len()
            }
            None => from,
        }
    }
}

fn mark(index: usize) -> Option<char> {
    char::from_u32(FIRST_MARK + u32::try_from(index).ok()?)
        .filter(|mark| (*mark as u32) <= LAST_MARK)
}

fn index_of(mark: char) -> Option<usize> {
    (FIRST_MARK..=LAST_MARK).contains(&(mark as u32)).then(|| (mark as u32 - FIRST_MARK) as usize)
}

fn common_prefix<'a>(a: &'a str, b: &str) -> &'a str {
    let same = a.char_indices().zip(b.chars()).take_while(|((_, a), b)| a == b);
    let end = same.last().map_or(0, |((at, a), _)| at + a.len_utf8());
    &a[..end]
}

/// A text without the beginning of a mark (`<|...`) at its end.
fn whole_words(text: &str) -> &str {
    match (text.rfind('<'), text.rfind('>')) {
        (Some(open), close) if close.is_none_or(|close| close < open) => &text[..open],
        _ => text,
    }
}

/// Where the turn goes on after an empty thinking block at `start`, which its header may have opened.
fn skip_empty_thinking(text: &str, header: &str, start: usize, limit: usize) -> usize {
    let (open, close) = EMPTY_THINKING;
    let is_opened = header.trim_end().ends_with(open) && text[..start].ends_with(header);
    let inside =
        if is_opened { Some(&text[start..limit]) } else { text[start..limit].strip_prefix(open) };
    let Some(inside) = inside else { return start };
    let Some((thought, rest)) = inside.split_once(close) else { return start };
    if !thought.trim().is_empty() {
        return start;
    }
    limit - rest.trim_start().len()
}

/// What is left of every message, in bytes of the rendered text.
struct Marks {
    spans: Vec<Option<Range<usize>>>,
    /// Whether a message had text to mark.
    had_text: Vec<bool>,
    /// Whether marks stand before texts too, or only after them.
    both_sides: bool,
    /// Whether a message is a system turn that stands elsewhere than in the conversation.
    moved: Vec<bool>,
}

impl Marks {
    /// Renders once more with marks; a template that looks at how texts begin gets them only
    /// after the texts.
    fn find(
        conversation: &Conversation,
        text: &str,
        encoder: &dyn TextEncoder,
    ) -> Result<Self, String> {
        let count = conversation.messages.len();
        if mark(count).is_none() {
            return Err(format!("{count} messages are too many for one conversation"));
        }
        if text.chars().any(|c| index_of(c).is_some()) {
            return Err("the text holds private-use characters of plane 16".to_owned());
        }
        for both_sides in [true, false] {
            let mut marked = conversation.clone();
            let mut had_text = vec![false; count];
            marked.edit_texts(&mut |index, text| {
                had_text[index] |= surround(text, index, both_sides);
            });
            // A template may refuse what it would have taken without marks.
            let Ok(rendered) = encoder.render_chat(&marked, false) else { continue };
            if let Some(spans) = spans(&rendered, text, count) {
                let moved = moved_system_turns(conversation, &spans);
                return Ok(Self { spans, had_text, both_sides, moved });
            }
        }
        Err("the chat template changes texts, so that turns cannot be found in it".to_owned())
    }

    fn others(&self, range: Range<usize>) -> impl Iterator<Item = &Range<usize>> {
        // The place of a moved turn says nothing about other turns.
        range.filter(|index| !self.moved[*index]).filter_map(|index| self.spans[index].as_ref())
    }

    /// Where the messages before `index` end.
    fn end_before(&self, index: usize) -> usize {
        // Messages come in order, so the nearest one decides.
        self.others(0..index).last().map_or(0, |span| span.end)
    }

    /// Where the first message after `index` begins.
    fn start_after(&self, index: usize, low: usize) -> Option<usize> {
        self.others(index + 1..self.spans.len()).map(|span| span.start).find(|at| *at >= low)
    }
}

/// Some templates show the system turn inside or after a later one.
fn moved_system_turns(conversation: &Conversation, spans: &[Option<Range<usize>>]) -> Vec<bool> {
    let end = spans.iter().flatten().map(|span| span.end).max().unwrap_or(0);
    (0..spans.len())
        .map(|index| {
            let Some(own) = &spans[index] else { return false };
            let mut next = spans[index + 1..].iter().flatten().map(|span| span.start);
            matches!(conversation.role(index), "system" | "developer")
                && next.next().unwrap_or(end) < own.end
        })
        .collect()
}

/// Puts marks around the words of a text, inside of the white space that templates trim.
fn surround(text: &mut String, index: usize, both_sides: bool) -> bool {
    let words = text.trim();
    let (false, Some(mark)) = (words.is_empty(), mark(index)) else { return false };
    let start = text.len() - text.trim_start().len();
    let end = start + words.len();
    text.insert(end, mark);
    if both_sides {
        text.insert(start, mark);
    }
    true
}

/// First and last mark of every message in bytes of `text`, if taking the marks out gives it.
fn spans(rendered: &str, text: &str, count: usize) -> Option<Vec<Option<Range<usize>>>> {
    let mut spans: Vec<Option<Range<usize>>> = vec![None; count];
    let (mut at, mut plain) = (0, text.chars());
    for c in rendered.chars() {
        if let Some(index) = index_of(c) {
            let span = spans.get_mut(index)?;
            *span = Some(span.as_ref().map_or(at, |span| span.start)..at);
        } else {
            if plain.next() != Some(c) {
                return None;
            }
            at += c.len_utf8();
        }
    }
    plain.next().is_none().then_some(spans)
}
