//! One packed row in a shard: tensors under `ROW.name`.
//!
//! | name | shape | |
//! |---|---|---|
//! | `input_ids`, `position_ids` | `[T]` u32 | |
//! | `loss_mask` | `[⌈T/8⌉]` u8 | bit t of byte ⌊t/8⌋ is token t's, lowest first |
//! | `document_lengths` | `[documents]` u32 | |
//! | `keys`, `values` | `[T, K, D]` | last layer, keys before rotary embedding |
//! | `aux_hidden_states` | `[T, L·H]` | tapped layers side by side; i8 in int8 stores |
//! | `aux_scales` | `[T, L]` f32 | in int8 stores: value = code · scale of its token and layer |
//! | `teacher_rows` | `[R]` u32 | tokens at which the teacher is kept |
//! | `final_hidden` | `[R, H]` | after the final norm |
//! | `topk_ids`, `topk_log_probs` | `[R, k]` u32, f16 (f32 in f32 stores) | in place of `final_hidden`, or beside it |
//!
//! Nothing is padded. What int8 stores do not hold in 8 bits they hold as bf16 ones do.

use candle_core::{DType, Device, Tensor};
use longdraft_data::Batch;
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::top_k::TopK;
use longdraft_kernels::transfer::{download, upload_ahead};
use longdraft_models::config::LayerHeads;
use longdraft_models::target_model::Target;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_models::{LayerId, ModelError, TargetConfig};

use super::int8;
use super::recipe::{Contents, StoreDtype, StoredTeacher};
use crate::error::FeatureError;
use crate::{sequence_of, untapped};

/// As everywhere in this crate, but for the check of shapes.
type Result<T, E = FeatureError> = std::result::Result<T, E>;

/// Keys (before rotary embedding) and values, `[T, K, D]` each.
pub(super) type UnrotatedKv = (Tensor, Tensor);

/// How wide a target's features are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    hidden: usize,
    /// Of the last layer that attends.
    heads: LayerHeads,
}

impl Widths {
    pub(super) fn of(target: &TargetConfig) -> Self {
        Self { hidden: target.hidden_size, heads: target.last_heads() }
    }
}

/// Features of one packed row.
#[derive(Debug, Clone, Default)]
pub struct Record {
    pub(super) last_kv: Option<UnrotatedKv>,
    pub(super) aux_hidden: Option<Tensor>,
    pub(super) teacher_tokens: Vec<u32>,
    pub(super) final_hidden: Option<Tensor>,
    pub(super) top_k: Option<TopK>,
}

impl Record {
    /// The same on a device, beside what that computes. It fails where the device has no memory for it.
    pub(super) fn upload_ahead(self, device: &Device) -> Result<Self> {
        let upload = |tensor: Tensor| upload_ahead(&tensor, device);
        let last_kv = self.last_kv.map(|(k, v)| candle_core::Result::Ok((upload(k)?, upload(v)?)));
        Ok(Self {
            last_kv: last_kv.transpose()?,
            aux_hidden: self.aux_hidden.map(upload).transpose()?,
            final_hidden: self.final_hidden.map(upload).transpose()?,
            ..self
        })
    }

    /// The same in main memory, as a store of `dtype` holds it: cast where it was computed, and brought over
    /// tensor by tensor. Layers that become 8 bits stay in f32.
    /// It fails where there is no memory for it, or the transfer fails.
    pub(super) fn on_host(self, dtype: StoreDtype) -> Result<Self> {
        let of_states = dtype.of_states();
        let of_aux = if dtype == StoreDtype::Int8 { DType::F32 } else { of_states };
        let fetch = |tensor: Tensor, dtype| download(&tensor.to_dtype(dtype)?);
        let last_kv = self.last_kv.map(|(k, v)| {
            let of = |tensor| fetch(tensor, of_states);
            candle_core::Result::Ok((of(k)?, of(v)?))
        });
        Ok(Self {
            last_kv: last_kv.transpose()?,
            aux_hidden: self.aux_hidden.map(|aux| fetch(aux, of_aux)).transpose()?,
            final_hidden: self.final_hidden.map(|t| fetch(t, of_states)).transpose()?,
            ..self
        })
    }

