//! Attention over latent rows from named weights.

use longdraft_kernels::matrix::Matrix;

use super::Parts;
use crate::config::{LatentConfig, TargetConfig};
use crate::error::Result;
use crate::target_model::latent::Latent;

impl Parts<'_> {
    /// Attention over latent rows; neighbouring pairs of turned values are put in half-split order.
    pub(super) fn latent(
        &self,
        config: &TargetConfig,
        latent: LatentConfig,
        prefix: &str,
    ) -> Result<Latent> {
        let name = |tensor: &str| format!("{prefix}self_attn.{tensor}");
        let LatentConfig { rank, plain_dim, turned_dim, value_dim, interleaved, .. } = latent;
        let (head_dim, heads) = (latent.head_dim(), config.num_attention_heads);
        let turned = |first: usize| {
            (0..turned_dim).map(move |i| {
                let half = turned_dim / 2;
                let within = if interleaved { i % half * 2 + i / half } else { i };
                (first + within) as u32
            })
        };
        let (query, from) = match latent.query_rank {
            Some(_) => {
                let norm = self.weights.vector(&name("q_a_layernorm.weight"))?;
                let projection = self.outputs(&name("q_a_proj"), config.qkv_bias)?;
                (Some((projection, norm)), self.outputs(&name("q_b_proj"), false)?)
            }
            None => (None, self.outputs(&name("q_proj"), false)?),
        };
        let plain =
            |head: usize| (head * head_dim..head * head_dim + plain_dim).map(|row| row as u32);
        let q_plain: Vec<u32> = (0..heads).flat_map(plain).collect();
        let q_turned: Vec<u32> =
            (0..heads).flat_map(|head| turned(head * head_dim + plain_dim)).collect();
        let both = self.outputs(&name("kv_a_proj_with_mqa"), config.qkv_bias)?;
        let rows: Vec<u32> = (0..rank as u32).collect();
        let of_heads = match self.weights.latent_heads(prefix, heads)? {
            Some(apart) => apart,
            None => self.latent_heads(&name("kv_b_proj.weight"), heads, (plain_dim, value_dim))?,
        };
        Ok(Latent {
            sizes: latent,
            query,
            q_plain: from.select(&q_plain)?,
            q_turned: from.select(&q_turned)?,
            rows: both.select(&rows)?,
            k_turned: both.select(&turned(rank).collect::<Vec<_>>())?,
            norm: self.weights.vector(&name("kv_a_layernorm.weight"))?,
            heads: of_heads,
            o_proj: self.inputs(&name("o_proj"), config.attention_output_bias)?,
        })
    }

    /// What makes each head's keys and values of latent rows, of a matrix that holds them head by head.
    fn latent_heads(
        &self,
        name: &str,
        heads: usize,
        (plain_dim, value_dim): (usize, usize),
    ) -> Result<Vec<(Matrix, Matrix)>> {
        let of_heads = self.weights.matrix(name)?.to_dense()?;
        let of_head = |head: usize| -> Result<(Matrix, Matrix)> {
            let all = of_heads.narrow(0, head * (plain_dim + value_dim), plain_dim + value_dim)?;
            let keys = all.narrow(0, 0, plain_dim)?.t()?.contiguous()?;
            let values = all.narrow(0, plain_dim, value_dim)?.force_contiguous()?;
            Ok((Matrix::Dense(keys), Matrix::Dense(values)))
        };
        (0..heads).map(of_head).collect()
    }
}
