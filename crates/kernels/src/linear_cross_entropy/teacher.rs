//! The teacher's probabilities of a chunk of rows, each teacher row once.

use candle_core::{Result, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::row::{Softmax, TeacherRow};
use super::{Inputs, SoftTargets, Teacher};
use crate::linear::{Weight, product_nt};
use crate::rows::select_rows;
use crate::storage::with_f32;

/// Rows in the order of their teachers; `None` if that is how they come.
pub(super) fn order_by_teacher(inputs: &Inputs<'_>) -> Option<Vec<u32>> {
    let of = inputs.teacher?.rows?;
    let mut order: Vec<u32> = (0..of.len() as u32).collect();
    order.sort_by_key(|&row| of[row as usize]);
    Some(order)
}

/// Unnormalised probabilities `[U, V]` of the teachers of a chunk's rows.
pub(super) struct TeacherChunk {
    probabilities: Vec<f32>,
    softmax: Vec<Softmax>,
    /// Teacher of every row of the chunk, ascending.
    of: Vec<usize>,
}

impl TeacherChunk {
    /// `rows`: the chunk's rows, in the order of their teachers.
    pub(super) fn new(
        inputs: &Inputs<'_>,
        rows: &[u32],
        vocabulary: usize,
    ) -> Result<Option<Self>> {
        let Some(teacher) = inputs.teacher else {
            return Ok(None);
        };
        let (hidden, of) = distinct(&teacher, rows)?;
        let width = hidden.dim(1)?;
        let mut probabilities = with_f32(&hidden, |hidden| {
            teacher.head.with_weight(|head| {
                let mut logits = product_nt(hidden, head, width, vocabulary);
                let bend = inputs.teacher_bend;
                logits.par_chunks_mut(vocabulary).for_each(|row| bend.bend(row));
                if matches!(inputs.soft, SoftTargets::Weighted(_)) {
                    round_like(&mut logits, head);
                }
                Ok(logits)
            })
        })?;
        let softmax = probabilities.par_chunks_mut(vocabulary).map(Softmax::of).collect();
        Ok(Some(Self { probabilities, softmax, of }))
    }

    /// The teacher of the chunk's row `i`.
    pub(super) fn row(&self, i: usize) -> TeacherRow<'_> {
        let vocabulary = self.probabilities.len() / self.softmax.len();
        let at = self.of[i];
        (&self.probabilities[at * vocabulary..][..vocabulary], &self.softmax[at])
    }
}

/// Hidden states of the rows' teachers, each once, and which of them every row has.
fn distinct(teacher: &Teacher<'_>, rows: &[u32]) -> Result<(Tensor, Vec<usize>)> {
    let Some(of) = teacher.rows else {
        let first = rows.first().map_or(0, |&row| row as usize);
        return Ok((teacher.hidden.narrow(0, first, rows.len())?, (0..rows.len()).collect()));
    };
    let mut chosen: Vec<u32> = Vec::new();
    let place = |&row: &u32| {
        let row = of[row as usize];
        if chosen.last() != Some(&row) {
            chosen.push(row);
        }
        chosen.len() - 1
    };
    let places = rows.iter().map(place).collect();
    Ok((select_rows(teacher.hidden, &chosen)?, places))
}

/// Rounds logits to a 16-bit head's type.
fn round_like(logits: &mut [f32], head: Weight<'_>) {
    match head {
        Weight::F32(_) | Weight::Blocks(_) => {}
        Weight::Bf16(_) => logits.iter_mut().for_each(|z| *z = bf16::from_f32(*z).to_f32()),
        Weight::F16(_) => logits.iter_mut().for_each(|z| *z = f16::from_f32(*z).to_f32()),
    }
}
