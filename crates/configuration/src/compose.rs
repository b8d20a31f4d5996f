//! Files with a `defaults:` list into one tree, as Hydra composes them.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Problem;
use super::tree::{Node, Origin, Tree};

/// Published spellings and ours.
const ALIASES: [(&str, &[&str]); 2] =
    [("model_name_or_path", &["target"]), ("draft_model_name_or_path", &["draft", "from"])];

/// Our spelling of a key.
pub(crate) fn canonical(key: &str) -> String {
    let alias = ALIASES.iter().find(|(published, _)| *published == key);
    alias.map_or_else(|| key.to_owned(), |(_, ours)| ours.join("."))
}

/// Reads a file and everything in its defaults list.
pub(crate) fn read_file(path: &Path) -> Result<Node, Problem> {
    match path.metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => Err(missing(path)),
        _ => Composer::default().file(path),
    }
}

fn missing(path: &Path) -> Problem {
    let meant = meant(path).map_or_else(String::new, |file| {
        // A recipe is written in the same way everywhere.
        let file = file.display().to_string().replace(std::path::MAIN_SEPARATOR, "/");
        format!(" (did you mean `{file}`?)")
    });
    let problem = Problem::in_file(path, format!("no such file{meant}"));
    Problem { is_missing_file: true, ..problem }
}

/// Folders of recipes and of their parts, seen from the root of the sources.
const RECIPES: &str = "conf";

/// Whether a file says where its run goes, as recipes do and their parts do not.
fn is_recipe(file: &Path) -> bool {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().any(|line| line.starts_with("output:"))
}

/// The recipe, or the file beside a path that is not there, whose name is nearly the path's.
fn meant(path: &Path) -> Option<PathBuf> {
    let name = |path: &Path| Some(path.file_stem()?.to_str()?.to_lowercase());
    let own = path.parent()?;
    let folders = std::iter::once(own.to_path_buf()).chain(entries(Path::new(RECIPES)));
    let files = folders.flat_map(|folder| entries(&folder));
    let wanted = name(path)?;
    let near = files.filter(|file| {
        file.is_file() && file.extension().is_some_and(|e| e == "yaml" || e == "yml")
    });
    let near = near.filter_map(|file| {
        let distance = strsim::damerau_levenshtein(&wanted, &name(&file)?);
        let of_all = strsim::damerau_levenshtein(path.to_str()?, file.to_str()?);
        (distance <= wanted.len() / 3).then_some((distance, of_all, file))
    });
    let meant = near.filter(|(_, _, file)| file.parent() == Some(own) || is_recipe(file));
    meant.min().map(|(_, _, file)| file)
}

/// What lies in a folder, but for what begins with an underscore: such files are parts of others.
fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let here = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let found = std::fs::read_dir(here).into_iter().flatten().flatten();
    let names = found.map(|entry| entry.file_name());
    let names = names.filter(|name| !name.to_string_lossy().starts_with('_'));
    let folder = folder.to_path_buf();
    names.map(move |name| folder.join(name))
}

/// As [`read_file`] for a text that stands alone.
pub(crate) fn read_text(text: &str, name: &str) -> Result<Node, Problem> {
    Composer::default().text(text, Path::new(name))
}

/// Lays an item's own `defaults` (relative to the file that holds it) under its keys.
pub(crate) fn with_defaults(node: Node) -> Result<Node, Problem> {
    let file = match &node.origin {
        Origin::File { path, .. } | Origin::WholeFile(path) => path.clone(),
        Origin::CommandLine(_) => PathBuf::new(),
    };
    Composer::default().composed(node, &file)
}

/// Files that one configuration may be composed of: defaults that name each other twice would double
/// with every file, and each file inside of another takes stack.
const MOST_FILES: usize = 256;

/// Keeps the files that are being read, to find circles.
#[derive(Default)]
struct Composer {
    reading: Vec<PathBuf>,
    /// Files that were read.
    files: usize,
}

