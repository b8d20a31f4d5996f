"""Steps of a plan: each a program in a session of its own, with a ceiling, whose output stays whatever becomes of it."""

import os
import pathlib
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass

TIMED_OUT = 124
NOT_THERE = 127
# A shell's code for a program that SIGXFSZ ends: it wrote too much.
WROTE_TOO_MUCH = 153
SKIPPED = None


@dataclass
class Step:
    """`command` may run for `ceiling` seconds; `reader` names what reads its output."""

    name: str
    command: list
    ceiling: float
    reader: str = "lines"
    decisive: bool = True  # Its failure fails the whole.
    keep: tuple = ()  # Files that it leaves in its folder and that are kept, as patterns.
    needs: str = ""  # A program without which the step is skipped.


@dataclass
class Limits:
    """What a step may take beside time, in bytes; beyond that it is stopped."""

    output: int = 32 << 20
    scratch: int = 48 << 30
    free: int = 1 << 30
    grace: float = 3.0


def size_of(folder):
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:
                pass
    return total


def excess(files, scratch, limits):
    """Which limit is passed, in words, or None."""
    if sum(os.fstat(file.fileno()).st_size for file in files) > limits.output:
        return f"it printed more than {limits.output >> 20} MiB"
    if shutil.disk_usage(scratch).free < limits.free:
        return f"less than {limits.free >> 20} MiB of the disk are free"
    if size_of(scratch) > limits.scratch:
        return f"it wrote more than {limits.scratch >> 20} MiB"
    return None


def end_group(process, grace):
    """Ends a step and all that it started in its session."""
    for number, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            continue
        # The first one is gone; what it started may need the second signal.
    process.poll()


def watch(process, files, scratch, seconds, limits):
    """Waits for a step. Returns its exit code and why it was stopped, if it was."""
    deadline, look = time.monotonic() + seconds, 0.0
    while process.poll() is None:
        now = time.monotonic()
        if now >= deadline:
            return TIMED_OUT, f"stopped after {seconds:.0f} s"
        if now >= look:
            problem = excess(files, scratch, limits)
            if problem:
                return WROTE_TOO_MUCH, f"stopped: {problem}"
            # Looking takes time where there are many files.
            look = time.monotonic() + max(0.5, 10 * (time.monotonic() - now))
        time.sleep(0.02)
    code = process.returncode
    return (code if code >= 0 else 128 - code), None


def keep_files(step, scratch, folder):
    """Copies what a step leaves: `NAME.keep/PLACE`, slashes of the place as dashes."""
    kept = folder / f"{step.name}.keep"
    for pattern in step.keep:
        for path in sorted(scratch.glob(pattern)):
            kept.mkdir(exist_ok=True)
            shutil.copyfile(path, kept / str(path.relative_to(scratch)).replace("/", "-"))


def run(step, folder, environment, seconds, limits):
    """Runs a step in an empty folder and returns its exit code. `folder` gets NAME.out, NAME.err and NAME.status, also where
    the step is stopped; its own folder goes."""
    scratch = folder / f"{step.name}.scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    problem = None
    with open(folder / f"{step.name}.out", "wb") as out, open(folder / f"{step.name}.err", "wb") as err:
        try:
            process = subprocess.Popen([str(word) for word in step.command], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                       cwd=scratch, env={**environment, "TMPDIR": str(scratch)}, start_new_session=True)
        except OSError as error:
            code, problem = NOT_THERE, str(error)
        else:
            try:
                code, problem = watch(process, (out, err), scratch, seconds, limits)
            finally:
                end_group(process, limits.grace)
    try:
        keep_files(step, scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if problem:
        with open(folder / f"{step.name}.err", "a", errors="replace") as err:
            err.write(f"\ngpu-check: {problem}\n")
    (folder / f"{step.name}.status").write_text(f"{code}\n")
    return code


def output(folder, name, kind):
    """What a step printed, or nothing."""
    path = pathlib.Path(folder) / f"{name}.{kind}"
    return path.read_text(errors="replace") if path.is_file() else ""
