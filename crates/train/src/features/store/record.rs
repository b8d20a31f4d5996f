//! One packed row in a shard: tensors under `ROW.name`.
//!
//! | name | shape | |
//! |---|---|---|
//! | `input_ids`, `position_ids` | `[T]` u32 | |
//! | `loss_mask` | `[⌈T/8⌉]` u8 | bit t of byte ⌊t/8⌋ is token t's, lowest first |
//! | `document_lengths` | `[documents]` u32 | |
//! | `keys`, `values` | `[T, K, D]` | last layer, keys before rotary embedding |
//! | `aux_hidden_states` | `[T, L·H]` | tapped layers side by side |
//! | `teacher_rows` | `[R]` u32 | tokens at which the teacher is kept |
//! | `final_hidden` | `[R, H]` | after the final norm |
//! | `topk_ids`, `topk_log_probs` | `[R, k]` u32, f16 (f32 in f32 stores) | in place of `final_hidden` |
//!
//! Nothing is padded.

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use longdraft_data::Batch;
use longdraft_kernels::top_k::{TopK, linear_top_k};
use longdraft_models::target::{Tap, Taps, Target};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use safetensors::tensor::{Dtype, TensorView};

use super::recipe::{Contents, StoreDtype, StoredTeacher};
use crate::error::Result;
use crate::features::sequence_of;

/// Keys (before rotary embedding) and values, `[T, K, D]` each.
pub(super) type UnrotatedKv = (Tensor, Tensor);

/// Features of one packed row.
#[derive(Debug, Clone)]
pub struct Record {
    pub(super) last_kv: Option<UnrotatedKv>,
    pub(super) aux_hidden: Option<Tensor>,
    pub(super) teacher_rows: Vec<u32>,
    pub(super) final_hidden: Option<Tensor>,
    pub(super) top_k: Option<TopK>,
}

/// A named tensor as bytes.
type Raw = (String, Dtype, Vec<usize>, Vec<u8>);

impl Record {
    /// Runs the target on a batch and keeps what `contents` name, the teacher at `teacher_rows`.
    ///
    /// # Errors
    /// - the target cannot run
    pub fn capture(
        target: &Target,
        batch: &Batch,
        contents: &Contents,
        teacher_rows: &[u32],
    ) -> Result<Self> {
        let hidden = |id: &usize| Tap::Hidden(longdraft_models::LayerId(*id));
        let mut taps: Vec<Tap> = contents.layers.iter().map(hidden).collect();
        if contents.last_kv {
            taps.push(Tap::LastKv);
        }
        let reads_teacher = contents.teacher != StoredTeacher::None && !teacher_rows.is_empty();
        if reads_teacher {
            taps.push(Tap::FinalHidden);
        }
        let features = target.forward(&sequence_of(batch), &Taps::of(&taps))?;
        let last_kv = if contents.last_kv {
            let values = features.last_kv()?.v.clone();
            Some((features.last_keys_unrotated()?.clone(), values))
        } else {
            None
        };
        let layers = contents.layers.iter();
        let layers: Vec<&Tensor> =
            layers.filter_map(|id| features.hidden.get(&longdraft_models::LayerId(*id))).collect();
        let aux_hidden = (!layers.is_empty()).then(|| Tensor::cat(&layers, 1)).transpose()?;
        let mut record = Self {
            last_kv,
            aux_hidden,
            teacher_rows: teacher_rows.to_vec(),
            final_hidden: None,
            top_k: None,
        };
        if reads_teacher {
            let hidden = features.final_hidden()?;
            let rows = Tensor::from_slice(teacher_rows, teacher_rows.len(), hidden.device())?;
            let hidden = hidden.index_select(&rows, 0)?;
            match contents.teacher {
                StoredTeacher::TopK(k) => {
                    let k = k.min(target.config().vocab_size);
                    record.top_k = Some(linear_top_k(&hidden, target.head(), k)?);
                }
                _ => record.final_hidden = Some(hidden),
            }
        }
        Ok(record)
    }

