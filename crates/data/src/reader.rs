//! A source into documents: align, render, encode on every thread, in the order of the rows.

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use rayon::prelude::*;

use crate::conversation::Conversation;
use crate::document::Document;
use crate::encoder::TextEncoder;
use crate::error::{DataError, Result};
use crate::quarantine::{BadRow, Quarantine};
use crate::report::Part;
pub use crate::report::{Outcome, SourceReport};
use crate::shards;
use crate::source::{RawRow, Row, SourceConfig, data_files, rows_of_files};
use crate::template::chat::ChatLayout;
use crate::template::{
    Cut, Example, Learn, Rendered, Template, Verbatim, form, render_conversation, render_plain,
};

/// Text that is in work at once, in bytes. It bounds memory, and changes no result.
const CHUNK_BYTES: usize = 4 << 20;

/// Rows that are looked at until some tell their format, or one can be used.
const FIRST_ROWS: usize = 100;

/// Rows that tell their format, of which the greater part decides.
const DETECTION_ROWS: usize = 16;

/// Text that is read to recognise a format once a row has told it, in bytes.
const DETECTION_BYTES: usize = 4 << 20;

/// Text of a row that is tokenised to see whether it can be, in bytes: a book takes seconds.
const TRIED_BYTES: usize = 1 << 20;

