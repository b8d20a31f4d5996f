// Norms, rotations, gates and sums of rows; formulas in rms_norm.rs, rope.rs, swiglu.rs, rows.rs. values.cu comes before.

DEVICE float add_products(float sum, const Quad &x, const Quad &y) {
    sum = fmaf(x.a, y.a, sum);
    sum = fmaf(x.b, y.b, sum);
    sum = fmaf(x.c, y.c, sum);
    return fmaf(x.d, y.d, sum);
}

DEVICE Quad less_pull(const Quad &pulled, float r, const Quad &x, float back) {
    return {r * pulled.a - x.a * back, r * pulled.b - x.b * back, r * pulled.c - x.c * back, r * pulled.d - x.d * back};
}

// A block a row of H values, whose sum depends on H and the block's threads alone.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm(const float *x, const float *weight, u32 hidden, float eps, float *out) {
    begin_in_turn();
    __shared__ float scratch[33];
    size_t first = (size_t)blockIdx.x * hidden;
    float sum = 0.0f;
    if (hidden % 4 != 0) {
        for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) sum = fmaf(x[first + i], x[first + i], sum);
        float r = 1.0f / sqrtf(block_sum(sum, scratch) / hidden + eps);
        for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) out[first + i] = x[first + i] * r * weight[i];
        return;
    }
    const Quad *row = (const Quad *)(x + first), *weights = (const Quad *)weight;
    Quad *to = (Quad *)(out + first), held[HELD], factors[HELD];
    u32 quads = hidden / 4, beyond = threadIdx.x + HELD * blockDim.x;
#pragma unroll
    for (u32 i = 0; i < HELD; i++) {
        u32 at = threadIdx.x + i * blockDim.x;
        held[i] = at < quads ? row[at] : Quad{0.0f, 0.0f, 0.0f, 0.0f};
        factors[i] = at < quads ? weights[at] : Quad{0.0f, 0.0f, 0.0f, 0.0f};
    }
#pragma unroll
    for (u32 i = 0; i < HELD; i++) sum = add_squares(sum, held[i]);
    for (u32 at = beyond; at < quads; at += blockDim.x) sum = add_squares(sum, row[at]);
    float r = 1.0f / sqrtf(block_sum(sum, scratch) / hidden + eps);
#pragma unroll
    for (u32 i = 0; i < HELD; i++) {
        u32 at = threadIdx.x + i * blockDim.x;
        if (at < quads) to[at] = normed(held[i], r, factors[i]);
    }
    for (u32 at = beyond; at < quads; at += blockDim.x) to[at] = normed(row[at], r, weights[at]);
}
KERNEL(rms_norm)

// `inverse` [R] is kept for the weight's gradient.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm_backward(const float *x, const float *weight, const float *gradient,
                  u32 hidden, float eps, float *dx, float *inverse) {
    begin_in_turn();
    __shared__ float scratch[33];
    size_t first = (size_t)blockIdx.x * hidden;
    float squares = 0.0f, pull = 0.0f;
    bool in_quads = hidden % 4 == 0;
    const Quad *row = (const Quad *)(x + first), *gradients = (const Quad *)(gradient + first);
    const Quad *weights = (const Quad *)weight;
    Quad held[HELD], pulled[HELD];
    u32 quads = in_quads ? hidden / 4 : 0, beyond = threadIdx.x + HELD * blockDim.x;
#pragma unroll
    for (u32 i = 0; i < HELD; i++) {
        u32 at = threadIdx.x + i * blockDim.x;
        held[i] = at < quads ? row[at] : Quad{0.0f, 0.0f, 0.0f, 0.0f};
        pulled[i] = at < quads ? normed(gradients[at], 1.0f, weights[at]) : Quad{0.0f, 0.0f, 0.0f, 0.0f};
    }
#pragma unroll
    for (u32 i = 0; i < HELD; i++) {
        squares = add_squares(squares, held[i]);
        pull = add_products(pull, pulled[i], held[i]);
    }
    for (u32 at = beyond; at < quads; at += blockDim.x) {
        squares = add_squares(squares, row[at]);
        pull = add_products(pull, normed(gradients[at], 1.0f, weights[at]), row[at]);
    }
    for (u32 i = threadIdx.x; i < hidden && !in_quads; i += blockDim.x) {
        float value = x[first + i];
        squares = fmaf(value, value, squares);
        pull = fmaf(gradient[first + i] * weight[i], value, pull);
    }
    float r = 1.0f / sqrtf(block_sum(squares, scratch) / hidden + eps);
    float back = block_sum(pull, scratch) / hidden * r * r * r;
    Quad *to = (Quad *)(dx + first);
#pragma unroll
    for (u32 i = 0; i < HELD; i++) {
        u32 at = threadIdx.x + i * blockDim.x;
        if (at < quads) to[at] = less_pull(pulled[i], r, held[i], back);
    }
    for (u32 at = beyond; at < quads; at += blockDim.x)
        to[at] = less_pull(normed(gradients[at], 1.0f, weights[at]), r, row[at], back);
    for (u32 i = threadIdx.x; i < hidden && !in_quads; i += blockDim.x)
        dx[first + i] = r * gradient[first + i] * weight[i] - x[first + i] * back;
    if (threadIdx.x == 0) inverse[blockIdx.x] = r;
}
KERNEL(rms_norm_backward)

