//! Complete shards written by a second thread, while the next one is captured.

use std::panic::resume_unwind;
use std::thread::{Scope, ScopedJoinHandle};

use super::write::{StoreWriter, Work};
use crate::error::Result;

/// Encodes, hashes and writes one shard at a time. Handing over the next one waits for it, so at most two
/// shards are in main memory, and the order on disk is that of [`StoreWriter::complete`].
///
/// The thread computes no tensors and asks for none of the process's worker threads: these may all be
/// waiting for it.
pub struct BackgroundWriter<'scope, 'env> {
    store: &'env StoreWriter,
    scope: &'scope Scope<'scope, 'env>,
    shard: Option<ScopedJoinHandle<'scope, Result<()>>>,
}

impl<'scope, 'env> BackgroundWriter<'scope, 'env> {
    /// Nothing is being written.
    pub fn new(store: &'env StoreWriter, scope: &'scope Scope<'scope, 'env>) -> Self {
        Self { store, scope, shard: None }
    }

    /// Waits for the shard before, then has this one written. Meanwhile it stays this process's.
    ///
    /// # Errors
    /// - the shard before could not be written; this one is given up
    pub fn complete(&mut self, mut work: Work) -> Result<()> {
        let store = self.store;
        if let Err(error) = store.hold_while(&mut work, || self.wait()) {
            // The claim of a process that ends is stale in any case.
            let _ = store.give_up(work);
            return Err(error);
        }
        self.shard = Some(self.scope.spawn(move || store.complete(work)));
        Ok(())
    }

    /// Whether all is well so far, without waiting.
    ///
    /// # Errors
    /// - a shard could not be written; it stays incomplete
    pub fn check(&mut self) -> Result<()> {
        let done = self.shard.as_ref().is_some_and(ScopedJoinHandle::is_finished);
        if done { self.wait() } else { Ok(()) }
    }

