//! Colours of a chart.
//!
//! Charts are drawn in the colours of the light scheme; the page's style sheet gives each its
//! counterpart for dark screens, so every [`Ink`] needs a colour of its own.

use plotters::style::RGBColor;

/// Colour of something drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ink {
    /// A run or a delay; repeats after [`SERIES`].
    Series(usize),
    /// Axes and marks between stages.
    Axis,
    Grid,
    /// Titles and numbers.
    Text,
}

/// Light and dark colours of curves: distinct for most kinds of colour vision, and as bright as
/// their background asks.
pub(crate) const SERIES: [(u32, u32); 10] = [
    (0x00_6D_B3, 0x56_B4_F0),
    (0xD5_5E_00, 0xFF_94_4D),
    (0x00_8F_68, 0x3C_C9_A0),
    (0xB3_4A_8C, 0xE8_9C_CC),
    (0xA8_7B_00, 0xF0_C2_4A),
    (0x5B_4F_C9, 0xA9_A0_FF),
    (0xC0_25_3C, 0xF5_7F_90),
    (0x17_80_8F, 0x5F_D0_DE),
    (0x7A_5A_3A, 0xC9_A9_84),
    (0x6B_72_80, 0xAA_B2_C0),
];
const AXIS: (u32, u32) = (0x8A_90_99, 0x76_7D_88);
const GRID: (u32, u32) = (0xE4_E6_EA, 0x2E_33_3B);
const TEXT: (u32, u32) = (0x4A_50_5A, 0xB4_BA_C4);

/// Every light colour with its dark counterpart, as `#RRGGBB`.
pub(crate) fn schemes() -> Vec<(String, String)> {
    let hex = |colour: u32| format!("#{colour:06X}");
    SERIES
        .into_iter()
        .chain([AXIS, GRID, TEXT])
        .map(|(light, dark)| (hex(light), hex(dark)))
        .collect()
}

impl Ink {
    /// In the light scheme.
    pub(crate) fn colour(self) -> RGBColor {
        let (light, _) = match self {
            Self::Series(index) => SERIES[index % SERIES.len()],
            Self::Axis => AXIS,
            Self::Grid => GRID,
            Self::Text => TEXT,
        };
        RGBColor((light >> 16) as u8, (light >> 8) as u8, light as u8)
    }

    /// In the light scheme, as `#RRGGBB`.
    pub(crate) fn hex(self) -> String {
        let RGBColor(red, green, blue) = self.colour();
        format!("#{red:02X}{green:02X}{blue:02X}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ink_has_a_colour_of_its_own() {
        let lights: std::collections::BTreeSet<String> =
            schemes().into_iter().map(|(light, _)| light).collect();
        assert_eq!(lights.len(), SERIES.len() + 3);
    }
}
