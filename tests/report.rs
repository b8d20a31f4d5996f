//! `longdraft report` through the binary.

use crate::support::files::read_rows;
use crate::support::{self, Workshop, fail, fail_with, last_json, succeed};

/// Markup that would reach over the network or run something.
const FORBIDDEN: [&str; 8] =
    ["<script ", "src=", "href=", "@import", "url(", "javascript:", "://", "import("];

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
    // One script, the page's own: its hash allows no other.
    assert_eq!((count(&page, "<script>"), count(&page, "script-src 'sha256-")), (1, 1));
    for title in [
        ">Simulated acceptance length, greedy",
        ">Loss",
        ">Hard loss",
        ">Top-1 agreement",
        ">Acceptance rate",
        ">Learning rate",
        ">Gradient norm",
        ">Throughput",
        ">Learned share",
        ">Stages of training",
        ">Held-out acceptance length",
        "rows.jsonl",
    ] {
        assert!(page.contains(title), "{title} is not in the page");
    }
    assert_eq!(count(&page, "<figure"), count(&page, "</svg></figure>"));
    assert_eq!(count(&page, "<figure"), count(&page, "<title>") - 1, "charts have titles");
    // Every chart of training once for each axis, what they share once.
    let axes = ["tokens", "steps", "time"];
    let groups = axes.map(|axis| count(&page, &format!("<g class=\"by-{axis}\">")));
    let titles = ["\ntraining tokens\n", "\noptimizer steps\n", "\nseconds in steps\n"];
    assert_eq!(groups, titles.map(|title| count(&page, title)));
    let inputs =
        axes.map(|axis| count(&page, &format!("type=\"radio\" name=\"axis\" id=\"by-{axis}\"")));
    assert_eq!((inputs, groups[0] > 5, groups), ([1; 3], true, [groups[0]; 3]));
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
    assert!(page.contains("Top-1 agreement, position 5") && !page.contains("position 6"));
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
    let stages = r#"{"stages": [{"name": "base <1k>", "output": "one"},
        {"name": "long & far", "output": "two"}, {"name": "later", "output": "three"}]}"#;
    shop.write("curriculum/curriculum.json", stages);
    let out = support::run(&["report", &shop.path("curriculum"), "--json"]);
    assert!(support::stderr(&out).contains("warning: skipped"), "{}", support::stderr(&out));
    let out = last_json(&support::stdout(&out));
    assert_eq!(out["stages"].as_array().map(Vec::len), Some(2));
    assert_eq!(out["stages"][1]["name"], "curriculum / long & far");
    let page = page(&shop.path("curriculum/report.html"));
    assert!(!page.contains("<1k>") && !page.contains("long & far"), "names are not escaped");
    assert!(page.contains(" charts</small>") && !page.contains("<small>1 charts"), "{page}");
    // In every chart over training, on each axis.
    let charts = count(&page, "<g class=\"by-");
    for name in ["base &lt;1k&gt;", "long &amp; far"] {
        assert!(charts > 5 && count(&page, &format!("\n{name}\n")) == charts, "{name}: {page}");
    }
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
    let said = support::noted(&["report", &shop.path("run")]);
    assert!(said.contains(&format!("metrics.jsonl:{}: expected value", lines + 1)), "{said}");
    assert_eq!(count(&said, "warning:"), 1, "{said}");
    let page = page(&shop.path("run/report.html"));
    assert_eq!(count(&page, "<script"), 1, "the page's own");
    assert!(!page.contains("alert("), "{page}");
}

#[test]
fn a_run_without_metrics_is_named_with_what_was_looked_for() {
    let shop = Workshop::new();
    let words = ["target: no metrics", "absent: no such directory", "metrics.jsonl", "hint: "];
    fail_with(&["report", &shop.path("target"), &shop.path("absent")], 2, &words);
    succeed(&["train", &shop.config(), "train.steps=1"]);
    let folder = shop.path("target");
    let text = fail(&["report", &shop.path("run"), "--output", &folder], 1);
    assert!(text.contains("is a directory") && text.contains("--output"), "{text}");
}

