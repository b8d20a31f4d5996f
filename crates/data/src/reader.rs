//! A source into documents: align, render, encode on every thread, in the order of the rows.

use std::path::PathBuf;

use rayon::prelude::*;

use crate::document::{Document, TextEncoder};
use crate::error::{DataError, Result};
use crate::quarantine::{BadRow, Quarantine};
pub use crate::report::SourceReport;
use crate::shards;
use crate::source::{RawRow, Row, SourceConfig, read_rows};
use crate::template::chat::ChatLayout;
use crate::template::{Example, Learn, Rendered, Template, render_conversation, render_plain};

/// Text that is in work at once, in bytes. It bounds memory, and changes no result.
const CHUNK_BYTES: usize = 4 << 20;

/// Rows that are looked at for a format that is recognised by itself.
const DETECTION_ROWS: usize = 100;

/// What a row came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// A document of at least two tokens.
    Document(Document),
    /// Fewer than two tokens: nothing can be predicted.
    TooShort,
    /// A prompt beyond `max_prompt_tokens`.
    PromptTooLong,
    /// A malformed row.
    Bad(BadRow),
}

/// Turns rows of one source into documents.
pub struct SourceReader<'a> {
    config: &'a SourceConfig,
    paths: Vec<PathBuf>,
    template: Template,
    detected: Option<String>,
    layout: Option<ChatLayout>,
    encoder: &'a dyn TextEncoder,
}

impl<'a> SourceReader<'a> {
    /// Prepares for a source whose text stands at `paths` (the source's own path, or the files
    /// that a hub delivered for it).
    ///
    /// # Errors
    /// - a path is unreadable, no format is recognised, the model has no chat template for a
    ///   chat, or the template's turns cannot be told apart for a mask that needs them
    pub fn open(
        config: &'a SourceConfig,
        paths: Vec<PathBuf>,
        encoder: &'a dyn TextEncoder,
    ) -> Result<Self> {
        let (template, detected) = match &config.template {
            Template::Auto => detect(config, &paths).map(|(found, kind)| (found, Some(kind)))?,
            given => (given.clone(), None),
        };
        let fail = |problem: String| DataError::source(&config.path, problem);
        if template.is_chat() && !encoder.has_chat_template() {
            return Err(fail(
                "these rows are chats, but the target has no chat template: use an instruct \
                 model, or a `raw` template"
                    .to_owned(),
            ));
        }
        if let Some(problem) = template.problems(config.learn).first()
            && detected.is_some()
        {
            return Err(fail(problem.clone()));
        }
        let needed = template.is_chat() && config.learn != Learn::All;
        let layout = needed.then(|| ChatLayout::probe(encoder).map_err(fail)).transpose()?;
        Ok(Self { config, paths, template, detected, layout, encoder })
    }

    /// The template, recognised by itself or as configured.
    pub fn template(&self) -> &Template {
        &self.template
    }

    /// A report that counts nothing yet.
    pub fn report(&self) -> SourceReport {
        SourceReport {
            source: self.config.path.display().to_string(),
            detected: self.detected.clone(),
            ..SourceReport::default()
        }
    }

    /// Rows in order, unparsed.
    ///
    /// # Errors
    /// - a file cannot be opened; a later item is an error where one cannot be read on
    pub fn rows(&self) -> Result<impl Iterator<Item = Result<RawRow>> + use<>> {
        let mut readers = Vec::new();
        for path in &self.paths {
            readers.push(read_rows(path)?);
        }
        Ok(readers.into_iter().flatten())
    }

    /// One row into a document.
    pub fn outcome(&self, raw: &RawRow) -> Outcome {
        match self.document(raw) {
            Ok(outcome) => outcome,
            Err(error) => {
                let problem = match error {
                    DataError::Row { problem, .. } => problem,
                    other => other.to_string(),
                };
                Outcome::Bad(BadRow { origin: raw.origin(), problem, raw: raw.raw().into_owned() })
            }
        }
    }

