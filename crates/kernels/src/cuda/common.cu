// What all kernels share: products of 16-bit tiles on tensor cores, sums over a warp and a block.
// NVRTC compiles this text before a kernel's own; no headers are needed. Tests compile the same text
// for the CPU, where emulator.h supplies threads, barriers and the two instructions below.

typedef unsigned int u32;
typedef unsigned short u16;

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
#endif

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