    /// The record's tensors as bytes.
    fn raw(&self, batch: &Batch, dtype: StoreDtype) -> Result<Vec<Raw>> {
        let row = batch.row;
        let name = |name: &str| format!("{row}.{name}");
        let ids = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let documents = batch.document_ids.chunk_by(|a, b| a == b);
        let lengths: Vec<u32> = documents.map(|run| run.len() as u32).collect();
        let mut all: Vec<Raw> = Vec::new();
        for (key, values) in [
            ("input_ids", &batch.ids),
            ("position_ids", &batch.position_ids),
            ("document_lengths", &lengths),
            ("teacher_rows", &self.teacher_rows),
        ] {
            all.push((name(key), Dtype::U32, vec![values.len()], ids(values)));
        }
        let bits = batch.loss_mask.chunks(8).map(|eight| {
            let bits = eight.iter().enumerate();
            bits.fold(0_u8, |byte, (bit, learned)| byte | (u8::from(*learned) << bit))
        });
        let bits: Vec<u8> = bits.collect();
        all.push((name("loss_mask"), Dtype::U8, vec![bits.len()], bits));
        let mut add = |key: &str, tensor: &Tensor| -> Result<()> {
            let (kind, bytes) = bytes_of(tensor, dtype)?;
            all.push((name(key), kind, tensor.dims().to_vec(), bytes));
            Ok(())
        };
        if let Some((keys, values)) = &self.last_kv {
            add("keys", keys)?;
            add("values", values)?;
        }
        if let Some(aux) = &self.aux_hidden {
            add("aux_hidden_states", aux)?;
        }
        if let Some(hidden) = &self.final_hidden {
            add("final_hidden", hidden)?;
        }
        if let Some(TopK { ids: top, log_probs }) = &self.top_k {
            let k = top.len() / self.teacher_rows.len().max(1);
            let shape = vec![self.teacher_rows.len(), k];
            all.push((name("topk_ids"), Dtype::U32, shape.clone(), ids(top)));
            let (kind, bytes) = match dtype {
                StoreDtype::F32 => {
                    (Dtype::F32, log_probs.iter().flat_map(|v| v.to_le_bytes()).collect())
                }
                StoreDtype::Bf16 => {
                    let halves = log_probs.iter().map(|v| f16::from_f32(*v));
                    (Dtype::F16, halves.flat_map(f16::to_le_bytes).collect())
                }
            };
            all.push((name("topk_log_probs"), kind, shape, bytes));
        }
        Ok(all)
    }

    /// Reads a row of a shard.
    ///
    /// # Errors
    /// - a tensor is missing or of another kind
    pub(super) fn read(
        source: &SafetensorsSource,
        row: usize,
        contents: &Contents,
    ) -> Result<Self> {
        let name = |name: &str| format!("{row}.{name}");
        let load = |key: &str| source.load(&name(key), DType::F32);
        let ids = |key: &str| -> Result<Vec<u32>> {
            Ok(source.load_integers(&name(key))?.iter().map(|id| *id as u32).collect())
        };
        let last_kv =
            contents.last_kv.then(|| Ok::<_, crate::TrainError>((load("keys")?, load("values")?)));
        let aux = (!contents.layers.is_empty()).then(|| load("aux_hidden_states"));
        let teacher_rows = ids("teacher_rows")?;
        let mut record = Self {
            last_kv: last_kv.transpose()?,
            aux_hidden: aux.transpose()?,
            teacher_rows,
            final_hidden: None,
            top_k: None,
        };
        if !record.teacher_rows.is_empty() {
            match contents.teacher {
                StoredTeacher::None => {}
                StoredTeacher::FinalHidden => record.final_hidden = Some(load("final_hidden")?),
                StoredTeacher::TopK(_) => {
                    let log_probs = load("topk_log_probs")?.flatten_all()?.to_vec1()?;
                    record.top_k = Some(TopK { ids: ids("topk_ids")?, log_probs });
                }
            }
        }
        Ok(record)
    }
}

/// Bytes of a shard of these rows.
///
/// # Errors
/// - a tensor cannot be read
pub(super) fn encode(rows: &[(Batch, Record)], dtype: StoreDtype) -> Result<Vec<u8>> {
    let mut all: Vec<Raw> = Vec::new();
    for (batch, record) in rows {
        all.extend(record.raw(batch, dtype)?);
    }
    let fail = |error: safetensors::SafeTensorError| candle_core::Error::Msg(error.to_string());
    let mut views = Vec::with_capacity(all.len());
    for (name, kind, shape, bytes) in &all {
        views.push((name, TensorView::new(*kind, shape.clone(), bytes).map_err(fail)?));
    }
    Ok(safetensors::serialize(views, None).map_err(fail)?)
}

fn bytes_of(tensor: &Tensor, dtype: StoreDtype) -> Result<(Dtype, Vec<u8>)> {
    let flat = tensor.to_device(&candle_core::Device::Cpu)?.flatten_all()?;
    Ok(match dtype {
        StoreDtype::F32 => {
            let values: Vec<f32> = flat.to_dtype(DType::F32)?.to_vec1()?;
            (Dtype::F32, values.iter().flat_map(|v| v.to_le_bytes()).collect())
        }
        StoreDtype::Bf16 => {
            let values: Vec<bf16> = flat.to_dtype(DType::BF16)?.to_vec1()?;
            (Dtype::BF16, values.iter().flat_map(|v| v.to_le_bytes()).collect())
        }
    })
}
