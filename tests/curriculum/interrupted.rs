//! Stages that are killed, find damaged files, or have no disk left.

use longdraft_kernels::random::CounterRng;

use super::*;
use crate::support::processes::{kill, killed_after, start, wait_until};

#[test]
fn fifty_kills_at_random_moments_lose_nothing() {
    let shop = Workshop::new();
    let config = curriculum(&shop);
    let more = ["train.epochs=4", "train.save_every=2"];
    let whole = shop.path("whole");
    succeed(&[&["train", &config, &format!("output={whole}")], &more[..]].concat());
    let killed = shop.path("killed");
    let output = format!("output={killed}");
    let mut random = CounterRng::new(1, "kills", &[0]);
    let mut kills = 0;
    loop {
        // After fifty kills the run may end.
        let changes = if kills < 50 { 1 + random.below(40) as usize } else { usize::MAX };
        let mut train = longdraft(&[&["train", &config, &output], &more[..]].concat());
        if killed_after(changes, Path::new(&killed), &mut train) {
            kills += 1;
            continue;
        }
        if kills >= 50 {
            break;
        }
        // It ended before fifty kills: go on from nothing.
        std::fs::remove_dir_all(&killed).expect("remove");
    }
    assert_eq!(fingerprint(&whole), fingerprint(&killed));
    let leftovers = std::fs::read_dir(format!("{killed}/base/checkpoints")).expect("folder");
    let names: Vec<String> =
        leftovers.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    assert!(names.iter().all(|name| !name.starts_with('.')), "{names:?}");
}

#[test]
fn a_flipped_byte_in_any_file_of_the_last_checkpoint_falls_back() {
    let (shop, config) = Workshop::new().with_config();
    succeed(&["train", &config, "train.steps=12"]);
    let checkpoints = shop.path("run/checkpoints");
    let files: Vec<_> =
        std::fs::read_dir(format!("{checkpoints}/last")).expect("folder").flatten().collect();
    assert!(files.len() >= 5, "draft, optimizer, state, tokenizer, manifest");
    for file in files {
        let bytes = std::fs::read(file.path()).expect("read");
        let mut flipped = bytes.clone();
        let middle = flipped.len() / 2;
        flipped[middle] ^= 1;
        std::fs::write(file.path(), flipped).expect("write");
        // Read only: what is resumed from is asked of a run that has nothing left to do but fail.
        let text = noted(&["train", &config, "train.steps=12"]);
        assert!(text.contains("warning: ") && text.contains("resumed after step"), "{text}");
        let name = file.file_name().to_string_lossy().into_owned();
        assert!(text.contains(&name) || name == "manifest.json", "{name} not in {text}");
        assert!(!text.contains("panicked"), "{text}");
    }
}

#[test]
fn two_processes_do_not_share_a_run_directory() {
    let (shop, config) = Workshop::new().with_config();
    let first = start(&mut longdraft(&["train", &config, "train.epochs=2000"]));
    let metrics = shop.path("run/metrics.jsonl");
    wait_until("the first process", || Path::new(&metrics).is_file());
    let number = first.id();
    let text = fail(&["train", &config, "train.epochs=2000"], 1);
    kill(first);
    let told = format!("another process works in this folder (process {number} on ");
    assert!(text.contains(&told), "{text}");
}

#[test]
fn a_disk_that_fills_up_stops_the_run_and_spoils_nothing() {
    let (shop, config) = Workshop::new().with_config();
    succeed(&["train", &config, "train.steps=4"]);
    let saved = std::fs::read(shop.path("run/checkpoints/last/draft.safetensors")).expect("saved");
    // Files may not grow beyond 8 KiB: writing the next checkpoint fails in the middle.
    let binary = env!("CARGO_BIN_EXE_longdraft");
    let script = format!(
        "trap '' XFSZ; ulimit -f 8; exec {binary} train {config} train.steps=8 --force-resume --threads 1"
    );
    let output = std::process::Command::new("bash").args(["-c", &script]).output().expect("bash");
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("error: ") && !text.contains("panicked"), "{text}");
    let after = std::fs::read(shop.path("run/checkpoints/last/draft.safetensors")).expect("kept");
    assert_eq!(saved, after);
    let left: Vec<_> =
        std::fs::read_dir(shop.path("run/checkpoints")).expect("folder").flatten().collect();
    assert!(left.iter().all(|entry| !entry.file_name().to_string_lossy().starts_with('.')));
    // With room again it goes on.
    succeed(&["train", &config, "train.steps=8", "--force-resume"]);
}
