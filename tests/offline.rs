//! Captured features: offline training equals online training, and stores survive what happens to
//! them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use candle_core::Tensor;
use longdraft_parallel::World;

use crate::support::files::{Changes, change_tensors};
use crate::support::processes::wait_until;
use crate::support::runs::{draft_bytes, metrics};
use crate::support::{
    self, Workshop, fail, fail_with, last_json, longdraft, run, stderr, succeed, succeeded, told_by,
};
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_train::config::TrainConfig;
use longdraft_train::observer::Unheard;
use longdraft_train::stage::{Capture, CaptureOptions, Ending, Reader};
use serde_json::Value;

const EAGLE3: [&str; 3] =
    ["draft.method=eagle3", "draft.target_layers=[2,0,1]", "draft.ttt_steps=3"];

/// Small shards, so that there are several.
const GLIDE: [&str; 1] = ["teacher.top_k=8"];

/// Changes the tensors of the target's file, or takes them out of it.
fn rewrite(target: &Path, change: impl Fn(&str, Tensor) -> Option<Tensor>) {
    change_tensors(target.join("model.safetensors"), |tensors| {
        let all = std::mem::take(tensors).into_iter();
        tensors
            .extend(all.filter_map(|(name, tensor)| Some((name.clone(), change(&name, tensor)?))));
    });
}

/// Takes the decoder layers out of the target's file.
fn remove_layers(target: &Path) {
    rewrite(target, |name, tensor| (!name.contains(".layers.")).then_some(tensor));
}

#[test]
fn features_of_two_precisions_are_not_mixed() {
    let shop = Workshop::new();
    let (config, features) = (shop.config(), format!("train.features={}", shop.path("store")));
    let online = ["train", &config, "train.steps=4"];
    let capture = ["capture", &config, &features];
    for command in [&online[..], &capture] {
        succeed(command);
        fail_with(&[command, &["precision=bf16"]].concat(), 1, &["precision was f32, now bf16"]);
    }
    // Training from the store takes no pass of the target, but a run keeps the precision of its heads.
    let offline = |precision: &'static str, name: &str| -> Vec<String> {
        let output = format!("output={}", shop.path(name));
        let words = ["train", &config, &features, &output, "train.steps=4", precision];
        words.map(str::to_owned).to_vec()
    };
    for (precision, name) in [("precision=f32", "offline"), ("precision=bf16", "other")] {
        let words = offline(precision, name);
        succeed(&words.iter().map(String::as_str).collect::<Vec<_>>());
    }
    let words = offline("precision=bf16", "offline");
    let text = fail(&words.iter().map(String::as_str).collect::<Vec<_>>(), 1);
    assert!(text.contains("precision was f32, now bf16"), "{text}");
}

#[test]
fn a_target_that_was_fine_tuned_in_its_place_is_another_one() {
    let shop = Workshop::new();
    let (config, target, prompts) = (shop.config(), shop.target(), shop.path("prompts.jsonl"));
    std::fs::write(&prompts, "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n").expect("prompts");
    let (features, answers) =
        (format!("train.features={}", shop.path("store")), shop.path("answers"));
    let offline = ["train", &config, &features, "train.steps=4"];
    let output = format!("output={}", shop.path("online"));
    let online = ["train", &config, &output, "train.steps=4"];
    let regenerate = ["data", "regenerate", &prompts, "--target", &target, "--output", &answers];
    let regenerate = [&regenerate[..], &["--max-tokens", "4"]].concat();
    succeed(&["capture", &config, &features]);
    for command in [&offline[..], &online, &regenerate] {
        succeed(command);
    }
    rewrite(&shop.target, |name, tensor| {
        let is_tuned = name == "model.layers.1.mlp.down_proj.weight";
        Some(if is_tuned { (tensor * 1.5).expect("a product") } else { tensor })
    });
    for command in [&offline[..], &online] {
        fail_with(command, 1, &["target was"]);
    }
    fail_with(&regenerate, 1, &["was written with"]);
    let told =
        run(&["generate", "--target", &target, "--draft", &shop.path("online"), "--prompt", "a"]);
    assert!(stderr(&told).contains("trained for another target"), "{}", stderr(&told));
}

