//! Marks around what a template says that the model generates: its `{% generation %}` blocks.

use std::ops::Range;
use std::sync::LazyLock;

use minijinja::State;
use regex::{Captures, Regex};

/// Around what a template generates while it is asked for.
const GENERATION: [char; 2] = ['\u{10FFFE}', '\u{10FFFF}'];

/// The tags of Hugging Face's `generation` block with their white-space control.
pub(super) fn generation_tags() -> &'static Regex {
    static TAGS: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("a valid expression")
    });
    &TAGS
}

/// The same template with filter blocks, which minijinja knows, in place of `generation` blocks.
pub(super) fn with_generation_filters(source: &str) -> String {
    let tag = |tag: &Captures<'_>| {
        let name = if tag.get(2).is_some() { "endfilter" } else { "filter generation" };
        format!("{{%{} {name} {}%}}", &tag[1], &tag[3])
    };
    generation_tags().replace_all(source, tag).into_owned()
}

/// The body of a `generation` block.
pub(super) fn generation(state: &State<'_, '_>, body: String) -> String {
    if state.lookup("mark_generation").is_some_and(|mark| mark.is_true()) {
        format!("{}{body}{}", GENERATION[0], GENERATION[1])
    } else {
        body
    }
}

/// Takes the marks out of a text; `None` if they do not come in pairs.
pub(super) fn unmarked(marked: &str) -> Option<(String, Vec<Range<usize>>)> {
    let (mut text, mut ranges, mut start) = (String::with_capacity(marked.len()), Vec::new(), None);
    for character in marked.chars() {
        if character == GENERATION[0] {
            if start.replace(text.len()).is_some() {
                return None;
            }
        } else if character == GENERATION[1] {
            ranges.push(start.take()?..text.len());
        } else {
            text.push(character);
        }
    }
    start.is_none().then_some((text, ranges))
}
