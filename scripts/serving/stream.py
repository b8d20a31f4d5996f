"""A stream of requests of one domain, or of several after each other: how acceptance, pace and waiting change while the server learns."""

import json
import pathlib
import shutil
import time

from serving.common import connection, percentile, post
from serving.prompts import joined, read_prompts


def told(address):
    """What `/learning` tells."""
    client = connection(address)
    client.request("GET", "/learning")
    answer = client.getresponse()
    body = answer.read()
    client.close()
    return json.loads(body) if answer.status == 200 else {}


def prompts_of(files, wanted):
    """So many messages, an equal part from each file in turn, and the file that each is from."""
    each = -(-wanted // len(files))
    parts = []
    for path in files:
        messages = [joined(*pair) for pair in read_prompts(path)]
        # Files with fewer are asked again from the beginning: the figures say how many are new.
        parts += [(pathlib.Path(path).stem, messages[number % len(messages)]) for number in range(each)]
    return parts[:wanted]


# Seconds in which a training begins where nothing is asked.
BEGINS = 4


def rest(address, seconds):
    """Asks nothing until checks and trainings that are due have ended, for so many seconds at most. A training begins soon after a check."""
    until, waits = time.monotonic() + seconds, 0
    time.sleep(min(BEGINS, seconds))
    while time.monotonic() < until and waits < 3:
        waits = waits + 1 if told(address).get("doing", "waiting") == "waiting" else 0
        time.sleep(0.5)


class Window:
    """Sums over some requests after each other."""

    def __init__(self):
        self.tokens = self.passes = self.failed = 0
        self.accepted, self.seconds, self.waits = {}, 0.0, []

    def add(self, seconds, usage):
        details = usage["completion_tokens_details"]
        self.tokens += usage["completion_tokens"]
        self.passes += details["target_passes"]
        for origin, count in details["accepted_by_origin"].items():
            self.accepted[origin] = self.accepted.get(origin, 0) + count
        self.seconds += seconds
        self.waits.append(1000 * seconds / max(1, usage["completion_tokens"]))

    def figures(self):
        return {
            "tau": self.tokens / max(1, self.passes), "tokens_per_second": self.tokens / max(1e-9, self.seconds),
            "ms_per_token": {share: percentile(self.waits, share / 100) for share in (50, 95)},
            "accepted": self.accepted, "tokens": self.tokens, "failed": self.failed,
        }


def asked(name, address, prompts, arguments):
    """Asks one after the other, with a pause after each; returns the figures and all answers."""
    window, answers, before = Window(), [], told(address)
    for _, message in prompts:
        body = {"messages": [{"role": "user", "content": message}], "temperature": 0, "max_tokens": arguments.tokens}
        begun = time.monotonic()
        status, answer = post(address, "/v1/chat/completions", body)
        seconds = time.monotonic() - begun
        answer = json.loads(answer) if status == 200 else None
        answers.append(answer and answer["choices"][0]["message"]["content"])
        if answer:
            window.add(seconds, answer["usage"])
        else:
            window.failed += 1
        time.sleep(arguments.pause)
    if name == "learning" and arguments.rest:
        rest(address, arguments.rest)
    after = told(address)
    figures = {
        "way": name, "domain": prompts[0][0], **window.figures(),
        "trainings": after.get("trainings", 0), "replaced": after.get("replaced", 0), "last": after.get("last"),
        "learned_rests": after.get("learned_rests", False), "last_check": after.get("last_check"),
    }
    figures["better"] = figures["replaced"] != before.get("replaced", 0)
    return figures, answers


def say(row):
    news = f"; a better draft, simulated {row['last']['tau_before']:.2f} to {row['last']['tau_after']:.2f}" if row["better"] else ""
    print(
        f"  {row['way']:8} {row['from']:5} {row['domain']:12}: tau {row['tau']:.3f}, {row['tokens_per_second']:6.1f} tok/s, "
        f"{row['ms_per_token'][50]:.1f} / {row['ms_per_token'][95]:.1f} ms a token (p50 / p95); {row['trainings']} trainings{news}{'; the given draft proposes' if row['learned_rests'] else ''}",
        flush=True,
    )


def parts(prompts, most):
    """Where each window begins: after so many requests, and where the domain changes."""
    begins = [0]
    for at in range(1, len(prompts)):
        if at - begins[-1] == most or prompts[at][0] != prompts[at - 1][0]:
            begins.append(at)
    return list(zip(begins, [*begins[1:], len(prompts)]))


def streams(checks, start, arguments):
    """The same stream without learning and with it, in turns of a window each; `start` starts a server with some options."""
    prompts = prompts_of(arguments.stream, arguments.requests)
    print(f"{len(prompts)} requests, {len({message for _, message in prompts})} different ones, answers of at most {arguments.tokens} tokens", flush=True)
    learned = pathlib.Path(arguments.folder) / "learned"
    learning = ["--learn", str(learned), "--learn-when", arguments.learn_when, "--learn-rows", str(arguments.learn_rows), "--learn-minutes", str(arguments.learn_minutes)]
    learning += ["--learn-method", arguments.learn_method] if arguments.learn_method else []
    shutil.rmtree(learned, ignore_errors=True)
    # Of several servers on one machine the later one answers a little faster. The one that learns has no help of that.
    ways, figures, equal = {}, [], True
    try:
        for name, options in [("learning", learning), ("fixed", [])]:
            ways[name] = start(options)
        for begin, end in parts(prompts, arguments.window):
            said = []
            for name in ("fixed", "learning"):
                row, answers = asked(name, ways[name][1], prompts[begin:end], arguments)
                figures.append({"from": begin, **row})
                said.append(answers)
                say(figures[-1])
            equal = equal and said[0] == said[1]
            # Written after each window: a stream takes hours.
            output = pathlib.Path(arguments.folder) / "stream.json"
            output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    finally:
        for server, _ in ways.values():
            server.terminate()
            server.wait(120)
    checks.check("stream: every request was answered", all(window["failed"] == 0 for window in figures))
    checks.check("stream: learning changes no answer", equal)
    print(f"wrote {output}")
