//! Every op against a reference: what `longdraft kernel-check` runs on a device.
//!
//! `OPS` lists the ops, one entry each; an entry's function makes its cases of a size. A case has
//! inputs, the op, and what is expected: the same in f64 on the CPU, within a tolerance, or another way
//! on the device that must give the same bits. [`check`] runs every case forward and backward under each
//! type of products that the device has, several times, and compares values with the expectation and
//! bits with those of the first run. Before each run the memory that results may get is filled with
//! NaN: a value that is never written shows.
//!
//! The error of a tensor is the largest difference of a row, in parts of the row's largest value or of
//! a tenth of the tensor's, whichever is larger, and at least 0.01: a wrong row shows among larger ones.

mod attention;
mod bench;
mod blocks;
mod case;
mod compare;
mod halves;
mod losses;
mod memory;
pub(crate) mod optimizer;
mod products;
mod recurrence;
mod rows;
mod run;

use case::Case;

pub use bench::{Rate, Speed, measure, timed_names};
pub use run::{Measured, Options, Report, check};

/// How large the cases are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Size {
    /// A few seconds on a CPU.
    Smoke,
    /// Every head dim and odd counts at moderate lengths, and losses at a whole vocabulary.
    Small,
    /// Lengths and widths of real models, for a GPU.
    Real,
}

/// One op of the table.
struct Op {
    name: &'static str,
    /// Whether the type of products enters its result.
    multiplies: bool,
    cases: fn(Size) -> Vec<Case>,
}

const fn multiplies(name: &'static str, cases: fn(Size) -> Vec<Case>) -> Op {
    Op { name, multiplies: true, cases }
}

const fn plain(name: &'static str, cases: fn(Size) -> Vec<Case>) -> Op {
    Op { name, multiplies: false, cases }
}

/// All ops.
const OPS: [Op; 42] = [
    multiplies("attention", attention::training),
    multiplies("attention_one_pass", attention::one_pass),
    multiplies("attention_decoding", attention::decoding),
    multiplies("attention_row_bits", attention::row_bits),
    multiplies("attention_bent", attention::bent),
    multiplies("linear", products::linear_training),
    multiplies("linear_onto", products::onto),
    multiplies("linear_exact", products::exact),
    multiplies("few_rows", products::few_rows),
    multiplies("few_rows_bits", products::few_rows_bits),
    plain("block_products", blocks::products),
    multiplies("block_widened", blocks::widened),
    multiplies("block_values", blocks::values),
    multiplies("gated_mlp", products::gated),
    multiplies("experts", products::mixtures),
    multiplies("experts_clamped", products::clamped_mixtures),
    multiplies("experts_row_bits", products::mixture_bits),
    plain("delta_rule", recurrence::delta_rule),
    plain("delta_rule_row_bits", recurrence::delta_row_bits),
    plain("causal_convolution", recurrence::convolutions),
    multiplies("orthogonalise", optimizer::orthogonal),
    multiplies("linear_cross_entropy", losses::cross_entropy),
    multiplies("softcapped_cross_entropy", losses::softcapped),
    multiplies("linear_log_sum_exp", losses::log_sum_exp),
    multiplies("linear_top_k", losses::top_k),
    plain("bf16_activations", halves::activations),
    plain("bf16_written", halves::written),
    plain("rms_norm", rows::norms),
    plain("rope", rows::rotations),
    plain("swiglu", rows::gates),
    plain("geglu", rows::gelu_gates),
    plain("relu_squared", rows::squares),
    plain("scale_channels", rows::scales),
    plain("add_scaled", rows::scaled_sums),
    plain("adamw", optimizer::steps),
    plain("square_sum", optimizer::square_sums),
    plain("select_rows", memory::selected),
    plain("scatter_rows", memory::scattered),
    plain("matrix_rows", memory::embedded),
    plain("matrix_select", memory::selected_matrices),
    plain("select_no_rows", memory::nothing),
    multiplies("upload_ahead", memory::uploads),
];

/// The ops' names, in the order of the checks.
pub fn names() -> impl Iterator<Item = &'static str> {
    OPS.iter().map(|op| op.name)
}

#[cfg(test)]
mod tests;
