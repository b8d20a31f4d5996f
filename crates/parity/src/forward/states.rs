//! States of recurrent layers: after a prompt, and after tokens of it were taken back.

use candle_core::{DType, Device, Tensor};
use longdraft_models::target_model::{KvCache, PackedSequence, Tap, Taps};
use longdraft_models::weights::safetensors::SafetensorsSource;

use super::{ForwardCase, Part};
use crate::error::Result;
use crate::{absolute_error, stored};

/// Allowed error of a state, absolute and in parts of its largest value.
const TOLERANCE: (f64, f64) = (2e-4, 2e-4);

impl ForwardCase<'_> {
    /// Steps through a prompt in one pass, then takes back all tokens from the case's cut on.
    pub(super) fn check_states(
        &self,
        sequence: &PackedSequence,
        part: &mut Part<'_>,
    ) -> Result<()> {
        let path = self.folder.join("tensors.safetensors");
        if !self.target.config().is_recurrent() || !path.is_file() {
            return Ok(());
        }
        let file = SafetensorsSource::open_file(&path)?;
        let mut cache = self.target.new_cache()?;
        let taps = Taps::of(&[Tap::FinalHidden]);
        self.target.extend(&sequence.ids, &sequence.position_ids, &mut cache, &taps)?;
        self.compare_states(&file, "", &cache, part)?;
        let cut = self.state_cut.filter(|cut| *cut < sequence.ids.len());
        let Some(cut) = cut else { return Ok(()) };
        cache.compact(0, &(0..cut).collect::<Vec<_>>())?;
        self.compare_states(&file, &format!("_at_{cut}"), &cache, part)
    }

    fn compare_states(
        &self,
        file: &SafetensorsSource,
        suffix: &str,
        cache: &KvCache,
        part: &mut Part<'_>,
    ) -> Result<()> {
        for layer in 0..self.target.config().num_hidden_layers {
            let Some((window, matrix)) = cache.state(layer) else { continue };
            for (what, values) in [("conv", window), ("recurrent", matrix.as_slice())] {
                let what = format!("{what}_state_layer_{layer}{suffix}");
                let Some(want) = stored(file, &format!("{}.{what}", part.name))? else { continue };
                let got = self.as_published(values, want.dims())?;
                let (error, largest) = absolute_error(&got, &want)?;
                let (absolute, relative) = TOLERANCE;
                let single = absolute.max(relative * largest);
                part.check(&what, error, self.place.allowed(single, 0.25 * largest));
            }
        }
        Ok(())
    }

    /// A state in the order of the published class: a convolution's by channel, value heads by key head.
    fn as_published(&self, values: &[f32], dims: &[usize]) -> Result<Tensor> {
        let net = self.target.config().parts.delta_net;
        let tiled = net.map(|net| net.sizes).filter(|sizes| sizes.tiled);
        let place = |head: usize, sizes: longdraft_kernels::recurrence::DeltaSizes| {
            let each = sizes.value_heads / sizes.key_heads;
            head % each * sizes.key_heads + head / each
        };
        let tensor = match dims {
            &[channels, reach] => {
                Tensor::from_slice(values, (reach, channels), &Device::Cpu)?.t()?.contiguous()?
            }
            dims => Tensor::from_slice(values, dims, &Device::Cpu)?,
        };
        let Some(sizes) = tiled else { return Ok(tensor.to_dtype(DType::F32)?) };
        let (first, width) =
            if dims.len() == 2 { (2 * sizes.keys(), sizes.value_dim) } else { (0, 1) };
        let heads = (0..sizes.value_heads).map(|head| place(head, sizes));
        let of_heads = heads.flat_map(|head| first + head * width..first + (head + 1) * width);
        let order: Vec<u32> = (0..first).chain(of_heads).map(|row| row as u32).collect();
        Ok(tensor.index_select(&Tensor::new(order, &Device::Cpu)?, 0)?)
    }
}
