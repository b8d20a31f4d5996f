"""Targets, sessions, streams, evaluations."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import longdraft
from support import QUESTIONS, ROOT, TARGET, Folder, target, write_target_with_block

PROMPT = "The sea was calm and the"


class Decoding(unittest.TestCase):
    def test_a_stream_gives_the_answer_piece_by_piece(self):
        session = longdraft.Session(target(), lookup="merge")
        stream = session.generate(PROMPT, max_tokens=40, stream=True)
        pieces = list(stream)
        answer = stream.answer
        self.assertEqual("".join(pieces), answer.text)
        self.assertLessEqual({piece.proposed_by for piece in pieces}, {None, "draft", "lookup"})
        self.assertEqual(answer.finish, "length")
        self.assertEqual(len(answer.tokens), 40)
        self.assertGreaterEqual(answer.tau, 1)
        self.assertEqual(session.generate(PROMPT, max_tokens=40).text, answer.text)
        self.assertEqual(longdraft.Session(target()).generate(PROMPT, max_tokens=40).text, answer.text)
        self.assertIn(answer.text[:5].strip(), answer._repr_html_())
        self.assertIs(stream.answer, answer)
        self.assertEqual(list(stream), [])

    def test_seeds_and_stops_are_followed(self):
        session = longdraft.Session(target())
        drawn = [session.generate(PROMPT, max_tokens=24, temperature=1.0, seed=seed).text for seed in (1, 1, 2)]
        self.assertEqual(drawn[0], drawn[1])
        self.assertNotEqual(drawn[0], drawn[2])
        whole = session.generate(PROMPT, max_tokens=24).text
        stop = whole[5:8]
        cut = session.generate(PROMPT, max_tokens=24, stop=stop)
        self.assertEqual(cut.text, whole[: whole.index(stop)])
        self.assertEqual(cut.finish, "stop")

    def test_the_targets_own_block_drafts_without_changing_an_answer(self):
        folder = Folder()
        self.addCleanup(folder.remove)
        write_target_with_block(folder.path / "glm")
        own = longdraft.Target.open(folder.path / "glm")
        options = {"max_tokens": 24, "ignore_eos": True}
        plain = longdraft.Session(own).generate("the cat", **options)
        for more in ({}, {"lookup": "merge"}, {"tree": "static:2,2"}):
            session = longdraft.Session(own, mtp=True, pace="fixed", **more)
            self.assertIn("mtp", session.drafter)
            answer = session.generate("the cat", **options)
            self.assertEqual(answer.tokens, plain.tokens)
            self.assertLess(answer.figures["rounds"], plain.figures["rounds"] + 1)
        measured = longdraft.evaluate(own, None, ["the cat", "a dog"], mtp=True, max_tokens=12, runs=1)
        self.assertTrue(measured.lossless)
        with self.assertRaises(longdraft.Error) as raised:
            longdraft.Session(target(), mtp=True)
        self.assertIn("mtp", raised.exception.help)
        with self.assertRaises(longdraft.Error) as raised:
            longdraft.Session(own, folder.path, mtp=True)

    def test_sessions_on_threads_answer_what_they_answer_alone(self):
        prompts = [PROMPT, "Tom has 3 boxes with 12 pens each."]
        alone = [longdraft.Session(target()).generate(prompt, max_tokens=32).text for prompt in prompts]
        found = {}

        def work(prompt):
            found[prompt] = longdraft.Session(target(), lookup="merge").generate(prompt, max_tokens=32).text

        threads = [threading.Thread(target=work, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([found[prompt] for prompt in prompts], alone)

    def test_other_threads_run_while_it_computes(self):
        counted, done = [0], threading.Event()

        def count():
            while not done.is_set():
                counted[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        thread.start()
        longdraft.Session(target()).generate(PROMPT, max_tokens=300, ignore_eos=True)
        done.set()
        thread.join()
        self.assertGreater(counted[0], 5)

    def test_a_cancelled_stream_ends_and_the_session_goes_on(self):
        session = longdraft.Session(target())
        stream = session.generate(PROMPT, max_tokens=400, ignore_eos=True, stream=True)
        next(stream)
        stream.cancel()
        self.assertEqual(stream.answer.finish, "interrupted")
        self.assertEqual(len(session.generate(PROMPT, max_tokens=3).tokens), 3)

    def target_with_template(self, template):
        folder = Folder()
        self.addCleanup(folder.remove)
        write_target_with_block(folder.path / "glm")
        (folder.path / "glm/tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        return longdraft.Target.open(folder.path / "glm")

    def test_variables_reach_the_chat_template_and_are_checked(self):
        own = self.target_with_template("{% if thinking is false %}shut;{% endif %}{{ messages[-1].content }}")
        said, off, on = [{"role": "user", "content": "a"}], {"thinking": False}, {"thinking": True}
        plain, shut = len(own.encode_chat(said)), len(own.encode_chat(said, chat_template_kwargs=off))
        self.assertEqual(shut, plain + len("shut;"))
        session = longdraft.Session(own, chat_template_kwargs=off)
        self.assertEqual(session.chat("a", max_tokens=1).prompt_tokens, shut)
        self.assertEqual(session.chat("a", max_tokens=1, chat_template_kwargs=on).prompt_tokens, plain)
        measured = longdraft.evaluate(own, None, ["a"], chat=True, chat_template_kwargs=off, lookup="merge", max_tokens=4, runs=1)
        self.assertEqual(measured.record["cells"][0]["sample"]["prompt"], "shut;a")
        # Those of a row win, as in a file.
        row = {"prompt": "a", "category": "own", "chat_template_kwargs": on}
        measured = longdraft.evaluate(own, None, [row], chat=True, chat_template_kwargs=off, lookup="merge", max_tokens=4, runs=1)
        cell = measured.record["cells"][0]
        self.assertEqual((cell["sample"]["prompt"], [group["name"] for group in cell["categories"]]), ("a", ["own"]))
        for call in (
            lambda: own.encode_chat(said, chat_template_kwargs={"messages": []}),
            lambda: longdraft.Session(own, chat_template_kwargs={"messages": []}),
            lambda: longdraft.Session(target(), chat_template_kwargs=off),
            lambda: session.chat("a", chat_template_kwargs={"tools": []}),
            lambda: session.chat("a", chat_template_kwargs="off"),
            lambda: session.generate("a", chat_template_kwargs=off),
            lambda: longdraft.evaluate(own, None, ["a"], chat_template_kwargs=off),
            lambda: longdraft.evaluate(own, None, [row]),
        ):
            with self.assertRaises(longdraft.Error) as caught:
                call()
            self.assertIn("chat", str(caught.exception))

    def test_a_turn_follows_one_that_is_not_over_when_it_is_asked_for(self):
        own = self.target_with_template("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:")
        alone = longdraft.Session(own).chat("b", max_tokens=2)
        session = longdraft.Session(own)
        first, second = [session.chat(text, max_tokens=20, stream=True) for text in ("a", "b")]
        self.assertGreater(second.answer.prompt_tokens, alone.prompt_tokens)
        said = [(message["role"], message["content"]) for message in session.messages]
        texts = ["a", first.answer.text, "b", second.answer.text]
        self.assertEqual(said, list(zip(["user", "assistant"] * 2, texts)))

    def test_errors_are_the_command_lines(self):
        with self.assertRaises(longdraft.Error) as caught:
            longdraft.Session(target(), draft_len=0)
        self.assertTrue(caught.exception.help.startswith("give at least 1"))
        self.assertEqual(caught.exception.code, 2)
        for call in (
            lambda: longdraft.Target.open("no/such/file.gguf"),
            lambda: longdraft.Target.open(TARGET, dtype="f17"),
            lambda: longdraft.Target.open(TARGET, device="gpu"),
            lambda: longdraft.Draft.open("no/such/run"),
            lambda: longdraft.Session(target(), tree="wide"),
            lambda: longdraft.Session(target()).generate(PROMPT, max_tokens=0),
            lambda: longdraft.Session(target()).generate(PROMPT, temperature=-1.0),
            lambda: longdraft.Session(target()).generate(PROMPT, stop_tokens=["no such token"]),
            lambda: longdraft.Session(target()).chat("hello"),
            lambda: target().decode([10**6]),
            lambda: target().features(PROMPT, [99]),
            lambda: target().features([], [0]),
            lambda: longdraft.evaluate(target(), None, []),
            lambda: longdraft.evaluate(target(), None, "no/such/file.jsonl"),
        ):
            with self.assertRaises(longdraft.Error) as caught:
                call()
            self.assertTrue(str(caught.exception))
        with self.assertRaises(TypeError):
            longdraft.Session(target()).generate(PROMPT, max_token=3)
        with self.assertRaisesRegex(TypeError, "`max_tokens`"):
            longdraft.Session(target()).generate(PROMPT, max_tokens=-1)

    def test_features_are_arrays(self):
        try:
            import numpy
        except ImportError:
            with self.assertRaises(longdraft.Error) as caught:
                target().features(PROMPT, [0])
            self.assertEqual(caught.exception.help, "pip install numpy")
            return
        ids = target().encode(PROMPT)
        rows = target().features(ids, [0, target().layers - 1])
        self.assertEqual((rows.shape, rows.dtype), ((len(ids), 2 * target().hidden_size), numpy.float32))
        self.assertTrue(numpy.isfinite(rows).all())
        first = target().features(ids[:3], [0])
        numpy.testing.assert_allclose(rows[:3, : target().hidden_size], first, rtol=1e-4, atol=1e-5)
        rows[0, 0] = 1.0
        self.assertEqual(target().decode(ids).strip(), PROMPT)

    def test_an_evaluation_compares_with_plain_decoding(self):
        rows = [{"prompt": PROMPT}, {"prompt": "Two men went to"}]
        for prompts in (rows, (row["prompt"] for row in rows)):
            result = longdraft.evaluate(target(), None, prompts, lookup="merge", max_tokens=16, runs=1)
            self.assertTrue(result.lossless)
            self.assertEqual(result.prompts, 2)
            self.assertGreaterEqual(result.tau, 1)
        named = longdraft.evaluate(target(), None, QUESTIONS, field="question", limit=1, max_tokens=8, runs=1)
        self.assertEqual(named.prompts, 1)
        self.assertIn("temperature 0", named._repr_html_())


def run(program, **options):
    """A Python of its own with some lines."""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


class Processes(unittest.TestCase):
    def test_ctrl_c_is_raised_and_the_session_answers_on(self):
        program = f"""
