//! Why a case cannot be recomputed.

use std::path::PathBuf;

use longdraft_data::DataError;
use longdraft_features::FeatureError;
use longdraft_models::ModelError;
use longdraft_parallel::ParallelError;
use longdraft_pretrain::PretrainError;
use longdraft_train::TrainError;

use crate::KINDS;

/// Result of recomputing.
pub type Result<T> = std::result::Result<T, ParityError>;

/// Why a case cannot be recomputed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParityError {
    /// A file or folder is not what a case has there.
    #[error("{}: {problem}", path.display())]
    Malformed {
        /// It.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A key of `meta.json` has a value that no rule here stands for.
    #[error("{}: meta.json: `{key}` = {value} is unknown: {known} are known", folder.display())]
    UnknownValue {
        /// The case.
        folder: PathBuf,
        /// Of `meta.json`.
        key: &'static str,
        /// As it stands there.
        value: String,
        /// Values that are known.
        known: &'static str,
    },
    /// A tensor of a case has another shape than the case's sizes ask for.
    #[error("{}: `{tensor}` has the shape {found:?}, {expected:?} expected", folder.display())]
    Shape {
        /// The case.
        folder: PathBuf,
        /// Its name.
        tensor: String,
        /// As it is stored.
        found: Vec<usize>,
        /// What the other tensors and `meta.json` make of it.
        expected: Vec<usize>,
    },
    /// No kind that is known here.
    #[error("{}: unknown kind `{kind}`", path.display())]
    UnknownKind {
        /// The file that names it.
        path: PathBuf,
        /// As it is named.
        kind: String,
    },
    /// The case holds no weights, and none were given.
    #[error("{}: a forward case needs weights", folder.display())]
    NeedsWeights {
        /// The case.
        folder: PathBuf,
        /// The file that it was made from.
        file: String,
    },
    /// The weights are not those that the case was made from.
    #[error("{}: SHA-256 {got}, the case {} was made from {want}", weights.display(), folder.display())]
    OtherWeights {
        /// The weights.
        weights: PathBuf,
        /// The case.
        folder: PathBuf,
        /// Sum of the weights.
        got: String,
        /// Sum that the case names.
        want: String,
    },
    /// Of a model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Of data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Of training.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// Of pretraining.
    #[error(transparent)]
    Pretrain(#[from] PretrainError),
}

impl ParityError {
    /// The way out, where there is one.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::UnknownKind { .. } => Some(format!("this build knows the kinds {KINDS}")),
            Self::NeedsWeights { file, .. } => {
                Some(format!("give the file with --target ({file})"))
            }
            _ => None,
        }
    }
}

impl From<candle_core::Error> for ParityError {
    fn from(error: candle_core::Error) -> Self {
        ModelError::from(error).into()
    }
}

impl From<FeatureError> for ParityError {
    fn from(error: FeatureError) -> Self {
        TrainError::from(error).into()
    }
}

impl From<ParallelError> for ParityError {
    fn from(error: ParallelError) -> Self {
        TrainError::from(error).into()
    }
}
