//! Weights in the types of their files: what is computed with them, and what is told.

use longdraft_models::draft::Init;
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::target_model::gguf::GgufSource;
use longdraft_models::weights::WeightSource;

use super::*;
use crate::support::files::write_tensors;
use crate::support::{relative_error, run, stdout, succeed};

/// Files of blocks by the type's name, of every type that there is a writer for; and uneven values,
/// whose blocks are as large as those of another type.
fn files_of_blocks() -> Vec<(&'static str, Vec<u8>)> {
    let types = [
        ("Q4_0", GgmlDType::Q4_0),
        ("Q4_1", GgmlDType::Q4_1),
        ("Q5_0", GgmlDType::Q5_0),
        ("Q5_1", GgmlDType::Q5_1),
        ("Q8_0", GgmlDType::Q8_0),
        ("Q2_K", GgmlDType::Q2K),
        ("Q3_K", GgmlDType::Q3K),
        ("Q4_K", GgmlDType::Q4K),
        ("Q5_K", GgmlDType::Q5K),
        ("Q6_K", GgmlDType::Q6K),
    ];
    let mut files: Vec<_> = types.map(|(name, dtype)| (name, gguf_bytes_of(dtype))).into();
    let mut uneven = gguf_bytes_of(GgmlDType::Q4_0);
    for name in random_tensors(&tiny_config("llama")).names() {
        set_type(&mut uneven, &name_of(&name), (2, 20));
    }
    files.push(("IQ4_NL", uneven));
    files
}

/// Where an entry's sizes begin, and how many there are. An entry is name, rank, sizes, type.
fn sizes_of(file: &[u8], name: &str) -> (usize, usize) {
    let mut entry = (name.len() as u64).to_le_bytes().to_vec();
    entry.extend(name.bytes());
    let at = file.windows(entry.len()).position(|bytes| bytes == entry).expect("an entry");
    (at + entry.len() + 4, usize::from(file[at + entry.len()]))
}

/// Gives a tensor another type, if it is of the first one.
fn set_type(file: &mut [u8], name: &str, (from, to): (u32, u32)) {
    let (at, rank) = sizes_of(file, name);
    let number = &mut file[at + 8 * rank..][..4];
    if number == from.to_le_bytes() {
        number.copy_from_slice(&to.to_le_bytes());
    }
}

#[test]
fn weights_held_as_stored_compute_nearly_what_their_f32_values_do() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf");
    for (dtype, bytes) in files_of_blocks() {
        std::fs::write(&path, bytes).expect("write");
        let options = TargetOptions { as_stored: true, ..TargetOptions::default() };
        let (stored, widened) = (logits_of(&path, &options), logits(&path, DType::F32));
        // Activations beside blocks are 8-bit fixed-point numbers. Where scale and minimum nearly cancel,
        // as in Q2_K, their rounding weighs more.
        let error = relative_error(&stored, &widened);
        assert!(error > 0.0 && error <= 0.1, "{dtype}: {error}");
        let [stored, widened] = [&options, &TargetOptions::default()]
            .map(|options| Target::open_path(&path, options).expect("target"));
        assert_eq!(stored.fingerprint(), widened.fingerprint());
        let ends = stored.hold_ends().expect("ends");
        assert!(ends.head_matrix().dense().is_none(), "{dtype}");
        assert!(stored.held().iter().any(|(name, bytes)| *name == dtype && *bytes > 0), "{dtype}");
        assert_eq!(widened.held()[0].0, "F32");
        let values = |target: &Target| {
            let head = target.hold_ends().and_then(|ends| ends.head()).expect("head");
            head.to_vec2::<f32>().expect("values")
        };
        assert_eq!(values(&stored), values(&widened));
    }
}

#[test]
fn generate_says_the_same_with_weights_as_stored() {
    for blocks in [GgmlDType::Q8_0, GgmlDType::Q4K, GgmlDType::Q6K] {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("model.gguf").display().to_string();
        std::fs::write(&path, gguf_bytes_of(blocks)).expect("write");
        // A trainable draft reads its tokens off the target's head, quantised or not.
        let draft = dir.path().join("draft");
        std::fs::create_dir(&draft).expect("folder");
        let target = Target::open(&path, &TargetOptions::default()).expect("target");
        let sizes = GlideConfig::for_target(target.config(), None);
        GlideDraft::initialise(&sizes, &target, Init::LastLayer, 1)
            .and_then(|glide| glide.save(&draft, target.fingerprint()))
            .expect("draft");
        let draft = draft.display().to_string();
        let say = |dtype: &str, way: &[&str]| {
            let fixed = ["generate", "--target", &path, "--prompt", "ABC", "--max-tokens", "40"];
            succeed(&[&fixed[..], &["--ignore-eos", "--dtype", dtype], way].concat())
        };
        let caches: &[&str] = if blocks == GgmlDType::Q8_0 { &["auto"] } else { &["auto", "q8"] };
        for dtype in ["stored", "f32"] {
            for cache in caches {
                let plain = say(dtype, &["--no-draft", "--cache", cache]);
                assert!(!plain.is_empty());
                for way in [&["--lookup"][..], &["--draft", &draft, "--pace", "fixed"]] {
                    let drafted = say(dtype, &[way, &["--cache", cache]].concat());
                    assert_eq!(drafted, plain, "{blocks:?} {dtype} {cache} {way:?}");
                }
            }
        }
        if blocks == GgmlDType::Q8_0 {
            let short = ["generate", "--target", &path, "--prompt", "A", "--cache", "q8"];
            fail_with(&short, 1, &["a cache of q8 takes heads of whole blocks of 32"]);
        }
    }
}

