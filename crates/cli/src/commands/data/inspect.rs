//! `longdraft data inspect`: rows as the target reads them, with their loss mask.

use longdraft_data::reader::{Outcome, SourceReader};
use longdraft_data::{Document, SourceConfig, shards};
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_train::stage::{Encoder, source_paths};
use serde_json::{Value, json};

use super::Inputs;
use crate::cli::DataInspectArguments;
use crate::failure::Result;
use crate::terminal::written_out;

/// Shows the first rows of every source.
pub(super) fn run(arguments: &DataInspectArguments, json: bool) -> Result<()> {
    let inputs = Inputs::of(&arguments.inputs)?;
    let show = Show { tokenizer: &inputs.tokenizer, colour: crate::terminal::colours() };
    let mut figures = Vec::new();
    for source in inputs.train.iter().chain(&inputs.held_out) {
        for outcome in first_rows(source, &inputs, arguments.rows)? {
            figures.push(show.row(&outcome)?);
        }
    }
    if json {
        outjson!({ "rows": figures });
    }
    Ok(())
}

/// What the first rows come to; prepared shards give their documents.
fn first_rows(source: &SourceConfig, inputs: &Inputs, rows: usize) -> Result<Vec<Outcome>> {
    let encoder = Encoder::new(&inputs.tokenizer, &inputs.target);
    let paths = source_paths(source)?;
    outln!("== {}", source.path.display());
    if let [folder] = paths.as_slice()
        && shards::is_shards(folder)
    {
        let documents = shards::first(folder, &encoder, rows)?;
        return Ok(documents.into_iter().map(Outcome::Document).collect());
    }
    let reader = SourceReader::open(source, paths, &encoder)?;
    if let Some(kind) = reader.report().detected {
        outln!("read as `{kind}`");
    }
    let mut outcomes = Vec::new();
    for row in reader.rows()?.take(rows) {
        outcomes.push(reader.outcome(&row?));
    }
    Ok(outcomes)
}

struct Show<'a> {
    tokenizer: &'a TextTokenizer,
    colour: bool,
}

impl Show<'_> {
    /// Prints a row; returns its figures.
    fn row(&self, outcome: &Outcome) -> Result<Value> {
        let document = match outcome {
            Outcome::Document(document) => document,
            Outcome::Bad(row) => {
                outln!("-- {}: malformed: {}", row.origin, row.problem);
                return Ok(json!({ "origin": row.origin, "problem": row.problem }));
            }
            Outcome::TooShort => {
                outln!("-- left out: fewer than two tokens");
                return Ok(json!({ "problem": "fewer than two tokens" }));
            }
            Outcome::PromptTooLong => {
                outln!("-- left out: the prompt is longer than max_prompt_tokens");
                return Ok(json!({ "problem": "prompt too long" }));
            }
        };
        let (tokens, learned) = (document.ids.len(), document.learned());
        let flag = flag(document);
        outln!(
            "-- {}: {tokens} tokens, {learned} learned ({:.0} %){}",
            document.origin,
            100.0 * learned as f64 / (tokens - 1).max(1) as f64,
            flag.map(|flag| format!("  ! {flag}")).unwrap_or_default()
        );
        outln!("{}", self.text(document)?);
        Ok(json!({
            "origin": document.origin, "tokens": tokens, "learned": learned, "flag": flag,
        }))
    }

    /// The text of a document, learned runs of tokens marked.
    fn text(&self, document: &Document) -> Result<String> {
        let mut text = String::new();
        let mut start = 0;
        for run in document.loss_mask.chunk_by(|a, b| a == b) {
            let ids = &document.ids[start..start + run.len()];
            start += run.len();
            let (open, close) = match (run[0], self.colour) {
                (true, true) => ("\u{1b}[32m", "\u{1b}[0m"),
                (false, true) => ("\u{1b}[2m", "\u{1b}[0m"),
                (true, false) => ("[[", "]]"),
                (false, false) => ("", ""),
            };
            let piece = self.tokenizer.decode(ids, false)?;
            text.extend([open, &written_out(&piece, &['\n', '\t']), close]);
        }
        Ok(text)
    }
}

/// A mask that is probably not meant.
fn flag(document: &Document) -> Option<&'static str> {
    match document.learned() {
        0 => Some("nothing is learned"),
        learned if learned + 1 == document.ids.len() => Some("everything is learned"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_that_are_all_one_or_all_zero_are_flagged() {
        let flag_of = |mask: [bool; 3]| {
            flag(&Document { ids: vec![0; 3], loss_mask: mask.to_vec(), origin: String::new() })
        };
        assert_eq!(flag_of([true, false, false]), Some("nothing is learned"));
        assert_eq!(flag_of([false, true, true]), Some("everything is learned"));
        assert_eq!(flag_of([false, false, true]), None);
    }
}
