//! One row of a step: what its terms are functions of, and what they come to.

use longdraft_kernels::linear_cross_entropy::chunk_rows;

use super::graph::{Graph, Matrix};

/// A row as a rank works on it.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Tokens of this rank's part of the row.
    pub tokens: u64,
    /// Learned ones at most: all.
    pub learned: u64,
    /// Ranks that share the row (sequence parallelism); attention gathers their keys.
    pub parts: u64,
    /// Whether the loss forms the teacher's whole distribution.
    pub teacher_logits: bool,
    /// Threads of the rank.
    pub threads: usize,
}

impl Row {
    /// Rows of a chunk of the loss over a vocabulary.
    pub fn chunk(&self, vocabulary: u64) -> u64 {
        (chunk_rows(vocabulary as usize) as u64).min(self.learned)
    }
}

/// What training on a row holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowMemory {
    /// Activations that the graph keeps.
    pub activations: u64,
    /// A chunk of the loss at the end of the forward pass.
    pub chunks: u64,
    /// Gradients under way in the backward pass, at most.
    pub backward: u64,
    /// What is left of them when it ends.
    pub left: u64,
    /// Results of rows, plans, factors.
    pub results: u64,
    /// Packed operands that the calling thread keeps.
    pub packed: u64,
    /// Gradients of all weights that it trains.
    pub weight_gradients: u64,
}

impl RowMemory {
    /// Of a graph, its loss, and what the loss holds beside it.
    pub fn of(graph: &Graph, loss: Matrix, chunks: u64, results: u64) -> Self {
        let backward = graph.backward(loss);
        Self {
            activations: graph.kept(loss),
            chunks,
            backward: backward.peak,
            left: backward.left,
            results,
            packed: graph.packed(),
            weight_gradients: graph.weight_bytes(),
        }
    }
}
