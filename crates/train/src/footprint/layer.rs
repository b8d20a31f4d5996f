//! Terms of a decoder layer, in values: what attention keeps of a token, and gradients under way.
//!
//! A result is kept where an op reads it in the backward pass. That pass gives up the gradient of a state once it is
//! handed on. Two places of a layer hold most: the MLP and attention.

use longdraft_kernels::attention::{held_bytes, keeps_halves};

use super::row::{ALL_PASSES, Row};

/// Widths of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// `H`, of its states.
    pub width: u64,
    /// Of the states that queries, keys and values are projections of.
    pub read: u64,
    /// `N·D`, of all query heads.
    pub query: u64,
    /// `K·D`, of all key-value heads.
    pub kv: u64,
    /// `N`
    pub heads: u64,
    /// `I`, inside of the MLP.
    pub inner: u64,
}

impl Layer {
    /// Kept of a query: itself after rotation, what attention returns, a log-sum-exp a head, and
    /// the 8 bytes of its range of keys.
    pub fn query_values(&self, row: &Row) -> u64 {
        self.attended_values(row, self.query) + self.query + self.heads + 2
    }

    /// Kept of a token's keys and values: keys after rotation, values.
    pub fn key_values(&self, row: &Row) -> u64 {
        self.attended_values(row, 2 * self.kv)
    }

    /// Values of f32 that so many of queries, keys or values take, as attention keeps them.
    pub fn attended_values(&self, row: &Row, values: u64) -> u64 {
        let head_dim = self.query / self.heads.max(1);
        if keeps_halves(head_dim as usize) { row.input_values(values) } else { values }
    }

    /// Kept of a token in a layer whose gate, up and product are one: norms before attention and the MLP,
    /// attention with its keys, the sum, gate and up, output. Products alone read the norms.
    pub fn token_values(&self, row: &Row) -> u64 {
        let norms = 2 * row.input_values(self.width);
        norms + 2 * self.width + self.query_values(row) + self.key_values(row) + 2 * self.inner
    }

    /// Of the matrices of queries, keys and values.
    pub fn projections(&self) -> u64 {
        self.read * (self.query + 2 * self.kv)
    }

    /// Of all matrices.
    pub fn matrices(&self) -> u64 {
        self.projections() + self.width * (self.query + 3 * self.inner)
    }

    /// Gradients under way in the MLP of some rows: of the output, of the product, of gate and up, and of the last
    /// matrix; or with few rows those of output, input, gate and up, and of all three matrices.
    pub fn mlp_gradients(&self, rows: u64) -> u64 {
        let matrix = self.width * self.inner;
        let of_states = rows * (self.width + 3 * self.inner) + matrix;
        of_states.max(2 * rows * (self.width + self.inner) + 3 * matrix)
    }

    /// Gradients under way in attention of some rows to some keys: of the state beside it, of its output and of
    /// queries, of keys and values, one of which is there in two orders for a moment, or of a block's scores. `singles`
    /// of the keys are no part of any range.
    pub fn attention_gradients(&self, row: &Row, rows: u64, keys: u64, singles: u64) -> u64 {
        let (queries, sides) = (rows * self.query, keys * self.kv);
        let heads = (self.heads as usize, (self.kv * self.heads / self.query) as usize);
        let tokens = (rows as usize, (keys - singles) as usize);
        let held = held_bytes(tokens, heads, row.threads) as u64 / 4;
        rows * self.width + 2 * queries + 2 * sides + sides.max(held)
    }

    /// Bytes of packed operands that the products of some rows leave.
    pub fn packed_bytes(&self, row: &Row, rows: u64) -> u64 {
        let maps = [
            (rows, self.read, self.query),
            (rows, self.read, self.kv),
            (rows, self.query, self.width),
            (rows, self.width, self.inner),
            (rows, self.inner, self.width),
        ];
        row.packed_bytes(&ALL_PASSES, &maps)
    }
}