fn shard(store: &str, index: usize) -> PathBuf {
    Path::new(store).join(format!("train-{index:05}.safetensors"))
}

#[test]
fn offline_training_equals_online_training_bit_for_bit_and_needs_no_layers() {
    let top_k = ["teacher.soft_targets=top_k", "teacher.top_k=8"];
    let specforge = ["draft.compat=specforge", "data.anchor.enabled=false"];
    let short = ["draft.draft_vocab_size=30", "draft.loss=lk_lambda"];
    let distributions = ["draft.loss=lk_alpha", "teacher.tail=renormalise"];
    let modes: [(&str, Vec<&str>); 7] = [
        ("glide", GLIDE.to_vec()),
        ("glide top-k", top_k.to_vec()),
        ("eagle3", EAGLE3.to_vec()),
        ("eagle3 vocabulary", [&EAGLE3[..], &short].concat()),
        ("eagle3 top-k", [&EAGLE3[..], &short, &top_k].concat()),
        ("eagle3 top-k alone", [&EAGLE3[..], &distributions, &top_k].concat()),
        ("eagle3 compat", [&EAGLE3[..], &specforge].concat()),
    ];
    let (shop, config) = Workshop::of_four_layers().with_config();
    // Three epochs at the positions of the first one.
    let fixed = ["data.anchor.redraw=false", "train.evaluate_every=20", "capture.dtype=f32"];
    let run_of = |index: usize, name: &str| shop.path(&format!("{name}{index}"));
    let command = |verb: &'static str, index: usize, options: &[&str], features: &str| {
        let output = format!("output={}", run_of(index, &format!("{verb}-{}", features.len())));
        let features = format!("train.features={features}");
        let all = [&[verb, &config, &output, &features], options, &fixed].concat();
        succeed(&all);
        output.replacen("output=", "", 1)
    };
    let online: Vec<String> =
        (0..modes.len()).map(|index| command("train", index, &modes[index].1, "online")).collect();
    for (index, (_, options)) in modes.iter().enumerate() {
        command("capture", index, options, &run_of(index, "features"));
    }
    remove_layers(&shop.target);
    for (index, (name, options)) in modes.iter().enumerate() {
        let offline = command("train", index, options, &run_of(index, "features"));
        assert_eq!(metrics(&online[index]), metrics(&offline), "{name}");
        assert_eq!(draft_bytes(&online[index]), draft_bytes(&offline), "{name}");
    }
    // Without its layers the target cannot run.
    let output = format!("output={}", shop.path("more"));
    fail_with(&["train", &config, &output], 2, &["`target`: ", "model.layers.0"]);
}

#[test]
fn rounded_and_compressed_features_train_nearly_the_same_and_other_seeds_use_the_store() {
    for (method, options, dtype) in
        [("glide", &GLIDE[..], "bf16"), ("eagle3", &EAGLE3, "bf16"), ("eagle3", &EAGLE3, "int8")]
    {
        let (shop, config) = Workshop::of_four_layers().with_config();
        let common = ["data.anchor.redraw=false", "train.epochs=1"];
        let common = [options, &common].concat();
        let output = format!("output={}", shop.path(&format!("{method}-online")));
        succeed(&[&["train", &config, &output], &common[..]].concat());
        let features = format!("train.features=file://{}", shop.path(&format!("{method}-store")));
        let dtype = format!("capture.dtype={dtype}");
        let options = ["capture.compression=zstd", &features, &dtype];
        let out = succeed(&[&["capture", &config, "--json"], &options[..], &common[..]].concat());
        assert_eq!(last_json(&out)["finished"], true);
        let offline = shop.path(&format!("{method}-offline"));
        let output = format!("output={offline}");
        succeed(&[&["train", &config, &output], &options[..], &common[..]].concat());
        let online = metrics(&shop.path(&format!("{method}-online")));
        for (online, offline) in online.iter().zip(metrics(&offline)) {
            let loss = |record: &Value| {
                let record =
                    if record["held_out"].is_null() { record } else { &record["held_out"] };
                record["loss"].as_f64().expect("loss")
            };
            let (a, b) = (loss(online), loss(&offline));
            assert!((a - b).abs() < 0.01 * a, "{method}: {a} and {b}");
        }
        // The positions are the store's, whatever the run's seed.
        let output = format!("output={}", shop.path(&format!("{method}-seed")));
        let seed = ["train.seed=9"];
        succeed(&[&["train", &config, &output], &options[..], &common[..], &seed].concat());
    }
}

