//! Where Python's own symbols come from on systems that ask.

fn main() {
    pyo3_build_config::add_extension_module_link_args();
}
