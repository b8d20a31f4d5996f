//! Attention: visible keys of every kind, training and decoding.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::Size::{self, Real, Small, Smoke};
use super::case::{Case, frozen, only, trained, up_to};
use crate::attention::{
    Delays, KeyRanges, Scores, attention, attention_in_one_pass, frozen_attention, reference,
};
use crate::random::CounterRng;
use crate::rows::select_rows;

/// Queries in parts of keys: scores are neither equal nor all about one key.
const QUERY_SCALE: f64 = 3.0;

/// Largest errors of trained attention with f32 and bf16 products. Tensor cores cut off sums of f32 terms. Where a
/// query sees few keys, its gradient is what rounded products leave of a cancellation.
const SINGLE: f64 = 5e-5;
const HALF: f64 = 5e-2;
const FEW_KEYS: usize = 16;
const HALF_OF_FEW: f64 = 0.2;
/// The same where some rows alone are compared: a key's gradient is the sum of few.
const HALF_OF_SOME: f64 = 0.1;

/// Which keys queries see.
#[derive(Debug, Clone, Copy)]
enum Sight {
    /// All before.
    Causal,
    /// Those of documents, some of them padding, with a delay a token.
    Documents,
    /// So many before.
    Window(usize),
    /// All before and the own column of so many later steps.
    Steps(usize),
    /// Nodes of a tree over so many cached keys.
    Tree(usize),
    /// New tokens after so many cached ones.
    Appended(usize),
}

impl Sight {
    fn ranges(self, tokens: usize) -> KeyRanges {
        let mut rng = CounterRng::new(0, "sight", &[tokens as u64]);
        let one = vec![0; tokens];
        match self {
            Self::Causal => KeyRanges::packed(&one, None, Delays::Same(0)),
            Self::Window(keys) => KeyRanges::packed(&one, Some(keys), Delays::Same(1)),
            Self::Documents => {
                let mut ids = Vec::with_capacity(tokens);
                while ids.len() < tokens {
                    let id = if rng.below(6) == 0 { -1 } else { ids.len() as i32 };
                    let run = 1 + rng.below(1 + tokens as u64 / 3) as usize;
                    ids.extend(std::iter::repeat_n(id, run.min(tokens - ids.len())));
                }
                let delays: Vec<u32> = (0..tokens).map(|_| rng.below(4) as u32).collect();
                KeyRanges::packed(&ids, None, Delays::PerToken(&delays))
            }
            Self::Steps(steps) => {
                KeyRanges::packed(&one, Some(tokens / 2), Delays::Same(0)).with_own_columns(steps)
            }
            Self::Tree(cached) => KeyRanges::tree(cached, &parents(tokens, &mut rng)),
            Self::Appended(cached) => KeyRanges::appended(cached, tokens),
        }
    }
}

/// Parents of a random tree's nodes.
fn parents(nodes: usize, rng: &mut CounterRng) -> Vec<Option<usize>> {
    let parent = |node: usize, rng: &mut CounterRng| {
        (node > 0 && rng.below(6) > 0).then(|| rng.below(node as u64) as usize)
    };
    (0..nodes).map(|node| parent(node, rng)).collect()
}

/// A way to compute attention.
type Op = fn(&Tensor, &Tensor, &Tensor, &Arc<KeyRanges>) -> Result<Tensor>;

/// One call.
#[derive(Debug, Clone, Copy)]
struct Call {
    sight: Sight,
    tokens: usize,
    /// Of queries and of keys.
    heads: (usize, usize),
    head_dim: usize,
    /// Queries that are compared, where scores of all would not fit.
    sampled: Option<usize>,
}

const fn call(sight: Sight, tokens: usize, heads: (usize, usize), head_dim: usize) -> Call {
    Call { sight, tokens, heads, head_dim, sampled: None }
}

const fn sampled(
    rows: usize,
    (sight, tokens): (Sight, usize),
    heads: (usize, usize),
    head_dim: usize,
) -> Call {
    Call { sampled: Some(rows), ..call(sight, tokens, heads, head_dim) }
}

