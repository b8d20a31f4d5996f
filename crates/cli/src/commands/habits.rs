//! `longdraft completions` and `longdraft man`: texts about the commands themselves.

use crate::cli::{CompletionsArguments, ManArguments, command};
use crate::failure::{Failure, Result};

/// Name of the program.
const NAME: &str = "longdraft";

/// Prints the script of a shell.
pub(super) fn completions(arguments: &CompletionsArguments, json: bool) {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command(), NAME, &mut script);
    page(&String::from_utf8_lossy(&script), json);
}

/// Prints a text that is the whole result.
pub(super) fn page(text: &str, json: bool) {
    if json {
        outjson!({ "page": text });
    } else {
        out!("{text}");
    }
}

/// Prints the main page, or writes one for every command.
pub(super) fn man(arguments: &ManArguments, json: bool) -> Result<()> {
    let Some(folder) = &arguments.output else {
        let mut text = Vec::new();
        let written = clap_mangen::Man::new(command()).render(&mut text);
        written.map_err(|error| Failure::work(format!("the page: {error}")))?;
        page(&String::from_utf8_lossy(&text), json);
        return Ok(());
    };
    let fail = Failure::at(folder);
    std::fs::create_dir_all(folder).map_err(fail)?;
    clap_mangen::generate_to(command(), folder).map_err(fail)?;
    if json {
        outjson!({ "output": folder.to_string_lossy() });
    } else {
        outln!("wrote a page for every command to {}", folder.display());
    }
    Ok(())
}
