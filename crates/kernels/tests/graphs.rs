//! Starts that are recorded and made again as a CUDA graph, on the first GPU, with the bits of plain ones. Where no GPU is,
//! `scripts/check-nccl` runs this over a driver that records how it is called.

use candle_core::{DType, Device, Result, Tensor};
use longdraft_kernels::repeat::{Inputs, Recording, record, words};
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::rows::{put_rows_at, select_rows};
use longdraft_kernels::{device, repeat};

/// What a pass reads and writes.
struct Model {
    device: Device,
    table: Tensor,
    weight: Tensor,
    /// `[C, W]` in bf16.
    cache: Tensor,
}

impl Model {
    fn new(device: &Device) -> Result<Self> {
        let table = Tensor::arange(0.0_f32, 192.0, &Device::Cpu)?.reshape((12, 16))?;
        Ok(Self {
            device: device.clone(),
            table: table.to_device(device)?,
            weight: Tensor::ones(16, DType::F32, device)?,
            cache: Tensor::zeros((16, 16), DType::BF16, device)?,
        })
    }

    /// Norms of the rows of some tokens, which also go to the cache from a place on.
    fn pass(&self, place: u32, ids: &[u32]) -> Result<Tensor> {
        let place = words(&[place], &self.device)?;
        let rows = select_rows(&self.table, ids)?;
        put_rows_at(&self.cache, &rows, &place)?;
        rms_norm(&rows, &self.weight, 1e-5)
    }

    fn recorded(&self, inputs: &Inputs, place: u32, ids: &[u32]) -> Result<(Tensor, Recording)> {
        let parts: [&[u32]; 2] = [&[place], ids];
        record((inputs, &parts), |out: &Tensor| vec![out.clone()], || self.pass(place, ids))
    }
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

#[test]
fn a_graph_gives_what_its_starts_give() -> Result<()> {
    let device = device::open(0)?;
    assert!(repeat::may_repeat(2, &device) && !repeat::may_repeat(64, &device));
    let (own, plain) = (Model::new(&device)?, Model::new(&device)?);
    let inputs = Inputs::new(&[&[0], &[1, 2]], &device)?;
    let (_, first) = own.recorded(&inputs, 0, &[1, 2])?;
    let (out, second) = own.recorded(&inputs, 2, &[2, 5])?;
    second.is_like(&first).expect("alike");
    let mut graph = second.repeat(&device)?;
    plain.pass(0, &[1, 2])?;
    plain.pass(2, &[2, 5])?;
    for (place, ids) in [(4, [4, 11]), (7, [0, 0]), (6, [9, 3])] {
        inputs.set(&[&[place], &ids])?;
        graph.run()?;
        assert_eq!(bits(&out)?, bits(&plain.pass(place, &ids)?)?);
    }
    assert_eq!(bits(&own.cache)?, bits(&plain.cache)?);
    Ok(())
}
