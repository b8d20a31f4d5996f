use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use longdraft_kernels::attention::{Delays, KeyRanges};
use longdraft_kernels::linear::linear;
use longdraft_kernels::rows::select_rows;
use serde_json::json;

use super::*;
use crate::config::TargetConfig;
use crate::draft::Init;
use crate::draft::block::{
    Anchor, BlockConfig, BlockDraft, ChainKind, ChainSizes, ConvolutionSizes, OwnHead,
    SelectorSizes, Visible,
};
use crate::draft::eagle3::{Eagle3Config, Eagle3Draft, TestTimeSteps};
use crate::draft::files::{DRAFT_FILE, SavedDraft};
use crate::draft::glide::{Compat, CrossContext, GlideConfig, GlideDraft};
use crate::draft::kinds::KINDS;
use crate::draft::{Draft, VocabularyMap};
use crate::ids::{LayerId, TargetTokenId};
use crate::target_model::{PackedSequence, Tap, Taps, Target, TargetOptions};
use crate::test_support::{bits, values};
use crate::weights::safetensors;

fn target() -> Target {
    let config = json!({
        "model_type": "qwen2", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "initializer_range": 0.2,
        "tie_word_embeddings": true,
    });
    let config = TargetConfig::from_json(&config).expect("configuration");
    Target::random(config, 4, &TargetOptions::default()).expect("target")
}

fn sequence() -> PackedSequence {
    PackedSequence {
        ids: (0..12).map(|t| t * 7 % 40).collect(),
        position_ids: (0..12).collect(),
        document_ids: vec![0; 12],
    }
}

/// Rounding is there, and small.
fn assert_rounded(exact: &Tensor, rounded: &Tensor) {
    let (size, error) = squares(exact, rounded);
    assert!(error > 0.0 && error < 0.06 * 0.06 * size, "{error} of {size}");
}

/// Sums of the squares of values, and of what rounding changed of them.
fn squares(exact: &Tensor, rounded: &Tensor) -> (f32, f32) {
    let (exact, rounded) = (values(exact), values(rounded));
    let size = exact.iter().map(|x| x * x).sum::<f32>();
    (size, exact.iter().zip(&rounded).map(|(x, y)| (x - y) * (x - y)).sum())
}

/// Whether two matrices are the same bytes.
fn is_shared(own: &Matrix, whole: &Matrix) -> bool {
    match (own, whole) {
        (Matrix::Dense(own), Matrix::Dense(whole)) => own.id() == whole.id(),
        (Matrix::Quantised(own), Matrix::Quantised(whole)) => Arc::ptr_eq(own, whole),
        (Matrix::OnGpu(own), Matrix::OnGpu(whole)) => Arc::ptr_eq(own, whole),
        _ => false,
    }
}

/// The small target that the program carries, held as its file holds it.
fn stored() -> Target {
    demonstration(&TargetOptions { as_stored: true, ..TargetOptions::default() })
}

fn demonstration(options: &TargetOptions) -> Target {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/target/demonstration.gguf");
    Target::open(path.to_str().expect("path"), options).expect("target")
}

#[test]
fn drafts_share_the_table_of_a_target_that_holds_blocks() -> Result<()> {
    let target = stored();
    let ends = target.hold_ends()?;
    assert!(ends.embedding_matrix().dense().is_none(), "held as blocks");
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("folder"));
    let [of_block, of_eagle3] = folders.each_ref().map(tempfile::TempDir::path);
    let sizes = BlockConfig::for_target(target.config(), 1, 4, 39);
    let block = BlockDraft::initialise(&sizes, ends.embedding_matrix(), 3)?;
    block.save(of_block, target.fingerprint())?;
    let sizes = Eagle3Config::for_target(target.config(), 2048).expect("layers");
    let map = VocabularyMap::identity(2048);
    let eagle3 = Eagle3Draft::initialise(&sizes, map, ends.embedding_matrix(), 3)?;
    eagle3.save(of_eagle3, target.fingerprint())?;
    let ids = [2047, 0, 7, 7];
    let mut read = Vec::new();
    for draft in [block, BlockDraft::open(of_block, &target)?] {
        read.push((draft.embed(&ids)?, draft.embedding));
    }
    for draft in [eagle3, Eagle3Draft::open(of_eagle3, &target)?] {
        read.push((draft.embed(&ids)?, draft.embedding));
    }
    let expanded = bits(&select_rows(&ends.embedding()?, &ids)?);
    for (rows, table) in read {
        assert!(is_shared(&table, ends.embedding_matrix()), "a table beside the target's");
        assert_eq!(bits(&rows), expanded);
    }
    Ok(())
}

