//! What a step on a row holds on a CPU, beside what is planned for it. With the feature `emulate-cuda` the kernels of
//! NVIDIA GPUs run on the CPU, and the plan is that of a GPU, with products in f32 and in bf16: by hand.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Tensor, Var};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures, run_target};
use longdraft_kernels::dispatch::multiplies_halves;
use longdraft_kernels::factors::Written;
use longdraft_kernels::graph::Backward;
use longdraft_kernels::linear_cross_entropy::{Inputs, linear_cross_entropy, logits_at_once};
use longdraft_kernels::matrix::{BlockFormat, Matrix, QuantisedMatrix};
use longdraft_kernels::memory::{Allocator, Budget};
use longdraft_models::TargetConfig;
use longdraft_models::draft::block::{
    BlockConfig, BlockDraft, ChainKind, ChainSizes, ConvolutionSizes, OwnHead, SelectorSizes,
};
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::draft::{Draft, Init, VocabularyMap};
use longdraft_models::ids::TargetTokenId;
use longdraft_models::published::published_config;
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::{TensorSpec, WeightSource};
use longdraft_parallel::Gradients;
use longdraft_train::footprint::loss::{Against, chunk_bytes};
use longdraft_train::footprint::{Row, RowMemory};
use longdraft_train::method::DraftMethod;
use longdraft_train::method::block::{
    BlockBudget, BlockDraws, BlockKeys, BlockLoss, BlockObjective, SelectorLoss,
};
use longdraft_train::method::dflash::Dflash;
use longdraft_train::method::dflash2::Dflash2;
use longdraft_train::method::dspark::{ChainLoss, ChainObjective, Dspark, MarkovHead};
use longdraft_train::method::eagle3::{
    Eagle3, Eagle3DraftConfig, Eagle3Objective, Eagle3ObjectiveConfig, OovRows,
};
use longdraft_train::method::glide::{Glide, GlideObjective, GlideObjectiveConfig};
use longdraft_train::objective::{Objective, TeacherConfig};

#[global_allocator]
static MEMORY: Allocator = Allocator::new();

const TOKENS: usize = 700;
const EMULATED: bool = cfg!(feature = "emulate-cuda");

fn target() -> TargetConfig {
    let name = "HuggingFaceTB/SmolLM2-135M-Instruct";
    let mut target = published_config(name).expect("a published target");
    target.hidden_size = 96;
    target.intermediate_size = 256;
    target.num_hidden_layers = 8;
    target.num_attention_heads = 6;
    target.num_key_value_heads = 2;
    target.head_dim = 16;
    target.vocab_size = 700;
    target
}

fn random(shape: (usize, usize), seed: u64) -> Tensor {
    let spec = TensorSpec::new("noise.matrix", &[shape.0, shape.1]);
    let source = MemorySource::random(&[spec], 0.05, seed).expect("values");
    source.load("noise.matrix", DType::F32).expect("there")
}

/// The type that a target is held in: its products are of that type.
fn held_type() -> DType {
    if multiplies_halves(&Device::Cpu) { DType::BF16 } else { DType::F32 }
}

/// A table or a head of the target, as the target is held.
fn table(seed: u64) -> Tensor {
    let table = random((target().vocab_size, target().hidden_size), seed);
    table.to_dtype(held_type()).expect("a table")
}

/// What a draft reads of so many layers, and of the states that it learns if it has a teacher.
fn features(layers: usize, has_teacher: bool) -> BatchFeatures {
    let width = target().hidden_size;
    let aux_hidden = Some(random((TOKENS, layers * width), 5));
    let teacher = if has_teacher {
        TeacherFeatures::EveryToken { hidden: random((TOKENS, width), 4) }
    } else {
        TeacherFeatures::None
    };
    BatchFeatures { last_kv: None, aux_hidden, teacher, part: None }
}

fn batch() -> Batch {
    let tokens = TOKENS as u32;
    Batch { learned: (0..tokens - 1).collect(), ..Batch::of_document(0..tokens) }
}

/// What a step holds at most beyond what was there before it: of its loss and its gradients.
fn held(draft: &dyn Draft, loss: impl Fn() -> Tensor) -> usize {
    // Weights as products multiply them are planned apart.
    let mut written = Written::default();
    if held_type() == DType::BF16 {
        for parameter in draft.parameters() {
            let factor = parameter.var.detach().to_dtype(DType::BF16).expect("a factor");
            written.put(&parameter.var, factor);
        }
    }
    written.with(|| {
        // What the thread keeps for later steps is there after this.
        drop(loss().gradients());
        let budget = Budget::new(1 << 40);
        budget.within(|| {
            let loss = loss();
            let parameters = draft.parameters();
            let mut gradients = Gradients::new(parameters);
            gradients.add(parameters, loss.gradients().expect("gradients")).expect("sums");
            drop(loss);
        });
        budget.most_held()
    })
}

