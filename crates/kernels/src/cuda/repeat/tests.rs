use candle_core::{DType, Device, Result, Tensor};

use super::{Inputs, Recording, input, record, words};
use crate::cuda::emulator::emulated;
use crate::cuda::trace::starts_of;
use crate::rms_norm::rms_norm;
use crate::rows::{put_rows, put_rows_at, select_rows};
use crate::test_support::{Noise, bits};

/// What a pass reads and writes.
struct Model {
    table: Tensor,
    weight: Tensor,
    /// `[C, W]` in bf16.
    cache: Tensor,
}

impl Model {
    fn new(noise: &mut Noise) -> Result<Self> {
        let cache = Tensor::zeros((9, 16), DType::BF16, &Device::Cpu)?;
        Ok(Self { table: noise.tensor(&[12, 16]), weight: noise.tensor(&[16]), cache })
    }

    /// Norms of the rows of some tokens, which also go to the cache from a place on.
    fn pass(&self, place: u32, ids: &[u32]) -> Result<Tensor> {
        let place = words(&[place], &Device::Cpu)?;
        let rows = select_rows(&self.table, ids)?;
        put_rows_at(&self.cache, &rows, &place)?;
        rms_norm(&rows, &self.weight, 1e-5)
    }

    fn recorded(&self, inputs: &Inputs, place: u32, ids: &[u32]) -> Result<(Tensor, Recording)> {
        let parts: [&[u32]; 2] = [&[place], ids];
        record((inputs, &parts), |out: &Tensor| vec![out.clone()], || self.pass(place, ids))
    }
}

fn held(cache: &Tensor) -> Vec<u32> {
    bits(&cache.to_dtype(DType::F32).expect("bf16"))
}

#[test]
fn a_pass_is_made_again_with_other_inputs_and_has_the_bits_of_the_plain_one() -> Result<()> {
    let mut noise = Noise::new(3);
    let (model, plain) = (Model::new(&mut noise)?, Model::new(&mut Noise::new(3))?);
    emulated(|| -> Result<()> {
        let inputs = Inputs::new(&[&[0], &[1, 2]], &Device::Cpu)?;
        let (_, first) = model.recorded(&inputs, 0, &[1, 2])?;
        let (out, second) = model.recorded(&inputs, 2, &[2, 5])?;
        second.is_like(&first).expect("alike");
        assert_eq!(second.starts(), 3);
        let mut repeat = second.repeat(&Device::Cpu)?;
        // Ids that equal the place before them are not taken for it.
        for (place, ids) in [(4, [4, 11]), (7, [0, 0]), (6, [9, 3])] {
            inputs.set(&[&[place], &ids])?;
            let ((), starts) = starts_of(|| repeat.run().expect("again"));
            assert_eq!(starts, ["some_rows", "put_halves", "rms_norm"]);
            assert_eq!(bits(&out), bits(&plain.pass(place, &ids)?));
        }
        plain.pass(0, &[1, 2])?;
        plain.pass(2, &[2, 5])?;
        assert_eq!(held(&model.cache), held(&plain.cache));
        assert!(inputs.set(&[&[1], &[1, 2, 3]]).is_err(), "other lengths");
        assert!(Inputs::new(&[&[1], &[]], &Device::Cpu).is_err(), "an empty part");
        Ok(())
    })
}

/// Whatever a pass does that its starts do not show, two recordings differ.
#[test]
fn passes_that_depend_on_more_than_their_inputs_are_not_alike() -> Result<()> {
    let mut noise = Noise::new(4);
    let model = Model::new(&mut noise)?;
    let parts: [&[u32]; 1] = [&[3, 4]];
    let inputs = Inputs::new(&parts, &Device::Cpu)?;
    let reason = |pass: &dyn Fn(usize) -> Result<Tensor>| -> Result<String> {
        let of = |turn| record((&inputs, &parts), |out: &Tensor| vec![out.clone()], || pass(turn));
        let ((_, first), (_, second)) = (of(0)?, of(1)?);
        Ok(second.is_like(&first).expect_err("different"))
    };
    let rows = || select_rows(&model.table, &[3, 4]);
    let norm = |x: &Tensor, eps: f64| rms_norm(x, &model.weight, eps);
    emulated(|| -> Result<()> {
        // An op of candle between kernels, after them, and words that are no input.
        assert!(reason(&|_| norm(&(rows()? * 2.0)?, 1e-5))?.contains("`rms_norm`"));
        assert!(reason(&|_| rows()? * 2.0)?.contains("no kernel of ours"));
        assert!(reason(&|_| select_rows(&model.table, &[3]))?.contains("`some_rows`"));
        // Another number, other sizes, more starts, a write that does not show, an input that nobody reads.
        assert!(reason(&|turn| norm(&rows()?, 1e-5 * (1 + turn) as f64))?.contains("`rms_norm`"));
        assert!(
            reason(&|turn| norm(&rows()?.narrow(0, 0, 1 + turn)?, 1e-5))?.contains("`rms_norm`")
        );
        let more = |turn| if turn == 0 { rows() } else { norm(&rows()?, 1e-5) };
        assert_eq!(reason(&more)?, "2 and 1 starts");
        let wide = Tensor::zeros((4, 16), DType::F32, &Device::Cpu)?;
        let hidden = |_| {
            let rows = rows()?;
            put_rows(&wide, &rows, 1)?;
            Ok(rows)
        };
        assert!(reason(&hidden)?.contains("written"));
        assert!(reason(&|_| norm(&model.table, 1e-5))?.contains("not read"));
        Ok(())
    })?;
    assert!(input(&[3, 4]).is_none(), "nothing is recorded any more");
    Ok(())
}

#[test]
fn a_pass_that_fails_or_takes_too_much_memory_leaves_no_recording() -> Result<()> {
    let mut noise = Noise::new(5);
    let model = Model::new(&mut noise)?;
    let parts: [&[u32]; 1] = [&[3, 4]];
    let inputs = Inputs::new(&parts, &Device::Cpu)?;
    let outputs = |out: &Tensor| vec![out.clone()];
    emulated(|| -> Result<()> {
        let failed = record((&inputs, &parts), outputs, || {
            select_rows(&model.table, &[3, 4])?;
            candle_core::bail!("a pass fails")
        });
        assert!(failed.is_err() && input(&[3, 4]).is_none());
        let many = vec![0_u32; 20_000];
        let large = || select_rows(&model.table, &many);
        let (_, recording) = record((&inputs, &parts), outputs, large)?;
        assert!(recording.starts() == 0 && recording.is_too_large().is_some());
        let error = recording.repeat(&Device::Cpu).expect_err("nothing to repeat");
        assert!(error.to_string().contains("too much memory"), "{error}");
        Ok(())
    })
}