#[test]
fn eagle3_without_a_head_proposes_through_the_one_that_the_target_holds() -> Result<()> {
    let halves = TargetOptions { dtype: DType::BF16, ..TargetOptions::default() };
    for (target, has_blocks) in [(stored(), true), (demonstration(&halves), false)] {
        let ends = target.hold_ends()?;
        assert_eq!(ends.head_matrix().dense().is_none(), has_blocks);
        let sizes = Eagle3Config::for_target(target.config(), 2048).expect("layers");
        let map = VocabularyMap::identity(2048);
        let whole = Eagle3Draft::initialise(&sizes, map, ends.embedding_matrix(), 3)?;
        let folder = tempfile::tempdir().expect("folder");
        whole.save(folder.path(), target.fingerprint())?;
        let mut tensors = whole.stored_tensors()?;
        tensors.retain(|(name, _)| name != "lm_head.weight");
        safetensors::save(&folder.path().join(DRAFT_FILE), &tensors, HashMap::new())?;
        let mut draft = Eagle3Draft::open(folder.path(), &target)?;
        let stored = draft.stored_tensors()?;
        assert!(stored.iter().all(|(name, _)| name != "lm_head.weight"), "the target's");
        draft.hold_as(HeldAs::Blocks)?;
        let held = draft.head_matrix()?;
        assert!(is_shared(&held, ends.head_matrix()), "a head beside the target's");
        let head = whole.parameter_count() - draft.parameter_count();
        assert_eq!(head, 2048 * sizes.hidden_size);
        // What trains has its own values, which are the target's.
        let saved = SavedDraft { path: folder.path().to_path_buf(), config: None };
        let copied = Eagle3Draft::load(&saved, &sizes, &target)?;
        assert_eq!(copied.parameter_count(), whole.parameter_count());
        let input = draft.embed(&[2047, 0, 7, 1200])?;
        let exact = linear(&input, copied.head()?, None)?;
        let (size, error) = squares(&exact, &held.linear(&input, None)?);
        assert!(size > 0.0 && error < 0.06 * 0.06 * size, "{error} of {size}");
    }
    Ok(())
}

#[test]
fn glide_in_blocks_is_near_glide_in_f32() {
    let (target, sequence) = (target(), sequence());
    let config = GlideConfig::for_target(target.config(), None);
    let mut draft = GlideDraft::initialise(&config, &target, Init::LastLayer, 3).expect("draft");
    let features = target.forward(&sequence, &Taps::of(&[Tap::LastKv])).expect("features");
    let last_kv = features.last_kv.expect("tapped");
    let ranges = |delay| Arc::new(KeyRanges::packed(&[0; 12], None, Delays::Same(delay)));
    let cross = CrossContext { last_kv: &last_kv, ranges: ranges(1) };
    let ends = target.hold_ends().expect("ends");
    let embeddings = ends.embed(&sequence.ids).expect("embeddings");
    let table = target.rope().table(&sequence.position_ids, target.device()).expect("table");
    let forward = |draft: &GlideDraft| {
        let output = draft.forward(&embeddings, &table, &ranges(0), &cross, &mut Vec::new());
        output.expect("output")
    };
    let exact = forward(&draft);
    draft.hold_as(HeldAs::Blocks).expect("blocks");
    assert_rounded(&exact, &forward(&draft));
}

