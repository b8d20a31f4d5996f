//! `longdraft init`: a first configuration from a few answers.
//!
//! ```text
//! questions   what is wanted: options, answers on a terminal, defaults
//! made        the keys that follow from it
//! size        of a language model, by its text
//! commented   as YAML, with what the schema says of every key
//! ```

mod commented;
mod made;
mod questions;
mod size;

use std::io::Write;
use std::path::Path;

use longdraft_models::weights::temporary::temporary;

use crate::cli::{InitArguments, Purpose};
use crate::commands::check_configuration;
use crate::failure::{Failure, Result};
use crate::recording::quoted;
use longdraft_configuration::ConfigurationError;
use made::Made;

/// Asks, and writes.
pub(crate) fn run(arguments: &InitArguments, json: bool) -> Result<()> {
    let file = &arguments.file;
    let writes = arguments.purpose != Some(Purpose::Fit);
    if writes {
        refuse_other_files(file, arguments.force)?;
    }
    let answers = questions::ask(arguments)?;
    let next = if answers.purpose == Purpose::Fit {
        vec![made::fit_command(&answers)?]
    } else {
        let made = made::of(&answers)?;
        write(file, &text(&made, file), arguments.force)?;
        made.next(file)
    };
    let written = (answers.purpose != Purpose::Fit).then_some(file);
    if json {
        let written = written.map(|file| file.display().to_string());
        outjson!({ "config": written, "next": next });
        return Ok(());
    }
    match written {
        Some(file) => outln!("wrote {}", file.display()),
        None => outln!("fit takes no configuration; this command does all of it:"),
    }
    for command in next {
        outln!("  {command}");
    }
    Ok(())
}

fn refuse_other_files(file: &Path, force: bool) -> Result<()> {
    let ending = file.extension().and_then(|ending| ending.to_str());
    if !matches!(ending, Some("yaml" | "yml")) {
        return Err(Failure::usage(format!("{}: a configuration ends in .yaml", file.display()))
            .hint("give another FILE, or none: longdraft.yaml"));
    }
    if file.exists() && !force {
        return Err(exists(file));
    }
    Ok(())
}

fn exists(file: &Path) -> Failure {
    Failure::usage(format!("{}: is there already", file.display()))
        .hint("give another FILE, or --force to write over it")
}

/// The file: how it is used, then the keys.
fn text(made: &Made, file: &Path) -> String {
    let file = quoted(&file.display().to_string());
    format!(
        "# `longdraft {} {file}` runs this, `longdraft config check {file}` checks it. Keys that are\n\
         # not here keep their defaults: `longdraft config schema --markdown{}` lists all.\n{}",
        made.command(),
        made.schema_option(),
        commented::commented(&made.schema, &made.keys)
    )
}

/// Writes what was checked; no file that came meanwhile is lost.
fn write(file: &Path, text: &str, force: bool) -> Result<()> {
    let fail = |error| Failure::unwritable(file)(error).hint("give another FILE");
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).map_err(fail)?;
    }
    let draft = temporary(file, ".", ".tmp");
    let checked = std::fs::write(&draft, text).map_err(fail).and_then(|()| {
        let problems = check_configuration(&draft, &[], true);
        if problems.is_empty() { Ok(()) } else { Err(ConfigurationError::from(problems).into()) }
    });
    let _ = std::fs::remove_file(&draft);
    checked?;
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(force).create_new(!force).truncate(true);
    let opened = options.open(file).map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => exists(file),
        _ => fail(error),
    });
    opened?.write_all(text.as_bytes()).map_err(fail)
}
