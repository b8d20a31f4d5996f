"""Where the shared libraries lie that a program needs: CUDA's are in the toolkit or in Python's packages, and never on the path."""

import glob
import os
import re
import subprocess
import tempfile

SITES = "import site, sys; print('\\n'.join([*sys.path, *site.getsitepackages(), site.getusersitepackages()]))"
TOOLKITS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/*/lib",
            "/usr/local/cuda*/compat", "/opt/cuda/lib64")


def sites(python):
    """Package folders of a Python."""
    try:
        shown = subprocess.run([python, "-c", SITES], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        shown = ""
    return [line for line in dict.fromkeys(shown.splitlines()) if line and os.path.isdir(line)]


def candidates(python, toolkits=TOOLKITS):
    """Folders that may hold libraries of CUDA, in the order in which they are asked."""
    found = []
    for site in sites(python):
        packages = glob.glob(os.path.join(glob.escape(site), "nvidia", "**", "lib*.so*"), recursive=True)
        found += sorted({os.path.dirname(path) for path in packages})
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        found += [os.path.join(home, "lib64"), os.path.join(home, "lib")] if home else []
    for pattern in toolkits:
        found += sorted(glob.glob(pattern), reverse=True)
    return list(dict.fromkeys(folder for folder in found if os.path.isdir(folder)))


def stand_in(name, sources, folder, *options):
    """A library of that name from C texts, its symbols under the version that NVIDIA's have: the library's name. The loader stops at
    a library without versions where a program asks for them."""
    with tempfile.TemporaryDirectory() as work:
        parts, versions = [], os.path.join(work, "versions")
        with open(versions, "w") as file:
            file.write(f"{name} {{ global: *; }};\n")
        for number, source in enumerate(sources):
            parts.append(os.path.join(work, f"{number}.o"))
            subprocess.run(["cc", "-c", "-w", "-fPIC", "-O1", *options, "-o", parts[-1], "-x", "c", "-"], input=source, text=True, check=True)
        subprocess.run(["cc", "-shared", f"-Wl,-soname,{name}", f"-Wl,--version-script,{versions}", "-o", os.path.join(folder, name), *parts],
                       check=True)


def missing(program, path):
    """Names of libraries that the loader does not find, and what else it complains about, with this LD_LIBRARY_PATH."""
    try:
        shown = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=60,
                               env={**os.environ, "LD_LIBRARY_PATH": path})
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], [f"ldd: {error}"]
    names = re.findall(r"^\s*(\S+) => not found", shown.stdout, re.M)
    # A glibc or libstdc++ that is too old.
    versions = re.findall(r"version `[^']+' not found[^\n]*", shown.stdout + shown.stderr)
    return sorted(set(names)), sorted(set(versions))


def find(program, python, last_resort=None, toolkits=TOOLKITS):
    """LD_LIBRARY_PATH with what has to be appended to it, and a report: folders, what is missing, whether the last resort had to
    be taken."""
    path = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    names, versions = missing(program, ":".join(path))
    added, left = [], candidates(python, toolkits) if names else []
    if last_resort and os.path.isdir(last_resort):
        left.append(str(last_resort))
    while names:
        folder = next((f for f in left if any(os.path.exists(os.path.join(f, name)) for name in names)), None)
        if folder is None:
            break
        left.remove(folder)
        added.append(folder)
        names, versions = missing(program, ":".join(path + added))
    stand_in = bool(last_resort) and str(last_resort) in added
    report = {"added": added, "missing": names, "versions": versions, "stand_in": stand_in}
    return ":".join(path + added), report


def describe(report):
    """Lines for a person."""
    lines = [f"libraries from {folder}" for folder in report["added"]]
    lines += [f"MISSING library {name}: the program cannot start" for name in report["missing"]]
    lines += [f"MISSING {version}" for version in report["versions"]]
    if report["stand_in"]:
        lines.append("a stand-in for libcurand is used: nothing that draws on the GPU can run (`longdraft bench`)")
    return lines


def needs(program):
    """Newest versions of GLIBC and GLIBCXX that a program asks for, by name."""
    shown = subprocess.run(["readelf", "--version-info", program], capture_output=True, text=True, check=True).stdout
    newest = {}
    for kind, version in re.findall(r"Name: (GLIBCXX|GLIBC|CXXABI)_([0-9.]+)", shown):
        newest[kind] = max(newest.get(kind, ()), tuple(map(int, version.split("."))))
    return {kind: ".".join(map(str, version)) for kind, version in sorted(newest.items())}


