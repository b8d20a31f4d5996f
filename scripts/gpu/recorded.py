"""Starts a program with CUDA where no GPU is, over a driver that records how it is called, and says what is wrong with that.

What kernels compute is checked elsewhere (emulator, kernel-check). This checks what both take for granted: one stream for all
work but uploads and collectives, no events where the stream orders everything (but those of a trace, around every start), no grid that
a driver refuses, memory that stays with the process, copies through page-locked memory. Collectives begin after the work before
them, and their end is waited for.
"""

import pathlib
import subprocess

from .libraries import stand_in

HERE = pathlib.Path(__file__).resolve().parent / "recording"
RELEASE_THRESHOLD = 4
# Bytes from which on features come down through page-locked memory.
LARGE = 1 << 20
# Graphs that are kept at a time, where one sequence is decoded.
GRAPHS = 4
# What has to say something. Everything else of these libraries answers 0.
PRODUCTS = """
#include "streams.h"
static void *of_handle;
int cublasCreate_v2(void **handle) { *handle = (void *)0x77; return 0; }
int cublasSetStream_v2(void *handle, void *stream) { of_handle = stream; return 0; }
static int product(void) {
  recording_write("product %p\\n", of_handle);
  return 0;
}
"""
CURAND = "int curandCreateGenerator(void **generator, int kind) { *generator = (void *)0x99; return 0; }\n"


def undefined(program, prefix):
    shown = subprocess.run(["nm", "--dynamic", "--undefined-only", program], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].split("@")[0] for line in shown.splitlines()}
    return sorted(name for name in names if name.startswith(prefix) and name[len(prefix):][:1].isupper())


def compile_library(name, sources, names, folder, *options):
    """A library of that name: C texts, and what else the program asks for as functions that do nothing."""
    there = "".join(sources)
    rest = "".join(f"int {function}(void) {{ return 0; }}\n" for function in names if f"{function}(" not in there)
    # Prototypes of the header would not fit the rest.
    stand_in(name, (*sources, rest), folder, "-I", HERE, *options)


def build(program, include, linked, folder):
    """Fills `folder` with libraries to put before those of the toolkit."""
    folder.mkdir(parents=True, exist_ok=True)
    of_cublas = undefined(program, "cublas")
    gemms = "".join(f"int {name}(void) {{ return product(); }}\n" for name in of_cublas if "gemm" in name.lower())
    text = lambda name: (HERE / name).read_text()
    for name in linked:
        kind = name.split(".so")[0]
        if kind == "libcuda":
            # The others write and order their work by this one.
            compile_library(name, (text("driver.c"), text("streams.c")), undefined(program, "cu"), folder, "-I", include)
        elif kind == "libcublas":
            compile_library(name, (PRODUCTS + gemms,), of_cublas, folder)
        elif kind == "libcurand":
            compile_library(name, (CURAND,), undefined(program, "curand"), folder)
        elif kind == "libnccl":
            compile_library(name, (text("nccl.c"),), undefined(program, "nccl"), folder)


def problems(calls, uploads, traced=False, captures=False):
    """What a record of calls shows to be wrong; `uploads`: whether the program sent values ahead, `traced`: whether it was to time
    every start, `captures`: whether it brought features down."""
    lines = [line.split() for line in calls.read_text().splitlines()]
    of = lambda *kinds: [line for line in lines if line[0] in kinds]
    launches, found = of("launch"), []
    if not launches and not uploads:
        return ["no kernel was started"]
    working = {line[1] for line in of("launch", "product", "fill", "copy", "mark", "graph")}
    beside = {line[1] for line in of("stream")} - working
    ahead = [line for line in of("upload") if line[1] in beside]
    if len(working) > 1:
        found.append(f"work on {len(working)} streams: {' '.join(sorted(working))}")
    if "(nil)" in working:
        found.append("work on the stream that waits for all others")
    for line in launches + of("start"):
        if any(not 0 < int(blocks) <= most for blocks, most in zip(line[2:5], (2**31 - 1, 65535, 65535))):
            found.append(f"a grid of {' x '.join(line[2:5])} blocks: {line[6]}")
    # What is sent ahead has events of its own, and so has what goes to other processes.
    if len(of("event")) > max(8, 3 * len(ahead)) + 2 * len(of("group")):
        found.append(f"{len(of('event'))} events: tensors are tracked one by one")
    found += marks(lines, traced) + collectives(lines) + graphs(lines)
    if not any(int(line[1]) == RELEASE_THRESHOLD and int(line[2]) == 2**64 - 1 for line in of("pool")):
        found.append("freed memory goes back to the driver at every synchronisation")
    if uploads and not ahead:
        found.append("no values were sent on a stream of their own")
    if ahead and not of("pinned"):
        found.append("values are sent from memory that is not page-locked")
    down = [line[3] for line in of("download") if int(line[2]) >= LARGE]
    if captures and "pinned" not in down:
        found.append("no features came down through page-locked memory")
    if captures and "pageable" in down:
        found.append("features come down into memory that is not page-locked")
    return found


def graphs(lines):
    """What is wrong with what is recorded to be made again: kernels alone, none of them on the stream that works, no more graphs than are
    kept."""
    of = lambda *kinds: [line for line in lines if line[0] in kinds]
    found = [f"`{line[1]}` while starts are recorded" for line in of("refused")]
    made = 0
    for line in of("made", "dropped"):
        made += 1 if line[0] == "made" else -1
        if made > GRAPHS:
            return [*found, f"more than {GRAPHS} graphs are kept"]
    if {line[1] for line in of("start")} & {line[1] for line in of("launch", "graph")}:
        found.append("starts are recorded on the stream that works")
    return found


def marks(lines, traced):
    """What is wrong with the events that take the time: two around each start while a trace is on, else none."""
    found, places = [], [place for place, line in enumerate(lines) if line[0] == "mark"]
    if not traced:
        return [f"{len(places)} timed events without a trace"] if places else []
    if not places:
        return ["a trace without timed events"]
    for first, last in zip(places[::2], [*places[1::2], len(lines)]):
        inside = [line for line in lines[first + 1:last] if line[0] in ("launch", "product")]
        if len(inside) != 1:
            found.append(f"{len(inside)} starts between two events of a trace")
    return found[:4]


def collectives(lines):
    """What is wrong with the order of collectives and the device's other work."""
    found, streams = [], {line[1] for line in lines if line[0] == "group"}
    # Streams that wait for what was asked for before, and collectives whose end nobody knows.
    joined, under_way = set(), set()
    for kind, *words in lines:
        if kind == "wait":
            under_way.discard(words[1])
            if words[0] in streams and words[1] not in streams:
                joined.add(words[0])
        elif kind in ("seen", "synchronise"):
            under_way.discard(words[0])
        elif kind == "abort":
            under_way.clear()
        elif kind == "failed":
            found.append(f"NCCL refuses a call: {' '.join(words)}")
        elif kind == "group":
            if words[0] not in joined:
                found.append("a collective begins before what it is made of is there")
            if words[0] in under_way:
                found.append("a collective follows one whose end nobody waits for")
            joined.discard(words[0])
            under_way.add(words[0])
        elif kind in ("upload", "download", "allocate", "free") and words[0] in streams:
            found.append(f"{kind} on a stream of collectives")
    if under_way:
        found.append("nobody waits for the end of the last collective")
    return list(dict.fromkeys(found))
