//! Every seed through the function that the fuzzer calls: nothing panics, hangs or takes more than
//! the memory limit, and valid inputs are accepted.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use longdraft_fuzz::{READERS, Reader, Seed, seeds};

/// An input takes milliseconds. What is not done by now never ends, or nearly so.
const HANG: Duration = Duration::from_mins(1);

/// The stack of the threads that commands run on.
const STACK: usize = 2 << 20;

/// Runs all seeds of a reader.
fn run(name: &str) {
    let reader: &'static Reader =
        READERS.iter().find(|reader| reader.name == name).expect("a reader");
    let (start, seeds_of) = channel::<Seed>();
    let (accepted, outcomes) = channel();
    let work = move || {
        for seed in seeds_of {
            let _ = accepted.send(reader.accepts(&seed.bytes));
        }
    };
    std::thread::Builder::new().stack_size(STACK).spawn(work).expect("a thread");
    for seed in seeds(reader) {
        let (seed_name, valid) = (seed.name.clone(), seed.name.starts_with("valid-"));
        eprintln!("{name}: {seed_name}");
        start.send(seed).expect("the reader lives");
        match outcomes.recv_timeout(HANG) {
            Ok(accepted) => assert!(accepted || !valid, "{name}: {seed_name} is refused"),
            Err(RecvTimeoutError::Timeout) => panic!("{name}: {seed_name} takes too long"),
            Err(RecvTimeoutError::Disconnected) => panic!("{name}: {seed_name} panics"),
        }
    }
}

/// A test a reader, so that each runs in a process of its own.
macro_rules! tests {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                run(stringify!($name));
            }
        )*

        #[test]
        fn every_reader_has_its_test() {
            let names: Vec<&str> = READERS.iter().map(|reader| reader.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

tests! {
    safetensors shard_index gguf gguf_draft pth pickle artifact
    target_config hybrid_config eagle3_config glide_config language_model_config
    tokenizer_json tokenizer_config sentence_piece chat_template
    configuration
    jsonl json compressed_rows parquet arrow token_stream data_shard data_index
    feature_shard feature_index feature_record engine_record cache_manifest cache_index
    checkpoint_state checkpoint_manifest checkpoint_optimizer token_counts
    export_manifest export_config export_weights hub_answers
}

#[test]
fn every_folder_of_seeds_has_its_reader() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds");
    for entry in std::fs::read_dir(folder).expect("seeds") {
        let name = entry.expect("an entry").file_name();
        assert!(READERS.iter().any(|reader| name == reader.name), "no reader {name:?}");
    }
}
