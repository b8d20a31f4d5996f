//! Several ranks through the binary, started by `mpirun` on this machine: the same losses as one
//! process, sharded state, a shared store; how jobs end, and ranks that share layers.

mod ends;
mod layers;

use std::path::Path;
use std::process::Output;

use crate::support::ranks::{assert_same_numbers, checkpoint, joined};
use crate::support::runs::{draft_bytes, metrics, metrics_with_clocks};
use crate::support::{
    self, Workshop, last_json, mpirun, require_words, session_folder, stderr, stdout, succeed,
    told_by,
};
use longdraft_data::token_stream::write_shard;
use serde_json::Value;

const EAGLE3: [&str; 3] =
    ["draft.method=eagle3", "draft.target_layers=[2,0,1]", "draft.ttt_steps=3"];

const DFLASH: [&str; 5] = [
    "draft.method=dflash",
    "draft.layers=2",
    "draft.target_layers=[0,2]",
    "draft.block_size=4",
    "draft.tokens_per_block=3",
];

const MUON: [&str; 1] = ["optimizer.matrices=muon"];

#[track_caller]
fn succeed_on(ranks: usize, arguments: &[&str]) -> Output {
    let output = mpirun(ranks, arguments).output().expect("mpirun starts");
    // Only if no other job of this process is there.
    let _ = std::fs::remove_dir(session_folder());
    assert!(output.status.success(), "{ranks} ranks, {arguments:?}: {}", stderr(&output));
    output
}

#[test]
fn mpi_ranks_train_a_glide_draft_like_one_process() {
    let shop = Workshop::of_four_layers();
    // Five rows a step: two ranks and four get different numbers of them.
    let train = |ranks: usize, more: &[&str]| {
        let run = shop.path(&format!("glide-{ranks}-{}", more.len()));
        let (config, output) = (shop.config(), format!("output={run}"));
        let mut arguments = vec!["train", &config, &output, "train.rows_per_step=5", "--json"];
        arguments.extend(["train.steps=6", "train.target_loss_every=3", "train.evaluate_every=3"]);
        arguments.extend(more);
        (succeed_on(ranks, &arguments), run)
    };
    let plain = shop.path("plain");
    let (config, output) = (shop.config(), format!("output={plain}"));
    let arguments = ["train", &config, &output, "train.rows_per_step=5", "train.steps=6"];
    let more = ["train.target_loss_every=3", "train.evaluate_every=3"];
    succeed(&joined(&[&arguments, &more]));
    let want = metrics(&plain);
    for ranks in [1, 2, 4] {
        let (output, run) = train(ranks, &[]);
        assert_same_numbers(&want, &metrics(&run));
        assert_eq!(last_json(&stdout(&output))["steps"], 6);
        assert_eq!(stdout(&output).lines().count(), 1, "one rank answers: {}", stdout(&output));
        if ranks == 1 {
            assert_eq!(draft_bytes(&plain), draft_bytes(&run));
            continue;
        }
        let shown = stderr(&output);
        assert!(shown.contains(&format!("{ranks} ranks on 1 host: ")), "{shown}");
        assert_eq!(shown.matches("draft of ").count(), 1, "{shown}");
        for rank in 0..ranks {
            let path = format!("{run}/logs/rank-{rank}.log");
            let log = std::fs::read_to_string(&path).expect("a log a rank");
            require_words(&log, &[&format!("rank {rank} of {ranks} on "), "step 6/6"]);
        }
        let files = std::fs::read_dir(&run).expect("run").flatten();
        let events = files.filter(|f| f.file_name().to_string_lossy().starts_with("events."));
        assert_eq!(events.count(), 1, "trackers hear of one rank");
    }
    // Small buckets and the library's own order.
    let more = ["parallel.bucket_bytes=1024", "parallel.reduction=library"];
    assert_same_numbers(&want, &metrics(&train(2, &more).1));
    // More ranks than rows: some only help to reduce.
    let (output, _) = train(4, &["train.rows_per_step=2"]);
    assert!(stderr(&output).contains("2 rows a step for 4 ranks: 2 of them idle"));
}

