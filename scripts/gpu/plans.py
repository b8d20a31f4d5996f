"""What is asked of a GPU in each call, in the order of what must not be missed.

call1: does it compute right?   call2: how fast, beside PyTorch?   call3: where does the time go?   call4: what a user does.
"""

import pathlib
from dataclasses import dataclass, field

from .steps import Step

HERE = pathlib.Path(__file__).resolve().parent
SHAPE = "llama3.1-8b"
SMALL = "smollm2-135m"
# Targets of block drafts: one 2048 wide, one 4096.
NARROW, WIDE = "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-8B"
# Kernels that take most of the time of a step.
KERNELS = ("attention_forward", "attention_backward_queries", "attention_backward_keys", "cross_entropy_rows")

# Drafts that are trained from carried features; configurations and stores lie in a folder of the bundle.
METHODS = ("glide", "eagle3", "dflash")
STORE = "{}-store"


@dataclass
class Place:
    """Programs and files of a call."""

    longdraft: pathlib.Path
    python: str
    device: str
    cases: list = field(default_factory=list)
    baselines: pathlib.Path = HERE
    training: pathlib.Path = HERE

    def bench(self, what, *arguments, device=True):
        return [self.longdraft, "bench", *what.split(), *(["--device", self.device] if device else []), *arguments]

    def kernel_check(self, *arguments):
        return [self.longdraft, "kernel-check", "--device", self.device, *arguments, "--json"]

    def pytorch(self, program, *arguments):
        return [self.python, self.baselines / f"pytorch_{program}.py", "--device", self.device, *arguments]

    def train(self, method, device):
        # The configuration asks for the folder by this name.
        return ["env", f"TRAINING={self.training}", self.longdraft, "train", self.training / f"{method}.yaml", f"device={device}", "--json"]

    def probe(self, what):
        return [self.python, HERE / "device.py", what]


def call1(place):
    sanitizer = lambda tool, ceiling: Step(
        tool, ["compute-sanitizer", "--tool", tool, "--error-exitcode", "86", *place.kernel_check("--smoke")], ceiling, "checks",
        needs="compute-sanitizer")
    return [
        Step("machine", place.probe("machine"), 15, "last", decisive=False),
        Step("gpu", ["nvidia-smi"], 15, "text", decisive=False, needs="nvidia-smi"),
        Step("doctor", [place.longdraft, "doctor", "--json"], 20, "last"),
        Step("pool", place.probe("pool"), 25, "last", decisive=False),
        Step("kernels_small", place.kernel_check("--small"), 150, "checks"),
        Step("parity", [place.longdraft, "parity", *place.cases, "--device", place.device, "--json"], 100, "parity"),
        Step("parity_bf16", [place.longdraft, "parity", *place.cases, "--device", place.device, "--precision", "bf16", "--json"], 100,
             "parity"),
        Step("kernels_real", place.kernel_check("--real"), 120, "checks"),
        Step("kernels_speed", place.kernel_check("--bench"), 90, "figures"),
        sanitizer("racecheck", 90),
        sanitizer("memcheck", 90),
        Step("peak", place.probe("peak"), 40, "last", decisive=False),
    ]


def call2(place):
    glide = ("--shape", SHAPE, "--tokens", "32768")
    small = ("--shape", SMALL, "--tokens", "1024")
    # A row as it is published: 512 blocks of 16 slots. Features are drawn, as a store would give them.
    blocks = ("--tokens", "3072", "--blocks", "512", "--block-size", "16", "--slot-decay", "7")
    dflash = lambda shape, layers: place.bench("dflash", "--shape", shape, "--draft-layers", layers, *blocks)
    beside = lambda name, command, ceiling: Step(name, command, ceiling, "figures", decisive=False)
    return [
        Step("gpu", ["nvidia-smi"], 15, "text", decisive=False, needs="nvidia-smi"),
        Step("glide", place.bench("glide --soft", *glide, "--documents", "1,8"), 150, "figures"),
        Step("eagle3", place.bench("eagle3", "--shape", SHAPE, "--tokens", "4096,16384,32768"), 150, "figures"),
        Step("capture", place.bench("capture", "--shape", SHAPE, "--tokens", "4096"), 60, "figures"),
        Step("dflash", dflash(NARROW, "2"), 60, "figures"),
        Step("dflash_8b", dflash(WIDE, "5"), 60, "figures"),
        beside("pytorch_attention", place.pytorch("attention"), 35),
        # Compiling takes most of these; the lengths that matter most come first.
        beside("pytorch_glide", place.pytorch("glide", "--soft", *glide, "--documents", "1,8", "--compile"), 130),
        beside("pytorch_eagle3", place.pytorch("eagle3", "--shape", SHAPE, "--tokens", "4096,32768,16384", "--attention", "flex",
                                               "--compile"), 160),
        Step("glide_135m", place.bench("glide --soft", *small), 30, "figures"),
        Step("eagle3_135m", place.bench("eagle3", *small), 30, "figures"),
        beside("pytorch_glide_135m", place.pytorch("glide", "--soft", *small), 60),
        beside("pytorch_eagle3_135m", place.pytorch("eagle3", *small), 60),
        beside("pytorch_eagle3_explicit", place.pytorch("eagle3", "--shape", SHAPE, "--tokens", "4096", "--attention",
                                                        "explicit"), 60),
        beside("pytorch_glide_eager", place.pytorch("glide", "--soft", *glide), 60),
    ]


