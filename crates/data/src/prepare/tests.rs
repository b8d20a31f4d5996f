//! Folders of shards: what they hold, how they go on, and what is refused.

use super::*;
use crate::document::tests::{Bytes, Other};
use crate::shards::read;

struct Shop {
    dir: tempfile::TempDir,
    sources: Vec<Source>,
}

impl Shop {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        let rows: String = (0..40)
            .map(|i| match i {
                7 => "{broken\n".to_owned(),
                _ => format!("{{\"text\": \"row {i} {}\"}}\n", "x".repeat(i)),
            })
            .collect();
        std::fs::write(dir.path().join("a.jsonl"), rows).expect("write");
        std::fs::write(dir.path().join("b.txt"), "a text").expect("write");
        let source = |name: &str| {
            let path = dir.path().join(name);
            let config = SourceConfig { path: path.clone(), ..SourceConfig::default() };
            Source { config, paths: vec![path] }
        };
        let sources = vec![source("a.jsonl"), source("b.txt")];
        Self { dir, sources }
    }

    fn prepare(&self, name: &str) -> Result<(Index, Progress)> {
        let options = PrepareOptions {
            output: self.dir.path().join(name),
            shard_bytes: 300,
            max_bad_rows: 0.1,
        };
        let mut last = None;
        let index =
            prepare(&self.sources, &Bytes, &options, &mut |progress| last = Some(progress))?;
        Ok((index, last.expect("shards")))
    }

    fn files(&self, name: &str) -> Vec<(String, Vec<u8>)> {
        let mut files: Vec<_> = std::fs::read_dir(self.dir.path().join(name))
            .expect("folder")
            .map(|entry| entry.expect("entry").path())
            .map(|p| (p.display().to_string().replace(name, ""), std::fs::read(p).expect("file")))
            .collect();
        files.sort();
        files
    }
}

#[test]
fn shards_hold_what_reading_the_sources_gives() -> Result<()> {
    let shop = Shop::new();
    let (index, progress) = shop.prepare("out")?;
    assert!(progress.shards > 3 && progress.reused == 0);
    assert_eq!((index.sources[0].rows, index.sources[0].bad), (40, 1));
    let folder = shop.dir.path().join("out");
    assert!(crate::shards::is_shards(&folder));
    let (documents, report) = read(&folder, &Bytes, None)?;
    assert_eq!((report.documents, report.tokens), (index.documents, index.tokens));
    let mut expected = Vec::new();
    for source in &shop.sources {
        let reader = SourceReader::open(&source.config, source.paths.clone(), &Bytes)?;
        let mut quarantine = Quarantine::new(None, 1.0)?;
        expected.extend(crate::reader::read_documents(&reader, &mut quarantine)?.0);
    }
    assert_eq!(documents, expected);
    assert_eq!(read(&folder, &Bytes, Some(1))?.0, expected[..1]);
    let aside = std::fs::read_to_string(folder.join("quarantine.jsonl")).expect("quarantine");
    assert!(aside.contains("a.jsonl:8"), "{aside}");
    Ok(())
}

#[test]
fn a_run_goes_on_after_its_complete_shards_and_ends_with_the_same_bytes() -> Result<()> {
    let shop = Shop::new();
    shop.prepare("whole")?;
    let (_, all) = shop.prepare("cut")?;
    let folder = shop.dir.path().join("cut");
    let remove = |name: &str| std::fs::remove_file(folder.join(name)).expect("remove");
    // What a kill leaves: no index, a shard without receipt, half a file beside.
    remove("index.json");
    remove("shard-00002.json");
    std::fs::write(folder.join("shard-00003.bin"), "torn").expect("write");
    std::fs::write(folder.join("shard-00003.partial"), "half").expect("write");
    let message = read(&folder, &Bytes, None).expect_err("no index").to_string();
    assert!(message.contains("not finished"), "{message}");
    let (_, resumed) = shop.prepare("cut")?;
    assert_eq!((resumed.reused, resumed.shards), (all.shards - 2, all.shards));
    assert_eq!(shop.files("whole"), shop.files("cut"));
    Ok(())
}

