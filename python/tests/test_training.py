"""Training, captures, exports and checks, and the examples that do it."""

import json
import pathlib
import signal
import subprocess
import sys
import unittest

import longdraft
from support import CORPUS, QUESTIONS, ROOT, TARGET, Folder, configuration, target


class Training(unittest.TestCase):
    def setUp(self):
        self.folder = Folder()

    def tearDown(self):
        self.folder.remove()

    def test_a_run_is_heard_stopped_gone_on_with_and_used(self):
        output = self.folder.path / "run"
        heard = []

        def stop(event):
            heard.append(event)
            return not (isinstance(event, longdraft.Step) and event.step == 2)

        stopped = longdraft.train(configuration(output), callbacks=stop)
        self.assertEqual((stopped.finished, stopped.steps), (False, 2))
        steps = [event for event in heard if isinstance(event, longdraft.Step)]
        self.assertEqual([step.step for step in steps], [1, 2])
        self.assertTrue(all(step.steps == 4 and step.loss > 0 and step.seconds > 0 for step in steps))
        run = longdraft.train(configuration(output), callbacks=heard.append)
        self.assertEqual((run.finished, run.steps), (True, 4))
        self.assertTrue(any(isinstance(event, longdraft.HeldOut) for event in heard))
        self.assertTrue(any(isinstance(event, longdraft.Event) and event.kind == "resumed" for event in heard))
        self.assertEqual(len(run.losses), 4)
        self.assertIn("<svg", run._repr_html_())
        # Nothing is left to do, and nothing is heard.
        again = []
        self.assertTrue(longdraft.train(configuration(output), callbacks=again.append).finished)
        self.assertEqual(again, [])

        session = longdraft.Session(target(), run.draft)
        answer = session.generate("The sea was", max_tokens=24)
        self.assertEqual(answer.text, longdraft.Session(target()).generate("The sea was", max_tokens=24).text)
        self.assertEqual(session.drafter, "glide")
        export = self.folder.path / "export"
        (folder,) = longdraft.export(run.draft, "longspec", export)
        self.assertGreater(folder.tensors, 0)
        (report,) = longdraft.verify(export, target=TARGET, checkpoint=run.output)
        self.assertTrue(report, report.problems)
        weights = next(path for path in export.iterdir() if path.suffix in (".pth", ".safetensors"))
        weights.unlink()
        (broken,) = longdraft.verify(export)
        self.assertFalse(broken)
        problem = broken.problems[0]
        self.assertEqual(problem.severity, "error")
        self.assertTrue(problem.code and problem.remedy and str(problem))
        self.assertIn(problem.place, broken._repr_html_())

    def test_rows_of_the_program_are_trained_on(self):
        output = self.folder.path / "rows"
        rows = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()[:40]]
        given = configuration(output)
        del given["data"]["train"]
        run = longdraft.train(given, data=iter(rows), changes={"train.steps": 2})
        self.assertEqual(run.steps, 2)
        kept = pathlib.Path(output) / "data/train.jsonl"
        self.assertEqual(len(kept.read_text(encoding="utf-8").splitlines()), len(rows))
        # The same rows: the run is finished. Texts do as well.
        self.assertTrue(longdraft.train(given, data=iter(rows), changes=["train.steps=2"]).finished)
        texts = [" ".join(str(value) for value in row.values()) for row in rows]
        other = {**given, "output": str(self.folder.path / "texts")}
        self.assertEqual(longdraft.train(other, data=texts, changes={"train.steps": 1}).steps, 1)

    def test_errors_of_callbacks_and_configurations_are_raised(self):
        output = self.folder.path / "raises"

        def wrong(event):
            raise ValueError("mine")

        with self.assertRaisesRegex(ValueError, "mine"):
            longdraft.train(configuration(output), callbacks=wrong)
        with self.assertRaises(longdraft.Error) as caught:
            longdraft.train({"target": TARGET, "output": "o", "trian": {}, "draft": {"gama": 3}})
        self.assertGreaterEqual(len(caught.exception.problems), 2)
        self.assertIn("trian", str(caught.exception))
        with self.assertRaises(longdraft.Error):
            longdraft.train(self.folder.path / "missing.yaml")
        with self.assertRaises(longdraft.Error):
            longdraft.train(configuration(output), resume="perhaps")
        with self.assertRaises(longdraft.Error) as caught:
            longdraft.capture(configuration(output))
        self.assertIn("train.features", str(caught.exception))

    def test_features_are_captured_and_trained_from(self):
        output, store = self.folder.path / "stored", self.folder.path / "features"
        given = configuration(output, features=str(store))
        planned = longdraft.capture(given, dry_run=True)
        self.assertFalse(planned.finished)
        heard = []
        captured = longdraft.capture(given, callbacks=heard.append)
        self.assertTrue(captured.finished and captured.tokens > 0 and captured.bytes > 0)
        self.assertTrue(any(event.kind == "captured" for event in heard if isinstance(event, longdraft.Event)))
        self.assertTrue(longdraft.train(given).finished)

    def test_ctrl_c_saves_and_the_same_call_goes_on(self):
        output = self.folder.path / "interrupted"
        program = f"""
import json, signal, sys, longdraft
# A shell's background job would ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
given = json.loads(sys.stdin.readline())
try:
    longdraft.train(given, callbacks=lambda event: print(type(event).__name__, flush=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
        given = configuration(output, steps=100000)
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line == "Step\n":
                break
        process.send_signal(signal.SIGINT)
        said, wrong = process.communicate(timeout=300)
        self.assertEqual((process.returncode, said.splitlines()[-1]), (0, "interrupted"), wrong)
        last = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        # It goes on after the step that was saved.
        first = []
        longdraft.train(given, callbacks=lambda event: first.append(event) or not isinstance(event, longdraft.Step))
        steps = [event.step for event in first if isinstance(event, longdraft.Step)]
        self.assertEqual(steps, [last + 1])

    def test_a_killed_run_goes_on_from_its_checkpoint(self):
        output = self.folder.path / "killed"
        given = configuration(output, steps=100000, save_every=1)
        program = "import json, sys, longdraft; longdraft.train(json.loads(sys.argv[1]), callbacks=lambda e: print(e, flush=True))"
        process = subprocess.Popen([sys.executable, "-c", program, json.dumps(given)], stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if "kind='saved'" in line:
                break
        process.kill()
        process.communicate()
        seen = []
        longdraft.train(given, callbacks=lambda event: seen.append(event) or not isinstance(event, longdraft.Step))
        self.assertTrue(any(isinstance(event, longdraft.Event) and event.kind == "resumed" for event in seen))

    def test_examples_run(self):
        def example(name, *words):
            path = ROOT / "examples/python" / name
            process = subprocess.run([sys.executable, path, *map(str, words)], capture_output=True, text=True)
            self.assertEqual(process.returncode, 0, f"{name}: {process.stderr}")
            return process.stdout

        run = self.folder.path / "example"
        self.assertIn("done after 3 steps", example("train.py", TARGET, run, CORPUS, 3))
        self.assertIn("tokens per target pass", example("decode.py", TARGET, "Once upon a time", run))
        said = example("evaluate.py", TARGET, run, QUESTIONS, "question", 2)
        self.assertIn("2 of 2 outputs", said)
        self.assertIn("clean", example("export_verify.py", run, self.folder.path / "engine", "longspec"))


class Fitting(unittest.TestCase):
    def test_the_commands_error_is_raised(self):
        folder = Folder()
        self.addCleanup(folder.remove)
        with self.assertRaises(longdraft.Error) as caught:
            longdraft.fit("no/such/model.gguf", time="1m", output=folder.path / "fit")
        self.assertTrue(str(caught.exception))
        self.assertEqual(caught.exception.code, 2)

    def test_options_become_words(self):
        from longdraft._fit import _words

        given = {"time": "2h", "for_": ["vllm", "hf"], "prompts": pathlib.Path("a.jsonl"), "seed": 0, "no_push": False, "dry": None, "go": True}
        expected = ["--time", "2h", "--for", "vllm", "--for", "hf", "--prompts", "a.jsonl", "--seed", "0", "--go"]
        given["chat_template_kwargs"] = {"enable_thinking": False}
        expected += ["--chat-template-kwargs", '{"enable_thinking": false}']
        self.assertEqual(_words(given), expected)


if __name__ == "__main__":
    unittest.main()
