//! Tests of the program as users run it: its binary on real files.

mod block_export;
mod broken_exports;
mod captures;
mod curriculum;
mod data;
mod decoding;
mod dflash;
mod doctor;
mod eagle3;
mod exit_codes;
mod export;
mod families;
mod fit;
mod gpu_check;
mod hub;
mod kernel_check;
mod lifecycle;
mod mixtures;
#[cfg(feature = "mpi")]
mod mpi;
mod offline;
mod parity;
mod pipeline;
mod plan;
mod pretrain;
mod push;
mod quickstart;
mod readers;
mod records;
mod report;
mod serve;
mod support;
mod targets;
mod tracking;
