//! The ops of drafts as nodes of a tape: f32 sizes, what their backward passes return, and the
//! buffers that their products leave.

use std::collections::HashMap;

use longdraft_kernels::linear::{Pass, kept_bytes};

use super::tape::{Backward, Gradient, Id, Tape};

/// Bytes of an f32.
pub const F32: u64 = 4;

/// Bytes of a query's range of keys.
const RANGE: u64 = 8;

/// Bytes of a single key that a query sees: in the ranges, and while gradients are summed.
const SINGLE: (u64, u64) = (4, 8);

/// A tensor `[rows, width]`.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    pub(crate) id: Id,
    pub(crate) rows: u64,
    pub(crate) width: u64,
}

/// Rotated angles: cos and sin.
#[derive(Debug, Clone, Copy)]
pub struct Angles([Id; 2]);

/// A graph with what its products leave.
#[derive(Debug)]
pub struct Graph {
    tape: Tape,
    weights: HashMap<String, Id>,
    /// What the names of the weights at hand begin with.
    scope: String,
    threads: usize,
    /// Largest packed operand.
    packed: u64,
}

impl Graph {
    /// An empty graph of a rank with so many threads; 0: an accelerator, which packs nothing.
    pub fn new(threads: usize) -> Self {
        Self {
            tape: Tape::default(),
            weights: HashMap::new(),
            scope: String::new(),
            threads,
            packed: 0,
        }
    }

    /// Weights that are named from here on are of this part of the network.
    pub fn enter(&mut self, scope: impl Into<String>) {
        self.scope = scope.into();
    }

    /// A tensor that does not train; the graph keeps it.
    pub(crate) fn constant(&mut self, rows: u64, width: u64) -> Matrix {
        let size = F32 * rows * width;
        Matrix { id: self.tape.constant(size, size), rows, width }
    }

    /// One that is counted elsewhere.
    pub(crate) fn given(&mut self, rows: u64, width: u64) -> Matrix {
        Matrix { id: self.tape.constant(F32 * rows * width, 0), rows, width }
    }

    /// A weight, counted elsewhere; the same one wherever its name comes up.
    pub fn weight(&mut self, name: &str, rows: u64, width: u64) -> Matrix {
        let tape = &mut self.tape;
        let name = format!("{}{name}", self.scope);
        let id = self.weights.entry(name).or_insert_with(|| tape.variable(F32 * rows * width));
        Matrix { id: *id, rows, width }
    }

    /// Cos and sin of a token each half head.
    pub fn angles(&mut self, rows: u64, head_dim: u64) -> Angles {
        Angles([(); 2].map(|()| self.constant(rows, head_dim / 2).id))
    }

    fn result(&mut self, rows: u64, width: u64, arguments: &[(Id, Gradient)]) -> Matrix {
        Matrix { id: self.tape.op(F32 * rows * width, arguments), rows, width }
    }

    /// A gradient only for what trains.
    fn if_tracked(&self, id: Id, kind: Gradient) -> (Id, Gradient) {
        (id, if self.tape.is_tracked(id) { kind } else { Gradient::None })
    }

    /// `x Wᵀ + b`; `residual + x Wᵀ` hands its gradient on.
    fn map(
        &mut self,
        x: Matrix,
        (name, outputs): (&str, u64),
        addend: Option<(Id, Gradient)>,
    ) -> Matrix {
        let weight = self.weight(name, outputs, x.width).id;
        let mut arguments =
            vec![self.if_tracked(x.id, Gradient::Computed), (weight, Gradient::Computed)];
        arguments.extend(addend);
        let passes = [Pass::Forward, Pass::InputGradient, Pass::WeightGradient];
        let first = if self.tape.is_tracked(x.id) { &passes[..] } else { &[passes[0], passes[2]] };
        first.iter().for_each(|pass| self.pack(*pass, (x.rows, x.width, outputs)));
        self.result(x.rows, outputs, &arguments)
    }

    /// Counts what a product leaves: `(rows, inputs, outputs)`.
    pub fn pack(&mut self, pass: Pass, (rows, inputs, outputs): (u64, u64, u64)) {
        if self.threads == 0 {
            return;
        }
        let sizes = (rows as usize, inputs as usize, outputs as usize);
        self.packed = self.packed.max(kept_bytes(pass, sizes, self.threads) as u64);
    }

    /// `x Wᵀ` with the trained weight of a name.
    pub fn linear(&mut self, x: Matrix, name: &str, outputs: u64) -> Matrix {
        self.map(x, (name, outputs), None)
    }

