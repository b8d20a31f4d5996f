//! What ranks do.

use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor, bail};
use longdraft_kernels::collectives::DeviceRanks;
use longdraft_kernels::device::open;
use longdraft_kernels::nccl::{Communicator, NAME_BYTES};

use crate::start::{NAME, PLAY, RANK, SIZE};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// What collectives take at most.
const LIMIT: Duration = Duration::from_secs(2);

/// Plays the rank that the environment names; without one nothing.
pub(crate) fn as_told() {
    let Ok(play) = std::env::var(PLAY) else { return };
    let number = |variable| std::env::var(variable).unwrap().parse::<usize>().unwrap();
    let (rank, size) = (number(RANK), number(SIZE));
    let text = std::env::var(NAME).unwrap();
    let mut name = [0; NAME_BYTES];
    for (byte, digits) in name.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    }
    let device = open(rank).unwrap();
    // Those that are to be in time have as long as they like: machines are busy.
    let limit = if play == "fails" { LIMIT } else { Duration::from_mins(2) };
    let ranks = match Communicator::join(&device, (rank, size), &name, limit) {
        Ok(ranks) => ranks,
        Err(error) => return eprintln!("{error}"),
    };
    match play.as_str() {
        "values" => values(&ranks),
        "ahead" => ahead(&ranks),
        "refused" => refused(&ranks),
        "fails" => fails(&ranks),
        other => panic!("no play is called {other}"),
    }
    .unwrap();
}

/// A tensor of a rank: small whole numbers, which every type and every sum holds.
fn tensor(rank: usize, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|index| (10 * rank + index % 20) as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1()
}

/// Fails unless the tensor has this shape and these values.
fn require(found: &Tensor, shape: &[usize], values: &[f32]) -> Result<()> {
    let numbers = numbers(found)?;
    if found.dims() != shape || numbers != values {
        bail!("{shape:?} {values:?} expected, found {:?} {numbers:?}", found.dims());
    }
    Ok(())
}

/// Values of all ranks, one after the other.
fn of_all(size: usize, shape: &[usize], dtype: DType) -> Result<Vec<Vec<f32>>> {
    (0..size).map(|rank| numbers(&tensor(rank, shape, dtype, &Device::Cpu)?)).collect()
}

fn sums(size: usize, shape: &[usize], dtype: DType) -> Result<Vec<f32>> {
    let all = of_all(size, shape, dtype)?;
    Ok((0..all[0].len()).map(|index| all.iter().map(|values| values[index]).sum()).collect())
}

