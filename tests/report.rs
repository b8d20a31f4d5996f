//! `longdraft report` through the binary.

mod support;

use support::{Workshop, fail, last_json, succeed};

/// Markup that would reach over the network or run something.
const FORBIDDEN: [&str; 6] = ["<script", "src=", "href=", "@import", "url(", "javascript:"];

fn page(path: &str) -> String {
    std::fs::read_to_string(path).expect("the page")
}

/// How often a text occurs.
fn count(page: &str, text: &str) -> usize {
    page.matches(text).count()
}

#[test]
fn a_run_becomes_one_page_that_needs_no_network() {
    let shop = Workshop::new();
    succeed(&["train", &shop.config(), "train.evaluate_every=4"]);
    let run = shop.path("run");
    let out = last_json(&succeed(&["report", &run, "--json"]));
    assert_eq!(out["output"], format!("{run}/report.html"));
    let stage = &out["stages"][0];
    assert!(stage["steps"].as_u64() > Some(0) && stage["tokens"].as_u64() > Some(0), "{out}");
    assert_eq!(stage["held_out_top1_by_delay"].as_array().map(Vec::len), Some(5));
    assert!(cfg!(not(unix)) || stage["peak_memory_mib"].as_f64() > Some(1.0), "{out}");

    let page = page(&format!("{run}/report.html"));
    for forbidden in FORBIDDEN {
        assert!(!page.contains(forbidden), "{forbidden} is in the page");
    }
    for title in [
        ">Loss",
        ">Hard loss",
        ">Top-1 agreement",
        ">Acceptance",
        ">Learning rate",
        ">Gradient norm",
        ">Throughput",
        ">Learned share",
        ">Summary",
        "rows.jsonl",
    ] {
        assert!(page.contains(title), "{title} is not in the page");
    }
    assert_eq!(count(&page, "<figure>"), count(&page, "</svg></figure>"));
    // Nothing of what was written on the way is left.
    let left = std::fs::read_dir(&run).expect("list").flatten();
    assert!(!left.into_iter().any(|entry| entry.file_name().to_string_lossy().contains("part")));
}

#[test]
fn several_runs_are_compared_and_their_configurations_too() {
    let shop = Workshop::new();
    for (name, seed) in [("a", 1), ("b", 2)] {
        let output = format!("output={}", shop.path(name));
        succeed(&[
            "train",
            &shop.config(),
            &output,
            "train.steps=3",
            &format!("train.seed={seed}"),
        ]);
    }
    let output = shop.path("both.html");
    succeed(&["report", &shop.path("a"), &shop.path("b"), "--output", &output]);
    let page = page(&output);
    assert!(page.contains("Top-1 agreement, position 5"));
    let differences = page.split("class=\"differences\"").nth(1).expect("differences");
    let table = differences.split("</table>").next().expect("a table");
    assert!(table.contains("train.seed") && table.contains("output"), "{table}");
    assert!(!table.contains("row_tokens"), "{table}");
}

#[test]
fn a_curriculum_is_one_run_with_marked_stages() {
    let shop = Workshop::new();
    for stage in ["one", "two"] {
        let output = format!("output={}/{stage}", shop.path("curriculum"));
        succeed(&["train", &shop.config(), &output, "train.steps=3"]);
    }
    let file = shop.path("curriculum/curriculum.json");
    let stages = r#"{"stages": [{"name": "base <1k>", "output": "one"},
        {"name": "long & far", "output": "two"}, {"name": "later", "output": "three"}]}"#;
    std::fs::write(&file, stages).expect("curriculum");
    let out = support::run(&["report", &shop.path("curriculum"), "--json"]);
    assert!(support::stderr(&out).contains("warning: skipped"), "{}", support::stderr(&out));
    let out = last_json(&support::stdout(&out));
    assert_eq!(out["stages"].as_array().map(Vec::len), Some(2));
    assert_eq!(out["stages"][1]["name"], "curriculum / long & far");
    let page = page(&shop.path("curriculum/report.html"));
    assert!(!page.contains("<1k>") && !page.contains("long & far"), "names are not escaped");
    // In every chart over tokens.
    assert!(count(&page, "\nlong &amp; far\n") + count(&page, ">\nlong &amp; f") > 5, "{page}");
}

#[test]
fn torn_and_malformed_lines_do_not_stop_a_report() {
    let shop = Workshop::new();
    succeed(&["train", &shop.config(), "train.steps=3"]);
    let path = shop.path("run/metrics.jsonl");
    let mut text = std::fs::read_to_string(&path).expect("metrics");
    let lines = text.lines().count();
    text.push_str("<script>alert(1)</script>\n{\"step\": 9, \"tok");
    std::fs::write(&path, text).expect("metrics");
    let out = support::run(&["report", &shop.path("run")]);
    let said = support::stderr(&out);
    assert!(out.status.success(), "{said}");
    assert!(said.contains(&format!("metrics.jsonl:{}: expected value", lines + 1)), "{said}");
    assert_eq!(count(&said, "warning:"), 1, "{said}");
    assert!(!page(&shop.path("run/report.html")).contains("<script"));
}

#[test]
fn a_run_without_metrics_is_named_with_what_was_looked_for() {
    let shop = Workshop::new();
    let text = fail(&["report", &shop.path("target"), &shop.path("absent")], 2);
    for part in ["target: no metrics", "absent: no such directory", "metrics.jsonl", "hint: "] {
        assert!(text.contains(part), "{part} not in {text}");
    }
    succeed(&["train", &shop.config(), "train.steps=1"]);
    let folder = shop.path("target");
    let text = fail(&["report", &shop.path("run"), "--output", &folder], 1);
    assert!(text.contains("is a directory") && text.contains("--output"), "{text}");
}

#[test]
fn a_long_run_is_thinned_but_keeps_its_spikes() {
    let folder = tempfile::tempdir().expect("tempdir");
    let lines: String = (1..=20_000_u32)
        .map(|step| {
            let loss = if step == 12_345 { 99.0 } else { 2.0 + f64::from(step % 7) };
            format!("{{\"step\":{step},\"tokens\":{},\"loss\":{loss}}}\n", 1000 * step)
        })
        .collect();
    std::fs::write(folder.path().join("metrics.jsonl"), lines).expect("metrics");
    let run = folder.path().display().to_string();
    let out = support::run(&["report", &run]);
    assert!(out.status.success(), "{}", support::stderr(&out));
    assert!(support::stderr(&out).contains("config.yaml"), "a missing configuration is told");
    let page = page(&format!("{run}/report.html"));
    assert!(page.len() < 100_000, "{} bytes", page.len());
    // The spike sets the range: the axis reaches to it.
    assert!(page.contains("(logarithmic)") && page.contains(">\n50\n<"), "{page}");
}
