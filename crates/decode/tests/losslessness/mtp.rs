//! The target's own block for prediction of several tokens: its formula, its rows, what is refused.

use candle_core::{D, DType, Device, Tensor};
use longdraft_kernels::attention::KeyRanges;
use longdraft_models::TargetConfig;
use longdraft_models::target_model::{
    KvCache, MtpBlock, PackedSequence, Pairs, Tap, Taps, Target, TargetOptions, tensor_specs,
};
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::{TensorSpec, WeightSource};
use serde_json::{Value, json};

const PAIRS: usize = 24;

/// A target of three layers of a family whose files hold such blocks.
fn config(family: &str) -> TargetConfig {
    let mut config = json!({
        "model_type": family, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50,
        "max_position_embeddings": 200, "initializer_range": 0.3, "rms_norm_eps": 1e-5,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24, "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "use_qk_norm": true, "attention_bias": true
    });
    let more = json!({
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    if family == "deepseek_v3" {
        config["num_key_value_heads"] = Value::from(4);
        config["attention_bias"] = Value::from(false);
    }
    TargetConfig::from_json(&config).expect("valid configuration")
}

const FAMILIES: [&str; 5] =
    ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "glm4_moe", "deepseek_v3"];

/// Random tensors, norms among them.
fn source(specs: &[TensorSpec], seed: u64) -> MemorySource {
    let random = MemorySource::random(specs, 0.3, seed).expect("values");
    let noise: Vec<TensorSpec> =
        specs.iter().map(|s| TensorSpec::new(format!("{}.noise", s.name), &s.shape)).collect();
    let noise = MemorySource::random(&noise, 0.3, seed).expect("values");
    MemorySource::new(specs.iter().map(|spec| {
        let mut tensor = random.load(&spec.name, DType::F32).expect("tensor");
        if spec.name.ends_with("norm.weight") {
            let more = noise.load(&format!("{}.noise", spec.name), DType::F32).expect("noise");
            tensor = ((tensor * 0.5).expect("half") + more).expect("sum");
        }
        (spec.name.clone(), tensor)
    }))
}

fn with_block(config: &TargetConfig, seed: u64) -> MemorySource {
    source(&[tensor_specs(config), MtpBlock::tensor_specs(config)].concat(), seed)
}

/// A target with its block, tokens, and states before them.
struct Case {
    target: Target,
    block: MtpBlock,
    ids: Vec<u32>,
    states: Tensor,
}

impl Case {
    fn new(config: &TargetConfig, source: &MemorySource) -> Self {
        let options = TargetOptions::default();
        let target = Target::from_source(config.clone(), source, &options).expect("target");
        let block = MtpBlock::from_source(config, source, &options).expect("block");
        let states = TensorSpec::new("states", &[PAIRS, config.hidden_size]);
        let states = MemorySource::random(&[states], 1.0, 3).expect("values");
        let states = states.load("states", DType::F32).expect("states");
        Self { target, block, ids: (0..PAIRS as u32).map(|i| i * 7 % 50).collect(), states }
    }

    fn rows(&self, first: usize, count: usize) -> (Tensor, Vec<u32>) {
        let states = self.states.narrow(0, first, count).expect("rows");
        (states, (first as u32..(first + count) as u32).collect())
    }

    /// What the head reads of rows of the chain.
    fn chain(&self, cache: &mut KvCache, first: usize, count: usize) -> Tensor {
        let (states, position_ids) = self.rows(first, count);
        let ids = &self.ids[first..first + count];
        let pairs = Pairs { ids, states: &states, position_ids: &position_ids };
        let ranges = KeyRanges::appended(first, count);
        self.block.step_each(&self.target, pairs, &mut [(ranges, cache)]).expect("step").head_input
    }
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values");
    values.into_iter().map(f32::to_bits).collect()
}

/// `x / rms(x) · w`
fn normed(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    let mean = x.sqr().and_then(|x| x.mean_keepdim(D::Minus1)).expect("mean");
    let root = (mean + eps).and_then(|mean| mean.sqrt()).expect("root");
    x.broadcast_div(&root).and_then(|x| x.broadcast_mul(weight)).expect("product")
}

/// The block is a target of one layer whose embeddings are what is made of tokens and states.
#[test]
fn a_block_is_one_layer_over_joint_embeddings_and_states() {
    for (family, seed) in FAMILIES.into_iter().zip(1..) {
        let config = config(family);
        let source = with_block(&config, seed);
        let case = Case::new(&config, &source);
        let load = |name: &str| source.load(name, DType::F32).expect("tensor");
        let norm = |name: &str| {
            let stored = load(&format!("model.layers.3.{name}"));
            if config.parts.norms_less_one { (stored + 1.0).expect("sum") } else { stored }
        };
        let eps = config.rms_norm_eps;
        let embedded = case.target.hold_ends().expect("ends").embed(&case.ids).expect("embeddings");
        let joined = [
            normed(&embedded, &norm("enorm.weight"), eps),
            normed(&case.states, &norm("hnorm.weight"), eps),
        ];
        let joined = Tensor::cat(&joined, 1).expect("joined");
        let weight = load("model.layers.3.eh_proj.weight");
        let table = joined.matmul(&weight.t().expect("turned")).expect("product");
        let mut one = config.clone();
        (one.num_hidden_layers, one.vocab_size, one.tie_word_embeddings) = (1, PAIRS, true);
        one.parts.mixers.clear();
        if let Some(experts) = &mut one.experts {
            experts.mlp_only_layers.clear();
        }
        let renamed = MtpBlock::tensor_specs(&config).into_iter().map(|spec| {
            (spec.name.replace("model.layers.3.", "model.layers.0."), load(&spec.name))
        });
        let outer = [
            ("model.embed_tokens.weight".to_owned(), table),
            ("model.norm.weight".to_owned(), load("model.layers.3.shared_head.norm.weight")),
        ];
        let of_one = MemorySource::new(renamed.chain(outer));
        let one = Target::from_source(one, &of_one, &TargetOptions::default()).expect("target");
        let row = PackedSequence::single(&(0..PAIRS as u32).collect::<Vec<_>>());
        let features = one.forward(&row, &Taps::of(&[Tap::FinalHidden])).expect("a pass");
        let want = features.final_hidden().expect("tapped");
        let mut cache = case.block.new_cache(&case.target).expect("cache");
        let got = case.chain(&mut cache, 0, PAIRS);
        let error = (&got - want).and_then(|d| d.abs()?.max_all()?.to_scalar::<f32>());
        assert!(error.expect("difference") < 1e-4, "{family}");
    }
}

#[test]
fn pairs_have_the_same_bits_however_they_come() {
    for (family, seed) in FAMILIES.into_iter().zip(11..) {
        let config = config(family);
        let case = Case::new(&config, &with_block(&config, seed));
        let mut cache = case.block.new_cache(&case.target).expect("cache");
        let whole = case.chain(&mut cache, 0, PAIRS);
        cache.truncate(0);
        let (states, position_ids) = case.rows(0, 10);
        let pairs = Pairs { ids: &case.ids[..10], states: &states, position_ids: &position_ids };
        case.block.read_each(&case.target, pairs, &mut [(10, &mut cache)]).expect("read");
        for row in 10..20 {
            let alone = case.chain(&mut cache, row, 1);
            assert_eq!(bits(&alone), bits(&whole.narrow(0, row, 1).expect("row")), "{family}");
        }
        // A path among strangers: rows 1, 3 and 5 are pairs 20, 21 and 22.
        let places = [0, 20, 1, 21, 2, 22];
        let of = |all: &[u32]| places.map(|place: usize| all[place]);
        let ids = of(&case.ids);
        let rows = Tensor::new(&places.map(|place| place as u32), &Device::Cpu).expect("rows");
        let states = case.states.index_select(&rows, 0).expect("states");
        let pairs = Pairs { ids: &ids, states: &states, position_ids: &[20, 20, 21, 21, 22, 22] };
        let parents = [None, None, Some(0), Some(1), Some(3), Some(3)];
        let ranges = KeyRanges::tree(20, &parents);
        let tree = case.block.step_each(&case.target, pairs, &mut [(ranges, &mut cache)]);
        let tree = tree.expect("tree");
        for (row, pair) in [(1, 20), (3, 21), (5, 22)] {
            let node = tree.head_input.narrow(0, row, 1).expect("row");
            assert_eq!(bits(&node), bits(&whole.narrow(0, pair, 1).expect("row")), "{family}");
        }
        // What a later step reads: normed in one family, not in others.
        let is_normed = bits(&tree.handed_on) == bits(&tree.head_input);
        assert_eq!(is_normed, family.starts_with("qwen"), "{family}");
        let few = Pairs { ids: &ids[..5], states: &states, position_ids: &[0; 6] };
        assert!(case.block.read_each(&case.target, few, &mut [(5, &mut cache)]).is_err());
    }
}

/// Latent rows, too, which are key and value in one.
#[test]
fn pairs_of_another_cache_are_copied_with_their_bits() {
    for (family, seed) in FAMILIES.into_iter().zip(31..) {
        let config = config(family);
        let case = Case::new(&config, &with_block(&config, seed));
        let cache = || case.block.new_cache(&case.target).expect("cache");
        let (mut other, mut copy) = (cache(), cache());
        let whole = case.chain(&mut other, 0, PAIRS);
        copy.copy_prefix(&other, 10).expect("copied");
        assert_eq!((copy.len(), other.len()), (10, PAIRS), "{family}");
        let rest = case.chain(&mut copy, 10, PAIRS - 10);
        let want = whole.narrow(0, 10, PAIRS - 10).expect("rows");
        assert_eq!(bits(&rest), bits(&want), "{family}");
    }
}

/// A source under the names that Qwen's folders have.
fn apart(config: &TargetConfig, source: &MemorySource) -> MemorySource {
    let names = [
        ("eh_proj.weight", "mtp.fc.weight"),
        ("enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
        ("hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
        ("shared_head.norm.weight", "mtp.norm.weight"),
    ];
    let prefix = format!("model.layers.{}.", config.num_hidden_layers);
    MemorySource::new(source.names().into_iter().map(|name| {
        let tensor = source.load(&name, DType::F32).expect("tensor");
        let Some(rest) = name.strip_prefix(&prefix) else { return (name, tensor) };
        let own = names.iter().find(|(ours, _)| *ours == rest);
        let own = own.map_or_else(|| format!("mtp.layers.0.{rest}"), |(_, n)| (*n).to_owned());
        (own, tensor)
    }))
}

#[test]
fn blocks_beside_the_layers_are_the_same_and_what_is_wrong_is_told_by_name() {
    let options = TargetOptions::default();
    for (family, seed) in FAMILIES.into_iter().zip(21..) {
        let config = config(family);
        let source = with_block(&config, seed);
        let apart = apart(&config, &source);
        let rows = [&source, &apart].map(|source| {
            let case = Case::new(&config, source);
            let mut cache = case.block.new_cache(&case.target).expect("cache");
            bits(&case.chain(&mut cache, 0, PAIRS))
        });
        assert_eq!(rows[0], rows[1], "{family}");
        let open = |source: &MemorySource| {
            MtpBlock::from_source(&config, source, &options).map(|_| ()).map_err(|e| e.to_string())
        };
        // Without a norm of its own the final one is taken; without experts an MLP.
        let some = |source: &MemorySource, keeps: &dyn Fn(&str) -> bool| {
            let names = source.names().into_iter().filter(|name| keeps(name));
            MemorySource::new(names.map(|name| {
                let tensor = source.load(&name, DType::F32).expect("tensor");
                (name, tensor)
            }))
        };
        open(&some(&apart, &|name| name != "mtp.norm.weight")).expect("the final norm");
        let none = open(&some(&apart, &|name| !name.starts_with("mtp."))).expect_err("none");
        assert!(none.contains("no block for prediction of several tokens is there"), "{none}");
        assert_eq!(none.lines().count(), 1, "{none}");
        let misses = open(&some(&apart, &|name| !name.ends_with("o_proj.weight")));
        let misses = misses.expect_err("missing");
        assert!(misses.contains("tensor `mtp.layers.0.self_attn.o_proj.weight`"), "{misses}");
        let turned = |source: &MemorySource, wrong: &str| {
            MemorySource::new(source.names().into_iter().map(|name| {
                let mut tensor = source.load(&name, DType::F32).expect("tensor");
                if name == wrong {
                    tensor = tensor.t().and_then(|t| t.contiguous()).expect("turned");
                }
                (name, tensor)
            }))
        };
        for (source, wrong) in
            [(&apart, "mtp.fc.weight"), (&source, "model.layers.3.eh_proj.weight")]
        {
            let told = open(&turned(source, wrong)).expect_err("turned");
            let says = format!("tensor `{wrong}` has shape [64, 32], [32, 64] expected");
            assert!(told.contains(&says), "{told}");
        }
    }
}