impl Composer {
    fn file(&mut self, path: &Path) -> Result<Node, Problem> {
        if path.is_dir() {
            let config = path.join("config.yaml");
            let remedy = if config.is_file() {
                format!("give {}", config.display())
            } else {
                "give a YAML file".to_owned()
            };
            return Err(Problem::in_file(path, format!("is a folder: {remedy}")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| match error.kind() {
            ErrorKind::InvalidData => Problem::in_file(path, "is no text: give a YAML file"),
            _ => Problem::in_file(path, error),
        })?;
        self.text(&text, path)
    }

    fn text(&mut self, text: &str, path: &Path) -> Result<Node, Problem> {
        if self.reading.iter().any(|known| known == path) {
            return Err(Problem::in_file(path, "its defaults lead back to it"));
        }
        self.files += 1;
        if self.files > MOST_FILES {
            let problem = format!("its defaults lead to more than {MOST_FILES} files");
            return Err(Problem::in_file(path, problem));
        }
        self.reading.push(path.to_path_buf());
        let mut own = Node::parse(text, path)?;
        if own.is_null() {
            own.value = Tree::Map(Vec::new());
        }
        if !matches!(own.value, Tree::Map(_)) {
            return Err(Problem::at(&own.origin, "a configuration is a map of keys"));
        }
        rename_aliases(&mut own)?;
        let composed = self.composed(own, path)?;
        self.reading.pop();
        Ok(composed)
    }

    /// `own` over the files of its defaults list; `_self_` says where it stands among them (last
    /// if it is not there).
    fn composed(&mut self, mut own: Node, file: &Path) -> Result<Node, Problem> {
        let Some(defaults) = own.remove("defaults") else { return Ok(own) };
        let Tree::List(entries) = defaults.value else {
            return Err(Problem::at(&defaults.origin, "`defaults` is a list of files"));
        };
        let mut result = Node::new(Tree::Map(Vec::new()), own.origin.clone());
        let mut own = Some(own);
        for entry in &entries {
            match &entry.value {
                Tree::Scalar(Value::String(name)) if name == "_self_" => {
                    let own = own.take().ok_or_else(|| {
                        Problem::at(&entry.origin, "`_self_` stands twice in the defaults")
                    })?;
                    result.merge(own);
                }
                Tree::Scalar(Value::String(name)) => {
                    result.merge(self.default_file(name, file, &entry.origin)?);
                }
                // `section: file` puts a file under a key.
                Tree::Map(sections) => {
                    for (section, node) in sections {
                        let Tree::Scalar(Value::String(name)) = &node.value else {
                            return Err(Problem::at(&node.origin, "a default is a file's name"));
                        };
                        let inner = self.default_file(name, file, &node.origin)?;
                        let under = Tree::Map(vec![(section.clone(), inner)]);
                        result.merge(Node::new(under, node.origin.clone()));
                    }
                }
                _ => return Err(Problem::at(&entry.origin, "a default is a file's name")),
            }
        }
        if let Some(own) = own {
            result.merge(own);
        }
        Ok(result)
    }

    /// A default's file, relative to the file that names it; `optional ` before it lets it be
    /// absent.
    fn default_file(&mut self, name: &str, file: &Path, origin: &Origin) -> Result<Node, Problem> {
        let (optional, name) = match name.strip_prefix("optional ") {
            Some(name) => (true, name.trim()),
            None => (false, name),
        };
        let path = normal(&file.parent().unwrap_or(Path::new("")).join(name));
        let path = with_ending(path)
            .map_err(|problem| Problem::at(origin, format!("default `{name}`: {problem}")))?;
        if !path.is_file() {
            if optional {
                return Ok(Node::new(Tree::Map(Vec::new()), origin.clone()));
            }
            return Err(Problem::at(
                origin,
                format!("default `{name}`: no file {}", path.display()),
            ));
        }
        self.file(&path).map_err(|problem| match problem.text.matches("(a default of").count() {
            // The nearest ones are enough.
            3.. => problem,
            _ => problem.context(format!("(a default of {origin})")),
        })
    }
}

/// The file that is meant where the ending is left out: `.yaml`, or `.yml` where that is there.
fn with_ending(path: PathBuf) -> Result<PathBuf, String> {
    if path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml") {
        return Ok(path);
    }
    let [yaml, yml] = [".yaml", ".yml"].map(|ending| {
        let mut path = path.clone();
        path.as_mut_os_string().push(ending);
        path
    });
    match (yaml.is_file(), yml.is_file()) {
        (true, true) => {
            let (yaml, yml) = (yaml.display(), yml.display());
            Err(format!("both {yaml} and {yml} are there: name one with its ending"))
        }
        (false, true) => Ok(yml),
        _ => Ok(yaml),
    }
}

/// `a/b/../c` as `a/c`.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        let climbs = matches!(part, std::path::Component::ParentDir);
        let inside = out.components().next_back();
        if climbs && matches!(inside, Some(std::path::Component::Normal(_))) {
            out.pop();
        } else {
            out.push(part);
        }
    }
    out
}

