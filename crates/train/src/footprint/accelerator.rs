//! What a decoder layer takes on an accelerator where that is more, or less, than on a CPU. In values.
//!
//! - A CPU's fused ops form some results again in the backward pass. An accelerator keeps these results.
//! - Products with factors of 16 bits keep these factors of their inputs in place of the inputs ([`Row::input_values`]).
//!   So does attention of its queries, keys and values ([`Layer::attended_values`]).
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
    /// queries, and of keys and values. The kernels read the gradient of the result as a factor of 16 bits, and keys and
    /// values where these are not kept so. They hold the gradients of `singles` apart, keys that rows see one by one.
    pub fn attended_gradients(&self, row: &Row, rows: u64, keys: u64, singles: u64) -> u64 {
        let (queries, sides) = (rows * self.query, keys * self.kv);
        let are_kept = self.attended_values(row, 2 * sides) < 2 * sides;
        let factors = if are_kept { 0 } else { sides };
        rows * self.width + 3 * queries + 2 * sides + factors + 2 * singles * self.kv
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
        let layer = Layer { width: 10, read: 20, query: 32, kv: 8, heads: 4, inner: 40 };
        let (half, single) = (on_gpu(2), Row { half_products: false, ..on_gpu(2) });
        assert_eq!([half, single].map(|row| layer.gated_onto_values(&row)), [20, 40]);
        // Two norms of 10, queries, keys and values.
        assert_eq!(layer.token_values(&single) - layer.token_values(&half), 10 + 16 + 8);
        // Attention reads odd heads in f32.
        let odd = Layer { query: 36, kv: 9, ..layer };
        assert_eq!(odd.token_values(&single) - odd.token_values(&half), 10);
        assert_eq!(half.input_values(5), 3);
        assert_eq!(layer.gated_gradients(2), 2 * (10 + 120));
        // Single keys count beside the others.
        let attended = |row: &Row, singles| layer.attended_gradients(row, 2, 200, singles);
        assert_eq!(attended(&half, 0), 20 + 3 * 64 + 2 * 1600);
        assert_eq!(attended(&half, 180), 20 + 3 * 64 + 2 * 1600 + 2 * 1440);
        // Keys and values become factors.
        assert_eq!(attended(&single, 180) - attended(&half, 180), 1600);
        assert_eq!(layer.queried_gradients(2), 2 * (10 + 64 + 20));
    }
}
