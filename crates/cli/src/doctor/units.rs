//! Sizes as people read them.

/// Bytes in MiB or GiB.
pub(crate) fn bytes(bytes: u64) -> String {
    const GIB: f64 = (1_u64 << 30) as f64;
    const MIB: f64 = (1_u64 << 20) as f64;
    let value = bytes as f64;
    if value >= GIB { format!("{:.1} GiB", value / GIB) } else { format!("{:.0} MiB", value / MIB) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn sizes_have_the_unit_that_fits() {
        assert_eq!(super::bytes(3 << 29), "1.5 GiB");
        assert_eq!(super::bytes(200 << 20), "200 MiB");
        assert_eq!(super::bytes(0), "0 MiB");
    }
}
