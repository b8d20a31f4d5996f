//! Ranks in processes of their own that exchange tensors as if on a GPU each: they come to what threads do, and one that dies or
//! hangs ends all.

use longdraft_kernels::graph::Backward;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor, Var};
use longdraft_models::draft::Parameter;
use longdraft_models::target_model::RowPart;
use longdraft_models::weights::TensorRole;
use longdraft_parallel::threads::{in_threads, with_gpus};
use longdraft_parallel::{DataParallel, Gradients, ParallelConfig, World};
use longdraft_train::optim::{AdamW, AdamWConfig};

/// What a process is asked to do as a rank.
const ROLE: &str = "LONGDRAFT_TEST_ROLE";
const RANKS: usize = 3;
const LONGEST: Duration = Duration::from_mins(1);

/// The ranks of the other tests are this one; by itself it does nothing.
#[test]
fn a_rank() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let is_first = std::env::var_os("RANK").is_none();
    let world = if is_first { World::launch(RANKS, &|| Ok(rank())) } else { World::connect() };
    let world = world.expect("the ranks meet");
    let own = match role.as_str() {
        "works" => worked(&world),
        "dies" => ended(&world, (2, || std::process::abort())),
        "hangs" => {
            world.set_timeout(Duration::from_secs(8));
            ended(&world, (1, || std::thread::sleep(2 * LONGEST)))
        }
        other => panic!("no such role: {other}"),
    };
    let all = world.all_gather(&[own]);
    if is_first {
        println!("result {all:?}");
    }
}

fn rank() -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "a_rank", "--nocapture"]);
    command
}

/// How the first of some processes ends, which starts the others.
fn processes(role: &str) -> Output {
    let mut command = rank();
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(name);
    }
    command.env(ROLE, role).output().expect("a process starts")
}

/// Starts an exchange that one rank leaves.
fn ended(world: &World, (leaver, leave): (usize, fn())) -> u64 {
    let part = part_of(world, &[0; 12]);
    let own = Tensor::ones((part.rows().len(), 1, 1), candle_core::DType::F32, &Device::Cpu);
    let own = own.expect("rows");
    part.gather(&own).expect("gathered");
    if world.rank() == leaver {
        leave();
    }
    part.gather(&own).expect("gathered").dims().len() as u64
}

fn part_of(world: &World, documents: &[i32]) -> RowPart {
    RowPart::of(&with_gpus(world).as_ranks(), documents)
}

/// A number that all bits of a rank's results go into.
fn worked(world: &World) -> u64 {
    let mut bits = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |tensor: &Tensor| {
        let values = tensor.flatten_all().and_then(|tensor| tensor.to_vec1::<f32>());
        for value in values.expect("values") {
            bits = (bits ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3);
        }
    };
    // Rows of which ranks have parts of other lengths, and pieces of several documents.
    for lengths in [&[23][..], &[11, 2, 9, 1], &[3], &[1, 6]] {
        shared_row(world, lengths).iter().for_each(&mut add);
    }
    for zero in [0, 1, 3] {
        updated(&with_gpus(world), zero)
            .iter()
            .for_each(|parameter| add(parameter.var.as_tensor()));
    }
    bits
}

/// A row's gathered keys, the gradient of the own ones, and states after its pieces.
fn shared_row(world: &World, lengths: &[usize]) -> [Tensor; 3] {
    let of = |(id, length): (usize, &usize)| std::iter::repeat_n(id as i32, *length);
    let documents: Vec<i32> = lengths.iter().enumerate().flat_map(of).collect();
    let (part, tokens) = (part_of(world, &documents), documents.len());
    let all = Tensor::arange(0.0_f32, 4.0 * tokens as f32, &Device::Cpu);
    let all = all.and_then(|all| all.affine(0.37, -1.0)?.reshape((tokens, 2, 2))).expect("keys");
    let own = part.rows().rows_of(&all).and_then(|own| Var::from_tensor(&own)).expect("own keys");
    let whole = part.gather(own.as_tensor()).expect("gathered");
    let weights = all.affine(0.1, world.rank() as f64).expect("weights");
    let loss = (&whole * weights).and_then(|product| product.sum_all()).expect("a loss");
    let gradients = loss.gradients().expect("backward");
    let gradient = gradients.get(own.as_tensor()).expect("a gradient").clone();
    let flat = own.flatten_from(1).expect("states");
    let after = part.with_rows_after(&flat, 2).expect("states after");
    [whole, gradient, after]
}