const TRAINING: [(Size, Call); 51] = [
    (Smoke, call(Sight::Causal, 1, (1, 1), 64)),
    (Smoke, call(Sight::Documents, 70, (4, 2), 80)),
    (Smoke, call(Sight::Window(9), 67, (3, 1), 64)),
    (Smoke, call(Sight::Steps(3), 33, (2, 1), 64)),
    (Smoke, call(Sight::Tree(40), 17, (2, 2), 64)),
    (Smoke, sampled(7, (Sight::Causal, 65), (2, 1), 64)),
    (Smoke, call(Sight::Documents, 70, (4, 2), 192)),
    (Smoke, call(Sight::Steps(2), 33, (2, 1), 256)),
    (Small, call(Sight::Causal, 257, (4, 2), 64)),
    (Small, call(Sight::Documents, 600, (4, 2), 64)),
    (Small, call(Sight::Window(100), 577, (4, 1), 64)),
    (Small, call(Sight::Steps(6), 250, (4, 2), 64)),
    (Small, call(Sight::Tree(300), 61, (4, 2), 64)),
    (Small, call(Sight::Causal, 2, (2, 1), 80)),
    (Small, call(Sight::Window(64), 333, (4, 2), 80)),
    (Small, call(Sight::Steps(2), 129, (4, 2), 80)),
    (Small, call(Sight::Tree(255), 33, (4, 2), 80)),
    (Small, call(Sight::Causal, 63, (4, 2), 96)),
    (Small, call(Sight::Documents, 400, (4, 2), 96)),
    (Small, call(Sight::Window(30), 321, (4, 2), 96)),
    (Small, call(Sight::Steps(4), 100, (4, 2), 96)),
    (Small, call(Sight::Tree(64), 63, (4, 2), 96)),
    (Small, call(Sight::Causal, 65, (4, 2), 128)),
    (Small, call(Sight::Documents, 600, (8, 2), 128)),
    (Small, call(Sight::Window(200), 513, (4, 2), 128)),
    (Small, call(Sight::Steps(6), 200, (4, 2), 128)),
    (Small, call(Sight::Tree(256), 61, (8, 2), 128)),
    (Small, call(Sight::Documents, 300, (4, 2), 72)),
    (Small, call(Sight::Documents, 300, (4, 2), 144)),
    (Small, call(Sight::Causal, 257, (4, 1), 160)),
    (Small, call(Sight::Steps(3), 130, (4, 2), 160)),
    (Small, call(Sight::Window(70), 333, (4, 2), 192)),
    (Small, call(Sight::Tree(100), 33, (4, 2), 192)),
    (Small, call(Sight::Causal, 17, (2, 1), 256)),
    (Small, call(Sight::Documents, 600, (4, 2), 256)),
    (Small, call(Sight::Window(50), 190, (2, 1), 256)),
    (Small, call(Sight::Steps(3), 70, (2, 1), 256)),
    (Small, call(Sight::Tree(100), 30, (2, 1), 256)),
    (Small, sampled(32, (Sight::Causal, 4096), (2, 1), 64)),
    (Small, sampled(32, (Sight::Documents, 4096), (4, 2), 128)),
    (Real, sampled(64, (Sight::Documents, 4096), (32, 8), 64)),
    (Real, sampled(64, (Sight::Window(1024), 4096), (32, 8), 80)),
    (Real, sampled(64, (Sight::Causal, 4096), (32, 8), 96)),
    (Real, sampled(64, (Sight::Documents, 4096), (32, 8), 128)),
    (Real, sampled(64, (Sight::Documents, 4096), (32, 8), 160)),
    (Real, sampled(64, (Sight::Window(512), 4096), (16, 4), 256)),
    (Real, sampled(64, (Sight::Causal, 4096), (8, 4), 256)),
    (Real, sampled(64, (Sight::Steps(6), 4096), (32, 8), 128)),
    (Real, sampled(61, (Sight::Tree(32_000), 61), (32, 8), 128)),
    (Real, sampled(64, (Sight::Causal, 32_768), (8, 2), 128)),
    (Real, sampled(64, (Sight::Documents, 32_768), (8, 2), 64)),
];

