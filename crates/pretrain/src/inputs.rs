//! What a run opens, tried before any work.

use std::path::Path;

use longdraft_data::DataError;
use longdraft_data::token_stream::TokenStream;
use longdraft_train::inputs::{InputProblem, InputProblems};

use crate::config::PretrainConfig;
use crate::error::Result;
use crate::score::Tokenizer;

/// Tokens of shards that are looked at.
const FIRST_TOKENS: usize = 1 << 16;

/// Problems of shards of tokens and of the tokenizer.
pub fn input_problems(config: &PretrainConfig) -> Vec<InputProblem> {
    let mut problems = InputProblems::default();
    let data = &config.data;
    for (part, paths) in [("train", &data.train), ("held_out", &data.held_out)] {
        for (index, path) in paths.iter().enumerate() {
            let key = format!("data.{part}.{index}");
            problems.take(&key, first_tokens(path, config.model.vocab_size));
        }
    }
    if let Some(path) = &data.tokenizer {
        problems.take("data.tokenizer", Tokenizer::open(path));
    }
    problems.check_output(&config.output);
    problems.0
}

/// Opens shards and looks for ids beyond the vocabulary among their first tokens.
fn first_tokens(path: &Path, vocabulary: usize) -> Result<()> {
    let stream = TokenStream::open(&[path.to_path_buf()])?;
    let tokens = stream.read(0..stream.len().min(FIRST_TOKENS))?;
    match tokens.iter().position(|id| usize::from(*id) >= vocabulary) {
        None => Ok(()),
        Some(at) => {
            let id = tokens[at];
            let problem = format!("token {at} is {id}, beyond the vocabulary of {vocabulary}");
            Err(DataError::Shards { path: path.to_path_buf(), problem }.into())
        }
    }
}
