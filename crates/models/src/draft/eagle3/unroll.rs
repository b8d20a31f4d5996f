//! Test-time steps over packed documents: what the draft computes when it reads its own states.
//!
//! Step `i` of row `t` reads the ground-truth token `x_{t+1+i}` (token 0 after the document's end)
//! and the row's own state of the step before. It attends to the step-0 keys of its document up to
//! `t`, and to its own keys of steps 1 to `i`: drafted positions `t, t+1, …` over real context. Rows
//! never see each other's later steps, so a row that no later step needs is left out, and memory
//! stays linear in `T`.
//!
//! Ranks that share a row run some of its tokens each. Step 0's keys and values are gathered, and their
//! gradients summed on the way back; nothing else of one rank's rows is seen by another's.

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::attention::{Delays, KeyRanges};
use longdraft_kernels::graph::{cat, narrow};
use longdraft_kernels::rope::RopeTable;
use longdraft_kernels::rows::select_rows;

use super::model::Eagle3Draft;
use crate::draft::Seen;
use crate::error::{Result, refused};
use crate::target_model::{KeyValues, PackedSequence, RowPart};

/// A later step's keys: rows that have one, and the index of the first among all keys.
struct Column {
    first: usize,
    rows: Vec<u32>,
}

/// The steps of one batch, taken one after the other.
pub struct TestTimeSteps<'a> {
    draft: &'a Eagle3Draft,
    sequence: &'a PackedSequence,
    part: Option<&'a RowPart>,
    /// Last position of each token's document, plus 1, `[T]`.
    lengths: Vec<u32>,
    /// Index after each token's document, `[T]`.
    ends: Vec<usize>,
    context: KeyRanges,
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    columns: Vec<Column>,
    /// Rows of `state`.
    rows: Vec<u32>,
    /// What the next step reads, `[rows, H]`.
    state: Tensor,
    step: usize,
}

impl<'a> TestTimeSteps<'a> {
    /// Before the first step of a whole row.
    ///
    /// # Shapes
    /// - `aux`: `[T, 3·Ht]`
    ///
    /// # Errors
    /// - lengths or widths differ
    pub fn new(draft: &'a Eagle3Draft, sequence: &'a PackedSequence, aux: &Tensor) -> Result<Self> {
        Self::of_part(draft, sequence, aux, None)
    }

    /// Before the first step of this rank's part of a row, or of a whole one.
    ///
    /// # Shapes
    /// - `aux`: `[t, 3·Ht]`, of [`RowPart::rows`]
    ///
    /// # Errors
    /// - as [`Self::new`]
    pub fn of_part(
        draft: &'a Eagle3Draft,
        sequence: &'a PackedSequence,
        aux: &Tensor,
        part: Option<&'a RowPart>,
    ) -> Result<Self> {
        let tokens = sequence.ids.len();
        let own = part.map_or_else(|| (0..tokens).into(), |part| part.rows().clone());
        let lengths = [aux.dim(0)?, sequence.position_ids.len(), sequence.document_ids.len()];
        if lengths != [own.len(), tokens, tokens] || own.is_empty() {
            return Err(refused(format!(
                "{tokens} ids, of which {} run here, but {} rows of features, {} positions and {} \
                 document ids",
                own.len(),
                lengths[0],
                lengths[1],
                lengths[2]
            )));
        }
        let (mut ends, mut lengths) = (Vec::with_capacity(tokens), Vec::with_capacity(tokens));
        for run in sequence.document_ids.chunk_by(|a, b| a == b) {
            let end = ends.len() + run.len();
            let length = sequence.position_ids[ends.len()..end].iter().max().map_or(0, |p| p + 1);
            lengths.extend(std::iter::repeat_n(length, run.len()));
            ends.extend(std::iter::repeat_n(end, run.len()));
        }
        let window = draft.config().attention_window;
        Ok(Self {
            draft,
            sequence,
            part,
            lengths,
            ends,
            context: KeyRanges::packed(&sequence.document_ids, window, Delays::Same(0)),
            keys: Vec::new(),
            values: Vec::new(),
            columns: Vec::new(),
            rows: own.iter().map(|t| t as u32).collect(),
            state: draft.fuse(aux)?,
            step: 0,
        })
    }

    /// What the next step reads, `[rows of the last step, H]`; before the first step, `fc`'s output
    /// for every token that runs here.
    pub fn state(&self) -> &Tensor {
        &self.state
    }

    /// Takes a step for `rows`, ascending: some or all of the rows of the step before.
    ///
    /// # Shapes
    /// - → `h⁽ⁱ⁾` of `rows`, `[rows, H]`
    ///
    /// # Errors
    /// - `rows` is empty or not among those of the step before
    pub fn step(&mut self, rows: &[u32]) -> Result<Tensor> {
        let at = positions_in(rows, &self.rows)
            .filter(|_| !rows.is_empty())
            .ok_or_else(|| refused("rows of a step are not among those of the step before"))?;
        let hidden = if self.step == 0 { self.first(rows, &at)? } else { self.later(rows, &at)? };
        self.rows = rows.to_vec();
        self.state = self.draft.fed_back(&hidden)?;
        self.step += 1;
        Ok(hidden)
    }