    /// Runs the target on a batch and keeps what `contents` name, the teacher at `teacher_tokens`.
    ///
    /// # Errors
    /// - the target cannot run
    pub fn capture(
        target: &Target,
        batch: &Batch,
        contents: &Contents,
        teacher_tokens: &[u32],
    ) -> Result<Self> {
        let features = target.forward(&sequence_of(batch), &contents.taps())?;
        let last_kv = if contents.last_kv {
            let values = features.last_kv()?.v.clone();
            Some((features.last_keys_unrotated()?.clone(), values))
        } else {
            None
        };
        let layers: Vec<LayerId> = contents.layers.iter().map(|id| LayerId(*id)).collect();
        let aux_hidden = (!layers.is_empty()).then(|| features.hidden_of(&layers)).transpose()?;
        let last = features.final_hidden().ok();
        let record = Self::of_states(target, aux_hidden, last, contents, teacher_tokens)?;
        Ok(Self { last_kv, ..record })
    }

    /// The same from states that the target computed elsewhere.
    ///
    /// # Shapes
    /// - `aux_hidden`: `[T, L·H]`, `final_hidden`: `[T, H]`, after the final norm
    ///
    /// # Errors
    /// - shapes do not fit, or final states are missing that `contents` name
    pub fn of_states(
        target: &Target,
        aux_hidden: Option<Tensor>,
        final_hidden: Option<&Tensor>,
        contents: &Contents,
        teacher_tokens: &[u32],
    ) -> Result<Self> {
        let teacher = teacher_tokens.to_vec();
        let mut record = Self { aux_hidden, teacher_tokens: teacher, ..Self::default() };
        if contents.teacher != StoredTeacher::None && !teacher_tokens.is_empty() {
            let all = final_hidden.ok_or_else(|| untapped("the teacher's final states"))?;
            let hidden = select_rows(all, teacher_tokens)?;
            if let Some(k) = contents.teacher.top_k() {
                let k = k.min(target.config().vocab_size);
                record.top_k = Some(target.hold_ends()?.top_k(&hidden, k)?);
            }
            record.final_hidden = contents.teacher.final_hidden().then_some(hidden);
        }
        Ok(record)
    }

    /// Reads what `contents` name of a row of a shard; if they name a layer, all layers of the row. States, keys and values
    /// come in a type, but for what becomes f32 of 8 bits. It fails where a tensor is missing or of another kind.
    pub(super) fn read(
        source: &SafetensorsSource,
        row: usize,
        contents: &Contents,
        dtype: DType,
    ) -> Result<Self> {
        let name = |name: &str| format!("{row}.{name}");
        let load = |key: &str| source.load(&name(key), dtype);
        let ids = |key: &str| -> Result<Vec<u32>> {
            Ok(source.load_integers(&name(key))?.iter().map(|id| *id as u32).collect())
        };
        let last_kv =
            contents.last_kv.then(|| Ok::<_, FeatureError>((load("keys")?, load("values")?)));
        let aux = (!contents.layers.is_empty()).then(|| aux_hidden(source, row, dtype));
        let teacher_tokens = ids("teacher_rows")?;
        let mut record = Self {
            last_kv: last_kv.transpose()?,
            aux_hidden: aux.transpose()?,
            teacher_tokens,
            final_hidden: None,
            top_k: None,
        };
        if !record.teacher_tokens.is_empty() {
            if contents.teacher.final_hidden() {
                record.final_hidden = Some(load("final_hidden")?);
            }
            if contents.teacher.top_k().is_some() {
                let log_probs = source.load(&name("topk_log_probs"), DType::F32)?;
                let log_probs = log_probs.flatten_all()?.to_vec1()?;
                record.top_k = Some(TopK { ids: ids("topk_ids")?, log_probs });
            }
        }
        Ok(record)
    }
}

