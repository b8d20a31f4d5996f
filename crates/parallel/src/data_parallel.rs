//! Gradients of all ranks into one update.

use std::sync::Arc;

use candle_core::{Device, Shape, Tensor};
use longdraft_kernels::adamw::{BLOCK, square_sums, square_sums_on_device};
use longdraft_kernels::collectives::DeviceRanks;
use longdraft_models::draft::Parameter;

use super::communicators::Purpose;
use super::device_exchange::DeviceExchange;
use super::exchange::Exchange;
use super::gpus::summing;
use super::spread_weights::SpreadWeights;
use super::{Gradients, ParallelConfig, Partition, Reduction, Run, World, ZeroStage};
use crate::error::Result;
use crate::values::Values;

/// What one rank does of an optimizer step, and how the ranks' parts come together.
#[derive(Debug, Clone)]
pub struct DataParallel {
    world: World,
    partition: Partition,
    shapes: Vec<Shape>,
    /// ZeRO-3: the weights of this rank's runs.
    spread: Option<Arc<SpreadWeights>>,
    /// What this rank's optimizer updates: its part, or everything.
    runs: Vec<Run>,
    is_sharded: bool,
    bucket: usize,
    reduction: Reduction,
}

impl DataParallel {
    /// Elementwise updates: shards of equal size.
    pub fn by_blocks(world: &World, config: &ParallelConfig, parameters: &[Parameter]) -> Self {
        let partition = Partition::by_blocks(&sizes(parameters), world.size());
        let is_sharded = config.zero_stage() != ZeroStage::Replicated;
        Self::new(world, config, (parameters, partition), is_sharded)
    }

    /// Updates of whole matrices: every rank those that fall to it, whatever the ZeRO stage.
    pub fn by_cost(
        world: &World,
        config: &ParallelConfig,
        parameters: &[Parameter],
        costs: &[u64],
    ) -> Self {
        let partition = Partition::by_cost(&sizes(parameters), costs, world.size());
        Self::new(world, config, (parameters, partition), true)
    }

    /// One process that updates everything.
    pub fn single(parameters: &[Parameter]) -> Self {
        let partition = Partition::by_blocks(&sizes(parameters), 1);
        Self::new(&World::single(), &ParallelConfig::default(), (parameters, partition), false)
    }

    fn new(
        world: &World,
        config: &ParallelConfig,
        (parameters, partition): (&[Parameter], Partition),
        is_sharded: bool,
    ) -> Self {
        let is_sharded = is_sharded && world.size() > 1;
        let spreads = config.spreads_weights(world);
        let runs = if is_sharded {
            partition.of(world.rank()).to_vec()
        } else {
            let whole = |(parameter, len): (usize, &usize)| Run { parameter, start: 0, len: *len };
            sizes(parameters).iter().enumerate().map(whole).collect()
        };
        Self {
            world: world.clone(),
            partition,
            shapes: parameters.iter().map(|parameter| parameter.var.shape().clone()).collect(),
            spread: spreads.then(Arc::default),
            runs,
            is_sharded,
            bucket: config.bucket_bytes / size_of::<f32>(),
            reduction: config.reduction,
        }
    }

    /// The same, summing gradients on the ranks' GPUs where that can be; else, if there are GPUs, with a
    /// remark on what keeps it from that. All ranks call it, with their devices.
    ///
    /// # Errors
    /// - the GPUs do not reach each other
    pub fn with_gpus(
        self,
        device: &Device,
        config: &ParallelConfig,
    ) -> Result<(Self, Option<String>)> {
        let (world, remark) = summing(&self.world, Purpose::Gradients, device, config)?;
        Ok((Self { world, ..self }, remark))
    }

    /// The ranks.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// What this rank's optimizer updates, by parameter and start.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Whether ranks update different elements.
    pub fn is_sharded(&self) -> bool {
        self.is_sharded
    }

    /// Shape of the parameter that a run lies in.
    pub fn shape_of(&self, run: &Run) -> &Shape {
        &self.shapes[run.parameter]
    }

    /// Elements of every parameter.
    fn sizes(&self) -> Vec<usize> {
        self.shapes.iter().map(Shape::elem_count).collect()
    }

    /// Makes the weights whole for their use under ZeRO-3; otherwise they are. All ranks call it.
    ///
    /// # Errors
    /// - a parameter cannot be made
    pub fn gather(&self, parameters: &mut [Parameter]) -> Result<()> {
        match &self.spread {
            Some(spread) => spread.gather(&self.shapes, parameters, |own, device, put| {
                self.put_together(own, device, put)
            }),
            None => Ok(()),
        }
    }

