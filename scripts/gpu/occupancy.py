"""How many blocks of a kernel a multiprocessor holds at once, by the vendor's published limits of each compute capability."""

from collections import namedtuple

WARP = 32
# What all of these capabilities have: registers of a multiprocessor, in so many parts; what a warp's registers and a block's memory are
# rounded up to; bytes of memory that the system keeps of every block.
REGISTERS, PARTS, REGISTER_UNIT, MEMORY_UNIT, KEPT = 65_536, 4, 256, 128, 1024
MOST_REGISTERS = 255

# Most warps and blocks of a multiprocessor, and bytes of its shared memory.
Limits = namedtuple("Limits", "warps blocks memory")
LIMITS = {
    80: Limits(64, 32, 164 << 10),
    89: Limits(48, 24, 100 << 10),
    90: Limits(64, 32, 228 << 10),
    100: Limits(64, 32, 228 << 10),
}

# `by`: what holds back a further block.
Resident = namedtuple("Resident", "blocks warps by")


def up(value, unit):
    return -(-value // unit) * unit


def by_registers(registers, warps):
    """Blocks of so many warps, each of which lies in one part with all of its registers."""
    if registers > MOST_REGISTERS:
        return 0
    of_warp = up(max(registers, 1) * WARP, REGISTER_UNIT)
    # A start is refused as if all parts had as many of the block's warps.
    if of_warp * up(warps, PARTS) > REGISTERS:
        return 0
    return REGISTERS // PARTS // of_warp * PARTS // warps


def resident(gpu, threads, registers, static, dynamic):
    """Of a kernel with so many threads a block, registers a thread, and bytes of static and dynamic memory a block."""
    limits, warps = LIMITS[gpu], -(-threads // WARP)
    memory = up(static + KEPT, MEMORY_UNIT) + up(dynamic, MEMORY_UNIT)
    held = {"warps": limits.warps // warps, "blocks": limits.blocks, "memory": limits.memory // memory,
            "registers": by_registers(registers, warps)}
    by = min(held, key=held.get)
    return Resident(held[by], held[by] * warps, by)
