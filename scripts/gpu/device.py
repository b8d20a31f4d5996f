"""What a machine with a GPU is and can do, each in one JSON line: device.py machine | pool | peak"""

import json
import os
import platform
import shutil
import sys
import time


def machine():
    """Kernel, processors, memory, disk, Python."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    libc = " ".join(platform.libc_ver())
    return {"kernel": platform.release(), "processors": os.cpu_count(), "memory_gib": pages * page >> 30, "libc": libc,
            "disk_free_gib": shutil.disk_usage(".").free >> 30, "python": platform.python_version()}


def pool():
    """Whether stream-ordered allocation works, which longdraft needs and PyTorch does not use."""
    import cupy
    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    start = time.perf_counter()
    values = cupy.arange(1 << 20, dtype=cupy.float32)
    total = float(values.sum())
    del values
    cupy.cuda.Device().synchronize()
    return {"works": total == (1 << 19) * ((1 << 20) - 1), "seconds": time.perf_counter() - start}


def peak():
    """The device's own peak in products and copies, by PyTorch."""
    import torch

    def rate(work, call):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        return work * 20 / (time.perf_counter() - start)

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 4096, device="cuda")
    x = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "bf16_tflop_s": rate(2 * 8192**3, lambda: a @ a) / 1e12, "f32_tflop_s": rate(2 * 4096**3, lambda: b @ b) / 1e12,
            "copy_gb_s": rate(2 * x.numel(), lambda: y.copy_(x)) / 1e9}


if __name__ == "__main__":
    what = {"machine": machine, "pool": pool, "peak": peak}[sys.argv[1]]
    print(json.dumps({"what": what.__name__, **what()}))
