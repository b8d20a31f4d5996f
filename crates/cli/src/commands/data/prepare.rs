//! `longdraft data prepare`: token shards on disk.

use longdraft_data::prepare::{PrepareOptions, Progress, Source, prepare};
use longdraft_data::shards;
use longdraft_train::stage::{Encoder, source_paths};
use serde_json::json;

use super::Inputs;
use crate::cli::DataPrepareArguments;
use crate::commands::require_writable;
use crate::failure::{Failure, Result};
use crate::progress::Lines;
use crate::terminal::counted;

/// Writes shards; a second call goes on after the complete ones.
pub(super) fn run(arguments: &DataPrepareArguments, json: bool) -> Result<()> {
    if arguments.shard_kib == 0 {
        return Err(Failure::usage("--shard-kib must be at least 1"));
    }
    require_writable(&arguments.output)?;
    let inputs = Inputs::open(&arguments.inputs, &arguments.reading, &[])?;
    let sources = inputs.train.iter().map(|config| {
        let paths = source_paths(config)?;
        if paths.iter().any(|path| shards::is_shards(path)) {
            let problem = format!("{}: these are prepared shards already", config.path.display());
            return Err(Failure::usage(problem));
        }
        Ok(Source { config: config.clone(), paths })
    });
    let sources: Vec<Source> = sources.collect::<Result<_>>()?;
    let encoder = Encoder::new(&inputs.tokenizer, &inputs.target);
    let options = PrepareOptions {
        output: arguments.output.clone(),
        shard_bytes: arguments.shard_kib << 10,
        max_bad_rows: inputs.max_bad_rows(),
    };
    let mut lines = Lines::later();
    let mut reused = 0;
    let index = prepare(&sources, &encoder, &options, &mut |progress: Progress| {
        reused = progress.reused;
        if lines.are_due(false) {
            errln!(
                "{} ({} from before), {}, {} tokens",
                counted(progress.shards, "shard"),
                progress.reused,
                counted(progress.rows, "row"),
                progress.tokens
            );
        }
    })?;
    for report in &index.sources {
        if let Some(kind) = &report.detected {
            errln!("{}: read as `{kind}`", report.source);
        }
        report.remarks().iter().for_each(|remark| errln!("warning: {remark}"));
    }
    let output = arguments.output.to_string_lossy();
    outln!(
        "{} tokens ({} learned) of {} in {} ({reused} from before): {output}",
        index.tokens,
        index.learned,
        counted(index.documents, "document"),
        counted(index.shards.len(), "shard")
    );
    let path = json!(output);
    outln!("train from them with `data.train: [{{path: {path}}}]`");
    if json {
        outjson!({
            "output": output, "shards": index.shards.len(), "reused": reused,
            "documents": index.documents, "tokens": index.tokens, "learned": index.learned,
            "sources": index.sources,
        });
    }
    Ok(())
}
