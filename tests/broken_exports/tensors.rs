//! Tensors and vocabulary maps.

use super::*;

#[test]
fn broken_tensors_are_caught() {
    let bench = Bench::new();
    let nan = |t: &Tensor| scaled(t, f64::NAN);
    let faults = vec![
        fault("missing-tensor", "keeps its initial value").by(dropped("norm.weight")),
        fault("missing-tensor", "`layers.0.hidden_norm.weight`")
            .by(rename("hidden_norm", "hiden_norm")),
        fault("unexpected-tensor", "is `layers.0.hidden_norm.weight` meant?")
            .by(rename("hidden_norm", "hiden_norm")),
        fault("unexpected-tensor", "KeyError").by(rename("fc.weight", "model.fc.weight")),
        fault("unexpected-tensor", "verifier_norm")
            .by(copied("norm.weight", "verifier_norm.weight")),
        fault("two-layers", "the same layer")
            .by(copied("norm.weight", "midlayer.hidden_norm.weight")),
        fault("shape", "transposed").by(tensor("fc.weight", transposed)),
        fault("shape", "transposed").by(tensor("layers.0.mlp.down_proj.weight", transposed)),
        fault("shape", "[61, 32]").by(tensor("lm_head.weight", |t| {
            Tensor::cat(&[t, &t.narrow(0, 0, 1).expect("row")], 0).expect("cat")
        })),
        fault("shape", "[32, 32]")
            .by(tensor("layers.0.self_attn.q_proj.weight", |t| t.narrow(1, 0, 32).expect("half"))),
        fault("shape", "[258, 31]")
            .by(tensor("embed_tokens.weight", |t| t.narrow(1, 0, 31).expect("narrow"))),
        fault("not-finite", "not finite").by(tensor("fc.weight", nan)),
        fault("all-zero", "every value is 0")
            .by(tensor("layers.0.mlp.up_proj.weight", |t| t.zeros_like().expect("zeros"))),
        fault("constant", "every value is the same")
            .by(tensor("lm_head.weight", |t| t.ones_like().expect("ones"))),
        fault("duplicate-values", "the same values as").by(tensors(|all| {
            let gate = all.iter().find(|(n, _)| n.contains("gate_proj")).expect("gate").1.clone();
            let up = all.iter_mut().find(|(n, _)| n.contains("up_proj")).expect("up");
            up.1 = gate;
        })),
        warning("matrix-scale", "root mean square").by(tensor("fc.weight", |t| scaled(t, 1e4))),
        warning("norm-scale", "norm weights of mean")
            .by(tensor("norm.weight", |t| scaled(t, 100.0))),
        warning("changed", "other values than were exported")
            .by(tensor("fc.weight", |t| scaled(t, 1.001))),
        warning("embedding", "differs from the target's")
            .by(tensor("embed_tokens.weight", |t| scaled(t, 1.5))),
        fault("weight-type", "I64")
            .by(tensor("norm.weight", |t| t.to_dtype(DType::I64).expect("integers"))),
        fault("dtype", "float16")
            .by(tensor("fc.weight", |t| t.to_dtype(DType::F16).expect("half"))),
        fault("other-outputs", "transposed")
            .by(tensor("layers.0.self_attn.o_proj.weight", transposed)),
        fault("other-outputs", "another network").by(tensor("fc.weight", |t| {
            let block = |i: usize| t.narrow(1, 32 * i, 32).expect("block");
            Tensor::cat(&[block(1), block(0), block(2)], 1).expect("cat")
        })),
        fault("other-outputs", "another network").by(tensor(
            "layers.0.self_attn.q_proj.weight",
            |t| {
                let halves = [t.narrow(1, 32, 32).expect("b"), t.narrow(1, 0, 32).expect("a")];
                Tensor::cat(&halves, 1).expect("cat")
            },
        )),
        fault("other-outputs", "permuted").by(tensor("layers.0.self_attn.k_proj.weight", |t| {
            let order = Tensor::new(
                &[0_u32, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15],
                &Device::Cpu,
            )
            .expect("order");
            t.index_select(&order, 0).expect("rows")
        })),
        fault("other-outputs", "another network")
            .by(swap("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")),
        fault("other-outputs", "another network")
            .by(tensor("layers.0.hidden_norm.weight", |t| scaled(t, 1.3))),
    ];
    expect_caught(&bench, Profile::Vllm, &faults);
}

#[test]
fn broken_vocabulary_maps_are_caught() {
    let bench = Bench::new();
    let faults = vec![
        fault("no-map", "scattered to wrong tokens").by(dropped("d2t")),
        fault("no-map", "`t2d`").by(dropped("t2d")),
        fault("absolute-d2t", "absolute ids where offsets are expected").by(absolute()),
        fault("absolute-d2t", "absolute ids").by(|folder| {
            absolute()(folder);
            dropped("t2d")(folder);
        }),
        fault("map", "does not ascend").by(map(|d| d[5] = -3)),
        fault("map", "outside the vocabulary").by(map(|d| *d.last_mut().expect("last") = 500)),
        fault("map", "outside the vocabulary").by(map(|d| d[0] = -1)),
        fault("map", "flags other tokens").by(map(|d| d[7] += 1)),
        fault("map-length", "[60]").by(map(|d| d.truncate(59))),
        fault("map-type", "F32").by(tensor("d2t", |t| t.to_dtype(DType::F32).expect("floats"))),
        fault("map-type", "I64").by(tensor("t2d", |t| t.to_dtype(DType::I64).expect("integers"))),
        fault("map-length", "[258]").by(tensor("t2d", |t| t.narrow(0, 0, 257).expect("narrow"))),
        // Consistent, but another map than the draft was trained with.
        fault("other-map", "another one than in training").by(|folder| {
            map(|d| d[0] -= 1)(folder);
            flags_swapped(0, 1)(folder);
        }),
        // The end of text gives its place to the token before it.
        warning("no-stop", "never proposes an end").by(|folder| {
            map(|d| *d.last_mut().expect("last") -= 1)(folder);
            flags_swapped(256, 257)(folder);
        }),
    ];
    expect_caught(&bench, Profile::Vllm, &faults);
}