// Sums of a weight's gradient over `rows_each` rows: grid of columns, pieces; out [pieces, H].
extern "C" __global__ void rms_norm_weight(const float *x, const float *gradient, const float *inverse, u32 rows,
                                           u32 hidden, u32 rows_each, float *out) {
    begin_in_turn();
    u32 column = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * rows_each;
    if (column >= hidden) return;
    float sum = 0.0f;
    for (u32 row = first; row < min(first + rows_each, rows); row++)
        sum = fmaf(gradient[(size_t)row * hidden + column], x[(size_t)row * hidden + column] * inverse[row], sum);
    out[(size_t)blockIdx.y * hidden + column] = sum;
}
KERNEL(rms_norm_weight)

// Cos and sin [T, D/2] of position times frequency in f32, taken in f64; a thread an angle.
extern "C" __global__ void rope_table(const u32 *positions, const float *frequencies, u32 count, u32 half, float amplitude,
                                      float *cosine, float *sine) {
    begin_in_turn();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    double angle = (double)((float)positions[i / half] * frequencies[i % half]);
    cosine[i] = (float)cos(angle) * amplitude;
    sine[i] = (float)sin(angle) * amplitude;
}
KERNEL(rope_table)

// Turns x [T, N, D] by the angles [T, D/2]; a thread a pair. `sign` is -1 to turn back.
extern "C" __global__ void rope(const float *x, const float *cosine, const float *sine, u32 pairs, u32 heads, u32 half,
                                float sign, float *out) {
    begin_in_turn();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    u32 dim = i % half, head = i / half, token = head / heads;
    size_t at = (size_t)head * 2 * half + dim;
    float a = x[at], b = x[at + half], c = cosine[token * half + dim], s = sine[token * half + dim] * sign;
    out[at] = turned(a, b, c, s);
    out[at + half] = turned_after(a, b, c, s);
}
KERNEL(rope)

// The same rounded to bf16; a thread takes four pairs, a head has 4 * `each` pairs.
extern "C" __global__ void rope_to_halves(const Quad *x, const Quad *cosine, const Quad *sine, u32 count, u32 heads, u32 each,
                                          FourHalves *out) {
    begin_in_turn();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    u32 place = i % each, head = i / each;
    size_t at = (size_t)head * 2 * each + place, angle = (size_t)(head / heads) * each + place;
    Quad a = x[at], b = x[at + each], c = cosine[angle], s = sine[angle];
    out[at] = {{pack(turned(a.a, b.a, c.a, s.a), turned(a.b, b.b, c.b, s.b)),
                pack(turned(a.c, b.c, c.c, s.c), turned(a.d, b.d, c.d, s.d))}};
    out[at + each] = {{pack(turned_after(a.a, b.a, c.a, s.a), turned_after(a.b, b.b, c.b, s.b)),
                       pack(turned_after(a.c, b.c, c.c, s.c), turned_after(a.d, b.d, c.d, s.d))}};
}
KERNEL(rope_to_halves)

// Values side by side, read or written at once.
struct alignas(16) FourFloats {
    float at[4];
};

// Whether so many values can be read four at a time.
DEVICE bool in_fours(const void *values, u32 count) { return count % 4 == 0 && (size_t)values % 16 == 0; }

// Four values; 0 where there are no more.
DEVICE FourFloats four_of(const float *values, u32 first, u32 count, bool whole) {
    if (whole) return *reinterpret_cast<const FourFloats *>(values + first);
    FourFloats four;
#pragma unroll
    for (u32 k = 0; k < 4; k++) four.at[k] = first + k < count ? values[first + k] : 0.0f;
    return four;
}

// Writes four values, as bf16 if `half`.
DEVICE void put_four(float *out, u32 first, u32 count, bool whole, bool half, FourFloats four) {
    u16 *halves = reinterpret_cast<u16 *>(out);
    if (whole && half) {
        FourHalves pairs = {{pack(four.at[0], four.at[1]), pack(four.at[2], four.at[3])}};
        *reinterpret_cast<FourHalves *>(halves + first) = pairs;
        return;
    }
    if (whole) {
        *reinterpret_cast<FourFloats *>(out + first) = four;
        return;
    }
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        if (first + k >= count) continue;
        if (half) halves[first + k] = (u16)pack(four.at[k], 0.0f);
        else out[first + k] = four.at[k];
    }
}

// Rows `ids` of x, each of so many times 16 bytes; a thread takes 16 bytes.
extern "C" __global__ void some_rows(const FourFloats *x, const u32 *ids, u32 each, u32 count,
                                     FourFloats *out) {
    begin_in_turn();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = x[(size_t)ids[i / each] * each + i % each];
}
KERNEL(some_rows)

