//! `longdraft data prepare`: token shards on disk.

use std::time::{Duration, Instant};

use longdraft_data::prepare::{PrepareOptions, Progress, Source, prepare};
use longdraft_data::shards;
use longdraft_train::stage::{Encoder, source_paths};
use serde_json::json;

use super::{Inputs, Named};
use crate::cli::DataPrepareArguments;
use crate::failure::{Failure, Result};

/// Time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Writes shards; a second call goes on after the complete ones.
pub(super) fn run(arguments: &DataPrepareArguments, json: bool) -> Result<()> {
    if arguments.shard_kib == 0 {
        return Err(Failure::usage("--shard-kib must be at least 1"));
    }
    let inputs = Inputs::open(&Named {
        inputs: &arguments.inputs,
        target: arguments.target.as_deref(),
        learn: arguments.learn,
        overrides: &[],
    })?;
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
    let mut last_line = Instant::now();
    let mut reused = 0;
    let index = prepare(&sources, &encoder, &options, &mut |progress: Progress| {
        reused = progress.reused;
        if last_line.elapsed() >= LINE_EVERY {
            last_line = Instant::now();
            errln!(
                "{} shards ({} from before), {} rows, {} tokens",
                progress.shards,
                progress.reused,
                progress.rows,
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
    let output = arguments.output.display();
    outln!(
        "{} tokens ({} learned) of {} documents in {} shards ({reused} from before): {output}",
        index.tokens,
        index.learned,
        index.documents,
        index.shards.len()
    );
    outln!("train from them with `data.train: [{{path: {output}}}]`");
    if json {
        outln!(
            "{}",
            json!({
                "output": arguments.output, "shards": index.shards.len(), "reused": reused,
                "documents": index.documents, "tokens": index.tokens, "learned": index.learned,
                "sources": index.sources,
            })
        );
    }
    Ok(())
}
