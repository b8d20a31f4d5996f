//! Attention over latent rows (DeepSeek-V2, <https://arxiv.org/abs/2405.04434>): a token's keys and values of all heads
//! are made of one row of `r` values, and of `R` turned values that all heads share.
//!
//! ```text
//! l = norm(Wa h) [T, r],  k_R = rope(Wr h) [T, R]               cached, side by side
//! k_n = K_n l, v_n = V_n l                                       never made
//! q_n · [k_n | k_R] = (q_nᵀ K_n) · l + q_R · k_R                 queries are brought to the latent rows instead
//! Σ p V_n l = V_n (Σ p l)                                        and what is attended to back from them
//! ```
//!
//! So all heads share one key of `r + R` values, whose first `r` are the value too. Products run head by head as
//! every other product does: a row's bits do not depend on the rows beside it.

use candle_core::Tensor;
use longdraft_kernels::matrix::{Matrix, linear_each};
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::rope::{RopeTable, rope};

use super::features::KeyValues;
use super::feed_forward::Projection;
use super::layer::Heads;
use crate::config::LatentConfig;
use crate::config::latent::LATENT_EPS;
use crate::error::Result;

/// Projections of such a layer.
pub(super) struct Latent {
    pub(super) sizes: LatentConfig,
    /// What queries are made of, `[q_lora_rank, H]`, and its norm; without it hidden states.
    pub(super) query: Option<(Projection, Tensor)>,
    /// `[N · plain, ..]`, heads one after the other.
    pub(super) q_plain: Projection,
    /// `[N · R, ..]`, in half-split order.
    pub(super) q_turned: Projection,
    /// `[r, H]`
    pub(super) rows: Projection,
    /// `[R, H]`, in half-split order.
    pub(super) k_turned: Projection,
    /// `[r]`
    pub(super) norm: Tensor,
    /// `K_nᵀ`, `[r, plain]`, and `V_n`, `[value, r]`, of every head.
    pub(super) heads: Vec<(Matrix, Matrix)>,
    pub(super) o_proj: Projection,
}

impl Latent {
    /// Queries that are brought to the latent rows, `[T, N, r + R]`, and these, `[T, 1, r + R]`.
    pub(super) fn project(&self, normed: &Tensor, table: &RopeTable) -> Result<Heads> {
        let (tokens, LatentConfig { rank, plain_dim, turned_dim, .. }) =
            (normed.dim(0)?, self.sizes);
        let [rows, k_turned] = linear_each(normed, [self.rows.map(), self.k_turned.map()])?;
        let of_queries = match &self.query {
            None => normed.clone(),
            Some((projection, norm)) => {
                let (weight, bias) = projection.map();
                rms_norm(&weight.linear(normed, bias)?, norm, LATENT_EPS)?
            }
        };
        let [plain, turned] = linear_each(&of_queries, [self.q_plain.map(), self.q_turned.map()])?;
        let mut brought = Vec::with_capacity(self.heads.len());
        for (head, (keys, _)) in self.heads.iter().enumerate() {
            let own = plain.narrow(1, head * plain_dim, plain_dim)?.contiguous()?;
            brought.push(keys.linear(&own, None)?.reshape((tokens, 1, rank))?);
        }
        let turned = rope(&turned.reshape((tokens, self.heads.len(), turned_dim))?, table)?;
        let q = Tensor::cat(&[Tensor::cat(&brought, 1)?, turned], 2)?;
        let rows = rms_norm(&rows, &self.norm, LATENT_EPS)?.reshape((tokens, 1, rank))?;
        let unrotated = k_turned.reshape((tokens, 1, turned_dim))?;
        let k = Tensor::cat(&[&rows, &rope(&unrotated, table)?], 2)?;
        let unrotated_k = Tensor::cat(&[&rows, &unrotated], 2)?;
        Ok(Heads { q, v: k.clone(), k, unrotated_k, gate: None })
    }

    /// What heads attended to among the latent rows, `[T, N, r + R]`, as values side by side, `[T, N · value]`.
    pub(super) fn values(&self, attended: &Tensor) -> Result<Tensor> {
        let of_heads = self.heads.iter().enumerate().map(|(head, (_, values))| {
            let own = attended.narrow(1, head, 1)?.squeeze(1)?.narrow(1, 0, self.sizes.rank)?;
            Ok(values.linear(&own.contiguous()?, None)?)
        });
        Ok(Tensor::cat(&of_heads.collect::<Result<Vec<_>>>()?, 1)?)
    }

    /// Keys and values of every head as they would be without the latent rows, `[T, N, plain + R]` and
    /// `[T, N, value]`, of rows `[T, 1, r + R]`.
    pub(super) fn expanded(&self, rows: &Tensor) -> Result<KeyValues> {
        let LatentConfig { rank, turned_dim, .. } = self.sizes;
        let rows = rows.squeeze(1)?;
        let (latent, turned) =
            (rows.narrow(1, 0, rank)?.contiguous()?, rows.narrow(1, rank, turned_dim)?);
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for (keys, values) in &self.heads {
            let keys = Matrix::Dense(keys.to_dense()?.t()?.contiguous()?);
            let plain = keys.linear(&latent, None)?;
            k.push(Tensor::cat(&[&plain, &turned], 1)?.unsqueeze(1)?);
            v.push(values.linear(&latent, None)?.unsqueeze(1)?);
        }
        Ok(KeyValues { k: Tensor::cat(&k, 1)?, v: Tensor::cat(&v, 1)? })
    }
}
