use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;

use super::pickle::parse;
use super::{PthSource, save};
use crate::error::Result;
use crate::test_support::assert_refused;
use crate::weights::WeightSource;

fn tensors() -> Vec<(String, Tensor)> {
    let a = Tensor::arange(0.0_f32, 600.0, &Device::Cpu).and_then(|t| t.reshape((2, 300)));
    let b = Tensor::new(&[0.5_f32, -1.0], &Device::Cpu).and_then(|t| t.to_dtype(DType::BF16));
    vec![("layer.weight".into(), a.expect("a")), ("layer.bias".into(), b.expect("b"))]
}

#[test]
fn what_is_written_is_read_back() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("draft.pth");
    save(&path, &tensors())?;
    let source = PthSource::open(&path)?;
    assert_eq!(source.names(), ["layer.bias", "layer.weight"]);
    let weight = source.load("layer.weight", DType::F32)?;
    assert_eq!(weight.to_vec2::<f32>()?[1][299].to_bits(), 599.0_f32.to_bits());
    assert_eq!(source.load("layer.bias", DType::F32)?.to_vec1::<f32>()?, [0.5, -1.0]);
    Ok(())
}

#[test]
fn storages_begin_at_multiples_of_64_bytes() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("draft.pth");
    save(&path, &tensors())?;
    let mut archive = zip::ZipArchive::new(std::fs::File::open(&path).expect("file")).expect("zip");
    for index in 0..2 {
        let entry = archive.by_name(&format!("archive/data/{index}")).expect("a storage");
        let start: u64 = entry.data_start().expect("a place");
        assert_eq!(start % 64, 0, "storage {index} at {start}");
    }
    Ok(())
}

#[test]
fn integers_and_flags_are_read_back_and_are_no_weights() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("map.pth");
    let offsets = Tensor::new(&[0_i64, 7, -2], &Device::Cpu)?;
    let flags = Tensor::new(&[1_u8, 0], &Device::Cpu)?;
    save(&path, &[("d2t".into(), offsets), ("t2d".into(), flags)])?;
    let source = PthSource::open(&path)?;
    assert_eq!(source.load_integers("d2t")?, [0, 7, -2]);
    assert_eq!(source.load_integers("t2d")?, [1, 0]);
    assert!(source.load("t2d", DType::F32).is_err());
    Ok(())
}

#[test]
fn truncated_files_are_errors() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("draft.pth");
    save(&path, &tensors())?;
    let whole = std::fs::read(&path).expect("read");
    for length in (0..whole.len()).step_by(13) {
        std::fs::write(&path, &whole[..length]).expect("write");
        assert!(PthSource::open(&path).is_err(), "prefix of {length} bytes");
    }
    Ok(())
}

#[test]
fn calling_anything_else_is_refused_by_name() {
    // What `pickle.dumps` makes of an object whose __reduce__ is (os.system, ("true",)).
    let hostile = b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.";
    assert_refused(parse(hostile), &["`posix.system` is called"]);
}

#[test]
fn deep_nesting_and_absurd_lengths_are_errors() {
    let mut deep = vec![0x80, 2, b'N'];
    deep.extend(std::iter::repeat_n(0x85, 1_000_000));
    deep.push(b'.');
    assert!(parse(&deep).expect_err("refused").contains("nest deeper"));
    assert!(parse(b"\x80\x02X\xff\xff\xff\xff").expect_err("refused").contains("in the middle"));
}

#[test]
fn lists_that_grow_item_by_item_are_read_and_copied_ones_refused() {
    let items = 600_000;
    let appended = |item: &[u8]| {
        let mut pickle = b"\x80\x02]q\0".to_vec();
        for _ in 0..items {
            pickle.extend(item);
        }
        pickle.push(b'.');
        pickle
    };
    assert!(parse(&appended(b"Na")).is_ok());
    assert!(parse(&appended(b"h\0a")).is_ok());
    for copied in [&b"Naq\0"[..], b"(Neq\0"] {
        assert_refused(parse(&appended(copied)), &["grow after they were referred to"]);
    }
    let mut dict = b"\x80\x02}q\0".to_vec();
    for _ in 0..items {
        dict.extend(b"NNsq\0");
    }
    assert!(parse(&dict).expect_err("refused").contains("referred to"));
}