/// What the charts of a page have under the pointer.
fn named_values(page: &str) -> Vec<(String, serde_json::Value)> {
    let unescaped = |text: String| text.replace("&quot;", "\"").replace("&#x27;", "'");
    let parse = |values: String| serde_json::from_str(&unescaped(values)).expect("JSON");
    charts(page).into_iter().map(|(title, values)| (title, parse(values))).collect()
}

#[test]
fn charts_of_training_have_places_on_every_axis() {
    let folder = tempfile::tempdir().expect("tempdir");
    let stage = |name: &str, lines: &str| {
        std::fs::create_dir(folder.path().join(name)).expect("folder");
        std::fs::write(folder.path().join(name).join("metrics.jsonl"), lines).expect("metrics");
    };
    // Two minutes for a thousand tokens, then a second each for as many.
    let line = |step: u32, speed: f64| {
        format!(
            "{{\"step\":{step},\"tokens\":{},\"loss\":3,\"tokens_per_second\":{speed}}}\n",
            500 * step
        )
    };
    stage("one", &[line(1, 500.0 / 60.0), line(2, 500.0 / 60.0)].concat());
    let evaluation = "{\"step\":1,\"held_out\":{\"loss\":4}}\n";
    stage("two", &[line(1, 1000.0), evaluation.to_owned(), line(4, 1000.0)].concat());
    let stages = r#"{"stages": [{"name": "a", "output": "one"}, {"name": "b", "output": "two"}]}"#;
    std::fs::write(folder.path().join("curriculum.json"), stages).expect("curriculum");
    let run = folder.path().display().to_string();
    succeed(&["report", &run]);
    let values = named_values(&page(&format!("{run}/report.html")));
    let of = |title: &str, curve: &str| {
        let holds = |values: &&serde_json::Value| values["curves"][0]["label"] == curve;
        let mut of_title = values.iter().filter(|(name, _)| name.starts_with(title));
        of_title.find_map(|(_, values)| Some(values).filter(holds)).expect(curve).clone()
    };
    let training = of("Loss", "training, smoothed");
    let titles = ["training tokens", "optimizer steps", "minutes in steps"];
    for (axis, title) in training["x"].as_array().expect("axes").iter().zip(titles) {
        assert_eq!(axis["title"], title);
    }
    // Height, tokens, steps, minutes.
    let want = serde_json::json!([
        [3, 500, 1, 1],
        [3, 1000, 2, 2],
        [3, 1500, 3, 2.0083],
        [3, 3000, 6, 2.0333]
    ]);
    assert_eq!(training["curves"][0]["points"], want);
    let held_out = of("Loss", "held-out");
    assert_eq!(held_out["curves"][0]["points"], serde_json::json!([[4, 1500, 3, 2.0083]]));

    // A stage that did not log its speed has no time; the other axes stay.
    std::fs::write(
        folder.path().join("two/metrics.jsonl"),
        "{\"step\":1,\"tokens\":9,\"loss\":3}\n",
    )
    .expect("metrics");
    succeed(&["report", &run]);
    let page = page(&format!("{run}/report.html"));
    let inputs = ["tokens", "steps", "time"].map(|axis| count(&page, &format!("id=\"by-{axis}\"")));
    assert_eq!((inputs, count(&page, "<g class=\"by-time")), ([1, 1, 0], 0));
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
    let told = support::noted(&["report", &run]);
    assert!(told.contains("config.yaml"), "a missing configuration is told");
    let page = page(&format!("{run}/report.html"));
    assert!(page.len() < 100_000, "{} bytes", page.len());
    // The spike sets the range: the axis reaches to it.
    assert!(page.contains("; logarithmic<") && page.contains(">\n50\n<"), "{page}");
}