import signal, longdraft
# A shell's background job would ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
session = longdraft.Session(longdraft.Target.open({TARGET!r}))
stream = session.generate("The", max_tokens=500, ignore_eos=True, stream=True)
next(stream)
try:
    # The signal may come before this call returns.
    print("begun", flush=True)
    while True:
        session.generate("The", max_tokens=500, ignore_eos=True)
except KeyboardInterrupt:
    print(session.generate("The", max_tokens=2).finish)
"""
        process = run(program)
        self.assertEqual(process.stdout.readline(), "begun\n")
        process.send_signal(signal.SIGINT)
        said, wrong = process.communicate(timeout=300)
        self.assertEqual((process.returncode, said.strip()), (0, "length"), wrong)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork here")
    def test_a_forked_process_is_told_what_to_do(self):
        program = f"""
import os, longdraft
target = longdraft.Target.open({TARGET!r})
session = longdraft.Session(target)
session.generate("The", max_tokens=2)
child = os.fork()
if child == 0:
    try:
        session.generate("The", max_tokens=2)
    except longdraft.Error as error:
        print(error, "|", error.help, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
        process = run(program)
        said, wrong = process.communicate(timeout=120)
        self.assertIn("forked", said, wrong)
        self.assertIn("spawn", said)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork here")
    def test_a_stream_that_was_carried_over_a_fork_does_not_hang(self):
        program = f"""
import os, longdraft
stream = longdraft.Session(longdraft.Target.open({TARGET!r})).generate("The", max_tokens=2, stream=True)
child = os.fork()
if child == 0:
    try:
        list(stream)
    except longdraft.Error as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
        process = run(program)
        self.addCleanup(process.kill)
        said, wrong = process.communicate(timeout=120)
        self.assertIn("forked", said, wrong)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork here")
    def test_a_process_that_was_forked_before_works(self):
        program = f"""
import os, longdraft
child = os.fork()
if child == 0:
    print(longdraft.Session(longdraft.Target.open({TARGET!r})).generate("The", max_tokens=2).finish, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
        process = run(program)
        said, wrong = process.communicate(timeout=120)
        self.assertEqual(said.strip(), "length", wrong)

    def test_the_command_is_in_the_module(self):
        process = subprocess.run([sys.executable, "-m", "longdraft", "--version"], capture_output=True, text=True)
        self.assertEqual(process.stdout.strip(), f"longdraft {longdraft.__version__}")
        words = [sys.executable, "-m", "longdraft", "generate", "--target", TARGET, "--prompt", "The", "--max-tokens", "3", "--json"]
        process = subprocess.run(words, capture_output=True, text=True)
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertIn('"finish":"length"', process.stdout.replace(" ", ""))
        process = subprocess.run([sys.executable, "-m", "longdraft", "trian"], capture_output=True, text=True)
        self.assertEqual(process.returncode, 2)
        self.assertIn("train", process.stderr)

    def test_examples_run(self):
        def example(name):
            path = ROOT / "examples/python" / name
            process = subprocess.run([sys.executable, path, TARGET, PROMPT], capture_output=True, text=True)
            self.assertEqual(process.returncode, 0, process.stderr)
            return process.stdout

        self.assertIn("tokens per target pass", example("decode.py"))
        said = example("beside_transformers.py")
        self.assertIn("longdraft: the same text", said)
        # torch is not needed, and its absence is said.
        self.assertTrue("transformers, assisted: " in said or "skipped transformers: " in said, said)


if __name__ == "__main__":
    unittest.main()
