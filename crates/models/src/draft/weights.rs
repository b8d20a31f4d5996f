//! A draft's tensors by name, and what every method does with them.

use candle_core::{Device, Tensor, Var};
use longdraft_kernels::gated_mlp::{GatedMlp, gated_mlp_onto};
use longdraft_kernels::graph::{add, reshape};
use longdraft_kernels::linear::{linear, linear_onto};
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::random::CounterRng;
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::swiglu::swiglu;

use super::Parameter;
use super::quantised::{HeldAs, Matrices};
use crate::error::{Result, refused, without_backtrace};
use crate::weights::TensorSpec;

/// Named tensors of a draft, with their matrices as it proposes by them on demand.
pub struct DraftWeights {
    /// Those that are held in f32.
    parameters: Vec<Parameter>,
    matrices: Matrices,
    /// Whether the draft only proposes: nothing that it computes has a gradient.
    is_frozen: bool,
    rms_norm_eps: f64,
}

impl DraftWeights {
    /// These tensors, held as they are.
    pub fn new(parameters: Vec<Parameter>, rms_norm_eps: f64) -> Self {
        let matrices = Matrices::default();
        Self { parameters, matrices, is_frozen: false, rms_norm_eps }
    }

    /// Every tensor that is held in f32, in their order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Mutable access, for replacing values.
    pub fn parameters_mut(&mut self) -> &mut [Parameter] {
        &mut self.parameters
    }

    /// Values of all tensors, however they are held.
    pub fn parameter_count(&self) -> usize {
        let in_f32 = self.parameters.iter().map(|parameter| parameter.var.elem_count());
        in_f32.sum::<usize>() + self.matrices.freed()
    }

    /// Bytes of all tensors as they are held.
    pub fn held_bytes(&self) -> usize {
        let bytes = |p: &Parameter| p.var.elem_count() * p.var.dtype().size_in_bytes();
        self.parameters.iter().map(bytes).sum::<usize>() + self.matrices.held_bytes()
    }

    /// Tensors by name, in their order.
    ///
    /// # Errors
    /// - some are held for proposing alone
    pub fn named(&self) -> Result<Vec<(String, Tensor)>> {
        self.require_f32()?;
        let named = |p: &Parameter| (p.name.clone(), p.var.as_tensor().clone());
        Ok(self.parameters.iter().map(named).collect())
    }

    /// Rounds the matrices, where their device and their sizes allow it. Their f32 values are freed, those of one matrix
    /// before the next one is rounded. [`Self::project`] and [`Self::matrix`] read every form.
    ///
    /// # Errors
    /// - there is no memory for them
    pub fn hold_as(&mut self, how: HeldAs) -> Result<()> {
        self.hold_beside(how, &[])
    }

    /// The same; the matrices of the `kept` modules are held in f32, too.
    pub(super) fn hold_beside(&mut self, how: HeldAs, kept: &[&str]) -> Result<()> {
        self.matrices.take_over(&mut self.parameters, how, kept)?;
        self.is_frozen = self.matrices.freed() > 0;
        Ok(())
    }

    /// Refuses to go on where matrices are held for proposing alone.
    pub(super) fn require_f32(&self) -> Result<()> {
        if self.matrices.freed() == 0 {
            return Ok(());
        }
        Err(refused(
            "the draft is held in fewer bits, for proposing alone: open it again to save or train it",
        ))
    }

