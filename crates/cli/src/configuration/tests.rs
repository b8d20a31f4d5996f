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
    assert_eq!(config.draft.delay_weights, Some(vec![1.0, 0.5]));
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
fn every_senseless_combination_is_named_at_once() {
    assert_problems(
        MINIMAL,
        &["objective.soft_weight=2", "train.rows_per_step=0", "draft.gamma=0"],
        &["command line `objective.soft_weight=2`", "train.rows_per_step", "draft.gamma"],
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
