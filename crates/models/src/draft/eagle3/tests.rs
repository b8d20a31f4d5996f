use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::random::CounterRng;
use longdraft_kernels::rope::{Rope, RopeScaling};

use super::{Eagle3Config, Eagle3Draft, TestTimeSteps};
use crate::config::{RopeParameters, TargetConfig};
use crate::draft::files::{DRAFT_FILE, PTH_FILE, SavedDraft};
use crate::draft::{Draft, VocabularyMap};
use crate::error::Result;
use crate::ids::{LayerId, TargetTokenId};
use crate::target_model::{PackedSequence, Tap, Target, TargetOptions};
use crate::test_support::{assert_refused, bits};
use crate::weights::memory::MemorySource;
use crate::weights::safetensors;

const VOCABULARY: usize = 30;

/// With the norms of EAGLE-3.1.
fn with_norms(config: Eagle3Config) -> Eagle3Config {
    Eagle3Config { fc_norm: true, norm_output: true, ..config }
}

fn config() -> Eagle3Config {
    Eagle3Config {
        hidden_size: 12,
        target_hidden_size: 12,
        intermediate_size: 20,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 4,
        vocab_size: VOCABULARY,
        draft_vocab_size: 10,
        rms_norm_eps: 1e-5,
        rope: RopeParameters::plain(1000.0),
        dynamic_ntk: None,
        max_position_embeddings: 64,
        target_layers: [LayerId(1), LayerId(3), LayerId(4)],
        fc_norm: false,
        norm_output: false,
        norm_before_residual: false,
        embed_proj: false,
        attention_window: None,
        initializer_range: 0.3,
    }
}

fn random(purpose: &str, shape: &[usize]) -> Tensor {
    let mut rng = CounterRng::new(7, purpose, &[]);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.normal() as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).expect("tensor")
}

fn every_third() -> VocabularyMap {
    let kept = (0..10).map(|i| TargetTokenId(3 * i + 1)).collect();
    VocabularyMap::new(kept, VOCABULARY).expect("map")
}

fn draft(config: &Eagle3Config) -> Eagle3Draft {
    let embedding = random("embedding", &[VOCABULARY, config.target_hidden_size]);
    Eagle3Draft::initialise(config, every_third(), &embedding, 3).expect("draft")
}

/// Two documents and padding.
fn sequence() -> PackedSequence {
    let document_ids: Vec<i32> =
        (0..17).map(|t| if t > 14 { -1 } else { i32::from(t > 8) }).collect();
    PackedSequence {
        ids: (0..17).map(|t| t * 7 % VOCABULARY as u32).collect(),
        position_ids: (0..17).map(|t| if t > 8 { t - 9 } else { t }).collect(),
        document_ids,
    }
}

/// The state after each of three steps of `rows`.
fn unrolled(draft: &Eagle3Draft, sequence: &PackedSequence, rows: [&[u32]; 3]) -> Vec<Tensor> {
    let width = 3 * draft.config().target_hidden_size;
    let aux = random("aux", &[17, width]).narrow(0, 17 - sequence.ids.len(), sequence.ids.len());
    let mut steps = TestTimeSteps::new(draft, sequence, &aux.expect("aux")).expect("steps");
    rows.iter().map(|rows| steps.step(rows).expect("step")).collect()
}

#[test]
fn layouts_have_the_published_number_of_tensors() {
    let narrow = Eagle3Config { hidden_size: 8, embed_proj: true, ..config() };
    assert_eq!(draft(&config()).parameters().len(), 13);
    assert_eq!(draft(&with_norms(config())).parameters().len(), 16);
    assert_eq!(draft(&narrow).parameters().len(), 14);
    let taps = draft(&config()).taps();
    assert_eq!(taps, [1, 3, 4].map(|id| Tap::Hidden(LayerId(id))));
}

#[test]
fn rows_are_computed_alike_with_and_without_the_others() {
    for config in [
        config(),
        with_norms(config()),
        Eagle3Config { attention_window: Some(2), ..config() },
        Eagle3Config { dynamic_ntk: Some(2.0), max_position_embeddings: 4, ..config() },
    ] {
        let (draft, sequence) = (draft(&config), sequence());
        let all: Vec<u32> = (0..17).collect();
        let whole = unrolled(&draft, &sequence, [&all, &all, &all]);
        let rows: [&[u32]; 3] = [&[0, 3, 4, 8, 9, 13], &[3, 4, 9, 13], &[4, 13]];
        let some = unrolled(&draft, &sequence, rows);
        for ((rows, some), whole) in rows.into_iter().zip(&some).zip(&whole) {
            let rows = Tensor::from_slice(rows, rows.len(), &Device::Cpu).expect("rows");
            assert_eq!(bits(some), bits(&whole.index_select(&rows, 0).expect("select")));
        }
    }
}