fn rename_aliases(node: &mut Node) -> Result<(), Problem> {
    for (published, ours) in ALIASES {
        let Some(value) = node.remove(published) else { continue };
        let key = ours.join(".");
        if node.at(&key).is_some() {
            let problem = format!("`{published}` and `{key}` are the same key: give one of them");
            return Err(Problem::at(&value.origin, problem));
        }
        let mut value = value;
        for part in ours.iter().rev() {
            let origin = value.origin.clone();
            value = Node::new(Tree::Map(vec![((*part).to_owned(), value)]), origin);
        }
        node.merge(value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("folder");
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
            std::fs::write(path, text).expect("file");
        }
        folder
    }

    #[test]
    fn defaults_come_before_the_file_itself_unless_it_says_otherwise() {
        let folder = folder(&[
            (
                "a/main.yaml",
                "defaults: [../b/base, {train: ../b/short}]\nx: 1\ntrain: {steps: 9}\n",
            ),
            ("a/first.yaml", "defaults: [_self_, ../b/base]\nx: 1\n"),
            ("b/base.yaml", "defaults: [deeper]\nx: 0\ny: 2\n"),
            ("b/deeper.yaml", "x: -1\nz: 3\n"),
            ("b/short.yaml", "steps: 1\nseed: 4\n"),
        ]);
        let read = |name: &str| read_file(&folder.path().join(name)).expect("composed");
        let main = read("a/main.yaml");
        assert_eq!(
            main.to_json(),
            json!({"x": 1, "y": 2, "z": 3, "train": {"steps": 9, "seed": 4}})
        );
        assert!(main.origin_of("z").to_string().ends_with("b/deeper.yaml:2"));
        assert_eq!(read("a/first.yaml").to_json(), json!({"x": 0, "y": 2, "z": 3}));
    }

    #[test]
    fn missing_and_circular_defaults_are_named() {
        let folder = folder(&[
            ("a.yaml", "x: 1\ndefaults: [b]\n"),
            ("b.yaml", "defaults: [a]\n"),
            ("c.yaml", "defaults: [nowhere]\n"),
            ("d.yaml", "defaults: [optional nowhere]\ny: 2\n"),
            ("f.yaml", "defaults: [two]\n"),
            ("g.yaml", "defaults: [other, two.yml]\n"),
            ("two.yaml", "z: 1\n"),
            ("two.yml", "z: 2\n"),
            ("other.yml", "x: 3\n"),
        ]);
        let fails =
            |name: &str| read_file(&folder.path().join(name)).expect_err("problem").to_string();
        assert!(fails("a.yaml").contains("lead back"), "{}", fails("a.yaml"));
        assert!(fails("c.yaml").contains("c.yaml:1: default `nowhere`"), "{}", fails("c.yaml"));
        assert!(fails("e.yaml").contains("e.yaml"));
        assert!(
            fails("f.yaml").contains("two.yaml and ") && fails("f.yaml").contains("two.yml are")
        );
        let g = read_file(&folder.path().join("g.yaml")).expect("the other ending");
        assert_eq!(g.to_json(), json!({"x": 3, "z": 2}));
        let d = read_file(&folder.path().join("d.yaml")).expect("optional");
        assert_eq!(d.to_json(), json!({"y": 2}));
    }

    #[test]
    fn a_file_that_is_not_there_is_told_with_the_one_that_is_meant() {
        let folder = folder(&[("mine.yaml", "x: 1\n"), ("_mina.yaml", ""), ("minx.txt", "")]);
        let told = |name: &str| {
            let problem = read_file(&folder.path().join(name)).expect_err("not there");
            assert!(problem.is_missing_file);
            problem.to_string()
        };
        let mine = folder.path().join("mine.yaml").display().to_string().replace('\\', "/");
        let meant = format!("(did you mean `{mine}`?)");
        assert!(told("mina.yaml").ends_with(&format!("no such file {meant}")));
        assert!(told("other.yaml").ends_with("other.yaml: no such file"));
        // Below the name of a file there is nothing.
        let below = read_file(&folder.path().join("mine.yaml/x.yaml")).expect_err("no folder");
        assert!(!below.is_missing_file || cfg!(windows));
    }

    #[test]
    fn defaults_that_double_have_a_limit() {
        let folder = tempfile::tempdir().expect("folder");
        for i in 0..40 {
            let text = format!("defaults: [a{}, a{}]\n", i + 1, i + 1);
            std::fs::write(folder.path().join(format!("a{i}.yaml")), text).expect("file");
        }
        std::fs::write(folder.path().join("a40.yaml"), "x: 1\n").expect("file");
        let problem = read_file(&folder.path().join("a0.yaml")).expect_err("too many");
        assert!(
            problem.to_string().contains("more than 256 files"),
            "{}",
            problem.to_string().len()
        );
    }

    #[test]
    fn published_spellings_are_ours() {
        let node = read_text("model_name_or_path: a\ndraft_model_name_or_path: b\n", "x.yaml");
        let json = node.expect("composed").to_json();
        assert_eq!(json, json!({"target": "a", "draft": {"from": "b"}}));
        let both = read_text("model_name_or_path: a\ntarget: b\n", "x.yaml");
        assert!(both.expect_err("both").to_string().contains("x.yaml:1"));
    }
}
