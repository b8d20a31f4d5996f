//! Folders of files, also where a name has none.

use std::path::Path;

/// The folder that a path's last part stands in; that of a bare name is the working directory.
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// A folder itself, or the folder of a file.
pub fn folder_of(path: &Path) -> &Path {
    if path.is_file() { parent_of(path) } else { path }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn a_bare_name_stands_in_the_working_directory() {
        for (path, parent) in [("a", "."), ("a/b", "a"), ("/a", "/"), ("./a", ".")] {
            assert_eq!(super::parent_of(Path::new(path)), Path::new(parent), "{path}");
        }
        // Tests run in the folder of their package.
        assert_eq!(super::folder_of(Path::new("Cargo.toml")), Path::new("."));
        assert_eq!(super::folder_of(Path::new("src")), Path::new("src"));
        assert_eq!(super::folder_of(Path::new("nowhere")), Path::new("nowhere"));
    }
}
