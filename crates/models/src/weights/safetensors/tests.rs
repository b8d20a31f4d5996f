use super::*;
use candle_core::Device;

fn tensors() -> Vec<(String, Tensor)> {
    let a = Tensor::arange(0.0_f32, 6.0, &Device::Cpu).and_then(|t| t.reshape((2, 3)));
    let b = Tensor::new(&[0.5_f32, -1.0], &Device::Cpu);
    vec![("a".into(), a.expect("a")), ("b".into(), b.expect("b"))]
}

#[test]
fn what_is_written_is_read_back_in_any_dtype() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.safetensors");
    save(&path, &tensors(), HashMap::from([("mode".into(), "default".into())]))?;
    let source = SafetensorsSource::open_folder(dir.path())?;
    assert_eq!(source.names(), ["a", "b"]);
    assert_eq!(source.shape("a"), Some(vec![2, 3]));
    assert_eq!(source.metadata()["mode"], "default");
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let b = source.load("b", dtype)?;
        assert_eq!(b.dtype(), dtype);
        assert_eq!(b.to_dtype(DType::F32)?.to_vec1::<f32>()?, [0.5, -1.0]);
    }
    Ok(())
}

#[test]
fn the_same_tensors_and_metadata_give_the_same_bytes() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.safetensors");
    let mut written = std::collections::BTreeSet::new();
    for _ in 0..8 {
        // A new map each time: maps differ in their order.
        let metadata = (0..20).map(|key| (format!("key {key}"), format!("{key} \"é\"")));
        save(&path, &tensors(), metadata.collect())?;
        written.insert(std::fs::read(&path).expect("read"));
    }
    assert_eq!(written.len(), 1);
    let source = SafetensorsSource::open_file(&path)?;
    assert_eq!(source.metadata()["key 7"], "7 \"é\"");
    assert_eq!(source.load("b", DType::F32)?.to_vec1::<f32>()?, [0.5, -1.0]);
    save(&path, &[], HashMap::from([("a".into(), "b".into())]))?;
    assert_eq!(SafetensorsSource::open_file(&path)?.metadata()["a"], "b");
    Ok(())
}

#[test]
fn integers_and_flags_are_read_back() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("map.safetensors");
    let offsets = Tensor::new(&[0_i64, 7, -2], &Device::Cpu)?;
    let flags = Tensor::new(&[1_u8, 0], &Device::Cpu)?;
    save(&path, &[("d2t".into(), offsets), ("t2d".into(), flags)], HashMap::new())?;
    let source = SafetensorsSource::open_file(&path)?;
    assert_eq!(source.load_integers("d2t")?, [0, 7, -2]);
    assert_eq!(source.load_integers("t2d")?, [1, 0]);
    assert!(source.load("d2t", DType::F32).is_err());
    Ok(())
}

#[test]
fn sharded_folder_is_read_and_its_faults_are_listed() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let all = tensors();
    save(&dir.path().join("one.safetensors"), &all[..1], HashMap::new())?;
    save(&dir.path().join("two.safetensors"), &all[1..], HashMap::new())?;
    let index = dir.path().join("model.safetensors.index.json");
    let write = |map: &str| {
        std::fs::write(&index, format!("{{\"weight_map\": {map}}}")).expect("write index");
    };
    write(r#"{"a": "one.safetensors", "b": "two.safetensors"}"#);
    assert_eq!(SafetensorsSource::open_folder(dir.path())?.names(), ["a", "b"]);
    write(r#"{"a": "two.safetensors", "b": "two.safetensors"}"#);
    let message = fails(dir.path());
    assert!(message.contains("`a` is not in `two.safetensors`"), "{message}");
    write(r#"{"a": "../one.safetensors", "b": "absent.safetensors"}"#);
    let message = fails(dir.path());
    assert!(message.contains("`../one.safetensors` is not a file of this folder"), "{message}");
    assert!(message.contains("absent.safetensors"), "{message}");
    Ok(())
}

fn fails(folder: &Path) -> String {
    SafetensorsSource::open_folder(folder).expect_err("an error").to_string()
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_is_an_error() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.safetensors");
    save(&path, &tensors(), HashMap::new())?;
    let source = SafetensorsSource::open_file(&path)?;
    let length = std::fs::metadata(&path).expect("file").len();
    let file = std::fs::File::options().write(true).open(&path).expect("file");
    file.set_len(length - 4).expect("cut");
    let message = source.load("b", DType::F32).expect_err("cut off").to_string();
    assert!(message.contains("model.safetensors: ") && message.contains("was cut off"));
    assert!(source.load_as_stored("b").is_err());
    assert_eq!(source.load("a", DType::F32)?.dims(), [2, 3]);
    Ok(())
}

#[test]
fn truncated_and_absurd_headers_are_errors() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.safetensors");
    save(&path, &tensors(), HashMap::new())?;
    let whole = std::fs::read(&path).expect("read");
    for length in 0..whole.len() {
        std::fs::write(&path, &whole[..length]).expect("write");
        assert!(SafetensorsSource::open_file(&path).is_err(), "prefix of {length} bytes");
    }
    let mut absurd = whole.clone();
    absurd[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    std::fs::write(&path, &absurd).expect("write");
    assert!(fails(dir.path()).contains("not safetensors"));
    std::fs::write(&path, &whole[..whole.len() - 1]).expect("write");
    assert!(fails(dir.path()).contains("31 of 32 bytes of tensors are there"));
    std::fs::write(&path, [&whole[..], b"x"].concat()).expect("write");
    assert!(fails(dir.path()).contains("1 bytes follow the tensors"));
    Ok(())
}
