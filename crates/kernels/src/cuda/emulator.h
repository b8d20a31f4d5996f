// A CPU's stand-in for a GPU: the text of the kernels, compiled as C++, runs block by block; the
// threads of a block are fibres that hand over at barriers, shuffles and products of tiles. Slow, and
// made for tests alone: indices, masks, formulas and the host's launches are what it checks, and of races
// between barriers those that show where threads run one after the other, from the first to the last or back; not the
// hardware's rounding of sums.
#pragma once
#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <sys/mman.h>
#include <tuple>
#include <ucontext.h>
#include <unistd.h>
#include <utility>
#include <vector>

#define EMULATED 1
#define __global__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __restrict__
#define __shared__ static __attribute__((section("block_memory")))
#define DEVICE static inline
#define METHOD inline

struct Three {
    unsigned x, y, z;
};
static Three threadIdx, blockIdx, blockDim, gridDim;

template <class T> static inline T min(T a, T b) { return a < b ? a : b; }
template <class T> static inline T max(T a, T b) { return a > b ? a : b; }

// Where the linker lays out a program's `__shared__` values, but for those of templates.
extern char __start_block_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_block_memory[] __attribute__((weak, visibility("hidden")));

namespace emulator {
const size_t STACK = 128 * 1024;

inline size_t up_to(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
} // namespace emulator

// A kernel's memory: multiples of 16 bytes, begun with 0xff, where an access after the end ends the process. Null if there
// is none.
extern "C" void *emulator_memory(size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE), own = emulator::up_to(bytes, 16), pages = emulator::up_to(own, page);
    void *base = mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    char *end = static_cast<char *>(base) + pages;
    mprotect(end, page, PROT_NONE);
    std::memset(end - own, 0xff, own);
    return end - own;
}
extern "C" void emulator_free(void *at, size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE), own = emulator::up_to(bytes, 16), pages = emulator::up_to(own, page);
    munmap(static_cast<char *>(at) + own - pages, pages + page);
}

namespace emulator {

// 16 bytes on their way to a block's memory; without a source zeros.
struct Copy {
    uint16_t *to;
    const uint16_t *from;
};

// What threads wait for until all of them that have not returned have come.
struct Barrier {
    unsigned running, waiting, passed;

    // A thread that has returned holds up nobody.
    void leave() {
        running--;
        open_if_all();
    }
    void open_if_all() {
        if (waiting < running || waiting == 0) return;
        waiting = 0;
        passed++;
    }
};

struct Fibre {
    std::unique_ptr<char[]> stack{new char[STACK]};
    // Where it began, and where it goes on.
    ucontext_t first;
    jmp_buf next;
    bool begun = false, done;
    // The barrier that it waits for, which had been passed so often when it came.
    const Barrier *at;
    unsigned passed;
    // Barriers of the warp that it has come to.
    unsigned warp_barriers;
    // Copies that it began, by groups; the last one is still open.
    std::vector<std::vector<Copy>> copies;
};

// Fibres are kept for the next block. The first of them are its threads.
static std::vector<std::unique_ptr<Fibre>> fibres;
static std::vector<char> shared_memory;
static jmp_buf scheduler;
static unsigned current;
static bool backwards;
static void (*body)(void *);
static void *body_arguments;
static Barrier block, warps[64];
// What the lanes of each warp lay out for one another, twice for steps that overtake.
static uint32_t slots[2][64][32][6];

// Jumps leave the mask of signals as it is: switching contexts would ask the system each time.
__attribute__((noinline)) static void hand_over() {
    if (!_setjmp(fibres[current]->next)) _longjmp(scheduler, 1);
}

static void entry() {
    for (;;) {
        body(body_arguments);
        fibres[current]->done = true;
        block.leave();
        warps[current / 32].leave();
        hand_over();
    }
}

// Until the fibre hands over.
__attribute__((noinline)) static void resume(Fibre &fibre) {
    if (_setjmp(scheduler)) return;
    if (fibre.begun) _longjmp(fibre.next, 1);
    fibre.begun = true;
    setcontext(&fibre.first);
}

inline void wait_at(Barrier &barrier) {
    unsigned passed = barrier.passed;
    barrier.waiting++;
    barrier.open_if_all();
    if (barrier.passed != passed) return;
    fibres[current]->at = &barrier;
    fibres[current]->passed = passed;
    hand_over();
}

inline void wait_for_block() { wait_at(block); }

inline void wait_for_warp() {
    fibres[current]->warp_barriers++;
    wait_at(warps[current / 32]);
}

inline uint32_t (*laid_out())[6] { return slots[fibres[current]->warp_barriers % 2][current / 32]; }

template <class T> inline T from_lane(T value, unsigned lane) {
    auto *warp = laid_out();
    std::memcpy(warp[current % 32], &value, 4);
    wait_for_warp();
    std::memcpy(&value, warp[lane % 32], 4);
    return value;
}

inline void run_block(unsigned threads) {
    while (fibres.size() < threads) {
        fibres.emplace_back(new Fibre);
        Fibre &fibre = *fibres.back();
        getcontext(&fibre.first);
        fibre.first.uc_stack.ss_sp = fibre.stack.get();
        fibre.first.uc_stack.ss_size = STACK;
        makecontext(&fibre.first, entry, 0);
    }
    block = {threads, 0, 0};
    for (unsigned first = 0; first < threads; first += 32) warps[first / 32] = {min(threads - first, 32u), 0, 0};
    for (unsigned i = 0; i < threads; i++) {
        Fibre &fibre = *fibres[i];
        fibre.done = false;
        fibre.at = nullptr;
        fibre.warp_barriers = 0;
        fibre.copies.resize(1);
        fibre.copies.front().clear();
    }
    // What does not wait for a barrier finds other threads further behind, or further ahead, in every second block.
    backwards = !backwards;
    while (block.running > 0) {
        bool any = false;
        for (unsigned i = 0; i < threads; i++) {
            current = backwards ? threads - 1 - i : i;
            Fibre &fibre = *fibres[current];
            if (fibre.done || (fibre.at && fibre.at->passed == fibre.passed)) continue;
            fibre.at = nullptr;
            any = true;
            threadIdx = {current, 0, 0};
            resume(fibre);
        }
        // All wait for others: on a GPU for ever.
        if (!any) __builtin_trap();
    }
}

// Threads of the last kernel that waited for the kernels before it.
static unsigned long long waits;

template <class... A, size_t... I> void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::decay_t<A> *>(arguments[I])...);
}

