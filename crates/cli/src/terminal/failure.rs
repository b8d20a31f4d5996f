//! How a command fails: what the user reads, and the exit code.

use std::fmt::Display;
use std::io::ErrorKind;
use std::path::Path;

use longdraft_data::DataError;
use longdraft_features::FeatureError;
use longdraft_models::ModelError;
use longdraft_parallel::ParallelError;
use longdraft_pretrain::PretrainError;
use longdraft_train::TrainError;
use serde_json::{Value, json};

use crate::terminal;

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Exit code of a program that SIGPIPE ends.
pub(crate) const PIPE_CLOSED: u8 = 141;

/// What exit codes say, for `--help`.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    the work failed, or a check did not hold
  2    wrong use or configuration: also a file that is named but not there, or of no known kind
  129  the terminal closed (SIGHUP): saved, the same command goes on from there
  130  Ctrl-C: the same
  143  SIGTERM: the same
  141  whoever read the output went away";

/// Exit code 1: the work failed or a check did not hold. 2: wrong use or configuration. 128 and more:
/// a signal ended the work early.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    message: String,
    /// The way out, where there is one.
    pub(crate) hint: Option<String>,
    /// Every problem of a configuration on its own.
    pub(crate) problems: Vec<String>,
    /// Whether the command's result, which is printed, says it already.
    in_result: bool,
    nature: Nature,
}

/// What commands that can go on after a failure tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Nature {
    /// A loss or a gradient of a training was not finite.
    Divergence,
    /// A folder holds a training with other settings.
    OtherRun,
    /// A device has no memory left.
    DeviceMemory,
    /// None of these.
    Other,
}

impl Failure {
    fn new(code: u8, message: String) -> Self {
        let (hint, problems, in_result) = (None, Vec::new(), false);
        Self { code, message, hint, problems, in_result, nature: Nature::Other }
    }

    pub(crate) fn work(message: impl Display) -> Self {
        Self::new(1, message.to_string())
    }

    /// The command or its configuration is wrong.
    pub(crate) fn usage(message: impl Display) -> Self {
        Self::new(2, message.to_string())
    }

    /// A file or folder with which the work failed; for `map_err`.
    pub(crate) fn at<E: Display>(path: &Path) -> impl Fn(E) -> Self + Copy {
        move |error| Self::work(format!("{}: {error}", path.display()))
    }

    /// A file cannot be read or written: who names one that is not there uses the program wrongly.
    pub(crate) fn file(message: impl Display, reason: &std::io::Error) -> Self {
        match reason.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => Self::usage(message),
            _ => Self::work(message),
        }
    }

    /// A place where nothing can be written; for `map_err`.
    pub(crate) fn unwritable(path: &Path) -> impl Fn(std::io::Error) -> Self + Copy {
        move |error| {
            let message = format!("{}: nothing can be written there: {error}", path.display());
            Self::of_place(message, error.kind()).hint("give another place with --output")
        }
    }

    /// Wrong use where a place never takes a file, and else work that failed: a full disk may have room later.
    fn of_place(message: impl Display, reason: ErrorKind) -> Self {
        match reason {
            ErrorKind::PermissionDenied
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::NotADirectory
            | ErrorKind::NotFound => Self::usage(message),
            _ => Self::work(message),
        }
    }

    /// A configuration has these problems.
    pub(crate) fn problems(problems: Vec<String>) -> Self {
        Self { message: problems.join("\n  "), problems, ..Self::usage("") }
    }

    /// A signal asked the command to end, and it did; it has said where it stands.
    pub(crate) fn interrupted(signal: i32) -> Self {
        Self::new(128 + signal as u8, format!("interrupted by signal {signal}"))
    }

    /// Adds the way out.
    pub(crate) fn hint(mut self, hint: impl Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    /// Adds the way out that an error knows, where it knows one.
    pub(crate) fn hinted(self, hint: Option<impl Display>) -> Self {
        match hint {
            Some(hint) => self.hint(hint),
            None => self,
        }
    }

    /// The same, if there is none yet.
    pub(crate) fn or_hint(self, hint: impl Display) -> Self {
        if self.hint.is_some() { self } else { self.hint(hint) }
    }

    /// Notes that the last line of `--json` says it already.
    pub(crate) fn in_result(mut self) -> Self {
        self.in_result = true;
        self
    }

    /// What went wrong, without the way out.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    /// Whether a signal ended the work, and no fault.
    pub(crate) fn is_interruption(&self) -> bool {
        self.code >= 128
    }

    /// Whether a training lost its finite numbers.
    pub(crate) fn is_divergence(&self) -> bool {
        self.nature == Nature::Divergence
    }

    /// Notes that a device has no memory left.
    pub(crate) fn of_device_memory(mut self) -> Self {
        self.nature = Nature::DeviceMemory;
        self
    }

    /// Whether a device has no memory left.
    pub(crate) fn lacks_device_memory(&self) -> bool {
        self.nature == Nature::DeviceMemory
    }

    /// Whether a training met the folder of another one.
    pub(crate) fn is_other_run(&self) -> bool {
        self.nature == Nature::OtherRun
    }

    /// Tells a person, and with `--json` a program.
    pub(crate) fn print(&self) {
        if self.is_interruption() {
            return;
        }
        terminal::end_line();
        errln!("error: {}", self.message);
        if let Some(hint) = &self.hint {
            errln!("hint: {hint}");
        }
        if terminal::is_machine_readable() && !self.in_result {
            outln!("{}", self.to_json());
        }
    }

    /// The last line of `--json`.
    pub(crate) fn to_json(&self) -> Value {
        let mut error = json!({ "code": self.code, "message": self.message, "hint": self.hint });
        if !self.problems.is_empty() {
            error["problems"] = json!(self.problems);
        }
        json!({ "error": error })
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        match &error {
            ModelError::Hub { remedy, .. } => Self::work(&error).hint(remedy),
            ModelError::HubFiles { remedy, .. } => Self::usage(&error).hint(remedy),
            ModelError::DeviceMemory { .. } => Self::work(&error)
                .hint(
                    "use less at a time: shorter rows (data.row_tokens), fewer micro-batch tokens, \
                     fewer tapped layers, precision=bf16 or --dtype bf16; or capture the target's \
                     features and train from them (train.features=FOLDER), or take device cpu",
                )
                .of_device_memory(),
            ModelError::Unrecognised { .. } => Self::usage(&error),
            ModelError::Io { source, .. } => Self::file(&error, source),
            ModelError::Device { device, problem, remedy } => {
                Self::usage(format!("device `{device}`: {problem}")).hint(remedy)
            }
            _ => Self::work(&error),
        }
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        let hint = match &error {
            DataError::TooManyBadRows { .. } => Some(
                "correct the rows; leave the source's `template` out, so that the format is \
                 recognised, or give another one, or `aligners`; or raise data.max_bad_rows \
                 (`longdraft data inspect` shows what becomes of rows)",
            ),
            DataError::Source { .. } => return Self::usage(error),
            DataError::Io { source, .. } => return Self::file(&error, source),
            DataError::Empty { rows: 0, .. } => Some("give a file that holds rows"),
            DataError::Empty { .. } => {
                Some("look at the rows with `longdraft data inspect`; `learn` may mask everything")
            }
            _ => None,
        };
        Self::work(error).hinted(hint)
    }
}

