//! Output with any drafter follows the target's distribution: equal tokens where it is a function
//! of the text, equal distributions, enumerated, where it is drawn.

mod answers;
mod batch;
mod biased;
mod block;
mod block_draft;
mod block_enumeration;
mod caches;
mod eagle3;
mod engine;
mod enumeration;
mod grammar;
mod greedy;
mod late;
mod models;
mod mtp;
mod noted;
mod pacing;
mod plumbing;
mod recurrent_enumeration;
mod shared_keys;
mod sharing;
mod statistics;
mod together;
mod windows;
