//! libFuzzer over one of the readers, which `LONGDRAFT_FUZZ_READER` names.
//!
//! With `LONGDRAFT_FUZZ_WRITE=FOLDER` it writes the seeds and the dictionary of every reader there in
//! place of fuzzing, and prints each reader's name and longest input.

#![no_main]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};

use libfuzzer_sys::fuzz_target;
use longdraft_fuzz::{READERS, Reader, dictionary, seeds};

static READER: LazyLock<&Reader> = LazyLock::new(|| {
    let name =
        std::env::var("LONGDRAFT_FUZZ_READER").expect("LONGDRAFT_FUZZ_READER names a reader");
    READERS.iter().find(|reader| reader.name == name).expect("a reader that exists")
});

/// What the last panic said. Readers may catch panics of the libraries below them, so that a panic
/// alone is no finding.
static PANIC: Mutex<String> = Mutex::new(String::new());

fn start() {
    std::panic::set_hook(Box::new(|panic| {
        let trace = std::backtrace::Backtrace::capture();
        *PANIC.lock().unwrap_or_else(PoisonError::into_inner) = format!("{panic}\n{trace}");
    }));
    if let Some(folder) = std::env::var_os("LONGDRAFT_FUZZ_WRITE") {
        write(Path::new(&folder));
        std::process::exit(0);
    }
    LazyLock::force(&READER);
}

fn write(folder: &Path) {
    for reader in READERS {
        let place = folder.join(reader.name);
        std::fs::create_dir_all(&place).expect("a folder");
        for seed in seeds(reader) {
            std::fs::write(place.join(seed.name), seed.bytes).expect("written");
        }
        std::fs::write(folder.join(format!("{}.dict", reader.name)), dictionary(reader))
            .expect("written");
        eprintln!("{} {}", reader.name, reader.longest);
    }
}

fuzz_target!(init: start(), |bytes: &[u8]| {
    if catch_unwind(AssertUnwindSafe(|| READER.accepts(bytes))).is_err() {
        eprintln!("{}", PANIC.lock().unwrap_or_else(PoisonError::into_inner));
        std::process::abort();
    }
});
