//! How a command fails: what the user reads, and the exit code.

use std::fmt::Display;

use longdraft_data::DataError;
use longdraft_models::ModelError;
use longdraft_train::TrainError;

/// Result of a command.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Exit code 1: the work failed or a check did not hold. 2: wrong use or configuration.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    message: String,
    hint: Option<String>,
}

impl Failure {
    /// The work failed.
    pub(crate) fn work(message: impl Display) -> Self {
        Self { code: 1, message: message.to_string(), hint: None }
    }

    /// The command or its configuration is wrong.
    pub(crate) fn usage(message: impl Display) -> Self {
        Self { code: 2, message: message.to_string(), hint: None }
    }

    /// Adds the way out.
    pub(crate) fn hint(mut self, hint: impl Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    pub(crate) fn print(&self) {
        errln!("error: {}", self.message);
        if let Some(hint) = &self.hint {
            errln!("hint: {hint}");
        }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        let hint = match &error {
            ModelError::Hub { .. } => {
                Some("check the network, HF_ENDPOINT and HF_TOKEN, or give a local folder or file")
            }
            ModelError::DeviceMemory { .. } => Some(
                "use less at a time: shorter rows (data.row_tokens), fewer micro-batch tokens, \
                 fewer tapped layers, precision=bf16 or --dtype bf16; or capture the target's \
                 features and train from them (train.features=FOLDER), or take device cpu",
            ),
            ModelError::Device { device, problem, remedy } => {
                return Self::usage(format!("device `{device}`: {problem}")).hint(remedy);
            }
            _ => None,
        };
        let failure = Self::work(error);
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
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
            // A source that is not what the configuration takes it for.
            DataError::Source { .. } => return Self::usage(error),
            DataError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                return Self::usage(error);
            }
            DataError::Empty { .. } => {
                Some("look at the rows with `longdraft data inspect`; `learn` may mask everything")
            }
            _ => None,
        };
        let failure = Self::work(error);
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        ModelError::from(error).into()
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
            TrainError::NothingLearned { .. } => {
                Some("check the data's template and loss mask, or train longer rows")
            }
            TrainError::OtherRun { .. } => Some(
                "give another `output`, restore the old values, or go on regardless with \
                 --force-resume",
            ),
            TrainError::Features { problem, .. } if problem.contains("are free") => Some(
                "free some space, give another place, or store less: capture.dtype=bf16, \
                 objective.soft_targets=top_k (GLIDE)",
            ),
            TrainError::Unsupported { problem } => {
                return Self::usage(problem).hint(
                    "start a number of ranks that fits, or change `parallel`: docs/cluster.md",
                );
            }
            TrainError::OutOfMemory { remedies, .. } => {
                let hint = format!("lower one of these: {}", remedies.join("; "));
                return Self::work(&error).hint(hint);
            }
            TrainError::Locked { .. } => Some("wait for it, stop it, or give another `output`"),
            _ => None,
        };
        let failure = Self::work(error);
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}