def call3(place):
    # One layer of the target: the kernels are the same as with 32, and a profiler runs each of them a dozen times.
    work = place.bench("glide --soft", "--shape", SHAPE, "--layers", "1", "--tokens", "16384", "--warm-ups", "0", "--steps", "1")
    profile = lambda kernel: Step(
        f"profile_{kernel}", ["ncu", "--clock-control", "none", "--set", "full", "--target-processes", "all", "--kernel-name",
                              kernel, "--launch-count", "2", *work], 120, "text", needs="ncu")
    # Two layers of the target show what each takes, as in a pass of 32. EAGLE-3's features are drawn; to capture them takes eight.
    few = ("--warm-ups", "2", "--steps", "5", "--trace")
    trace = lambda what, *arguments, shape=SHAPE: Step(
        f"trace_{what.split()[0]}", place.bench(what, "--shape", shape, *few, *arguments), 60, "figures")
    return [
        Step("gpu", ["nvidia-smi"], 15, "text", decisive=False, needs="nvidia-smi"),
        Step("plain", work, 60, "figures"),
        trace("glide --soft", "--layers", "2", "--tokens", "16384"),
        trace("eagle3", "--tokens", "4096,16384"),
        trace("dflash", "--tokens", "3072", "--blocks", "512", "--block-size", "16", shape=NARROW),
        trace("capture", "--layers", "8", "--tokens", "4096"),
        trace("decode", "--layers", "2", "--rows", "1,8", "--context", "2048"),
        Step("trace_decode_stored", place.bench("decode", "--shape", SHAPE, *few, "--layers", "2", "--rows", "1,8", "--context", "2048",
                                                "--stored", "Q4_K"), 60, "figures"),
        *[profile(kernel) for kernel in KERNELS],
        Step("peak", place.probe("peak"), 40, "last", decisive=False),
    ]


def call4(place):
    curves = ("quickstart/*/metrics.jsonl",)

    def quickstart(name, ceiling, *overrides):
        command = [place.longdraft, "quickstart", "--output", "quickstart", "--json", *overrides]
        return Step(name, command, ceiling, "quickstart", keep=curves)

    def train(name, method, device, ceiling, decisive=True):
        keep = (f"{method}/metrics.jsonl",)
        return Step(name, place.train(method, device), ceiling, "training", decisive=decisive, keep=keep)

    rows = ("--shape", SHAPE, "--rows", "1,2,4,8,16,32", "--context", "2048", "--steps", "30")
    few = ("--shape", SMALL, "--rows", "1,8", "--context", "512", "--steps", "100")
    return [
        Step("gpu", ["nvidia-smi"], 15, "text", decisive=False, needs="nvidia-smi"),
        quickstart("quickstart", 180, f"device={place.device}"),
        quickstart("quickstart_f32", 180, f"device={place.device}", "precision=f32"),
        quickstart("quickstart_cpu", 150, "device=cpu"),
        *[train(f"train_{method}", method, place.device, 150) for method in METHODS],
        Step("decode", place.bench("decode", *rows), 90, "figures"),
        # As a file of Q4_K holds an 8B model, and one of Q8_0 a small one, whose width is no multiple of 256.
        Step("decode_stored", place.bench("decode", *rows, "--stored", "Q4_K"), 90, "figures"),
        Step("decode_135m", place.bench("decode", *few), 40, "figures"),
        Step("decode_135m_starts", place.bench("decode", *few, "--no-graphs"), 40, "figures"),
        Step("decode_135m_stored", place.bench("decode", *few, "--stored", "Q8_0"), 40, "figures"),
        Step("decode_f32", place.bench("decode", *rows, "--precision", "f32"), 90, "figures"),
        # The same steps on the CPU, cut off where time is short: losses are compared as far as they go.
        *[train(f"train_{method}_cpu", method, "cpu", 90, decisive=False) for method in METHODS],
    ]


PLANS = {"call1": call1, "call2": call2, "call3": call3, "call4": call4}


def all_steps(place):
    """Every step by its name. Plans may share a step, but no two steps have one name."""
    found = {}
    for plan in PLANS.values():
        for step in plan(place):
            if found.setdefault(step.name, step) != step:
                raise ValueError(f"two steps are called {step.name}")
    return found


def chosen(place, names):
    """The steps of these names, in this order.

    Raises ValueError if a name is unknown or comes twice."""
    known = all_steps(place)
    for name in names:
        if name not in known:
            raise ValueError(f"no step is called `{name}`: take {', '.join(known)}")
        if names.count(name) > 1:
            raise ValueError(f"`{name}` is there more than once")
    return [known[name] for name in names]
