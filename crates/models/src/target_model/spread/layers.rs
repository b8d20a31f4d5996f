//! Layers that are put together from the ranks' slices right before their use.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::collectives::{DeviceRanks, Gathering};
use longdraft_kernels::matrix::Matrix;

use super::Ranks;
use super::slice::Slice;
use crate::config::TargetConfig;
use crate::error::{ModelError, Result, refused};
use crate::target_model::build::{self, Weights};
use crate::target_model::layer::DecoderLayer;
use crate::target_model::layers::{LayerSource, Visit};
use crate::target_model::tensor_parallel::LayerShare;

/// A layer's slices and vectors, by published name.
struct SpreadLayer {
    index: usize,
    slices: Vec<(String, Slice)>,
    vectors: BTreeMap<String, Tensor>,
}

/// `1/N` of every layer.
pub(in crate::target_model) struct SpreadLayers {
    config: TargetConfig,
    ranks: Arc<dyn Ranks>,
    layers: Vec<SpreadLayer>,
    /// Whether the next layer is gathered while one computes.
    gathers_ahead: bool,
}

impl SpreadLayers {
    /// Reads layer by layer and keeps this rank's slices: one whole layer is in memory at a time.
    pub(in crate::target_model) fn read(
        config: &TargetConfig,
        weights: &dyn Weights,
        layers: Range<usize>,
        (ranks, gathers_ahead): (&Arc<dyn Ranks>, bool),
    ) -> Result<Self> {
        let layers = layers.map(|index| {
            let slicer = Slicer {
                weights,
                ranks: ranks.as_ref(),
                slices: RefCell::default(),
                vectors: RefCell::default(),
            };
            build::layer(config, &slicer, index, &LayerShare::default())?;
            let Slicer { slices, vectors, .. } = slicer;
            Ok(SpreadLayer { index, slices: slices.into_inner(), vectors: vectors.into_inner() })
        });
        let layers = layers.collect::<Result<_>>()?;
        let (config, ranks) = (config.clone(), Arc::clone(ranks));
        Ok(Self { config, ranks, layers, gathers_ahead })
    }

    /// The whole layer at a place; all ranks call it.
    fn gather(&self, place: usize) -> Result<DecoderLayer> {
        let mut matrices = BTreeMap::new();
        for (name, slice) in &self.layers[place].slices {
            matrices.insert(name.as_str(), slice.gather(self.ranks.as_ref())?);
        }
        self.layer(place, matrices)
    }

    fn layer(&self, place: usize, matrices: BTreeMap<&str, Matrix>) -> Result<DecoderLayer> {
        let SpreadLayer { index, vectors, .. } = &self.layers[place];
        let weights = Gathered { matrices, vectors };
        build::layer(&self.config, &weights, *index, &LayerShare::default())
    }

    /// The ranks' devices, if all slices of these layers lie there.
    fn devices(&self, layers: Range<usize>) -> Option<&dyn DeviceRanks> {
        let mut slices = self.layers[layers].iter().flat_map(|layer| &layer.slices);
        let devices = self.ranks.devices()?;
        slices.all(|(_, slice)| slice.values().is_some()).then_some(devices)
    }

    /// Starts to gather the layer at a place.
    fn start(&self, devices: &dyn DeviceRanks, place: usize) -> Result<Box<dyn Gathering>> {
        let slices = self.layers[place].slices.iter();
        let own: Vec<Tensor> = slices.filter_map(|(_, slice)| slice.values().cloned()).collect();
        Ok(devices.start_all_gather(&own)?)
    }

    /// The layer of which all values have come.
    fn finish(&self, place: usize, gathering: Box<dyn Gathering>) -> Result<DecoderLayer> {
        let slices = self.layers[place].slices.iter().zip(gathering.finish()?);
        let matrices =
            slices.map(|((name, slice), all)| Ok((name.as_str(), slice.whole_of(&all)?)));
        self.layer(place, matrices.collect::<Result<_>>()?)
    }

    /// The devices gather the next layer while they compute one. What a visit asks of them begins once it is asked
    /// for, so the gathering is asked for before.
    fn visit_on_devices(
        &self,
        devices: &dyn DeviceRanks,
        layers: Range<usize>,
        visit: Visit<'_>,
    ) -> Result<()> {
        let mut next: Option<Box<dyn Gathering>> = None;
        for place in layers.clone() {
            let gathering = match next.take() {
                Some(gathering) => gathering,
                None => self.start(devices, place)?,
            };
            let layer = self.finish(place, gathering)?;
            if self.gathers_ahead && layers.contains(&(place + 1)) {
                next = Some(self.start(devices, place + 1)?);
            }
            visit(place, &layer)?;
        }
        Ok(())
    }
}

impl LayerSource for SpreadLayers {
    fn len(&self) -> usize {
        self.layers.len()
    }

    /// A thread gathers the next layer while one is visited, or the devices do. Both are joined before anything
    /// else happens, so that the ranks are called from one thread at a time.
    fn visit(&self, layers: Range<usize>, visit: Visit<'_>) -> Result<()> {
        if let Some(devices) = self.devices(layers.clone()) {
            return self.visit_on_devices(devices, layers, visit);
        }
        let mut next: Option<DecoderLayer> = None;
        for place in layers.clone() {
            let layer = match next.take() {
                Some(layer) => layer,
                None => self.gather(place)?,
            };
            next = std::thread::scope(|scope| -> Result<Option<DecoderLayer>> {
                let ahead = self.gathers_ahead && layers.contains(&(place + 1));
                let ahead = ahead.then(|| scope.spawn(move || self.gather(place + 1)));
                let visited = visit(place, &layer);
                let ahead = ahead.map(|thread| thread.join().unwrap_or_else(|e| resume_unwind(e)));
                visited?;
                ahead.transpose()
            })?;
        }
        Ok(())
    }
}

