//! Where products go.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Room for the values of a product: values that are there, or memory that nobody has written yet.
pub(crate) struct Room<'a> {
    pub(super) at: *mut f32,
    pub(super) len: usize,
    lent: PhantomData<&'a mut [f32]>,
}

impl<'a> Room<'a> {
    /// Memory that may not be written yet.
    ///
    /// # Safety
    /// Nothing is added to a value before it is written.
    pub(crate) unsafe fn unwritten(memory: &'a mut [MaybeUninit<f32>]) -> Self {
        Self { at: memory.as_mut_ptr().cast(), len: memory.len(), lent: PhantomData }
    }

    /// The part from a value on.
    ///
    /// # Panics
    /// - `first` lies beyond the end
    pub(crate) fn from(&mut self, first: usize) -> Room<'_> {
        assert!(first <= self.len, "a part leaves its room");
        // SAFETY: the part begins within the room or at its end.
        Room { at: unsafe { self.at.add(first) }, len: self.len - first, lent: PhantomData }
    }

    /// Zeros everywhere.
    pub(crate) fn clear(&mut self) {
        // SAFETY: so many values are lent for writing, and zeros are values.
        unsafe { self.at.write_bytes(0, self.len) };
    }
}

impl<'a> From<&'a mut [f32]> for Room<'a> {
    fn from(values: &'a mut [f32]) -> Self {
        Self { at: values.as_mut_ptr(), len: values.len(), lent: PhantomData }
    }
}

impl<'a> From<&'a mut Vec<f32>> for Room<'a> {
    fn from(values: &'a mut Vec<f32>) -> Self {
        values.as_mut_slice().into()
    }
}

/// `len` values that `write` writes, without a pass over memory that fills it with zeros first.
///
/// # Safety
/// `write` adds nothing to a value before it has written it, and leaves none unwritten where it succeeds.
///
/// # Errors
/// - those of `write`
pub(crate) unsafe fn written<E>(
    len: usize,
    write: impl FnOnce(Room<'_>) -> Result<(), E>,
) -> Result<Vec<f32>, E> {
    let mut values = Vec::with_capacity(len);
    // SAFETY: the caller promises to write all of them, and to add to none before.
    unsafe {
        write(Room::unwritten(&mut values.spare_capacity_mut()[..len]))?;
        values.set_len(len);
    }
    Ok(values)
}