    /// `x Wᵀ + b` with the trained tensors of two names.
    pub(crate) fn affine(&mut self, x: Matrix, [weight, bias]: [&str; 2], outputs: u64) -> Matrix {
        let bias = (self.weight(bias, 1, outputs).id, Gradient::Computed);
        self.map(x, (weight, outputs), Some(bias))
    }

    /// `residual + x Wᵀ`
    pub(crate) fn linear_onto(&mut self, residual: Matrix, x: Matrix, name: &str) -> Matrix {
        let addend = self.if_tracked(residual.id, Gradient::HandedOn);
        self.map(x, (name, residual.width), Some(addend))
    }

    /// `RMS_w(x)` with the trained weight of a name, or one that is given.
    pub fn norm(&mut self, x: Matrix, name: Option<&str>) -> Matrix {
        let weight = match name {
            Some(name) => self.weight(name, 1, x.width),
            None => self.given(1, x.width),
        };
        // The gradient of x is computed even where nobody asks for it.
        let of_x = self.if_tracked(x.id, Gradient::Computed);
        let y = self.result(x.rows, x.width, &[of_x, (weight.id, Gradient::Computed)]);
        if of_x.1 == Gradient::None {
            self.tape.add(y.id, 0, F32 * x.rows * x.width);
        }
        y
    }

    /// Rotates heads, which are a view of the projection.
    pub fn rotate(&mut self, x: Matrix, angles: Angles) -> Matrix {
        let heads = self.tape.view(x.id);
        let of_heads = self.if_tracked(heads, Gradient::Computed);
        let [cos, sin] = angles.0.map(|angle| (angle, Gradient::None));
        self.result(x.rows, x.width, &[of_heads, cos, sin])
    }

    /// The same memory under another shape.
    pub fn view(&mut self, x: Matrix) -> Matrix {
        Matrix { id: self.tape.view(x.id), ..x }
    }

    /// Attention of `[T, N·D]` queries: the output, the log-sum-exp of every head and the ranges stay.
    /// `singles` keys a query stand outside of its range.
    pub fn attention(
        &mut self,
        q: Matrix,
        [k, v]: [Matrix; 2],
        heads: u64,
        singles: u64,
    ) -> Matrix {
        let train = self.tape.is_tracked(k.id) || self.tape.is_tracked(v.id);
        let of_keys = if train { Gradient::Computed } else { Gradient::None };
        let arguments = [(q.id, Gradient::Computed), (k.id, of_keys), (v.id, of_keys)];
        let out = self.result(q.rows, q.width, &arguments);
        let (ranges, pairs) = SINGLE;
        let of_singles = if singles > 0 { 4 + ranges * singles } else { 0 };
        let saved = q.rows * (F32 * heads + RANGE + of_singles);
        self.tape.add(out.id, saved, q.rows * pairs * singles);
        self.view(out)
    }

    /// `silu(gate) ∘ up`
    pub(crate) fn swiglu(&mut self, gate: Matrix, up: Matrix) -> Matrix {
        let arguments = [(gate.id, Gradient::Computed), (up.id, Gradient::Computed)];
        self.result(gate.rows, gate.width, &arguments)
    }

    /// `residual + Wd (silu(Wg x) ∘ Wu x)`: gate and up stay, the gated product is formed again.
    pub fn gated_mlp_onto(&mut self, residual: Matrix, x: Matrix, inner: u64) -> Matrix {
        let arguments = [
            self.if_tracked(x.id, Gradient::Computed),
            (self.weight("gate", inner, x.width).id, Gradient::Computed),
            (self.weight("up", inner, x.width).id, Gradient::Computed),
        ];
        let both = self.result(2 * x.rows, inner, &arguments);
        let down = self.weight("down", residual.width, inner).id;
        let of_residual = self.if_tracked(residual.id, Gradient::HandedOn);
        let arguments = [(both.id, Gradient::Computed), (down, Gradient::Computed), of_residual];
        let out = self.result(x.rows, residual.width, &arguments);
        self.tape.add(out.id, 0, F32 * x.rows * inner);
        for pass in [Pass::Forward, Pass::InputGradient, Pass::WeightGradient] {
            self.pack(pass, (x.rows, x.width, inner));
            self.pack(pass, (x.rows, inner, residual.width));
        }
        out
    }

    /// An op whose gradient is one of its input's size: `max(x, 0)²`, a factor.
    pub fn relu_squared(&mut self, x: Matrix) -> Matrix {
        self.result(x.rows, x.width, &[(x.id, Gradient::Computed)])
    }