/// Weights that a layer is built of for its slices alone.
struct Slicer<'a> {
    weights: &'a dyn Weights,
    ranks: &'a dyn Ranks,
    slices: RefCell<Vec<(String, Slice)>>,
    vectors: RefCell<BTreeMap<String, Tensor>>,
}

impl Weights for Slicer<'_> {
    fn matrix(&self, name: &str) -> Result<Matrix> {
        let matrix = self.weights.matrix(name)?;
        let slice = Slice::of(&matrix, self.ranks)?;
        self.slices.borrow_mut().push((name.to_owned(), slice));
        Ok(matrix)
    }

    fn vector(&self, name: &str) -> Result<Tensor> {
        let vector = self.weights.vector(name)?;
        self.vectors.borrow_mut().insert(name.to_owned(), vector.clone());
        Ok(vector)
    }
}

/// What the ranks' slices came to.
struct Gathered<'a> {
    matrices: BTreeMap<&'a str, Matrix>,
    vectors: &'a BTreeMap<String, Tensor>,
}

impl Weights for Gathered<'_> {
    fn matrix(&self, name: &str) -> Result<Matrix> {
        self.matrices.get(name).cloned().ok_or_else(|| missing(name))
    }

    fn vector(&self, name: &str) -> Result<Tensor> {
        self.vectors.get(name).cloned().ok_or_else(|| missing(name))
    }
}

fn missing(name: &str) -> ModelError {
    refused(format!("`{name}` was not spread"))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use candle_core::Device;
    use serde_json::json;

    use super::*;
    use crate::target_model::{Target, TargetOptions};

    /// A rank alone whose device tells what it is asked for, and fails if it is to.
    #[derive(Debug, Clone, Default)]
    struct Telling {
        told: Arc<Mutex<Vec<&'static str>>>,
        fails: bool,
    }

    impl Telling {
        fn tell(&self, what: &'static str) {
            self.told.lock().expect("told").push(what);
        }
    }

    impl Ranks for Telling {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            1
        }

        fn all_gather(&self, _: &[u8], _: &mut [u8]) {
            self.tell("main memory");
        }

        fn sum_parts(&self, values: &[f32], _: &[usize]) -> Vec<f32> {
            values.to_vec()
        }

        fn devices(&self) -> Option<&dyn DeviceRanks> {
            Some(self)
        }
    }

    impl DeviceRanks for Telling {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            1
        }

        fn device(&self) -> Device {
            Device::Cpu
        }

        fn all_reduce(&self, tensors: &[Tensor]) -> candle_core::Result<Vec<Tensor>> {
            Ok(tensors.to_vec())
        }

        fn reduce_scatter(&self, blocks: &Tensor) -> candle_core::Result<Tensor> {
            blocks.get(0)
        }

        fn start_all_gather(&self, own: &[Tensor]) -> candle_core::Result<Box<dyn Gathering>> {
            self.tell("start");
            let all = own.iter().map(|own| own.unsqueeze(0)).collect::<candle_core::Result<_>>()?;
            Ok(Box::new(UnderWay { telling: self.clone(), all }))
        }
    }

    struct UnderWay {
        telling: Telling,
        all: Vec<Tensor>,
    }

    impl Gathering for UnderWay {
        fn finish(self: Box<Self>) -> candle_core::Result<Vec<Tensor>> {
            self.telling.tell("finish");
            if self.telling.fails {
                candle_core::bail!("rank 1 on node7 is gone");
            }
            Ok(self.all)
        }
    }

    fn target(telling: &Telling, gather_ahead: bool) -> Target {
        let config = json!({
            "model_type": "llama", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        });
        let config = TargetConfig::from_json(&config).expect("configuration");
        let spread = Some(Arc::new(telling.clone()) as Arc<dyn Ranks>);
        let options = TargetOptions { spread, gather_ahead, ..TargetOptions::default() };
        Target::random(config, 5, &options).expect("target")
    }

    /// What happens in a pass over all layers, in order.
    fn pass(telling: &Telling, gather_ahead: bool, fails_at: usize) -> (Vec<&'static str>, bool) {
        let target = target(telling, gather_ahead);
        let visited = target.layers.visit(0..3, &mut |place, _| {
            telling.tell("visit");
            if place == fails_at { Err(missing("a layer")) } else { Ok(()) }
        });
        (std::mem::take(&mut *telling.told.lock().expect("told")), visited.is_ok())
    }

    #[test]
    fn devices_gather_a_layer_before_the_one_in_front_of_it_is_visited() {
        let telling = Telling::default();
        let [start, finish, visit] = ["start", "finish", "visit"];
        let ahead = [start, finish, start, visit, finish, start, visit, finish, visit];
        assert_eq!(pass(&telling, true, 3), (ahead.to_vec(), true));
        assert_eq!(pass(&telling, false, 3), ([start, finish, visit].repeat(3), true));
        // What is under way is let go of.
        assert_eq!(pass(&telling, true, 0), (ahead[..4].to_vec(), false));
    }

    #[test]
    fn a_rank_that_is_gone_is_told() {
        let telling = Telling { fails: true, ..Telling::default() };
        let target = target(&telling, true);
        let visited = target.layers.visit(0..3, &mut |_, _| unreachable!("no layer has come"));
        let error = visited.expect_err("a rank is gone").to_string();
        assert!(error.contains("rank 1 on node7 is gone"), "{error}");
    }
}
