// AdamW's step on values and moments, and sums of squares for the norm; formulas in adamw/mod.rs.

#define BLOCK 16384

// Values side by side, read or written at once.
struct alignas(16) Four {
    float at[4];
};
struct alignas(8) FourHalves {
    u32 pairs[2];
};

DEVICE bool in_fours(const void *values) { return (size_t)values % 16 == 0; }
DEVICE Four &four_at(float *values, u32 first) { return *reinterpret_cast<Four *>(values + first); }
DEVICE Four four_at(const float *values, u32 first) { return *reinterpret_cast<const Four *>(values + first); }

// The factors of a step.
struct Step {
    float beta1, beta2, keep1, keep2, correct1, correct2, shrink, rate, eps, grad_scale;

    // Values are read by fours or singly, by their address, and both must give the same bits. So multiply-adds are explicit:
    // a compiler finds none to fuse.
    METHOD void take(float &theta, float &m, float &v, float g) const {
        float gradient = g * grad_scale;
        m = fmaf(beta1, m, keep1 * gradient);
        v = fmaf(beta2, v, keep2 * gradient * gradient);
        float root = sqrtf(v * correct2) + eps;
        theta = fmaf(theta, shrink, -(rate * (m * correct1) / root));
    }
};

// A thread takes four values. `halves` are the new ones in bf16, written if `has_halves`.
extern "C" __global__ void adamw(const float *theta, const float *m, const float *v, const float *g, u32 count,
                                 float beta1, float beta2, float keep1, float keep2, float correct1, float correct2,
                                 float shrink, float rate, float eps, float grad_scale, u32 has_halves, float *new_theta,
                                 float *new_m, float *new_v, u16 *halves) {
    u32 i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    Step step = {beta1, beta2, keep1, keep2, correct1, correct2, shrink, rate, eps, grad_scale};
    if (count - i >= 4 && in_fours(theta) && in_fours(m) && in_fours(v) && in_fours(g)) {
        Four values = four_at(theta, i), first = four_at(m, i), second = four_at(v, i), gradients = four_at(g, i);
#pragma unroll
        for (u32 k = 0; k < 4; k++) step.take(values.at[k], first.at[k], second.at[k], gradients.at[k]);
        four_at(new_theta, i) = values;
        four_at(new_m, i) = first;
        four_at(new_v, i) = second;
        FourHalves rounded = {{pack(values.at[0], values.at[1]), pack(values.at[2], values.at[3])}};
        if (has_halves) *reinterpret_cast<FourHalves *>(halves + i) = rounded;
        return;
    }
#pragma unroll 1
    for (u32 k = i; k < min(i + 4, count); k++) {
        float value = theta[k], first = m[k], second = v[k];
        step.take(value, first, second, g[k]);
        new_theta[k] = value;
        new_m[k] = first;
        new_v[k] = second;
        if (has_halves) halves[k] = (u16)pack(value, 0.0f);
    }
}
KERNEL(adamw)

// The sum of squares of BLOCK values for every block.
extern "C" __global__ void square_sums(const float *g, u32 count, float *sums) {
    __shared__ float scratch[33];
    u32 first = blockIdx.x * BLOCK, end = min(first + BLOCK, count);
    float sum = 0.0f;
    for (u32 i = first + threadIdx.x; i < end; i += blockDim.x) sum = fmaf(g[i], g[i], sum);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
KERNEL(square_sums)