#[test]
fn mpi_ranks_train_an_eagle3_draft_like_one_process() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    for (name, more) in [
        ("online", &["train.rows_per_step=4"][..]),
        ("memory", &["train.rows_per_step=4", "train.features=memory", "parallel.zero=1"]),
        // Each row divided by its own tokens and the number of all rows.
        (
            "compat",
            &["draft.compat=specforge", "data.anchor.enabled=false", "train.rows_per_step=3"],
        ),
    ] {
        let train = |ranks: usize| {
            let run = shop.path(&format!("{name}-{ranks}"));
            let output = format!("output={run}");
            let mut arguments = vec!["train", &config, &output, "train.steps=8"];
            arguments.extend(EAGLE3);
            arguments.extend(more);
            succeed_on(ranks, &arguments);
            metrics(&run)
        };
        let one = train(1);
        assert_same_numbers(&one, &train(2));
        assert_same_numbers(&one, &train(4));
    }
}

#[test]
fn mpi_ranks_train_block_drafts_like_one_process() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let set = ["train.steps=5", "train.rows_per_step=3", "train.evaluate_every=5"];
    let selector = ["draft.method=dflash2", "draft.selector_rank=6", "draft.selector_top_k=4"];
    let chain = ["draft.method=dspark", "draft.markov_rank=6"];
    for (name, more) in [
        ("dflash", &[][..]),
        ("dpace", &["draft.slot_weights=dpace"]),
        ("soft", &["draft.soft_weight=0.8", "teacher.soft_targets=top_k", "teacher.top_k=4"]),
        ("dflash2", &selector),
        ("dspark", &chain),
    ] {
        let train = |ranks: usize, zero: &str| {
            let run = shop.path(&format!("{name}-{ranks}-{zero}"));
            let (output, zero) = (format!("output={run}"), format!("parallel.zero={zero}"));
            let command = ["train", &config, &output, &zero];
            succeed_on(ranks, &joined(&[&command, &set, &DFLASH, more]));
            metrics(&run)
        };
        let one = train(1, "0");
        assert!(one.iter().any(|record| !record["held_out"].is_null()), "{name}");
        for zero in ["1", "3"] {
            let two = train(2, zero);
            assert_same_numbers(&one, &two);
            let lengths = |run: &[Value]| -> Vec<Value> {
                let held_out = run.iter().map(|record| &record["held_out"]);
                held_out.map(|of| of["replayed_acceptance_length"].clone()).collect()
            };
            assert_eq!(lengths(&one), lengths(&two), "{name}, ZeRO-{zero}");
        }
    }
}

#[test]
fn mpi_ranks_pretrain_like_one_process() {
    let dir = tempfile::tempdir().expect("folder");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let tokens: Vec<u16> = (0..4000_u32).map(|i| (i * i % 97 + i % 3 + 1) as u16).collect();
    write_shard(Path::new(&path("train.bin")), &tokens).expect("shard");
    let text = format!(
        "output: {}\nmodel: {{vocab_size: 100, num_hidden_layers: 2, hidden_size: 16, \
         num_attention_heads: 2, num_key_value_heads: 1}}\ndata: {{train: [{}], row_tokens: 32}}\nschedule: {{warmdown_steps: 3}}\n\
         train: {{steps: 6, tokens_per_step: 192, micro_batch_tokens: 96, \
         ema_share: 0.5}}\noptimizer: {{clip_norm: 0.3}}\n",
        path("unused"),
        path("train.bin")
    );
    std::fs::write(path("pretrain.yaml"), text).expect("config");
    for more in ["data.loader=sequential", "data.loader=shuffled", "data.document_mask=true"] {
        let run = |ranks: usize| {
            let run = path(&format!("{more}-{ranks}"));
            let (config, output) = (path("pretrain.yaml"), format!("output={run}"));
            succeed_on(ranks, &["lm", "train", &config, &output, more]);
            assert!(Path::new(&run).join("model.ldq").is_file());
            run
        };
        let one = metrics(&run(1));
        for ranks in [2, 4] {
            let run = run(ranks);
            assert_same_numbers(&one, &metrics(&run));
            // Muon's state lies with the ranks that update its matrices.
            let last = checkpoint(&run);
            for rank in 1..=ranks {
                let file = format!("optimizer-{rank:05}-of-{ranks:05}.safetensors");
                assert!(last.join(&file).is_file(), "no {file}");
            }
        }
    }
}

/// The target runs over the next row while gradients are summed; epochs end within the run.
#[test]
fn mpi_overlap_of_sums_and_target_changes_no_bit() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let more = ["train.steps=7", "train.evaluate_every=3", "train.target_loss_every=2"];
    for (name, method) in [("glide", &[][..]), ("eagle3", &EAGLE3)] {
        let train = |overlap: bool, rows: usize| {
            let run = shop.path(&format!("{name}-{overlap}-{rows}"));
            let (output, overlap) =
                (format!("output={run}"), format!("parallel.overlap={overlap}"));
            let rows = format!("train.rows_per_step={rows}");
            let command = ["train", &config, &output, &overlap, &rows];
            succeed_on(2, &joined(&[&command, &more, method]));
            run
        };
        for rows in [2, 5] {
            let (apart, beside) = (train(false, rows), train(true, rows));
            assert_eq!(metrics(&apart), metrics(&beside), "{name}, {rows} rows");
            assert_eq!(draft_bytes(&apart), draft_bytes(&beside), "{name}, {rows} rows");
        }
    }
}