impl Call {
    fn case(self, attention: Op) -> Case {
        let Self { sight, tokens, heads: (heads, kv_heads), head_dim, .. } = self;
        let ranges = Arc::new(sight.ranges(tokens));
        let keys = ranges.max_end().max(tokens);
        let rows = self.rows();
        let (own, of_rows) = (rows.clone(), Arc::clone(&ranges));
        let seen = match &rows {
            Some(rows) => ranges.select(rows),
            None => ranges.as_ref().clone(),
        };
        let inputs = [
            trained("q", [tokens, heads, head_dim]).times(QUERY_SCALE),
            trained("k", [keys, kv_heads, head_dim]),
            trained("v", [keys, kv_heads, head_dim]),
        ];
        let op = move |t: &[Tensor]| {
            let out = attention(&t[0], &t[1], &t[2], &of_rows)?;
            only(chosen(out, own.as_deref()))
        };
        let case = Case::new(self.shape(), inputs, op, move |t| {
            let q = chosen(t[0].clone(), rows.as_deref())?;
            only(reference(&q, &t[1], &t[2], &seen))
        });
        let half = match self.sampled {
            _ if tokens < FEW_KEYS => HALF_OF_FEW,
            Some(_) => HALF_OF_SOME,
            None => HALF,
        };
        case.within(SINGLE, half)
    }

    /// First, last, and those between at about equal distances.
    fn rows(&self) -> Option<Vec<u32>> {
        let count = self.sampled?.min(self.tokens);
        let last = self.tokens.saturating_sub(1);
        Some((0..count).map(|i| (i * last / (count - 1).max(1)) as u32).collect())
    }

    fn shape(&self) -> String {
        let (heads, kv_heads) = self.heads;
        let sampled = self.sampled.map(|rows| format!(", {rows} rows compared"));
        format!(
            "{:?}, T {}, heads {heads}/{kv_heads}, D {}{}",
            self.sight,
            self.tokens,
            self.head_dim,
            sampled.unwrap_or_default()
        )
    }
}

fn chosen(tensor: Tensor, rows: Option<&[u32]>) -> Result<Tensor> {
    match rows {
        Some(rows) => select_rows(&tensor, rows),
        None => Ok(tensor),
    }
}

pub(super) fn training(size: Size) -> Vec<Case> {
    up_to(size, &TRAINING).map(|call| call.case(attention)).collect()
}

/// Heads that have a kernel for all gradients, mostly with several of its tiles.
const ONE_PASS: [(Size, Call); 11] = [
    (Smoke, call(Sight::Causal, 130, (2, 1), 64)),
    (Smoke, call(Sight::Documents, 140, (2, 1), 128)),
    (Smoke, call(Sight::Steps(2), 33, (2, 1), 64)),
    (Small, call(Sight::Causal, 257, (4, 2), 64)),
    (Small, call(Sight::Window(100), 577, (4, 1), 64)),
    (Small, call(Sight::Tree(300), 61, (4, 2), 64)),
    (Small, call(Sight::Documents, 600, (8, 2), 128)),
    (Small, call(Sight::Steps(6), 250, (4, 2), 128)),
    (Small, sampled(32, (Sight::Causal, 4096), (2, 1), 128)),
    (Real, sampled(64, (Sight::Documents, 4096), (32, 8), 64)),
    (Real, sampled(64, (Sight::Causal, 32_768), (8, 2), 128)),
];

pub(super) fn one_pass(size: Size) -> Vec<Case> {
    up_to(size, &ONE_PASS).map(|call| call.case(attention_in_one_pass)).collect()
}

/// Queries and head dim, the type of keys and values, and what is seen.
type Decoding = (usize, usize, DType, Sight);

