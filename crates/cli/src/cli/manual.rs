//! The manual's page of commands, and a look at every command line that the manual shows.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::builder::StyledStr;
use clap::{Arg, Command};

const PAGE: &str = "docs/reference/commands.md";
const UPDATE: &str = "LONGDRAFT_UPDATE_MANUAL";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A help text as a cell of a table.
fn cell(text: Option<&StyledStr>) -> String {
    let text = text.map(ToString::to_string).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

fn values(argument: &Arg) -> String {
    let names = argument.get_value_names().unwrap_or_default();
    if argument.get_action().takes_values() && !names.is_empty() {
        format!(" <{}>", names.join("> <"))
    } else {
        String::new()
    }
}

fn argument_row(argument: &Arg) -> String {
    let name = match (argument.get_long(), argument.get_short()) {
        (Some(long), Some(short)) => format!("-{short}, --{long}{}", values(argument)),
        (Some(long), None) => format!("--{long}{}", values(argument)),
        (None, Some(short)) => format!("-{short}{}", values(argument)),
        (None, None) => values(argument).trim().to_owned(),
    };
    let mut meaning = cell(argument.get_help());
    let choices = argument.get_possible_values();
    let choices: Vec<_> = choices
        .iter()
        .filter(|choice| !choice.is_hide_set() && argument.get_action().takes_values())
        .map(|choice| format!("`{}`", choice.get_name()))
        .collect();
    let mut add = |text: String| {
        let end = if meaning.ends_with(['.', ')']) { "" } else { "." };
        write!(meaning, "{end} {text}.").expect("a text");
    };
    if !choices.is_empty() {
        add(format!("One of {}", choices.join(", ")));
    }
    let defaults = argument.get_default_values();
    if argument.get_action().takes_values() && !defaults.is_empty() {
        let defaults: Vec<_> = defaults.iter().map(|value| value.to_string_lossy()).collect();
        add(format!("Default `{}`", defaults.join(" ")));
    }
    format!("| `{name}` | {meaning} |\n")
}

fn table(page: &mut String, arguments: &[&Arg]) {
    if !arguments.is_empty() {
        page.push_str("\n| argument | meaning |\n|---|---|\n");
        arguments.iter().for_each(|argument| page.push_str(&argument_row(argument)));
    }
}

/// Appends a command's part and those of its own commands.
fn describe(page: &mut String, command: &Command, before: &str) {
    let name = format!("{before} {}", command.get_name());
    let about = command.get_long_about().or(command.get_about());
    let about = about.map(ToString::to_string).unwrap_or_default();
    let (about, example) = about.split_once("Example: ").unwrap_or((&about, ""));
    writeln!(page, "\n## `{name}`\n\n{}", about.trim()).expect("a text");
    if !example.is_empty() {
        let example = example.split_whitespace().collect::<Vec<_>>().join(" ");
        writeln!(page, "\n```sh\n{example}\n```").expect("a text");
    }
    let shown = |argument: &&Arg| {
        let id = argument.get_id();
        !argument.is_hide_set() && !argument.is_global_set() && id != "help" && id != "version"
    };
    table(page, &command.get_arguments().filter(shown).collect::<Vec<_>>());
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        if inner.get_name() != "help" {
            describe(page, inner, &name);
        }
    }
}

/// The whole page.
fn page() -> String {
    let command = super::command();
    let mut page = String::from(
        "# Commands\n\n<!-- A test writes this page: LONGDRAFT_UPDATE_MANUAL=1 cargo test -p longdraft --lib manual -->\n\n\
         `longdraft COMMAND --help` prints the same.\n\n## Global options\n",
    );
    let global: Vec<_> =
        command.get_arguments().filter(|a| a.is_global_set() && !a.is_hide_set()).collect();
    table(&mut page, &global);
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        if inner.get_name() != "help" {
            describe(&mut page, inner, command.get_name());
        }
    }
    page
}

#[test]
fn the_page_of_commands_says_what_they_say() {
    let path = root().join(PAGE);
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, page()).expect(PAGE);
    }
    let written = std::fs::read_to_string(&path).expect(PAGE);
    assert!(written == page(), "{PAGE} is old: run the tests of `manual` with {UPDATE}=1");
}

/// Markdown files of the manual, the README and those of crates.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// Commands of `longdraft` in the shell blocks of a page, a line each.
fn command_lines(text: &str) -> Vec<String> {
    let mut inside = false;
    let mut lines = Vec::new();
    for line in text.replace("\\\n", " ").lines() {
        if line.trim_start().starts_with("```") {
            inside = !inside && line.trim_start() == "```sh";
        } else if inside {
            lines.extend(line.split("&&").map(|part| part.trim().to_owned()));
        }
    }
    lines
}

/// What `longdraft` itself gets of a line, if the line starts it.
fn arguments(line: &str) -> Option<Vec<String>> {
    let words = shlex::split(line)?;
    let start = match words.iter().position(|word| word.ends_with("longdraft")) {
        Some(0) => 0,
        Some(start) if words[..2] == ["cargo", "run"] => {
            start + words[start..].iter().position(|word| word == "--")?
        }
        Some(start) if matches!(words[0].as_str(), "mpirun" | "srun" | "nohup") => start,
        _ => return None,
    };
    let end = words.iter().position(|word| matches!(word.as_str(), "|" | ">" | "&"));
    let own = &words[start + 1..end.unwrap_or(words.len())];
    // A variable stands for a value; a number is good for all.
    let own = own.iter().map(|word| if word.starts_with('$') { "1" } else { word });
    Some(std::iter::once("longdraft").chain(own).map(str::to_owned).collect())
}

#[test]
fn every_command_of_the_manual_is_one() {
    let mut files = vec![root().join("README.md")];
    pages(&root().join("docs"), &mut files);
    let mut seen = 0;
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a page");
        for line in command_lines(&text) {
            let Some(arguments) = arguments(&line) else { continue };
            seen += 1;
            let parsed = super::command().try_get_matches_from(&arguments);
            assert!(parsed.is_ok(), "{}: {line}\n{}", file.display(), parsed.expect_err("wrong"));
        }
    }
    assert!(seen > 60, "{seen} commands");
}
