//! What the user wants: from options, from answers on a terminal, or by default.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use longdraft_models::hub::{DataSetId, ModelId};
use longdraft_train::method::Method;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::cli::{InitArguments, ModelSize, Purpose, names_of, parse_time};
use crate::failure::{Failure, Result};
use crate::interrupts::INTERRUPT;

/// The target and the text that the program carries.
pub(super) const DEMONSTRATION: &str = "demonstration";
pub(super) const SHIPPED: &str = "shipped";
/// Budgets by default.
const TIME: &str = "30m";

/// Everything that a configuration follows from.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Answers {
    pub(super) purpose: Purpose,
    /// Of all but pretraining.
    pub(super) target: String,
    /// Of training; of `fit` where one is named.
    pub(super) method: String,
    pub(super) data: Vec<String>,
    /// Of pretraining.
    pub(super) tokenizer: Option<PathBuf>,
    /// Of pretraining, where the text is not to choose it.
    pub(super) size: Option<ModelSize>,
    pub(super) output: PathBuf,
    /// Seconds.
    pub(super) time: f64,
}

/// A terminal with somebody who answers; nothing where defaults are taken.
struct Asking(Option<DefaultEditor>);

impl Asking {
    fn open(yes: bool) -> Result<Self> {
        if yes {
            return Ok(Self(None));
        }
        if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
            return Err(Failure::usage("there is no terminal to ask questions on")
                .hint("--yes takes the defaults; options give other answers"));
        }
        let editor = DefaultEditor::new();
        let editor = editor.map_err(|error| Failure::work(format!("the terminal: {error}")))?;
        Ok(Self(Some(editor)))
    }

    /// What was given, or what is answered; a wrong answer is asked for again.
    fn get<T>(
        &mut self,
        given: Option<String>,
        (question, default): (&str, &str),
        read: &dyn Fn(&str) -> std::result::Result<T, String>,
    ) -> Result<T> {
        if let Some(given) = given {
            return read(&given).map_err(Failure::usage);
        }
        let Some(editor) = &mut self.0 else {
            return read(default).map_err(|problem| {
                Failure::usage(problem).hint(format!("the default does not fit here: {question}?"))
            });
        };
        loop {
            let line = match editor.readline(&format!("{question} [{default}]: ")) {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => {
                    errln!(
                        "nothing was written: the same command asks again; --yes takes the defaults"
                    );
                    return Err(Failure::interrupted(INTERRUPT));
                }
                Err(ReadlineError::Eof) => {
                    return Err(Failure::work("nothing was written")
                        .hint("the same command asks again; --yes takes the defaults"));
                }
                Err(error) => return Err(Failure::work(format!("the terminal: {error}"))),
            };
            let answer = if line.trim().is_empty() { default } else { line.trim() };
            match read(answer) {
                Ok(answer) => return Ok(answer),
                Err(problem) => errln!("{problem}"),
            }
        }
    }
}

pub(super) fn ask(arguments: &InitArguments) -> Result<Answers> {
    let mut asking = Asking::open(arguments.yes)?;
    let names = names_of::<Purpose>();
    let purpose = match arguments.purpose {
        Some(purpose) => purpose,
        None => asking.get(None, (&format!("What for ({names})"), "train"), &|text| {
            Purpose::from_str(text, true).map_err(|_| format!("`{text}` is none of {names}"))
        })?,
    };
    let pretrains = purpose == Purpose::Pretrain;
    let target = if pretrains {
        String::new()
    } else {
        let question = "Target (a folder, a GGUF file, org/name, org/name:Q4_K_M)";
        asking.get(arguments.target.clone(), (question, DEMONSTRATION), &read_target)?
    };
    let takes_method = match purpose {
        Purpose::Train | Purpose::Long => true,
        Purpose::Fit => arguments.method.is_some(),
        Purpose::Pretrain => false,
    };
    let method = if takes_method {
        let names: Vec<&str> = Method::all().map(Method::name).collect();
        let question = format!("Method ({})", names.join(", "));
        let default = Method::first().name();
        asking.get(arguments.method.clone(), (&question, default), &|name| {
            let known = Method::named(name).map(|method| method.name().to_owned());
            known.ok_or_else(|| format!("`{name}` is none of {}", names.join(", ")))
        })?
    } else {
        String::new()
    };
    let given = (!arguments.data.is_empty()).then(|| arguments.data.join(","));
    let data = asking.get(
        given,
        ("Data (files, folders or hf://org/name, with commas)", SHIPPED),
        &|text| read_data(text, purpose),
    )?;
    let default = default_output(purpose, &target);
    let output = ("Folder of the run", default.as_str());
    let output = asking.get(arguments.output.clone(), output, &read_output)?;
    let time = match arguments.time {
        Some(time) => time,
        None => asking.get(None, ("Time for it (90s, 30m, 2h)", TIME), &parse_time)?,
    };
    Ok(Answers {
        purpose,
        target,
        method,
        data,
        tokenizer: arguments.tokenizer.as_ref().map(PathBuf::from),
        size: arguments.size,
        output,
        time,
    })
}

