//! Cases of block drafts: senseless ones, and ones with other flags.

use candle_core::{DType, Device};

use super::*;

#[test]
fn a_wrong_or_senseless_case_of_blocks_is_told() {
    let Some(folder) = shared("golden/block/dflash2-over-base-weights") else { return };
    let expect = |code: i32, edit: &dyn Fn(&mut Value)| {
        let case = tempfile::tempdir().expect("tempdir");
        copy_files(&folder, case.path());
        edit_meta(case.path(), edit);
        reported(case.path(), code);
    };
    expect(0, &|_| {});
    expect(1, &|meta| meta["loss"] = 9.0.into());
    expect(1, &|meta| meta["gamma"] = 2.0.into());
    expect(1, &|meta| meta["selector_rank"] = 7.into());
    expect(1, &|meta| meta["selector_divisor"] = "over_hit_weights".into());
    for (key, value) in [
        ("heads", Value::from(0)),
        ("block_size", 1_u64.into()),
        ("block_size", (1_u64 << 40).into()),
        ("top_k", 0.into()),
        ("conv_group_size", 5.into()),
        ("mask_token_id", 256.into()),
        ("target_layer_ids", serde_json::json!([3, 1, 5])),
        ("layer_types", serde_json::json!(["linear_attention"])),
        ("loss_type", "riddle".into()),
    ] {
        expect(2, &|meta| meta[key] = value.clone());
    }
}

/// A copy of a case of blocks whose tensors a test changes; `None` where the cases are not at hand.
fn blocks_with(
    edit: impl Fn(&mut BTreeMap<String, Tensor>) -> candle_core::Result<()>,
) -> Option<tempfile::TempDir> {
    let folder = shared("golden/block/dflash2-over-hit-weights")?;
    let case = tempfile::tempdir().expect("tempdir");
    copy_files(folder, case.path());
    edit_tensors(case.path(), |tensors| edit(tensors).expect("edit"));
    Some(case)
}

#[test]
fn blocks_may_come_with_other_flags_with_ties_and_with_a_row_that_counts_for_nothing() {
    let case = blocks_with(|tensors| {
        tensors.insert("in.loss_mask".into(), tensors["in.loss_mask"].to_dtype(DType::U8)?);
        tensors.insert("in.keep".into(), tensors["in.keep"].to_dtype(DType::F32)?);
        // The first two candidates of all slots change places.
        let swap = Tensor::new(&[1_u32, 0], &Device::Cpu)?;
        for name in ["out.candidates", "out.scores"] {
            let all = &tensors[name];
            let last = all.dim(3)? - 2;
            let head = all.narrow(3, 0, 2)?.contiguous()?.index_select(&swap, 3)?;
            tensors.insert(name.into(), Tensor::cat(&[head, all.narrow(3, 2, last)?], 3)?);
        }
        // A third row: as the first one, but no block is kept, and nothing is known of its outputs.
        for name in ["in.input_ids", "in.loss_mask", "in.features", "in.last_hidden", "in.anchors"]
        {
            let all = &tensors[name];
            tensors.insert(name.into(), Tensor::cat(&[all, &all.narrow(0, 0, 1)?], 0)?);
        }
        for name in ["in.keep", "out.hidden", "out.candidates", "out.scores", "out.walk"] {
            let all = &tensors[name];
            tensors
                .insert(name.into(), Tensor::cat(&[all, &all.narrow(0, 0, 1)?.zeros_like()?], 0)?);
        }
        Ok(())
    });
    if let Some(case) = case {
        succeed(&["parity", &case.path().display().to_string(), "--json"]);
    }
}

#[test]
fn candidates_of_other_blocks_and_features_of_other_rows_are_malformed() {
    for (cut, dimension, rest, told) in [
        // Fewer candidates than the blocks of all rows have.
        (&["out.candidates", "out.scores", "out.walk"][..], 1, 2, "are of different slots"),
        (&["in.features"], 0, 1, "anchors and features are of different rows"),
        (&["in.features"], 1, 5, "anchors and features are of different rows"),
    ] {
        let case = copy_case("block_dflash2");
        change_tensors(case.path().join("case.safetensors"), |tensors| {
            for (_, all) in tensors.iter_mut().filter(|(name, _)| cut.contains(&name.as_str())) {
                let part = all.narrow(dimension, 0, rest).and_then(|part| part.contiguous());
                *all = part.expect("a part");
            }
        });
        fail_with(&["parity", &case.path().display().to_string()], 2, &[told]);
    }
}

