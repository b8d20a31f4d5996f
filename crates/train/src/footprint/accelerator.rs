//! What a decoder layer takes on an accelerator where that is more, or less, than on a CPU. In values.
//!
//! - A CPU's fused ops form some results again in the backward pass, or add as they multiply. An accelerator keeps
//!   these results.
//! - candle begins every sum of gradients with zeros. On a CPU these are pages that nobody writes, on an accelerator
//!   they are memory: a gradient as it is formed, zeros, and their sum exist at the same time.
//! - Gradients of weights are added in place, by the products that form them.

use super::layer::Layer;

impl Layer {
    /// Kept of a token by a gated MLP onto a residual: the product of gate and up, which a CPU forms again, and the
    /// output before it is added, which a CPU never has.
    pub fn gated_onto_values(&self) -> u64 {
        self.inner + self.width
    }

    /// Gradients under way in such an MLP, whose gate, up and product are one op: of the residual and the output; of
    /// the product as it is formed, its zeros, its sum.
    pub fn gated_onto_gradients(&self, rows: u64) -> u64 {
        rows * (2 * self.width + 3 * self.inner)
    }

    /// Gradients under way in an MLP whose gate, up and product are ops of their own: of the residual; of the product,
    /// of gate and up as they are formed, zeros and sum of one of them.
    pub fn gated_gradients(&self, rows: u64) -> u64 {
        rows * (self.width + 5 * self.inner)
    }

    /// Gradients under way in attention of some rows to some keys, beside that of the residual. They are of the result, of
    /// queries, and of keys and values; each of the three has zeros and a sum in turn. Before that the kernels read
    /// result, queries, keys and values as factors of 16 bits, and hold the gradients of `singles` apart, keys that
    /// rows see one by one.
    pub fn attended_gradients(&self, rows: u64, keys: u64, singles: u64) -> u64 {
        let (queries, sides) = (rows * self.query, keys * self.kv);
        let summed = (4 * queries + 2 * sides).max(2 * queries + 4 * sides);
        let formed = 3 * queries + 3 * sides + 2 * singles * self.kv;
        rows * self.width + summed.max(formed)
    }

    /// Gradients under way between queries and the states that they are projections of, the end of a layer: of the
    /// residual; of queries as they come and as they go on, with zeros and sum, beside that of the states which
    /// keys and values left; or of the projected queries, and of the states from them, so far, and together.
    pub fn queried_gradients(&self, rows: u64) -> u64 {
        rows * (self.width + (4 * self.query + self.read).max(self.query + 3 * self.read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_of_a_layer_holds_what_its_gradients_are() {
        let layer = Layer { width: 10, read: 20, query: 12, kv: 3, heads: 4, inner: 40 };
        assert_eq!(layer.gated_onto_values(), 50);
        assert_eq!(layer.gated_onto_gradients(2), 2 * (20 + 120));
        assert_eq!(layer.gated_gradients(2), 2 * (10 + 200));
        // Queries count where keys are few, keys where they are many, and single keys beside them.
        assert_eq!(layer.attended_gradients(2, 2, 0), 20 + 4 * 24 + 2 * 6);
        assert_eq!(layer.attended_gradients(2, 200, 0), 20 + 2 * 24 + 4 * 600);
        assert_eq!(layer.attended_gradients(2, 200, 180), 20 + 3 * 24 + 3 * 600 + 2 * 540);
        assert_eq!(layer.queried_gradients(2), 2 * (10 + 12 + 60));
        let narrow = Layer { read: 10, ..layer };
        assert_eq!(narrow.queried_gradients(2), 2 * (10 + 48 + 10));
    }
}
