"""Reading what steps printed: one report, one table, one archive of few files."""

import io
import json
import os
import pathlib
import tarfile
from collections import Counter

from .steps import SKIPPED, TIMED_OUT, output

# What of a step's output goes into the archive, in bytes from its beginning and its end.
HEAD, TAIL = 256 << 10, 768 << 10
# Lines of `compute-sanitizer` that are no findings.
SANITIZER = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "Target application returned")
# Ops of a trace that the table names.
TRACED = 16
# What makes two lines of figures the same work.
WORK = ("case", "shape", "layers", "tokens", "documents", "soft", "cached", "llm_loss", "online", "draft_vocab_size", "method",
        "context", "sequences", "draft_layers", "blocks", "dtype")

# PyTorch's names of types, and ours.
DTYPES = {"bfloat16": "bf16", "float32": "f32"}


def json_lines(text):
    """Every line of a text that is a JSON object, torn ones left out."""
    found = []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                pass
    return [line for line in found if isinstance(line, dict)]


def lacks(code, err):
    """The command that a program does not have, if that is why it failed."""
    marker = "unrecognized subcommand '"
    return err.split(marker, 1)[1].split("'", 1)[0] if code == 2 and marker in err else None


def name_of(line):
    """What a line is about: its name or case, with shape and type where it has them."""
    first = next((line[key] for key in ("name", "case") if key in line), None)
    return "?" if first is None else " ".join(str(part) for part in (first, line.get("shape"), line.get("products")) if part)


def maker_of(line):
    """What comes before a figure that is not ours."""
    ours = line.get("impl", "longdraft") == "longdraft"
    return "" if ours else " ".join(["PyTorch", *([line["backend"]] if "backend" in line else []), ""])


def last(code, out, _):
    lines = json_lines(out)
    return {**(lines[-1] if lines else {}), "pass": code == 0 and bool(lines)}


def text(code, out, _):
    return {"lines": len(out.splitlines()), "pass": code == 0}


def findings(text):
    """What `compute-sanitizer` found, each with where it was, and how often."""
    found = []
    for line in text.splitlines():
        words = line.removeprefix("========= ")
        if words == line or not words.strip():
            continue
        if words.startswith("    at ") and found:
            found[-1] += f" {words.strip()}"
        elif not words.startswith(" "):
            found.append(words)
    return dict(Counter(words for words in found if not words.startswith(SANITIZER)))


def checks(code, out, _):
    """Lines of named checks, each of which says whether it `passed`."""
    lines = [line for line in json_lines(out) if "passed" in line and name_of(line) != "?"]
    failed = [line for line in lines if line["passed"] is not True]
    reached = name_of(lines[-1]) if lines else None
    return {"checks": len(lines), "failed": failed, "reached": reached, "findings": findings(out), "pass": code == 0 and bool(lines) and not failed}


def parity(code, out, _):
    cases = [line for line in json_lines(out) if "case" in line]
    worst = {}
    for case in cases:
        for check in case.get("checks", []):
            # No number: the error was not finite.
            error, tolerance = check["error"], check["tolerance"]
            share = error / tolerance if error is not None and tolerance else error
            known = worst.get(case["kind"], 0.0)
            worst[case["kind"]] = None if share is None or known is None else max(known, share)
    failed = {case["case"]: case.get("error", {}).get("message") or
              [check for check in case.get("checks", []) if not check["pass"]] for case in cases if not case["pass"]}
    return {"cases": len(cases), "failed": failed, "largest_share_of_tolerance": worst, "pass": code == 0 and bool(cases)}


def figures(code, out, _):
    lines = json_lines(out)
    whole = [line for line in lines if not line.get("error")]
    return {"lines": whole, "errors": [line for line in lines if line.get("error")], "pass": code == 0 and bool(whole)}


def quickstart(code, out, _):
    lines = json_lines(out)
    result = lines[-1] if lines else {}
    keys = ("tau", "plain_tokens_per_second", "speculative_tokens_per_second", "speed_up", "prompts", "equal", "lossless")
    return {**{key: result.get(key) for key in keys}, "took_s": result.get("seconds"), "pass": code == 0 and bool(lines)}


def training(code, out, _):
    """A run of training that came to its end. Losses are read from what it leaves, also where it is cut off."""
    result = (json_lines(out) or [{}])[-1]
    held_out = result.get("held_out") or {}
    told = {"trained_steps": result.get("steps"), "held_out_loss": held_out.get("loss"),
            "tokens_per_second": result.get("median_tokens_per_second")}
    return {**told, "pass": code == 0 and bool(held_out)}


READERS = {"last": last, "text": text, "checks": checks, "parity": parity, "figures": figures, "quickstart": quickstart, "training": training}