    fn document(&self, raw: &RawRow) -> Result<Outcome> {
        let mut row = raw.parse()?;
        self.config.aligners.iter().try_for_each(|aligner| aligner.apply(&mut row))?;
        let mut document = match self.template.example(&mut row)? {
            Example::Tokens { ids, loss_mask } => self.checked(&row, ids, loss_mask)?,
            example => {
                let rendered = self.render(&row, example)?;
                Document::from_rendered(&rendered, row.origin(), self.encoder)
                    .map_err(|problem| row.problem(problem))?
            }
        };
        if let Some(max) = self.config.max_prompt_tokens
            && !document.cap_prompt(max, self.config.prompt_overflow)
        {
            return Ok(Outcome::PromptTooLong);
        }
        // A single token has no label after it.
        Ok(if document.ids.len() < 2 { Outcome::TooShort } else { Outcome::Document(document) })
    }

    fn render(&self, row: &Row, example: Example) -> Result<Rendered> {
        let learn = self.config.learn;
        match example {
            Example::Plain { text, answer } => Ok(render_plain(text, answer, learn)),
            Example::Chat(conversation) => {
                render_conversation(&conversation, learn, self.layout.as_ref(), self.encoder)
                    .map_err(|problem| row.problem(problem))
            }
            Example::Tokens { .. } => Err(row.problem("tokens are not rendered")),
        }
    }

    fn checked(&self, row: &Row, ids: Vec<u32>, loss_mask: Vec<bool>) -> Result<Document> {
        let vocabulary = self.encoder.vocabulary();
        match ids.iter().find(|id| **id as usize >= vocabulary) {
            Some(id) => Err(row.problem(format!(
                "token id {id} is beyond the target's vocabulary of {vocabulary}"
            ))),
            None => Ok(Document { ids, loss_mask, origin: row.origin() }),
        }
    }
}

/// The template of the first row that is an object, and its kind.
fn detect(config: &SourceConfig, paths: &[PathBuf]) -> Result<(Template, String)> {
    let mut first_problem = None;
    for path in paths {
        for raw in read_rows(path)?.take(DETECTION_ROWS) {
            let row = raw?.parse().and_then(|mut row| {
                config.aligners.iter().try_for_each(|aligner| aligner.apply(&mut row))?;
                Ok(row)
            });
            match row {
                Ok(row) => {
                    let template =
                        Template::detect(&row.fields).map_err(|problem| row.problem(problem))?;
                    let kind = serde_json::to_value(&template).unwrap_or_default();
                    let kind = kind["kind"].as_str().unwrap_or_default().to_owned();
                    return Ok((template, kind));
                }
                Err(error) => first_problem = first_problem.or(Some(error.to_string())),
            }
        }
    }
    let problem = first_problem.map_or_else(String::new, |problem| format!("; {problem}"));
    Err(DataError::source(
        &config.path,
        format!("no row is well-formed enough to recognise its format{problem}"),
    ))
}

/// Calls `each` with chunks of rows of about `bytes` bytes of text; it says whether to go on.
pub(crate) fn in_chunks(
    rows: impl Iterator<Item = Result<RawRow>>,
    bytes: usize,
    each: &mut dyn FnMut(&[RawRow]) -> Result<bool>,
) -> Result<()> {
    let (mut chunk, mut size) = (Vec::new(), 0);
    for row in rows {
        let row = row?;
        size += row.raw().len();
        chunk.push(row);
        if size >= bytes {
            if !each(&chunk)? {
                return Ok(());
            }
            chunk.clear();
            size = 0;
        }
    }
    if !chunk.is_empty() {
        each(&chunk)?;
    }
    Ok(())
}

/// Reads a source whose text stands at `paths` into memory, up to its `limit_tokens`; a folder of
/// prepared shards is read as it is, its template and mask long chosen.
///
/// # Errors
/// - as [`SourceReader::open`], [`read_documents`] and [`shards::read`]
pub fn read_source(
    config: &SourceConfig,
    paths: Vec<PathBuf>,
    encoder: &dyn TextEncoder,
    quarantine: &mut Quarantine,
) -> Result<(Vec<Document>, SourceReport)> {
    match paths.as_slice() {
        [folder] if shards::is_shards(folder) => shards::read(folder, encoder, config.limit_tokens),
        _ => read_documents(&SourceReader::open(config, paths, encoder)?, quarantine),
    }
}