impl Record {
    /// What of the shapes does not belong to a row of `tokens` tokens, of which a store holds some contents and others
    /// were read. Files may come from anywhere.
    pub(super) fn check(
        &self,
        tokens: usize,
        (held, read): (&Contents, &Contents),
        widths: Widths,
    ) -> Result<(), String> {
        let (kept, Widths { hidden, heads }) = (&self.teacher_tokens, widths);
        let of_heads = vec![tokens, heads.kv_heads, heads.head_dim];
        let of_layers = vec![tokens, held.layers.len() * hidden];
        let [keys, values] =
            [self.last_kv.as_ref().map(|kv| &kv.0), self.last_kv.as_ref().map(|kv| &kv.1)];
        for (name, tensor, shape) in [
            ("keys", keys, of_heads.clone()),
            ("values", values, of_heads),
            ("aux_hidden_states", self.aux_hidden.as_ref(), of_layers),
            ("final_hidden", self.final_hidden.as_ref(), vec![kept.len(), hidden]),
        ] {
            if let Some(tensor) = tensor.filter(|tensor| tensor.dims() != shape) {
                return Err(format!("`{name}` is {:?}, not {shape:?}", tensor.dims()));
            }
        }
        let ascending = kept.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || kept.last().is_some_and(|last| *last as usize >= tokens) {
            return Err(format!("`teacher_rows` are not ascending places of {tokens} tokens"));
        }
        if let (Some(entries), Some(k)) = (&self.top_k, read.teacher.top_k()) {
            let [ids, log_probs] = [entries.ids.len(), entries.log_probs.len()];
            let most = kept.len().saturating_mul(k);
            let fits = ids == log_probs && ids.is_multiple_of(kept.len()) && ids <= most;
            if !fits {
                return Err(format!("{ids} ids and {log_probs} log-probabilities, {k} a token"));
            }
        }
        Ok(())
    }

    /// The same with some of its layers, in another order. `held` are those that it has.
    /// It fails where the states are not as wide as so many layers.
    pub(super) fn with_layers(self, held: &[usize], wanted: &[usize]) -> Result<Self> {
        let Some(all) = self.aux_hidden.as_ref().filter(|_| held != wanted) else {
            return Ok(self);
        };
        let (tokens, width) = all.dims2()?;
        let all = all.reshape((tokens, held.len(), width / held.len()))?;
        let places = wanted.iter().filter_map(|id| held.iter().position(|own| own == id));
        let layers = places.map(|at| all.narrow(1, at, 1)?.squeeze(1));
        let layers = layers.collect::<candle_core::Result<Vec<_>>>()?;
        // One layer alone would be a view of all.
        let aux_hidden = Tensor::cat(&layers, 1)?.contiguous()?;
        Ok(Self { aux_hidden: Some(aux_hidden), ..self })
    }
}

