"""A rank of NCCL's stand-in: exchange.py LIBRARY PLAY RANK SIZE ID. Prints what it came to as JSON."""

import array
import ctypes
import json
import struct
import sys

F16, F32, BF16, SUM = 6, 7, 9, 0


class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


library = ctypes.CDLL(sys.argv[1])
for name in ("recording_stream_new", "recording_event_new"):
    getattr(library, name).restype = ctypes.c_void_p


class Work(ctypes.Structure):
    _fields_ = [("run", ctypes.CFUNCTYPE(None, ctypes.c_void_p)), ("to", ctypes.c_void_p), ("from_", ctypes.c_void_p),
                ("bytes", ctypes.c_size_t), ("value", ctypes.c_int)]


class Stream:
    def __init__(self):
        self.handle = ctypes.c_void_p(library.recording_stream_new())
        self.kept = []

    def call(self, function):
        """Runs a function in the stream's order."""
        work = Work(run=Work._fields_[0][1](lambda _: function()))
        self.kept.append(work)
        library.recording_submit(self.handle, work, 0)

    def event(self):
        event = ctypes.c_void_p(library.recording_event_new())
        library.recording_event_record(event, self.handle)
        return event


def values(kind, numbers):
    """Memory that holds numbers of a type."""
    if kind == F32:
        packed = array.array("f", numbers).tobytes()
    elif kind == F16:
        packed = b"".join(struct.pack("<e", number) for number in numbers)
    else:
        packed = b"".join(struct.pack("<f", number)[2:] for number in numbers)
    return ctypes.create_string_buffer(packed, len(packed))


def numbers(kind, memory):
    if kind == F32:
        return list(array.array("f", memory.raw))
    width = [memory.raw[at:at + 2] for at in range(0, len(memory.raw), 2)]
    return [struct.unpack("<e", half)[0] if kind == F16 else struct.unpack("<f", b"\0\0" + half)[0] for half in width]


def collective(comm, stream, kind, name, own, count, taken):
    """Starts one of `count` values; returns where `taken` will be."""
    into = values(kind, [-1] * taken)
    call = getattr(library, name)
    counted = ctypes.c_size_t(count)
    # It may be read and written for longer than it is of interest.
    stream.kept += [own, into]
    code = call(own, into, counted, kind, comm, stream.handle) if name == "ncclAllGather" else call(
        own, into, counted, kind, SUM, comm, stream.handle)
    return into, code


def join(rank, size, name):
    comm = ctypes.c_void_p()
    code = library.ncclCommInitRank(ctypes.byref(comm), size, Id(name.encode()), rank)
    return comm, code


def exchange(comm, rank, size):
    stream, told = Stream(), {}
    for kind in (F32, F16, BF16):
        own = values(kind, [rank + 1, 2 * rank, -0.5, 100 * rank, 1, 0.25][: 2 * size])
        library.ncclGroupStart()
        summed, _ = collective(comm, stream, kind, "ncclAllReduce", own, 2 * size, 2 * size)
        part, _ = collective(comm, stream, kind, "ncclReduceScatter", own, 2, 2)
        whole, _ = collective(comm, stream, kind, "ncclAllGather", own, 2, 2 * size)
        nothing, _ = collective(comm, stream, kind, "ncclAllGather", own, 0, 1)
        ended = library.ncclGroupEnd()
        library.recording_event_is_done(stream.event(), 1)
        told[kind] = [ended, *(numbers(kind, memory) for memory in (summed, part, whole, nothing))]
    return told


def halves(comm):
    """Which bits do not come through alone, of all numbers of 16 bits."""
    stream, wrong = Stream(), []
    for kind in (F16, BF16):
        own = ctypes.create_string_buffer(b"".join(struct.pack("<H", bits) for bits in range(1 << 16)), 2 << 16)
        alone, _ = collective(comm, stream, kind, "ncclAllReduce", own, 1 << 16, 1 << 16)
        library.recording_event_is_done(stream.event(), 1)
        infinite = 0x7C00 if kind == F16 else 0x7F80
        pairs = enumerate(struct.unpack(f"<{1 << 16}H", alone.raw))
        # A sum has no negative zero, and a number that is none is any of them.
        wrong += [(kind, bits, found) for bits, found in pairs
                  if found != bits and bits != 0x8000 and not (bits & 0x7FFF > infinite < found & 0x7FFF)]
    return wrong


def order(comm, rank, size):
    """What a stream sees that waits for a collective, and one that does not; and a collective that waits for what it reads, or not."""
    stream, waits, hurries, seen = Stream(), Stream(), Stream(), {}
    own = values(F32, [rank + 1])
    into, _ = collective(comm, stream, F32, "ncclAllReduce", own, 1, 1)
    end = stream.event()
    library.recording_stream_wait(waits.handle, end)
    waits.call(lambda: seen.update(waits=numbers(F32, into)))
    hurries.call(lambda: seen.update(hurries=numbers(F32, into)))
    seen["is done"] = library.recording_event_is_done(end, 0)
    library.recording_stream_synchronise(waits.handle)
    library.recording_stream_synchronise(hurries.handle)
    seen["is done later"] = library.recording_event_is_done(end, 0)
    return seen


def fails(comm, rank, size):
    """The error of the second collective, whether it is over before and after it is aborted, and what becomes of a third."""
    stream, state, told = Stream(), ctypes.c_int(), []
    own = values(F32, [rank])
    for _ in range(2):
        collective(comm, stream, F32, "ncclAllReduce", own, 1, 1)
    end = stream.event()
    while library.ncclCommGetAsyncError(comm, ctypes.byref(state)) == 0 and not state.value:
        if sys.argv[2] == "hangs" and rank == 1:
            break
    told += [state.value, library.recording_event_is_done(end, 1 if sys.argv[2] == "errs" and rank == 1 else 0)]
    library.ncclCommAbort(comm)
    told.append(library.recording_event_is_done(end, 1))
    return told + [collective(comm, stream, F32, "ncclAllReduce", own, 1, 1)[1]]


def main():
    play, rank, size = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if play == "id":
        name = Id()
        library.ncclGetUniqueId(ctypes.byref(name))
        return name.bytes.decode()
    comm, code = join(rank, size, sys.argv[5])
    if code:
        return {"init": code}
    if play == "exchange":
        return exchange(comm, rank, size)
    if play == "halves":
        return halves(comm)
    if play == "order":
        return order(comm, rank, size)
    if play == "differ":
        stream, state = Stream(), ctypes.c_int()
        collective(comm, stream, F32, "ncclAllReduce", values(F32, [0] * 4), 2 + rank, 4)
        while library.ncclCommGetAsyncError(comm, ctypes.byref(state)) == 0 and not state.value:
            pass
        return state.value
    return fails(comm, rank, size)


print(json.dumps(main()))