#[test]
fn zero_1_equals_unsharded_ranks_bit_for_bit() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let train = |zero: u8, ranks: usize| {
        let run = shop.path(&format!("zero-{zero}-{ranks}"));
        let (output, zero) = (format!("output={run}"), format!("parallel.zero={zero}"));
        succeed_on(ranks, &["train", &config, &output, &zero, "train.steps=6"]);
        run
    };
    for ranks in [2, 4] {
        let (plain, sharded) = (train(0, ranks), train(1, ranks));
        assert_eq!(metrics(&plain), metrics(&sharded));
        assert_eq!(draft_bytes(&plain), draft_bytes(&sharded));
        assert!(checkpoint(&plain).join("optimizer.safetensors").is_file());
        assert!(!checkpoint(&sharded).join("optimizer.safetensors").exists());
        let bytes = |run: &str| -> u64 {
            let files = std::fs::read_dir(checkpoint(run)).expect("checkpoint").flatten();
            let parts = files.filter(|f| f.file_name().to_string_lossy().starts_with("optimizer"));
            parts.map(|f| f.metadata().expect("size").len()).max().expect("a file")
        };
        assert!(bytes(&sharded) < bytes(&plain), "every rank keeps everything");
        // One draft comes out of all shards.
        let extracted = last_json(&succeed(&["extract", &sharded, "--json"]));
        assert_eq!(extracted["tensors"], 16);
    }
}

#[test]
fn zero_3_equals_unsharded_ranks_bit_for_bit() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let stop = ["train.steps=4", "train.evaluate_every=4", "train.target_loss_every=2"];
    let memory = ["train.features=memory", "teacher.soft_targets=top_k"];
    // Three rows on two ranks, one on three: some ranks have fewer than others, or none.
    for (name, ranks, rows, more) in [
        ("glide", 2, 3, &[][..]),
        ("glide", 3, 1, &[]),
        ("memory", 2, 3, &memory),
        ("eagle3", 3, 2, &EAGLE3),
        ("dflash", 2, 3, &joined(&[&DFLASH, &["draft.slot_weights=dpace"]])),
        ("muon", 2, 2, &MUON),
    ] {
        let rows = format!("train.rows_per_step={rows}");
        let train = |zero: u8| {
            let run = shop.path(&format!("{name}-{ranks}-{zero}"));
            let (output, zero) = (format!("output={run}"), format!("parallel.zero={zero}"));
            let command = ["train", &config, &output, &zero, &rows];
            succeed_on(ranks, &joined(&[&command, &stop, more]));
            run
        };
        let (plain, spread) = (train(0), train(3));
        assert!(metrics(&plain).iter().any(|record| !record["held_out"].is_null()));
        assert_eq!(metrics(&plain), metrics(&spread), "{name}");
        assert_eq!(draft_bytes(&plain), draft_bytes(&spread), "{name}");
        // The draft of a checkpoint is whole.
        assert!(last_json(&succeed(&["extract", &spread, "--json"]))["tensors"].is_number());
    }
    // One process has nothing to spread; pretraining has no target.
    succeed(&["train", &config, "parallel.zero=3", "train.steps=1"]);
}

/// Peak memory of the first rank in MiB, as its last record tells.
fn memory_mib(run: &str) -> f64 {
    let records = metrics_with_clocks(run);
    records.iter().filter_map(|record| record["memory_mib"].as_f64()).next_back().expect("a number")
}

/// A target that is made of its layers, 77 MiB.
fn target_of_many_layers() -> Workshop {
    let shop = Workshop::new();
    let mut target = support::tiny_config("llama");
    for (key, value) in
        [("num_hidden_layers", 48), ("hidden_size", 256), ("intermediate_size", 512)]
    {
        target[key] = value.into();
    }
    support::write_target(&shop.target, &target);
    shop
}