#[test]
fn captures_killed_at_any_moment_and_shared_by_processes_end_with_the_same_bytes() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    // A row a shard.
    let common = [&EAGLE3[..], &["capture.shard_mib=1", "data.row_tokens=512"]].concat();
    let capture = |store: &str| {
        let features = format!("train.features={store}");
        let mut command = longdraft(&[&["capture", &config, &features], &common[..]].concat());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        command
    };
    let (whole, killed) = (shop.path("whole"), shop.path("killed"));
    assert!(capture(&whole).status().expect("runs").success());
    let mut kills = 0;
    loop {
        // Two at a time; both are killed.
        let mut children =
            [capture(&killed), capture(&killed)].map(|mut c| c.spawn().expect("runs"));
        let mut changes = Changes::of(&killed);
        let mut finished = false;
        wait_until("an end", || {
            finished = children.iter_mut().all(|c| c.try_wait().expect("wait").is_some());
            finished || changes.count() > kills
        });
        if finished {
            for child in children {
                let output = child.wait_with_output().expect("wait");
                let text = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "a capture that goes on failed: {text}");
            }
            break;
        }
        for child in &mut children {
            let _ = child.kill();
            child.wait().expect("reap");
        }
        kills += 1;
        assert!(kills < 300, "the capture never ends");
    }
    assert!(kills > 0, "nothing was interrupted");
    // Half files of a kill while an index or a recipe was written go when they are old: a living
    // process may be writing them. Those of shards went when the shard was taken over, those of
    // claims when the store was complete.
    let staged = |name: &str| name.contains('#');
    let claims = std::fs::read_dir(format!("{killed}/claims")).expect("claims").flatten();
    let claims: Vec<_> = claims.map(|entry| entry.file_name()).collect();
    assert!(claims.is_empty(), "claims are left: {claims:?}");
    let (whole, mut killed) = (support::files(&whole), support::files(&killed));
    killed.retain(|name, _| !staged(name) || !(name.contains("index") || name.contains("recipe")));
    let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&whole), names(&killed));
    assert!(whole == killed, "bytes differ");
}

#[test]
fn claims_of_complete_shards_go_when_the_capture_ends() {
    let shop = Workshop::of_four_layers();
    let (config, store) = (shop.config(), shop.path("store"));
    let capture = || support::noted(&["capture", &config, &format!("train.features={store}")]);
    let told = capture();
    let ends = told.lines().filter(|line| {
        let count = line.strip_prefix("captured the target's features of ");
        let count = count.and_then(|count| count.strip_suffix(" rows"));
        count.and_then(|count| count.split_once('/')).is_some_and(|(done, all)| done == all)
    });
    assert_eq!(ends.count(), 1, "{told}");
    // A process that was killed between a shard's receipt and the end of its claim.
    for number in 0..2 {
        std::fs::write(format!("{store}/claims/train-00000.{number}"), "torn").expect("write");
    }
    // One that was killed while it asked.
    std::fs::write(format!("{store}/claims/train-00001.0#1"), "").expect("write");
    std::fs::remove_file(format!("{store}/index.json")).expect("remove");
    capture();
    assert!(Path::new(&store).join("index.json").is_file());
    assert_eq!(std::fs::read_dir(format!("{store}/claims")).expect("claims").count(), 0);
}

