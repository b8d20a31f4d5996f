"""Names, types and texts of the interface."""

import ast
import inspect
import pathlib
import subprocess
import sys
import unittest

import longdraft

SOURCE = pathlib.Path(longdraft.__file__).parent


class Interface(unittest.TestCase):
    def test_everything_public_is_there_and_described(self):
        for name in longdraft.__all__:
            thing = getattr(longdraft, name)
            if name != "__version__":
                self.assertTrue(inspect.getdoc(thing), name)
                self.assertIn("longdraft", thing.__module__ or "longdraft", name)

    def test_the_package_is_typed(self):
        self.assertTrue((SOURCE / "py.typed").is_file())
        for path in SOURCE.glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    every = node.args.args + node.args.kwonlyargs
                    untyped = [one.arg for one in every if one.annotation is None and one.arg not in ("self", "cls")]
                    self.assertEqual(untyped, [], f"{path.name}: {node.name}")
                    self.assertIsNotNone(node.returns, f"{path.name}: {node.name}")

    def test_stubs_name_what_the_library_has(self):
        tree = ast.parse((SOURCE / "_longdraft.pyi").read_text(encoding="utf-8"))
        library = longdraft._longdraft
        named = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        there = {name for name in vars(library) if not name.startswith("_")}
        self.assertEqual(named, there)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name != "Error":
                inside = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                inside |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
                own = {name for name in vars(getattr(library, node.name)) if not name.startswith("_")}
                self.assertEqual(inside - {"__init__"}, own, node.name)

    def test_importing_needs_neither_numpy_nor_torch(self):
        program = (
            "import sys\n"
            "sys.modules['numpy'] = sys.modules['torch'] = None\n"
            "import longdraft\n"
            "print(longdraft.__version__)\n"
        )
        said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual(said.stdout.strip(), longdraft.__version__, said.stderr)

    def test_errors_have_all_their_fields(self):
        error = longdraft.Error("a")
        self.assertEqual((error.help, list(error.problems), error.code), (None, [], 1))


if __name__ == "__main__":
    unittest.main()