#[test]
fn a_packed_document_computes_what_it_computes_alone() {
    let config = Eagle3Config { dynamic_ntk: Some(2.0), max_position_embeddings: 4, ..config() };
    let (draft, sequence) = (draft(&config), sequence());
    let packed = unrolled(&draft, &sequence, [&[9, 10, 14]; 3]);
    let alone = PackedSequence {
        ids: sequence.ids[9..].to_vec(),
        position_ids: sequence.position_ids[9..].to_vec(),
        document_ids: sequence.document_ids[9..].to_vec(),
    };
    for (packed, alone) in packed.iter().zip(unrolled(&draft, &alone, [&[0, 1, 5]; 3])) {
        let difference = (packed - alone).and_then(|d| d.abs()?.max_all()?.to_scalar::<f32>());
        assert!(difference.expect("difference") < 1e-5);
    }
}

#[test]
fn steps_refuse_rows_that_left() {
    let (draft, sequence) = (draft(&config()), sequence());
    let aux = random("aux", &[17, 36]);
    let mut steps = TestTimeSteps::new(&draft, &sequence, &aux).expect("steps");
    steps.step(&[2, 5]).expect("step");
    for rows in [&[2, 3][..], &[5, 2], &[], &[2, 2]] {
        assert!(steps.step(rows).is_err(), "{rows:?}");
    }
    assert!(steps.step(&[5]).is_ok());
    let aux = random("aux", &[16, 36]);
    assert!(TestTimeSteps::new(&draft, &sequence, &aux).is_err());
}

fn target() -> Target {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "rope_theta": 1000.0
    });
    let config = TargetConfig::from_json(&config).expect("valid");
    Target::random(config, 3, &TargetOptions::default()).expect("target")
}

#[test]
fn what_is_saved_is_opened_from_either_file() -> Result<()> {
    let target = target();
    let config = with_norms(Eagle3Config::for_target(target.config(), 10).expect("config"));
    let table = target.hold_ends()?.embedding()?;
    let draft = Eagle3Draft::initialise(&config, every_third(), &table, 5)?;
    let folder = tempfile::tempdir().expect("tempdir");
    draft.save(folder.path(), target.fingerprint())?;
    for path in [folder.path().to_path_buf(), folder.path().join(PTH_FILE)] {
        let read = Eagle3Draft::open(&path, &target)?;
        assert_eq!((read.config(), read.vocabulary()), (&config, &every_third()));
        for ((a, x), (b, y)) in draft.named_tensors()?.iter().zip(read.named_tensors()?) {
            assert_eq!((a, bits(x)), (&b, bits(&y)));
        }
    }
    std::fs::write(folder.path().join("config.json"), "{}").expect("write");
    let opened = Eagle3Draft::open(&folder.path().join(DRAFT_FILE), &target);
    assert_refused(opened, &["names no EAGLE-3 draft"]);
    Ok(())
}

#[test]
fn a_file_of_another_target_is_refused_before_it_is_read() -> Result<()> {
    let target = target();
    let config = Eagle3Config::for_target(target.config(), 10).expect("config");
    let table = target.hold_ends()?.embedding()?;
    let draft = Eagle3Draft::initialise(&config, every_third(), &table, 5)?;
    let folder = tempfile::tempdir().expect("tempdir");
    draft.save(folder.path(), target.fingerprint())?;
    let saved = SavedDraft::at(folder.path());
    Eagle3Draft::check_file(&saved, &config)?;
    let other = Eagle3Config { target_hidden_size: 16, ..config };
    let told = [
        "`fc.weight` has shape [12, 36], [12, 48] expected",
        "`embed_tokens.weight` [30, 12] is missing",
    ];
    assert_refused(Eagle3Draft::check_file(&saved, &other), &told);
    Ok(())
}