/// Other values of a tensor.
type Change = fn(&Tensor) -> candle_core::Result<Tensor>;

#[test]
fn damaged_and_missing_shards_are_named_and_captured_again_alone() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let store = shop.path("features");
    let features = format!("train.features={store}");
    let train = ["train", &config, &features, "train.steps=6", "train.rows_per_step=8"];
    fail_with(&train, 2, &["no such folder", "longdraft capture"]);
    succeed(&["capture", &config, &features]);
    let before = support::files(&store);
    let path = shard(&store, 0);
    let bytes = std::fs::read(&path).expect("shard");
    let mut flipped = bytes.clone();
    let middle = bytes.len() / 2;
    flipped[middle] ^= 1;
    let damages: [(&str, Option<&[u8]>); 4] = [
        ("is damaged", Some(&flipped)),
        ("is damaged", Some(&bytes[..middle])),
        ("is damaged", Some(b"")),
        ("is missing", None),
    ];
    for (index, (problem, damage)) in damages.into_iter().enumerate() {
        match damage {
            Some(bytes) => std::fs::write(&path, bytes).expect("write"),
            None => std::fs::remove_file(&path).expect("remove"),
        }
        let output = format!("output={}", shop.path(&format!("run{index}")));
        fail_with(&[&train[..], &[&output]].concat(), 1, &["train-00000.safetensors", problem]);
        let untouched = shard(&store, 0).with_file_name("held_out-00000.safetensors");
        let time = |path: &Path| path.metadata().and_then(|data| data.modified()).expect("time");
        let held_out = time(&untouched);
        let output = succeeded(run(&["capture", &config, &features]));
        assert!(stderr(&output).contains("captured again"), "{}", stderr(&output));
        assert_eq!(held_out, time(&untouched), "a whole shard was captured again");
        assert!(support::files(&store) == before, "another content");
    }
    succeed(&train);
    // A name that leads out of the store.
    let index = Path::new(&store).join("index.json");
    let text = std::fs::read_to_string(&index).expect("index");
    let other = text.replace("train-00000.safetensors", "../train-00000.safetensors");
    std::fs::write(&index, other).expect("write");
    fail_with(&train, 2, &["is not a file of this store"]);
    std::fs::write(&index, text).expect("write");
    // A whole receipt, but of no row of the shard.
    let receipt = Path::new(&store).join("train-00000.json");
    let mut told: Value =
        serde_json::from_slice(&std::fs::read(&receipt).expect("receipt")).expect("JSON");
    told["rows"] = Value::Array(Vec::new());
    std::fs::write(&receipt, told.to_string()).expect("write");
    let output = succeeded(run(&["capture", &config, &features]));
    assert!(
        stderr(&output).contains("train-00000.json is of another shard"),
        "{}",
        stderr(&output)
    );
    assert!(support::files(&store) == before, "another content");
    // Receipts and indexes that make no sense.
    for file in ["index.json", "recipe.json"] {
        let path = Path::new(&store).join(file);
        let bytes = std::fs::read(&path).expect("file");
        std::fs::write(&path, &bytes[..bytes.len() / 2]).expect("write");
        // What `train` opens is tried before its work.
        let (command, code) = if file == "index.json" { ("train", 2) } else { ("capture", 1) };
        fail_with(&[command, &config, &features], code, &[file]);
        std::fs::write(&path, bytes).expect("write");
    }
    // Values that no capture keeps and shapes of another target, in a shard whose hash is right.
    let path = shard(&store, 0);
    let whole = std::fs::read(&path).expect("shard");
    let changes: [(Change, &str); 2] = [
        (|values| values.affine(f64::NAN, 0.0), "not finite numbers"),
        (|values| values.transpose(1, 2)?.contiguous(), "`values` is ["),
    ];
    for (number, (change, problem)) in changes.into_iter().enumerate() {
        std::fs::write(&path, &whole).expect("write");
        change_tensors(&path, |tensors| {
            let values = tensors.iter_mut().filter(|(name, _)| name.ends_with(".values"));
            values.for_each(|(_, tensor)| *tensor = change(tensor).expect("changed"));
        });
        let bytes = std::fs::read(&path).expect("shard");
        let mut told: Value =
            serde_json::from_slice(&std::fs::read(&index).expect("index")).expect("JSON");
        told["train"][0]["bytes"] = bytes.len().into();
        told["train"][0]["blake3"] = blake3::hash(&bytes).to_hex().to_string().into();
        std::fs::write(&index, told.to_string()).expect("write");
        let output = format!("output={}", shop.path(&format!("unknown{number}")));
        let words = ["train-00000.safetensors", problem, "`longdraft capture` again"];
        fail_with(&[&train[..], &[&output]].concat(), 1, &words);
    }
}

