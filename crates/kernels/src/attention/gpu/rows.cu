// What attention has beside ranges of keys, in f32: a warp for each row or single key. A range's kernels (tiles.cu,
// pipelined.cu, groups.cu) leave single keys out. HEAD_DIM is set when it is compiled, and HALVES: whether queries, keys
// and values are bf16.

#if HALVES
typedef u16 Factor;
#else
typedef float Factor;
#endif

#define OWN ((HEAD_DIM + 31) / 32)

// What a warp's lanes have of one head: dimensions lane, lane + 32, ...
struct Head {
    float values[OWN];
    METHOD void load(const float *from) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int dim = 32 * i + threadIdx.x % 32;
            values[i] = dim < HEAD_DIM ? from[dim] : 0.0f;
        }
    }
    METHOD void load(const u16 *from) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int dim = 32 * i + threadIdx.x % 32;
            values[i] = dim < HEAD_DIM ? unpack_low(from[dim]) : 0.0f;
        }
    }
    METHOD void store(float *to) const {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int dim = 32 * i + threadIdx.x % 32;
            if (dim < HEAD_DIM) to[dim] = values[i];
        }
    }
    METHOD float dot(const Head &other) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; i++) sum = fmaf(values[i], other.values[i], sum);
        return warp_sum(sum);
    }
    // own · shrink + other · weight
    METHOD void add(float shrink, const Head &other, float weight) {
#pragma unroll
        for (int i = 0; i < OWN; i++) values[i] = fmaf(weight, other.values[i], values[i] * shrink);
    }
};

// rowsum(dO ∘ O) of every row.
extern "C" __global__ void attention_delta(const float *out, const float *gradient, u32 rows, float *delta) {
    u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    Head own, through;
    own.load(out + (size_t)row * HEAD_DIM);
    through.load(gradient + (size_t)row * HEAD_DIM);
    float sum = own.dot(through);
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}
KERNEL(attention_delta)

// Adds single keys to the result of the ranges, by its log-sum-exp; that of a row without a range is -INFINITY, and 0
// afterwards if it sees nothing at all. Rows are (token, head) pairs.
extern "C" __global__ void attention_singles_forward(const Factor *q, const Factor *k, const Factor *v, const u32 *singles,
                                           const u32 *singles_end, u32 rows, u32 heads, u32 kv_heads, float scale,
                                           const float *of_ranges, const float *lse_of_ranges, float *out, float *lse) {
    u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    u32 token = row / heads, head = row % heads / (heads / kv_heads);
    Head own, sum, other;
    own.load(q + (size_t)row * HEAD_DIM);
    sum.load(of_ranges + (size_t)row * HEAD_DIM);
    float most = lse_of_ranges[row], total = most == -INFINITY ? 0.0f : 1.0f;
    for (u32 i = token ? singles_end[token - 1] : 0; i < singles_end[token]; i++) {
        size_t key = ((size_t)singles[i] * kv_heads + head) * HEAD_DIM;
        other.load(k + key);
        float score = own.dot(other) * scale;
        float largest = fmaxf(most, score), shrink = expf(most - largest), weight = expf(score - largest);
        most = largest;
        total = fmaf(total, shrink, weight);
        other.load(v + key);
        sum.add(shrink, other, weight);
    }
    float share = total > 0.0f ? 1.0f / total : 0.0f;
    sum.add(share, sum, 0.0f);
    sum.store(out + (size_t)row * HEAD_DIM);
    if (threadIdx.x % 32 == 0) lse[row] = total > 0.0f ? most + logf(total) : 0.0f;
}
KERNEL(attention_singles_forward)

// Adds what single keys give to dQ.
extern "C" __global__ void attention_singles_backward_queries(const Factor *q, const Factor *k, const Factor *v, const float *gradient,
                                                    const float *lse, const float *delta, const u32 *singles,
                                                    const u32 *singles_end, u32 rows, u32 heads, u32 kv_heads,
                                                    float scale, const float *of_ranges, float *dq) {
    u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    u32 token = row / heads, head = row % heads / (heads / kv_heads);
    Head own, through, sum, of_key, of_value;
    own.load(q + (size_t)row * HEAD_DIM);
    through.load(gradient + (size_t)row * HEAD_DIM);
    sum.load(of_ranges + (size_t)row * HEAD_DIM);
    for (u32 i = token ? singles_end[token - 1] : 0; i < singles_end[token]; i++) {
        size_t key = ((size_t)singles[i] * kv_heads + head) * HEAD_DIM;
        of_key.load(k + key);
        of_value.load(v + key);
        float weight = expf(own.dot(of_key) * scale - lse[row]);
        sum.add(1.0f, of_key, weight * (through.dot(of_value) - delta[row]) * scale);
    }
    sum.store(dq + (size_t)row * HEAD_DIM);
}
KERNEL(attention_singles_backward_queries)

// dK and dV of single keys, [singles, K, D] each. Grid: distinct single keys, key-value heads; a warp each. Key
// `single[i]` is seen by the queries `seen_by` from `seen_from[i]` to `seen_from[i + 1]`.
extern "C" __global__ void attention_singles_backward_keys(const Factor *q, const Factor *k, const Factor *v, const float *gradient,
                                                 const float *lse, const float *delta, const u32 *single,
                                                 const u32 *seen_from, const u32 *seen_by, u32 heads, u32 kv_heads,
                                                 float scale, float *dk, float *dv) {
    u32 head = blockIdx.y, group = heads / kv_heads;
    size_t key = ((size_t)single[blockIdx.x] * kv_heads + head) * HEAD_DIM;
    Head of_key, of_value, sum_k = {}, sum_v = {}, own, through;
    of_key.load(k + key);
    of_value.load(v + key);
    for (u32 turn = seen_from[blockIdx.x]; turn < seen_from[blockIdx.x + 1]; turn++)
        for (u32 n = head * group; n < (head + 1) * group; n++) {
            size_t row = (size_t)seen_by[turn] * heads + n;
            own.load(q + row * HEAD_DIM);
            through.load(gradient + row * HEAD_DIM);
            float weight = expf(own.dot(of_key) * scale - lse[row]);
            sum_k.add(1.0f, own, weight * (through.dot(of_value) - delta[row]) * scale);
            sum_v.add(1.0f, through, weight);
        }
    size_t at = ((size_t)blockIdx.x * kv_heads + head) * HEAD_DIM;
    sum_k.store(dk + at);
    sum_v.store(dv + at);
}
KERNEL(attention_singles_backward_keys)