/// Runs a test with every type of products that there is, of the whole process: one test at a time.
fn of_all_products(test: impl Fn()) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    #[cfg(feature = "emulate-cuda")]
    {
        use longdraft_kernels::dispatch::{Ops, Products, set_ops, set_products};
        set_ops(Ops::Emulated);
        for products in [Products::Half, Products::Single] {
            eprintln!("{products:?}");
            set_products(products);
            test();
        }
    }
    #[cfg(not(feature = "emulate-cuda"))]
    test();
}

fn held_by(objective: &dyn Objective, features: &BatchFeatures) -> usize {
    let batch = batch();
    let prepared = objective.prepare(&batch, features).expect("prepared");
    held(objective.draft(), || {
        let share = objective.share(&batch, features, &prepared, &prepared.denominators, true);
        share.expect("share").loss.expect("a loss")
    })
}

/// A row of some tokens that are all learned, beside a head as a tensor.
fn row(tokens: u64, teacher_logits: bool) -> Row {
    Row {
        tokens,
        learned: tokens,
        parts: 1,
        teacher_logits,
        threads: if EMULATED { 0 } else { rayon::current_num_threads() },
        half_products: multiplies_halves(&Device::Cpu),
        stored_head: false,
        chunk_logits: logits_at_once(None),
    }
}

fn planned(method: &dyn DraftMethod, teacher_logits: bool) -> RowMemory {
    planned_for(method, &row(TOKENS as u64, teacher_logits))
}

fn planned_for(method: &dyn DraftMethod, row: &Row) -> RowMemory {
    let footprint = method.footprint(&TeacherConfig::default(), &target());
    footprint.expect("sizes that fit").row_memory(row)
}

/// Holds a plan to what was measured, packed operands apart: the calling thread keeps them.
#[track_caller]
fn assert_planned(name: &str, memory: &RowMemory, measured: usize) {
    let under_way = memory.chunks.max(memory.backward).max(memory.left);
    let planned = if EMULATED { memory.activations + under_way } else { memory.peak() };
    let off = planned as f64 / measured as f64 - 1.0;
    eprintln!("{name}: {planned} planned, {measured} held, {off:+.3}: {memory:?}");
    assert!((-0.03..0.1).contains(&off), "{name}: {planned} planned, {measured} held: {memory:?}");
}

/// An EAGLE-3 draft that proposes 400 tokens, and how it is configured.
fn eagle3(head: &Matrix) -> (Eagle3, Eagle3Objective) {
    const PROPOSED: usize = 400;
    let network = Eagle3DraftConfig { draft_vocab_size: Some(PROPOSED), ..Default::default() };
    let objective = Eagle3ObjectiveConfig { oov_rows: OovRows::Keep, ..Default::default() };
    let config = Eagle3Config::for_target(&target(), PROPOSED).expect("sizes");
    let map = vocabulary(PROPOSED);
    let draft = Eagle3Draft::initialise(&config, map, &table(1), 2).expect("a draft");
    let built = Eagle3Objective::new(draft, head, objective.clone()).expect("an objective");
    (Eagle3 { network, objective }, built)
}

/// The first tokens.
fn vocabulary(tokens: usize) -> VocabularyMap {
    let kept = (0..tokens as u32).map(TargetTokenId).collect();
    VocabularyMap::new(kept, target().vocab_size).expect("a map")
}

#[test]
fn a_row_of_an_eagle3_draft_holds_what_is_planned() {
    of_all_products(|| {
        let (method, objective) = eagle3(&Matrix::Dense(table(3)));
        assert_planned("EAGLE-3", &planned(&method, true), held_by(&objective, &features(3, true)));
    });
}

#[test]
fn a_row_of_a_glide_draft_holds_what_is_planned() {
    of_all_products(|| {
        let options = TargetOptions { dtype: held_type(), ..TargetOptions::default() };
        let target = Arc::new(Target::random(target(), 1, &options).expect("a target"));
        let config = GlideConfig::for_target(target.config(), None);
        let draft = GlideDraft::initialise(&config, &target, Init::LastLayer, 1).expect("a draft");
        let config = GlideObjectiveConfig::default();
        let objective = GlideObjective::new(Arc::clone(&target), draft, config);
        let (batch, delays) = (batch(), vec![1; TOKENS]);
        let features = run_target(&target, &batch, None, &objective.needs()).expect("features");
        let measured = held(objective.draft(), || {
            let loss = objective.loss((&batch, &delays), &features, true).expect("a loss");
            loss.numerator.expect("learned")
        });
        assert_planned("GLIDE", &planned(&Glide::default(), true), measured);
    });
}

