//! Values that all ranks exchange, and reduce in the order of the ranks.

use bytemuck::Pod;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::World;
use crate::error::{ParallelError, Result};

/// Numbers that ranks reduce: f32, f64, u64.
pub trait Element: Pod + PartialOrd + std::ops::AddAssign + sealed::Sealed {}

impl Element for f32 {}
impl Element for f64 {}
impl Element for u64 {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for u64 {}
}

impl World {
    /// Waits for all ranks.
    pub fn barrier(&self) {
        self.transport.barrier();
    }

    /// Sends one rank's values to all.
    pub fn broadcast<T: Pod>(&self, root: usize, values: &mut [T]) {
        self.transport.broadcast(root, bytemuck::cast_slice_mut(values));
    }

    /// Everybody's values, as many of each, in the order of the ranks.
    pub fn all_gather<T: Pod>(&self, own: &[T]) -> Vec<T> {
        let mut all = vec![T::zeroed(); own.len() * self.size()];
        self.transport.all_gather(bytemuck::cast_slice(own), bytemuck::cast_slice_mut(&mut all));
        all
    }

    /// Everybody's values, of any number.
    pub fn gather_varied<T: Pod>(&self, own: &[T]) -> Vec<Vec<T>> {
        let lengths = self.all_gather(&[own.len() as u64]);
        self.gather_counted(own, &lengths.iter().map(|length| *length as usize).collect::<Vec<_>>())
    }

    /// Everybody's values, whose numbers all ranks know.
    pub fn gather_counted<T: Pod>(&self, own: &[T], counts: &[usize]) -> Vec<Vec<T>> {
        let longest = counts.iter().copied().max().unwrap_or(0);
        if longest == 0 {
            return vec![Vec::new(); self.size()];
        }
        let mut padded = own.to_vec();
        padded.resize(longest, T::zeroed());
        let all = self.all_gather(&padded);
        let cut = |(values, count): (&[T], &usize)| values[..*count].to_vec();
        all.chunks(longest).zip(counts).map(cut).collect()
    }

    /// Everybody's value of a type that has a JSON form.
    ///
    /// # Errors
    /// - a value has none
    pub fn gather_json<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>> {
        let fail = |error: serde_json::Error| ParallelError::Ranks { problem: error.to_string() };
        let text = serde_json::to_vec(own).map_err(fail)?;
        let all = self.gather_varied(&text);
        all.iter().map(|text| serde_json::from_slice(text).map_err(fail)).collect()
    }

    /// Sums of everybody's values, in the order of the ranks.
    pub fn all_reduce_sum<T: Element>(&self, values: &mut [T]) {
        self.all_reduce(values, |sum, value| *sum += value);
    }

    /// Largest of everybody's values.
    pub fn all_reduce_max<T: Element>(&self, values: &mut [T]) {
        self.all_reduce(values, |largest, value| {
            if value > *largest {
                *largest = value;
            }
        });
    }

    fn all_reduce<T: Element>(&self, values: &mut [T], combine: impl Fn(&mut T, T)) {
        if self.size() == 1 || values.is_empty() {
            return;
        }
        let all = self.all_gather(values);
        let (first, others) = all.split_at(values.len());
        values.copy_from_slice(first);
        for other in others.chunks(values.len()) {
            values.iter_mut().zip(other).for_each(|(value, other)| combine(value, *other));
        }
    }

    /// Sums everybody's values in the order of the ranks and leaves each rank its part: the first
    /// `counts[0]` go to rank 0, the next `counts[1]` to rank 1 and so on.
    ///
    /// # Panics
    /// - `counts` is not one number a rank, or does not add up to the length of `values`
    pub fn reduce_scatter<T: Element>(&self, values: &[T], counts: &[usize]) -> Vec<T> {
        assert!(counts.len() == self.size() && counts.iter().sum::<usize>() == values.len());
        let own = counts[self.rank()];
        let mut received = vec![T::zeroed(); own * self.size()];
        let send: Vec<usize> = counts.iter().map(|count| size_of::<T>() * count).collect();
        self.transport.all_to_all(
            bytemuck::cast_slice(values),
            &send,
            bytemuck::cast_slice_mut(&mut received),
            &vec![size_of::<T>() * own; self.size()],
        );
        let others = received.split_off(own);
        for other in others.chunks(own.max(1)) {
            received.iter_mut().zip(other).for_each(|(sum, value)| *sum += *value);
        }
        received
    }

    /// The same in the order that the library finds fastest. It sums equal blocks: shorter parts
    /// are filled up.
    ///
    /// # Panics
    /// - as [`Self::reduce_scatter`]
    pub fn reduce_scatter_by_library(&self, values: &[f32], counts: &[usize]) -> Vec<f32> {
        assert!(counts.len() == self.size() && counts.iter().sum::<usize>() == values.len());
        let block = counts.iter().copied().max().unwrap_or(0);
        let (mut padded, mut rest) = (Vec::with_capacity(block * counts.len()), values);
        for count in counts {
            let (part, after) = rest.split_at(*count);
            padded.extend_from_slice(part);
            padded.resize(padded.len() + block - count, 0.0);
            rest = after;
        }
        let mut own = vec![0.0; block];
        self.transport.sum_blocks(&padded, &mut own);
        own.truncate(counts[self.rank()]);
        own
    }

    /// Whether it holds on any rank.
    pub fn any(&self, holds: bool) -> bool {
        let mut flag = [u64::from(holds)];
        self.all_reduce_max(&mut flag);
        flag[0] > 0
    }

    /// What the first rank says: clocks differ.
    pub fn of_first<T: Pod>(&self, value: T) -> T {
        let mut values = [value];
        self.broadcast(0, &mut values);
        values[0]
    }
}
