// AdamW's step on values and moments, and sums of squares for the norm; formulas in adamw/mod.rs.

#define BLOCK 16384

// `halves` are the new values in bf16, written if `has_halves`.
extern "C" __global__ void adamw(const float *theta, const float *m, const float *v, const float *g, u32 count,
                                 float beta1, float beta2, float keep1, float keep2, float correct1, float correct2,
                                 float shrink, float rate, float eps, float grad_scale, u32 has_halves, float *new_theta,
                                 float *new_m, float *new_v, u16 *halves) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float gradient = g[i] * grad_scale;
    float first = beta1 * m[i] + keep1 * gradient, second = beta2 * v[i] + keep2 * gradient * gradient;
    new_m[i] = first;
    new_v[i] = second;
    float value = theta[i] * shrink - rate * (first * correct1) / (sqrtf(second * correct2) + eps);
    new_theta[i] = value;
    if (has_halves) halves[i] = (u16)pack(value, 0.0f);
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