/// The tapped layers of a row, `[T, L·H]`: f32 of 8 bits, else in a type.
fn aux_hidden(source: &SafetensorsSource, row: usize, dtype: DType) -> Result<Tensor> {
    let (name, scales) = (format!("{row}.aux_hidden_states"), format!("{row}.aux_scales"));
    let Some(shape) = source.shape(&name).filter(|_| source.shape(&scales).is_some()) else {
        return Ok(source.load(&name, dtype)?);
    };
    let codes = source.load_i8(&name)?;
    let scales: Vec<f32> = source.load(&scales, DType::F32)?.flatten_all()?.to_vec1()?;
    let values = int8::widen(&codes, &scales).ok_or_else(|| {
        let problem = format!("`{name}`: {} codes and {} scales", codes.len(), scales.len());
        ModelError::invalid(source.path(), problem)
    })?;
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use longdraft_kernels::random::CounterRng;

    use super::super::encode::encode;
    use super::*;

    /// Of a target of the record below.
    const WIDTHS: Widths = Widths { hidden: 8, heads: LayerHeads { kv_heads: 2, head_dim: 4 } };

    fn contents(teacher: StoredTeacher) -> Contents {
        Contents { last_kv: true, layers: vec![0], teacher }
    }

    /// A row of 9 tokens, the teacher at 3 of them.
    fn record() -> (Batch, Record) {
        let mut noise = CounterRng::new(7, "record", &[]);
        let mut random = |shape: &[usize]| {
            let values: Vec<f32> =
                (0..shape.iter().product()).map(|_| noise.normal() as f32).collect();
            Tensor::from_vec(values, shape, &Device::Cpu).expect("random")
        };
        let batch = Batch {
            ids: (0..9).collect(),
            position_ids: (5..14).collect(),
            document_ids: vec![0, 0, 0, 0, 1, 1, 1, 1, 1],
            loss_mask: (0..9).map(|t| t % 3 == 0).collect(),
            row: 4,
            ..Batch::default()
        };
        let record = Record {
            last_kv: Some((random(&[9, 2, 4]), random(&[9, 2, 4]))),
            aux_hidden: Some(random(&[9, 8])),
            teacher_tokens: vec![1, 4, 8],
            final_hidden: Some(random(&[3, 8])),
            top_k: None,
        };
        (batch, record)
    }

    fn written(rows: &[(Batch, Record)], dtype: StoreDtype, contents: &Contents) -> Record {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("shard.safetensors");
        let on_host = |(batch, record): &(Batch, Record)| {
            (batch.clone(), record.clone().on_host(dtype).expect("on the host"))
        };
        let rows: Vec<_> = rows.iter().map(on_host).collect();
        std::fs::write(&path, encode(&rows, dtype, 2).expect("bytes")).expect("write");
        let source = SafetensorsSource::open_file(&path).expect("open");
        assert_read_alike(&source, dtype, contents);
        assert_eq!(source.load_integers("4.loss_mask").expect("mask"), [0b0100_1001, 0]);
        assert_eq!(source.load_integers("4.document_lengths").expect("lengths"), [4, 5]);
        Record::read(&source, 4, contents, DType::F32).expect("read")
    }

    /// What is read as the store holds it and widened on a device is what is read in f32.
    fn assert_read_alike(source: &SafetensorsSource, dtype: StoreDtype, contents: &Contents) {
        let as_held = Record::read(source, 4, contents, dtype.of_states()).expect("read");
        let as_held = as_held.upload_ahead(&Device::Cpu).expect("uploaded");
        let wide = Record::read(source, 4, contents, DType::F32).expect("read");
        let all = |record: &Record| -> Vec<Tensor> {
            let kv = record.last_kv.iter().flat_map(|(k, v)| [k, v]);
            kv.chain(&record.aux_hidden).chain(&record.final_hidden).cloned().collect()
        };
        for (own, wide) in all(&as_held).iter().zip(&all(&wide)) {
            let is_8_bits = dtype == StoreDtype::Int8 && wide.dims() == [9, 8];
            let held = if is_8_bits { DType::F32 } else { dtype.of_states() };
            assert_eq!(own.dtype(), held);
            let own = own.to_dtype(DType::F32).expect("widened");
            assert_eq!(values(&own), values(wide));
        }
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().and_then(|flat| flat.to_vec1()).expect("values")
    }

    #[test]
    fn what_is_written_is_read_back_exactly_or_rounded() {
        let contents = contents(StoredTeacher::FinalHidden);
        let (batch, record) = record();
        let rows = [(batch, record.clone())];
        for (dtype, tolerance) in [
            (StoreDtype::F32, 0.0),
            (StoreDtype::Bf16, 1.0 / 256.0),
            (StoreDtype::Int8, 1.0 / 256.0),
        ] {
            let read = written(&rows, dtype, &contents);
            assert_eq!(read.check(9, (&contents, &contents), WIDTHS), Ok(()));
            assert_eq!(read.teacher_tokens, record.teacher_tokens);
            let kv = |record: &Record| record.last_kv.clone().expect("kv");
            for (a, b) in [
                (&kv(&record).0, &kv(&read).0),
                (&kv(&record).1, &kv(&read).1),
                (record.aux_hidden.as_ref().expect("aux"), read.aux_hidden.as_ref().expect("aux")),
                (
                    record.final_hidden.as_ref().expect("final"),
                    read.final_hidden.as_ref().expect("final"),
                ),
            ] {
                assert_eq!(a.dims(), b.dims());
                // Codes of the layers are relative to the largest value of a token, here of 4.
                let coarse = dtype == StoreDtype::Int8 && a.dims() == [9, 8];
                for (row, b) in values(a).chunks(4).zip(values(b).chunks(4)) {
                    let largest = row.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
                    for (a, b) in row.iter().zip(b) {
                        // Half a step of 127, and rounding of its own.
                        let most =
                            if coarse { 0.501 / 127.0 * largest } else { tolerance * a.abs() };
                        assert!((a - b).abs() <= most, "{a} and {b}");
                    }
                }
            }
        }
    }

    /// What waits for its shard takes no more room than in the store.
    #[test]
    fn records_wait_in_the_types_of_the_store() {
        let (_, record) = record();
        let types = |dtype| {
            let record = record.clone().on_host(dtype).expect("on the host");
            let (keys, values) = record.last_kv.expect("kv");
            let (aux, last) =
                (record.aux_hidden.expect("aux"), record.final_hidden.expect("final"));
            [keys, values, last, aux].map(|tensor| tensor.dtype())
        };
        assert_eq!(types(StoreDtype::F32), [DType::F32; 4]);
        assert_eq!(types(StoreDtype::Bf16), [DType::BF16; 4]);
        let but_layers = [DType::BF16, DType::BF16, DType::BF16, DType::F32];
        assert_eq!(types(StoreDtype::Int8), but_layers);
    }

    #[test]
    fn values_that_are_not_finite_are_refused_in_any_type() {
        let (_, whole) = record();
        let dtypes = [StoreDtype::F32, StoreDtype::Bf16, StoreDtype::Int8];
        let told = |record: &Record, dtype| {
            let record = record.clone().on_host(dtype).expect("on the host");
            record.require_finite(4).err().map(|error| error.to_string())
        };
        for dtype in dtypes {
            assert_eq!(told(&whole, dtype), None);
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut states = vec![-1.5; 72];
                states[70] = value;
                let states = Tensor::from_vec(states, (9, 8), &Device::Cpu).expect("states");
                let kv = Some((states.clone(), states.clone()));
                let entries = TopK { ids: vec![0; 3], log_probs: vec![-0.5, f32::NAN, -0.5] };
                for record in [
                    Record { aux_hidden: Some(states.clone()), ..whole.clone() },
                    Record { final_hidden: Some(states), ..whole.clone() },
                    Record { last_kv: kv, ..whole.clone() },
                    Record { top_k: Some(entries), ..whole.clone() },
                ] {
                    let told = told(&record, dtype).expect("refused");
                    assert!(told.contains("row 4 are not finite numbers"), "{told}");
                }
            }
        }
    }

    #[test]
    fn shapes_of_another_row_are_named() {
        let (_, record) = record();
        let told = |record: &Record, tokens, teacher| {
            let contents = contents(teacher);
            record.check(tokens, (&contents, &contents), WIDTHS).expect_err("refused")
        };
        let full = StoredTeacher::FinalHidden;
        assert!(told(&record, 8, full).contains("`keys` is [9, 2, 4], not [8, 2, 4]"));
        let kv = record.last_kv.clone().map(|(keys, values)| {
            (keys, values.transpose(1, 2).expect("two heads of four become four of two"))
        });
        let turned = Record { last_kv: kv, ..record.clone() };
        assert!(told(&turned, 9, full).contains("`values` is [9, 4, 2], not [9, 2, 4]"));
        let narrow =
            |all: Option<&Tensor>| all.map(|all| all.narrow(1, 0, 6).expect("six of eight"));
        let aux_hidden = narrow(record.aux_hidden.as_ref());
        let states = Record { aux_hidden, ..record.clone() };
        assert!(told(&states, 9, full).contains("`aux_hidden_states` is [9, 6], not [9, 8]"));
        let final_hidden = narrow(record.final_hidden.as_ref());
        let last = Record { final_hidden, ..record.clone() };
        assert!(told(&last, 9, full).contains("`final_hidden` is [3, 6], not [3, 8]"));
        let late = Record { teacher_tokens: vec![1, 4, 9], ..record.clone() };
        assert!(told(&late, 9, full).contains("teacher_rows"));
        let twice = Record { teacher_tokens: vec![1, 1, 4], ..record.clone() };
        assert!(told(&twice, 9, full).contains("teacher_rows"));
        let fewer = Record { teacher_tokens: vec![1], ..record.clone() };
        assert!(told(&fewer, 9, full).contains("final_hidden"));
        let entries = TopK { ids: vec![0; 6], log_probs: vec![0.0; 5] };
        let top_k = Record { final_hidden: None, top_k: Some(entries), ..record };
        for k in [2, usize::MAX] {
            assert!(told(&top_k, 9, StoredTeacher::TopK(k)).contains("6 ids and 5"));
        }
    }

    #[test]
    fn layers_are_picked_in_the_order_of_who_reads_them() {
        let (_, record) = record();
        let aux = |record: &Record| values(record.aux_hidden.as_ref().expect("layers"));
        let all = aux(&record);
        // Four layers of width 2.
        let picked = record.clone().with_layers(&[7, 3, 5, 1], &[1, 3]).expect("picked");
        let wanted = all.chunks(8).flat_map(|token| [token[6], token[7], token[2], token[3]]);
        assert_eq!(aux(&picked), wanted.collect::<Vec<_>>());
        let one = record.clone().with_layers(&[7, 3, 5, 1], &[3]).expect("picked");
        assert_eq!(one.aux_hidden.expect("layers").dims(), [9, 2]);
        assert!(record.with_layers(&[7, 3, 5], &[3]).is_err());
    }
}