    /// `x ∘ w` with a part of a trained tensor, or `residual + x ∘ w`.
    pub fn scale(&mut self, x: Matrix, name: &str, residual: Option<Matrix>) -> Matrix {
        let weight = self.weight(name, 1, x.width).id;
        let of_x = self.if_tracked(x.id, Gradient::Computed);
        let mut arguments = vec![of_x, (weight, Gradient::Computed)];
        arguments.extend(residual.map(|r| self.if_tracked(r.id, Gradient::HandedOn)));
        self.result(x.rows, x.width, &arguments)
    }

    /// `a + b`; the library keeps a gradient even of what does not train.
    pub fn add(&mut self, a: Matrix, b: Matrix) -> Matrix {
        self.result(a.rows, a.width, &[(a.id, Gradient::HandedOn), (b.id, Gradient::HandedOn)])
    }

    /// Some rows.
    pub fn select(&mut self, x: Matrix, rows: u64) -> Matrix {
        let index = self.constant(rows, 1).id;
        self.result(rows, x.width, &[(x.id, Gradient::HandedOn), (index, Gradient::None)])
    }

    /// Tensors one after the other.
    pub(crate) fn stack(&mut self, parts: &[Matrix]) -> Matrix {
        let arguments: Vec<_> = parts.iter().map(|part| (part.id, Gradient::HandedOn)).collect();
        let rows = parts.iter().map(|part| part.rows).sum();
        self.result(rows, parts.first().map_or(0, |part| part.width), &arguments)
    }

    /// Tensors side by side.
    pub fn beside(&mut self, parts: &[Matrix]) -> Matrix {
        let arguments: Vec<_> = parts.iter().map(|part| (part.id, Gradient::HandedOn)).collect();
        let width = parts.iter().map(|part| part.width).sum();
        self.result(parts.first().map_or(0, |part| part.rows), width, &arguments)
    }

    /// Some columns, copied; the gradient is padded to all of them.
    pub fn part(&mut self, x: Matrix, width: u64) -> Matrix {
        self.result(x.rows, width, &[(x.id, Gradient::Computed)])
    }

    /// A convolution along rows, whose kernels are a weight and those of `delta`.
    pub(crate) fn convolve(
        &mut self,
        y: Matrix,
        (name, kernels): (&str, u64),
        delta: Matrix,
    ) -> Matrix {
        let base = self.weight(name, kernels, y.width).id;
        let arguments = [y.id, base, delta.id].map(|id| (id, Gradient::Computed));
        self.result(y.rows, y.width, &arguments)
    }

    /// Products of every row of `x` with `each` rows of a table.
    pub(crate) fn chosen(&mut self, x: Matrix, table: Matrix, each: u64) -> Matrix {
        let arguments = [x, table].map(|t| self.if_tracked(t.id, Gradient::Computed));
        self.result(x.rows, each, &arguments)
    }

    /// `a ∘ b`
    pub(crate) fn multiply(&mut self, a: Matrix, b: Matrix) -> Matrix {
        let arguments = [a, b].map(|t| (t.id, Gradient::Computed));
        self.result(a.rows, a.width, &arguments)
    }

    /// Rows of a trained table: its gradient is a whole table.
    pub(crate) fn lookup(&mut self, table: Matrix, rows: u64) -> Matrix {
        self.result(rows, table.width, &[(table.id, Gradient::Computed)])
    }

    /// Rows of all processes, of which every one has its part.
    pub(crate) fn gathered(&mut self, x: Matrix, parts: u64) -> Matrix {
        if parts == 1 {
            return x;
        }
        self.result(x.rows * parts, x.width, &[(x.id, Gradient::Computed)])
    }

    /// The loss of hidden states with a head `[V, H]`, and the factors of what is added to their product:
    /// gradients are made in the forward pass and wait.
    pub fn loss(&mut self, factors: &[Matrix]) -> Matrix {
        let arguments: Vec<_> =
            factors.iter().map(|factor| self.if_tracked(factor.id, Gradient::Computed)).collect();
        let loss = self.result(1, 1, &arguments);
        let trained =
            factors.iter().zip(&arguments).filter(|(_, (_, kind))| *kind != Gradient::None);
        let waiting = trained.map(|(factor, _)| F32 * factor.rows * factor.width).sum();
        self.tape.add(loss.id, waiting, 0);
        loss
    }

    /// Bytes that the graph of `root` keeps.
    pub(crate) fn kept(&self, root: Matrix) -> u64 {
        self.tape.kept(root.id)
    }

    /// The backward pass of `root`.
    pub(crate) fn backward(&self, root: Matrix) -> Backward {
        self.tape.backward(root.id)
    }

    /// Bytes of all weights' gradients.
    pub(crate) fn weight_bytes(&self) -> u64 {
        self.tape.variables()
    }

    /// Bytes of packed operands that the calling thread keeps.
    pub(crate) fn packed(&self) -> u64 {
        self.packed
    }
}
