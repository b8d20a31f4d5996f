// Products of few rows: out [R, O] = x [R, I] Wᵀ for W [O, I] in f32 or bf16, I even. Every weight is read
// once for ROWS rows, and a row is summed alike whatever is beside it.

#define ROWS 8
#define OUTPUTS 4

struct Pair {
    float first, second;
};

DEVICE Pair pair_of(const float *weights, size_t at) { return {weights[at], weights[at + 1]}; }
DEVICE Pair pair_of(const u16 *weights, size_t at) {
    u32 both = *(const u32 *)(weights + at);
    return {unpack_low(both), unpack_high(both)};
}

// A warp's OUTPUTS columns of `count` rows, at most MOST.
template <class WEIGHT, int MOST>
DEVICE void columns(const float *x, const WEIGHT *w, u32 count, u32 inputs, u32 outputs, u32 first, float *out) {
    int lane = threadIdx.x % 32;
    float sums[MOST][OUTPUTS];
#pragma unroll
    for (int r = 0; r < MOST; r++)
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) sums[r][o] = 0.0f;
    for (u32 i = 2 * lane; i < inputs; i += 64) {
        Pair weights[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) weights[o] = pair_of(w, (size_t)min(first + o, outputs - 1) * inputs + i);
#pragma unroll
        for (int r = 0; r < MOST; r++) {
            Pair own = pair_of(x, (size_t)min((u32)r, count - 1) * inputs + i);
#pragma unroll
            for (int o = 0; o < OUTPUTS; o++)
                sums[r][o] = fmaf(own.second, weights[o].second, fmaf(own.first, weights[o].first, sums[r][o]));
        }
    }
#pragma unroll
    for (int r = 0; r < MOST; r++)
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) {
            float sum = warp_sum(sums[r][o]);
            if (lane == 0 && r < count && first + o < outputs) out[(size_t)r * outputs + first + o] = sum;
        }
}

// Grid: blocks of columns, ROWS rows each.
template <class WEIGHT>
DEVICE void few_rows(const float *x, const WEIGHT *w, u32 rows, u32 inputs, u32 outputs, float *out) {
    u32 first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * OUTPUTS, row = blockIdx.y * ROWS;
    if (first >= outputs) return;
    u32 count = min(rows - row, (u32)ROWS);
    x += (size_t)row * inputs;
    out += (size_t)row * outputs;
    if (count == 1)
        columns<WEIGHT, 1>(x, w, count, inputs, outputs, first, out);
    else if (count <= 4)
        columns<WEIGHT, 4>(x, w, count, inputs, outputs, first, out);
    else
        columns<WEIGHT, ROWS>(x, w, count, inputs, outputs, first, out);
}

extern "C" __global__ void few_rows_f32(const float *x, const float *w, u32 rows, u32 inputs, u32 outputs, float *out) {
    few_rows(x, w, rows, inputs, outputs, out);
}
KERNEL(few_rows_f32)

extern "C" __global__ void few_rows_bf16(const float *x, const u16 *w, u32 rows, u32 inputs, u32 outputs, float *out) {
    few_rows(x, w, rows, inputs, outputs, out);
}
KERNEL(few_rows_bf16)
