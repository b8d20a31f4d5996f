//! Records as the bytes of a shard; the layout of a row is `record.rs`'s.

use candle_core::{CpuStorage, Storage, Tensor};
use half::{bf16, f16};
use longdraft_data::Batch;
use longdraft_kernels::top_k::TopK;
use safetensors::tensor::{Dtype, TensorView};

use super::int8;
use super::recipe::StoreDtype;
use super::record::Record;
use crate::error::{FeatureError, Result};

/// A named tensor as bytes.
type Raw = (String, Dtype, Vec<usize>, Vec<u8>);

/// Bytes of a shard of these rows, which are as [`Record::on_host`] leaves them, with so many tapped layers.
/// It fails where a tensor is of another type than a store's.
pub(super) fn encode(
    rows: &[(Batch, Record)],
    dtype: StoreDtype,
    layers: usize,
) -> Result<Vec<u8>> {
    let mut all: Vec<Raw> = Vec::new();
    for (batch, record) in rows {
        all.extend(record.raw(batch, dtype, layers)?);
    }
    let fail = |error: safetensors::SafeTensorError| candle_core::Error::Msg(error.to_string());
    let mut views = Vec::with_capacity(all.len());
    for (name, kind, shape, bytes) in &all {
        views.push((name, TensorView::new(*kind, shape.clone(), bytes).map_err(fail)?));
    }
    Ok(safetensors::serialize(views, None).map_err(fail)?)
}

/// What is made of the values of a tensor in main memory, which has a type of a store.
/// It fails where it has another type, or is elsewhere.
fn of_values<T>(
    tensor: &Tensor,
    of_f32: impl FnOnce(&[f32]) -> T,
    of_bf16: impl FnOnce(&[bf16]) -> T,
) -> Result<T> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let values = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(all)) => Ok(of_f32(&all[values])),
        Storage::Cpu(CpuStorage::BF16(all)) => Ok(of_bf16(&all[values])),
        _ => {
            let problem = format!("a record of {:?} on {:?}", tensor.dtype(), tensor.device());
            Err(candle_core::Error::Msg(problem).into())
        }
    }
}

fn tensor_bytes(tensor: &Tensor) -> Result<(Dtype, Vec<u8>)> {
    let of_f32 = |values: &[f32]| (Dtype::F32, bytes_of(values, f32::to_le_bytes));
    let of_bf16 = |values: &[bf16]| (Dtype::BF16, bytes_of(values, bf16::to_le_bytes));
    of_values(tensor, of_f32, of_bf16)
}

/// Whether all values are finite: the largest magnitude, as bits, in one pass without branches.
fn is_finite(tensor: &Tensor) -> Result<bool> {
    let of_f32 = |values: &[f32]| {
        let largest = values.iter().fold(0, |most: u32, x| most.max(x.abs().to_bits()));
        largest < f32::INFINITY.to_bits()
    };
    let of_bf16 = |values: &[bf16]| {
        let largest = values.iter().fold(0, |most: u16, x| most.max(x.to_bits() & 0x7FFF));
        largest < bf16::INFINITY.to_bits()
    };
    of_values(tensor, of_f32, of_bf16)
}

/// Little-endian bytes; the loop is one copy where the machine is little-endian.
fn bytes_of<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    let mut all = vec![0; values.len() * N];
    for (of_value, value) in all.as_chunks_mut().0.iter_mut().zip(values) {
        *of_value = bytes(*value);
    }
    all
}

impl Record {
    /// Refuses states that are not finite numbers, and probabilities that are none: no draft learns from them. The
    /// record is as [`Record::on_host`] leaves it. It fails where there is such a value in it; `row` is named.
    pub(super) fn require_finite(&self, row: usize) -> Result<()> {
        if self.is_finite()? {
            return Ok(());
        }
        let problem = format!(
            "its states in row {row} are not finite numbers: capture with `precision=f32`, or check its weights"
        );
        Err(FeatureError::store("the target", problem))
    }

