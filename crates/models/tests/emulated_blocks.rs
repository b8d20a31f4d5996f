//! A target as its file holds it, as an NVIDIA GPU decodes with it, its kernels emulated, against the CPU. It sets what holds
//! for a whole process.
#![cfg(feature = "emulate-cuda")]

use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use longdraft_kernels::attention::{Delays, KeyRanges};
use longdraft_kernels::dispatch::{Ops, set_ops};
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::trace::Trace;
use longdraft_models::draft::block::{BlockConfig, BlockDraft};
use longdraft_models::draft::glide::{CrossContext, GlideConfig, GlideDraft};
use longdraft_models::draft::{Draft, HeldAs, Init};
use longdraft_models::target_model::{Tap, Taps, Target, TargetOptions};

/// Tokens of passes: a prompt, then some.
const PASSES: [usize; 4] = [70, 1, 5, 18];
/// Largest error, in parts of the largest value: products have the CPU's bits, and a cache of bf16 rounds more than one of f16.
const ALLOWED: f32 = 2e-2;

/// The last row of every pass.
struct Run {
    logits: Vec<Tensor>,
    /// Of a draft that is held as blocks.
    drafted: Vec<Tensor>,
    /// Rows of the table that a block draft reads.
    embedded: Tensor,
    cache: &'static str,
    kernels: Vec<String>,
}

fn run(is_traced: bool) -> Run {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/target/demonstration.gguf");
    let options = TargetOptions { as_stored: true, ..TargetOptions::default() };
    let target = Target::open(path.to_str().expect("a path"), &options).expect("a target");
    assert!(target.holds_blocks() && target.widened().is_empty());
    let ends = target.hold_ends().expect("ends");
    assert_eq!(matches!(ends.head_matrix(), Matrix::OnGpu(_)), is_traced);
    let config = GlideConfig::for_target(target.config(), None);
    let mut draft = GlideDraft::initialise(&config, &target, Init::LastLayer, 3).expect("a draft");
    draft.hold_as(HeldAs::Blocks).expect("blocks");
    let folder = tempfile::tempdir().expect("a folder");
    let sizes = BlockConfig::for_target(target.config(), 1, 4, 39);
    let block = BlockDraft::initialise(&sizes, ends.embedding_matrix(), 3).expect("a draft");
    block.save(folder.path(), target.fingerprint()).expect("saved");
    let mut trace = is_traced.then(|| Trace::of(&Device::Cpu).expect("emulated"));
    trace.iter_mut().for_each(|trace| trace.begin().expect("the only one"));
    let block = BlockDraft::open(folder.path(), &target).expect("a draft");
    let embedded = block.embed(&[2047, 0, 7, 7]).expect("embeddings");
    let mut cache = target.new_cache().expect("a cache");
    let (mut logits, mut drafted, mut first) = (Vec::new(), Vec::new(), 0_u32);
    for rows in PASSES {
        let positions: Vec<u32> = (first..first + rows as u32).collect();
        let ids: Vec<u32> = positions.iter().map(|i| i * 37 % 300).collect();
        let taps = Taps::of(&[Tap::FinalHidden, Tap::LastKv]);
        let features = target.extend(&ids, &positions, &mut cache, &taps).expect("a pass");
        let last = |t: &Tensor| t.narrow(0, rows - 1, 1).expect("a row");
        logits.push(ends.logits(&last(&features.final_hidden.expect("tapped"))).expect("logits"));
        let last_kv = features.last_kv.expect("tapped");
        let ranges = |delay| Arc::new(KeyRanges::packed(&vec![0; rows], None, Delays::Same(delay)));
        let cross = CrossContext { last_kv: &last_kv, ranges: ranges(0) };
        let embeddings = ends.embed(&ids).expect("embeddings");
        let table = target.rope().table(&positions, target.device()).expect("a table");
        let out = draft.forward(&embeddings, &table, &ranges(0), &cross, &mut Vec::new());
        drafted.push(last(&out.expect("states")));
        first += rows as u32;
    }
    trace.iter_mut().for_each(|trace| trace.end().expect("a trace"));
    let kernels = trace.iter().flat_map(Trace::ops).map(|op| op.op).collect();
    Run { logits, drafted, embedded, cache: target.cache_type(), kernels }
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.detach().flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values")
}

#[test]
fn a_stored_target_on_a_gpu_says_what_it_says_on_the_cpu() {
    set_ops(Ops::Fused);
    let plain = run(false);
    set_ops(Ops::Emulated);
    let own = run(true);
    set_ops(Ops::Fused);
    assert_eq!((plain.cache, own.cache), ("f16", "bf16"));
    for kernel in ["widen_rows", "fix_rows", "products_1", "products_8", "products_16"] {
        assert!(own.kernels.iter().any(|name| name == kernel), "{kernel}: {:?}", own.kernels);
    }
    assert!(!own.kernels.iter().any(|name| name.starts_with("widen_f32")), "{:?}", own.kernels);
    assert_eq!(values(&own.embedded), values(&plain.embedded));
    let off = |own: &Tensor, plain: &Tensor| {
        let (own, plain) = (values(own), values(plain));
        let largest = plain.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        own.iter().zip(&plain).map(|(own, plain)| (own - plain).abs()).fold(0.0, f32::max) / largest
    };
    for (pass, (own, plain)) in own.logits.iter().zip(&plain.logits).enumerate() {
        assert!(off(own, plain) < ALLOWED, "pass {pass}: {:.2e}", off(own, plain));
        let (own, plain) = (values(own), values(plain));
        let chosen =
            |values: &[f32]| (0..values.len()).max_by(|a, b| values[*a].total_cmp(&values[*b]));
        assert_eq!(chosen(&own), chosen(&plain), "pass {pass}");
    }
    for (pass, (own, plain)) in own.drafted.iter().zip(&plain.drafted).enumerate() {
        assert!(off(own, plain) < ALLOWED, "draft of pass {pass}: {:.2e}", off(own, plain));
    }
}
