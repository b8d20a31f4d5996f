"""Clients that ask one after the other, as many at a time as are told: this server with its options and plain, llama.cpp's on the same file, vLLM."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import venv

from serving.common import Stream, answers, free_port, percentile, post, text_of
from serving.prompts import pieces, read_prompts

QUESTIONS = [
    "What is gravity?",
    "Write a Python function that reverses a list.",
    "Summarise in two sentences why the sky is blue.",
    "Give me three tips for a good night's sleep.",
    "Translate into French: The weather is nice today.",
    "Explain what a binary search does, step by step.",
    "What is the capital of Australia, and why not Sydney?",
    "Write a short letter to a friend about a day at the sea.",
]


# llama.cpp's own server, as the wheel carries it; it ends when its input closes.
LLAMA = """
import sys, xllamacpp
target, threads, slots, context = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path = target
params.n_parallel, params.n_ctx = slots, slots * context
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.port = 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def llama_server(folder, python, target, threads, slots, context):
    """llama.cpp's server with so many slots, from PyPI in an environment of its own if none is given."""
    folder.mkdir(parents=True, exist_ok=True)
    python = pathlib.Path(python or folder / "bin" / "python")
    if not python.exists():
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", "import xllamacpp"], stderr=subprocess.DEVNULL).returncode:
        subprocess.run([python, "-m", "pip", "install", "--quiet", "xllamacpp"], check=True)
    log = open(folder / "server.log", "w", encoding="utf-8")
    command = [python, "-c", LLAMA, target, str(threads), str(slots), str(context)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    for line in process.stdout:
        if line.startswith("http"):
            # What else it prints must not fill the pipe.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process, line.strip().rstrip("/")
    sys.exit(f"llama.cpp's server ended: see {folder / 'server.log'}")


# What vLLM needs to run on this machine's CPU, and to ask nobody for files.
VLLM = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
# Seconds that it may take to begin, and any server to end.
PATIENCE = 600
PATIENCE_OF_ENDS = 60


def vllm_server(folder, python, target, threads, slots, context, dtype):
    """vLLM's server of a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--served-model-name", "vllm", "--dtype", dtype, "--port", str(port),
        "--max-model-len", str(context), "--max-num-seqs", str(slots),
    ]
    log = open(folder / "server.log", "w", encoding="utf-8")
    environment = VLLM | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"} | os.environ
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
    while not answers(address, "/health"):
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            sys.exit(f"vLLM's server did not begin: see {folder / 'server.log'}")
        time.sleep(1)
    return process, address


class Loop:
    """A closed loop of so many clients, which ask messages in turn from number `asked` on."""

    def __init__(self, address, model, messages, asked, clients, seconds, tokens):
        self.address, self.model, self.messages, self.tokens, self.asked = address, model, messages, tokens, asked
        self.first, self.gaps, self.texts, self.failed = [], [], [], 0
        self.lock = threading.Lock()
        self.until = time.monotonic() + seconds
        self.started = time.monotonic()
        threads = [threading.Thread(target=self.client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.seconds = time.monotonic() - self.started

    def client(self):
        while time.monotonic() < self.until:
            with self.lock:
                question = self.messages[self.asked % len(self.messages)]
                self.asked += 1
            asked = [{"role": "user", "content": question}]
            body = {"model": self.model, "messages": asked, "temperature": 0, "max_tokens": self.tokens, "stream": True}
            asked = last = time.monotonic()
            text, gaps, first = "", [], None
            try:
                stream = Stream(self.address, "/v1/chat/completions", body)
                if stream.status != 200:
                    raise OSError(f"status {stream.status}")
                for event in stream.events():
                    piece = text_of(event)
                    if not piece:
                        continue
                    now = time.monotonic()
                    if first is None:
                        first = now - asked
                    else:
                        gaps.append(now - last)
                    last, text = now, text + piece
                stream.close()
            except OSError:
                with self.lock:
                    self.failed += 1
                continue
            with self.lock:
                self.texts.append(text)
                self.gaps += gaps
                self.first += [first] if first is not None else []


def load(checks, starts, arguments, tokenizer):
    """Figures of every server at every number of clients. One server runs at a time; `tokenizer` starts one of ours, which counts the tokens of all."""
    messages = QUESTIONS
    if arguments.prompts:
        with running(tokenizer) as (address, _):
            messages = pieces(address, read_prompts(arguments.prompts), arguments.prompt_tokens)
    print(f"{len(messages)} messages, {sum(map(len, messages)) // len(messages)} characters on average", flush=True)
    loops = []
    for name, start in starts.items():
        with running(start) as (address, model):
            asked = 0
            for clients in arguments.clients:
                # What it was asked before stands in its cache: it is asked further ones.
                done = Loop(address, model, messages, asked, clients, arguments.seconds, arguments.tokens)
                asked = done.asked
                loops.append((clients, name, done))
                checks.check(f"load: {clients} clients, {name}", bool(done.texts) and not done.failed)
    with running(tokenizer) as (address, _):
        figures = [{"clients": clients, "server": name, **figures_of(done, address)} for clients, name, done in loops]
    for row in sorted(figures, key=lambda row: row["clients"]):
        first, gaps = row["first_token_ms"], row["between_tokens_ms"]
        print(
            f"  {row['clients']:2} clients, {row['server']:9}: {row['tokens_per_second']:7.1f} tok/s; first token {first[50]:.0f} / {first[95]:.0f} ms (p50 / p95); "
            f"between tokens {gaps[50]:.1f} / {gaps[95]:.1f} / {gaps[99]:.1f} ms (p50 / p95 / p99); {row['answers']} answers, {row['failed']} failed",
            flush=True,
        )
    output = pathlib.Path(arguments.folder) / "load.json"
    output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {output}")


@contextlib.contextmanager
def running(start):
    """A server's address and the name of its model, while it runs."""
    server, address, model = start()
    try:
        yield address, model
    finally:
        # Its own processes end with it, if it may end them.
        server.terminate()
        try:
            server.wait(PATIENCE_OF_ENDS)
        except subprocess.TimeoutExpired:
            server.kill()


def figures_of(done, tokenizer):
    """Figures of a loop."""
    tokens = sum(json.loads(post(tokenizer, "/tokenize", {"prompt": text})[1])["count"] for text in done.texts)
    return {
        "answers": len(done.texts), "failed": done.failed, "tokens_per_second": tokens / done.seconds,
        "first_token_ms": {share: 1000 * percentile(done.first, share / 100) for share in (50, 95)},
        "between_tokens_ms": {share: 1000 * percentile(done.gaps, share / 100) for share in (50, 95, 99)},
    }