#[test]
fn a_block_draft_in_blocks_is_near_one_in_f32() {
    let (target, sequence) = (target(), sequence());
    let layers = [LayerId(0), LayerId(2)];
    // With heads whose rows are whole blocks, one of a single row among them.
    let chain = ChainSizes { rank: 32, kind: ChainKind::Gated, confidence: Some(true) };
    let config = BlockConfig {
        target_layers: layers.to_vec(),
        initializer_range: 0.2,
        chain: Some(chain),
        ..BlockConfig::for_target(target.config(), 2, 4, 39)
    };
    let embedding = target.hold_ends().expect("ends").embedding().expect("table");
    let mut draft = BlockDraft::initialise(&config, &embedding, 3).expect("draft");
    let features = target.forward(&sequence, &Taps::of(&draft.taps())).expect("features");
    let features = features.hidden_of(&layers).expect("tapped");
    let anchor = Anchor { index: 11, document_start: 0 };
    let visible = Visible::new(&config, &[anchor], 4, 12);
    let run = |draft: &BlockDraft| {
        let context = draft.context(&features, &sequence.position_ids).expect("context");
        let states = draft.blocks(&[5, 39, 39, 39], &[11, 12, 13, 14], &context, &visible);
        let (states, chain) = (states.expect("states"), draft.chain().expect("heads"));
        let embedded = chain.embed(&[5, 1, 2, 3]).expect("embedded");
        let step = chain.step(None, &states, embedded.as_ref().expect("a rank"));
        let logits = chain.logits(&step.expect("step").mixed).expect("logits");
        let confidence = chain.confidence(&states, embedded.as_ref()).expect("confidence");
        ([states, logits], values(&confidence.expect("a head")))
    };
    let exact = run(&draft);
    draft.hold_as(HeldAs::Blocks).expect("blocks");
    let rounded = run(&draft);
    for (exact, rounded) in exact.0.iter().zip(&rounded.0) {
        assert_rounded(exact, rounded);
    }
    // A head over fewer tokens takes rows of it.
    let output = draft.chain().and_then(|chain| chain.output().ok().cloned());
    assert_eq!(output.expect("in f32, too").dims(), [40, 32]);
    // A sum of 96 terms of both signs may be small: its error goes with the terms, some 0.2 each.
    assert_ne!(exact.1, rounded.1);
    let near =
        |(exact, rounded): (&f32, &f32)| (exact - rounded).abs() < 0.06 * 0.2 * 96_f32.sqrt();
    assert!(exact.1.iter().zip(&rounded.1).all(near), "{:?} {:?}", exact.1, rounded.1);
}

#[test]
fn matrices_that_are_no_whole_blocks_stay_in_f32_beside_others() -> Result<()> {
    // Rows of 48 values are no whole blocks, those of 64 and 96 are.
    let config = BlockConfig {
        hidden_size: 48,
        target_layers: vec![LayerId(0), LayerId(2)],
        initializer_range: 0.2,
        ..BlockConfig::for_target(target().config(), 1, 4, 39)
    };
    let wave = |rows: usize, width: usize| -> Result<Tensor> {
        let values = Tensor::arange(0.0_f32, (rows * width) as f32, &Device::Cpu)?;
        Ok(values.sin()?.reshape((rows, width))?)
    };
    let mut draft = BlockDraft::initialise(&config, &wave(40, 48)?, 3)?;
    let (features, positions) = (wave(12, 96)?, sequence().position_ids);
    let visible = Visible::new(&config, &[Anchor { index: 11, document_start: 0 }], 4, 12);
    let run = |draft: &BlockDraft| -> Result<Tensor> {
        let context = draft.context(&features, &positions)?;
        draft.blocks(&[5, 39, 39, 39], &[11, 12, 13, 14], &context, &visible)
    };
    let exact = run(&draft)?;
    draft.hold_as(HeldAs::Blocks)?;
    let is_in_f32 = |module: &str| {
        let name = format!("layers.0.{module}.weight");
        draft.parameters().iter().any(|parameter| parameter.name == name)
    };
    let modules = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"];
    assert_eq!(modules.map(is_in_f32), [true, false, true, false]);
    assert_rounded(&exact, &run(&draft)?);
    Ok(())
}