#[test]
fn names_and_shapes_without_measure_are_errors() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("draft.pth");
    // A dict of dicts, whose keys are all the same long text.
    let mut pickle = b"\x80\x02X\0\0\x10\0".to_vec();
    pickle.extend(vec![b'k'; 1 << 20]);
    pickle.extend(b"q\x00N");
    for _ in 0..60 {
        // The value, an empty dict, its key, the value again.
        pickle.extend(b"q\x01}h\0h\x01s");
    }
    pickle.push(b'.');
    write_pickle(&path, &pickle);
    assert_refused(PthSource::open(&path).map(|_| ()), &["names have more than"]);
    let mut pickle = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storage".to_vec();
    pickle.extend(b"ctorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQK\0(");
    pickle.extend([b'K', 1].repeat(100));
    pickle.extend(b"t)tR.");
    assert_refused(parse(&pickle), &["a tensor of 100 dimensions"]);
}

/// A zip with this pickle and nothing else.
fn write_pickle(path: &std::path::Path, pickle: &[u8]) {
    use std::io::Write;
    let mut zip = zip::ZipWriter::new(std::fs::File::create(path).expect("file"));
    zip.start_file("archive/data.pkl", zip::write::SimpleFileOptions::default()).expect("entry");
    zip.write_all(pickle).expect("pickle");
    zip.finish().expect("zip");
}

#[test]
fn what_would_take_much_more_room_than_the_file_is_refused() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("draft.pth");
    // One value that is remembered under ever new numbers.
    let mut pickle = b"\x80\x04N".to_vec();
    pickle.resize((1 << 20) + 4, 0x94);
    pickle.push(b'.');
    assert_refused(parse(&pickle), &["values are remembered"]);
    // Values by the million, which hardly take room in the zip.
    write_pickle(&path, &vec![b'N'; (16 << 20) + 1]);
    assert_refused(PthSource::open(&path).map(|_| ()), &["data.pkl` is larger than"]);
}

#[test]
fn values_that_are_shared_over_and_over_are_errors_and_soon() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("draft.pth");
    // A dict that holds the one before twice, sixty times over: 2^60 paths to an empty one.
    let mut pickle = b"\x80\x02}q\x00".to_vec();
    for level in 0..60_u8 {
        pickle.extend(b"}(X\x01\x00\x00\x00ah");
        pickle.push(level);
        pickle.extend(b"X\x01\x00\x00\x00bh");
        pickle.push(level);
        pickle.extend(b"uq");
        pickle.push(level + 1);
    }
    let mut of_dicts = pickle.clone();
    of_dicts.push(b'.');
    write_pickle(&path, &of_dicts);
    assert_refused(PthSource::open(&path), &["more than"]);
    // As a name where a string belongs: the message must not print it.
    pickle.extend(b"h\x3c\x93.");
    assert!(parse(&pickle).expect_err("refused").contains("found a dict"));
}

#[test]
fn sizes_that_only_the_zip_claims_are_errors() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("draft.pth");
    save(&path, &tensors())?;
    let source = PthSource::open(&path)?;
    let whole = std::fs::read(&path).expect("read");
    // The file shrinks under an opened source.
    save(&path, &[("layer.weight".into(), Tensor::new(&[1.0_f32], &Device::Cpu)?)])?;
    assert!(std::fs::metadata(&path).expect("file").len() < whole.len() as u64);
    assert_refused(source.load("layer.weight", DType::F32), &["cut short"]);
    Ok(())
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes);
    }

    #[test]
    fn damaged_pickles_never_panic(at in 0_usize..400, byte: u8) {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("draft.pth");
        save(&path, &tensors()).expect("save");
        let mut bytes = std::fs::read(&path).expect("read");
        bytes[at] = byte;
        std::fs::write(&path, &bytes).expect("write");
        if let Ok(source) = PthSource::open(&path) {
            for name in source.names() {
                let _ = source.load(&name, DType::F32);
            }
        }
    }
}