fn values(ranks: &Communicator) -> Result<()> {
    let (rank, size, device) = (ranks.rank(), ranks.size(), ranks.device());
    for dtype in TYPES {
        let shapes: [&[usize]; 5] = [&[3, 2], &[5], &[0], &[1, 1, 1], &[7, 0]];
        let own = shapes.iter().map(|shape| tensor(rank, shape, dtype, &device));
        let own = own.collect::<Result<Vec<_>>>()?;
        for (shape, found) in shapes.iter().zip(ranks.all_reduce(&own)?) {
            require(&found, shape, &sums(size, shape, dtype)?)?;
        }
        for (shape, found) in shapes.iter().zip(ranks.all_gather(&own)?) {
            let whole = [&[size], *shape].concat();
            require(&found, &whole, &of_all(size, shape, dtype)?.concat())?;
        }
        for inner in [&[4][..], &[0], &[2, 3]] {
            let whole = [&[size], inner].concat();
            let found = ranks.reduce_scatter(&tensor(rank, &whole, dtype, &device)?)?;
            let count: usize = inner.iter().product();
            let all = sums(size, &whole, dtype)?;
            require(&found, inner, &all[rank * count..(rank + 1) * count])?;
        }
        // A part of a tensor, and more tensors than a group of a layer has.
        let many: Vec<_> = (1..200).map(|length| vec![length]).collect();
        let parts = many.iter().map(|shape| {
            let longer = tensor(rank, &[shape[0] + 1], dtype, &device)?;
            longer.narrow(0, 1, shape[0])
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        for (shape, found) in many.iter().zip(ranks.all_reduce(&parts)?) {
            let all = sums(size, &[shape[0] + 1], dtype)?;
            require(&found, shape, &all[1..])?;
        }
        if !ranks.all_reduce(&[])?.is_empty() || !ranks.all_gather(&[])?.is_empty() {
            bail!("something came of nothing");
        }
    }
    eprintln!("values are right");
    Ok(())
}

/// Gatherings beside other work. A rank drops one, and what it gathered from, before the others have read it.
fn ahead(ranks: &Communicator) -> Result<()> {
    let (rank, size, device) = (ranks.rank(), ranks.size(), ranks.device());
    for dtype in TYPES {
        let shape = [64, 33];
        let whole = [size, 64, 33];
        let expected = of_all(size, &shape, dtype)?.concat();
        let under_way = ranks.start_all_gather(&[tensor(rank, &shape, dtype, &device)?])?;
        let beside = tensor(7, &[1000], dtype, &device)?;
        require(&beside, &[1000], &numbers(&tensor(7, &[1000], dtype, &Device::Cpu)?)?)?;
        require(&under_way.finish()?[0], &whole, &expected)?;
        for dropper in 0..size {
            let under_way = ranks.start_all_gather(&[tensor(rank, &shape, dtype, &device)?])?;
            if rank == dropper {
                drop(under_way);
                // Where it lay lies something else now.
                let others: Result<Vec<_>> =
                    (0..8).map(|_| tensor(9, &shape, dtype, &device)).collect();
                drop(others?);
            } else {
                require(&under_way.finish()?[0], &whole, &expected)?;
            }
        }
        let sum = ranks.all_reduce(&[tensor(rank, &shape, dtype, &device)?])?;
        require(&sum[0], &shape, &sums(size, &shape, dtype)?)?;
        // Another thread goes on.
        let under_way = ranks.start_all_gather(&[tensor(rank, &shape, dtype, &device)?])?;
        let finished = std::thread::scope(|scope| scope.spawn(|| under_way.finish()).join());
        require(&finished.unwrap()?[0], &whole, &expected)?;
    }
    eprintln!("gathered");
    Ok(())
}

fn refused(ranks: &Communicator) -> Result<()> {
    let (rank, size, device) = (ranks.rank(), ranks.size(), ranks.device());
    let told = |result: Result<Tensor>| match result {
        Ok(_) => bail!("taken"),
        Err(error) => {
            eprintln!("{error}");
            Ok(())
        }
    };
    let own = tensor(rank, &[size + 1, 2], DType::F32, &device)?;
    told(ranks.reduce_scatter(&own))?;
    let whole = Tensor::new(&[1_u32, 2], &device)?;
    told(ranks.all_reduce(&[own.clone(), whole]).map(|mut all| all.swap_remove(0)))?;
    let here = tensor(rank, &[2], DType::F32, &Device::Cpu)?;
    told(ranks.all_gather(&[here]).map(|mut all| all.swap_remove(0)))?;
    let sum = ranks.all_reduce(&[own])?;
    require(&sum[0], &[size + 1, 2], &sums(size, &[size + 1, 2], DType::F32)?)?;
    eprintln!("goes on");
    Ok(())
}

/// Two collectives that work, and one that is asked not to. All that follow are refused.
fn fails(ranks: &Communicator) -> Result<()> {
    let (rank, device) = (ranks.rank(), ranks.device());
    let own = [tensor(rank, &[6], DType::F32, &device)?];
    ranks.all_reduce(&own)?;
    let blocks = tensor(rank, &[2, 3], DType::F32, &device)?;
    ranks.reduce_scatter(&blocks)?;
    match ranks.all_gather(&own) {
        Ok(found) => bail!("values came: {:?}", numbers(&found[0])?),
        Err(error) => eprintln!("{error}"),
    }
    for result in [ranks.all_reduce(&own), ranks.all_gather(&own)] {
        match result {
            Ok(_) => bail!("taken after a failure"),
            Err(error) => eprintln!("{error}"),
        }
    }
    // The device still answers.
    require(&own[0], &[6], &numbers(&tensor(rank, &[6], DType::F32, &Device::Cpu)?)?)
}
