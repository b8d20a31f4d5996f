use super::*;
use crate::test_support::Noise;

pub(super) fn instruction_sets() -> Vec<Isa> {
    let mut all = vec![Isa::Portable];
    #[cfg(target_arch = "x86_64")]
    {
        let best = Isa::detect();
        if best != Isa::Portable {
            all.push(Isa::Avx2);
        }
        if best == Isa::Avx512 {
            all.push(best);
        }
    }
    all
}

fn exact(isa: Isa) -> Factors {
    Factors { isa, rounded: false }
}

pub(super) fn values(noise: &mut Noise, count: usize) -> Vec<f32> {
    (0..count).map(|_| noise.next() as f32).collect()
}

/// A `rows` x `cols` operand, transposed in memory or not, with gaps between its lines.
pub(super) fn operand(data: &[f32], rows: usize, cols: usize, transposed: bool) -> Mat<'_> {
    if transposed {
        Mat::rows(data, cols, rows, rows + 3).t()
    } else {
        Mat::rows(data, rows, cols, cols + 3)
    }
}

fn element(mat: Mat<'_>, row: usize, col: usize) -> f32 {
    mat.data[row * mat.row_stride + col * mat.col_stride]
}

const SIZES: [(usize, usize, usize); 12] = [
    (1, 1, 1),
    (3, 5, 2),
    (14, 32, 8),
    (15, 33, 9),
    (29, 31, 17),
    (40, 130, 515),
    (200, 70, 40),
    (5, 100, 515),
    (16, 64, 700),
    (17, 300, 600),
    (90, 64, 1),
    (2700, 130, 2),
];

#[test]
fn every_kernel_matches_the_triple_loop() {
    let mut noise = Noise::new(1);
    for (case, (rows, cols, depth)) in SIZES.into_iter().enumerate() {
        let (a_data, b_data) = (
            values(&mut noise, (rows + 3) * (depth + 3)),
            values(&mut noise, (cols + 3) * (depth + 3)),
        );
        for layout in 0..4 {
            let a = operand(&a_data, rows, depth, layout % 2 == 1);
            let b = operand(&b_data, depth, cols, layout / 2 == 1);
            for isa in instruction_sets() {
                for accumulate in [false, true] {
                    let stride = cols + 2;
                    let mut dst = vec![0.5_f32; rows * stride];
                    product(exact(isa), &mut dst, stride, (a, b), accumulate, Threads::Pool);
                    for i in 0..rows {
                        for j in 0..cols {
                            let sum: f64 = (0..depth)
                                .map(|k| f64::from(element(a, i, k)) * f64::from(element(b, k, j)))
                                .sum();
                            let want = sum + if accumulate { 0.5 } else { 0.0 };
                            let got = f64::from(dst[i * stride + j]);
                            assert!(
                                (got - want).abs() < 1e-4,
                                "{isa:?} case {case} layout {layout} ({i}, {j}): {got} {want}"
                            );
                        }
                        let gap = &dst[i * stride + cols..(i + 1) * stride];
                        assert!(
                            gap.iter().all(|x| x.to_bits() == 0.5_f32.to_bits()),
                            "gap written"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn an_element_has_the_same_bits_in_every_product_on_every_unit_with_any_number_of_threads() {
    let (rows, cols, depth) = (275, 290, 700);
    let mut noise = Noise::new(2);
    let (a, b) = (
        values(&mut noise, (rows + 3) * (depth + 3)),
        values(&mut noise, (cols + 3) * (depth + 3)),
    );
    for layout in 0..4 {
        let a = operand(&a, rows, depth, layout % 2 == 1);
        let b = operand(&b, depth, cols, layout / 2 == 1);
        assert_the_same_bits(a, b);
    }
}

/// Of every element of a product, in parts of its rows too.
fn assert_the_same_bits(a: Mat<'_>, b: Mat<'_>) {
    let (rows, cols) = (a.rows, b.cols);
    let mut of_portable: Option<Vec<f32>> = None;
    for isa in instruction_sets() {
        let mut whole = vec![0.0; rows * cols];
        product(exact(isa), &mut whole, cols, (a, b), false, Threads::One);
        let portable = of_portable.get_or_insert_with(|| whole.clone());
        assert!(whole.iter().zip(portable).all(|(x, y)| x.to_bits() == y.to_bits()), "{isa:?}");
        for threads in [1, 2, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("pool");
            let mut again = vec![0.0; rows * cols];
            pool.install(|| product(exact(isa), &mut again, cols, (a, b), false, Threads::Pool));
            assert!(whole.iter().zip(&again).all(|(x, y)| x.to_bits() == y.to_bits()));
        }
        for (first, count) in [
            (0, 1),
            (3, 2),
            (7, 5),
            (30, 7),
            (40, 13),
            (10, 16),
            (74, 1),
            (20, 55),
            (100, 168),
            (3, 169),
        ] {
            let mut part = vec![0.0; count * cols];
            let some = a.t().columns(first..first + count).t();
            product(exact(isa), &mut part, cols, (some, b), false, Threads::One);
            let same = whole[first * cols..].iter().zip(&part);
            assert!(same.clone().all(|(x, y)| x.to_bits() == y.to_bits()), "{isa:?} {count} rows");
        }
    }
}

#[test]
fn an_empty_sum_is_zero() {
    let mut dst = vec![1.0; 6];
    let (a, b) = (Mat::rows(&[], 2, 0, 0), Mat::<f32>::rows(&[], 0, 3, 3));
    matmul(&mut dst, 3, a, b, false, Threads::One);
    assert!(dst.iter().all(|x| x.to_bits() == 0));
}