/// Keys for 90 blocks of a row.
fn shared(draft_vocab_size: Option<usize>) -> BlockKeys {
    BlockKeys { blocks_per_row: Some(90), draft_vocab_size, ..BlockKeys::default() }
}

/// Ninety blocks of a row.
fn draws() -> BlockDraws {
    BlockDraws { seed: 4, budget: BlockBudget::PerRow(90) }
}

fn network(layers: usize, block_size: usize) -> BlockConfig {
    BlockConfig::for_target(&target(), layers, block_size, 699)
}

/// A block draft, with a head of its own over the first tokens where it does not propose all.
fn block_draft(config: &BlockConfig) -> BlockDraft {
    let own_head = || {
        let tokens = config.draft_vocab_size;
        let rows = table(3).narrow(0, 0, tokens).expect("rows");
        OwnHead::new(vocabulary(tokens), &rows).expect("a head")
    };
    let own = config.has_own_head().then(own_head);
    BlockDraft::initialise_with(config, &table(1), own, 2).expect("a draft")
}

#[track_caller]
fn assert_planned_of_blocks(
    name: &str,
    method: &dyn DraftMethod,
    (config, loss): (&BlockConfig, BlockLoss),
) {
    let objective = BlockObjective::new(block_draft(config), &table(3), loss, draws());
    let features = features(config.target_layers.len(), false);
    assert_planned(name, &planned(method, false), held_by(&objective, &features));
}

#[track_caller]
fn assert_planned_of_a_chain(name: &str, method: &Dspark, config: &BlockConfig) {
    let objective =
        ChainObjective::new(block_draft(config), &table(3), ChainLoss::default(), draws());
    let features = features(config.target_layers.len(), true);
    assert_planned(name, &planned(method, true), held_by(&objective, &features));
}

#[test]
fn a_row_of_a_block_draft_holds_what_is_planned() {
    of_all_products(|| {
        for layers in [1, 2, 3] {
            let method = Dflash { layers, shared: shared(None), ..Dflash::default() };
            let config = network(layers, method.block_size);
            assert_planned_of_blocks("DFlash", &method, (&config, BlockLoss::default()));
        }
    });
}

#[test]
fn a_row_of_a_block_draft_with_convolutions_and_a_selector_holds_what_is_planned() {
    let selector =
        SelectorLoss { weight: 1.0, over_hits: false, keeps_labels: true, stops_gradient: false };
    let sizes = SelectorSizes { rank: 24, top_k: 6 };
    of_all_products(|| {
        for layers in [1, 2, 3] {
            let method = Dflash2 {
                block: Dflash { layers, shared: shared(None), ..Dflash::default() },
                selector_rank: sizes.rank,
                selector_top_k: sizes.top_k,
                selector_keeps_labels: true,
                ..Dflash2::default()
            };
            let (kernel_size, group_size) = (method.conv_kernel_size, method.conv_group_size);
            let config = BlockConfig {
                convolution: Some(ConvolutionSizes { kernel_size, group_size }),
                selector: Some(sizes),
                ..network(layers, method.block.block_size)
            };
            let loss = BlockLoss { selector: Some(selector), ..BlockLoss::default() };
            assert_planned_of_blocks("DFlash2", &method, (&config, loss));
        }
    });
}

#[test]
fn a_row_of_a_block_draft_with_a_head_of_its_own_holds_what_is_planned() {
    of_all_products(|| assert_planned_of_own_heads(300));
}

fn assert_planned_of_own_heads(proposed: usize) {
    let (layers, shared) = (2, shared(Some(proposed)));
    let method = Dflash { layers, shared: shared.clone(), ..Dflash::default() };
    let config = BlockConfig { draft_vocab_size: proposed, ..network(layers, method.block_size) };
    let name = "DFlash, a head of its own";
    assert_planned_of_blocks(name, &method, (&config, BlockLoss::default()));

    let method = Dspark { layers, shared, markov_rank: 24, confidence: false, ..Dspark::default() };
    let chain = Some(ChainSizes { rank: 24, kind: ChainKind::Vanilla, confidence: None });
    let config = network(layers, method.block_size);
    let config = BlockConfig { draft_vocab_size: proposed, chain, ..config };
    assert_planned_of_a_chain("DSpark, a head of its own", &method, &config);
}