// The same of bf16 rows, each of so many times eight values, as f32; a thread takes eight.
extern "C" __global__ void some_wide_rows(const EightHalves *x, const u32 *ids, u32 each, u32 count, FourFloats *out) {
    begin_in_turn();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    EightHalves eight = x[(size_t)ids[i / each] * each + i % each];
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        u32 first = eight.pairs[2 * k], second = eight.pairs[2 * k + 1];
        out[2 * i + k] = {{unpack_low(first), unpack_high(first), unpack_low(second), unpack_high(second)}};
    }
}
KERNEL(some_wide_rows)

// Values rounded to bf16; a thread takes eight.
extern "C" __global__ void to_halves(const float *x, u32 count, u16 *out) {
    begin_in_turn();
    u32 i = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    if (count - i >= 8) {
        FourFloats a = four_of(x, i, count, true), b = four_of(x, i + 4, count, true);
        EightHalves halves = {{pack(a.at[0], a.at[1]), pack(a.at[2], a.at[3]), pack(b.at[0], b.at[1]), pack(b.at[2], b.at[3])}};
        *reinterpret_cast<EightHalves *>(out + i) = halves;
        return;
    }
    for (u32 k = i; k < count; k++) out[k] = (u16)pack(x[k], 0.0f);
}
KERNEL(to_halves)

// The same over the rows of `width` values from row `place` on; `width` is a multiple of eight.
extern "C" __global__ void put_halves(const float *x, const u32 *place, u32 width, u32 count, u16 *out) {
    begin_in_turn();
    u32 i = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    FourFloats a = four_of(x, i, count, true), b = four_of(x, i + 4, count, true);
    EightHalves halves = {{pack(a.at[0], a.at[1]), pack(a.at[2], a.at[3]), pack(b.at[0], b.at[1]), pack(b.at[2], b.at[3])}};
    *reinterpret_cast<EightHalves *>(out + (size_t)place[0] * width + i) = halves;
}
KERNEL(put_halves)

// Columns `from` to `from + columns` of x [R, width]; a thread takes four values of the result.
extern "C" __global__ void some_columns(const float *x, u32 width, u32 from, u32 columns, u32 count,
                                        float *out) {
    begin_in_turn();
    u32 i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    if (width % 4 == 0 && from % 4 == 0 && columns % 4 == 0) {
        FourFloats four = four_of(x + (size_t)(i / columns) * width + from, i % columns, columns, true);
        put_four(out, i, count, true, false, four);
        return;
    }
    for (u32 k = i; k < min(i + 4, count); k++) out[k] = x[(size_t)(k / columns) * width + from + k % columns];
}
KERNEL(some_columns)

// A thread takes four values.
extern "C" __global__ void swiglu(const float *gate, const float *up, u32 count,
                                  float *out) {
    begin_in_turn();
    u32 i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    bool whole = in_fours(gate, count) && in_fours(up, count);
    FourFloats z = four_of(gate, i, count, whole), u = four_of(up, i, count, whole), result;
#pragma unroll
    for (u32 k = 0; k < 4; k++) result.at[k] = z.at[k] / (1.0f + expf(-z.at[k])) * u.at[k];
    put_four(out, i, count, whole, false, result);
}
KERNEL(swiglu)

// The same; both gradients in bf16 if `half`.
extern "C" __global__ void swiglu_backward(const float *gate, const float *up,
                                           const float *gradient, u32 count, u32 half,
                                           float *of_gate, float *of_up) {
    begin_in_turn();
    u32 i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    bool whole = in_fours(gate, count) && in_fours(up, count) && in_fours(gradient, count);
    FourFloats z = four_of(gate, i, count, whole), u = four_of(up, i, count, whole);
    FourFloats g = four_of(gradient, i, count, whole), dz, du;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        float s = 1.0f / (1.0f + expf(-z.at[k]));
        dz.at[k] = g.at[k] * u.at[k] * s * (1.0f + z.at[k] * (1.0f - s));
        du.at[k] = g.at[k] * z.at[k] * s;
    }
    put_four(of_gate, i, count, whole, half, dz);
    put_four(of_up, i, count, whole, half, du);
}
KERNEL(swiglu_backward)

// Row r of the result is its base (0 without one) plus, in their order, the rows `places[i]` of x times
// `weights[i]` (1 without weights), i from `from[r]` to `from[r + 1]`. Grid: rows, blocks of columns.
extern "C" __global__ void sum_rows(const float *x, const float *base, const u32 *from, const u32 *places,
                                    const float *weights, u32 has_base, u32 has_weights, u32 width, float *out) {
    begin_in_turn();
    u32 row = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= width) return;
    float sum = has_base ? base[(size_t)row * width + column] : 0.0f;
    u32 until = from[row + 1];
    for (u32 i = from[row]; i < until; i += 4) {
        // Four reads on their way at a time; the sum stays in order.
        float values[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) values[j] = i + j < until ? x[(size_t)places[i + j] * width + column] : 0.0f;
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            if (i + j < until) sum = has_weights ? fmaf(weights[i + j], values[j], sum) : sum + values[j];
    }
    out[(size_t)row * width + column] = sum;
}
KERNEL(sum_rows)
