// Norms, rotations and gates of what a frozen network computes in bf16; formulas in rms_norm.rs, rope.rs, swiglu.rs. All
// is computed in f32 and rounded once. values.cu comes before.

DEVICE float value_of(const float *x, size_t at) { return x[at]; }
DEVICE float value_of(const u16 *x, size_t at) { return float_of((u32)x[at] << 16); }

// Four values from a place that is a multiple of four.
DEVICE Quad quad_of(const float *x, size_t at) { return *(const Quad *)(x + at); }
DEVICE Quad quad_of(const u16 *x, size_t at) {
    FourHalves four = *(const FourHalves *)(x + at);
    return {unpack_low(four.pairs[0]), unpack_high(four.pairs[0]), unpack_low(four.pairs[1]), unpack_high(four.pairs[1])};
}

DEVICE void put(u16 *out, size_t at, const Quad &x) {
    FourHalves four = {{pack(x.a, x.b), pack(x.c, x.d)}};
    *(FourHalves *)(out + at) = four;
}

// A block a row of H values. Sums run as those of rms_norm in rows.cu do, so the result is theirs, rounded.
template <class T> DEVICE void norm_row(const T *x, const float *weight, u32 hidden, float eps, u16 *out) {
    __shared__ float scratch[33];
    x += (size_t)blockIdx.x * hidden;
    out += (size_t)blockIdx.x * hidden;
    bool in_fours = hidden % 4 == 0;
    u32 quads = in_fours ? hidden / 4 : 0, beyond = threadIdx.x + HELD * blockDim.x;
    Quad held[HELD];
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < HELD; i++) {
        u32 at = threadIdx.x + i * blockDim.x;
        held[i] = at < quads ? quad_of(x, 4 * at) : Quad{0.0f, 0.0f, 0.0f, 0.0f};
    }
#pragma unroll
    for (u32 i = 0; i < HELD; i++) sum = add_squares(sum, held[i]);
    for (u32 at = beyond; at < quads; at += blockDim.x) sum = add_squares(sum, quad_of(x, 4 * at));
    for (u32 i = threadIdx.x; i < hidden && !in_fours; i += blockDim.x) sum = fmaf(value_of(x, i), value_of(x, i), sum);
    float r = 1.0f / sqrtf(block_sum(sum, scratch) / hidden + eps);
#pragma unroll
    for (u32 i = 0; i < HELD; i++) {
        u32 at = threadIdx.x + i * blockDim.x;
        if (at < quads) put(out, 4 * at, normed(held[i], r, quad_of(weight, 4 * at)));
    }
    for (u32 at = beyond; at < quads; at += blockDim.x)
        put(out, 4 * at, normed(quad_of(x, 4 * at), r, quad_of(weight, 4 * at)));
    for (u32 i = threadIdx.x; i < hidden && !in_fours; i += blockDim.x)
        out[i] = (u16)pack(value_of(x, i) * r * weight[i], 0.0f);
}

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_to_halves(const float *x, const float *weight, u32 hidden, float eps, u16 *out) {
    norm_row(x, weight, hidden, eps, out);
}
KERNEL(rms_norm_to_halves)

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_of_halves(const u16 *x, const float *weight, u32 hidden, float eps, u16 *out) {
    norm_row(x, weight, hidden, eps, out);
}
KERNEL(rms_norm_of_halves)

// Turns x [T, N, D] by the angles [T, D/2]. D/2 is even: a thread takes two neighbours of either half of a head.
extern "C" __global__ void rope_halves(const u32 *__restrict__ x, const float *__restrict__ cosine,
                                       const float *__restrict__ sine, u32 count, u32 heads, u32 half,
                                       u32 *__restrict__ out) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, quarter = half / 2;
    if (i >= count) return;
    u32 place = i % quarter, head = i / quarter;
    size_t at = (size_t)head * half + place, angle = (size_t)(head / heads) * half + 2 * place;
    u32 a = x[at], b = x[at + quarter];
    float c = cosine[angle], s = sine[angle], next_c = cosine[angle + 1], next_s = sine[angle + 1];
    float low = unpack_low(a), high = unpack_high(a), low_after = unpack_low(b), high_after = unpack_high(b);
    out[at] = pack(turned(low, low_after, c, s), turned(high, high_after, next_c, next_s));
    out[at + quarter] = pack(turned_after(low, low_after, c, s), turned_after(high, high_after, next_c, next_s));
}
KERNEL(rope_halves)

DEVICE float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// A thread takes eight values.
extern "C" __global__ void swiglu_halves(const u16 *__restrict__ gate, const u16 *__restrict__ up, u32 count,
                                         u16 *__restrict__ out) {
    u32 i = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    if (count % 8 == 0 && (size_t)gate % 16 == 0 && (size_t)up % 16 == 0) {
        EightHalves z = *(const EightHalves *)(gate + i), u = *(const EightHalves *)(up + i), result;
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            result.pairs[k] = pack(gated(unpack_low(z.pairs[k]), unpack_low(u.pairs[k])),
                                   gated(unpack_high(z.pairs[k]), unpack_high(u.pairs[k])));
        *(EightHalves *)(out + i) = result;
        return;
    }
    for (u32 k = i; k < min(i + 8, count); k++) out[k] = (u16)pack(gated(value_of(gate, k), value_of(up, k)), 0.0f);
}
KERNEL(swiglu_halves)