#[test]
fn drafts_are_judged_from_a_store_as_they_are_online() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let (features, run) = (shop.path("features"), shop.path("run"));
    let stored = format!("train.features={features}");
    let common = [
        "teacher.soft_targets=top_k",
        "teacher.top_k=8",
        "capture.dtype=f32",
        "data.anchor.enabled=false",
    ];
    succeed(&[&["capture", &config, &stored][..], &common].concat());
    succeed(&[&["train", &config, &stored, &format!("output={run}")][..], &common].concat());
    let judge = ["eval", "held-out", &config, "--draft", &run, "--contexts", "16,64,128", "--json"];
    let figures = |place: &str| last_json(&succeed(&[&judge[..], &common, &[place]].concat()));
    let found = figures(&stored);
    assert_eq!(found, figures("train.features=online"));
    // Every token stands at one of the contexts.
    let of = |part: &Value| {
        let draft = &part["drafts"][0];
        let rates = draft["top1_by_delay"].as_array().expect("a rate a delay").iter();
        let rates: f64 = rates.filter_map(Value::as_f64).sum();
        let rows = draft["rows"].as_u64().expect("rows");
        (rows, rows as f64 * rates)
    };
    let parts: Vec<_> = found["by_context"].as_array().expect("contexts").iter().map(of).collect();
    let (rows, right) = of(&found);
    assert!(parts.iter().all(|(rows, _)| *rows > 0));
    assert_eq!(rows, parts.iter().map(|(rows, _)| rows).sum::<u64>());
    assert!((right - parts.iter().map(|(_, right)| right).sum::<f64>()).abs() < 1e-6);
    // Its own text has to be the one that was captured.
    let said = fail(&[&judge[..], &common, &[&stored, "data.held_out_rows=1"]].concat(), 1);
    assert!(said.contains("held-out text was"), "{said}");
}

#[test]
fn stores_of_another_target_text_or_objective_are_refused() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let features = format!("train.features={}", shop.path("features"));
    let common = [&EAGLE3[..], &[&features]].concat();
    let capture = [&["capture", &config], &common[..]].concat();
    let train = [&["train", &config], &common[..]].concat();
    succeed(&capture);
    for (option, part) in [
        ("data.row_tokens=64", "training text was"),
        ("draft.target_layers=[0,1,3]", "; needed are layers 0, 1, 3 + "),
        ("draft.target_layers=[0,1,3]", "train features are layers "),
        ("draft.mask_rule=input", "the teacher of token"),
    ] {
        fail_with(&[&train[..], &[option]].concat(), 1, &[part]);
    }
    let words = ["dtype was bf16, now f32", "train.seed was 0, now 3"];
    fail_with(&[&capture[..], &["capture.dtype=f32", "train.seed=3"]].concat(), 1, &words);
    fail_with(&["capture", &config], 2, &["train.features"]);
    // Other weights of the same shape.
    let mut other = support::tiny_config("llama");
    other["num_hidden_layers"] = 4.into();
    other["hidden_size"] = 64.into();
    other["rope_theta"] = 500.0.into();
    support::write_target(&shop.target, &other);
    for command in [&capture, &train] {
        fail_with(command, 1, &["target was"]);
    }
}

