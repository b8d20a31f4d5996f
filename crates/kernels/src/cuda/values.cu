// Values side by side, as kernels of rows read and write them.

// What a thread reads at once.
struct __align__(16) Quad {
    float a, b, c, d;
};

// Quads of a row that a thread keeps.
#define HELD 4

// bf16 values by pairs.
struct alignas(8) FourHalves {
    u32 pairs[2];
};
struct alignas(16) EightHalves {
    u32 pairs[4];
};

DEVICE float add_squares(float sum, const Quad &x) {
    sum = fmaf(x.a, x.a, sum);
    sum = fmaf(x.b, x.b, sum);
    sum = fmaf(x.c, x.c, sum);
    return fmaf(x.d, x.d, sum);
}

DEVICE Quad normed(const Quad &x, float r, const Quad &weight) {
    return {x.a * r * weight.a, x.b * r * weight.b, x.c * r * weight.c, x.d * r * weight.d};
}

// Both values of a pair that is turned by an angle: with the same bits in every kernel, whatever a compiler fuses.
DEVICE float turned(float a, float b, float cosine, float sine) { return fmaf(a, cosine, -(b * sine)); }
DEVICE float turned_after(float a, float b, float cosine, float sine) { return fmaf(b, cosine, a * sine); }