#[test]
fn zero_3_rank_holds_its_share_of_the_target() {
    let shop = target_of_many_layers();
    let weights = std::fs::metadata(shop.target.join("model.safetensors")).expect("file").len();
    let (config, set) = (shop.config(), ["train.steps=1", "train.log_every=1"]);
    let peak = |zero: u8, ranks: usize| {
        let run = shop.path(&format!("{zero}-{ranks}"));
        let (output, zero) = (format!("output={run}"), format!("parallel.zero={zero}"));
        succeed_on(ranks, &joined(&[&["train", &config, &output, &zero], &set]));
        memory_mib(&run)
    };
    let (weights, layer) = (weights as f64 / 1_048_576.0, weights as f64 / 1_048_576.0 / 48.0);
    for ranks in [2, 3] {
        let (whole, spread) = (peak(1, ranks), peak(3, ranks));
        let saved = weights * (1.0 - 1.0 / ranks as f64);
        eprintln!("{ranks} ranks: {weights:.0} MiB of weights, {whole:.0} MiB, {spread:.0} MiB");
        // Two layers, the draft while it is whole, and what the allocator keeps.
        assert!(spread < whole - saved + 8.0 * layer, "{spread} {whole}, {weights} of weights");
    }
}

/// Peak memory of the first rank over a row of `tokens`, one long document.
fn memory_of_a_row(method: &[&str], tokens: usize, ranks: usize) -> f64 {
    let shop = Workshop::new();
    let mut target = support::tiny_config("llama");
    for (key, value) in [
        ("hidden_size", 256),
        ("intermediate_size", 1024),
        ("num_hidden_layers", 4),
        ("max_position_embeddings", 65536),
    ] {
        target[key] = value.into();
    }
    support::write_target(&shop.target, &target);
    let text = "the cat sat on the mat. ".repeat(tokens / 24 + 1);
    let row = serde_json::json!({ "text": text }).to_string();
    shop.write("long.jsonl", format!("{row}\n"));
    let (config, run) = (shop.config(), shop.path("run"));
    let set = [
        format!("output={run}"),
        format!("data.row_tokens={tokens}"),
        format!("data.train=[{{path: {}}}]", shop.path("long.jsonl")),
        "data.held_out_rows=0".to_owned(),
        format!("parallel.sequence={ranks}"),
    ];
    let mut arguments = vec!["train", &config, "train.steps=1", "train.rows_per_step=1"];
    arguments.extend(set.iter().map(String::as_str));
    arguments.extend(method);
    succeed_on(ranks, &arguments);
    memory_mib(&run)
}

#[test]
fn mpi_ranks_that_share_a_row_hold_their_part_of_its_states() {
    let blocks = joined(&[&DFLASH, &["draft.tokens_per_block=8"]]);
    // A block draft holds less of a row: what the allocator keeps is small beside a longer one alone.
    for (method, tokens) in [(&[][..], 4096), (&EAGLE3, 4096), (&blocks, 12288)] {
        let base = memory_of_a_row(method, 256, 1);
        let of_row = |ranks| memory_of_a_row(method, tokens, ranks) - base;
        let (whole, part) = (of_row(1), of_row(4));
        eprintln!("{base:.0} MiB, {whole:.0} MiB for the row, {part:.0} MiB for a part of four");
        assert!(part < 0.4 * whole, "{part} {whole}");
    }
}

#[test]
fn mpi_ranks_that_share_rows_train_like_one_process() {
    let mixed = joined(&[&EAGLE3, &["draft.loss=lk_lambda"]]);
    // One group of two, two groups of two, one of four whose target is spread over all.
    let groups = [
        (2, &["parallel.sequence=2"][..]),
        (4, &["parallel.sequence=2"]),
        (4, &["parallel.sequence=4", "parallel.zero=3"]),
    ];
    let weighed = joined(&[&DFLASH, &["draft.slot_weights=dpace"]]);
    let soft = joined(&[&DFLASH, &["draft.soft_weight=0.8"]]);
    let selector = joined(&[&DFLASH, &["draft.method=dflash2", "draft.selector_top_k=4"]]);
    let chain = joined(&[&DFLASH, &["draft.method=dspark", "draft.markov_head=rnn"]]);
    for method in [&[][..], &EAGLE3, &mixed, &DFLASH, &weighed, &soft, &selector, &chain] {
        groups_train_like_one_process(method, &groups);
    }
    let (_shop, config) = Workshop::of_four_layers().with_config();
    let compat = ["draft.compat=specforge", "data.anchor.enabled=false"];
    for (ranks, more, problem) in [
        (3, vec!["parallel.sequence=2"], "does not divide the 3 ranks"),
        (
            2,
            joined(&[&["parallel.sequence=2"], &EAGLE3, &compat]),
            "`draft.compat` divides every batch by its own rows",
        ),
    ] {
        let mut refused = mpirun(ranks, &joined(&[&["train", &config], &more]));
        let text = told_by(&refused.output().expect("mpirun starts"), 2);
        assert!(text.contains(problem), "{text}");
    }
}

