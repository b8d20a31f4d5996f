use candle_core::{Device, Result, Tensor};

use super::*;
use crate::test_support::{Noise, assert_close};

const SIZES: [DeltaSizes; 4] = [
    DeltaSizes { key_heads: 1, value_heads: 1, key_dim: 1, value_dim: 1, tiled: false },
    DeltaSizes { key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 12, tiled: false },
    DeltaSizes { key_heads: 2, value_heads: 6, key_dim: 5, value_dim: 33, tiled: true },
    DeltaSizes { key_heads: 3, value_heads: 3, key_dim: 64, value_dim: 16, tiled: true },
];

/// Rows, gates between 0 and 1, and a state.
struct Case {
    sizes: DeltaSizes,
    rows: usize,
    mixed: Vec<f32>,
    decay: Vec<f32>,
    rate: Vec<f32>,
    state: Vec<f32>,
}

fn values(noise: &mut Noise, shape: &[usize]) -> Vec<f32> {
    noise.tensor(shape).flatten_all().and_then(|t| t.to_vec1()).expect("values")
}

impl Case {
    fn new(sizes: DeltaSizes, rows: usize, seed: u64) -> Self {
        let mut noise = Noise::new(seed);
        let mut gates = || -> Vec<f32> {
            let raw = values(&mut noise, &[rows, sizes.value_heads]);
            raw.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect()
        };
        let (decay, rate) = (gates(), gates());
        let mixed = values(&mut noise, &[rows, sizes.channels()]);
        let state = values(&mut noise, &[sizes.matrices()]);
        Self { sizes, rows, mixed, decay, rate, state }
    }

    fn start(&self) -> DeltaState {
        DeltaState::of_matrices(self.sizes, &self.state)
    }

    /// Outputs and the state after some rows.
    fn run(&self, rows: &[usize], walk: &Walk, before: &DeltaState) -> (Vec<f32>, DeltaState) {
        let some = |of: &[f32], width: usize| -> Vec<f32> {
            rows.iter().flat_map(|row| of[row * width..][..width].to_vec()).collect()
        };
        let heads = self.sizes.value_heads;
        let (decay, rate) = (some(&self.decay, heads), some(&self.rate, heads));
        let mixed = some(&self.mixed, self.sizes.channels());
        let rows = DeltaRows { mixed: &mixed, decay: &decay, rate: &rate };
        // What stood there before does not matter.
        let mut after = DeltaState::of_matrices(self.sizes, &vec![f32::NAN; self.sizes.matrices()]);
        let out = gated_delta_rule(self.sizes, rows, walk, before, &mut after).expect("a step");
        (out, after)
    }

    fn all(&self) -> Vec<usize> {
        (0..self.rows).collect()
    }

    /// Holds all rows and the state after them against the reference.
    fn assert_near_reference(&self) -> Result<()> {
        let Self { sizes, rows, .. } = *self;
        let (out, after) = self.run(&self.all(), &Walk::chain(rows), &self.start());
        let device = Device::Cpu;
        let gates = |of: &[f32]| Tensor::from_slice(of, (rows, sizes.value_heads), &device);
        let shape = (sizes.value_heads, sizes.key_dim, sizes.value_dim);
        let state = Tensor::from_slice(&self.state, shape, &device)?;
        let mixed = Tensor::from_slice(&self.mixed, (rows, sizes.channels()), &device)?;
        let gates = (gates(&self.decay)?, gates(&self.rate)?);
        let (want, want_state) = reference(sizes, &mixed, (&gates.0, &gates.1), &state)?;
        assert_close("outputs", &Tensor::from_vec(out, want.shape(), &device)?, &want, 2e-5);
        let after = Tensor::from_vec(after.matrices(sizes), shape, &device)?;
        assert_close("state", &after, &want_state, 2e-5);
        Ok(())
    }
}

#[test]
fn the_fused_rule_matches_the_reference() -> Result<()> {
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        for rows in [1, 7, 64, 70, 200] {
            let case = Case::new(sizes, rows, seed as u64);
            case.assert_near_reference()?;
        }
    }
    Ok(())
}

#[test]
fn rows_have_the_same_bits_alone_and_together() {
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let count = 200;
        let case = Case::new(sizes, count, 40 + seed as u64);
        let (together, last) = case.run(&case.all(), &Walk::chain(count), &case.start());
        // In parts of every length, across the ends of chunks and groups of rows.
        for part in [1, 2, 15, 16, 17, 63, 64, 65, 130] {
            let mut state = case.start();
            for rows in case.all().chunks(part) {
                let (own, after) = case.run(rows, &Walk::chain(rows.len()), &state);
                let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let wanted = &together[rows[0] * sizes.values()..][..own.len()];
                assert_eq!(bits(&own), bits(wanted), "parts of {part} from {} on", rows[0]);
                state = after;
            }
            assert_eq!(state, last, "parts of {part}");
        }
    }
}

/// Two roots, branches of branches, nodes of one level beside each other.
const TREE: [Option<usize>; 12] = [
    None,
    Some(0),
    Some(0),
    Some(0),
    Some(1),
    Some(1),
    Some(3),
    None,
    Some(5),
    Some(7),
    Some(7),
    Some(8),
];

/// The rows from a root to a node.
fn path(mut node: usize) -> Vec<usize> {
    let mut path = vec![node];
    while let Some(parent) = TREE[node] {
        path.push(parent);
        node = parent;
    }
    path.reverse();
    path
}

