//! What kernels for GPUs are told of a type of blocks.

use std::fmt::Write;

use super::format::{BlockFormat, Floats, Scales};

impl BlockFormat {
    /// Numbers that `blocks.cu` is compiled with, as its preprocessor reads them.
    pub(crate) fn definitions(self) -> String {
        let layout = self.layout();
        let floats = match layout.floats {
            Floats::Scale => 0,
            Floats::ScaleAndLeast => 1,
            Floats::Power => 2,
        };
        let scales = match layout.scales {
            Scales::None => 0,
            Scales::Signed => 1,
            Scales::SignedHalves => 2,
            Scales::WithLeast => 3,
            Scales::NibbleHalves => 4,
        };
        let mut text = String::new();
        // Writing to a string does not fail.
        let mut define = |name: &str, value: u32| {
            let _ = writeln!(text, "#define {name} {value}u");
        };
        define("VALUES", layout.values as u32);
        define("PARTS", layout.parts() as u32);
        define("FLOATS", floats);
        define("SCALES", scales);
        define("SCALE_BYTES", layout.scales.bytes() as u32);
        define("LOW", layout.planes[0] as u32);
        define("HIGH", layout.planes[1] as u32);
        define("TABLED", u32::from(layout.table.is_some()));
        let table = layout.table.unwrap_or(&[0; 16]).as_chunks::<4>().0;
        for (place, bytes) in table.iter().enumerate() {
            define(&format!("TABLE_{place}"), u32::from_le_bytes(*bytes));
        }
        let _ = writeln!(text, "#define ZERO {}", layout.zero);
        text
    }
}