#[test]
fn sizes_are_told_before_and_a_full_disk_leaves_nothing_half_written() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let store = shop.path("features");
    let features = format!("train.features={store}");
    let output = run(&["capture", &config, &features, "--dry-run"]);
    let text = stderr(&output);
    assert!(output.status.success() && text.contains("bytes a token"), "{text}");
    assert!(support::files(&store).is_empty());
    // Files may not grow beyond 64 KiB.
    let binary = env!("CARGO_BIN_EXE_longdraft");
    let script = format!(
        "trap '' XFSZ; ulimit -f 64; exec {binary} capture {config} {features} --threads 1"
    );
    let text = told_by(&Command::new("bash").args(["-c", &script]).output().expect("bash"), 1);
    assert!(text.contains("train-00000.safetensors") && !text.contains("panicked"), "{text}");
    assert!(
        support::files(&store).keys().all(|name| name == "recipe.json"),
        "{:?}",
        support::files(&store).keys()
    );
    let out = last_json(&succeed(&["capture", &config, &features, "--json"]));
    let told = out["bytes"].as_u64().expect("bytes") as f64;
    let shards =
        support::files(&store).into_iter().filter(|(name, _)| name.ends_with(".safetensors"));
    let written: usize = shards.map(|(_, bytes)| bytes.len()).sum();
    assert!((told / written as f64 - 1.0).abs() < 0.05, "{told} told, {written} written");
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let shop = Workshop::of_four_layers();
    let store = shop.path("store");
    let config = serde_json::json!({
        "target": shop.target(), "output": shop.path("run"),
        "data": {
            "train": [{"path": shop.path("rows.jsonl")}], "held_out_rows": 2, "row_tokens": 128
        },
        "train": {"features": store}, "teacher": {"soft_targets": "top_k", "top_k": 8}
    });
    let config: TrainConfig = serde_json::from_value(config).expect("a configuration");
    let target = Target::open(&config.target, &TargetOptions::default()).expect("target");
    let tokenizer = Target::open_tokenizer(&config.target).expect("tokenizer");
    let target = Arc::new(target);
    let capture = |free_bytes| {
        let options = CaptureOptions { free_bytes: Some(free_bytes), ..Default::default() };
        let world = World::single();
        let reader = Reader { name: "the configuration", config: &config };
        Capture::prepare(&[reader], Arc::clone(&target), &tokenizer, &options, &world, &mut Unheard)
            .expect("a plan")
    };
    let estimate = capture(u64::MAX).estimate();
    assert!(estimate.bytes > 0 && estimate.bytes == estimate.bytes_left);
    assert!(
        (estimate.bytes_per_token() * estimate.tokens as f64 - estimate.bytes as f64).abs() < 1.0
    );
    let short = capture(estimate.bytes - 1);
    assert_eq!(short.estimate().free, Some(estimate.bytes - 1));
    let refusal = short.run(&mut Unheard).expect_err("too little space").to_string();
    let figures = format!(
        "{} bytes are still to be written, {} are free",
        estimate.bytes,
        estimate.bytes - 1
    );
    assert!(refusal.contains(&figures) && refusal.contains(&store), "{refusal}");
    assert!(support::files(&store).is_empty(), "nothing was written");
    assert_eq!(capture(estimate.bytes).run(&mut Unheard).expect("fits"), Ending::Finished);
    let shards =
        support::files(&store).into_iter().filter(|(name, _)| name.contains(".safetensors"));
    let written: u64 = shards.map(|(_, bytes)| bytes.len() as u64).sum();
    assert!(written > 0 && written <= estimate.bytes, "{written} of {}", estimate.bytes);
    // What is there already needs no space.
    assert_eq!(capture(0).estimate().bytes_left, 0);
    assert_eq!(capture(0).run(&mut Unheard).expect("complete"), Ending::Finished);
}
