"""Reads what nvdisasm says of a program: every kernel's instructions by kind, and the loop that does its work."""

import re
from collections import Counter, namedtuple

SECTION = re.compile(r'^\s*\.section\s+(\S+?)(?:,|\s|$)')
LABEL = re.compile(r"^([.$\w]+):")
LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;")
WORDS = re.compile(r"^(@!?U?P\w+\s+)?(\S+)\s*(.*)$")
JUMP = re.compile(r"^(?:(!?U?P\w+)\s*,\s*)?(?:(?:UR|R)\w+\s*,\s*)?`\((.+?)\)")

# Products of tensor cores: of a warp, of a group of warps. HFMA2.MMA is no such product.
TENSOR = {"HMMA", "IMMA", "DMMA", "BMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA", "BGMMA"}
# What is counted under the name of another.
KINDS = {"LD": "LDG", "ST": "STG", "LDL": "local", "STL": "local", "BAR": "barriers", "SYNCS": "barriers", "IDP": "IDP", "FFMA": "FFMA",
         "FFMA2": "FFMA", "MUFU": "MUFU", "SHFL": "SHFL", "LDSM": "LDSM", "LDGSTS": "LDGSTS", "LDG": "LDG", "STG": "STG", "LDS": "LDS",
         "STS": "STS"}
WITH_WIDTH = {"LDG", "STG", "LDS", "STS"}
NARROW = {"U8", "S8", "U16", "S16"}
# What a kernel does most of, the first kind that it has.
WORK = ("tensor", "IDP", "FFMA")

Instruction = namedtuple("Instruction", "op guarded target")


def instruction(text):
    guard, op, operands = WORDS.match(text).groups()
    jump = JUMP.match(operands) if op.split(".")[0] == "BRA" else None
    # Only lanes that wait for others take this way, and come back.
    if op == "BRA.DIV":
        jump = None
    return Instruction(op, bool(guard or jump and jump[1]), jump and jump[2])


class Kernel:
    """Instructions, and the labels before some of them."""

    def __init__(self):
        self.instructions, self.labels = [], {}


def kernels(text):
    """By name. Functions that a kernel calls lie in its section and count as its own."""
    found, own = {}, None
    for line in text.splitlines():
        if section := SECTION.match(line):
            name = section[1].strip('"')
            own = found.setdefault(name[len(".text."):], Kernel()) if name.startswith(".text.") else None
        elif own is None:
            continue
        elif label := LABEL.match(line):
            own.labels[label[1]] = len(own.instructions)
        elif code := LINE.match(line):
            own.instructions.append(instruction(code[1]))
    return found


def kind(op):
    """What an instruction counts as: LDG.128, tensor, barriers; None for what has no column of its own."""
    first, *rest = op.split(".")
    if first in TENSOR:
        return "tensor"
    known = KINDS.get(first)
    if known not in WITH_WIDTH:
        return known
    width = next((part for part in rest if part in NARROW or part in ("64", "128", "256")), "32")
    return f"{known}.{'16' if width in NARROW else width}"


def counts(instructions):
    """Of each kind; `all` but those that do nothing."""
    kinds = Counter(kind(one.op) for one in instructions)
    del kinds[None]
    kinds["all"] = sum(one.op != "NOP" for one in instructions)
    return kinds


def spans(kernel):
    """Ranges of instructions that run together, and which of these each may go on to."""
    code, ends = kernel.instructions, ("BRA", "EXIT", "RET", "BRX", "JMX", "KILL")
    ending = [one.op.split(".")[0] in ends and one.op != "BRA.DIV" for one in code]
    targets = {kernel.labels[one.target] for one in code if one.target in kernel.labels}
    starts = sorted({0, *targets, *(place + 1 for place, ends_here in enumerate(ending) if ends_here)} - {len(code)})
    number = {start: index for index, start in enumerate(starts)}
    ranges, after = list(zip(starts, [*starts[1:], len(code)])), []
    for _, end in ranges:
        last, follows = code[end - 1], set()
        if last.target in kernel.labels:
            follows.add(number.get(kernel.labels[last.target]))
        if not ending[end - 1] or last.guarded:
            follows.add(number.get(end))
        after.append(follows - {None})
    return ranges, after


def order(after):
    """Places that can be reached, each before those that only it leads to."""
    seen, done, stack = {0}, [], [(0, iter(sorted(after[0])))]
    while stack:
        place, rest = stack[-1]
        step = next((other for other in rest if other not in seen), None)
        if step is None:
            done.append(place)
            stack.pop()
        else:
            seen.add(step)
            stack.append((step, iter(sorted(after[step]))))
    return done[::-1]


def dominators(after):
    """Of each place that can be reached: all places that every way to it goes through."""
    reached = order(after)
    before = {place: [other for other in reached if place in after[other]] for place in reached}
    dominated = {place: set(reached) for place in reached} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for place in reached[1:]:
            new = set.intersection(*(dominated[other] for other in before[place])) | {place}
            changed, dominated[place] = changed or new != dominated[place], new
    return dominated, before


def loops(kernel):
    """The instructions of every loop: what lies on a way from its head back to it."""
    if not kernel.instructions:
        return []
    ranges, after = spans(kernel)
    dominated, before = dominators(after)
    bodies = {}
    for place in dominated:
        for head in after[place] & dominated[place]:
            body, open_places = bodies.setdefault(head, {head}), [place]
            while open_places:
                one = open_places.pop()
                if one not in body:
                    body.add(one)
                    open_places += before[one]
    code = kernel.instructions
    return [[one for place in sorted(body) for one in code[slice(*ranges[place])]] for body in bodies.values()]


def busiest(kernel):
    """Counts of the loop with most of a kernel's work, the smallest of several; and what the work is. None without a loop."""
    own = counts(kernel.instructions)
    work = next((name for name in WORK if own[name]), None)
    all_loops = [counts(body) for body in loops(kernel)]
    if work is None or not all_loops:
        return None
    best = max(all_loops, key=lambda found: (found[work], -found["all"]))
    return (work, best) if best[work] else None
