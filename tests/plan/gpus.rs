//! Plans for GPUs.

use std::collections::BTreeMap;

use super::*;

/// A GPU that is not here: its memory and the host's apart, its speed unknown.
#[test]
fn a_plan_for_a_gpu_tells_its_memory_from_the_hosts() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    let base = ["train", &config, "--plan", "device=cuda:0"];
    let text = succeed(&[&base[..], &["--memory", "8"]].concat());
    assert!(text.contains("the GPU's memory at most, in the "), "{text}");
    assert!(text.contains("beside it, of main memory at most: "), "{text}");
    assert!(
        text.contains("--gflops or --gpu tells its time") && text.contains("fits: 8.0 GiB"),
        "{text}"
    );
    let plan = |more: &[&str]| {
        let text = succeed(&[&base[..], &["--json"], more].concat());
        last_json(&text)["stages"][0].clone()
    };
    let items = |plan: &Value, name: &str| -> Vec<Value> {
        let phases = plan["phases"].as_array().expect("phases").iter();
        let items = phases.flat_map(|phase| phase["items"].as_array().expect("items").clone());
        items.filter(|item| item["name"] == name).collect()
    };
    let place = |plan: &Value, name: &str| {
        let items = items(plan, name);
        assert!(!items.is_empty(), "{name} in {plan}");
        assert!(items.iter().all(|item| item["place"] == items[0]["place"]));
        items[0]["place"].as_str().expect("a place").to_owned()
    };
    let one = plan(&[]);
    assert_eq!(one["place"], "accelerator");
    assert!(one["seconds_per_step"].is_null() && one["free_bytes"].is_null(), "{one}");
    for (name, expected) in [
        ("program", "host"),
        ("copies of tensors", "host"),
        ("target weights", "accelerator"),
        ("activations", "accelerator"),
        ("optimizer state", "accelerator"),
    ] {
        assert_eq!(place(&one, name), expected, "{name}");
    }
    // 16 bits on a GPU unless told otherwise.
    let bytes = |plan: &Value, name: &str| items(plan, name)[0]["bytes"].as_u64().expect("bytes");
    let whole = plan(&["precision=f32"]);
    // Norms stay in f32.
    let (half, single) = (2 * bytes(&one, "target weights"), bytes(&whole, "target weights"));
    assert!(half >= single && half - single < single / 100, "{half} {single}");
    // So are the states of the frozen target and its cache, but not the stream nor the last keys.
    let (half, single) = (bytes(&one, "target forward"), bytes(&whole, "target forward"));
    assert!(half < single && 2 * half > single, "{half} {single}");
    let cache = |plan: &Value| plan["cache_bytes"].as_u64().expect("bytes");
    assert_eq!(2 * cache(&one), cache(&whole));
    // Beside quantised blocks decoding caches 16 bits, however training holds the weights.
    let blocks = format!("target={}", demonstration());
    let [half, single] = ["precision=bf16", "precision=f32"]
        .map(|precision| cache(&plan(&["data.row_tokens=64", &blocks, precision])));
    assert_eq!(half, single);
    for host in
        [&["optimizer.matrices=muon"][..], &["--ranks", "2"], &["parallel.optimizer_state=file"]]
    {
        let plan = plan(host);
        assert_eq!(place(&plan, "gradients and new weights"), "host", "{host:?}");
    }
    let of_nccl = ["--ranks", "2", "parallel.reduction=library"];
    for spread in ["parallel.zero=0", "parallel.zero=1", "parallel.zero=3"] {
        let nccl = plan(&[&of_nccl[..], &[spread]].concat());
        for item in ["optimizer state", "gradients and new weights"] {
            assert_eq!(place(&nccl, item), "accelerator", "{spread}");
        }
    }
    // The phase's sum is that of its accelerator's terms.
    let phase = &one["phases"][0];
    let of_gpu = phase["items"].as_array().expect("items").iter();
    let of_gpu = of_gpu.filter(|item| item["place"] == "accelerator");
    let sum: u64 = of_gpu.map(|item| item["bytes"].as_u64().expect("bytes")).sum();
    assert_eq!(phase["bytes"].as_u64(), Some(sum));
    // The CPU's plan knows one memory.
    let text = succeed(&["train", &config, "--plan", "device=cpu", "--json", "--gflops", "10"]);
    let cpu = last_json(&text)["stages"][0].clone();
    assert_eq!((cpu["place"].as_str(), &cpu["host_bytes"]), (Some("host"), &cpu["bytes"]));
}

/// GPUs that are asked for are planned for, on machines that have none, too.
#[test]
fn a_plan_with_gpus_is_of_gpus_wherever_it_is_made() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    let place = |more: &[&str]| {
        let base = ["train", &config, "--plan", "--gpus", "2", "--json"];
        last_json(&succeed(&[&base[..], more].concat()))["stages"][0]["place"].clone()
    };
    assert_eq!(place(&["device=auto"]), "accelerator");
    assert_eq!(place(&["device=cpu", "--gflops", "10"]), "host");
}