    /// Lets go of the weights that other ranks update, under ZeRO-3.
    ///
    /// # Errors
    /// - a parameter cannot be read
    pub fn release(&self, parameters: &mut [Parameter]) -> Result<()> {
        match &self.spread {
            Some(spread) => spread.release(&self.runs, parameters, self.sums_on_gpus()),
            None => Ok(()),
        }
    }

    fn exchange(&self) -> Exchange<'_> {
        Exchange {
            world: &self.world,
            partition: &self.partition,
            bucket: self.bucket,
            reduction: self.reduction,
        }
    }

    /// Sums over all ranks of whole parameters' gradients, for [`Self::runs`]. A parameter that no
    /// rank has a gradient of stays without one.
    ///
    /// # Errors
    /// - a gradient cannot be read from its device
    pub fn reduce(&self, gradients: Gradients) -> Result<Gradients> {
        if self.world.size() == 1 {
            return Ok(gradients);
        }
        let mut reached = gradients.reached();
        self.world.all_reduce_max(&mut reached);
        if let Some(gpus) = self.summing_gpus() {
            return self.reduce_on(gpus, &gradients, &reached);
        }
        let whole = gradients.into_values()?;
        let own = self.exchange().reduce(&whole);
        drop(whole);
        let sums = if self.is_sharded { own } else { self.exchange().gather(&own, &self.sizes()) };
        let known = sums.into_iter().zip(&self.runs);
        let known = known.map(|(sum, run)| (reached[run.parameter] > 0).then_some(sum));
        Ok(Gradients::from_values(known.collect()))
    }

    /// Whether gradients are summed on the ranks' GPUs.
    pub fn sums_on_gpus(&self) -> bool {
        self.summing_gpus().is_some()
    }

    /// The ranks' GPUs where the order of the sums is free.
    fn summing_gpus(&self) -> Option<&dyn DeviceRanks> {
        self.world.gpus().filter(|_| self.reduction != Reduction::RankOrder)
    }

    fn exchange_on<'a>(&'a self, devices: &'a dyn DeviceRanks) -> DeviceExchange<'a> {
        DeviceExchange { devices, partition: &self.partition, bucket: self.bucket }
    }

    /// Puts everybody's values of their runs together. `put` gets those of each parameter, flat, on `device` or where
    /// the ranks' devices exchange them.
    fn put_together(
        &self,
        own: &[Values],
        device: &Device,
        put: &mut dyn FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        let Some(gpus) = self.summing_gpus() else {
            let own = own.iter().map(Values::on_host).collect::<Result<Vec<_>>>()?;
            let mut whole = self.exchange().gather(&own, &self.sizes()).into_iter().enumerate();
            return whole.try_for_each(|(index, values)| {
                let count = values.len();
                put(index, Tensor::from_vec(values, count, device)?)
            });
        };
        let there = gpus.device();
        let own = own.iter().map(|values| values.on(&there, values.count()));
        let own = own.collect::<Result<Vec<_>>>()?;
        let whole = self.exchange_on(gpus).gather(&own, self.shapes.len())?;
        whole.into_iter().enumerate().try_for_each(|(index, values)| put(index, values))
    }

    fn reduce_on(
        &self,
        gpus: &dyn DeviceRanks,
        gradients: &Gradients,
        reached: &[u64],
    ) -> Result<Gradients> {
        if self.is_sharded {
            let flat = |index: usize| -> Result<Tensor> {
                Ok(gradients.on(&gpus.device(), index, &self.shapes[index])?.flatten_all()?)
            };
            let whole = (0..reached.len()).map(flat).collect::<Result<Vec<_>>>()?;
            let sums = self.exchange_on(gpus).reduce(&whole)?.into_iter().zip(&self.runs);
            let known = sums.map(|(sum, run)| (reached[run.parameter] > 0).then_some(sum));
            return Ok(Gradients::from_tensors(known.collect()));
        }
        let known = || (0..reached.len()).filter(|index| reached[*index] > 0);
        let own = known().map(|index| gradients.on(&gpus.device(), index, &self.shapes[index]));
        let own = own.collect::<Result<Vec<_>>>()?;
        let mut sums = gpus.all_reduce(&own)?.into_iter();
        let sums = reached.iter().map(|reached| if *reached > 0 { sums.next() } else { None });
        Ok(Gradients::from_tensors(sums.collect()))
    }

    /// `‖g‖₂` over all parameters of gradients that [`Self::reduce`] returned; the same bits
    /// however the elements are spread.
    ///
    /// # Errors
    /// - a gradient cannot be read from its device
    pub fn norm(&self, gradients: &Gradients) -> Result<f64> {
        if !self.is_sharded {
            return gradients.norm();
        }
        let sizes = self.sizes();
        let firsts: Vec<usize> = sizes
            .iter()
            .scan(0, |end, size| {
                let first = *end;
                *end += size.div_ceil(BLOCK);
                Some(first)
            })
            .collect();
        let blocks = sizes.iter().map(|size| size.div_ceil(BLOCK)).sum();
        let mut squares = vec![0.0_f64; blocks];
        for (index, run) in self.runs.iter().enumerate() {
            let own = match (gradients.on_device(index), gradients.get_host(index)) {
                (Some(tensor), _) => square_sums_on_device(tensor)?,
                (None, Some(values)) => square_sums(values),
                (None, None) => continue,
            };
            let first = firsts[run.parameter] + run.start / BLOCK;
            squares[first..first + own.len()].copy_from_slice(&own);
        }
        // Every block is one rank's; the others add zeros.
        self.world.all_reduce_sum(&mut squares);
        let of_parameter = |(first, size): (&usize, &usize)| -> f64 {
            squares[*first..first + size.div_ceil(BLOCK)].iter().sum()
        };
        Ok(firsts.iter().zip(&sizes).map(of_parameter).sum::<f64>().sqrt())
    }

    /// Values of this rank's run `index` as they stand.
    ///
    /// # Errors
    /// - the parameter cannot be read
    pub fn read(&self, parameters: &[Parameter], index: usize) -> Result<Vec<f32>> {
        if let Some(values) = self.spread.as_ref().and_then(|spread| spread.read(index)) {
            return values.into_host();
        }
        let run = &self.runs[index];
        let values: Vec<f32> = parameters[run.parameter].var.flatten_all()?.to_vec1()?;
        Ok(if run.len == values.len() { values } else { values[run.range()].to_vec() })
    }

    /// The same where the parameters lie: flat if ranks update different elements, else in the parameter's shape.
    ///
    /// # Errors
    /// - the device has no memory for them
    pub fn read_on_device(&self, parameters: &[Parameter], index: usize) -> Result<Tensor> {
        let run = &self.runs[index];
        let parameter = parameters[run.parameter].var.as_detached_tensor();
        if let Some(values) = self.spread.as_ref().and_then(|spread| spread.read(index)) {
            return values.on(parameter.device(), run.len);
        }
        if !self.is_sharded {
            return Ok(parameter);
        }
        Ok(parameter.flatten_all()?.narrow(0, run.start, run.len)?)
    }

    /// Sets a run's new values where this rank holds everything; hands them back where
    /// [`Self::publish`] has to bring the ranks' parts together.
    ///
    /// # Errors
    /// - the parameter cannot be written
    pub fn write(
        &self,
        parameters: &[Parameter],
        index: usize,
        values: impl Into<Values>,
    ) -> Result<Option<Values>> {
        let values = values.into();
        if self.is_sharded {
            return Ok(Some(values));
        }
        let var = &parameters[self.runs[index].parameter].var;
        var.set(&values.on(var.device(), var.shape())?)?;
        Ok(None)
    }

    /// Brings the new values of all ranks' runs together, those of this rank by [`Self::runs`]; under
    /// ZeRO-3 they stay apart until [`Self::gather`].
    ///
    /// # Errors
    /// - a parameter cannot be written
    pub fn publish(&self, parameters: &[Parameter], own: Vec<Option<Values>>) -> Result<()> {
        if !self.is_sharded {
            return Ok(());
        }
        let own: Vec<Values> = own.into_iter().map(Option::unwrap_or_default).collect();
        if self.spread.as_ref().is_some_and(|spread| !spread.write(&own)) {
            return Ok(());
        }
        let Some(first) = parameters.first() else { return Ok(()) };
        self.put_together(&own, first.var.device(), &mut |index, values| {
            let parameter = &parameters[index];
            Ok(parameter.var.set(&values.reshape(parameter.var.shape())?)?)
        })
    }
}

fn sizes(parameters: &[Parameter]) -> Vec<usize> {
    parameters.iter().map(|parameter| parameter.var.elem_count()).collect()
}
