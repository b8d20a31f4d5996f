#!/usr/bin/env python3
"""What the compiler made of the kernels for NVIDIA GPUs, where no GPU is at hand:

    LONGDRAFT_KERNEL_CODE=FOLDER cargo test -p longdraft-kernels --features cuda --lib cuda::
    scripts/gpu/compiled.py FOLDER --report target/cuda-compiled.md
    scripts/gpu/compiled.py FOLDER --page           tables of docs/results/gpu-compiled.md
    scripts/gpu/compiled.py FOLDER --allow          writes what is there into compiled.json, for the kernels that it lists

Registers and spilled bytes are the assembler's words; threads and dynamic memory are those that the program starts a kernel with;
blocks a multiprocessor follow from these by the vendor's limits; instructions are counted in the disassembly (nvdisasm), once
each: in the kernel, and in the loop that does most of its work. All ways through a loop count.

A * in a name of compiled.json stands for sizes of tiles, which differ between compute capabilities.

Exit code 0: no listed kernel spills more than compiled.json allows, and of none fit fewer blocks. 1: one does. 2: wrong use.
"""

import argparse
import fnmatch
import json
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from gpu import occupancy, sass  # noqa: E402

# Columns of instructions: what they are called, and the kinds that are added up.
COLUMNS = [("tensor", "tensor"), ("FFMA", "FFMA"), ("IDP", "IDP"), ("MUFU", "MUFU"), ("SHFL", "SHFL"),
           *((f"{kind} {width}", f"{kind}.{width}") for kind in ("LDG", "STG", "LDS", "STS") for width in (128, 64, 32, 16)),
           ("LDSM", "LDSM"), ("cp.async", "LDGSTS"), ("barriers", "barriers"), ("local", "local")]
# Columns of a loop on the page.
OF_LOOPS = [("tensor", ["tensor"]), ("FFMA", ["FFMA"]), ("IDP", ["IDP"]), ("MUFU", ["MUFU"]), ("LDG", ["LDG.128", "LDG.64", "LDG.32", "LDG.16"]),
            ("LDS", ["LDS.128", "LDS.64", "LDS.32", "LDS.16"]), ("LDSM", ["LDSM"]), ("cp.async", ["LDGSTS"]), ("local", ["local"])]


def capability(gpu):
    return f"{gpu // 10}.{gpu % 10}"


def disassembly(code):
    """Of a program: a text beside its code if there is one, else what nvdisasm says."""
    text = code.with_suffix(".sass")
    if text.exists():
        return text.read_text()
    home = os.environ.get("CUDA_HOME")
    tool = shutil.which("nvdisasm", path=f"{home}/bin") if home else None
    tool = tool or shutil.which("nvdisasm")
    if not tool:
        raise ValueError("there is no nvdisasm: run scripts/cuda-toolchain, and source its environment")
    shown = subprocess.run([tool, "-c", code], capture_output=True, text=True)
    if shown.returncode:
        raise ValueError(f"nvdisasm: {code.name}: {shown.stderr.strip()}")
    return shown.stdout


def read(folder):
    """All kernels of a folder, with what fits and what they consist of."""
    known = folder / "kernels.jsonl"
    if not known.exists():
        raise ValueError(f"{known} is not there: the test of the kernels leaves it (see --help)")
    found, programs = [json.loads(line) for line in known.read_text().splitlines()], {}
    for one in found:
        code = folder / f"sm_{one['gpu']}-{one['program']}.cubin"
        if code not in programs:
            programs[code] = sass.kernels(disassembly(code))
        kernel = programs[code].get(one["kernel"])
        if kernel is None:
            raise ValueError(f"{code.name}: its disassembly has no {one['kernel']}")
        one["fits"] = occupancy.resident(one["gpu"], one["threads"], one["registers"], one["static"], one["dynamic"])
        one["counts"], one["loop"] = sass.counts(kernel.instructions), sass.busiest(kernel)
        one["name"] = f"{one['program']} {one['kernel']}"
    return found


def listed(found, allowed):
    """The kernels of each name that is listed, by compute capability."""
    own = {name: {} for name in allowed}
    for one in found:
        for name in allowed:
            if fnmatch.fnmatchcase(one["name"], name):
                other = own[name].setdefault(one["gpu"], one)
                if other is not one:
                    raise ValueError(f"{name} for {capability(one['gpu'])} is both {other['name']} and {one['name']}")
    return own


def row(cells):
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(heads, rows):
    return [row(heads), "|" + "---|" * len(heads), *map(row, rows)]


def per_work(loop):
    """Instructions of a loop for each of its products."""
    work, counts = loop
    return f"{counts['all'] / counts[work]:.1f}"


