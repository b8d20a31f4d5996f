// What all kernels share: products of 16-bit tiles on tensor cores, sums over a warp and a block.
// NVRTC compiles this text before a kernel's own; no headers are needed. Tests compile the same text
// for the CPU, where emulator.h supplies threads, barriers and the instructions below.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#ifndef EMULATED
#define METHOD __device__ __forceinline__
#define DEVICE METHOD
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
// Makes a kernel known to the CPU's stand-in.
#define KERNEL(name)

// Two f32 rounded to bf16, `low` in the low half.
DEVICE u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

DEVICE float unpack_low(u32 both) { return __uint_as_float(both << 16); }
DEVICE float unpack_high(u32 both) { return __uint_as_float(both & 0xffff0000u); }

// d += a b for a [16, 16] and b [16, 8] in bf16, d in f32. Lane l with g = l / 4, t = l % 4 holds of a the
// pairs (row g, columns 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..), of b the pairs (rows 2t..,
// column g), (rows 2t + 8.., column g), of d (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
DEVICE void mma(float d[4], const u32 a[4], const u32 b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// Begins to copy 8 values to a block's memory, or writes 8 zeros there. Both places are multiples of 16 bytes.
DEVICE void copy_ahead(u16 *to, const u16 *from, bool some) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(some ? 16 : 0));
}

// What was begun so far is one group.
DEVICE void end_copies() { asm volatile("cp.async.commit_group;"); }

// Waits until at most so many of this thread's newest groups are under way.
template <int GROUPS> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory"); }

// Four tiles of 8 x 8 values in a block's memory. Lanes 0.., 8.., 16.. and 24.. say where their rows begin. Lane l gets
// of each tile the pair of row l / 4 and columns 2 (l % 4)...
DEVICE void load_tiles(u32 tiles[4], const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(shared_address(row)));
}

// The same of turned tiles: lane l gets the pair of rows 2 (l % 4).. and column l / 4.
DEVICE void load_turned_tiles(u32 tiles[4], const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(shared_address(row)));
}

// 2 to the power of a number, with some 2^-22.
DEVICE float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}

#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
#else
DEVICE void wait_for_kernels_before() {}
DEVICE void let_next_begin() {}
#endif

// Whether this block may be among the first, if so many run on a multiprocessor at once.
DEVICE bool begins_first(u32 at_once) {
    u32 multiprocessors;
    asm("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
    return blockIdx.x < at_once * multiprocessors;
}

// Brings the 128 bytes around a place closer. What is read later is what is there then.
DEVICE void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
#endif

// The first words of a kernel that may be started while those before it run: the next one may be started when all blocks
// have said this, and whatever the kernels before write is there afterwards. All threads say it.
DEVICE void begin_in_turn() {
    let_next_begin();
    wait_for_kernels_before();
}

#define EVERY_LANE 0xffffffffu

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(EVERY_LANE, value, step);
    return value;
}

DEVICE float warp_max(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(EVERY_LANE, value, step));
    return value;
}

// The sum over a block of whole warps; every thread gets it. `scratch` has 33 values.
DEVICE float block_sum(float value, float *scratch) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = warp_sum(value);
    __syncthreads();
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    if (warp == 0) {
        float all = warp_sum(lane < blockDim.x / 32 ? scratch[lane] : 0.0f);
        if (lane == 0) scratch[32] = all;
    }
    __syncthreads();
    return scratch[32];
}