fn read_target(text: &str) -> std::result::Result<String, String> {
    if text == DEMONSTRATION || Path::new(text).exists() || ModelId::parse(text).is_some() {
        return Ok(text.to_owned());
    }
    Err(format!("{text}: no such file or folder; a model of the hub is written org/name"))
}

fn read_data(text: &str, purpose: Purpose) -> std::result::Result<Vec<String>, String> {
    let paths: Vec<String> =
        text.split(',').map(str::trim).filter(|path| !path.is_empty()).map(str::to_owned).collect();
    if paths.is_empty() {
        return Err("no data: give a file, a folder, hf://org/name, or `shipped`".to_owned());
    }
    if purpose == Purpose::Fit && paths.len() > 1 {
        return Err(
            "fit takes one file or folder of prompts: put several files into a folder".to_owned()
        );
    }
    for path in &paths {
        let on_hub = DataSetId::parse(path);
        match on_hub {
            Some(Err(error)) => return Err(error.to_string()),
            Some(Ok(_)) if purpose == Purpose::Pretrain => {
                return Err(format!("{path}: pretraining takes files of this machine"));
            }
            Some(Ok(_)) => {}
            None if path == SHIPPED || Path::new(path).exists() => {}
            None => return Err(format!("{path}: no such file or folder")),
        }
    }
    Ok(paths)
}

fn read_output(text: &str) -> std::result::Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if text.is_empty() || path.is_file() {
        return Err(format!("{text}: is a file, no folder"));
    }
    Ok(path)
}

/// `runs/NAME`
fn default_output(purpose: Purpose, target: &str) -> String {
    let path = Path::new(target);
    let is_file = path.exists() || path.extension().is_some_and(|ending| ending == "gguf");
    let name = if let Some(id) = ModelId::parse(target).filter(|_| !is_file) {
        id.repo.split('/').next_back().unwrap_or_default().to_lowercase()
    } else {
        // A folder's name may have dots: `Qwen2.5-0.5B`.
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.strip_suffix(".gguf").unwrap_or(&name).to_lowercase()
    };
    match purpose {
        Purpose::Pretrain => "runs/small".to_owned(),
        Purpose::Fit => format!("runs/fit/{name}"),
        Purpose::Train => format!("runs/{name}"),
        Purpose::Long => format!("runs/{name}-long"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_or_refused_with_a_reason() {
        assert_eq!(read_target("org/name:Q8_0").as_deref(), Ok("org/name:Q8_0"));
        assert!(read_target("no-such-model").expect_err("refused").contains("org/name"));
        let data = read_data("shipped, hf://org/text", Purpose::Train).expect("data");
        assert_eq!(data, ["shipped", "hf://org/text"]);
        assert!(read_data("hf://org/text", Purpose::Pretrain).is_err());
        assert!(read_data("shipped,hf://org/text", Purpose::Fit).is_err());
        for wrong in ["", " , ", "no/such", "hf://org"] {
            assert!(read_data(wrong, Purpose::Train).is_err(), "{wrong}");
        }
        assert_eq!(default_output(Purpose::Train, "Qwen/Qwen2.5-0.5B:Q4_K_M"), "runs/qwen2.5-0.5b");
        assert_eq!(default_output(Purpose::Fit, "models/x.gguf"), "runs/fit/x");
        assert_eq!(default_output(Purpose::Train, "./models/Qwen2.5-1.5B/"), "runs/qwen2.5-1.5b");
    }
}