// Static: the loader shares the variables of any other template between a process's libraries, and so its threads.
template <class... A>
static void launch(void (*kernel)(A...), const unsigned *grid, unsigned threads, unsigned shared_bytes,
                   void **arguments) {
    static std::tuple<void (*)(A...), void **> now;
    now = {kernel, arguments};
    body = [](void *) { call(std::get<0>(now), std::get<1>(now), std::index_sequence_for<A...>{}); };
    blockDim = {threads, 1, 1};
    gridDim = {grid[0], grid[1], grid[2]};
    waits = 0;
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                // What a block finds in its memory is never to matter.
                shared_memory.assign(shared_bytes + 16, char(0xff));
                if (__start_block_memory) std::memset(__start_block_memory, 0xff, __stop_block_memory - __start_block_memory);
                run_block(threads);
            }
}
} // namespace emulator

extern "C" unsigned long long emulator_waits() { return emulator::waits; }

static inline void wait_for_kernels_before() { emulator::waits++; }
static inline void let_next_begin() {}
static inline bool begins_first(unsigned) { return true; }
static inline void prefetch(const void *) {}

static inline void __syncthreads() { emulator::wait_for_block(); }
template <class T> static inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulator::from_lane(value, (emulator::current % 32) ^ mask);
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline uint32_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static inline uint32_t pack(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
static inline float unpack_low(uint32_t both) { return float_of(both << 16); }
static inline float unpack_high(uint32_t both) { return float_of(both & 0xffff0000u); }

static inline void mma(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    auto *warp = emulator::laid_out();
    unsigned lane = emulator::current % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) warp[lane][i] = a[i];
    for (int i = 0; i < 2; i++) warp[lane][4 + i] = b[i];
    emulator::wait_for_warp();
    for (int i = 0; i < 4; i++) {
        unsigned row = g + (i / 2) * 8, column = 2 * t + i % 2;
        double sum = d[i];
        for (unsigned k = 0; k < 16; k++) {
            unsigned half = k / 8, pair = k % 8 / 2;
            uint32_t of_a = warp[row % 8 * 4 + pair][half * 2 + row / 8];
            uint32_t of_b = warp[column * 4 + pair][4 + half];
            sum += double(k % 2 ? unpack_high(of_a) : unpack_low(of_a)) *
                   double(k % 2 ? unpack_high(of_b) : unpack_low(of_b));
        }
        d[i] = float(sum);
    }
}

// What is copied is there when the thread waits for it, and NaN as soon as it is begun: who reads before, or still reads
// what was there, finds that.
static inline void copy_ahead(uint16_t *to, const uint16_t *from, bool some) {
    if (((uintptr_t)to | (some ? (uintptr_t)from : 0)) % 16) __builtin_trap();
    std::memset(to, 0xff, 16);
    emulator::fibres[emulator::current]->copies.back().push_back({to, some ? from : nullptr});
}
static inline void end_copies() { emulator::fibres[emulator::current]->copies.emplace_back(); }
template <int GROUPS> static inline void wait_for_copies() {
    auto &copies = emulator::fibres[emulator::current]->copies;
    while (copies.size() > GROUPS + 1) {
        for (const auto &copy : copies.front()) {
            if (copy.from) std::memcpy(copy.to, copy.from, 16);
            else std::memset(copy.to, 0, 16);
        }
        copies.erase(copies.begin());
    }
}

static inline void load_tiles(uint32_t tiles[4], const uint16_t *row) {
    auto *warp = emulator::laid_out();
    unsigned lane = emulator::current % 32;
    std::memcpy(warp[lane], &row, sizeof row);
    emulator::wait_for_warp();
    for (unsigned i = 0; i < 4; i++) {
        const uint16_t *from;
        std::memcpy(&from, warp[8 * i + lane / 4], sizeof from);
        std::memcpy(&tiles[i], from + lane % 4 * 2, 4);
    }
}
static inline void load_turned_tiles(uint32_t tiles[4], const uint16_t *row) {
    auto *warp = emulator::laid_out();
    unsigned lane = emulator::current % 32;
    std::memcpy(warp[lane], &row, sizeof row);
    emulator::wait_for_warp();
    for (unsigned i = 0; i < 4; i++) {
        const uint16_t *low, *high;
        std::memcpy(&low, warp[8 * i + lane % 4 * 2], sizeof low);
        std::memcpy(&high, warp[8 * i + lane % 4 * 2 + 1], sizeof high);
        tiles[i] = low[lane / 4] | uint32_t(high[lane / 4]) << 16;
    }
}
static inline float power_of_two(float exponent) { return std::exp2(exponent); }

#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(emulator::shared_memory.data())
#define KERNEL(name)                                                                                                    \
    extern "C" void launch_##name(const unsigned *grid, unsigned threads, unsigned shared_bytes, void **arguments) {    \
        emulator::launch(name, grid, threads, shared_bytes, arguments);                                                 \
    }
