//! The ops' checks and timings through the binary.

use crate::support::files::json_lines;
use crate::support::{fail, fail_with, last_json, run, stdout, succeed};

#[test]
fn smoke_passes_on_the_cpu_with_a_line_a_case_and_a_summary() {
    let out = succeed(&["kernel-check", "--device", "cpu", "--smoke", "--json"]);
    let mut lines = json_lines(&out);
    let summary = lines.pop().expect("a summary");
    let count = lines.len() as u64;
    assert_eq!(summary, serde_json::json!({"checks": count, "passed": count, "pass": true}));
    for line in &lines {
        let number = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key} of {line}"));
        assert!(number("max_error") <= number("tolerance") && number("ms") > 0.0, "{line}");
        assert_eq!(
            (&line["passed"], &line["equal_bits"], &line["products"]),
            (&true.into(), &true.into(), &"f32".into())
        );
        assert!(line["shape"].as_str().is_some_and(|shape| !shape.is_empty()), "{line}");
    }
    for op in ["attention", "linear_cross_entropy", "rms_norm", "adamw", "experts", "upload_ahead"]
    {
        assert!(lines.iter().any(|line| line["name"] == op), "{op}");
    }
}

#[test]
fn names_choose_ops_and_an_unknown_one_is_told() {
    let out = succeed(&["kernel-check", "rope", "swiglu", "--smoke", "--repeat", "3"]);
    let (checks, last) = out.trim_end().rsplit_once('\n').expect("lines");
    assert!(checks.lines().all(|line| line.starts_with("pass rope") || line.contains("swiglu")));
    assert!(last.ends_with("checks passed"), "{last}");
    fail_with(&["kernel-check", "rope", "flash", "--smoke"], 2, &["`flash`", "rms_norm"]);
    fail(&["kernel-check", "--smoke", "--real"], 2);
    fail(&["kernel-check", "--repeat", "0"], 2);
}

#[test]
fn composed_ops_pass_too() {
    let out = succeed(&["kernel-check", "--smoke", "--ops", "composed", "--json"]);
    assert_eq!(last_json(&out)["pass"], true);
    // What only fused ops and kernels promise is left out.
    assert!(!out.contains("attention_row_bits") && out.contains("few_rows_bits"));
}

#[test]
fn timings_are_finite_and_positive() {
    let out = succeed(&["kernel-check", "--bench", "--smoke", "--json"]);
    let mut lines = json_lines(&out);
    assert_eq!(lines.pop().expect("a summary")["pass"], true);
    for line in &lines {
        let rates = ["tflops", "gb_per_s", "host_us"];
        let rates: Vec<f64> = rates.iter().filter_map(|key| line[key].as_f64()).collect();
        assert_eq!(rates.len(), 1, "{line}");
        assert!(rates[0] > 0.0 && line["ms"].as_f64() > Some(0.0), "{line}");
    }
    for timed in ["attention_training", "linear", "few_rows", "adamw", "start", "allocation"] {
        assert!(lines.iter().any(|line| line["name"] == timed), "{timed}");
    }
    let table = succeed(&["kernel-check", "start", "cast", "--bench", "--smoke"]);
    assert!(table.contains("us/call") && table.contains("GB/s"), "{table}");
}

#[test]
fn a_device_that_is_not_there_is_exit_2() {
    let output = run(&["kernel-check", "--smoke", "--device", "cuda:99"]);
    assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
}
