//! Lines and dots of an SVG picture in few bytes: a page holds a chart once for every axis.

use std::fmt::Write;

use super::ink::Ink;

/// How a path is drawn; lengths in drawn pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stroke {
    pub(super) ink: Ink,
    pub(super) width: i32,
    /// From 0 to 1; 1 is not written.
    pub(super) opacity: f64,
    /// Lengths of dashes and of the gaps between them.
    pub(super) dashes: Option<(i32, i32)>,
}

impl Stroke {
    /// A whole line that covers what is below.
    pub(super) fn plain(ink: Ink, width: i32) -> Self {
        Self { ink, width, opacity: 1.0, dashes: None }
    }

    fn open(self, out: &mut String) {
        let Self { ink, width, opacity, dashes } = self;
        let _ =
            write!(out, "<path fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\"", ink.hex());
        if opacity < 1.0 {
            let _ = write!(out, " opacity=\"{opacity}\"");
        }
        if let Some((dash, gap)) = dashes {
            let _ = write!(out, " stroke-dasharray=\"{dash} {gap}\"");
        }
        out.push_str(" d=\"");
    }
}

pub(super) fn line(out: &mut String, stroke: Stroke, points: &[(i32, i32)]) {
    let Some(first) = points.first() else { return };
    stroke.open(out);
    let _ = write!(out, "M{} {}l", first.0, first.1);
    let mut numbers = Numbers::default();
    for pair in points.windows(2) {
        numbers.push(out, pair[1].0 - pair[0].0);
        numbers.push(out, pair[1].1 - pair[0].1);
    }
    out.push_str("\"/>\n");
}

/// Dots of a diameter: lines without length, whose round ends show.
pub(super) fn dots(out: &mut String, ink: Ink, diameter: i32, points: &[(i32, i32)]) {
    if points.is_empty() {
        return;
    }
    Stroke::plain(ink, diameter).open(out);
    for (x, y) in points {
        let _ = write!(out, "M{x} {y}h0");
    }
    out.push_str("\"/>\n");
}

/// Numbers after each other: a sign parts them, or else a space.
#[derive(Default)]
struct Numbers {
    begun: bool,
}

impl Numbers {
    fn push(&mut self, out: &mut String, number: i32) {
        if self.begun && number >= 0 {
            out.push(' ');
        }
        self.begun = true;
        let _ = write!(out, "{number}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_written_as_steps_from_point_to_point() {
        let mut out = String::new();
        let dashed = Stroke { dashes: Some((5, 4)), ..Stroke::plain(Ink::Series(0), 3) };
        line(&mut out, dashed, &[(10, 20), (13, 15), (13, 15), (9, 30)]);
        dots(&mut out, Ink::Series(1), 18, &[(1, 2), (3, 4)]);
        line(&mut out, dashed, &[]);
        dots(&mut out, Ink::Series(1), 18, &[]);
        let want = "<path fill=\"none\" stroke=\"#006DB3\" stroke-width=\"3\" stroke-dasharray=\"5 4\" \
                    d=\"M10 20l3-5 0 0-4 15\"/>\n\
                    <path fill=\"none\" stroke=\"#D55E00\" stroke-width=\"18\" d=\"M1 2h0M3 4h0\"/>\n";
        assert_eq!(out, want);
    }
}
