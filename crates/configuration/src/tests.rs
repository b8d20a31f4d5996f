use super::*;

const MINIMAL: &str = "target: a/b\noutput: runs/x\ndata:\n  train: [{path: rows.jsonl}]\n";

fn parse(text: &str, arguments: &[&str]) -> std::result::Result<Composed, String> {
    let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
    let root = compose::read_text(text, "file.yaml").map_err(|p| p.to_string())?;
    composed(root, &arguments)
        .map_err(|problems| problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
}

fn stage(text: &str, arguments: &[&str]) -> TrainConfig {
    match parse(text, arguments).expect("valid") {
        Composed::Stage(located) => located.config,
        Composed::Curriculum { .. } => panic!("one stage"),
    }
}

#[track_caller]
fn assert_problems(text: &str, arguments: &[&str], parts: &[&str]) {
    let message = parse(text, arguments).expect_err("problems");
    for part in parts {
        assert!(message.contains(part), "{part} not in:\n{message}");
    }
}

#[test]
fn overrides_replace_and_create_keys() {
    let config = stage(MINIMAL, &["train.steps=7", "draft.delay_weights=[1, 0.5]"]);
    assert_eq!(config.train.steps, Some(7));
    assert_eq!(config.draft.method.keys()["delay_weights"], json!([1.0, 0.5]));
}

#[test]
fn every_mistake_is_told_at_once_with_its_line_and_the_nearest_name() {
    let text = format!(
        "{MINIMAL}trian:\n  steps: 3\ntrain:\n  stepz: 4\n  seed: many\nschedule: {{kind: cosin}}\n"
    );
    assert_problems(
        &text,
        &["data.row_token=5"],
        &[
            "file.yaml:5: unknown key `trian` (did you mean `train`?)",
            "file.yaml:8: unknown key `train.stepz` (did you mean `steps`?)",
            "file.yaml:9: `train.seed`",
            "file.yaml:10: `schedule.kind`",
            "warmup_cosine",
            "command line `data.row_token=5`: unknown key `data.row_token` (did you mean `row_tokens`?)",
        ],
    );
}

#[test]
fn missing_keys_and_wrong_templates_are_named() {
    assert_problems("output: x\n", &[], &["`target` is missing", "`data` is missing"]);
    let text = "target: a\noutput: b\ndata:\n  train:\n  - path: x\n    template: {kind: raw, feilds: [a]}\n";
    assert_problems(text, &[], &["file.yaml:6", "feilds"]);
}

#[test]
fn a_key_with_a_slash_is_named_as_it_is_written() {
    let text = "target: a\noutput: b\ndata:\n  train:\n  - path: x\n    aligners:\n    - kind: map\n      \
                fields:\n        a/b: 3\n";
    let told = "file.yaml:9: `data.train.0.aligners.0.fields.a/b`: 3 is not a text";
    assert_problems(text, &[], &[told]);
}

#[test]
fn every_senseless_combination_is_named_at_once() {
    assert_problems(
        MINIMAL,
        &["draft.soft_weight=2", "train.rows_per_step=0", "draft.gamma=0"],
        &["command line `draft.soft_weight=2`", "train.rows_per_step", "draft.gamma"],
    );
}

const CURRICULUM: &str = "target: a\noutput: runs/c\ndata: {train: [{path: x.jsonl}]}\ntrain: {seed: 3}\n\
stages:\n- name: base\n- {name: long, start_from: best, data: {row_tokens: 4096}, train: {steps: 5}}\n";

#[test]
fn stages_share_what_they_do_not_set_and_arguments_win() {
    let composed =
        parse(CURRICULUM, &["train.steps=9", "stages.long.train.seed=4"]).expect("valid");
    let Composed::Curriculum { output, stages } = composed else { panic!("stages") };
    assert_eq!(output, Path::new("runs/c"));
    let [base, long] = &stages[..] else { panic!("two stages") };
    assert_eq!((base.name.as_str(), base.start_from), ("base", StartFrom::Last));
    assert_eq!(base.located.config.output, Path::new("runs/c/base"));
    assert_eq!((base.located.config.train.seed, base.located.config.train.steps), (3, Some(9)));
    assert_eq!((long.located.config.train.seed, long.located.config.train.steps), (4, Some(9)));
    assert_eq!((long.start_from, long.located.config.data.row_tokens), (StartFrom::Best, 4096));
    let moved = parse(CURRICULUM, &["output=elsewhere"]).expect("valid");
    let Composed::Curriculum { stages, .. } = moved else { panic!("stages") };
    assert_eq!(stages[1].located.config.output, Path::new("elsewhere/long"));
}

#[test]
fn no_stage_trains_on_what_another_one_holds_out() {
    let reserved = |arguments: &[&str]| {
        let Composed::Curriculum { stages, .. } = parse(CURRICULUM, arguments).expect("valid")
        else {
            panic!("stages")
        };
        stages.iter().map(|stage| stage.located.config.data.reserved_tokens).collect::<Vec<_>>()
    };
    let short = "stages.base.data.row_tokens=512";
    assert_eq!(reserved(&["data.held_out_rows=2", short]), [Some(2 * 4096), Some(2 * 512)]);
    assert_eq!(reserved(&["stages.base.data.train=[{path: y.jsonl}]", short]), [None, None]);
    assert_eq!(reserved(&["data.reserved_tokens=0", short]), [Some(0); 2]);
    // With held-out text of its own a stage holds nothing out, and keeps off what others do.
    let own = ["stages.long.data.held_out=[{path: z.jsonl}]", "data.held_out_rows=2", short];
    assert_eq!(reserved(&own), [Some(0), Some(2 * 512)]);
}

#[test]
fn stages_tell_their_problems_together() {
    let text = format!(
        "{CURRICULUM}- {{name: base, trian: 1}}\n- {{name: a/b}}\n- {{start_from: lst}}\n- 7\n"
    );
    assert_problems(
        &text,
        &[],
        &["did you mean `train`", "a/b", "needs a `name`", "a map of keys"],
    );
    assert_problems(CURRICULUM, &["~train.gone"], &["no key `train.gone`"]);
}

#[test]
fn stages_that_cannot_hand_on_are_told() {
    let kept =
        format!("{CURRICULUM}- {{name: more, start_from: best, train: {{keep_best: false}}}}\n");
    assert!(parse(&kept, &[]).is_ok(), "{:?}", parse(&kept, &[]).err());
    assert_problems(&kept, &["stages.long.train.keep_best=false"], &["`long`, which keeps none"]);
    assert_problems(&kept, &["stages.base.data.held_out_rows=0"], &["`base`, which keeps none"]);
    assert_problems(
        &kept,
        &["stages.long.output=runs/c/base"],
        &["command line `stages.long.output=runs/c/base`", "`base` and `long` have one `output`"],
    );
}

#[test]
fn wrong_types_do_not_hide_senseless_values() {
    let arguments = ["train.steps=-4", "optimizer.clip_norm=0", "train.patience=2", "trian.x=1"];
    let message = parse(MINIMAL, &arguments).expect_err("problems");
    for part in ["`train.steps`", "`optimizer.clip_norm`", "`train.patience`", "`trian`"] {
        assert!(message.contains(part), "{part} not in:\n{message}");
    }
    assert_eq!(message.lines().count(), 4, "{message}");
    // What is missing is not complained of twice.
    let message = parse("output: x\ntrain: {patience: 2}\n", &[]).expect_err("problems");
    assert_eq!(message.lines().count(), 3, "{message}");
}

#[test]
fn the_method_says_which_keys_there_are() {
    let eagle3 = format!("{MINIMAL}draft:\n  method: eagle3\n  gamma: 4\n  ttt_stps: 3\n");
    let more = ["draft.hidden_size=0", "train.log_every=0"];
    let message = parse(&eagle3, &more).expect_err("problems");
    for part in [
        "file.yaml:7: `draft.gamma` is a key of `draft.method: glide`",
        "file.yaml:8: unknown key `draft.ttt_stps` (did you mean `ttt_steps`?)",
        "command line `draft.hidden_size=0`: `draft.hidden_size` must be in",
        "command line `train.log_every=0`: `train.log_every` must be",
    ] {
        assert!(message.contains(part), "{part} not in:\n{message}");
    }
    assert_eq!(message.lines().count(), 4, "{message}");
    assert_problems(
        MINIMAL,
        &["draft.ttt_steps=3", "draft.gama=3"],
        &["`draft.ttt_steps` is a key of `draft.method: eagle3`", "(did you mean `gamma`?)"],
    );
    // All methods that have a key are named, not the first alone.
    let told = "`draft.soft_weight` is a key of `draft.method: glide` or `dflash` or `dflash2`";
    assert_problems(MINIMAL, &["draft.method=dspark", "draft.soft_weight=0.5"], &[told]);
    let told = "`draft.method` is none of `glide`, `eagle3`";
    assert_problems(MINIMAL, &["draft.method=medusa"], &[told]);
}

#[test]
fn a_source_is_named_at_its_line() {
    let text = "target: a\noutput: b\ndata:\n  train:\n  - path: x.jsonl\n  - path: y.jsonl\n    \
                template: {kind: source_target}\n    learn: answer\n";
    assert_problems(
        text,
        &[],
        &["file.yaml:8: `data.train.1.learn` is `answer`, which needs", "set `with_source: true`"],
    );
}

#[test]
fn mistakes_of_yaml_are_told_once_with_their_line() {
    for text in ["a: 1\nb: [1\n", "a: 1\n b: 2\n", "a: 'x\n", "\t: 1", "a: *nowhere\n"] {
        let message = parse(text, &[]).expect_err("no YAML");
        assert!(message.starts_with("file.yaml:"), "{message}");
        assert!(!message.contains("error:") && !message.contains("<input>"), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    let level = |i: usize| {
        let inner = format!("*a{}, ", i - 1).repeat(10);
        format!("a{i}: &a{i} [{inner}]\n")
    };
    let levels: Vec<String> = (1..9).map(level).collect();
    let bomb = format!("a0: &a0 [{}]\n{}", "x, ".repeat(10), levels.concat());
    let deep = format!("a: {}1{}\n", "[".repeat(200), "]".repeat(200));
    for (text, words) in [
        (deep.as_str(), "it is nested too deeply"),
        ("a: 1\na: 2\n", "file.yaml:2: not YAML: the key `a` stands there twice"),
        ("a: .inf\n", "`.inf` is no finite number"),
        ("a: &a [*a]\n", "an alias stands inside"),
        (bomb.as_str(), "it is too large"),
    ] {
        assert_problems(text, &[], &[words]);
    }
}

#[test]
fn what_is_no_text_says_what_to_give() {
    let folder = tempfile::tempdir().expect("folder");
    let told = |path: &std::path::Path| match compose::read_file(path) {
        Ok(_) => panic!("no configuration"),
        Err(problem) => problem.to_string(),
    };
    assert!(told(folder.path()).ends_with("is a folder: give a YAML file"));
    let file = folder.path().join("config.yaml");
    std::fs::write(&file, [0xff, 0xfe]).expect("written");
    assert!(told(folder.path()).ends_with("config.yaml"), "{}", told(folder.path()));
    assert!(told(&file).ends_with("is no text: give a YAML file"), "{}", told(&file));
}

#[test]
fn a_file_with_keys_of_drafts_alone_is_no_pretraining() {
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("file.yaml");
    let kind = |text: &str| {
        std::fs::write(&file, text).expect("written");
        let Ok(kind) = kind_of(&file) else { panic!("readable") };
        kind
    };
    assert_eq!(kind("target: a/b\ndata: {train: [rows.jsonl]}\n"), Kind::Train);
    assert_eq!(kind("data: {train: [{path: rows.jsonl}]}\n"), Kind::Train);
    assert_eq!(kind("data: {train: [train.bin]}\n"), Kind::Pretrain);
    assert_eq!(kind("model: a/b\ndata: {train: [{path: rows.jsonl}]}\n"), Kind::Train);
    assert_eq!(kind("model: {vocab_size: 280}\ndata: {train: train.bin}\n"), Kind::Pretrain);
}

#[test]
fn problems_have_place_key_and_message_apart() {
    let root = compose::read_text(MINIMAL, "file.yaml").expect("YAML");
    let Err(problems) = composed(root, &["train.steps=-1".to_owned()]) else { panic!("problems") };
    let json = problems[0].to_json();
    assert_eq!(
        (&json["argument"], &json["key"]),
        (&"train.steps=-1".into(), &"train.steps".into())
    );
    let root = compose::read_text(&format!("{MINIMAL}trian: 1\n"), "file.yaml").expect("YAML");
    let Err(problems) = composed(root, &[]) else { panic!("problems") };
    let json = problems[0].to_json();
    assert_eq!(json["file"], "file.yaml");
    assert_eq!((&json["line"], &json["key"]), (&5.into(), &"trian".into()));
    assert_eq!(json["message"], "unknown key `trian` (did you mean `train`?)");
}

/// Dotted keys of numbers, and of lists of numbers, with the form of their value.
fn numeric_keys(root: &Value, place: &Value, prefix: &str, found: &mut Vec<(String, bool)>) {
    let places = schema_places(root, place);
    let is_number = |schema: &Value| {
        let names = schema.get("type").cloned().unwrap_or_default();
        let names = if names.is_array() { names } else { json!([names]) };
        ["integer", "number"]
            .iter()
            .any(|name| names.as_array().is_some_and(|n| n.contains(&json!(name))))
    };
    let maps = places.iter().filter_map(|place| place.get("properties")?.as_object());
    for (key, property) in maps.flatten() {
        if place::Union::of(root, property, &Value::Null).is_some() {
            numeric_keys(root, property, key, found);
            continue;
        }
        let full = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        let property = place::alternative(root, property, &Value::Null);
        let items = property.get("items").or_else(|| property.get("prefixItems")?.get(0));
        if is_number(property) {
            found.push((full, false));
        } else if let Some(items) = items {
            if is_number(items) {
                found.push((full, true));
            } else {
                numeric_keys(root, items, &format!("{full}.0"), found);
            }
        } else {
            numeric_keys(root, property, &full, found);
        }
    }
}

/// Every number of a schema, one at a time, at values that no run can have: told by its key, or
/// accepted, and then `each` goes on with the configuration.
fn huge_values<T: JsonSchema + DeserializeOwned>(
    text: &str,
    rules: fn(&T) -> Vec<Broken>,
    each: &dyn Fn(&T),
) -> usize {
    let schema = schema_of::<T>();
    let mut keys = Vec::new();
    numeric_keys(&schema, &schema, "", &mut keys);
    for (key, is_list) in &keys {
        for value in ["4294967296", "9007199254740992", "18446744073709551615", "1e308"] {
            let value =
                if *is_list { format!("[{value}, {value}, {value}]") } else { value.to_owned() };
            let mut root = compose::read_text(text, "file.yaml").expect("YAML");
            let change = Override::parse(&format!("{key}={value}")).expect("an override");
            if change.apply(&mut root).is_err() {
                // An item of a list that is not there.
                continue;
            }
            match checked(&root, rules) {
                Ok((config, _)) => each(&config),
                Err(problems) => {
                    let name = key.rsplit('.').next().unwrap_or_default();
                    let told = problems.iter().any(|problem| problem.to_string().contains(name));
                    assert!(told, "{key}={value}: {problems:?}");
                }
            }
        }
    }
    keys.len()
}

#[test]
fn numbers_that_no_run_can_have_are_told_or_do_no_harm() {
    let target = longdraft_models::published::published_config("Qwen/Qwen3-8B").expect("known");
    let plan = |config: &TrainConfig| {
        let layout = longdraft_plan::Layout::of(1, 1);
        if let Ok(workload) = longdraft_plan::Workload::new(config, target.clone(), layout) {
            let estimate = workload.estimate();
            workload.verdict(&estimate, Some(1 << 30));
        }
    };
    let eagle3 = format!("{MINIMAL}draft: {{method: eagle3}}\n");
    for text in [MINIMAL, &eagle3] {
        assert!(huge_values::<TrainConfig>(text, TrainConfig::problems, &plan) > 40);
    }
    let pretrain = "output: runs/x\ndata: {train: [a.bin]}\n";
    let count = huge_values::<PretrainConfig>(pretrain, PretrainConfig::problems, &|config| {
        let layout = longdraft_plan::Layout::of(1, 1);
        longdraft_plan::of_pretraining(config, &layout);
        longdraft_plan::pretraining_remedies(config, &layout);
    });
    assert!(count > 40, "{count}");
}

#[test]
fn a_curriculum_lies_where_its_references_lead() {
    let of = |output: &str, arguments: &[&str]| {
        let text = CURRICULUM.replace("output: runs/c", &format!("output: '{output}'"));
        let Composed::Curriculum { output, stages } = parse(&text, arguments).expect("valid")
        else {
            panic!("stages")
        };
        assert_eq!(stages[0].located.config.output, output.join("base"));
        output
    };
    let unset = "${oc.env:LONGDRAFT_SURELY_UNSET,runs/def}/long";
    assert_eq!(of(unset, &[]), Path::new("runs/def/long"));
    assert_eq!(of("${oc.env:LONGDRAFT_SURELY_UNSET,123}", &[]), Path::new("123"));
    assert_eq!(of("runs/${train.seed}", &["train.seed=8"]), Path::new("runs/8"));
    assert_problems(CURRICULUM, &["output=${nowhere}/x"], &["there is no key `nowhere`"]);
    assert_problems(CURRICULUM, &["output=${oc.env:MY_TOKEN,x}"], &["looks like a secret"]);
}

#[test]
fn variables_are_texts_where_texts_are_wanted() {
    let set = |key: &str, value: &str| format!("{key}=${{oc.env:LONGDRAFT_SURELY_UNSET,{value}}}");
    let arguments = [set("output", "007"), set("train.steps", "7"), set("target", "true")];
    let config = stage(MINIMAL, &arguments.each_ref().map(String::as_str));
    assert_eq!((config.output.as_path(), config.train.steps), (Path::new("007"), Some(7)));
    assert_eq!(config.target, "true");
    assert_problems(MINIMAL, &[&set("train.steps", "many")], &["`train.steps`: \"many\" is not"]);
}
