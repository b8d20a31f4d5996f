//! The syntaxes in which templates write calls, and how a template's text tells which it is.

/// How a template writes calls.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Syntax {
    /// What the template's text has, all of it, and what it does not have.
    has: &'static [&'static str],
    lacks: &'static [&'static str],
    /// Begins a call.
    opening: &'static str,
    /// Ends it; models leave it out at times.
    pub(super) closing: Option<&'static str>,
    /// Begins a call without an opening where nothing was said before it. No opening is forced then.
    pub(super) bare: Option<char>,
    /// Begins the call itself; models leave the opening out at times.
    inner: Option<&'static str>,
    pub(super) body: Body,
    /// Characters that the template wants ids to have.
    pub(super) id_length: Option<usize>,
}

/// What is between opening and closing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    /// `{"name": NAME, "arguments": {...}}`, with what the arguments are called, and what divides calls where
    /// a turn may have several.
    Object { arguments: &'static str, between: Option<&'static str> },
    /// `[{"name": NAME, "arguments": {...}}, ...]`.
    List,
    /// `NAME[ARGS]{...}`, perhaps with `[CALL_ID]ID` after the name.
    Named,
    /// `<function=NAME><parameter=NAME>TEXT</parameter>...</function>`.
    Tags,
}

/// Markers within [`Body::Named`].
pub(super) const ARGUMENTS: &str = "[ARGS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";

/// All that are known; the first whose marks a template has is its own.
static SYNTAXES: [Syntax; 5] = [
    // Qwen3-Coder, Qwen3.5, Nemotron 3.
    Syntax {
        has: &["<tool_call>", "<function=", "<parameter="],
        lacks: &[],
        opening: "<tool_call>",
        closing: Some("</tool_call>"),
        bare: None,
        inner: Some("<function="),
        body: Body::Tags,
        id_length: None,
    },
    // Hermes, Qwen2.5, Qwen3. GLM 4.5 and Hunyuan have the same marker around other texts.
    Syntax {
        has: &["<tool_call>", "</tool_call>", "arguments"],
        lacks: &["<arg_key>", "<tool_calls>"],
        opening: "<tool_call>",
        closing: Some("</tool_call>"),
        bare: None,
        inner: None,
        body: Body::Object { arguments: "arguments", between: Some("\n") },
        id_length: None,
    },
    // Mistral since its tokenizers of version 11.
    Syntax {
        has: &["[TOOL_CALLS]", ARGUMENTS],
        lacks: &[],
        opening: "[TOOL_CALLS]",
        closing: None,
        bare: None,
        inner: None,
        body: Body::Named,
        id_length: Some(9),
    },
    // Mistral before.
    Syntax {
        has: &["[TOOL_CALLS]"],
        lacks: &[],
        opening: "[TOOL_CALLS]",
        closing: None,
        bare: None,
        inner: None,
        body: Body::List,
        id_length: Some(9),
    },
    // Llama 3.1 to 4. Their templates take one call a turn; `;` divides those of models that make more.
    Syntax {
        has: &["dictionary of argument name and its value", "parameters"],
        lacks: &[],
        opening: "<|python_tag|>",
        closing: Some(";"),
        bare: Some('{'),
        inner: None,
        body: Body::Object { arguments: "parameters", between: None },
        id_length: None,
    },
];

impl Syntax {
    /// That of a template's text, if it is known.
    pub(super) fn of(template: &str) -> Option<&'static Self> {
        let is_own = |syntax: &&Self| {
            syntax.has.iter().all(|mark| template.contains(mark))
                && !syntax.lacks.iter().any(|mark| template.contains(mark))
        };
        SYNTAXES.iter().find(is_own)
    }

    /// What begins a call, unless it is forced without.
    pub(super) fn forced_opening(&self) -> Option<&'static str> {
        self.bare.is_none().then_some(self.opening)
    }

    /// What may be a special token.
    pub(super) fn markers(&self) -> impl Iterator<Item = &'static str> {
        let within: &[&str] = match self.body {
            Body::Named => &[ARGUMENTS, CALL_ID],
            Body::Object { .. } | Body::List | Body::Tags => &[],
        };
        [self.opening].into_iter().chain(self.closing).chain(within.iter().copied())
    }

    /// Where in a text, from a byte on, the first call's opening and its body begin.
    pub(super) fn find(&self, text: &str, from: usize) -> Option<(usize, usize)> {
        let at = |marker: &str| text[from..].find(marker).map(|at| from + at);
        let marked = at(self.opening).map(|at| (at, at + self.opening.len()));
        let inner = self.inner.and_then(at).map(|at| (at, at));
        marked.into_iter().chain(inner).min()
    }

    /// Where in a text, from a byte on, begins what may become an opening: its end if nothing may.
    pub(super) fn beginning(&self, text: &str, from: usize) -> usize {
        let may_begin = |at: &usize| {
            let mut markers = [self.opening].into_iter().chain(self.inner);
            markers.any(|marker| marker.starts_with(&text[*at..]))
        };
        let mut places = text[from..].char_indices().map(|(at, _)| from + at);
        places.find(may_begin).unwrap_or(text.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_says_which_syntax_it_has() {
        let body = |template: &str| Syntax::of(template).map(|syntax| syntax.body);
        let hermes = Body::Object { arguments: "arguments", between: Some("\n") };
        let llama = Body::Object { arguments: "parameters", between: None };
        for (template, wanted) in [
            (
                r#"{{ '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}}\n</tool_call>"#,
                hermes,
            ),
            ("<tool_call>\n<function=' + f.name + '>\n<parameter=' + k + '>", Body::Tags),
            ("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments }}", Body::Named),
            ("{{ '[TOOL_CALLS] [' }}{% set out = call.function|tojson %}", Body::List),
            (r#"{"name": n, "parameters": dictionary of argument name and its value}"#, llama),
        ] {
            assert_eq!(body(template), Some(wanted), "{template}");
        }
        for template in [
            "",
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "<tool_call>{name}\n<arg_key>{key}</arg_key></tool_call> arguments",
            "<tool_calls>\n<tool_call>name\n```json\narguments```</tool_call></tool_calls>",
            r#"<function=example>{"name": "value"}</function> parameters"#,
            "<|start|>assistant<|channel|>commentary to=functions.name",
        ] {
            assert_eq!(body(template), None, "{template}");
        }
    }

    #[test]
    fn only_what_may_become_an_opening_is_its_beginning() {
        let syntax = Syntax::of("<tool_call><function=<parameter=").expect("known");
        for (text, from, wanted) in [
            ("a <tool", 0, 2),
            ("a <tool b", 0, 9),
            ("<<fun", 0, 1),
            ("<function", 1, 9),
            ("\u{e9}<", 0, 2),
            ("", 0, 0),
        ] {
            assert_eq!(syntax.beginning(text, from), wanted, "{text}");
        }
        assert_eq!(syntax.find("a <tool_call> <function=", 0), Some((2, 13)));
        assert_eq!(syntax.find("a <function=", 0), Some((2, 2)));
    }
}