#[track_caller]
fn groups_train_like_one_process(method: &[&str], groups: &[(usize, &[&str])]) {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let set = ["train.steps=5", "train.rows_per_step=3", "train.evaluate_every=5"];
    // Rounded factors share scales along a row, which ranks cut elsewhere.
    let set = joined(&[&set, &["train.target_loss_every=5", "products=f32"]]);
    let train = |ranks: usize, more: &[&str]| {
        let run = shop.path(&format!("{ranks}-{}", more.len()));
        let output = format!("output={run}");
        succeed_on(ranks, &joined(&[&["train", &config, &output], &set, method, more]));
        run
    };
    let one = metrics(&train(1, &[]));
    for (ranks, more) in groups {
        let shared = metrics(&train(*ranks, more));
        assert_same_numbers(&one, &shared);
        for keys in [["held_out", "loss"], ["target_loss", ""]] {
            let number = |run: &[Value]| {
                let of = |record: &Value| {
                    let value = &record[keys[0]];
                    value.get(keys[1]).unwrap_or(value).as_f64()
                };
                run.iter().find_map(of).expect("a number")
            };
            let (a, b) = (number(&one), number(&shared));
            assert!((a - b).abs() <= 1e-5 * a, "{keys:?}: {a} {b}");
        }
    }
}

#[test]
fn mpi_ranks_run_the_stages_of_a_curriculum() {
    let shop = Workshop::new();
    let text = std::fs::read_to_string(&shop.config).expect("config");
    let stages = "stages:\n- name: base\n- name: answers\n  start_from: best\n  \
                  data: {row_tokens: 256}\n  parallel: {zero: 1}\n";
    let text = text.replace("epochs: 3", "steps: 4\n  evaluate_every: 2\n  keep_best: true");
    let config = shop.write("curriculum.yaml", format!("{text}{stages}"));
    let train = |ranks: usize, more: &[&str]| {
        let run = shop.path(&format!("run-{ranks}-{}", more.len()));
        let output = format!("output={run}");
        let out = succeed_on(ranks, &joined(&[&["train", &config, &output, "--json"], more]));
        let out = last_json(&stdout(&out));
        assert_eq!(
            (&out["finished"], out["held_out"]["stages"][1].as_str()),
            (&true.into(), Some("answers"))
        );
        assert!(Path::new(&run).join("report.html").is_file());
        ["base", "answers"].map(|stage| metrics(&format!("{run}/{stage}")))
    };
    let one = train(1, &[]);
    for more in [&[][..], &["parallel.tensor=2"]] {
        let two = train(2, more);
        one.iter().zip(&two).for_each(|(one, two)| assert_same_numbers(one, two));
    }
}

#[test]
fn mpi_ranks_share_out_the_matrices_of_muon() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let set = ["train.steps=6", "train.save_every=3", "optimizer.matrices=muon"];
    let run = |ranks: usize, run: &str| {
        let output = format!("output={run}");
        succeed_on(ranks, &joined(&[&["train", &config, &output], &set]));
    };
    let (one, two) = (shop.path("one"), shop.path("two"));
    run(1, &one);
    run(2, &two);
    assert_same_numbers(&metrics(&one), &metrics(&two));
}

#[test]
fn mpi_ranks_capture_one_store_without_overlap() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let (one, shared) = (shop.path("one"), shop.path("shared"));
    // A store's bytes do not depend on who wrote its shards.
    let place = |store: &str| format!("train.features={store}");
    let set = joined(&[&EAGLE3, &["capture.shard_mib=1", "data.row_tokens=512"]]);
    succeed(&joined(&[&["capture", &config, &place(&one)], &set]));
    let (shared_place, command) = (place(&shared), ["capture", &config]);
    let arguments = joined(&[&command, &[&shared_place], &set]);
    let output = succeed_on(3, &arguments);
    assert_eq!(stdout(&output).lines().count(), 1, "one rank answers: {}", stdout(&output));
    assert_eq!(support::files(&one), support::files(&shared));
    assert!(support::files(&one).keys().filter(|name| name.starts_with("train-")).count() > 1);
    let more = ["train.steps=3", "parallel.zero=1"];
    succeed_on(2, &joined(&[&["train", &config, &shared_place], &set, &more]));
}
