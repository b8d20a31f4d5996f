"""Many requests of all kinds, a part of them hostile, at one server: every answer is compared with `generate`, memory stays flat, and in the
end every place is free."""

import collections
import json
import random
import threading
import time

from serving.common import Stream, generated, metrics, post, resident, text_of

PROMPTS = [
    "Once upon a time",
    "The cat sat on the mat and the cat",
    "1, 2, 3, 4, 5, 6,",
    "Question: What is gravity?\nAnswer:",
    "def add(a, b):\n    return",
    "a",
    "Äpfel und Birnen – ß",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
]
TOKENS = 24
CLIENTS = 16
# Share of each kind; what is left is asked plainly.
KINDS = {"cancelled": 0.10, "malformed": 0.10, "slow": 0.04, "oversized": 0.04, "form": 0.04, "sampled": 0.08, "killed": 0.01}
SCHEMA = {"type": "object", "required": ["sure"], "additionalProperties": False, "properties": {"sure": {"type": "boolean"}}}
MALFORMED = [
    (b"{", 400), (b"[]", 400), (b"\xff\xfe", 400), (b"[" * 5000, 400), (b"{}", 400),
    (json.dumps({"prompt": "a", "temperature": "hot"}).encode(), 400),
    (json.dumps({"prompt": "a", "n": 100_000}).encode(), 400),
    (json.dumps({"prompt": "a", "logit_bias": {"x": 1}}).encode(), 400),
    (json.dumps({"prompt": "a", "guided_regex": "("}).encode(), 400),
    (json.dumps({"prompt": "a", "model": "none"}).encode(), 404),
]
# Memory that may come after the first part of the soak, as a share and in bytes.
GROWTH, SLACK = 0.03, 16 << 20
# Requests from which that shows.
LEAST = 3000


class Soak:
    def __init__(self, address, wanted, most_body, seed):
        self.address, self.wanted, self.most_body = address, wanted, most_body
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.counts, self.wrong, self.sampled = collections.Counter(), [], {}

    def note(self, kind, problem=None):
        with self.lock:
            self.counts[kind] += 1
            if problem:
                self.wrong.append(f"{kind}: {problem}")

    def patient(self, ask):
        """Asks again while the server is busy."""
        while True:
            status, told = ask()
            if status != 429:
                return status, told
            self.note("busy")
            time.sleep(0.05)

    def one(self, kind, draw):
        prompt = draw.choice(PROMPTS)
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        if kind in ("cancelled", "killed", "slow"):
            return self.streamed(kind, {**body, "stream": True}, draw)
        if kind == "malformed":
            data, wanted = draw.choice(MALFORMED)
            status, told = self.patient(lambda: post(self.address, "/v1/completions", data))
            error = json.loads(told).get("error", {})
            return self.note(kind, None if status == wanted and error.get("message") else f"{data[:40]}: {status} {told[:100]}")
        if kind == "oversized":
            return self.oversized(body, draw)
        if kind == "form":
            status, told = self.patient(lambda: post(self.address, "/v1/completions", {**body, "guided_json": SCHEMA}))
            text = json.loads(told)["choices"][0]["text"] if status == 200 else told
            try:
                holds = isinstance(json.loads(text)["sure"], bool)
            except ValueError:
                holds = False
            return self.note(kind, None if holds else f"{status} {text[:100]}")
        if kind == "sampled":
            seed = draw.randrange(20)
            status, told = self.patient(lambda: post(self.address, "/v1/completions", {**body, "temperature": 1.0, "seed": seed}))
            text = json.loads(told)["choices"][0]["text"] if status == 200 else told
            with self.lock:
                wanted = self.sampled.setdefault((prompt, seed), text)
            return self.note(kind, None if status == 200 and text == wanted else f"seed {seed}: {text!r}, and {wanted!r} before")
        status, told = self.patient(lambda: post(self.address, "/v1/completions", body))
        text = json.loads(told)["choices"][0]["text"] if status == 200 else told
        return self.note(kind, None if text == self.wanted[prompt] else f"{prompt!r}: {text!r}")

    def streamed(self, kind, body, draw):
        def ask():
            stream = Stream(self.address, "/v1/completions", body)
            if stream.status == 429:
                stream.close()
            return stream.status, stream

        status, stream = self.patient(ask)
        if status != 200:
            return self.note(kind, f"status {status}")
        if kind == "slow":
            text = "".join(text_of(event) for event in stream.events(pause=0.02))
            stream.close()
            return self.note(kind, None if text == self.wanted[body["prompt"]] else repr(text))
        events, begun = stream.events(), ""
        for _ in range(draw.randrange(4)):
            begun += text_of(next(events, {}))
        (stream.tear if kind == "killed" else stream.close)()
        return self.note(kind, None if self.wanted[body["prompt"]].startswith(begun) else repr(begun))

    def oversized(self, body, draw):
        large = draw.random() < 0.5
        body = {**body, "prompt": "word " * (self.most_body // 5 + 1 if large else 20_000)}
        try:
            status, _ = self.patient(lambda: post(self.address, "/v1/completions", body))
        except (BrokenPipeError, ConnectionResetError):
            # The server need not read on what it refuses.
            status = 413
        return self.note("oversized", None if status == (413 if large else 400) else f"status {status}")

    def run(self, count, watch):
        kinds = self.random.choices([*KINDS, "plain"], [*KINDS.values(), 1 - sum(KINDS.values())], k=count)
        waiting = collections.deque(enumerate(kinds))

        def client():
            while waiting:
                try:
                    number, kind = waiting.popleft()
                except IndexError:
                    return
                try:
                    self.one(kind, random.Random(number))
                except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                    self.note(kind, repr(error))
                watch(count - len(waiting))

        clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()


def soak(checks, address, server, arguments, count):
    wanted = {prompt: generated(arguments.binary, arguments.target, prompt, TOKENS) for prompt in PROMPTS}
    made = Soak(address, wanted, arguments.max_body * 1024, seed=1)
    memory, started, lock = {}, time.monotonic(), threading.Lock()

    def watch(done):
        step = max(1, count // 20)
        with lock:
            if done % step == 0 and done not in memory:
                memory[done] = resident(server.pid)
                print(f"  {done} of {count} requests, {time.monotonic() - started:.0f} s, {memory[done] / 2**20:.0f} MiB", flush=True)

    made.run(count, watch)
    checks.check("soak: every answer is right", not made.wrong, "; ".join(made.wrong[:5]) or dict(made.counts))
    deadline = time.monotonic() + 60
    while (told := metrics(address)) and time.monotonic() < deadline:
        if told["longdraft_running_answers"] == 0 == told["longdraft_waiting_answers"]:
            break
        time.sleep(0.1)
    checks.check("soak: every place is free", told["longdraft_running_answers"] == 0 == told["longdraft_waiting_answers"])
    # The first third makes room for the longest texts and the largest batches.
    early = [held for done, held in memory.items() if done <= count // 3]
    late = memory[max(memory)] if memory else 0
    if count < LEAST:
        print(f"  whether memory is flat shows from {LEAST} requests on")
        early = [late]
    flat = bool(early) and late <= max(early) * (1 + GROWTH) + SLACK
    checks.check("soak: memory is flat", flat, f"{max(early, default=0) / 2**20:.0f} MiB after a third, {late / 2**20:.0f} MiB at the end")
    status, told = post(address, "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0})
    checks.check("soak: it answers as before", status == 200 and json.loads(told)["choices"][0]["text"] == wanted[PROMPTS[0]])
