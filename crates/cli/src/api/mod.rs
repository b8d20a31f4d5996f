//! What other programs do with this one: open targets and drafts, decode, measure, train, export.
//!
//! The commands and this interface share their work; only what is printed is left out here. Warnings
//! still go to stderr.

mod error;
mod evaluation;
mod exporting;
mod models;
mod session;
mod training;

pub use error::{Error, Result, Stop};
pub use evaluation::{EvaluationOptions, Prompts, evaluate, evaluate_rows};
pub use exporting::{ExportedFolder, Finding, VerifyOptions, export, verify};
pub use models::{Draft, Target};
pub use session::{
    Answer, AnswerOptions, Next, Piece, Session, SessionOptions, Stream, choice, device, layout,
    template_variables,
};
pub use training::{
    CaptureOptions, Captured, Configuration, TrainOptions, Trained, capture, train,
};
