//! Sizes of a graph of tensors: what its forward pass keeps and what its backward pass holds.
//!
//! The backward pass takes nodes in the order of the tensor library: a node's gradient is given up
//! once it is handed on, every argument's gradient is added into a fresh tensor, and activations stay
//! until the whole graph goes. Zeros that a sum starts from cost nothing: the system never maps them.

/// A node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id(usize);

/// What an argument gets back from an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gradient {
    /// Nothing.
    None,
    /// A tensor of its size, which is then added to what it has.
    Computed,
    /// The result's own gradient, or a view of it, added to what it has.
    HandedOn,
}

#[derive(Debug)]
struct Node {
    /// Bytes as a tensor; its gradient is as large.
    size: u64,
    /// Bytes that it keeps: 0 for views and for weights, which are counted elsewhere.
    kept: u64,
    /// Bytes that its backward pass needs for a moment.
    scratch: u64,
    is_variable: bool,
    tracked: bool,
    arguments: Vec<(Id, Gradient)>,
}

/// What a backward pass holds beside the activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Backward {
    /// At most.
    pub(crate) peak: u64,
    /// At its end: gradients of variables, and of constants that were added to something.
    pub(crate) left: u64,
}

/// A graph, built in the order of the forward pass.
#[derive(Debug, Default)]
pub(crate) struct Tape {
    nodes: Vec<Node>,
}

impl Tape {
    fn push(&mut self, node: Node) -> Id {
        self.nodes.push(node);
        Id(self.nodes.len() - 1)
    }

    /// A trained tensor.
    pub(crate) fn variable(&mut self, size: u64) -> Id {
        let (kept, scratch, arguments) = (0, 0, Vec::new());
        self.push(Node { size, kept, scratch, is_variable: true, tracked: true, arguments })
    }

    /// A tensor that does not train, of which the graph keeps `kept` bytes alive.
    pub(crate) fn constant(&mut self, size: u64, kept: u64) -> Id {
        let (scratch, arguments) = (0, Vec::new());
        self.push(Node { size, kept, scratch, is_variable: false, tracked: false, arguments })
    }

    /// A result; one that no variable reaches is a constant that keeps none of its arguments.
    pub(crate) fn op(&mut self, size: u64, arguments: &[(Id, Gradient)]) -> Id {
        let tracked = arguments.iter().any(|(id, _)| self.nodes[id.0].tracked);
        let arguments = if tracked { arguments.to_vec() } else { Vec::new() };
        self.push(Node { size, kept: size, scratch: 0, is_variable: false, tracked, arguments })
    }

    /// The same memory under another shape.
    pub(crate) fn view(&mut self, of: Id) -> Id {
        let (size, tracked) = (self.nodes[of.0].size, self.nodes[of.0].tracked);
        let kept = if tracked { 0 } else { self.nodes[of.0].kept };
        let arguments = if tracked { vec![(of, Gradient::HandedOn)] } else { Vec::new() };
        self.push(Node { size, kept, scratch: 0, is_variable: false, tracked, arguments })
    }

    /// Whether a variable reaches a node.
    pub(crate) fn is_tracked(&self, id: Id) -> bool {
        self.nodes[id.0].tracked
    }

    /// Adds what a node keeps beside its value, and what its backward pass needs for a moment.
    pub(crate) fn add(&mut self, id: Id, kept: u64, scratch: u64) {
        self.nodes[id.0].kept += kept;
        self.nodes[id.0].scratch += scratch;
    }

    /// Bytes of the gradients of all variables.
    pub(crate) fn variables(&self) -> u64 {
        self.nodes.iter().filter(|node| node.is_variable).map(|node| node.size).sum()
    }

    /// Bytes that the graph of `root` keeps alive: every node's value and what it saves, once.
    pub(crate) fn kept(&self, root: Id) -> u64 {
        let (mut seen, mut stack, mut bytes) = (vec![false; self.nodes.len()], vec![root], 0);
        while let Some(id) = stack.pop() {
            if !std::mem::replace(&mut seen[id.0], true) {
                bytes += self.nodes[id.0].kept;
                stack.extend(self.nodes[id.0].arguments.iter().map(|(argument, _)| *argument));
            }
        }
        bytes
    }

    /// The backward pass of `root`.
    pub(crate) fn backward(&self, root: Id) -> Backward {
        let mut order = Vec::new();
        self.visit(root, &mut vec![false; self.nodes.len()], &mut order);
        let mut gradients: Vec<Option<u64>> = vec![None; self.nodes.len()];
        gradients[root.0] = Some(self.nodes[root.0].size);
        let (mut live, mut peak) = (self.nodes[root.0].size, 0);
        for id in order.into_iter().rev().filter(|id| !self.nodes[id.0].is_variable) {
            let node = &self.nodes[id.0];
            let own = gradients[id.0].take().unwrap_or(0);
            let computed = node.arguments.iter().filter(|(_, kind)| *kind == Gradient::Computed);
            live += computed.map(|(argument, _)| self.nodes[argument.0].size).sum::<u64>();
            peak = peak.max(live + node.scratch);
            for (argument, kind) in node.arguments.iter().filter(|(_, k)| *k != Gradient::None) {
                let size = self.nodes[argument.0].size;
                live += size;
                peak = peak.max(live);
                live -= gradients[argument.0].replace(size).unwrap_or(0);
                live -= if *kind == Gradient::Computed { size } else { 0 };
            }
            live -= own;
        }
        Backward { peak, left: live }
    }

    /// Arguments before what is made of them.
    fn visit(&self, id: Id, seen: &mut [bool], order: &mut Vec<Id>) {
        if std::mem::replace(&mut seen[id.0], true) {
            return;
        }
        for (argument, _) in &self.nodes[id.0].arguments {
            self.visit(*argument, seen, order);
        }
        if self.nodes[id.0].tracked {
            order.push(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `y = f(x, w) + x`, `z = g(y)` with `x` of 10 bytes that does not train and `w` of 4.
    #[test]
    fn sums_and_constants_cost_what_the_library_makes_of_them() {
        let mut tape = Tape::default();
        let (x, w) = (tape.constant(10, 10), tape.variable(4));
        let f = tape.op(10, &[(x, Gradient::None), (w, Gradient::Computed)]);
        let y = tape.op(10, &[(f, Gradient::HandedOn), (x, Gradient::HandedOn)]);
        let z = tape.op(1, &[(y, Gradient::Computed)]);
        tape.add(z, 7, 0);
        assert_eq!(tape.kept(z), 10 + 10 + 10 + 1 + 7);
        // z: 1, y's gradient 10 and its sum 10; y: own 10, f's sum 10, x's sum 10; f: own 10, x's
        // 10, w's 4 and its sum 4.
        assert_eq!(tape.backward(z), Backward { peak: 30, left: 10 + 4 });
        assert_eq!(tape.variables(), 4);
    }

    #[test]
    fn what_no_variable_reaches_keeps_nothing() {
        let mut tape = Tape::default();
        let x = tape.constant(10, 10);
        let y = tape.op(6, &[(x, Gradient::Computed)]);
        let y = tape.view(y);
        assert!(!tape.is_tracked(y));
        assert_eq!((tape.kept(y), tape.backward(y).left), (6, 6));
    }
}