macro_rules! fails_as {
    ($($error:ty => $other:ty),*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                <$other>::from(error).into()
            }
        }
    )*};
}
fails_as!(candle_core::Error => ModelError, FeatureError => TrainError, ParallelError => TrainError);

impl From<PretrainError> for Failure {
    fn from(error: PretrainError) -> Self {
        match error {
            PretrainError::Train(error) => error.into(),
            other => Self::work(other),
        }
    }
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Self {
        let error = match error {
            TrainError::Data(error) => return error.into(),
            TrainError::Model(error) => return error.into(),
            other => other,
        };
        let hint = match &error {
            TrainError::NotFinite { .. } => Some(
                "look at these rows for odd text, lower schedule.learning_rate, or lengthen the \
                 warm-up; running the same command again resumes from the last checkpoint",
            ),
            TrainError::NothingToLearn => Some(
                "check the data's template, what it learns and its loss mask (`longdraft data inspect` shows \
                 them), or train longer rows",
            ),
            TrainError::OtherRun { .. } => Some(
                "give another `output`, restore the old values, or go on regardless with \
                 --force-resume",
            ),
            TrainError::OtherLength { longer: true, .. } => Some(
                "--extend goes on to the later end: the warm-up stays as it was, and the learning rate \
                 takes the way that leads there",
            ),
            TrainError::OtherLength { .. } => Some(
                "a run cannot become shorter, for its learning rate was on the way to the later end: \
                 use what is saved as it is, or give another `output`",
            ),
            TrainError::Features(FeatureError::NoRoom { .. }) => Some(
                "free some space, give another place, or store less: capture.dtype=int8, \
                 teacher.soft_targets=top_k",
            ),
            TrainError::Unsupported { problem }
            | TrainError::Parallel(ParallelError::Unsupported { problem }) => {
                return Self::usage(problem).hint(
                    "start a number of ranks that fits, or change `parallel`: docs/guides/cluster.md",
                );
            }
            TrainError::Unwritable { source, .. } => {
                let reason = source.kind();
                return Self::of_place(error, reason)
                    .hint("give another output folder: output=DIR, or --output DIR");
            }
            TrainError::CannotGoOn { .. } => Some(
                "move the folder `checkpoints` of the run away, and the same command begins anew; a draft may begin \
                 from what was moved with `draft.from=FOLDER/best`, if `best` is whole",
            ),
            TrainError::Locked { .. } => {
                Some("wait for it, stop it, or give another output folder")
            }
            _ => None,
        };
        let nature = match &error {
            TrainError::NotFinite { .. } => Nature::Divergence,
            TrainError::OtherRun { .. } | TrainError::OtherLength { .. } => Nature::OtherRun,
            _ => Nature::Other,
        };
        Self { nature, ..Self::work(error).hinted(hint) }
    }
}
