//! Memory in large pages where the system gives them, and matrices that share them.
//!
//! A pass reads every weight once. In pages of 4 KiB a processor looks up a page every few hundred
//! nanoseconds, and its own fetching ahead ends with the page. Linux gives pages of 2 MiB to memory that
//! asks for them, unless its setting `transparent_hugepage` is `never`. Most matrices are smaller than
//! such a page, so they share pieces of memory.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Bytes of a large page.
const PAGE: usize = 2 << 20;
/// Bytes that matrices share. What is not handed out yet takes no memory, only addresses.
const PIECE: usize = if cfg!(test) { 2 * PAGE } else { 32 * PAGE };
/// Bytes from which on memory is taken from a piece.
const LEAST: usize = 1 << 16;
/// Where a matrix begins, in bytes: a line of the caches.
const ALIGNMENT: usize = 64;

/// The piece that is handed out at the moment, and how much of it is.
static OPEN: Mutex<(Weak<Piece>, usize)> = Mutex::new((Weak::new(), 0));

/// Memory of several matrices, which is given back with the last of them.
#[derive(Debug)]
pub(crate) struct Piece {
    /// From a large page's start on.
    bytes: Box<[UnsafeCell<u8>]>,
    /// Where the first large page begins.
    first: usize,
}

// SAFETY: ranges are handed out once each, to one owner that alone writes there.
unsafe impl Sync for Piece {}

impl Piece {
    /// Zeros.
    fn new(length: usize) -> Self {
        let mut bytes = vec![0_u8; length + PAGE].into_boxed_slice();
        let first = bytes.as_ptr().align_offset(PAGE).min(PAGE);
        // SAFETY: the bytes that were just made.
        unsafe { ask_for_large_pages(bytes.as_mut_ptr(), bytes.len()) };
        // SAFETY: both are bytes.
        let bytes = unsafe { Box::from_raw(Box::into_raw(bytes) as *mut [UnsafeCell<u8>]) };
        Self { bytes, first }
    }
}

/// Asks the system to lay memory out in large pages, where whole ones fit in. If it refuses, pages stay small.
///
/// # Safety
/// So many bytes from `block` on are the caller's.
pub(crate) unsafe fn ask_for_large_pages(block: *mut u8, bytes: usize) {
    let first = (block.addr().next_multiple_of(PAGE) - block.addr()).min(bytes);
    let whole = (bytes - first) / PAGE * PAGE;
    #[cfg(target_os = "linux")]
    if whole > 0 {
        // SAFETY: these pages are the caller's, and the advice does not change what they hold.
        unsafe { libc::madvise(block.add(first).cast(), whole, libc::MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = whole;
}

/// The bytes of a matrix.
#[derive(Debug)]
pub(crate) enum WeightBytes {
    /// Alone.
    Own(Vec<u8>),
    /// So many from a place in a piece on, which nobody else has.
    Shared(Arc<Piece>, usize, usize),
}

impl WeightBytes {
    /// Zeros. Large ones share memory with others: it is given back when all that share it are dropped.
    pub(crate) fn zeroed(length: usize) -> Self {
        if length < LEAST {
            return Self::Own(vec![0; length]);
        }
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let (piece, taken) = &mut *open;
        let room = |piece: &Arc<Piece>| piece.bytes.len() - PAGE - *taken >= length;
        if let Some(piece) = piece.upgrade().filter(room) {
            let at = piece.first + *taken;
            *taken += length.next_multiple_of(ALIGNMENT);
            return Self::Shared(piece, at, length);
        }
        let new = Arc::new(Piece::new(length.next_multiple_of(ALIGNMENT).max(PIECE)));
        let at = new.first;
        if length < PIECE {
            (*piece, *taken) = (Arc::downgrade(&new), length.next_multiple_of(ALIGNMENT));
        }
        Self::Shared(new, at, length)
    }
}

impl Deref for WeightBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(piece, at, length) => {
                let bytes = &piece.bytes[*at..][..*length];
                // SAFETY: only this owner's `deref_mut` writes there, which borrows it alone.
                unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) }
            }
        }
    }
}

impl DerefMut for WeightBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(piece, at, length) => {
                let bytes = &piece.bytes[*at..][..*length];
                let first = UnsafeCell::raw_get(bytes.as_ptr());
                // SAFETY: the range is this owner's alone, which is borrowed alone.
                unsafe { std::slice::from_raw_parts_mut(first, bytes.len()) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_share_pieces_and_never_bytes() {
        let lengths = [0, 1, LEAST - 1, LEAST, LEAST + 1, PIECE - 7, PIECE, PIECE + 1];
        let mut all: Vec<WeightBytes> =
            lengths.iter().chain(&lengths).map(|length| WeightBytes::zeroed(*length)).collect();
        for (i, bytes) in all.iter_mut().enumerate() {
            assert_eq!(bytes.len(), lengths[i % lengths.len()]);
            assert!(bytes.iter().all(|byte| *byte == 0), "{i}");
            bytes.fill(i as u8 + 1);
        }
        for (i, bytes) in all.iter().enumerate() {
            assert!(bytes.iter().all(|byte| *byte == i as u8 + 1), "{i}");
            assert!(bytes.len() < LEAST || bytes.as_ptr().addr().is_multiple_of(ALIGNMENT));
        }
    }

    #[test]
    fn a_piece_is_given_back_with_its_owner() {
        // Other tests share no piece of this size.
        let bytes = WeightBytes::zeroed(PIECE + 1);
        let WeightBytes::Shared(piece, ..) = &bytes else { panic!("a piece was to be taken") };
        let piece = Arc::downgrade(piece);
        assert!(piece.upgrade().is_some());
        drop(bytes);
        assert!(piece.upgrade().is_none());
    }

    #[test]
    fn threads_get_memory_of_their_own() {
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                scope.spawn(move || {
                    for _ in 0..50 {
                        let mut bytes = WeightBytes::zeroed(LEAST + usize::from(thread));
                        assert!(bytes.iter().all(|byte| *byte == 0));
                        bytes.fill(thread + 1);
                        assert!(bytes.iter().all(|byte| *byte == thread + 1));
                    }
                });
            }
        });
    }
}