/// Scales that are no numbers make logits that are none, and NaN never wins: decoding goes on, and
/// drafting changes nothing.
#[test]
fn blocks_with_impossible_scales_end_alike_with_and_without_drafts() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf").display().to_string();
    for (name, file) in files_of_blocks() {
        for (kind, bits) in [("NaN", 0xFFFF_u16), ("infinite", 0x7C00), ("negative", 0xFC00)] {
            let mut file = file.clone();
            std::fs::write(&path, &file).expect("write");
            let header = GgufSource::open(Path::new(&path)).expect("a file");
            let blocks = header.header().tensors["blk.0.ffn_up.weight"].bytes.clone();
            let pattern = bits.to_le_bytes().into_iter().cycle();
            file[blocks].iter_mut().zip(pattern).for_each(|(byte, bits)| *byte = bits);
            std::fs::write(&path, &file).expect("write");
            let say = |way: &str| {
                let fixed = ["generate", "--target", &path, "--prompt", "ABABAB", "--ignore-eos"];
                let told =
                    run(&[&fixed[..], &["--max-tokens", "8", "--pace", "fixed", way]].concat());
                let problem = stderr(&told);
                let refused = problem.contains("error: the logits are not numbers");
                assert_eq!(
                    told.status.code(),
                    Some(i32::from(refused)),
                    "{name}, {kind}: {problem}"
                );
                (refused, stdout(&told))
            };
            assert_eq!(say("--no-draft"), say("--lookup"), "{name}, {kind}");
        }
    }
}

#[test]
fn rows_of_parts_of_blocks_are_refused_by_name() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf").display().to_string();
    let types = [("Q4_0", 32), ("Q8_0", 32), ("IQ4_NL", 32), ("Q2_K", 256), ("Q6_K", 256)];
    for (name, values) in types {
        let (_, mut file) = files_of_blocks().into_iter().find(|(n, _)| *n == name).expect("type");
        let (at, _) = sizes_of(&file, "blk.1.attn_k.weight");
        file[at] = file[at].wrapping_add(16);
        std::fs::write(&path, file).expect("write");
        let text = complaint(Path::new(&path));
        assert!(text.contains("`blk.1.attn_k.weight` of shape"), "{text}");
        assert!(text.contains(&format!("does not consist of blocks of {values}")), "{text}");
    }
}

#[test]
fn sixteen_bit_weights_stay_close_and_all_architectures_load() {
    let dir = tempfile::tempdir().expect("tempdir");
    for kind in ["llama", "qwen2", "qwen3"] {
        let mut config = tiny_config(kind);
        config["tie_word_embeddings"] = json!(kind != "qwen3");
        let folder = dir.path().join(kind);
        write_target(&folder, &config);
        let exact = logits(&folder, DType::F32);
        let largest = exact.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        for dtype in [DType::BF16, DType::F16] {
            let rounded = logits(&folder, dtype);
            let error = exact.iter().zip(&rounded).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(error > 0.0 && error < 0.1 * largest, "{kind} {dtype:?}: {error} of {largest}");
        }
    }
}

/// Held as the file holds them by default: half the memory, and the bits of f32.
#[test]
fn sixteen_bit_files_are_held_as_they_are_with_the_bits_of_f32() {
    let dir = tempfile::tempdir().expect("tempdir");
    for dtype in [DType::BF16, DType::F16] {
        let folder = dir.path().join(format!("{dtype:?}"));
        write_target(&folder, &tiny_config("llama"));
        let tensors = loaded(&random_tensors(&tiny_config("llama")), dtype);
        write_tensors(folder.join("model.safetensors"), &tensors);
        let stored = TargetOptions { as_stored: true, ..TargetOptions::default() };
        let target = Target::open_path(&folder, &stored).expect("target");
        let table = target.hold_ends().and_then(|ends| ends.embedding()).expect("table");
        assert_eq!(table.dtype(), dtype);
        assert!(!target.holds_blocks() && target.widened().is_empty());
        assert!(logits_of(&folder, &stored) == logits(&folder, DType::F32), "{dtype:?}");
        let path = folder.display().to_string();
        let say = |more: &[&str]| {
            let fixed = ["generate", "--target", &path, "--prompt", "ABC", "--max-tokens", "40"];
            succeed(&[&fixed[..], &["--ignore-eos"], more].concat())
        };
        let plain = say(&[]);
        assert_eq!(plain, say(&["--dtype", "f32"]));
        assert_eq!(plain, say(&["--lookup", "--pace", "fixed"]));
    }
}

#[test]
fn generate_tells_how_a_target_is_held() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf").display().to_string();
    std::fs::write(&path, gguf_bytes_of(GgmlDType::Q5K)).expect("write");
    for (dtype, says) in [("stored", "weights: Q5_K "), ("bf16", "weights: BF16 ")] {
        let generate = ["generate", "--target", &path, "--prompt", "ABC", "--max-tokens", "4"];
        let told = stderr(&run(&[&generate[..], &["--dtype", dtype]].concat()));
        let line = told.lines().find(|line| line.starts_with(says)).expect(says);
        assert_eq!(line.contains("; blocks times activations of 8 bits by "), dtype == "stored");
    }
    for (cache, says) in [("auto", "f16"), ("f32", "f32"), ("f16", "f16"), ("q8", "q8")] {
        let generate = ["generate", "--target", &path, "--prompt", "ABC", "--max-tokens", "4"];
        let told = stderr(&run(&[&generate[..], &["--cache", cache]].concat()));
        assert!(told.contains(&format!("; cache: {says}, ")), "{cache}: {told}");
    }
}