/// Reads rows into memory, up to the source's `limit_tokens`.
///
/// # Errors
/// - a file is unreadable, too many rows are malformed, or no token is left to learn
pub fn read_documents(
    reader: &SourceReader<'_>,
    quarantine: &mut Quarantine,
) -> Result<(Vec<Document>, SourceReport)> {
    let path = &reader.config.path;
    let limit = reader.config.limit_tokens.unwrap_or(usize::MAX);
    let (mut documents, mut report) = (Vec::new(), reader.report());
    quarantine.begin_source();
    in_chunks(reader.rows()?, CHUNK_BYTES, &mut |chunk| {
        let outcomes: Vec<Outcome> = chunk.par_iter().map(|row| reader.outcome(row)).collect();
        for outcome in outcomes {
            report.add(&outcome);
            match outcome {
                Outcome::Bad(row) => quarantine.take(&row, path, report.rows)?,
                Outcome::Document(document) => documents.push(document),
                Outcome::TooShort | Outcome::PromptTooLong => {}
            }
            if report.tokens >= limit {
                return Ok(false);
            }
        }
        Ok(true)
    })?;
    quarantine.end_source(path, report.rows)?;
    if report.learned == 0 {
        return Err(DataError::Empty {
            path: path.clone(),
            rows: report.rows,
            first_problem: quarantine.first_problem(),
        });
    }
    Ok((documents, report))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::tests::Bytes;
    use serde_json::{Value, json};

    fn read(config: Value, rows: &[&str]) -> Result<(Vec<Document>, SourceReport, Vec<BadRow>)> {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, rows.join("\n")).expect("write");
        let mut config: SourceConfig = serde_json::from_value(config).expect("a source");
        config.path.clone_from(&path);
        let reader = SourceReader::open(&config, vec![path], &Bytes)?;
        let aside = dir.path().join("quarantine.jsonl");
        let mut quarantine = Quarantine::new(Some(aside.clone()), 0.5)?;
        let (documents, report) = read_documents(&reader, &mut quarantine)?;
        let text = std::fs::read_to_string(aside).unwrap_or_default();
        let bad = text.lines().map(|line| serde_json::from_str(line).expect("a row")).collect();
        Ok((documents, report, bad))
    }

    /// Learned bytes in square brackets.
    fn shown(document: &Document) -> String {
        let mut text = String::new();
        for (id, learned) in document.ids.iter().zip(&document.loss_mask) {
            let c = char::from_u32(*id).filter(|_| *id < 256).unwrap_or('$');
            if *learned {
                text.extend(['[', c, ']']);
            } else {
                text.push(c);
            }
        }
        text.replace("][", "")
    }

    #[track_caller]
    fn shows(config: Value, row: &str, expected: &str) {
        let (documents, ..) = read(config, &[row]).expect("readable");
        assert_eq!(shown(&documents[0]), expected);
    }

    #[test]
    fn every_format_becomes_text_with_its_answer() {
        let answer = |template: Value| json!({"path": "", "template": template, "learn": "answer"});
        let all = |template: Value| json!({"path": "", "template": template});
        shows(
            all(json!({"kind": "raw", "fields": ["a", "b"], "separator": "-"})),
            r#"{"a": "x", "b": "yz"}"#,
            "[x-yz$]",
        );
        shows(
            all(json!({"kind": "source_target"})),
            r#"{"source": "web", "target": "yz"}"#,
            "[yz$]",
        );
        shows(
            answer(json!({"kind": "source_target", "with_source": true, "separator": ">"})),
            r#"{"source": "x", "target": "yz"}"#,
            "x>[yz$]",
        );
        shows(
            answer(json!({"kind": "chat", "user": "q", "assistant": "a"})),
            r#"{"q": "1+1", "a": "2"}"#,
            "<user>1+1|<assistant>[2|]",
        );
        shows(
            answer(json!({"kind": "alpaca", "system": "S"})),
            r#"{"instruction": "i", "input": "x", "output": "o"}"#,
            "<system>S|<user>i\n\nx|<assistant>[o|]",
        );
        shows(
            answer(json!({"kind": "alpaca"})),
            r#"{"instruction": "i", "input": "", "output": "o"}"#,
            "<user>i|<assistant>[o|]",
        );
        shows(
            answer(json!({"kind": "gsm8k"})),
            r#"{"question": "q", "answer": "a"}"#,
            "<user>q|<assistant>[a|]",
        );
        shows(answer(json!({"kind": "code"})), r#"{"prefix": "p", "suffix": "s"}"#, "p[s$]");
        shows(
            answer(json!({"kind": "code", "prompt": "Go on: {prefix}"})),
            r#"{"prefix": "p", "suffix": "s"}"#,
            "<user>Go on: p|<assistant>[s|]",
        );
        shows(
            answer(json!({"kind": "problem_answer", "answer": "qwq"})),
            r#"{"problem": "p", "qwq": "long"}"#,
            "<user>p|<assistant>[long|]",
        );
        shows(
            all(json!({"kind": "tokens"})),
            r#"{"input_ids": [97, 98, 256], "loss_mask": [0, 1, true]}"#,
            "a[b$]",
        );
        let summarise = json!({"kind": "summarise", "prompt": "{article}?", "answer_prefix": ">"});
        shows(
            json!({"path": "", "template": summarise, "learn": "assistant"}),
            r#"{"article": ["a", "b"], "abstract": ["c", "d"]}"#,
            "<user>a?|<assistant>[>c|]<user>b?|<assistant>[>d|]",
        );
        shows(
            json!({"path": "", "template": {"kind": "sharegpt"}, "learn": "last"}),
            r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]}"#,
            "<user>a|<assistant>b|<user>c|<assistant>[d|]",
        );
        shows(
            json!({"path": "", "template": {"kind": "auto"}, "learn": "no_system"}),
            r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
            "<system>s|[<user>a|<assistant>b|]",
        );
    }

    #[test]
    fn bad_rows_are_set_aside_with_place_and_text_and_the_rest_is_used() {
        let rows = [r#"{"text": "ab"}"#, "{broken", r#"{"text": 3}"#, r#"{"text": ""}"#];
        let (documents, report, bad) = read(json!({"path": ""}), &rows).expect("tolerated");
        assert_eq!(documents.len(), 1);
        assert_eq!((report.rows, report.bad, report.too_short, report.documents), (4, 2, 1, 1));
        assert_eq!((bad[0].origin.as_str(), bad[0].raw.as_str()), ("rows.jsonl:2", "{broken"));
        assert!(bad[1].problem.contains("field `text` is no string"), "{}", bad[1].problem);
        assert_eq!(report.remarks().len(), 2);
    }

    #[test]
    fn tokens_beyond_the_vocabulary_and_nothing_to_learn_are_told() {
        let tokens = json!({"path": "", "template": {"kind": "tokens"}});
        let error = read(tokens.clone(), &[r#"{"input_ids": [1, 257]}"#]).expect_err("beyond");
        assert!(error.to_string().contains("token id 257 is beyond"), "{error}");
        let error = read(tokens, &[r#"{"input_ids": [1, 2], "loss_mask": [1, 0]}"#]);
        assert!(matches!(error, Err(DataError::Empty { rows: 1, .. })), "{error:?}");
        assert!(matches!(read(json!({"path": ""}), &[]), Err(DataError::Empty { rows: 0, .. })));
    }

    #[test]
    fn limits_stop_reading_and_cap_prompts() {
        let rows = [r#"{"prefix": "abcd", "suffix": "x"}"#, r#"{"prefix": "a", "suffix": "y"}"#];
        let code = |extra: (&str, Value)| {
            let mut config = json!({"path": "", "template": {"kind": "code"}, "learn": "answer"});
            config[extra.0] = extra.1;
            config
        };
        let (documents, ..) = read(code(("limit_tokens", json!(3))), &rows).expect("limited");
        assert_eq!(documents.len(), 1);
        let (documents, report, _) =
            read(code(("max_prompt_tokens", json!(2))), &rows).expect("capped");
        assert_eq!((documents.len(), report.prompt_too_long), (1, 1));
        assert_eq!(shown(&documents[0]), "a[y$]");
    }
}