    /// Whether states are finite numbers, and probabilities are some. The record lies in main memory, and is of a type of
    /// a store. It fails where it is not.
    pub(super) fn is_finite(&self) -> Result<bool> {
        let kv = self.last_kv.iter().flat_map(|(keys, values)| [keys, values]);
        let mut finite = true;
        for tensor in kv.chain(&self.aux_hidden).chain(&self.final_hidden) {
            finite &= is_finite(tensor)?;
        }
        if let Some(entries) = &self.top_k {
            finite &= !entries.log_probs.iter().any(|log_prob| log_prob.is_nan());
        }
        Ok(finite)
    }

    /// The tensors as bytes of a record that is as [`Record::on_host`] leaves it; `layers` are tapped.
    fn raw(&self, batch: &Batch, dtype: StoreDtype, layers: usize) -> Result<Vec<Raw>> {
        let row = batch.row;
        let name = |name: &str| format!("{row}.{name}");
        let ids = |values: &[u32]| bytes_of(values, u32::to_le_bytes);
        let documents = batch.document_ids.chunk_by(|a, b| a == b);
        let lengths: Vec<u32> = documents.map(|run| run.len() as u32).collect();
        let mut all: Vec<Raw> = Vec::new();
        for (key, values) in [
            ("input_ids", &batch.ids),
            ("position_ids", &batch.position_ids),
            ("document_lengths", &lengths),
            ("teacher_rows", &self.teacher_tokens),
        ] {
            all.push((name(key), Dtype::U32, vec![values.len()], ids(values)));
        }
        let bits = batch.loss_mask.chunks(8).map(|eight| {
            let bits = eight.iter().enumerate();
            bits.fold(0_u8, |byte, (bit, learned)| byte | (u8::from(*learned) << bit))
        });
        let bits: Vec<u8> = bits.collect();
        all.push((name("loss_mask"), Dtype::U8, vec![bits.len()], bits));
        if let Some(aux) = self.aux_hidden.as_ref().filter(|_| dtype == StoreDtype::Int8) {
            let (tokens, width) = aux.dims2()?;
            let values: Vec<f32> = aux.flatten_all()?.to_vec1()?;
            let (codes, scales) = int8::quantise(&values, width / layers.max(1));
            let codes = bytes_of(&codes, i8::to_le_bytes);
            let shape = vec![tokens, scales.len() / tokens.max(1)];
            let scales = bytes_of(&scales, f32::to_le_bytes);
            all.push((name("aux_hidden_states"), Dtype::I8, vec![tokens, width], codes));
            all.push((name("aux_scales"), Dtype::F32, shape, scales));
        }
        let mut add = |key: &str, tensor: &Tensor| -> Result<()> {
            let (kind, bytes) = tensor_bytes(tensor)?;
            all.push((name(key), kind, tensor.dims().to_vec(), bytes));
            Ok(())
        };
        if let Some((keys, values)) = &self.last_kv {
            add("keys", keys)?;
            add("values", values)?;
        }
        if let Some(aux) = self.aux_hidden.as_ref().filter(|_| dtype != StoreDtype::Int8) {
            add("aux_hidden_states", aux)?;
        }
        if let Some(hidden) = &self.final_hidden {
            add("final_hidden", hidden)?;
        }
        if let Some(TopK { ids: top, log_probs }) = &self.top_k {
            let k = top.len() / self.teacher_tokens.len().max(1);
            let shape = vec![self.teacher_tokens.len(), k];
            all.push((name("topk_ids"), Dtype::U32, shape.clone(), ids(top)));
            let (kind, bytes) = match dtype {
                StoreDtype::F32 => (Dtype::F32, bytes_of(log_probs, f32::to_le_bytes)),
                StoreDtype::Bf16 | StoreDtype::Int8 => {
                    (Dtype::F16, bytes_of(log_probs, |v| f16::from_f32(v).to_le_bytes()))
                }
            };
            all.push((name("topk_log_probs"), kind, shape, bytes));
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_little_endian_in_order() {
        let values: Vec<f32> = (0..37).map(|i| (i as f32 - 9.5) * 1e3).collect();
        let plain: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(bytes_of(&values, f32::to_le_bytes), plain);
        assert_eq!(bytes_of(&[-1_i8, 127], i8::to_le_bytes), [255, 127]);
        assert!(bytes_of(&[], u32::to_le_bytes).is_empty());
    }
}