/// A kind of GPU that is named brings memory, links and a time for each part of a step.
#[test]
fn a_plan_for_a_kind_of_gpu_tells_the_time_of_each_part() {
    let base = ["train", "conf/eagle3/llama3.1-8b.yaml", "--plan", "parallel.reduction=library"];
    let printed = |more: &[&str]| {
        let arguments = [&base[..], more].concat();
        stdout(&succeeded(finished(longdraft(&arguments).current_dir(repository("")))))
    };
    let text = printed(&["--gpu", "h100"]);
    require_words(
        &text,
        &[
            "a step's work by estimate:",
            "  target forward  ",
            "  draft backward  ",
            "  compute",
            "  sum  ",
        ],
    );
    require_words(
        &text,
        &[" on h100 by its roofline, ", " tokens a second", "fits: 78.0 GiB free"],
    );
    let plan =
        |more: &[&str]| last_json(&printed(&[&["--json"], more].concat()))["stages"][0].clone();
    let one = plan(&["--gpu", "h100"]);
    assert_eq!((&one["place"], &one["gpu"]["name"]), (&"accelerator".into(), &"h100".into()));
    let parts = one["parts"].as_array().expect("parts");
    let sum: f64 = parts.iter().map(|part| part["seconds"].as_f64().expect("seconds")).sum();
    let step = one["seconds_per_step"].as_f64().expect("seconds");
    assert!((sum / step - 1.0).abs() < 1e-9 && one["gflops"].is_null(), "{one}");
    // A slower GPU of other links; what is said goes before.
    let slower = plan(&["--gpu", "a100", "--ranks", "8"]);
    assert_eq!(
        (&slower["links"]["within"], &slower["links"]["between"]),
        (&240.0.into(), &24.25.into())
    );
    assert!(
        slower["seconds"]["work"].as_f64() > one["seconds"]["work"].as_f64().map(|own| own / 8.0)
    );
    let said =
        ["--gpu", "h200", "--ranks", "8", "--memory", "10", "--bandwidth", "7", "--gflops", "1e5"];
    let output =
        finished(longdraft(&[&base[..], &["--json"], &said].concat()).current_dir(repository("")));
    let told = last_json(&stdout(&output))["stages"][0].clone();
    assert_eq!(
        (&told["free_bytes"], &told["links"]["within"]),
        (&(10_u64 << 30).into(), &7.0.into())
    );
    assert!(told["parts"].is_null() && told["gflops"] == 1e5, "{told}");
    // Documents keep attention short.
    let short = plan(&["--gpu", "h100", "--document-tokens", "256"]);
    assert!(short["operations_per_token"].as_f64() < one["operations_per_token"].as_f64());
    // Names are listed, and nothing but plans has them.
    let config = repository("conf/eagle3/llama3.1-8b.yaml").display().to_string();
    fail_with(&["train", &config, "--plan", "--gpu", "b200"], 2, &["h200, h100, a100, l40s"]);
    fail(&["train", &config, "--gpu", "h200"], 2);
}

/// Pretraining is told by operations a second alone, and no plan names an option that it refuses.
#[test]
fn a_plan_of_pretraining_names_options_that_it_takes() {
    let shop = Shop::new();
    let (shard, config) = (shop.path("train.bin"), shop.path("pretrain.yaml"));
    longdraft_data::token_stream::write_shard(Path::new(&shard), &[1; 4096]).expect("shard");
    let yaml = format!(
        "output: {}\nmodel: {{vocab_size: 258}}\ndata: {{train: [{shard}], row_tokens: 512}}\n",
        shop.path("run")
    );
    std::fs::write(&config, yaml).expect("config");
    let base = ["lm", "train", &config, "--plan", "device=cuda:0"];
    let text = succeed(&base);
    assert!(text.contains("a rank, --gflops tells its time"), "{text}");
    // The manual says which keys it lacks.
    let stage = plan(&["lm", "train", &config, "--json"], 1);
    for key in ["idle_ranks", "cache_tokens", "cache_bytes"] {
        assert!(stage["bytes"].is_u64() && stage.get(key).is_none(), "{key}: {stage}");
    }
    for more in [&["--gpu", "h100"][..], &["--document-tokens", "100"]] {
        let words = [more[0], "pretraining does not know its parts of a step", "--gflops"];
        fail_with(&[&base[..], more].concat(), 2, &words);
    }
}

