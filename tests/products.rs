//! `products: rounded` and `f32` in training.

use longdraft_kernels::dispatch::{has_avx2_fma, has_avx512};
use serde_json::json;

use crate::support::runs::{draft_bytes, metrics, trained_alike_from_a_store};
use crate::support::{Workshop, fail, fail_with, succeed, tiny_config, with, write_target};

/// Rows of a target that is large enough for rounded factors.
const ROWS: [&str; 4] =
    ["data.row_tokens=512", "train.rows_per_step=1", "train.steps=4", "train.evaluate_every=4"];

fn shop() -> Workshop {
    let shop = Workshop::new();
    let sizes = json!({ "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "initializer_range": 0.05 });
    write_target(&shop.target, &with(tiny_config("llama"), sizes));
    shop
}

/// Whether this machine multiplies integers faster than f32.
fn rounding_pays() -> bool {
    #[cfg(target_arch = "x86_64")]
    return has_avx2_fma() && (!has_avx512() || std::arch::is_x86_feature_detected!("avx512vnni"));
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[test]
fn rounded_products_train_nearly_the_same_and_a_run_keeps_to_its_own() {
    for method in
        [&[][..], &["draft.method=eagle3", "draft.ttt_steps=2", "draft.target_layers=[0,1,2]"]]
    {
        let (shop, config) = shop().with_config();
        let train = |products: &str| {
            let (run, products) = (shop.path(products), format!("products={products}"));
            let output = format!("output={run}");
            succeed(&[&["train", &config, &output, &products], &ROWS[..], method].concat());
            run
        };
        let (rounded, exact) = (train("rounded"), train("f32"));
        assert_eq!(draft_bytes(&rounded) != draft_bytes(&exact), rounding_pays(), "{method:?}");
        for (rounded, exact) in metrics(&rounded).iter().zip(metrics(&exact)) {
            let record = |of: &serde_json::Value| {
                let of = if of["held_out"].is_null() { of } else { &of["held_out"] };
                of["loss"].as_f64().expect("loss")
            };
            let (a, b) = (record(rounded), record(&exact));
            assert!((a - b).abs() < 1e-3 * b, "{method:?}: {a} and {b}");
        }
        let output = format!("output={rounded}");
        let more = ["train", &config, &output, "products=f32", "train.steps=6"];
        fail_with(&[&more[..], &ROWS[..2], method].concat(), 1, &["products was rounded, now f32"]);
    }
}

#[test]
fn features_from_a_store_are_rounded_as_those_of_the_step() {
    for method in [
        &["teacher.soft_targets=top_k", "teacher.top_k=8"][..],
        &["draft.method=dflash", "draft.target_layers=[0,1]", "draft.blocks_per_row=64"],
    ] {
        let options = [&ROWS[..], &["data.anchor.redraw=false"], method].concat();
        trained_alike_from_a_store(&shop(), &options);
    }
    // A store is of one kind.
    let shop = shop();
    let (config, features) = (shop.config(), format!("train.features={}", shop.path("store")));
    let capture = ["capture", &config, &features];
    succeed(&[&capture[..], &ROWS].concat());
    let told = fail(&[&capture[..], &ROWS, &["products=f32"]].concat(), 1);
    assert!(told.contains("products was rounded, now f32"), "{told}");
}
