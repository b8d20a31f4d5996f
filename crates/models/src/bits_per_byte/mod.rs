//! Bits per byte of a token stream: `Σ nll / ln 2 / Σ bytes`.
//!
//! ```text
//! tokens t_0..t_N -> windows (plain or sliding) -> nll of every scored target (a Scorer)
//!                                               \-> bytes of every target (ByteTable, or counted)
//! ```
//!
//! Target `p` is `t_{p+1}`, predicted from inputs up to `t_p`. Start-of-document targets count in
//! the numerator with 0 bytes; tools that drop them report less.

mod byte_table;
mod score;
mod windows;

pub use byte_table::ByteTable;
pub use score::{Score, Scorer, TargetScorer, evaluate};
pub use windows::{Tail, Window, isolated_windows, plain_windows, sliding_windows};
