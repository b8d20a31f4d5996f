"""The end of what gpu-check prints: how every step ended, every failing check, and the figures that matter, each in one line.

All of it is short: a machine that is lent may show only the last 12 000 characters.
"""

from itertools import zip_longest

from .report import label, maker_of, name_of, result_of, show, work_of

# Characters of all of it, of the failures in it, and of one line.
LONGEST, FAILURES, LINE = 10_500, 7_000, 240
# Figures of a line or of a step, and their units.
UNITS = {
    "tokens_per_s": "tok/s", "tokens_per_second": "tok/s", "tflops": "TFLOP/s", "gb_per_s": "GB/s", "weights_gb_s": "GB/s of weights",
    "host_us": "us a call", "ms": "ms", "peak_device_mib": "MiB at most", "bf16_tflop_s": "TFLOP/s in bf16", "f32_tflop_s": "TFLOP/s in f32",
    "copy_gb_s": "GB/s of copies", "held_out_loss": "held-out loss", "tau": "tokens a round", "speed_up": "times plain decoding",
}
# Ops of a traced step that are named.
TRACED = 4
NOTES = {"dflash": "every token of the row is useful: supervised, no padding"}


def number(value):
    """An error; JSON has none that is not finite."""
    return "not finite" if value is None else f"{value:.1e}"


def subject(line):
    """What a line is about."""
    return name_of(line) if "name" in line else label(work_of(line))


def check_line(line):
    """A check of an op."""
    if "error" in line:
        return f"{name_of(line)}: {line['error']}"
    bits = "" if line.get("equal_bits", True) else ", bits differ between runs"
    if "tolerance" not in line:
        return f"{name_of(line)}{bits}"
    return f"{name_of(line)}: error {number(line.get('max_error'))} of {number(line['tolerance'])} ({line.get('worst', '?')}){bits}"


def share_of(error, tolerance):
    return float("inf") if error is None or not tolerance else error / tolerance


def in_turn(groups):
    """The first line of every group, then the second ones, so that no group hides another."""
    return [line for rank in zip_longest(*groups) for line in rank if line is not None]


def op_lines(failed):
    """Failing checks of ops, the worst of every op first, ops as they came."""
    ops = {}
    for line in failed:
        ops.setdefault(line.get("name"), []).append(line)
    share = lambda line: share_of(line.get("max_error"), line.get("tolerance"))
    return in_turn([[check_line(line) for line in sorted(lines, key=share, reverse=True)] for lines in ops.values()])


def case_lines(failed):
    """Failing checks of reference cases, the worst of every case first."""
    cases = []
    for case, checks in failed.items():
        if isinstance(checks, str):
            cases.append([f"{case}: {checks}"])
            continue
        worst_first = sorted(checks, key=lambda check: share_of(check["error"], check["tolerance"]), reverse=True)
        cases.append([f"{case} {check['name']}: error {number(check['error'])} of {number(check['tolerance'])}" for check in worst_first])
    return in_turn(cases)


def failures(part):
    """What is wrong with a step, a line each."""
    if part["pass"] or "skipped" in part:
        return []
    failed = part.get("failed") or []
    lines = case_lines(failed) if isinstance(failed, dict) else op_lines(failed)
    lines += [f"{subject(line)}: {line['error']}" for line in part.get("errors", [])]
    lines += [f"{finding} ({times} times)" for finding, times in part.get("findings", {}).items()]
    if "unreadable" in part:
        lines.append(f"not as expected: {part['unreadable']}")
    # 1 only says that something failed. Whatever else ended the step matters as well.
    if part["code"] not in (0, 1) or not lines:
        place = f" after {part['reached']}" if part.get("reached") else ""
        lines.append(f"exit {part['code']}{place}: {' / '.join(part.get('last_words', [])) or 'it said nothing'}")
    return lines


def numbers(line):
    """Figures with their units."""
    known = [(line.get(key), unit) for key, unit in UNITS.items()]
    return [f"{show(value)} {unit}" for value, unit in known if isinstance(value, (int, float))]


def traced(trace):
    """The ops that take most of a traced step."""
    whole = trace["all_ms"] or 1.0
    parts = [(op["op"], op["ms"]) for op in trace["ops"][:TRACED]] + [("other", trace["other_ms"])]
    return [f"{op} {100 * ms / whole:.0f} %" for op, ms in parts]


def figure_line(line):
    """What a line of figures says, or nothing."""
    if line.get("trace"):
        return f"trace of {subject(line)}: {', '.join(traced(line['trace']))}"
    known = numbers(line)
    if not known:
        return None
    way = [str(line["attention"])] if "attention" in line else []
    note = [NOTES[line["case"]]] if line.get("case") in NOTES else []
    return f"{maker_of(line)}{subject(line)}: {', '.join([*known, *way, *note])}"


def figures(name, part):
    """Figures of a step, a line each."""
    lines = part.get("lines") if isinstance(part.get("lines"), list) else []
    found = [told for told in map(figure_line, lines) if told]
    own = numbers(part)
    own += [f"{kind}: largest error {show(share)} of its tolerance" for kind, share in part.get("largest_share_of_tolerance", {}).items()]
    own += [f"loss {show(curve['largest'])} from the CPU's over {curve['steps']} steps" for curve in part.get("loss_beside_cpu", {}).values()]
    return found + ([f"{name}: {', '.join(own)}"] if own else [])


def clipped(line):
    line = " ".join(line.split())
    return line if len(line) <= LINE else f"{line[:LINE - 3]}..."


def size(lines):
    return sum(len(line) + 1 for line in lines)


def within(lines, room, rest):
    """As many lines as there is room for; what is left out is counted."""
    kept = []
    for line in map(clipped, lines):
        room -= len(line) + 1
        if room < 0:
            return [*kept, f"{len(lines) - len(kept)} more: {rest}"]
        kept.append(line)
    return kept


def failed_lines(steps):
    """What is wrong with all steps. Each has its share of the room, and what shorter ones leave."""
    wrong = {name: [f"FAIL {name}: {line}" for line in found] for name, part in steps.items() if (found := failures(part))}
    room, kept = FAILURES, {}
    for left, name in enumerate(sorted(wrong, key=lambda name: size(map(clipped, wrong[name])))):
        kept[name] = within(wrong[name], room // (len(wrong) - left), f"gpu-check.json names what else fails in {name}")
        room -= size(kept[name])
    return [line for name in wrong for line in kept[name]]


def text(report):
    """How every step ended, what failed, and the figures that matter."""
    steps = report["steps"]
    lines = next((part["gpu"] for part in steps.values() if part.get("gpu")), [])
    lines = [*lines, *(f"{name}: {result_of(part)}, exit {show(part['code'])}, {show(part.get('seconds'))} s" for name, part in steps.items())]
    lines += failed_lines(steps)
    told = [line for name, part in steps.items() for line in figures(name, part)]
    return "\n".join([*lines, *within(told, LONGEST - size(lines), "table.md has all")])
