//! Weights of which every rank keeps what it updates (ZeRO-3), put together around their use.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Shape, Tensor, Var};
use longdraft_models::draft::Parameter;

use super::Run;
use crate::error::Result;
use crate::values::Values;

/// What becomes of the whole values of the parameter at an index.
type Put<'a> = &'a mut dyn FnMut(usize, Tensor) -> Result<()>;

/// A rank's values, beside the parameters while these are whole.
#[derive(Debug, Default)]
pub(super) struct SpreadWeights {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Values of this rank's runs; `None` until the parameters are let go of for the first time.
    own: Option<Vec<Values>>,
    /// Whether the parameters hold nothing.
    is_released: bool,
}

impl SpreadWeights {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Values of this rank's run `index`; `None` while only the parameters know them.
    pub(super) fn read(&self, index: usize) -> Option<Values> {
        self.lock().own.as_ref().map(|own| own[index].clone())
    }

    /// Keeps new values of this rank's runs. Returns whether the parameters, which are whole, have to
    /// learn of them too.
    pub(super) fn write(&self, own: &[Values]) -> bool {
        let mut state = self.lock();
        if state.is_released {
            state.own = Some(own.to_vec());
        }
        !state.is_released
    }

    /// Keeps this rank's `runs`, where the parameters lie if they are to stay there, and puts nothing in the
    /// parameters' place.
    pub(super) fn release(
        &self,
        runs: &[Run],
        parameters: &mut [Parameter],
        they_stay: bool,
    ) -> Result<()> {
        let mut state = self.lock();
        if state.is_released {
            return Ok(());
        }
        let mut own = vec![Values::default(); runs.len()];
        for (index, parameter) in parameters.iter_mut().enumerate() {
            let all = parameter.var.as_detached_tensor().flatten_all()?;
            let all = if they_stay { all.into() } else { Values::Host(all.to_vec1()?) };
            for (own, run) in own.iter_mut().zip(runs).filter(|(_, run)| run.parameter == index) {
                *own = match &all {
                    Values::Host(values) => values[run.range()].to_vec().into(),
                    // The memory of the others is free then.
                    Values::Device(all) => {
                        all.narrow(0, run.start, run.len)?.force_contiguous()?.into()
                    }
                };
            }
            parameter.var = Var::zeros(0, DType::F32, parameter.var.device())?;
        }
        *state = State { own: Some(own), is_released: true };
        Ok(())
    }

    /// Makes the parameters whole; all ranks call it. `put_together` gets this rank's values and a device, and hands out
    /// every parameter's, flat.
    pub(super) fn gather(
        &self,
        shapes: &[Shape],
        parameters: &mut [Parameter],
        put_together: impl FnOnce(&[Values], &Device, Put<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut state = self.lock();
        if !state.is_released {
            return Ok(());
        }
        let Some(device) = parameters.first().map(|first| first.var.device().clone()) else {
            return Ok(());
        };
        put_together(
            state.own.as_deref().unwrap_or_default(),
            &device,
            &mut |index: usize, values: Tensor| {
                parameters[index].var = Var::from_tensor(&values.reshape(&shapes[index])?)?;
                Ok(())
            },
        )?;
        // The parameters know best from here on.
        *state = State::default();
        Ok(())
    }
}
