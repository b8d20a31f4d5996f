// Norms, rotations, gates and sums of rows; formulas in rms_norm.rs, rope.rs, swiglu.rs, rows.rs.

// A block a row of H values; `inverse` [R] is kept for the weight's gradient.
extern "C" __global__ void rms_norm(const float *x, const float *weight, u32 hidden, float eps, float *out) {
    __shared__ float scratch[33];
    const float *row = x + (size_t)blockIdx.x * hidden;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) sum = fmaf(row[i], row[i], sum);
    float r = 1.0f / sqrtf(block_sum(sum, scratch) / hidden + eps);
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) out[(size_t)blockIdx.x * hidden + i] = row[i] * r * weight[i];
}
KERNEL(rms_norm)

extern "C" __global__ void rms_norm_backward(const float *x, const float *weight, const float *gradient, u32 hidden,
                                             float eps, float *dx, float *inverse) {
    __shared__ float scratch[33];
    size_t first = (size_t)blockIdx.x * hidden;
    float squares = 0.0f, pull = 0.0f;
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) {
        float value = x[first + i];
        squares = fmaf(value, value, squares);
        pull = fmaf(gradient[first + i] * weight[i], value, pull);
    }
    float r = 1.0f / sqrtf(block_sum(squares, scratch) / hidden + eps);
    float back = block_sum(pull, scratch) / hidden * r * r * r;
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x)
        dx[first + i] = r * gradient[first + i] * weight[i] - x[first + i] * back;
    if (threadIdx.x == 0) inverse[blockIdx.x] = r;
}
KERNEL(rms_norm_backward)

// Sums of a weight's gradient over `rows_each` rows: grid of columns, pieces; out [pieces, H].
extern "C" __global__ void rms_norm_weight(const float *x, const float *gradient, const float *inverse, u32 rows,
                                           u32 hidden, u32 rows_each, float *out) {
    u32 column = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * rows_each;
    if (column >= hidden) return;
    float sum = 0.0f;
    for (u32 row = first; row < min(first + rows_each, rows); row++)
        sum = fmaf(gradient[(size_t)row * hidden + column], x[(size_t)row * hidden + column] * inverse[row], sum);
    out[(size_t)blockIdx.y * hidden + column] = sum;
}
KERNEL(rms_norm_weight)

// Turns x [T, N, D] by the angles [T, D/2]; a thread a pair. `sign` is -1 to turn back.
extern "C" __global__ void rope(const float *x, const float *cosine, const float *sine, u32 pairs, u32 heads, u32 half,
                                float sign, float *out) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    u32 dim = i % half, head = i / half, token = head / heads;
    size_t at = (size_t)head * 2 * half + dim;
    float a = x[at], b = x[at + half], c = cosine[token * half + dim], s = sine[token * half + dim] * sign;
    out[at] = a * c - b * s;
    out[at + half] = b * c + a * s;
}
KERNEL(rope)

extern "C" __global__ void swiglu(const float *gate, const float *up, u32 count, float *out) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}
KERNEL(swiglu)

extern "C" __global__ void swiglu_backward(const float *gate, const float *up, const float *gradient, u32 count,
                                           float *of_gate, float *of_up) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float z = gate[i], g = gradient[i], s = 1.0f / (1.0f + expf(-z));
    of_gate[i] = g * up[i] * s * (1.0f + z * (1.0f - s));
    of_up[i] = g * z * s;
}
KERNEL(swiglu_backward)

// Row r of the result is its base (0 without one) plus, in their order, the rows `places[i]` of x times
// `weights[i]` (1 without weights), i from `from[r]` to `from[r + 1]`. Grid: rows, blocks of columns.
extern "C" __global__ void sum_rows(const float *x, const float *base, const u32 *from, const u32 *places,
                                    const float *weights, u32 has_base, u32 has_weights, u32 width, float *out) {
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