/// Parameters after three updates under a ZeRO stage.
fn updated(world: &World, zero: u8) -> Vec<Parameter> {
    let sizes = [9000, 5, 4096];
    let values = |seed: usize, size: usize| -> Vec<f32> {
        (0..size).map(|i| ((7 * i + 3 * seed) % 23) as f32 * 0.1 - 1.0).collect()
    };
    let parameter = |(index, size): (usize, &usize)| {
        let var = Var::from_vec(values(index, *size), *size, &Device::Cpu).expect("a variable");
        let role = TensorRole::Layer;
        Parameter { name: index.to_string(), var, role, decay: true, dead: false }
    };
    let mut parameters: Vec<Parameter> = sizes.iter().enumerate().map(parameter).collect();
    let config = ParallelConfig { zero, bucket_bytes: 8192, ..ParallelConfig::default() };
    let parallel = DataParallel::by_blocks(world, &config, &parameters);
    let mut optimizer = AdamW::over(AdamWConfig::default(), &parallel);
    for step in 0..3 {
        parallel.gather(&mut parameters).expect("whole weights");
        // The first rank has no gradient of the second parameter.
        let gradient = |(index, size): (usize, &usize)| {
            let is_known = (index, world.rank()) != (1, 0);
            is_known.then(|| values(index + 5 * world.rank() + step, *size))
        };
        let gradients = sizes.iter().enumerate().map(gradient).collect();
        let sums = parallel.reduce(Gradients::from_values(gradients)).expect("sums");
        let norm = parallel.norm(&sums).expect("a norm");
        parallel.release(&mut parameters).expect("a part of the weights");
        optimizer.update(&parallel, &parameters, &sums, norm, 1e-2).expect("an update");
    }
    parallel.gather(&mut parameters).expect("whole weights");
    parameters
}

#[test]
fn processes_come_to_the_bits_of_threads() {
    let threads = in_threads(RANKS, |world| worked(&world));
    let output = processes("works");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains(&format!("result {threads:?}")), "{threads:?} in {said}");
}

/// Devices update their parts themselves, by other instructions: the last digits differ.
#[test]
fn shards_that_devices_exchange_come_to_those_in_main_memory() {
    let weights = |zero: u8, on_devices: bool| {
        let of = |parameter: &Parameter| parameter.var.to_vec1::<f32>().expect("values");
        in_threads(RANKS, |world| {
            let world = if on_devices { with_gpus(&world) } else { world };
            updated(&world, zero).iter().map(of).collect::<Vec<_>>()
        })
    };
    let [in_memory, on_devices] = [false, true].map(|on_devices| weights(1, on_devices));
    for zero in [0, 3] {
        assert_eq!(weights(zero, false), in_memory, "ZeRO {zero}");
    }
    assert_eq!(weights(3, true), on_devices, "ZeRO 3 on devices");
    let pairs = on_devices.iter().flatten().flatten().zip(in_memory.iter().flatten().flatten());
    for (own, want) in pairs {
        assert!((own - want).abs() < 1e-6, "{own} on a device, {want} in main memory");
    }
}

#[test]
fn a_rank_that_dies_or_hangs_while_devices_exchange_is_named_and_ends_all() {
    for (role, named) in [("dies", "rank 2 on "), ("hangs", "no answer for 8 s of rank 1 on ")] {
        let started = Instant::now();
        let output = processes(role);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{role}: {said}");
        assert!(said.contains(named), "{role}: {said}");
        assert!(started.elapsed() < LONGEST, "{role}");
    }
}