    /// A tensor that is held in f32.
    ///
    /// # Errors
    /// - there is none of this name, or it is held for proposing alone
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        let missing = || match self.matrices.get(name) {
            Some(_) => refused(format!("the draft holds `{name}` in fewer bits")),
            None => refused(format!("the draft has no `{name}`")),
        };
        self.get(name).ok_or_else(missing)
    }

    /// The same, if there is one of this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        let found = self.parameters.iter().find(|parameter| parameter.name == name);
        found.map(|parameter| parameter.var.as_tensor())
    }

    /// Whether a module's matrix is held for proposing.
    fn is_rounded(&self, module: &str) -> bool {
        self.matrices.get(&format!("{module}.weight")).is_some()
    }

    /// A module's matrix as it is held: f32, bf16, or blocks.
    ///
    /// # Errors
    /// - there is no such module
    pub fn matrix(&self, module: &str) -> Result<Matrix> {
        let name = format!("{module}.weight");
        match self.matrices.get(&name) {
            Some(matrix) => Ok(matrix.clone()),
            None => Ok(Matrix::Dense(self.tensor(&name)?.clone())),
        }
    }

    /// `x Wᵀ`, plus the module's bias if it has one.
    ///
    /// # Errors
    /// - there is no such module, or shapes do not fit
    pub fn project(&self, x: &Tensor, module: &str) -> Result<Tensor> {
        let bias = self.get(&format!("{module}.bias"));
        let weight = format!("{module}.weight");
        match self.matrices.project(x, &weight, bias)? {
            Some(projected) => Ok(projected),
            None => Ok(linear(x, self.tensor(&weight)?, bias)?),
        }
    }

    /// `residual + x Wᵀ` of a module without a bias, in one op unless its matrix is blocks.
    pub(super) fn project_onto(
        &self,
        residual: &Tensor,
        x: &Tensor,
        module: &str,
    ) -> Result<Tensor> {
        let weight = format!("{module}.weight");
        Ok(match self.matrices.get(&weight) {
            Some(Matrix::Dense(weight)) => {
                linear_onto(&residual.detach(), &x.detach(), weight, None)?
            }
            Some(_) => add(residual, &self.project(x, module)?)?,
            None => linear_onto(residual, x, self.tensor(&weight)?, None)?,
        })
    }

    /// A module's root-mean-square norm.
    ///
    /// # Errors
    /// - there is no such module, or the width differs
    pub fn norm(&self, x: &Tensor, module: &str) -> Result<Tensor> {
        let weight = self.tensor(&format!("{module}.weight"))?;
        if self.is_frozen {
            return Ok(rms_norm(x, &weight.detach(), self.rms_norm_eps)?);
        }
        Ok(rms_norm(x, weight, self.rms_norm_eps)?)
    }

    /// The gated MLP of `gate_proj`, `up_proj` and `down_proj` below a module.
    ///
    /// # Shapes
    /// - `x`: `[T, H]` → `[T, H]`
    ///
    /// # Errors
    /// - there is no such module, or shapes do not fit
    pub fn mlp(&self, x: &Tensor, module: &str) -> Result<Tensor> {
        self.project(&self.gated(x, module)?, &format!("{module}.down_proj"))
    }

    fn gated(&self, x: &Tensor, module: &str) -> Result<Tensor> {
        let gate = self.project(x, &format!("{module}.gate_proj"))?;
        let up = self.project(x, &format!("{module}.up_proj"))?;
        Ok(swiglu(&gate, &up)?)
    }

    /// `residual` plus [`Self::mlp`], in one op unless matrices of it are held for proposing.
    pub(super) fn mlp_onto(&self, residual: &Tensor, x: &Tensor, module: &str) -> Result<Tensor> {
        let is_rounded = |name: &&str| self.is_rounded(&format!("{module}.{name}"));
        if ["gate_proj", "up_proj", "down_proj"].iter().any(is_rounded) {
            let (gated, down) = (self.gated(x, module)?, format!("{module}.down_proj"));
            if self.is_rounded(&down) {
                return self.project_onto(residual, &gated, &down);
            }
            return Ok(add(residual, &self.project(&gated, &down)?)?);
        }
        let weight = |name: &str| self.tensor(&format!("{module}.{name}.weight"));
        let mlp = GatedMlp {
            gate: weight("gate_proj")?,
            up: weight("up_proj")?,
            down: weight("down_proj")?,
        };
        Ok(gated_mlp_onto(residual, x, &mlp)?)
    }

    /// A projection cut into heads.
    ///
    /// # Shapes
    /// - `x`: `[T, ..]` → `[T, count, head_dim]`
    ///
    /// # Errors
    /// - there is no such module, or shapes do not fit
    pub fn heads(&self, x: &Tensor, module: &str, count: usize, head_dim: usize) -> Result<Tensor> {
        Ok(reshape(&self.project(x, module)?, (x.dim(0)?, count, head_dim))?)
    }
}

/// Initial values of a tensor: norms 1, biases 0, matrices N(0, `deviation`) by `seed` and name.
/// It fails where it cannot be made.
pub(super) fn initial_value(
    spec: &TensorSpec,
    deviation: f64,
    seed: u64,
    device: &Device,
) -> Result<Tensor> {
    let count = spec.shape.iter().product();
    let values: Vec<f32> = if spec.shape.len() > 1 {
        let mut rng = CounterRng::new(seed, &spec.name, &[]);
        (0..count).map(|_| (rng.normal() * deviation) as f32).collect()
    } else {
        let is_bias = spec.name.rsplit('.').next() == Some("bias");
        vec![if is_bias { 0.0 } else { 1.0 }; count]
    };
    Ok(Tensor::from_vec(values, spec.shape.as_slice(), device)?)
}

/// A trained tensor of a spec; weight decay applies to matrices. It fails where it cannot be made.
pub(super) fn parameter(spec: &TensorSpec, value: &Tensor) -> Result<Parameter> {
    let (name, decay) = (spec.name.clone(), spec.shape.len() > 1);
    Ok(Parameter { name, var: Var::from_tensor(value)?, role: spec.role, decay, dead: false })
}

/// What is wrong with the target's embedding table where `[V, H]` are the sizes that a draft reads; `None` if nothing is.
pub(super) fn table_problem(table: &Matrix, sizes: [usize; 2]) -> Option<String> {
    match table.dims() {
        Ok((rows, width)) if [rows, width] == sizes => None,
        Ok((rows, width)) => Some(format!("embeddings [{rows}, {width}], {sizes:?} expected")),
        Err(error) => Some(format!("embeddings: {}", without_backtrace(error))),
    }
}