#[test]
fn a_file_over_other_tokens_is_refused_before_it_is_read() -> Result<()> {
    let target = target();
    let config = Eagle3Config::for_target(target.config(), 10).expect("config");
    let table = target.hold_ends()?.embedding()?;
    let draft = Eagle3Draft::initialise(&config, every_third(), &table, 5)?;
    let folder = tempfile::tempdir().expect("tempdir");
    draft.save(folder.path(), target.fingerprint())?;
    let said = SavedDraft::at(folder.path());
    let of = |vocab_size: usize| Eagle3Config { vocab_size, ..config.clone() };
    let told = "of a target of 30 tokens, this one has 32: give a draft of this target";
    assert_refused(Eagle3Draft::check_file(&said, &of(32)), &[told]);
    // Where nothing is said of it, its map tells.
    let unsaid = SavedDraft { config: None, ..said };
    Eagle3Draft::check_file(&unsaid, &config)?;
    for (tokens, told) in [
        (32, "`t2d` has 30 flags, 32 expected: give the target"),
        (20, "`d2t` maps draft token 7 to 22, outside the vocabulary of 20: give the target"),
        (8, "`draft_vocab_size` = 10 exceeds `vocab_size` = 8"),
    ] {
        assert_refused(Eagle3Draft::check_file(&unsaid, &of(tokens)), &[told]);
    }
    Ok(())
}

#[test]
fn embeddings_that_are_not_read_are_told_where_they_differ() -> Result<()> {
    let target = target();
    let table = target.hold_ends()?.embedding()?;
    let config = Eagle3Config::for_target(target.config(), 10).expect("config");
    let draft = Eagle3Draft::initialise(&config, every_third(), &table, 5)?;
    let folder = tempfile::tempdir().expect("tempdir");
    draft.save(folder.path(), target.fingerprint())?;
    let notes = |own: Option<Tensor>| -> Result<Vec<String>> {
        let mut tensors = draft.stored_tensors()?;
        tensors.extend(own.map(|own| ("embed_tokens.weight".to_owned(), own)));
        safetensors::save(&folder.path().join(DRAFT_FILE), &tensors, HashMap::new())?;
        Ok((super::KIND.reading)(folder.path(), &target))
    };
    assert!(notes(None)?.is_empty() && notes(Some((&table * 1.05)?))?.is_empty());
    let told = notes(Some(random("own", table.dims())))?;
    assert!(told.len() == 1 && told[0].contains("`embed_tokens.weight` is not read"), "{told:?}");
    Ok(())
}

#[test]
fn published_prefixes_and_layer_names_are_read() -> Result<()> {
    let draft = draft(&config());
    let embedding = random("embedding", &[VOCABULARY, 12]);
    for (prefix, layer) in
        [("", "midlayer."), ("model.", "layers.0."), ("draft_model.", "midlayer.")]
    {
        let stored = draft.stored_tensors()?.into_iter();
        let source = MemorySource::new(stored.map(|(name, tensor)| {
            (format!("{prefix}{}", name.replace("midlayer.", layer)), tensor)
        }));
        let read = Eagle3Draft::from_source(&source, &config(), &embedding)?;
        assert_eq!(read.vocabulary(), &every_third());
        assert_eq!(read.parameters().len(), 13);
    }
    Ok(())
}

#[test]
fn unfit_files_are_refused_with_every_name() -> Result<()> {
    let draft = draft(&config());
    let embedding = random("embedding", &[VOCABULARY, 12]);
    let mut tensors = draft.stored_tensors()?;
    tensors.retain(|(name, _)| name != "norm.weight");
    let hidden_norm = tensors.iter_mut().find(|(name, _)| name == "midlayer.hidden_norm.weight");
    hidden_norm.expect("norm").1 = random("odd", &[5]);
    tensors.push(("midlayer.self_attn.q_norm.weight".into(), random("odd", &[4])));
    let refused = |tensors: Vec<(String, Tensor)>, config: &Eagle3Config| {
        let source = MemorySource::new(tensors);
        let error = Eagle3Draft::from_source(&source, config, &embedding).err();
        error.expect("refused").to_string()
    };
    let error = refused(tensors, &config());
    for part in [
        "`norm.weight` [12] is missing",
        "`midlayer.hidden_norm.weight` has shape [5], [12] expected",
        "`midlayer.self_attn.q_norm.weight` is unexpected",
    ] {
        assert!(error.contains(part), "{part} not in {error}");
    }
    let mut tensors = draft.stored_tensors()?;
    let map = tensors.iter_mut().find(|(name, _)| name == "d2t").expect("map");
    let ids: Vec<i64> = every_third().kept().iter().map(|id| i64::from(id.0)).collect();
    map.1 = Tensor::from_vec(ids, 10, &Device::Cpu)?;
    assert!(refused(tensors, &config()).contains("absolute ids"));
    let narrow = Eagle3Config { hidden_size: 8, ..config() };
    assert!(refused(draft.stored_tensors()?, &narrow).contains("`embed_tokens.weight` [30, 8]"));
    Ok(())
}