#[test]
fn a_block_case_of_another_window_causality_or_bias_fails() {
    for (name, key, value, code) in [
        ("block_dflash", "sliding_window", Value::from(3), 1),
        ("block_dflash", "is_causal", true.into(), 1),
        ("block_dflash", "attention_bias", false.into(), 1),
        ("block_dflash", "layer_types", serde_json::json!(["full_attention"]), 2),
        ("block_dflash2", "is_causal", Value::Null, 1),
        ("block_dflash2", "conv_kernel_size", 2.into(), 1),
        ("block_dspark", "is_causal", false.into(), 1),
        ("block_dspark", "confidence_head_with_markov", true.into(), 1),
        ("block_dspark", "target_layer_ids", serde_json::json!([-1, 0, 2, 7]), 2),
        ("block_dspark", "target_layer_ids", serde_json::json!([-2, 0, 2, 5]), 2),
    ] {
        let case = copy_case(name);
        edit_meta(case.path(), |meta| meta[key] = value.clone());
        reported(case.path(), code);
    }
}

#[test]
fn a_case_of_blocks_may_multiply_its_embeddings() {
    for name in ["block_dflash", "block_dflash2", "block_dspark"] {
        let case = copy_case(name);
        edit_tensors(case.path(), |tensors| {
            let table = tensors["in.embed"].clone();
            tensors.insert("in.embed".into(), (&table / 4.0).expect("a table"));
            tensors.entry("in.head".into()).or_insert(table);
        });
        for (scale, code) in [(Value::from(4), 0), (Value::Null, 1), ((-4).into(), 2)] {
            edit_meta(case.path(), |meta| meta["input_embedding_scale"] = scale.clone());
            let output = run(&["parity", &case.path().display().to_string(), "--json"]);
            assert_eq!(output.status.code(), Some(code), "{name} {scale}: {}", stdout(&output));
        }
    }
}

#[test]
fn a_gradient_that_nothing_here_has_is_named() {
    let case = copy_case("packed_agree");
    change_tensors(case.path().join("grads.safetensors"), |tensors| {
        tensors.push(("draft_model.riddle.weight".into(), tensors[0].1.clone()));
    });
    let report = reported(case.path(), 1);
    let checks = report["checks"].as_array().expect("checks");
    let named = |check: &&Value| {
        check["pass"] == false
            && check["name"].as_str().is_some_and(|name| name.contains("draft_model.riddle.weight"))
    };
    assert_eq!(checks.iter().filter(named).count(), 1, "{checks:?}");
}

#[test]
fn a_chain_whose_rank_nobody_says_has_none_and_is_a_chain() {
    for rank in [Value::Null, 0.into()] {
        let case = copy_case("block_dspark");
        edit_meta(case.path(), |meta| {
            meta["markov_rank"] = rank.clone();
            meta["markov_head_type"] = Value::Null;
        });
        // The file's loss is that of another head.
        let report = reported(case.path(), 1);
        let checks = report["checks"].as_array().expect("checks");
        let has = |name: &str| checks.iter().any(|check| check["name"] == name);
        assert!(has("gradient confidence_head.proj.bias"), "it ran as a draft without heads");
        assert!(!has("gradient markov_head.markov_w1.weight"), "{report}");
    }
}

#[test]
fn a_selector_without_a_hit_has_gradients_of_zeros() {
    let case = blocks_with(|tensors| {
        tensors.retain(|name, _| !name.starts_with("grad.candidate_selector."));
        // No token is learned.
        let mask = tensors["in.loss_mask"].zeros_like()?;
        tensors.insert("in.loss_mask".into(), mask);
        Ok(())
    });
    let Some(case) = case else { return };
    // The loss of the file is another one.
    let report = reported(case.path(), 1);
    let of_selector = |check: &&Value| {
        check["name"].as_str().is_some_and(|name| name.contains("gradient candidate_selector"))
    };
    let checks = report["checks"].as_array().expect("checks");
    let checks: Vec<&Value> = checks.iter().filter(of_selector).collect();
    assert_eq!(checks.len(), 3);
    assert!(
        checks.iter().all(|check| check["pass"] == true && check["error"] == 0.0),
        "{checks:?}"
    );
}