#[test]
fn shards_of_other_rules_or_another_template_are_refused() -> Result<()> {
    let changed = Other::default();
    let mut shop = Shop::new();
    let chat = shop.dir.path().join("c.jsonl");
    std::fs::write(&chat, "{\"question\": \"q\", \"answer\": \"a\"}\n").expect("write");
    let plain = shop.prepare("plain")?.0;
    assert_eq!((plain.rules, plain.chat_template), (Some(RULES), None));
    let plain = shop.dir.path().join("plain");
    // No text of these goes through a chat template.
    assert!(read(&plain, &changed, None).is_ok() && crate::shards::check(&plain, &changed).is_ok());
    let config = SourceConfig { path: chat.clone(), ..SourceConfig::default() };
    shop.sources.push(Source { config, paths: vec![chat] });
    let folder = shop.dir.path().join("out");
    shop.prepare("out")?;
    let message = read(&folder, &changed, None).expect_err("template").to_string();
    assert!(message.contains("another chat template than the target's"), "{message}");
    let options = PrepareOptions { output: folder.clone(), shard_bytes: 300, max_bad_rows: 0.1 };
    let message = prepare(&shop.sources, &changed, &options, &mut |_| ());
    let message = message.expect_err("template").to_string();
    assert!(message.contains("another recipe (chat_template differ)"), "{message}");
    // Shards without rules are neither gone on with nor read.
    for name in ["index.json", "recipe.json"] {
        let path = folder.join(name);
        let mut value: serde_json::Value = read_json(&path)?;
        value.as_object_mut().expect("object").remove("rules");
        write_json(&path, &value)?;
    }
    let message = shop.prepare("out").expect_err("rules").to_string();
    assert!(message.contains("prepared by another version of this program"), "{message}");
    assert!(message.contains("give another output"), "{message}");
    for problem in [read(&folder, &Bytes, None).map(|_| ()), crate::shards::check(&folder, &Bytes)]
    {
        let message = problem.expect_err("rules").to_string();
        assert!(message.contains("prepare the data again, into another folder"), "{message}");
    }
    Ok(())
}

#[test]
fn another_recipe_changed_rows_and_damage_are_refused() -> Result<()> {
    let mut shop = Shop::new();
    shop.prepare("out")?;
    let folder = shop.dir.path().join("out");
    let source = shop.sources[0].config.path.clone();
    let text = std::fs::read_to_string(&source).expect("read");
    std::fs::write(&source, text.replace("row 3", "row 9")).expect("write");
    let message = shop.prepare("out").expect_err("changed").to_string();
    assert!(message.contains("a.jsonl: changed since shard-00000.bin"), "{message}");
    shop.sources.pop();
    let message = shop.prepare("out").expect_err("recipe").to_string();
    assert!(message.contains("another recipe (") && message.contains("sources"), "{message}");
    let shard = folder.join("shard-00001.bin");
    let mut bytes = std::fs::read(&shard).expect("read");
    *bytes.last_mut().expect("bytes") ^= 1;
    std::fs::write(&shard, bytes).expect("write");
    let message = read(&folder, &Bytes, None).expect_err("damaged").to_string();
    assert!(message.contains("shard-00001.bin: damaged"), "{message}");
    // Of the first rows alone the damaged shard is not read.
    assert_eq!(crate::shards::first(&folder, &Bytes, 2)?.len(), 2);
    assert!(crate::shards::first(&folder, &Bytes, usize::MAX).is_err());
    std::fs::remove_file(&shard).expect("remove");
    std::fs::create_dir(&shard).expect("folder");
    let message = read(&folder, &Bytes, None).expect_err("a folder").to_string();
    assert!(message.contains("shard-00001.bin: no regular file"), "{message}");
    let index = folder.join("index.json");
    let text = std::fs::read_to_string(&index).expect("read");
    std::fs::write(&index, text.replace("\"bytes\"", "\"other\"")).expect("write");
    let message = read(&folder, &Bytes, None).expect_err("tokenizer").to_string();
    assert!(message.contains("another tokenizer (other, the target's is bytes)"), "{message}");
    let elsewhere = text.replace("shard-00001.bin", "../shard-00001.bin");
    std::fs::write(&index, elsewhere).expect("write");
    let message = read(&folder, &Bytes, None).expect_err("elsewhere").to_string();
    assert!(message.contains("index.json") && message.contains("not the name"), "{message}");
    Ok(())
}