#[test]
fn a_tree_s_nodes_have_the_bits_of_their_paths() -> Result<()> {
    let walk = Walk::tree(&TREE);
    assert!(!walk.is_chain() && Walk::tree(&[None, Some(0), Some(1)]).is_chain());
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        // Paths cross the end of a chunk at different depths.
        let before = 58 + 2 * seed;
        let case = Case::new(sizes, before + TREE.len(), 90 + seed as u64);
        let prefix: Vec<usize> = (0..before).collect();
        let (_, state) = case.run(&prefix, &Walk::chain(before), &case.start());
        let nodes: Vec<usize> = (before..before + TREE.len()).collect();
        let (out, _) = case.run(&nodes, &walk, &state);
        let width = sizes.values();
        for node in 0..TREE.len() {
            let path = path(node);
            let rows: Vec<usize> = path.iter().map(|node| before + node).collect();
            let (alone, _) = case.run(&rows, &Walk::chain(path.len()), &state);
            assert_eq!(alone[(path.len() - 1) * width..], out[node * width..][..width], "{node}");
        }
    }
    let mut noise = Noise::new(5);
    let channels = 7;
    for (kernel, silu, bias) in [(1, false, false), (4, true, false), (3, false, true)] {
        let bias = bias.then(|| values(&mut noise, &[channels]));
        let weight = values(&mut noise, &[channels, kernel]);
        let convolution = Convolution::new(&weight, bias, channels, silu)?;
        let before = values(&mut noise, &[convolution.reach(), channels]);
        let inputs = values(&mut noise, &[TREE.len(), channels]);
        let out = causal_convolution(&convolution, &inputs, &walk, &before)?;
        for node in 0..TREE.len() {
            let mut window = before.clone();
            let mut alone = Vec::new();
            for row in path(node) {
                let input = &inputs[row * channels..][..channels];
                alone = causal_convolution(&convolution, input, &Walk::chain(1), &window)?;
                window = convolution.window_after(&window, input, &[0]);
            }
            assert_eq!(alone, out[node * channels..][..channels], "{node}");
            assert_eq!(window, convolution.window_after(&before, &inputs, &path(node)));
        }
    }
    Ok(())
}

#[test]
fn documents_begin_anew() {
    let sizes = SIZES[1];
    let case = Case::new(sizes, 8, 7);
    let start = DeltaState::new(sizes);
    let walk = Walk::documents(&[4, 4, 4, 5, 5, -1, 0, 0]);
    assert!(!walk.is_chain());
    let (out, _) = case.run(&case.all(), &walk, &start);
    for document in [0..3, 3..5, 5..6, 6..8] {
        let rows: Vec<usize> = document.clone().collect();
        let (alone, _) = case.run(&rows, &Walk::chain(rows.len()), &start);
        assert_eq!(alone, out[document.start * sizes.values()..document.end * sizes.values()]);
    }
}

#[test]
fn a_convolution_is_the_sum_over_its_taps() -> Result<()> {
    let (channels, kernel, rows) = (3, 3, 5);
    let mut noise = Noise::new(11);
    let weight = values(&mut noise, &[channels, kernel]);
    let bias = values(&mut noise, &[channels]);
    let before = values(&mut noise, &[kernel - 1, channels]);
    let inputs = values(&mut noise, &[rows, channels]);
    let all: Vec<f32> = before.iter().chain(&inputs).copied().collect();
    for silu in [false, true] {
        let convolution = Convolution::new(&weight, Some(bias.clone()), channels, silu)?;
        let out = causal_convolution(&convolution, &inputs, &Walk::chain(rows), &before)?;
        for row in 0..rows {
            for channel in 0..channels {
                let taps = (0..kernel).map(|j| {
                    f64::from(weight[channel * kernel + j])
                        * f64::from(all[(row + j) * channels + channel])
                });
                let sum = f64::from(bias[channel]) + taps.sum::<f64>();
                let want = if silu { sum / (1.0 + (-sum).exp()) } else { sum };
                let got = f64::from(out[row * channels + channel]);
                assert!((got - want).abs() < 1e-5, "{got} {want}");
            }
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error() {
    assert!(Convolution::new(&[1.0; 7], None, 3, false).is_err());
    assert!(Convolution::new(&[], None, 3, false).is_err());
    assert!(Convolution::new(&[1.0; 6], Some(vec![0.0; 2]), 3, false).is_err());
    let convolution = Convolution::new(&[1.0; 6], None, 3, false).expect("fits");
    assert!(causal_convolution(&convolution, &[0.0; 6], &Walk::chain(1), &[0.0; 3]).is_err());
    let case = Case::new(SIZES[1], 2, 1);
    let rows = DeltaRows { mixed: &case.mixed, decay: &case.decay, rate: &case.rate };
    let before = case.start();
    let mut after = before.clone();
    let run = |sizes, rows, count, after: &mut DeltaState| {
        gated_delta_rule(sizes, rows, &Walk::chain(count), &before, after).is_err()
    };
    assert!(run(SIZES[1], rows, 3, &mut after));
    assert!(run(DeltaSizes { key_heads: 0, ..SIZES[1] }, rows, 2, &mut after));
    assert!(run(DeltaSizes { key_heads: 3, ..SIZES[1] }, rows, 2, &mut after));
    assert!(run(SIZES[1], rows, 2, &mut DeltaState::new(SIZES[0])));
}

/// Gates at their ends: nothing is forgotten, everything is, nothing is learned.
#[test]
fn gates_of_zero_and_one_are_exact_cases() -> Result<()> {
    let sizes = SIZES[1];
    for (decay, rate) in [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1e-30, 0.5)] {
        let mut case = Case::new(sizes, 150, 3);
        // A forgotten matrix every few rows, in the middle of chunks.
        case.decay.iter_mut().step_by(7).for_each(|value| *value = decay);
        case.rate.iter_mut().step_by(5).for_each(|value| *value = rate);
        case.assert_near_reference()?;
    }
    Ok(())
}
