// Activations as 8-bit fixed-point numbers, with the bits that the CPU gives them.

typedef unsigned char u8;

// Values with one scale, and words of four codes that they make.
#define BLOCK 32
#define WORDS 8
// Rows whose blocks lie side by side.
#define TILE 16

#ifdef EMULATED
// Rounded each time, as compilers are free not to do with a sum of a product.
DEVICE float product_of(float a, float b) {
    volatile float product = a * b;
    return product;
}
DEVICE float sum_of(float a, float b) { return a + b; }
#else
DEVICE float product_of(float a, float b) { return __fmul_rn(a, b); }
DEVICE float sum_of(float a, float b) { return __fadd_rn(a, b); }
#endif

// 32 values of a row: code x scale each. Three reads of 16 bytes.
struct alignas(16) Fixed {
    u32 codes[WORDS];
    // NaN where a value is not finite, and so is every product.
    float scale;
    // Sum of the values.
    float offset;
    // Sums of the first 16 codes and of the others.
    int sums[2];
};

struct alignas(16) FourValues {
    float at[4];
};

DEVICE Fixed fixed_of(const FourValues values[WORDS]) {
    Fixed out;
    u32 most = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        out.codes[w] = 0;
        // Bits of magnitudes are in the order of the magnitudes, infinity and NaN last.
#pragma unroll
        for (int i = 0; i < 4; i++) most = max(most, bits_of(values[w].at[i]) & 0x7fffffffu);
    }
    out.sums[0] = out.sums[1] = 0;
    out.scale = out.offset = 0.0f;
    if (most >= 0x7f800000u) {
        out.scale = out.offset = float_of(0x7fc00000u);
        return out;
    }
    float largest = float_of(most), inverse = 127.0f / largest;
    // Zeros, or numbers below 1e-34.
    if ((bits_of(inverse) & 0x7fffffffu) >= 0x7f800000u) return out;
    // Added to a number below 2^22, it leaves the nearest integer in the low bits.
    const float rounding = 12582912.0f;
#pragma unroll
    for (int w = 0; w < WORDS; w++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float moved = sum_of(product_of(values[w].at[i], inverse), rounding);
            int code = (int)(bits_of(moved) - bits_of(rounding));
            out.sums[w / (WORDS / 2)] += code;
            out.codes[w] |= ((u32)code & 255u) << (8 * i);
        }
    out.scale = largest / 127.0f;
    out.offset = product_of(out.scale, (float)(out.sums[0] + out.sums[1]));
    return out;
}

// x [R, I], I in blocks of 32, from a multiple of 16 bytes on. out: of every tile of 16 rows, or of what is left, the
// blocks of the first 32 inputs, then those of the next. A thread makes a block, one of `count`.
extern "C" __global__ void fix_rows(const float *x, u32 rows, u32 inputs, u32 count, Fixed *out) {
    begin_in_turn();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const FourValues *from = (const FourValues *)(x + (size_t)i * BLOCK);
    FourValues values[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; w++) values[w] = from[w];
    u32 parts = inputs / BLOCK, row = i / parts, first = row / TILE * TILE;
    out[(size_t)first * parts + i % parts * min(rows - first, (u32)TILE) + row % TILE] = fixed_of(values);
}
KERNEL(fix_rows)