#[test]
fn a_row_of_a_chained_block_draft_holds_what_is_planned() {
    of_all_products(assert_planned_of_chains);
}

fn assert_planned_of_chains() {
    for (kind, markov_head) in [
        (ChainKind::Vanilla, MarkovHead::Vanilla),
        (ChainKind::Gated, MarkovHead::Gated),
        (ChainKind::Rnn, MarkovHead::Rnn),
    ] {
        let (layers, block_size, rank) = (2, 6, 24);
        let method = Dspark {
            layers,
            block_size,
            shared: shared(None),
            markov_rank: rank,
            markov_head,
            confidence: false,
            ..Dspark::default()
        };
        let chain = Some(ChainSizes { rank, kind, confidence: None });
        let config = BlockConfig { chain, ..network(layers, block_size) };
        assert_planned_of_a_chain(&format!("DSpark, {kind:?}"), &method, &config);
    }
}

/// A head of quantised blocks.
fn stored_head(vocabulary: usize, width: usize) -> Matrix {
    // A scale in f16 and 32 codes each.
    let byte = |i: usize| match i % 34 {
        0 => 0,
        1 => 0x20,
        _ => (i * 7 % 251) as u8,
    };
    let bytes: Vec<u8> = (0..vocabulary * width / 32 * 34).map(byte).collect();
    let blocks = QuantisedMatrix::new(BlockFormat::Q8_0, vocabulary, width, &bytes);
    Matrix::Quantised(Arc::new(blocks.expect("blocks")))
}

#[test]
fn a_head_of_blocks_is_never_widened_as_a_whole() {
    const ROWS: usize = 8;
    if EMULATED {
        return;
    }
    let (vocabulary, width) = (60_000, 128);
    let head = stored_head(vocabulary, width);
    let hidden = Var::from_tensor(&random((ROWS, width), 7)).expect("states");
    let labels: Vec<u32> = (0..ROWS as u32).collect();
    let loss = || {
        let output = linear_cross_entropy(&Inputs::of_labels(&hidden, &head, &labels));
        drop(output.expect("a loss").loss_sum.gradients().expect("gradients"));
    };
    // What the thread keeps for later products is there after this.
    loss();
    let budget = Budget::new(1 << 40);
    budget.within(loss);
    let (held, row) = (budget.most_held(), row(ROWS as u64, false));
    let row = Row { stored_head: true, ..row };
    let planned = chunk_bytes(&row, width as u64, vocabulary as u64, Against::Labels);
    let off = planned as f64 / held as f64 - 1.0;
    assert!((-0.03..0.1).contains(&off), "{planned} planned, {held} held");
    assert!(held < 3 * vocabulary * width, "{held}");
}

/// The loss of a row.
fn loss_of(objective: &dyn Objective, features: &BatchFeatures) -> f32 {
    let batch = batch();
    let prepared = objective.prepare(&batch, features).expect("prepared");
    let share = objective.share(&batch, features, &prepared, &prepared.denominators, true);
    share.expect("share").loss.expect("a loss").to_scalar().expect("a number")
}

/// Holds an objective whose head is blocks to one with their values, and to what is planned for it.
fn assert_same<M: DraftMethod, O: Objective>(
    name: &str,
    of: impl Fn(&Matrix) -> (M, O),
    features: &BatchFeatures,
    teacher_logits: bool,
) {
    let stored = stored_head(target().vocab_size, target().hidden_size);
    let widened = Matrix::Dense(stored.to_dense().expect("values"));
    let ((method, own), (_, plain)) = (of(&stored), of(&widened));
    assert_eq!(loss_of(&own, features).to_bits(), loss_of(&plain, features).to_bits());
    let row = Row { stored_head: true, ..row(TOKENS as u64, teacher_logits) };
    assert_planned(name, &planned_for(&method, &row), held_by(&own, features));
}

#[test]
fn a_draft_learns_the_same_from_a_head_of_blocks() {
    if EMULATED {
        return;
    }
    let of_blocks = |head: &Matrix| {
        let method = Dflash { layers: 1, shared: shared(None), ..Dflash::default() };
        let draft = block_draft(&network(1, method.block_size));
        (method, BlockObjective::new(draft, head, BlockLoss::default(), draws()))
    };
    assert_same("DFlash, blocks", of_blocks, &features(1, false), false);
    assert_same("EAGLE-3, blocks", eagle3, &features(3, true), true);
}
