//! What a slot says, whichever slots run beside it and are asked for.

use longdraft_kernels::rows::select_rows;

use super::*;
use crate::target_model::KvCache;

/// The states of some slots and the gradients of all tensors, with the other slots run to the end or not.
#[test]
fn slots_that_are_not_asked_for_change_nothing() {
    let ids: Vec<u32> = (0..12).map(|t| t * 7 % 39).collect();
    let (features, table) = (noise(&[12, 64], 2), noise(&[40, 32], 1));
    let direction = noise(&[5, 32], 5);
    let wanted = [1, 2, 5, 7, 10];
    let convolution = Some(ConvolutionSizes { kernel_size: 2, group_size: 8 });
    for config in [
        toy(),
        BlockConfig { layers: vec![LayerKind::Full], ..toy() },
        BlockConfig { layers: vec![LayerKind::Sliding; 2], sliding_window: Some(5), ..toy() },
        BlockConfig { convolution, ..toy() },
    ] {
        let network = BlockDraft::initialise(&config, &table, 3).expect("network");
        let (tokens, positions) = inputs(&ids, &[1, 6, 10], &config);
        let anchors = [1, 6, 10].map(|index| Anchor { index, document_start: 0 });
        let visible = Visible::new(&config, &anchors, 4, 12);
        let states = |asked: Option<&[u32]>| {
            let all: Vec<u32> = (0..12).collect();
            let context = network.context(&features, &all).expect("context");
            let seen = (context.as_slice(), &visible);
            network.blocks_at(&tokens, &positions, seen, asked).expect("states")
        };
        let whole = select_rows(&states(None), &wanted).expect("rows");
        let asked = states(Some(&wanted));
        assert!(worst(&asked, &whole) <= 0.0, "{:?}", config.layers);
        let gradients = [&asked, &whole].map(|states| {
            let loss = (states * &direction).and_then(|t| t.sum_all()).expect("loss");
            loss.gradients().expect("backward")
        });
        for parameter in network.weights().parameters() {
            let of = |i: usize| gradients[i].get(parameter.var.as_tensor()).expect("a gradient");
            assert!(worst(of(0), of(1)) < 1e-5, "{}", parameter.name);
        }
        let none = states(Some(&[]));
        assert_eq!(none.dims(), [0, 32]);
        let context = network.context(&features, &(0..12).collect::<Vec<_>>()).expect("context");
        for wrong in [[3, 12], [5, 2]] {
            let seen = (context.as_slice(), &visible);
            assert!(network.blocks_at(&tokens, &positions, seen, Some(&wrong)).is_err());
        }
    }
}

/// A block of four tokens, and the same one twice: each token is projected once for two slots then.
#[test]
fn tokens_that_are_projected_once_change_nothing() {
    let (features, direction) = (noise(&[12, 64], 2), noise(&[4, 32], 5));
    let (tokens, positions) = ([5_u32, 39, 7, 11], [6_u32, 7, 8, 9]);
    for layers in [vec![LayerKind::Full], vec![LayerKind::Full; 2]] {
        let config = BlockConfig { layers, ..toy() };
        let network = BlockDraft::initialise(&config, &noise(&[40, 32], 1), 3).expect("network");
        let states = |blocks: usize, asked: Option<&[u32]>| {
            let anchors = vec![Anchor { index: 6, document_start: 0 }; blocks];
            let visible = Visible::new(&config, &anchors, 4, 12);
            let all: Vec<u32> = (0..12).collect();
            let context = network.context(&features, &all).expect("context");
            let (tokens, positions) = (tokens.repeat(blocks), positions.repeat(blocks));
            let seen = (context.as_slice(), &visible);
            network.blocks_at(&tokens, &positions, seen, asked).expect("states")
        };
        let (alone, twice) = (states(1, None), states(2, None));
        let copies = [0, 4].map(|first| twice.narrow(0, first, 4).expect("a block"));
        assert!(copies.iter().all(|copy| worst(copy, &alone) <= 0.0), "{:?}", config.layers);
        let some = states(2, Some(&[2, 5]));
        assert!(worst(&some, &select_rows(&alone, &[2, 1]).expect("rows")) <= 0.0);

        let both = Tensor::cat(&[&direction, &direction], 0).expect("directions");
        let gradients =
            [(&alone, &direction, 1.0), (&twice, &both, 0.5)].map(|(states, to, by)| {
                let loss = (states * to).and_then(|t| t.sum_all()).and_then(|sum| sum * by);
                loss.and_then(|loss| loss.gradients()).expect("backward")
            });
        for parameter in network.weights().parameters() {
            let of = |i: usize| gradients[i].get(parameter.var.as_tensor()).expect("a gradient");
            assert!(worst(of(1), of(0)) < 1e-4, "{}", parameter.name);
        }
    }
}

/// Blocks of several sequences, of which one is asked for nothing.
#[test]
fn sequences_that_are_asked_for_nothing_change_nothing() {
    let (config, features) = (toy(), noise(&[12, 64], 2));
    let network = BlockDraft::initialise(&config, &noise(&[40, 32], 1), 3).expect("network");
    let lengths = [6_usize, 3, 10];
    let cache_of = |rows: usize| {
        let (layers, heads) = (config.layers.len(), config.num_key_value_heads);
        let cache = KvCache::new(layers, heads, config.head_dim, &Device::Cpu);
        let mut cache = cache.expect("a cache");
        let positions: Vec<u32> = (0..rows as u32).collect();
        let own = features.narrow(0, 0, rows).expect("rows");
        let context = network.context(&own, &positions).expect("context");
        cache.reserve(rows).expect("room");
        for (layer, KeyValues { k, v }) in context.iter().enumerate() {
            cache.append(layer, k, v).expect("appended");
        }
        cache.commit(rows);
        cache
    };
    let mut caches = lengths.map(cache_of);
    let tokens = [5_u32, 39, 39, 39].repeat(lengths.len());
    let positions: Vec<u32> =
        lengths.iter().flat_map(|root| *root as u32..*root as u32 + 4).collect();
    let mut states = |asked: Option<&[u32]>| {
        let sequence = |(cache, root)| {
            let anchor = Anchor { index: root, document_start: 0 };
            (cache, Visible::new(&config, &[anchor], 4, root))
        };
        let mut sequences: Vec<(&mut KvCache, Visible)> =
            caches.iter_mut().zip(lengths).map(sequence).collect();
        network.blocks_each(&tokens, &positions, &mut sequences, asked).expect("states")
    };
    let whole = states(None);
    for wanted in [&[0_u32, 2, 9, 11][..], &[5], &[8, 9, 10, 11]] {
        let asked = states(Some(wanted));
        assert!(worst(&asked, &select_rows(&whole, wanted).expect("rows")) <= 0.0, "{wanted:?}");
    }
    assert_eq!(states(Some(&[])).dims(), [0, 32]);
}