#[test]
fn eagle3_in_blocks_is_near_eagle3_in_f32() {
    let (target, sequence) = (target(), sequence());
    let kept = (0..20).map(|i| TargetTokenId(2 * i)).collect();
    let map = VocabularyMap::new(kept, 40).expect("map");
    let mut wide = target.config().clone();
    wide.num_hidden_layers = 32;
    let mut config = Eagle3Config::for_target(&wide, 20).expect("layers");
    config.target_layers = [LayerId(0), LayerId(1), LayerId(2)];
    config.initializer_range = 0.2;
    let normed = Eagle3Config { fc_norm: true, norm_output: true, ..config.clone() };
    for config in [config, normed] {
        let embedding = target.hold_ends().expect("ends").embedding().expect("table");
        let mut draft =
            Eagle3Draft::initialise(&config, map.clone(), &embedding, 3).expect("draft");
        let features = target.forward(&sequence, &Taps::of(&draft.taps())).expect("features");
        let aux = features.hidden_of(&config.target_layers).expect("aux");
        let run = |draft: &Eagle3Draft| {
            let mut steps = TestTimeSteps::new(draft, &sequence, &aux).expect("steps");
            let rows: Vec<u32> = (0..8).collect();
            steps.step(&rows).expect("step");
            let hidden = steps.step(&rows).expect("step");
            let input = draft.head_input(&hidden).expect("norm").detach();
            let head = draft.head_matrix().expect("head");
            (hidden, head.linear(&input, None).expect("logits"))
        };
        let exact = run(&draft);
        draft.hold_as(HeldAs::Blocks).expect("blocks");
        let rounded = run(&draft);
        assert_rounded(&exact.0, &rounded.0);
        assert_rounded(&exact.1, &rounded.1);
        assert!(draft.head_matrix().expect("head").dense().is_none(), "held as blocks");
    }
}

/// Every second token.
fn half_of_the_tokens() -> VocabularyMap {
    VocabularyMap::new((0..20).map(|i| TargetTokenId(2 * i)).collect(), 40).expect("a map")
}

/// Drafts of every method. All widths are whole blocks.
fn one_of_each(target: &Target) -> Result<Vec<Box<dyn Draft>>> {
    let table = target.hold_ends()?.embedding()?;
    let mut drafts: Vec<Box<dyn Draft>> = Vec::new();
    for compat in [None, Some(Compat::Longspec)] {
        let config = GlideConfig::for_target(target.config(), compat);
        drafts.push(Box::new(GlideDraft::initialise(&config, target, Init::Random, 3)?));
    }
    let mut wide = target.config().clone();
    wide.num_hidden_layers = 32;
    let mut config = Eagle3Config::for_target(&wide, 20).expect("layers");
    config.target_layers = [LayerId(0), LayerId(1), LayerId(2)];
    drafts.push(Box::new(Eagle3Draft::initialise(&config, half_of_the_tokens(), &table, 3)?));
    let plain = BlockConfig {
        target_layers: vec![LayerId(0), LayerId(2)],
        ..BlockConfig::for_target(target.config(), 2, 4, 39)
    };
    let selecting = BlockConfig {
        convolution: Some(ConvolutionSizes { kernel_size: 2, group_size: 8 }),
        selector: Some(SelectorSizes { rank: 32, top_k: 3 }),
        ..plain.clone()
    };
    let chain = ChainSizes { rank: 32, kind: ChainKind::Rnn, confidence: Some(true) };
    let chained = BlockConfig { chain: Some(chain), ..plain.clone() };
    let own = BlockConfig { draft_vocab_size: 20, ..chained.clone() };
    for config in [plain, selecting, chained] {
        drafts.push(Box::new(BlockDraft::initialise(&config, &table, 3)?));
    }
    let map = half_of_the_tokens();
    let kept: Vec<u32> = map.kept().iter().map(|token| token.0).collect();
    let head = OwnHead::new(map, &select_rows(&table, &kept)?)?;
    drafts.push(Box::new(BlockDraft::initialise_with(&own, &table, Some(head), 3)?));
    Ok(drafts)
}

/// Names and shapes of what a draft that is held in f32 has of its own and computes with.
fn used_tensors(draft: &dyn Draft) -> Result<Vec<(String, Vec<usize>)>> {
    let used = draft.parameters().iter().filter(|parameter| !parameter.dead);
    let named = used.map(|parameter| (parameter.name.clone(), parameter.var.dims().to_vec()));
    let fixed = draft.fixed_tensors()?.into_iter().filter(|(_, t)| t.dtype() == DType::F32);
    Ok(named.chain(fixed.map(|(name, tensor)| (name, tensor.dims().to_vec()))).collect())
}

