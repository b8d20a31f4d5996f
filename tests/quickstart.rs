//! `quickstart` through the binary: no network, no cache folder, a few steps of each stage.

use crate::support::{last_json, longdraft, stderr, stdout, succeeded};
use serde_json::Value;

/// Where a proxy would stand if anything asked for the network: nobody listens there.
const NOBODY: &str = "http://127.0.0.1:9";

#[test]
fn stages_draft_figures_and_page_come_from_the_binary_alone() {
    let folder = tempfile::tempdir().expect("tempdir");
    let output = folder.path().join("quick start");
    let run = output.display().to_string();
    let quickstart = || {
        let short = ["train.steps=2", "data.row_tokens=256", "data.held_out_rows=1"];
        let mut command = longdraft(&["quickstart", "--output", &run, "--questions", "2"]);
        command.args(short).args(["train.features=online", "--json"]);
        command.current_dir(folder.path()).env_remove("HOME").env_remove("XDG_CACHE_HOME");
        for proxy in ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
            command.env(proxy, NOBODY);
        }
        succeeded(command.output().expect("the binary starts"))
    };
    let first = quickstart();
    let told = stderr(&first);
    for stage in ["[target]", "[train 1/3]", "[train 2/3]", "[train 3/3]", "[extract]", "[measure]"]
    {
        assert!(told.contains(stage), "{stage} is missing: {told}");
    }
    let said = stdout(&first);
    assert!(said.contains("quickstart --target smollm2"), "{said}");
    let figures = last_json(&said);
    assert_eq!(figures["lossless"], true);
    let cells = figures["record"]["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 2);
    for cell in cells {
        assert_eq!((&cell["checked"], &cell["equal"]), (&2.into(), &2.into()));
        let tau = cell["figures"]["tau_incl_bonus"].as_f64().expect("tau");
        assert!((1.0..=6.0).contains(&tau), "{tau}");
    }
    for file in ["report.html", "decode.json", "held_out.json", "draft/draft_model_weights.pth"] {
        assert!(output.join(file).is_file(), "{file} is missing");
    }
    let page = std::fs::read_to_string(output.join("report.html")).expect("page");
    assert!(page.contains("Decoding"), "the page shows no decoding");

    // Finished stages are not trained again.
    let metrics = output.join("reasoning/metrics.jsonl");
    let before = std::fs::read(&metrics).expect("metrics");
    let again: Value = last_json(&stdout(&quickstart()));
    assert_eq!(again["tau"], figures["tau"]);
    assert_eq!(std::fs::read(&metrics).expect("metrics"), before);
}