    /// Keys and values of every token; attention and MLP of `rows`.
    fn first(&mut self, rows: &[u32], at: &[u32]) -> Result<Tensor> {
        let all = self.rows.clone();
        let input = self.input(&self.state, &all)?;
        let keys = self.gather_from_ranks(self.draft.key_values(&input, &self.table(&all)?)?)?;
        self.keys.push(keys.k.clone());
        self.values.push(keys.v.clone());
        let ranges = self.context.select(rows);
        let (state, input) = (select(&self.state, at)?, select(&input, at)?);
        let seen = Seen { keys, ranges: Arc::new(ranges) };
        self.draft.layer(&state, &input, &self.table(rows)?, &[seen])
    }

    /// Takes no step, but gives the ranks that share the row the keys and values that theirs attend
    /// to. A number without worth, through which their gradients reach these rows.
    ///
    /// # Errors
    /// - there is no memory for them
    pub fn only_give_keys(&self) -> Result<Tensor> {
        let input = self.input(&self.state, &self.rows)?;
        let keys =
            self.gather_from_ranks(self.draft.key_values(&input, &self.table(&self.rows)?)?)?;
        // A number as factor would end the way back here.
        let sum = keys.k.sum_all()?;
        Ok((&sum * sum.zeros_like()?)?)
    }

    /// Keys and values of all ranks' rows; together, because every rank has to gather as often.
    fn gather_from_ranks(&self, own: KeyValues) -> Result<KeyValues> {
        let Some(part) = self.part else { return Ok(own) };
        let width = own.k.dim(2)?;
        let all = part.gather(&cat(&[own.k, own.v], 2)?)?;
        Ok(KeyValues { k: narrow(&all, 2, 0, width)?, v: narrow(&all, 2, width, width)? })
    }

    fn later(&mut self, rows: &[u32], at: &[u32]) -> Result<Tensor> {
        let state = select(&self.state, at)?;
        let input = self.input(&state, rows)?;
        let table = self.table(rows)?;
        let own = self.draft.key_values(&input, &table)?;
        let first = match self.columns.last() {
            None => self.sequence.ids.len(),
            Some(column) => column.first + column.rows.len(),
        };
        self.columns.push(Column { first, rows: rows.to_vec() });
        self.keys.push(own.k);
        self.values.push(own.v);
        let keys = KeyValues { k: cat(&self.keys, 0)?, v: cat(&self.values, 0)? };
        let ranges = self.context.select(rows).with_singles(self.own_columns(rows)?);
        self.draft.layer(&state, &input, &table, &[Seen { keys, ranges: Arc::new(ranges) }])
    }

    /// Every row's keys of its own later steps.
    fn own_columns(&self, rows: &[u32]) -> Result<Vec<Vec<u32>>> {
        let mut singles = vec![Vec::with_capacity(self.columns.len()); rows.len()];
        for column in &self.columns {
            let at = positions_in(rows, &column.rows)
                .ok_or_else(|| refused("a row takes a step without the one before"))?;
            for (keys, at) in singles.iter_mut().zip(at) {
                keys.push(column.first as u32 + at);
            }
        }
        Ok(singles)
    }

    /// Attention's input of this step.
    fn input(&self, state: &Tensor, rows: &[u32]) -> Result<Tensor> {
        let token = |&t: &u32| {
            let next = t as usize + 1 + self.step;
            let inside = next < self.ends[t as usize];
            if inside { self.sequence.ids[next] } else { 0 }
        };
        let ids: Vec<u32> = rows.iter().map(token).collect();
        self.draft.attention_input(&self.draft.embed(&ids)?, state)
    }

    fn table(&self, rows: &[u32]) -> Result<RopeTable> {
        let step = self.step as u32;
        let of = |values: &[u32]| -> Vec<u32> {
            rows.iter().map(|&t| values[t as usize].saturating_add(step)).collect()
        };
        let table = self.draft.rope_table(&of(&self.sequence.position_ids), &of(&self.lengths))?;
        // Ranks exchange keys in f32.
        Ok(if self.part.is_none() { table.attended() } else { table })
    }
}

/// Where each of `rows` stands in `among`, both ascending; `None` if one does not.
fn positions_in(rows: &[u32], among: &[u32]) -> Option<Vec<u32>> {
    let ascending = rows.windows(2).all(|pair| pair[0] < pair[1]);
    let mut candidates = among.iter().zip(0_u32..);
    let mut find = |row: &u32| candidates.find(|(candidate, _)| *candidate == row);
    let positions: Option<Vec<u32>> = rows.iter().map(|row| find(row).map(|(_, at)| at)).collect();
    positions.filter(|_| ascending)
}

/// Rows of a tensor; the tensor itself if these are all of them.
fn select(tensor: &Tensor, at: &[u32]) -> Result<Tensor> {
    if at.len() == tensor.dim(0)? {
        return Ok(tensor.clone());
    }
    Ok(select_rows(tensor, at)?)
}