def reference_of(name, names):
    """The step that does on the CPU what a step does, if there is one: `X_cpu` for `X`, `X_f32` and the like."""
    on_cpu = [other for other in names if other.endswith("_cpu")]
    fits = [other for other in on_cpu if name == other[:-4] or name.startswith(other[:-3])]
    return max(fits, key=len) if fits and name not in on_cpu else None


def curves(folder, name):
    """Losses of a step's runs, by run and optimizer step."""
    found = {}
    for path in sorted((folder / f"{name}.keep").glob("*metrics.jsonl")):
        lines = json_lines(path.read_text(errors="replace"))
        found[path.name] = {line["step"]: line["loss"] for line in lines if "step" in line and "loss" in line}
    return found


def marked(steps):
    """Some steps of a curve: the first ones, then fewer and fewer, and the last."""
    return sorted({steps[min(2**power, len(steps)) - 1] for power in range(len(steps).bit_length() + 1)})


def compared_curves(folder, name, reference):
    """How far losses of training are from those of the same training elsewhere: largest and last relative difference."""
    mine, other = curves(folder, name), curves(folder, reference)
    compared = {}
    for run in mine.keys() & other.keys():
        steps = [n for n in sorted(mine[run].keys() & other[run].keys()) if mine[run][n] and other[run][n]]
        differences = [abs(mine[run][n] / other[run][n] - 1) for n in steps]
        if differences:
            compared[run] = {"steps": len(steps), "largest": max(differences), "last": differences[-1],
                             "losses": [[n, mine[run][n], other[run][n]] for n in marked(steps)]}
    return compared


def read_step(folder, step):
    """One step's part of the report: how it ended, and what could be read of what it printed."""
    code = step["code"]
    part = {key: step.get(key) for key in ("code", "seconds", "ceiling", "gpu")}
    if code is SKIPPED:
        return {**part, "skipped": step["skipped"], "pass": False}
    out, err = output(folder, step["name"], "out"), output(folder, step["name"], "err")
    try:
        part.update(READERS[step["reader"]](code, out, err))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        part.update({"unreadable": f"{type(error).__name__}: {error}", "pass": False})
    if lacks(code, err):
        part["lacks"] = lacks(code, err)
    if code == TIMED_OUT:
        part["timed_out"] = True
    if code:
        part["last_words"] = err.strip().splitlines()[-3:]
    return part


def read_plan(folder):
    """What a run wrote of its steps."""
    try:
        return json.loads((pathlib.Path(folder) / "steps.json").read_text())
    except (OSError, ValueError):
        return {"steps": []}


def summarise(folder, plan):
    """The report on a folder of results: `plan` names the steps and how they ended."""
    folder = pathlib.Path(folder)
    report = {key: plan[key] for key in plan if key != "steps"}
    report["steps"] = {step["name"]: read_step(folder, step) for step in plan["steps"]}
    for name, part in report["steps"].items():
        reference = reference_of(name, report["steps"])
        compared = compared_curves(folder, name, reference) if reference else {}
        if compared:
            part["loss_beside_cpu"] = compared
    decisive = [step["name"] for step in plan["steps"] if step["decisive"]]
    report["pass"] = bool(decisive) and all(report["steps"][name]["pass"] for name in decisive)
    return report


def work_of(line):
    """What a line of figures measured, without who did it. PyTorch's programs leave switches out that they do not have."""
    line = {**line, "dtype": DTYPES.get(line.get("dtype"), line.get("dtype"))}
    return tuple((key, line[key]) for key in WORK if line.get(key) not in (None, False, ""))


def label(work):
    parts = []
    for key, value in work:
        if value is True:
            parts.append(key)
        elif key in ("case", "shape", "dtype"):
            parts.append(str(value))
        elif key == "documents" and value == 1:
            pass
        else:
            parts.append(f"{value} {key}")
    return " ".join(parts)


def show(value):
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def rows_of(rows):
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def result_of(part):
    """How a step ended, in few words."""
    if "skipped" in part:
        return f"skipped: {part['skipped']}"
    if "lacks" in part:
        return f"FAIL: this build has no command {part['lacks']}"
    if part.get("timed_out"):
        return "FAIL: out of time"
    counts = [f"{part[key]} {key}" for key in ("checks", "cases") if key in part]
    failed = [f"{len(part['failed'])} failed"] if part.get("failed") else []
    return ", ".join(["pass" if part["pass"] else "FAIL", *counts, *failed])


def steps_table(report):
    rows = [("step", "exit", "seconds", "result")]
    for name, part in report["steps"].items():
        rows.append((name, show(part["code"]), show(part.get("seconds")), result_of(part)))
    return rows_of(rows)