/// Titles of the charts with what each says of its quantity, and the names of its curves.
fn charts(page: &str) -> Vec<(String, String)> {
    let figures = page.split("<figure").skip(1);
    figures
        .map(|figure| {
            let between = |from: &str, to: &str| {
                let rest = figure.split_once(from).map_or("", |(_, rest)| rest);
                rest.split_once(to).map_or("", |(text, _)| text).to_owned()
            };
            (between("<title>", "</title>"), between("data-values=\"", "\">"))
        })
        .collect()
}

#[test]
fn training_and_held_out_rows_share_a_chart_where_they_are_one_quantity() {
    let shop = Workshop::new();
    let top_k = ["teacher.soft_targets=top_k", "teacher.top_k=8", "train.evaluate_every=2"];
    succeed(&[&["train", &shop.config(), "train.steps=4"][..], &top_k].concat());
    let run = shop.path("run");
    let records = read_rows(shop.path("run/metrics.jsonl"));
    let held_out = &records.iter().find(|r| r.get("held_out").is_some()).expect("one")["held_out"];
    let of_training = &records[0]["measured_against"];
    assert_ne!(of_training["loss"], held_out["measured_against"]["loss"]);
    assert_eq!(of_training["loss"], held_out["as_trained"]["measured_against"]["loss"]);
    assert_eq!(of_training["agreement"], held_out["measured_against"]["agreement"]);
    // Fewer tokens overlap less, and the target's best is among them.
    let first = |of: &serde_json::Value| of["acceptance_by_delay"][0].as_f64().expect("a rate");
    assert!(first(&held_out["as_trained"]) <= first(held_out), "{held_out}");
    assert_eq!(held_out["as_trained"]["top1_by_delay"], held_out["top1_by_delay"]);
    assert_eq!(held_out["as_trained"]["hard_loss"], held_out["hard_loss"]);

    succeed(&["report", &run]);
    let drawn = charts(&page(&format!("{run}/report.html")));
    let of = |name: &str| {
        let starts = |chart: &&(String, String)| chart.0.starts_with(&format!("{name} ("));
        drawn.iter().filter(starts).collect::<Vec<_>>()
    };
    for (name, count) in [("Loss", 2), ("Acceptance rate", 2), ("Hard loss", 1)] {
        assert_eq!(of(name).len(), count, "{name}: {drawn:?}");
    }
    let together = |chart: &(String, String)| {
        (chart.1.contains("training, smoothed"), chart.1.contains("held-out"))
    };
    for name in ["Loss", "Acceptance rate"] {
        let (first, second) = (of(name)[0], of(name)[1]);
        assert!(first.0.contains("target's top 8") && together(first) == (true, true), "{first:?}");
        assert!(second.0.contains("held-out rows only"), "{second:?}");
        assert_eq!(together(second), (false, true), "{second:?}");
    }

    // A method of one's own may not say what its figures are measured against.
    let strip = |mut record: serde_json::Value| {
        let fields = record.as_object_mut().expect("an object");
        fields.remove("measured_against");
        if let Some(held_out) = fields.get_mut("held_out") {
            held_out.as_object_mut().expect("an object").remove("measured_against");
            held_out.as_object_mut().expect("an object").remove("as_trained");
        }
        format!("{record}\n")
    };
    let old: String = records.into_iter().map(strip).collect();
    shop.write("run/metrics.jsonl", old);
    succeed(&["report", &run]);
    let drawn = charts(&page(&format!("{run}/report.html")));
    assert!(drawn.iter().any(|chart| together(chart).0), "{drawn:?}");
    assert!(drawn.iter().any(|chart| together(chart).1), "{drawn:?}");
    let mixed = drawn.iter().find(|chart| together(chart) == (true, true));
    assert!(mixed.is_none(), "{mixed:?}");
    let untold = drawn.iter().filter(|chart| chart.0.contains("does not say what it was measured"));
    assert!(untold.count() > 1, "{drawn:?}");
}