def report_row(one):
    fits, counts, loop = one["fits"], one["counts"], one["loop"]
    most = occupancy.LIMITS[one["gpu"]].warps
    of_loop = [loop[1]["all"], f"{per_work(loop)} a {loop[0]}", loop[1]["local"]] if loop else ["-"] * 3
    return [f"`{one['name']}`", one["threads"], one["registers"], one["spilled"], one["static"], one["dynamic"], fits.blocks,
            f"{fits.warps} of {most}", fits.by, counts["all"], *(counts[kind] or "" for _, kind in COLUMNS), *of_loop]


def report(found):
    """A table a compute capability, of all kernels."""
    heads = ["kernel", "threads", "registers", "spilled, B", "static, B", "dynamic, B", "blocks", "warps", "held back by", "instructions",
             *(name for name, _ in COLUMNS), "in the loop", "for each product", "local in the loop"]
    lines = ["# Compiled kernels", "", f"NVRTC {found[0]['nvrtc']}. Blocks and warps are those of a multiprocessor at once.", ""]
    for gpu in sorted({one["gpu"] for one in found}):
        lines += [f"## Compute capability {capability(gpu)}", ""]
        lines += table(heads, [report_row(one) for one in found if one["gpu"] == gpu]) + [""]
    return "\n".join(lines)


def cell(one):
    """What the page says of a kernel on a compute capability."""
    return f"{one['registers']} / {one['spilled']} / {one['fits'].blocks}" if one else "-"


def page(found, own):
    """Tables of the listed kernels."""
    gpus = sorted({one["gpu"] for one in found})
    rows, of_loops = [], []
    for name, kernels in own.items():
        threads = sorted({one["threads"] for one in kernels.values()}, reverse=True)
        rows.append([f"`{name}`", " or ".join(map(str, threads)), *(cell(kernels.get(gpu)) for gpu in gpus)])
        # The newest that has the most instructions of its own first.
        one = next((kernels[gpu] for gpu in (90, *gpus) if gpu in kernels), None)
        if one and one["loop"]:
            counts = one["loop"][1]
            of_loops.append([f"`{name}`", capability(one["gpu"]), counts["all"], per_work(one["loop"]),
                             *(sum(counts[kind] for kind in kinds) or "" for _, kinds in OF_LOOPS)])
    heads = ["loop of", "for", "instructions", "for each product", *(name for name, _ in OF_LOOPS)]
    return "\n".join([*table(["kernel", "threads", *map(capability, gpus)], rows), "", *table(heads, of_loops)])


def problems(own, allowed):
    """What the listed kernels may not do."""
    wrong = []
    for name, gpus in allowed.items():
        for gpu, (spilled, blocks) in gpus.items():
            one, where = own[name].get(int(gpu)), f"{name} for {capability(int(gpu))}"
            if one is None:
                wrong.append(f"{where} is not there any more: take it out of compiled.json and the page")
            elif one["spilled"] > spilled:
                wrong.append(f"{where} spills {one['spilled']} bytes, {spilled} are allowed")
            elif one["fits"].blocks < blocks:
                wrong.append(f"{where}: a multiprocessor holds {one['fits'].blocks} blocks, it has to hold {blocks}: {one['fits'].by}")
    return wrong


def allow(path, own):
    """Writes what is there, a line a kernel."""
    figures = {name: {str(gpu): [one["spilled"], one["fits"].blocks] for gpu, one in sorted(kernels.items())}
               for name, kernels in own.items()}
    path.write_text("{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(gpus)}" for name, gpus in figures.items()) + "\n}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE", help="writes a table of all kernels")
    parser.add_argument("--page", action="store_true", help="prints tables of the listed kernels")
    parser.add_argument("--allow", action="store_true", help="writes what is allowed anew")
    parser.add_argument("--allowed", type=pathlib.Path, default=HERE / "compiled.json", metavar="FILE",
                        help="spilled bytes and blocks of each listed kernel by compute capability")
    arguments = parser.parse_args()
    try:
        found, allowed = read(arguments.folder), json.loads(arguments.allowed.read_text())
        own = listed(found, allowed)
    except (OSError, ValueError) as error:
        print(f"compiled.py: {error}", file=sys.stderr)
        return 2
    if arguments.allow:
        allow(arguments.allowed, own)
        return 0
    if arguments.report:
        arguments.report.write_text(report(found))
    if arguments.page:
        print(page(found, own))
    wrong = problems(own, allowed)
    for line in wrong:
        print(f"FAIL {line}", file=sys.stderr)
    if not wrong:
        print(f"{len(found)} kernels, {len(allowed)} of them listed: none spills more than is allowed, none has fewer blocks", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
