//! What a measurement is recorded with: what was typed, the models, the machine.

use std::ffi::OsString;
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

use longdraft_models::target_model::tensor_specs;
use longdraft_records::decode::{Circumstances, DecodeRecord, VERSION, date_of};
pub(crate) use longdraft_serving::quoted;

use crate::cli::DecodingArguments;
use crate::decoding::Models;
use crate::doctor::processor_name;

/// A record without cells.
pub(crate) fn begin(
    (target, prompts): (&str, &str),
    decoding: &DecodingArguments,
    models: &Models,
    max_new_tokens: usize,
) -> DecodeRecord {
    let template = models.tokenizer.chat_template();
    DecodeRecord {
        version: VERSION,
        binary_version: env!("CARGO_PKG_VERSION").to_owned(),
        target: target.to_owned(),
        target_fingerprint: models.target.fingerprint().to_owned(),
        draft: decoding.draft.as_ref().map(|path| path.display().to_string()),
        prompts: prompts.to_owned(),
        chat_template_kwargs: template.map(|own| own.variables().clone()).unwrap_or_default(),
        dtype: format!("{:?}", decoding.held.dtype).to_lowercase(),
        threads: rayon::current_num_threads(),
        max_new_tokens,
        cells: Vec::new(),
        circumstances: None,
    }
}

/// When, where and how it was measured, now that it is.
pub(crate) fn circumstances(models: &Models, seconds: f64) -> Circumstances {
    let specs = tensor_specs(models.target.config());
    Circumstances {
        date: date_of(SystemTime::now()),
        command: COMMAND.get().cloned().unwrap_or_default(),
        processor: processor_name(),
        target_parameters: specs.iter().map(|spec| spec.shape.iter().product::<usize>()).sum(),
        draft_parameters: models.draft_parameters(),
        seconds,
    }
}

/// What was typed; nothing where another program works with this one's libraries.
static COMMAND: OnceLock<String> = OnceLock::new();

/// What was typed, as it was, this program's name first.
static WORDS: OnceLock<Vec<OsString>> = OnceLock::new();

/// What starts this program, where that is not its own file.
static PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// Names what starts this program: a module of Python's is started by its interpreter.
pub(crate) fn set_program(words: Vec<OsString>) {
    // The first one holds.
    let _ = PROGRAM.set(words);
}

/// What was typed, to be run by another process. It fails where the system does not know where this program lies.
pub(crate) fn again() -> std::io::Result<Command> {
    let mut command = match PROGRAM.get().and_then(|words| words.split_first()) {
        Some((program, words)) => {
            let mut command = Command::new(program);
            command.args(words);
            command
        }
        None => Command::new(std::env::current_exe()?),
    };
    command.args(WORDS.get().into_iter().flatten().skip(1));
    Ok(command)
}

/// Keeps what was typed, this program's name first.
pub(crate) fn set_command(words: &[OsString]) {
    let _ = WORDS.set(words.to_vec());
    let words = words.iter().skip(1).map(|word| word.to_string_lossy().into_owned());
    let _ = COMMAND.set(command_line(words));
}

/// What was typed, such that a shell reads it again.
fn command_line(words: impl Iterator<Item = String>) -> String {
    let words: Vec<String> = words.map(|word| quoted(&word)).collect();
    format!("longdraft {}", words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_quoted_as_a_shell_needs_them() {
        let words = ["eval", "--prompts", "my file.jsonl", "it's", ""].map(str::to_owned);
        let text = command_line(words.into_iter());
        assert_eq!(text, "longdraft eval --prompts 'my file.jsonl' 'it'\\''s' ''");
    }
}