#[test]
fn drafts_of_every_method_hold_blocks_in_place_of_their_matrices() -> Result<()> {
    let target = target();
    let drafts = one_of_each(&target)?;
    for kind in &KINDS {
        assert!(drafts.iter().any(|draft| draft.method() == kind.name), "{}", kind.name);
    }
    for mut draft in drafts {
        let method = draft.method();
        let used = used_tensors(draft.as_ref())?;
        let (count, in_f32) = (draft.parameter_count(), draft.held_bytes());
        let mut wanted = 0;
        for (name, shape) in used {
            // Rows are looked up in these, and of `W2` they may be chosen for a head over fewer tokens.
            let is_table = ["markov_w1", "codebook"].iter().any(|part| name.contains(part));
            let is_chosen_from = name.contains("markov_w2") && draft.vocabulary().is_none();
            let is_matrix = shape.len() == 2 && !is_table;
            if is_matrix {
                // 16 rows lie side by side; 32 codes have a scale of f16.
                wanted += shape[0].next_multiple_of(16) * shape[1] / 32 * 34;
            }
            if !is_matrix || is_chosen_from {
                wanted += 4 * shape.iter().product::<usize>();
            }
        }
        draft.hold_as(HeldAs::Blocks)?;
        assert_eq!(draft.held_bytes(), wanted, "{method}: {in_f32} bytes in f32");
        assert!(2 * wanted < in_f32, "{method}: {wanted} of {in_f32} bytes");
        assert_eq!(draft.parameter_count(), count, "{method}");
        // Nothing is left to hold otherwise.
        draft.hold_as(HeldAs::Blocks)?;
        assert_eq!((draft.held_bytes(), draft.parameter_count()), (wanted, count), "{method}");
    }
    Ok(())
}

#[test]
fn a_draft_that_is_held_as_blocks_is_not_saved() -> Result<()> {
    let target = target();
    let config = BlockConfig::for_target(target.config(), 2, 4, 39);
    let table = target.hold_ends()?.embedding()?;
    let mut draft = BlockDraft::initialise(&config, &table, 3)?;
    draft.hold_as(HeldAs::Blocks)?;
    let folder = tempfile::tempdir().expect("folder");
    let error = draft.save(folder.path(), "of the target").expect_err("refused").to_string();
    assert!(error.contains("held in fewer bits"), "{error}");
    assert!(!folder.path().join(DRAFT_FILE).exists());
    let error = draft.weights().tensor("fc.weight").expect_err("freed").to_string();
    assert!(error.contains("`fc.weight` in fewer bits"), "{error}");
    let config = GlideConfig::for_target(target.config(), None);
    let mut draft = GlideDraft::initialise(&config, &target, Init::Random, 3)?;
    draft.hold_as(HeldAs::Blocks)?;
    assert!(draft.named_tensors().is_err());
    Ok(())
}

#[test]
fn a_selecting_draft_in_blocks_is_near_one_in_f32() -> Result<()> {
    let (target, sequence) = (target(), sequence());
    let layers = [LayerId(0), LayerId(2)];
    let config = BlockConfig {
        target_layers: layers.to_vec(),
        initializer_range: 0.2,
        convolution: Some(ConvolutionSizes { kernel_size: 2, group_size: 8 }),
        selector: Some(SelectorSizes { rank: 32, top_k: 3 }),
        ..BlockConfig::for_target(target.config(), 2, 4, 39)
    };
    let table = target.hold_ends()?.embedding()?;
    let mut draft = BlockDraft::initialise(&config, &table, 3)?;
    let features = target.forward(&sequence, &Taps::of(&draft.taps()))?.hidden_of(&layers)?;
    let visible = Visible::new(&config, &[Anchor { index: 11, document_start: 0 }], 4, 12);
    let run = |draft: &BlockDraft| -> Result<[Tensor; 2]> {
        let context = draft.context(&features, &sequence.position_ids)?;
        let states = draft.blocks(&[5, 39, 39, 39], &[11, 12, 13, 14], &context, &visible)?;
        let selector = draft.selector().expect("a selector");
        let projected = selector.project(&states)?;
        // Fresh successors prefer nothing.
        let preferences = selector.preferences(&projected, &[5, 1, 2, 3], &[7; 12])?;
        assert_eq!(preferences.dims(), [4, 3]);
        Ok([states, projected])
    };
    let exact = run(&draft)?;
    draft.hold_as(HeldAs::Blocks)?;
    for (exact, rounded) in exact.iter().zip(&run(&draft)?) {
        assert_rounded(exact, rounded);
    }
    Ok(())
}