/// Peaks that a GPU took stand in docs/results/gpu.md, below the commands that plan the same rows.
#[test]
fn plans_of_gpus_say_what_one_took() {
    let text = page("docs/results/gpu.md");
    let commands = text.lines().filter(|line| line.starts_with("longdraft train"));
    let commands = commands.filter(|line| line.contains("--ranks 1 --device cuda:0"));
    let commands: Vec<&str> = commands.collect();
    let table = text.lines().skip_while(|line| !line.starts_with("| step | planned, GiB"));
    let table = table.skip(2).take_while(|line| line.starts_with('|'));
    let rows: Vec<Vec<&str>> = table.map(|line| line.split(" | ").collect()).collect();
    assert!(commands.len() >= 4 && commands.len() == rows.len(), "{commands:?} {rows:?}");
    for (command, row) in commands.iter().zip(&rows) {
        let [_, planned, taken] = row[..] else { panic!("three columns: {row:?}") };
        let taken: f64 = taken.trim_end_matches(" |").parse().expect("a number");
        let printed = last_json(&printed_by(command, &["--json"]));
        let bytes = printed["stages"][0]["bytes"].as_f64().expect("bytes");
        let gib = bytes / f64::from(1 << 30);
        assert_eq!(format!("{gib:.1}"), planned, "`{command}`");
        // They were taken with candle's graph. Ours holds less; no GPU has said yet how much.
        let off = gib / taken - 1.0;
        assert!((-0.3..=0.05).contains(&off), "`{command}`: {gib:.1} GiB planned, {taken} taken");
    }
}

/// Each row of the table "One node of eight, by plan" of docs/results/gpu.md is what the command above it prints of the
/// row's recipe, in each of its stages.
#[test]
fn the_plans_of_one_node_are_what_their_commands_print() {
    let text = page("docs/results/gpu.md");
    let command = text.lines().find(|line| line.contains(" --plan --ranks 8 --device cuda:0 "));
    let command = command.expect("a command above the table");
    let table = text.lines().skip_while(|line| !line.starts_with("| recipe | features |"));
    let table: Vec<&str> = table.skip(2).take_while(|line| line.starts_with('|')).collect();
    assert!(table.len() >= 24, "{table:?}");
    let mut plans: BTreeMap<String, Value> = BTreeMap::new();
    let mut stale = Vec::new();
    for line in table {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, recipe, features, tokens, rows, gpu, host, sent, work, ..] = cells[..] else {
            panic!("eight columns: {line}")
        };
        let (file, names) = recipe_of(recipe);
        let store = if features == "a store" { " train.features=FOLDER" } else { "" };
        let command = command.replace("conf/eagle3/llama3.1-8b.yaml", &file) + store;
        let plan = plans.entry(command.clone());
        let plan = plan.or_insert_with(|| last_json(&printed_by(&command, &["--json"])));
        let stages = plan["stages"].as_array().expect("stages").iter();
        let is_meant =
            |stage: &&Value| names.is_empty() || names.iter().any(|name| stage["stage"] == *name);
        let stages: Vec<&Value> = stages.filter(is_meant).collect();
        assert_eq!(stages.len(), names.len().max(1), "stages of `{command}` for {recipe}");
        let number = |text: &str| text.replace(' ', "").parse::<u64>().expect("a number");
        let of_step = number(tokens) * number(rows);
        let [gpu, host, sent] = [gpu, host, sent].map(str::to_owned);
        let written = [of_step.to_string(), gpu, host, sent, number(work).to_string()];
        for stage in stages {
            let printed = figures_of(stage);
            if printed != written {
                let [written, printed] = [&written, &printed].map(|figures| figures.join(" | "));
                let of = format!("{recipe}, {features}, stage {}", stage["stage"]);
                stale.push(format!(
                    "{of}\n  page:  {written}\n  plan:  {printed}\n  by `{command}`"
                ));
            }
        }
    }
    let columns = "tokens a step | GPU memory, GiB | main memory, GiB | sent, GB | work, TFLOP";
    assert!(stale.is_empty(), "{columns}\n{}", stale.join("\n"));
}

/// The configuration of a recipe as the table names it, and those of its stages that the row is of.
fn recipe_of(name: &str) -> (String, Vec<&str>) {
    let parts: Vec<&str> = name.split(", ").collect();
    let model = parts[1].to_lowercase().replace("llama-", "llama");
    let file = match parts[0] {
        "EAGLE-3" => format!("conf/eagle3/{model}.yaml"),
        "DFlash" => format!("conf/block/dflash-{model}.yaml"),
        "DFlash in stages" => format!("conf/curriculum/dflash-{model}.yaml"),
        "GLIDE" => format!("conf/curriculum/{model}.yaml"),
        other => panic!("no such recipe: {other}"),
    };
    (file, parts.get(2).map_or_else(Vec::new, |names| names.split(" and ").collect()))
}

/// Tokens of a step over all eight ranks; GiB of GPU and main memory, GB sent and TFLOP of one of them.
fn figures_of(stage: &Value) -> [String; 5] {
    let number = |key: &str| stage[key].as_f64().expect(key);
    let gib = |key: &str| format!("{:.1}", number(key) / f64::from(1 << 30));
    assert_eq!((&stage["ranks"], &stage["idle_ranks"]), (&8.into(), &0.into()));
    let tokens = number("tokens_per_step");
    let work = number("operations_per_token") * tokens / 8.0 / 1e12;
    let sent = number("sent_bytes") / 1e9;
    let figures = [gib("bytes"), gib("host_bytes"), format!("{sent:.1}"), format!("{work:.0}")];
    let [gpu, host, sent, work] = figures;
    [format!("{tokens:.0}"), gpu, host, sent, work]
}