#[test]
fn the_layer_under_both_its_names_is_refused() -> Result<()> {
    let draft = draft(&config());
    let mut tensors = draft.stored_tensors()?;
    tensors.push(("layers.0.hidden_norm.weight".into(), random("twice", &[12])));
    let embedding = random("embedding", &[VOCABULARY, 12]);
    let source = MemorySource::new(tensors);
    assert_refused(Eagle3Draft::from_source(&source, &config(), &embedding), &["are the same one"]);
    Ok(())
}

#[test]
fn dynamic_scaling_grows_the_base_of_long_documents_only() -> Result<()> {
    let long = Eagle3Config { dynamic_ntk: Some(2.0), max_position_embeddings: 4, ..config() };
    let (plain, dynamic) = (draft(&config()), draft(&long));
    // 4 tokens, then one of 8: 1000 · (2 · 8/4 − 1)^(4/2)
    let table = dynamic.rope_table(&[3, 7], &[4, 8])?;
    let grown = Rope::new(4, 9000.0, RopeScaling::None)?.table(&[7], &Device::Cpu)?;
    let short = plain.rope_table(&[3], &[4])?;
    assert_eq!(bits(&table.cos().narrow(0, 0, 1)?), bits(short.cos()));
    assert_eq!(bits(&table.cos().narrow(0, 1, 1)?), bits(grown.cos()));
    assert_eq!(bits(&table.sin().narrow(0, 1, 1)?), bits(grown.sin()));
    Ok(())
}

#[test]
fn a_narrower_draft_reads_projected_or_own_embeddings() -> Result<()> {
    let narrow = Eagle3Config { hidden_size: 8, head_dim: 2, ..config() };
    let embedding = random("embedding", &[VOCABULARY, 12]);
    let error = Eagle3Draft::initialise(&narrow, every_third(), &embedding, 3).err();
    assert!(error.expect("refused").to_string().contains("embed_proj"));
    let projected = draft(&Eagle3Config { embed_proj: true, ..narrow.clone() });
    assert_eq!(projected.embed(&[1, 2, 3])?.dims(), [3, 8]);
    assert!(projected.embed(&[VOCABULARY as u32]).is_err());
    // At the target's width engines would leave the projection out.
    let as_wide = Eagle3Config { embed_proj: true, ..config() }.problems().to_string();
    assert!(as_wide.contains("`embed_proj` with a draft as wide as its target"), "{as_wide}");

    let mut tensors = projected.stored_tensors()?;
    tensors.retain(|(name, _)| name != "embed_proj.weight");
    let own = random("own", &[VOCABULARY, 8]);
    tensors.push(("embed_tokens.weight".into(), own.clone()));
    let read = Eagle3Draft::from_source(&MemorySource::new(tensors), &narrow, &embedding)?;
    assert_eq!(bits(&read.embed(&[4])?), bits(&own.narrow(0, 4, 1)?));
    let stored = read.stored_tensors()?;
    assert!(
        stored
            .iter()
            .any(|(name, tensor)| name == "embed_tokens.weight" && tensor.dtype() == DType::F32)
    );
    Ok(())
}

#[test]
fn a_new_vocabulary_keeps_the_rows_of_shared_tokens() -> Result<()> {
    let draft = draft(&config());
    // Tokens 4 and 7 are draft tokens 1 and 2 of the old map.
    let map = VocabularyMap::new([4, 5, 7].map(TargetTokenId).to_vec(), VOCABULARY)?;
    let moved = draft.remapped(map.clone(), 11)?;
    assert_eq!((moved.vocabulary(), moved.config().draft_vocab_size), (&map, 3));
    let (old, new) = (draft.head()?, moved.head()?);
    assert_eq!(bits(&new.narrow(0, 0, 1)?), bits(&old.narrow(0, 1, 1)?));
    assert_eq!(bits(&new.narrow(0, 2, 1)?), bits(&old.narrow(0, 2, 1)?));
    assert_eq!(moved.parameters().len(), 13);
    assert!(draft.remapped(VocabularyMap::identity(9), 1).is_err());
    Ok(())
}
