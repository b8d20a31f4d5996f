//! `longdraft data stats`: how much there is, how long it is, how well it packs.

use longdraft_data::packing::{Overlong, Packing, arrange, fill, pieces};
use longdraft_data::quarantine::Quarantine;
use longdraft_data::reader::{SourceReport, read_source};
use longdraft_data::{Document, SourceConfig};
use longdraft_train::stage::{Encoder, source_paths};
use serde_json::json;

use super::Inputs;
use crate::cli::DataStatsArguments;
use crate::failure::Result;
use crate::terminal::counted;

/// Shares of documents whose length is told.
const PERCENTILES: [usize; 6] = [5, 25, 50, 75, 95, 100];

/// Characters of the longest histogram bar.
const BAR: usize = 40;

/// Reads every source and prints its figures.
pub(super) fn run(arguments: &DataStatsArguments, json: bool) -> Result<()> {
    let inputs = Inputs::of(&arguments.inputs)?;
    let data = inputs.config.as_ref().map(|config| &config.data);
    let row_tokens = data.map_or(arguments.row_tokens, |data| data.row_tokens).max(2);
    let packing = data.map_or(Packing::default(), |data| data.packing);
    let overlong = data.map_or(Overlong::default(), |data| data.overlong);
    let (documents, reports) = read(&inputs, &inputs.train)?;
    let (_, held_out) = read(&inputs, &inputs.held_out)?;
    reports.iter().for_each(|report| print_source(report, ""));
    held_out.iter().for_each(|report| print_source(report, " (held out)"));
    let mut lengths: Vec<usize> = documents.iter().map(|document| document.ids.len()).collect();
    lengths.sort_unstable();
    let all = pieces(&documents, row_tokens, overlong);
    let rows = arrange(all.filter(|piece| piece.is_learned(&documents)), row_tokens, packing);
    let fill = fill(&rows, row_tokens);
    print_lengths(&lengths);
    outln!(
        "packed into {} of {row_tokens} tokens: {:.1} % of them filled",
        counted(rows.len(), "row"),
        100.0 * fill
    );
    if json {
        let percentiles: serde_json::Map<String, serde_json::Value> = PERCENTILES
            .iter()
            .map(|share| (format!("p{share}"), json!(percentile(&lengths, *share))))
            .collect();
        outjson!({
            "sources": reports, "held_out": held_out, "lengths": percentiles,
            "packed_rows": rows.len(), "row_tokens": row_tokens, "fill": fill,
        });
    }
    Ok(())
}

fn read(inputs: &Inputs, sources: &[SourceConfig]) -> Result<(Vec<Document>, Vec<SourceReport>)> {
    let encoder = Encoder::new(&inputs.tokenizer, &inputs.target);
    let mut quarantine = Quarantine::new(None, inputs.max_bad_rows())?;
    let (mut documents, mut reports) = (Vec::new(), Vec::new());
    for source in sources {
        let paths = source_paths(source)?;
        let (read, report) = read_source(source, paths, &encoder, &mut quarantine)?;
        documents.extend(read);
        reports.push(report);
    }
    Ok((documents, reports))
}

fn print_source(report: &SourceReport, note: &str) {
    let kind = report.detected.as_ref().map(|kind| format!(", read as `{kind}`"));
    outln!("{}{note}{}", report.source, kind.unwrap_or_default());
    outln!(
        "  {}: {}, {} malformed, {} with too long a prompt, {} too short",
        counted(report.rows, "row"),
        counted(report.documents, "document"),
        report.bad,
        report.prompt_too_long,
        report.too_short
    );
    outln!(
        "  {} tokens, {} learned ({:.1} %); {} documents without a learned token",
        report.tokens,
        report.learned,
        100.0 * report.learned as f64 / report.tokens.max(1) as f64,
        report.unlearned
    );
}

/// Nearest-rank percentile of ascending values, 0 of nothing.
fn percentile(sorted: &[usize], share: usize) -> usize {
    let rank = (sorted.len() * share).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

/// Percentiles, and a bar for every power of two.
fn print_lengths(sorted: &[usize]) {
    let shown: Vec<String> = PERCENTILES
        .iter()
        .map(|share| format!("{share} %: {}", percentile(sorted, *share)))
        .collect();
    outln!("tokens of a document, {}", shown.join("  "));
    let bins = histogram(sorted);
    let most = bins.iter().map(|(_, count)| *count).max().unwrap_or(1).max(1);
    for (from, count) in bins {
        let bar = "#".repeat((count * BAR).div_ceil(most));
        outln!("  {from:>8} .. {:<8} {count:>8} {bar}", 2 * from - 1);
    }
}

/// Documents by the power of two that their length reaches, without gaps.
fn histogram(sorted: &[usize]) -> Vec<(usize, usize)> {
    let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else { return Vec::new() };
    (first.max(&1).ilog2()..=last.max(&1).ilog2())
        .map(|power| {
            let from = 1 << power;
            (from, sorted.iter().filter(|n| (from..2 * from).contains(*n)).count())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occur_and_bins_have_no_gaps() {
        let sorted = [2, 3, 5, 40];
        assert_eq!(percentile(&sorted, 5), 2);
        assert_eq!(percentile(&sorted, 50), 3);
        assert_eq!(percentile(&sorted, 75), 5);
        assert_eq!(percentile(&sorted, 100), 40);
        assert_eq!(percentile(&[], 50), 0);
        assert_eq!(histogram(&sorted), [(2, 2), (4, 1), (8, 0), (16, 0), (32, 1)]);
        assert!(histogram(&[]).is_empty());
    }
}
