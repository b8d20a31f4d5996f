//! What a block holds of a register's columns: factors, and codes step by step.

use super::format::{Floats, Layout, Scales};
use super::lanes::Lanes;
use super::side_by_side::WORDS;
use super::{BlockFormat, GROUP};

/// Kernels are compiled for a format by its number.
pub(super) const fn layout<const FORMAT: usize>() -> Layout {
    BlockFormat::ALL[FORMAT].layout()
}

/// The columns of a register: a group's first byte, and the first of them in it.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) group: *const u8,
    pub(super) column: usize,
}

impl Piece {
    /// `bytes` of every column from a place in the group on.
    pub(super) fn at(self, offset: usize, bytes: usize) -> *const u8 {
        self.group.wrapping_add(offset + bytes * self.column)
    }
}

/// Factors of 32 values of every column.
pub(super) struct Factors<V: Lanes> {
    pub(super) scale: [V::Floats; 2],
    pub(super) least: [V::Floats; 2],
}

/// The floats of a block; where there is one, both are it.
///
/// # Safety
/// As [`super::lanes::columns`]; `at` is where the floats of the register's columns begin.
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
pub(super) unsafe fn floats<V: Lanes, const FORMAT: usize>(
    at: *const u8,
) -> (V::Floats, V::Floats) {
    let layout = const { layout::<FORMAT>() };
    // SAFETY: passed on to the caller.
    unsafe {
        let d = match layout.floats {
            Floats::Power => V::brain_halves(at),
            _ => V::halves(at),
        };
        (d, if layout.has_least() { V::halves(at.add(2 * GROUP)) } else { d })
    }
}

/// # Safety
/// As [`super::lanes::columns`]; `at` is where 32 values of a group begin, with floats `d` and `m`.
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
pub(super) unsafe fn factors<V: Lanes, const FORMAT: usize>(
    at: *const u8,
    d: V::Floats,
    m: V::Floats,
) -> Factors<V> {
    let layout = const { layout::<FORMAT>() };
    // SAFETY: passed on to the caller.
    unsafe {
        match layout.scales {
            Scales::None => Factors { scale: [d; 2], least: [m; 2] },
            Scales::Signed => {
                let scale = V::mul(d, V::signed(at));
                Factors { scale: [scale; 2], least: [m; 2] }
            }
            Scales::SignedHalves => {
                let second = V::mul(d, V::signed(at.add(GROUP)));
                Factors { scale: [V::mul(d, V::signed(at)), second], least: [m; 2] }
            }
            Scales::WithLeast => {
                let scale = V::mul(d, V::unsigned(at));
                let least = V::negate(V::mul(m, V::unsigned(at.add(GROUP))));
                Factors { scale: [scale; 2], least: [least; 2] }
            }
            Scales::NibbleHalves => {
                let (first, second) = (V::nibbles(at), V::nibbles(at.add(GROUP)));
                Factors {
                    scale: [V::mul(d, first[0]), V::mul(d, second[0])],
                    least: [V::negate(V::mul(m, first[1])), V::negate(V::mul(m, second[1]))],
                }
            }
        }
    }
}

/// Four codes of every column: those of a step of the 32 values from `at` on.
///
/// # Safety
/// As [`factors`].
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
pub(super) unsafe fn code<V: Lanes, const FORMAT: usize>(
    piece: Piece,
    at: usize,
    step: usize,
) -> V::Bytes {
    let layout = const { layout::<FORMAT>() };
    // SAFETY: passed on to the caller.
    unsafe {
        let mut code = plane::<V, FORMAT>(piece, at, (step, 0, 0));
        if layout.planes[1] > 0 {
            let above = plane::<V, FORMAT>(piece, at, (step, 1, layout.planes[0] as i32));
            code = V::or(code, above);
        }
        match layout.table {
            Some(table) => V::look_up(table, code),
            None => code,
        }
    }
}

/// A step's bits of a plane, moved up by `up`.
///
/// # Safety
/// As [`code`].
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
unsafe fn plane<V: Lanes, const FORMAT: usize>(
    piece: Piece,
    at: usize,
    (step, plane, up): (usize, usize, i32),
) -> V::Bytes {
    let layout = const { layout::<FORMAT>() };
    let bits = layout.planes[plane];
    let word = at + layout.plane_at(plane) + WORDS * (step * bits / 8);
    // SAFETY: passed on to the caller.
    unsafe {
        let word = V::load(piece.at(word, 4));
        if bits == 8 {
            return word;
        }
        let mask = V::splat_bytes((((1_u32 << bits) - 1) << up) as u8);
        V::and(V::shift(word, up - (step * bits % 8) as i32), mask)
    }
}
