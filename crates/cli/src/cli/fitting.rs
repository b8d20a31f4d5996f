//! Arguments of `fit`.

use std::path::PathBuf;

use super::TemplateArguments;

/// Arguments of `fit`.
#[derive(Debug, Clone, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "a flag each")]
pub(crate) struct FitArguments {
    /// Hugging Face folder, GGUF file or hub model `org/name` (`org/name:Q4_K_M` for its GGUF file).
    #[arg(value_name = "TARGET")]
    pub(crate) target: String,
    /// Your own prompts: a file or folder that `data` reads (conversations, a prompt a row, text); they may have
    /// answers, which the target writes anew. Without it, prompts that the program carries.
    #[arg(long, value_name = "PATH")]
    pub(crate) prompts: Option<PathBuf>,
    /// Field of the prompt (default: recognised).
    #[arg(long, requires = "prompts")]
    pub(crate) field: Option<String>,
    /// Time for all of it: 90s, 30m, 2h, 1h30m, 1d. More than at an earlier call adds to what is there.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_time)]
    pub(crate) time: f64,
    /// Where it will be served: longdraft, or engines as `export --to` names them, with commas.
    #[arg(long = "for", value_name = "ENGINE", value_delimiter = ',', default_value = "longdraft")]
    pub(crate) engines: Vec<String>,
    /// Folder of the draft and all that belongs to it (default: runs/fit/NAME).
    #[arg(long, short, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
    /// Temperature that it will be served at.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Most tokens of an answer.
    #[arg(long, default_value_t = 256)]
    pub(crate) max_tokens: usize,
    /// What the target's chat template is given.
    #[command(flatten)]
    pub(crate) template: TemplateArguments,
    /// Draft method, as `draft.method` names it (default: chosen by what is measured).
    #[arg(long, value_name = "NAME", value_parser = super::methods())]
    pub(crate) method: Option<String>,
    /// Go on from this draft: a run, a checkpoint, or a draft folder or file.
    #[arg(long, value_name = "DRAFT")]
    pub(crate) from: Option<PathBuf>,
    /// The target's name for engines, where it differs from where it lies here.
    #[arg(long, value_name = "ORG/NAME")]
    pub(crate) target_name: Option<String>,
    /// Key of all random draws.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Measure this machine, say what would be done and what to expect, and stop.
    #[arg(long)]
    pub(crate) plan: bool,
    /// Train although no draft is expected to pay.
    #[arg(long)]
    pub(crate) anyway: bool,
    /// Serve a page of the run on this machine while it goes, and show it in the browser.
    #[arg(long)]
    pub(crate) open: bool,
    /// Lines in place of the full-screen view.
    #[arg(long)]
    pub(crate) plain: bool,
}

/// Arguments of `watch`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct WatchArguments {
    /// Folders of runs: of `fit`, `train`, or a curriculum; several are compared.
    #[arg(required = true, value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
    /// Port on 127.0.0.1, 0 for a free one.
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    /// Show the page in the browser.
    #[arg(long)]
    pub(crate) open: bool,
}

/// Seconds of `2h`, `1h30m`, `90s`. A plain number is refused: it could be minutes or hours.
pub(crate) fn parse_time(text: &str) -> Result<f64, String> {
    let wrong = || format!("`{text}` is not a time: write 90s, 30m, 2h, 1h30m or 1d");
    let (mut seconds, mut number) = (0.0, String::new());
    for letter in text.trim().chars() {
        let unit = match letter {
            '0'..='9' | '.' => {
                number.push(letter);
                continue;
            }
            's' => 1.0,
            'm' => 60.0,
            'h' => 3600.0,
            'd' => 86400.0,
            _ => return Err(wrong()),
        };
        let count: f64 = number.parse().map_err(|_| wrong())?;
        seconds += count * unit;
        number.clear();
    }
    if !number.is_empty() || seconds <= 0.0 {
        return Err(wrong());
    }
    if !(LEAST_SECONDS..=MOST_SECONDS).contains(&seconds) {
        return Err("give at least 10s and at most 365d".to_owned());
    }
    Ok(seconds)
}

/// Budgets that are accepted.
const LEAST_SECONDS: f64 = 10.0;
const MOST_SECONDS: f64 = 365.0 * 86400.0;

#[cfg(test)]
mod tests {
    use super::parse_time;

    #[test]
    fn times_are_read_with_their_units() {
        for (text, seconds) in
            [("90s", 90.0), ("30m", 1800.0), ("1h30m", 5400.0), ("0.5h", 1800.0), ("1d", 86400.0)]
        {
            assert_eq!(parse_time(text), Ok(seconds), "{text}");
        }
        for text in ["", "2", "h", "2x", "1h30", "-1h", "0s", "5s", "999d", "1..5h"] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }
}
