//! Chosen rows, nothing at all, and copies beside running work.

use candle_core::{DType, Result, Tensor};

use super::Size::{self, Real, Small, Smoke};
use super::case::{Case, Output, frozen, only, trained, up_to};
use crate::linear::linear;
use crate::linear_cross_entropy::{Inputs, linear_cross_entropy};
use crate::matrix::Matrix;
use crate::random::CounterRng;
use crate::rows::{scatter_rows, select_rows};
use crate::transfer::upload_ahead;

/// Rows of the whole, rows that are chosen, width.
const CHOICES: [(Size, [usize; 3]); 7] = [
    (Smoke, [5, 0, 8]),
    (Smoke, [1, 1, 1]),
    (Smoke, [40, 70, 33]),
    (Small, [1000, 1, 512]),
    (Small, [1000, 3000, 257]),
    (Real, [32_768, 0, 4096]),
    (Real, [32_768, 5000, 1024]),
];

fn ids([rows, chosen, _]: [usize; 3]) -> Vec<u32> {
    let mut rng = CounterRng::new(0, "rows", &[rows as u64, chosen as u64]);
    (0..chosen).map(|_| rng.below(rows as u64) as u32).collect()
}

fn shape_of([rows, chosen, width]: [usize; 3]) -> String {
    format!("{chosen} rows of [{rows}, {width}]")
}

pub(super) fn selected(size: Size) -> Vec<Case> {
    let case = |choice: [usize; 3]| {
        let (own, wide) = (ids(choice), ids(choice));
        let inputs = [trained("x", [choice[0], choice[2]])];
        let op = move |t: &[Tensor]| only(select_rows(&t[0], &own));
        Case::new(shape_of(choice), inputs, op, move |t| only(select_rows(&t[0], &wide)))
    };
    up_to(size, &CHOICES).map(case).collect()
}

/// Rows added where they belong, several at one place and none at others.
pub(super) fn scattered(size: Size) -> Vec<Case> {
    let case = |choice @ [rows, chosen, width]: [usize; 3]| {
        let (own, wide) = (ids(choice), ids(choice));
        // Without rows nothing could get a gradient.
        let input = if chosen == 0 { frozen } else { trained };
        let inputs = [input("x", vec![chosen, width])];
        let shape = format!("{chosen} rows into [{rows}, {width}]");
        let op = move |t: &[Tensor]| only(scatter_rows(&t[0], &own, rows));
        Case::new(shape, inputs, op, move |t| {
            let places = Tensor::from_slice(&wide, chosen, t[0].device())?;
            only(
                Tensor::zeros((rows, width), t[0].dtype(), t[0].device())?
                    .index_add(&places, &t[0], 0),
            )
        })
    };
    up_to(size, &CHOICES).map(case).collect()
}

/// Embeddings of tokens from a table in bf16, in f32.
pub(super) fn embedded(size: Size) -> Vec<Case> {
    of_table(size, Matrix::rows)
}

/// A head of some tokens.
pub(super) fn selected_matrices(size: Size) -> Vec<Case> {
    of_table(size, |table, ids| table.select(ids)?.to_dense())
}

fn of_table(size: Size, rows: fn(&Matrix, &[u32]) -> Result<Tensor>) -> Vec<Case> {
    let case = |choice: [usize; 3]| {
        let (own, wide) = (ids(choice), ids(choice));
        let inputs = [frozen("table", [choice[0], choice[2]]).of(DType::BF16)];
        let op = move |t: &[Tensor]| only(rows(&Matrix::Dense(t[0].clone()), &own));
        let case =
            Case::new(shape_of(choice), inputs, op, move |t| only(select_rows(&t[0], &wide)));
        case.within(0.0, 0.0)
    };
    up_to(size, &CHOICES).map(case).collect()
}

/// A row of a batch without any learned token: no rows go through the loss.
pub(super) fn nothing(_: Size) -> Vec<Case> {
    let loss = |t: &[Tensor]| {
        let hidden = select_rows(&t[0], &[])?;
        let output = linear_cross_entropy(&Inputs::of_labels(&hidden, &t[1], &[]))?;
        Ok(vec![Output::numbers("rows", &[output.rows.hard.len() as f64])?, {
            Output::new("loss", output.loss_sum.detach().reshape(1)?)
        }])
    };
    let inputs = [frozen("hidden", [9, 16]), frozen("head", [33, 16])];
    let want =
        |_: &[Tensor]| Ok(vec![Output::numbers("rows", &[0.0])?, Output::numbers("loss", &[0.0])?]);
    vec![Case::new("loss of no rows of [9, 16]", inputs, loss, want).within(0.0, 0.0)]
}

/// Values of an upload; the page-locked memory is filled several times by the larger ones.
const UPLOADS: [(Size, usize); 3] = [(Smoke, 100_003), (Small, 9_000_001), (Real, 50_000_001)];

/// A second thread uploads while products run; both come out as they would alone.
pub(super) fn uploads(size: Size) -> Vec<Case> {
    let case = |count: usize| {
        let width = if count > 1_000_000 { 2048 } else { 96 };
        let inputs = [
            frozen("x", [width, width]),
            frozen("weight", [width, width]).times((3.0 / width as f64).sqrt()),
        ];
        let op = move |t: &[Tensor]| beside(t, &frozen("upload", [count]).on_host()?);
        let expected = |t: &[Tensor]| {
            let product = Output::new("product", linear(&t[0], &t[1], None)?);
            Ok(vec![product, Output::numbers("values that differ", &[0.0])?])
        };
        Case::new(format!("{count} values beside {width} x {width}"), inputs, op, expected)
    };
    up_to(size, &UPLOADS).map(case).collect()
}

/// Uploads three times while eight products run.
fn beside(t: &[Tensor], sent: &Tensor) -> Result<Vec<Output>> {
    let device = t[0].device();
    std::thread::scope(|scope| {
        let upload = || (0..3).map(|_| upload_ahead(sent, device)).collect::<Result<Vec<_>>>();
        let uploads = scope.spawn(upload);
        let mut product = linear(&t[0], &t[1], None)?;
        for _ in 1..8 {
            product = linear(&t[0], &t[1], None)?;
        }
        let Ok(uploads) = uploads.join() else {
            candle_core::bail!("the thread that uploads panicked")
        };
        let mut differing = 0.0;
        for upload in uploads? {
            let apart = upload.to_device(sent.device())?.ne(sent)?.to_dtype(DType::F64)?;
            differing += apart.sum_all()?.to_scalar::<f64>()?;
        }
        let differing = Output::numbers("values that differ", &[differing])?;
        Ok(vec![Output::new("product", product), differing])
    })
}