const DECODING: [(Size, Decoding); 22] = [
    (Smoke, (0, 64, DType::F32, Sight::Appended(9))),
    (Smoke, (1, 64, DType::F32, Sight::Appended(0))),
    (Smoke, (5, 64, DType::F16, Sight::Appended(300))),
    (Smoke, (9, 64, DType::F32, Sight::Tree(260))),
    (Smoke, (3, 64, DType::BF16, Sight::Tree(130))),
    (Small, (1, 80, DType::F32, Sight::Appended(1023))),
    (Small, (63, 96, DType::F16, Sight::Appended(700))),
    (Small, (64, 128, DType::F32, Sight::Appended(515))),
    (Small, (100, 128, DType::F32, Sight::Appended(515))),
    (Small, (61, 128, DType::F16, Sight::Tree(1000))),
    (Small, (1, 256, DType::F32, Sight::Appended(2047))),
    (Small, (7, 128, DType::BF16, Sight::Appended(1500))),
    (Small, (61, 96, DType::BF16, Sight::Tree(515))),
    (Small, (7, 256, DType::BF16, Sight::Appended(1500))),
    (Small, (61, 192, DType::BF16, Sight::Tree(515))),
    (Small, (100, 256, DType::BF16, Sight::Appended(515))),
    (Real, (1, 128, DType::F16, Sight::Appended(32_767))),
    (Real, (61, 128, DType::F32, Sight::Tree(32_000))),
    (Real, (1, 64, DType::F32, Sight::Appended(131_071))),
    (Real, (63, 256, DType::F16, Sight::Appended(8000))),
    (Real, (8, 128, DType::BF16, Sight::Appended(32_760))),
    (Real, (8, 256, DType::BF16, Sight::Appended(32_760))),
];

pub(super) fn decoding(size: Size) -> Vec<Case> {
    let case = |(queries, head_dim, dtype, sight): Decoding| {
        let ranges = Arc::new(sight.ranges(queries));
        let keys = ranges.max_end().max(1);
        let inputs = [
            frozen("q", [queries, 8, head_dim]).times(QUERY_SCALE),
            frozen("k", [keys, 2, head_dim]).of(dtype),
            frozen("v", [keys, 2, head_dim]).of(dtype),
        ];
        let shape = format!("{sight:?}, {queries} queries, heads 8/2, D {head_dim}, {dtype:?}");
        let seen = Arc::clone(&ranges);
        let op = move |t: &[Tensor]| only(attention(&t[0], &t[1], &t[2], &ranges));
        Case::new(shape, inputs, op, move |t| only(reference(&t[0], &t[1], &t[2], &seen)))
    };
    up_to(size, &DECODING).map(case).collect()
}

/// Queries, head dim, what is seen, the soft-cap and whether there are sinks.
type Bent = (usize, usize, Sight, Option<f64>, bool);

const BENT: [(Size, Bent); 8] = [
    (Smoke, (1, 64, Sight::Appended(0), Some(2.0), false)),
    (Smoke, (9, 64, Sight::Tree(60), None, true)),
    (Smoke, (33, 80, Sight::Documents, Some(1.0), true)),
    (Small, (130, 128, Sight::Window(50), None, true)),
    (Small, (63, 256, Sight::Appended(300), Some(30.0), false)),
    (Small, (257, 64, Sight::Causal, Some(0.5), true)),
    (Real, (63, 64, Sight::Appended(4000), None, true)),
    (Real, (512, 256, Sight::Window(200), Some(50.0), false)),
];

/// Scores that are soft-capped or share the softmax with sinks.
pub(super) fn bent(size: Size) -> Vec<Case> {
    let case = |(queries, head_dim, sight, softcap, has_sinks): Bent| {
        let ranges = Arc::new(sight.ranges(queries));
        let keys = ranges.max_end().max(queries);
        let inputs = [
            frozen("q", [queries, 4, head_dim]).times(QUERY_SCALE),
            frozen("k", [keys, 2, head_dim]),
            frozen("v", [keys, 2, head_dim]),
            frozen("sinks", [4]).times(3.0),
        ];
        let shape = format!(
            "{sight:?}, {queries} queries, heads 4/2, D {head_dim}, soft-cap {softcap:?}, sinks {has_sinks}"
        );
        let seen = Arc::clone(&ranges);
        let op = move |t: &[Tensor]| {
            let scores = Scores { softcap, sinks: has_sinks.then_some(&t[3]) };
            only(frozen_attention(&t[0], &t[1], &t[2], &ranges, scores))
        };
        Case::new(shape, inputs, op, move |t| only(plain_bent(t, &seen, softcap, has_sinks)))
            // Its f32 factors may be rounded to 10 bits on a device, not to bf16.
            .within(SINGLE, 5e-3)
    };
    up_to(size, &BENT).map(case).collect()
}