/// Turns rows of one source into documents.
pub struct SourceReader<'a> {
    config: &'a SourceConfig,
    paths: Vec<PathBuf>,
    template: Template,
    detected: Option<String>,
    learn: Learn,
    layout: Option<ChatLayout>,
    encoder: &'a dyn TextEncoder,
    /// Of the target's own answers.
    form: String,
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
                 model, or read them as text: `template: {kind: raw, fields: [...]}` names text \
                 fields; of a list of turns the aligners `map` (as `prompt: messages.0.content`) \
                 and `concat` (`to: text`) make one"
                    .to_owned(),
            ));
        }
        if let Some(problem) = template.problems(config.learn, true).first()
            && let Some(kind) = &detected
        {
            return Err(fail(format!("read as `{kind}`: {problem}")));
        }
        let learn = config.learn.unwrap_or_else(|| template.usual_learn());
        if let Some(problem) = config.prompt_problem(learn) {
            return Err(fail(problem.to_string()));
        }
        let unclear = |problem| {
            fail(format!(
                "{problem}, so what the assistant says is not known: `learn: all` needs no turns"
            ))
        };
        let layout = match template.is_chat().then(|| ChatLayout::probe(encoder)) {
            Some(Err(problem)) if learn != Learn::All => return Err(unclear(problem)),
            found => found.and_then(std::result::Result::ok),
        };
        let form = form(&encoder.fingerprint(), encoder.chat_fingerprint().as_deref());
        Ok(Self { config, paths, template, detected, learn, layout, encoder, form })
    }

    /// Reads rows until one can be trained on, so that a source that cannot be used is known before
    /// anything is done with it. A long row is rendered, not tokenised.
    ///
    /// # Errors
    /// - a file is unreadable, or none of the first rows can be used; the first one's problem is told
    pub fn try_first_rows(&self) -> Result<()> {
        let (mut rows, mut first_problem) = (0, None);
        for raw in self.rows()?.take(FIRST_ROWS) {
            let raw = raw?;
            rows += 1;
            let outcome = if raw.raw().len() > TRIED_BYTES {
                self.rendered(&raw).map(|()| None)
            } else {
                self.document(&raw).map(Some)
            };
            match outcome {
                Ok(None) => return Ok(()),
                Ok(Some(Outcome::Document(document))) if document.learned() > 0 => return Ok(()),
                // It may be the only one.
                Ok(Some(_)) => {}
                Err(error) => first_problem = first_problem.or(Some(error.to_string())),
            }
        }
        // Later rows may still do where these were well-formed.
        if rows == FIRST_ROWS && first_problem.is_none() {
            return Ok(());
        }
        Err(DataError::Empty { path: self.config.path.clone(), rows, first_problem })
    }

    /// Renders a row without its tokens.
    fn rendered(&self, raw: &RawRow) -> Result<()> {
        let mut row = aligned(self.config, raw)?;
        match self.template.example(&mut row)? {
            Example::Tokens { ids, loss_mask } => self.checked(&row, ids, loss_mask).map(|_| ()),
            example => self.render(&row, example).map(|_| ()),
        }
    }

    /// How rows become text, as it was given or recognised.
    pub(crate) fn template(&self) -> &Template {
        &self.template
    }

    /// What of the text is learned.
    pub(crate) fn learn(&self) -> Learn {
        self.learn
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
        raw_rows(&self.paths)
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

    /// Rows on every thread, up to the one that reaches `limit` tokens.
    pub(crate) fn part(&self, rows: &[RawRow], limit: usize) -> Part {
        let outcomes: Vec<Outcome> = rows.par_iter().map(|row| self.outcome(row)).collect();
        let mut part = Part { documents: Vec::new(), bad: Vec::new(), report: self.report() };
        for outcome in outcomes {
            part.report.add(&outcome);
            match outcome {
                Outcome::Document(document) => part.documents.push(document),
                Outcome::Bad(row) => part.bad.push(row),
                Outcome::TooShort | Outcome::PromptTooLong => {}
            }
            if part.report.tokens >= limit {
                break;
            }
        }
        part
    }

    fn document(&self, raw: &RawRow) -> Result<Outcome> {
        let mut row = aligned(self.config, raw)?;
        let mut document = match self.template.example(&mut row)? {
            Example::Tokens { ids, loss_mask } => self.checked(&row, ids, loss_mask)?,
            example => {
                let rendered = self.render(&row, example)?;
                Document::from_rendered(&rendered, row.origin(), self.encoder)
                    .map_err(|problem| row.problem(problem))?
            }
        };
        if let Some(max) = self.config.max_prompt_tokens
            && !document.cap_prompt(max, self.config.prompt_overflow, self.encoder.start_of_text())
        {
            return Ok(Outcome::PromptTooLong);
        }
        // A single token has no label after it.
        Ok(if document.ids.len() < 2 { Outcome::TooShort } else { Outcome::Document(document) })
    }

    fn render(&self, row: &Row, example: Example) -> Result<Rendered> {
        let (learn, cut) = (self.learn, self.cut(row));
        match example {
            Example::Plain { text, answer } => {
                let is_whole = cut == Cut::Nowhere;
                Ok(Rendered { append_end: is_whole, ..render_plain(text, answer, learn) })
            }
            Example::Chat(conversation) => {
                let layout = self.layout.as_ref();
                let verbatim = self.verbatim(row, &conversation);
                let how = (&cut, verbatim.as_ref());
                render_conversation(&conversation, learn, layout, how, self.encoder)
                    .map_err(|problem| row.problem(problem))
            }
            Example::Tokens { .. } => Err(row.problem("tokens are not rendered")),
        }
    }

    /// What a row says of how its last answer was written.
    fn verbatim(&self, row: &Row, conversation: &Conversation) -> Option<Verbatim> {
        if !matches!(self.template, Template::Messages { .. }) {
            return None;
        }
        if conversation.variables.is_empty() {
            return Verbatim::of(&row.fields, &self.form);
        }
        let template = self.encoder.chat_fingerprint_with(&conversation.variables);
        Verbatim::of(&row.fields, &form(&self.encoder.fingerprint(), template.as_deref()))
    }

    /// What a row says of its answers, as rows of the target's own answers do.
    fn cut(&self, row: &Row) -> Cut {
        match self.template {
            Template::Messages { .. } | Template::Raw { .. } => Cut::of(&row.fields),
            _ => Cut::Nowhere,
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

/// Rows of files in order, unparsed.
fn raw_rows(paths: &[PathBuf]) -> Result<impl Iterator<Item = Result<RawRow>> + use<>> {
    let mut files = Vec::new();
    for path in paths {
        files.extend(data_files(path)?);
    }
    rows_of_files(files)
}

fn aligned(config: &SourceConfig, raw: &RawRow) -> Result<Row> {
    let mut row = raw.parse()?;
    config.aligners.iter().try_for_each(|aligner| aligner.apply(&mut row))?;
    Ok(row)
}

/// The template that fits most of the first rows, and its kind. Rows that fit none do not count:
/// they are malformed.
fn detect(config: &SourceConfig, paths: &[PathBuf]) -> Result<(Template, String)> {
    let mut votes: Vec<(Template, usize)> = Vec::new();
    let (mut rows, mut bytes, mut first_problem) = (0, 0, None);
    for raw in raw_rows(paths)?.take(FIRST_ROWS) {
        let raw = raw?;
        rows += 1;
        bytes += raw.raw().len();
        let found = aligned(config, &raw).and_then(|row| {
            Template::detect(&row.fields, config.learn).map_err(|problem| row.problem(problem))
        });
        match found {
            Ok(template) => match votes.iter_mut().find(|(known, _)| *known == template) {
                Some((_, count)) => *count += 1,
                None => votes.push((template, 1)),
            },
            Err(error) => first_problem = first_problem.or(Some(error.to_string())),
        }
        let told: usize = votes.iter().map(|(_, count)| count).sum();
        if told >= DETECTION_ROWS || (told > 0 && bytes >= DETECTION_BYTES) {
            break;
        }
    }
    // Of equals the first.
    let most = votes.into_iter().rev().max_by_key(|(_, count)| *count);
    let Some((template, _)) = most else {
        let path = config.path.clone();
        return Err(match first_problem {
            None => DataError::Empty { path, rows, first_problem },
            Some(problem) => {
                let told = match rows {
                    1 => "its only row does not tell its format".to_owned(),
                    _ => format!("none of its first {rows} rows tells its format"),
                };
                DataError::source(path, format!("{told}: {problem}"))
            }
        });
    };
    let kind = serde_json::to_value(&template).unwrap_or_default();
    let kind = kind["kind"].as_str().unwrap_or_default().to_owned();
    Ok((template, kind))
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

/// Opens a source whose text stands at `paths` and tries its first rows, as quickly as that goes.
///
/// # Errors
/// - as [`SourceReader::open`], [`SourceReader::try_first_rows`] and [`shards::check`]
pub fn check_source(
    config: &SourceConfig,
    paths: Vec<PathBuf>,
    encoder: &dyn TextEncoder,
) -> Result<()> {
    match paths.as_slice() {
        [folder] if shards::is_shards(folder) => shards::check(folder, encoder),
        _ => SourceReader::open(config, paths, encoder)?.try_first_rows(),
    }
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
        let part = reader.part(chunk, limit - report.tokens);
        report.merge(&part.report);
        quarantine.take(&part.bad, path, report.rows)?;
        documents.extend(part.documents);
        Ok(report.tokens < limit)
    })?;
    quarantine.end_source(path, (report.rows, report.learned))?;
    Ok((documents, report))
}