    /// Waits until nothing is being written.
    ///
    /// # Errors
    /// - as [`Self::check`]
    pub fn wait(&mut self) -> Result<()> {
        match self.shard.take().map(ScopedJoinHandle::join) {
            None => Ok(()),
            Some(Ok(written)) => written,
            Some(Err(panic)) => resume_unwind(panic),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use candle_core::{DType, Device, Tensor};
    use longdraft_data::Batch;

    use super::super::recipe::{Contents, Recipe, StoredTeacher};
    use super::super::record::Record;
    use super::super::write::Turn;
    use super::*;

    /// A store of shards of one row each.
    fn store(shards: usize) -> (tempfile::TempDir, StoreWriter) {
        let contents = Contents { last_kv: false, layers: vec![0], teacher: StoredTeacher::None };
        let recipe = Recipe::of_rows(&contents, shards, 2);
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().display().to_string();
        let store = StoreWriter::open(&path, recipe, false).expect("open");
        store.begin().expect("begin");
        (folder, store)
    }

    fn captured(store: &StoreWriter, shard: usize) -> Work {
        let (mut work, batch, record) = computed(store, shard, shard as f32);
        assert!(store.add(&mut work, batch, record).expect("add"));
        work
    }

    /// The row of a shard, all of one value, that is not yet added.
    fn computed(store: &StoreWriter, shard: usize, value: f32) -> (Work, Batch, Record) {
        let Turn::Mine(work) = store.take(&store.shards()[shard]).expect("take") else {
            panic!("shard {shard} is taken")
        };
        let batch = Batch { row: shard, ..Batch::of_document([1, 2]) };
        let layers = Tensor::full(value, (2, 3), &Device::Cpu).expect("layers");
        assert_eq!(layers.dtype(), DType::F32);
        (work, batch, Record { aux_hidden: Some(layers), ..Record::default() })
    }

    fn names(folder: &std::path::Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("folder").flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn shards_written_in_the_background_are_those_written_at_once() {
        let (at_once, first) = store(3);
        (0..3).for_each(|shard| first.complete(captured(&first, shard)).expect("written"));
        first.finish().expect("finish");
        let (later, second) = store(3);
        std::thread::scope(|scope| {
            let mut writer = BackgroundWriter::new(&second, scope);
            for shard in 0..3 {
                writer.complete(captured(&second, shard)).expect("written");
                writer.check().expect("well");
            }
            writer.wait().expect("written");
        });
        second.finish().expect("finish");
        assert_eq!(names(at_once.path()), names(later.path()));
        assert!(names(&later.path().join("claims")).is_empty());
        for name in names(at_once.path()).iter().filter(|name| *name != "claims") {
            let read = |folder: &tempfile::TempDir| std::fs::read(folder.path().join(name));
            assert_eq!(read(&at_once).expect("file"), read(&later).expect("file"), "{name}");
        }
    }

    /// A failure is told at the next occasion; what was captured meanwhile is given up, and only what was
    /// written before stays.
    #[test]
    fn a_shard_that_cannot_be_written_ends_the_capture_without_half_ones() {
        let (folder, store) = store(4);
        std::fs::create_dir_all(folder.path().join("train-00001.safetensors/taken")).expect("made");
        std::thread::scope(|scope| {
            let mut writer = BackgroundWriter::new(&store, scope);
            writer.complete(captured(&store, 0)).expect("handed over");
            writer.complete(captured(&store, 1)).expect("handed over");
            let next = captured(&store, 2);
            let told = writer.complete(next).expect_err("no file").to_string();
            assert!(told.contains("train-00001"), "{told}");
            writer.wait().expect("told once");
        });
        let left = names(folder.path());
        assert!(left.contains(&"train-00000.json".to_owned()), "{left:?}");
        assert!(!left.iter().any(|name| name.contains("00001.json") || name.contains("00002")));
        assert!(names(&folder.path().join("claims")).is_empty());
    }

    /// What another process took over while it waited is that process's, until it is done with it.
    #[test]
    fn a_shard_that_was_overtaken_is_written_only_if_it_is_let_go() {
        let (folder, store) = store(1);
        let work = captured(&store, 0);
        let claim = |number: usize| folder.path().join(format!("claims/train-00000.{number}"));
        std::fs::copy(claim(0), claim(1)).expect("taken over");
        let written = || names(folder.path()).iter().any(|name| name.starts_with("train-00000"));
        std::thread::scope(|scope| {
            let mut writer = BackgroundWriter::new(&store, scope);
            writer.complete(work).expect("handed over");
            std::thread::sleep(Duration::from_millis(100));
            let early = written();
            [1, 0].iter().for_each(|n| std::fs::remove_file(claim(*n)).expect("let go"));
            writer.wait().expect("written");
            assert!(!early, "written beside the other process");
        });
        assert!(written());
        store.finish().expect("complete");
        assert!(names(&folder.path().join("claims")).is_empty());
    }

    #[test]
    fn rows_that_are_not_finite_are_refused_as_they_come() {
        let (_folder, store) = store(2);
        for (shard, value) in [f32::NAN, f32::MAX].into_iter().enumerate() {
            // The largest f32 is infinite in bf16.
            let (mut work, batch, record) = computed(&store, shard, value);
            let told = store.add(&mut work, batch, record).expect_err("refused").to_string();
            assert!(told.contains(&format!("row {shard} are not finite numbers")), "{told}");
        }
    }

    #[test]
    fn a_failure_is_noticed_without_waiting_for_the_next_shard() {
        let (folder, store) = store(1);
        std::fs::create_dir_all(folder.path().join("train-00000.safetensors/taken")).expect("made");
        std::thread::scope(|scope| {
            let mut writer = BackgroundWriter::new(&store, scope);
            writer.complete(captured(&store, 0)).expect("handed over");
            let started = std::time::Instant::now();
            while writer.check().is_ok() {
                assert!(started.elapsed().as_secs() < 60, "never told");
                std::thread::yield_now();
            }
        });
    }
}