/// The same, score by score, in f64.
fn plain_bent(
    t: &[Tensor],
    ranges: &KeyRanges,
    softcap: Option<f64>,
    has_sinks: bool,
) -> Result<Tensor> {
    let (queries, heads, head_dim) = t[0].dims3()?;
    let kv_heads = t[1].dim(1)?;
    let of = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (q, k, v, sinks) = (of(&t[0])?, of(&t[1])?, of(&t[2])?, of(&t[3])?);
    let mut out = vec![0.0; queries * heads * head_dim];
    for (at, out) in out.chunks_mut(head_dim).enumerate() {
        let (query, head) = (at / heads, at % heads);
        let place = |key: usize| (key * kv_heads + head / (heads / kv_heads)) * head_dim;
        let singles = ranges.singles_of(query).iter().map(|key| *key as usize);
        let keys: Vec<usize> = ranges.of(query).chain(singles).collect();
        let score = |key: &usize| {
            let pairs = q[at * head_dim..][..head_dim].iter().zip(&k[place(*key)..][..head_dim]);
            let score = pairs.map(|(q, k)| q * k).sum::<f64>() / (head_dim as f64).sqrt();
            softcap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        let weights: Vec<f64> = keys.iter().map(|key| score(key).exp()).collect();
        let sink = if has_sinks { sinks[head].exp() } else { 0.0 };
        let total = weights.iter().sum::<f64>() + sink;
        for (key, weight) in keys.iter().zip(&weights) {
            for (out, v) in out.iter_mut().zip(&v[place(*key)..]) {
                *out += weight / total * v;
            }
        }
    }
    Tensor::from_vec(out, (queries, heads, head_dim), t[0].device())
}

const BITS: [(Size, (usize, usize, Sight)); 6] = [
    (Smoke, (5, 64, Sight::Appended(254))),
    (Smoke, (7, 64, Sight::Tree(250))),
    (Small, (63, 128, Sight::Appended(600))),
    (Small, (61, 96, Sight::Tree(515))),
    (Real, (63, 128, Sight::Appended(8000))),
    (Real, (61, 128, Sight::Tree(8190))),
];

/// A query has the bits that it has alone, at the end of the keys that it sees.
pub(super) fn row_bits(size: Size) -> Vec<Case> {
    let case = |(queries, head_dim, sight): (usize, usize, Sight)| {
        let ranges = Arc::new(sight.ranges(queries));
        let keys = ranges.max_end();
        let inputs = [
            frozen("q", [queries, 8, head_dim]).times(QUERY_SCALE),
            frozen("k", [keys, 2, head_dim]),
            frozen("v", [keys, 2, head_dim]),
        ];
        let shape = format!("{sight:?}, {queries} queries, heads 8/2, D {head_dim}");
        let seen = Arc::clone(&ranges);
        let op = move |t: &[Tensor]| only(attention(&t[0], &t[1], &t[2], &ranges));
        let alone = move |t: &[Tensor]| {
            let row = |query: usize| {
                let singles = seen.singles_of(query).iter().copied();
                let path: Vec<u32> = seen.of(query).map(|key| key as u32).chain(singles).collect();
                let (k, v) = (select_rows(&t[1], &path)?, select_rows(&t[2], &path)?);
                let last = Arc::new(KeyRanges::appended(path.len() - 1, 1));
                attention(&t[0].narrow(0, query, 1)?, &k, &v, &last)
            };
            let rows = (0..queries).map(row).collect::<Result<Vec<_>>>()?;
            only(Tensor::cat(&rows, 0))
        };
        Case::same(shape, inputs, op, alone).of_kernels()
    };
    up_to(size, &BITS).map(case).collect()
}
