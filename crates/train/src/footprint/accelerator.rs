//! What a decoder layer takes on an accelerator where that is more, or less, than on a CPU. In values.
//!
//! - A CPU's fused ops form some results again in the backward pass. An accelerator keeps these results.
//! - Products with factors of 16 bits keep these factors of their inputs in place of the inputs ([`Row::input_values`]).
//! - Gradients of weights, and of what several products read, are added in place by the products that form them.

use super::layer::Layer;
use super::row::Row;

impl Layer {
    /// Kept of a token by a gated MLP onto a residual: the product of gate and up, which a CPU forms again, as the last
    /// product reads it.
    pub fn gated_onto_values(&self, row: &Row) -> u64 {
        row.input_values(self.inner)
    }

    /// Gradients under way in a gated MLP: of the residual, which is that of the output; of the product, of gate and up.
    pub fn gated_gradients(&self, rows: u64) -> u64 {
        rows * (self.width + 3 * self.inner)
    }

    /// Gradients under way in attention of some rows to some keys, beside that of the residual: of the result, of
    /// queries, and of keys and values. Before that the kernels read result, queries, keys and values as factors of
    /// 16 bits, and hold the gradients of `singles` apart, keys that rows see one by one.
    pub fn attended_gradients(&self, rows: u64, keys: u64, singles: u64) -> u64 {
        let (queries, sides) = (rows * self.query, keys * self.kv);
        rows * self.width + 3 * queries + 3 * sides + 2 * singles * self.kv
    }

    /// Gradients under way between queries and the states that they are projections of, the end of a layer: of the
    /// residual; of queries as they come and as they go on; of the states, from keys and values.
    pub fn queried_gradients(&self, rows: u64) -> u64 {
        rows * (self.width + 2 * self.query + self.read)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::on_gpu;
    use super::*;

    #[test]
    fn every_op_of_a_layer_holds_what_its_gradients_are() {
        let layer = Layer { width: 10, read: 20, query: 12, kv: 3, heads: 4, inner: 40 };
        let (half, single) = (on_gpu(2), Row { half_products: false, ..on_gpu(2) });
        assert_eq!([half, single].map(|row| layer.gated_onto_values(&row)), [20, 40]);
        // Two norms of 10.
        assert_eq!(layer.token_values(&single) - layer.token_values(&half), 10);
        assert_eq!(half.input_values(5), 3);
        assert_eq!(layer.gated_gradients(2), 2 * (10 + 120));
        // Single keys count beside the others.
        assert_eq!(layer.attended_gradients(2, 200, 0), 20 + 3 * 24 + 3 * 600);
        assert_eq!(layer.attended_gradients(2, 200, 180), 20 + 3 * 24 + 3 * 600 + 2 * 540);
        assert_eq!(layer.queried_gradients(2), 2 * (10 + 24 + 20));
    }
}
