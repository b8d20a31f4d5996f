use proptest::prelude::*;

use super::*;
use crate::weights::TensorSpec;
use crate::weights::memory::MemorySource;

fn tensors() -> Vec<(String, Tensor)> {
    let specs = [
        TensorSpec::new("blocks.0.attn.c_q.weight", &[12, 20]),
        TensorSpec::new("blocks.0.attn_scale", &[20]),
        TensorSpec::new("blocks.0.big_vector", &[130]),
        TensorSpec::new("tok_emb.weight", &[16, 20]),
        TensorSpec::new("small.weight", &[2, 3]),
    ];
    let source = MemorySource::random(&specs, 0.5, 3).expect("random");
    let named = |name: String| {
        let tensor = source.load(&name, DType::F32).expect("tensor");
        (name, tensor)
    };
    source.names().into_iter().map(named).collect()
}

fn artifact(config: &QuantiseConfig) -> Artifact {
    let stored = |(name, tensor): (String, Tensor)| {
        let stored = quantise(&name, &tensor, config).expect("quantised");
        (name, stored)
    };
    Artifact {
        config: serde_json::json!({"vocab_size": 16}),
        tokenizer: "hash".to_owned(),
        tensors: tensors().into_iter().map(stored).collect(),
    }
}

fn low_threshold() -> QuantiseConfig {
    QuantiseConfig { keep_max_elements: 64, ..QuantiseConfig::default() }
}

#[test]
fn what_is_written_is_read_back_and_bytes_repeat() -> Result<()> {
    let modern = QuantiseConfig {
        format: QuantiseFormat::Modern,
        levels: 31,
        clip_deviations: Some(2.5),
        precision: BTreeMap::from([("c_q".to_owned(), 0)]),
        ..low_threshold()
    };
    let half = QuantiseConfig { embedding: Embedding::F16, ..low_threshold() };
    for config in [low_threshold(), half, modern] {
        assert!(config.problems().is_empty());
        let artifact = artifact(&config);
        for compression in [Compression::Zlib, Compression::Zstd] {
            let bytes = artifact.to_bytes(compression)?;
            assert_eq!(bytes, artifact.to_bytes(compression)?);
            assert_eq!(Artifact::from_bytes(&bytes).expect("readable"), artifact);
            let mut longer = bytes.clone();
            longer.push(0);
            assert!(Artifact::from_bytes(&longer).is_err());
        }
    }
    Ok(())
}

#[test]
fn a_file_is_a_weight_source_within_a_step_of_the_weights() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.ldq");
    let written = artifact(&low_threshold());
    let size = written.save(&path, Compression::Zlib)?;
    let source = ArtifactSource::open(&path)?;
    assert_eq!(size, std::fs::metadata(&path).expect("file").len());
    for (name, tensor) in tensors() {
        assert_eq!(source.shape(&name), Some(tensor.dims().to_vec()));
        let difference = (source.load(&name, DType::F32)? - tensor)?.abs()?.flatten_all()?;
        // Half a step of 1/127, and the rounding of f16.
        assert!(difference.max(0)?.to_scalar::<f32>()? < 0.6 / 127.0 * 2.0, "{name}");
    }
    let sizes = Sizes { artifact_bytes: size, payload_bytes: 0, code_bytes: SIZE_LIMIT - size };
    assert!(sizes.fits() && !Sizes { code_bytes: SIZE_LIMIT, ..sizes }.fits());
    assert_eq!(written.payload_bytes(), 12 * 20 + 12 * 2 + 20 * 4 + 130 + 4 + 320 + 32 + 12);
    Ok(())
}

#[test]
fn scales_beyond_f16_and_values_that_are_no_numbers_are_refused() -> Result<()> {
    for (value, part) in [(9e6_f32, "65504"), (f32::NAN, "NaN")] {
        let tensor = Tensor::full(value, (3, 40), &Device::Cpu)?;
        let message = quantise("x.weight", &tensor, &low_threshold()).expect_err("refused");
        let message = message.to_string();
        assert!(message.contains(part) && message.contains("`x.weight`"), "{message}");
    }
    Ok(())
}

#[test]
fn a_budget_chooses_the_finest_clipping_that_fits() -> Result<()> {
    let config = QuantiseConfig { format: QuantiseFormat::Modern, ..low_threshold() };
    let all = artifact(&config).to_bytes(Compression::Zlib)?.len() as u64;
    let whole = artifact(&config);
    let all_tensors = tensors();
    let held = (&all_tensors[..], &whole.config, whole.tokenizer.as_str());
    let fitted = fit_to_budget(held, &config, Compression::Zlib, all - 60)?;
    // The file that is written, its header and all, is as small as was asked.
    assert!(artifact(&fitted).to_bytes(Compression::Zlib)?.len() as u64 <= all - 60);
    assert!(fitted.clip_deviations.is_some_and(|k| (2.0..64.0).contains(&k)));
    let message = fit_to_budget(held, &config, Compression::Zlib, 10).expect_err("too few");
    assert!(message.to_string().contains("the smallest file has"), "{message}");
    Ok(())
}

#[test]
fn absurd_lengths_are_refused_without_memory() {
    let compress = |plain: &[u8]| zstd::bulk::compress(plain, 1).expect("compressed");
    let mut huge = b"LDQ8\x01\0\0\0".to_vec();
    huge.extend(u64::MAX.to_le_bytes());
    assert!(Artifact::from_bytes(&compress(&huge)).expect_err("header").contains("header of"));
    let with_header = |header: &str| {
        let mut plain = b"LDQ8\x01\0\0\0".to_vec();
        plain.extend((header.len() as u64).to_le_bytes());
        plain.extend(header.as_bytes());
        Artifact::from_bytes(&compress(&plain)).expect_err("refused")
    };
    let entry = |shape: &str, length: &str| {
        format!(
            "{{\"config\":null,\"tokenizer\":\"\",\"tensors\":[{{\"name\":\"a\",\"kind\":\"keep\",\
             \"dtype\":\"f32\",\"shape\":{shape},\"offset\":0,\"length\":{length},\
             \"original_dtype\":\"f32\"}}]}}"
        )
    };
    assert!(with_header(&entry("[4611686018427387904,4]", "0")).contains("for the shape"));
    assert!(with_header(&entry("[1073741824]", "4294967296")).contains("more than"));
    assert!(with_header(&entry("[3]", "12")).contains("ends after 0 of 12"));
    assert!(with_header("{}").contains("missing field"));
    assert!(Artifact::from_bytes(b"").is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_files_are_errors_and_never_panic(
        at in 0_usize..10_000, flip in 1_u8..=255, cut in 0_usize..10_000, zstd in any::<bool>(),
    ) {
        let compression = if zstd { Compression::Zstd } else { Compression::Zlib };
        let whole = artifact(&low_threshold());
        let bytes = whole.to_bytes(compression).expect("bytes");
        prop_assert!(Artifact::from_bytes(&bytes[..cut % bytes.len()]).is_err());
        let mut flipped = bytes.clone();
        let at = at % bytes.len();
        flipped[at] ^= flip;
        // A flip in codes that no checksum covers changes values, never the layout.
        if let Ok(read) = Artifact::from_bytes(&flipped) {
            prop_assert!(read.tensors.keys().eq(whole.tensors.keys()) || zstd);
        }
    }
}