def speed_table(report):
    """Our steps beside PyTorch's of the same work."""
    ours, theirs, order = {}, {}, []
    for part in report["steps"].values():
        for line in part.get("lines", []) if isinstance(part.get("lines"), list) else []:
            # Events slow a traced step.
            if "tokens_per_s" not in line or "trace" in line:
                continue
            work = work_of(line)
            order.append(work)
            if line.get("impl") == "longdraft":
                ours[work] = line
            else:
                theirs.setdefault(work, []).append(line)
    rows = [("work", "longdraft tok/s", "PyTorch tok/s", "ratio", "longdraft MiB", "PyTorch MiB", "PyTorch's way")]
    for work in dict.fromkeys(order):
        mine = ours.get(work, {})
        for other in theirs.get(work, [{}]):
            pair = mine.get("tokens_per_s"), other.get("tokens_per_s")
            ratio = pair[0] / pair[1] if all(pair) else None
            memory = [show(line.get("peak_device_mib")) for line in (mine, other)]
            way = ", ".join([str(other.get("attention", "-")), *(["compiled"] if other.get("compile") else [])])
            rows.append((label(work), *map(show, (*pair, ratio)), *memory, way))
    return rows_of(rows) if len(rows) > 1 else []


def trace_table(report):
    """Where the time of traced steps went: ops by time, and what is left over."""
    rows = [("traced work", "op", "starts a step", "ms a step", "share")]
    for part in report["steps"].values():
        for line in part.get("lines", []) if isinstance(part.get("lines"), list) else []:
            trace = line.get("trace")
            if not trace or not trace["steps"]:
                continue
            steps, whole = trace["steps"], trace["all_ms"]
            longest, rest = trace["ops"][:TRACED], trace["ops"][TRACED:]
            entries = [(op["op"], op["starts"], op["ms"]) for op in longest]
            if rest:
                entries.append((f"{len(rest)} further ops", sum(op["starts"] for op in rest), sum(op["ms"] for op in rest)))
            entries += [("other ops, copies, gaps", None, trace["other_ms"]), ("all", None, whole)]
            for op, starts, ms in entries:
                count = None if starts is None else starts / steps
                rows.append((label(work_of(line)), op, show(count), show(ms / steps), f"{100 * ms / whole:.1f} %" if whole else "-"))
    return rows_of(rows) if len(rows) > 1 else []


def curves_table(report):
    """Losses of training beside those of the CPU."""
    rows = [("training", "steps compared", "largest difference", "last difference", "losses here / on the CPU at steps")]
    for name, part in report["steps"].items():
        for run, curve in part.get("loss_beside_cpu", {}).items():
            losses = ", ".join(f"{n}: {show(float(a))} / {show(float(b))}" for n, a, b in curve["losses"])
            rows.append((f"{name} {run.removesuffix('-metrics.jsonl')}", show(curve["steps"]), show(curve["largest"]), show(curve["last"]), losses))
    return rows_of(rows) if len(rows) > 1 else []


def other_figures(report):
    """Figures that are no steps over tokens, as kernels' are: name and every number."""
    rows = [("what", "figures")]
    for part in report["steps"].values():
        for line in part.get("lines", []) if isinstance(part.get("lines"), list) else []:
            if "tokens_per_s" in line or name_of(line) == "?":
                continue
            numbers = {key: value for key, value in line.items() if isinstance(value, (int, float)) and value is not True}
            rows.append((maker_of(line) + name_of(line), ", ".join(f"{key} {show(value)}" for key, value in numbers.items())))
    return rows_of(rows) if len(rows) > 1 else []


def table(report):
    parts = [steps_table(report), speed_table(report), trace_table(report), curves_table(report), other_figures(report)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def clipped(path):
    """A file's beginning and end."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= HEAD + TAIL:
            return file.read()
        head = file.read(HEAD)
        file.seek(size - TAIL)
        return head + f"\n[{size - HEAD - TAIL} bytes left out]\n".encode() + file.read()


def write_archive(folder, archive):
    """All results in one file, put in place of the last one when it is whole."""
    folder, archive = pathlib.Path(folder), pathlib.Path(archive)
    beside = archive.with_name(f".{archive.name}.part")
    try:
        with tarfile.open(beside, "w:gz", compresslevel=6) as tar:
            for path in sorted(folder.rglob("*")):
                place = path.relative_to(folder)
                if not path.is_file() or any(part.endswith(".scratch") for part in place.parts):
                    continue
                data = clipped(path)
                entry = tarfile.TarInfo(str(pathlib.Path("gpu-check") / place))
                entry.size, entry.mtime = len(data), int(path.stat().st_mtime)
                tar.addfile(entry, io.BytesIO(data))
        os.replace(beside, archive)
    finally:
        beside.unlink(missing_ok=True)


def write(folder, plan, archive=None):
    """Report, table and archive of what is there so far. Returns the report, and what kept it from being written."""
    folder = pathlib.Path(folder)
    report = summarise(folder, plan)
    try:
        (folder / "steps.json").write_text(json.dumps(plan, indent=1) + "\n")
        (folder / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / "table.md").write_text(table(report) + "\n")
        if archive:
            write_archive(folder, archive)
    except OSError as error:
        return report, error
    return report, None
