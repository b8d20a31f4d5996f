//! Random bytes.

use super::*;
use longdraft_models::draft::open_draft;

/// Number of spoiled folders of each profile; more with `LONGDRAFT_FUZZ_CASES`.
fn cases() -> u64 {
    let given =
        std::env::var("LONGDRAFT_FUZZ_CASES").ok().and_then(|text| text.parse::<u64>().ok());
    given.map_or(60, |cases| cases / 50)
}

/// Bytes changed anywhere in any file: never a panic; restored files are clean again.
#[test]
fn spoiled_bytes_never_panic() {
    use longdraft_kernels::random::CounterRng;
    let bench = Bench::new();
    for profile in [Profile::Vllm, Profile::Speculators, Profile::Llamacpp, Profile::Longspec] {
        let folder = bench.export(profile);
        let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
            .expect("folder")
            .map(|entry| entry.expect("entry").path())
            .collect();
        files.sort();
        let target = &bench.target.target;
        for case in 0..cases() {
            let mut rng = CounterRng::new(case, profile.name(), &[]);
            let mut draw = |below: usize| (rng.uniform() * below as f64) as usize % below.max(1);
            let file = &files[draw(files.len())];
            let clean = std::fs::read(file).expect("read");
            let mut bytes = clean.clone();
            // Headers and keys more often than weights.
            let reach = if draw(3) > 0 { bytes.len().min(600) } else { bytes.len() };
            for _ in 0..=draw(3) {
                let at = draw(reach);
                bytes[at] = draw(256) as u8;
            }
            if draw(4) == 0 {
                bytes.truncate(draw(clean.len()));
            }
            std::fs::write(file, &bytes).expect("write");
            let _ = bench.check(&folder);
            let _ = open_draft(&folder, target);
            std::fs::write(file, clean).expect("restore");
        }
        assert!(bench.check(&folder).is_clean(true), "restored");
    }
}
