// Attention over visible keys, forward and backward, by tiles on tensor cores (Dao 2023); formulas in
// attention/mod.rs. HEAD_DIM, TERMS, FORWARD_KEYS and BACKWARD_INNER are set when it is compiled.
//
// A tile's rows are (token, query head) pairs that share a key-value head, token by token. Factors are
// bf16 with TERMS = 1; with TERMS = 3 every f32 is the sum of three bf16 and six of the nine products
// are added, which leaves some 2^-24. Keys are cut at fixed places and a row's sums run over keys in
// order, so its bits depend on nothing but what it sees. Single keys beside the ranges are rows.cu's.

#define WARPS 4
#define TILE (16 * WARPS)
#define DIM ((HEAD_DIM + 15) / 16 * 16)
#define STRIDE (DIM + 8)
#define HEAD_TILES (DIM / 8)
#define NOWHERE 0xffffffffu

// Rows of values in device memory: row i belongs to token i / group and head `first` + i % group.
struct Rows {
    const float *base;
    u32 heads, first, group;
    METHOD const float *at(u32 i) const {
        return base + ((size_t)(i / group) * heads + first + i % group) * HEAD_DIM;
    }
};

// Splits two values into bf16 terms that add up to them: planes of `plane` words lie after one another.
DEVICE void lay_down(u32 *at, u32 plane, float low, float high) {
#pragma unroll
    for (int term = 0; term < TERMS; term++) {
        u32 both = pack(low, high);
        at[term * plane] = both;
        low -= unpack_low(both);
        high -= unpack_high(both);
    }
}

// `count` rows from `first`, those from `end` on as zeros, as [count, STRIDE].
DEVICE void load(u16 *tile, int count, const Rows &rows, u32 first, u32 end) {
    for (int i = threadIdx.x; i < count * (DIM / 2); i += blockDim.x) {
        int row = i / (DIM / 2), dim = i % (DIM / 2) * 2;
        float low = 0.0f, high = 0.0f;
        if (first + row < end && dim < HEAD_DIM) {
            const float *from = rows.at(first + row) + dim;
            low = from[0];
            high = dim + 1 < HEAD_DIM ? from[1] : 0.0f;
        }
        lay_down((u32 *)tile + (row * STRIDE + dim) / 2, count * STRIDE / 2, low, high);
    }
}

// The same transposed, as [DIM, count + 8], for a multiple of 8 rows. A warp takes 8 dimensions of 4 pairs of
// rows: it reads whole sectors, and as a row of the tile is 4, 12 or 20 banks after the one before, modulo 32,
// its writes fall into all banks.
DEVICE void load_transposed(u16 *tile, int count, const Rows &rows, u32 first, u32 end) {
    int stride = count + 8;
    for (int i = threadIdx.x; i < count / 2 * DIM; i += blockDim.x) {
        int group = i / 32, row = (group / (DIM / 8) * 4 + i % 32 / 8) * 2, dim = group % (DIM / 8) * 8 + i % 8;
        float low = 0.0f, high = 0.0f;
        if (dim < HEAD_DIM) {
            if (first + row < end) low = rows.at(first + row)[dim];
            if (first + row + 1 < end) high = rows.at(first + row + 1)[dim];
        }
        lay_down((u32 *)tile + (dim * stride + row) / 2, DIM * stride / 2, low, high);
    }
}

#define PLAIN_SIZE(count) ((count) * STRIDE * TERMS)
#define TRANSPOSED_SIZE(count) (DIM * ((count) + 8) * TERMS)

// Adds to d the products of terms whose weight is at least 2^-24, small ones first.
DEVICE void multiply(float d[4], const u32 a[TERMS][4], const u32 b[TERMS][2]) {
#if TERMS == 3
    mma(d, a[2], b[0]);
    mma(d, a[0], b[2]);
    mma(d, a[1], b[1]);
    mma(d, a[1], b[0]);
    mma(d, a[0], b[1]);
#endif
    mma(d, a[0], b[0]);
}

// Terms of a left factor: rows `row`.. of [*, STRIDE], columns `column`...
DEVICE void left(u32 a[TERMS][4], const u16 *tile, int count, int row, int column) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u16 *at = tile + (row + g) * STRIDE + column + 2 * t;
#pragma unroll
    for (int term = 0; term < TERMS; term++, at += count * STRIDE) {
        a[term][0] = *(const u32 *)at;
        a[term][1] = *(const u32 *)(at + 8 * STRIDE);
        a[term][2] = *(const u32 *)(at + 8);
        a[term][3] = *(const u32 *)(at + 8 * STRIDE + 8);
    }
}

// Terms of a right factor [16, 8] whose columns are rows of `tile`.
DEVICE void right(u32 b[TERMS][2], const u16 *tile, int stride, int plane, int row, int column) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u16 *at = tile + (row + g) * stride + column + 2 * t;
#pragma unroll
    for (int term = 0; term < TERMS; term++, at += plane) {
        b[term][0] = *(const u32 *)at;
        b[term][1] = *(const u32 *)(at + 8);
    }
}

// Terms of a left factor from two tiles of results that lie side by side.
DEVICE void left_of(u32 a[TERMS][4], const float first[4], const float second[4]) {
    u32 split[TERMS];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *from = i < 2 ? first : second;
        lay_down(split, 1, from[i % 2 * 2], from[i % 2 * 2 + 1]);
#pragma unroll
        for (int term = 0; term < TERMS; term++) a[term][i] = split[term];
    }
}

// d [16, INNER] = A Bᵀ for rows of A from `row` and all rows of B, both [*, STRIDE].
template <int INNER>
DEVICE void products(float d[INNER / 8][4], const u16 *a_tile, int a_count, int row, const u16 *b_tile) {
#pragma unroll
    for (int j = 0; j < INNER / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) d[j][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < DIM; k += 16) {
        u32 a[TERMS][4], b[TERMS][2];
        left(a, a_tile, a_count, row, k);
#pragma unroll
        for (int j = 0; j < INNER / 8; j++) {
            right(b, b_tile, STRIDE, INNER * STRIDE, 8 * j, k);
            multiply(d[j], a, b);
        }
    }
}

// d [16, DIM] += S B for S [16, INNER] in registers and B laid down transposed.
template <int INNER>
DEVICE void add_products(float d[HEAD_TILES][4], const float s[INNER / 8][4], const u16 *b_tile) {
#pragma unroll
    for (int k = 0; k < INNER; k += 16) {
        u32 a[TERMS][4], b[TERMS][2];
        left_of(a, s[k / 8], s[k / 8 + 1]);
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++) {
            right(b, b_tile, INNER + 8, DIM * (INNER + 8), 8 * j, k);
            multiply(d[j], a, b);
        }
    }
}

// The smallest start and the largest end among the ranges of a tile's rows.
DEVICE void hull(u32 bounds[2], const u32 *start, const u32 *end, u32 first, u32 rows, u32 group) {
    __shared__ u32 starts[TILE], ends[TILE];
    if (threadIdx.x < TILE) {
        u32 row = first + threadIdx.x, from = 0xffffffffu, until = 0;
        if (row < rows && start[row / group] < end[row / group]) {
            from = start[row / group];
            until = end[row / group];
        }
        starts[threadIdx.x] = from;
        ends[threadIdx.x] = until;
    }
    __syncthreads();
    bounds[0] = 0xffffffffu;
    bounds[1] = 0;
    for (int i = 0; i < TILE; i++) {
        bounds[0] = min(bounds[0], starts[i]);
        bounds[1] = max(bounds[1], ends[i]);
    }
}

DEVICE float over_four(float value) {
    value += __shfl_xor_sync(EVERY_LANE, value, 1);
    return value + __shfl_xor_sync(EVERY_LANE, value, 2);
}

// One step of the online softmax for the two rows of a thread: scores of the keys from `key` on become
// weights, the sums so far shrink to the new largest score.
DEVICE void softmax_step(float s[FORWARD_KEYS / 8][4], float o[HEAD_TILES][4], float most[2], float total[2],
                         const u32 low[2], const u32 high[2], u32 key, float scale) {
    int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float largest = -INFINITY;
#pragma unroll
        for (int j = 0; j < FORWARD_KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                u32 at = key + 8 * j + 2 * t + e;
                float &score = s[j][2 * i + e];
                score = at >= low[i] && at < high[i] ? score * scale : -INFINITY;
                largest = fmaxf(largest, score);
            }
        largest = fmaxf(largest, __shfl_xor_sync(EVERY_LANE, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(EVERY_LANE, largest, 2));
        largest = fmaxf(largest, most[i]);
        // A row that has seen nothing so far keeps zeros.
        float base = largest == -INFINITY ? 0.0f : largest, shrink = expf(most[i] - base), sum = 0.0f;
        most[i] = largest;
#pragma unroll
        for (int j = 0; j < FORWARD_KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float weight = expf(s[j][2 * i + e] - base);
                s[j][2 * i + e] = weight;
                sum += weight;
            }
        total[i] = total[i] * shrink + over_four(sum);
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++) {
            o[j][2 * i] *= shrink;
            o[j][2 * i + 1] *= shrink;
        }
    }
}

// Grid: tiles of rows, key-value heads.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
attention_forward(const float *q, const float *k, const float *v, const u32 *start, const u32 *end, u32 has_singles,
                  u32 queries, u32 keys, u32 heads, u32 kv_heads, float scale, float *out, float *lse) {
    DYNAMIC_SHARED(u16, memory);
    u16 *q_tile = memory, *k_tile = q_tile + PLAIN_SIZE(TILE), *v_tile = k_tile + PLAIN_SIZE(FORWARD_KEYS);
    u32 head = blockIdx.y, group = heads / kv_heads, rows = queries * group, first = blockIdx.x * TILE;
    Rows of_q = {q, heads, head * group, group}, of_k = {k, kv_heads, head, 1}, of_v = {v, kv_heads, head, 1};
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp_row = threadIdx.x / 32 * 16;

    load(q_tile, TILE, of_q, first, rows);
    u32 bounds[2];
    hull(bounds, start, end, first, rows, group);

    u32 row[2], low[2], high[2];
    float most[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    float o[HEAD_TILES][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        row[i] = first + warp_row + g + 8 * i;
        low[i] = row[i] < rows ? start[row[i] / group] : 0;
        high[i] = row[i] < rows ? end[row[i] / group] : 0;
    }
#pragma unroll
    for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[j][i] = 0.0f;

    for (u32 key = bounds[0] / FORWARD_KEYS * FORWARD_KEYS; key < bounds[1]; key += FORWARD_KEYS) {
        __syncthreads();
        load(k_tile, FORWARD_KEYS, of_k, key, keys);
        load_transposed(v_tile, FORWARD_KEYS, of_v, key, keys);
        __syncthreads();
        float s[FORWARD_KEYS / 8][4];
        products<FORWARD_KEYS>(s, q_tile, TILE, warp_row, k_tile);
        softmax_step(s, o, most, total, low, high, key, scale);
        add_products<FORWARD_KEYS>(o, s, v_tile);
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (row[i] >= rows) continue;
        size_t at = (size_t)(row[i] / group) * heads + head * group + row[i] % group;
        float factor = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
        // Single keys are still to come.
        float nothing = has_singles ? -INFINITY : 0.0f;
        if (t == 0) lse[at] = total[i] > 0.0f ? most[i] + logf(total[i]) : nothing;
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int dim = 8 * j + 2 * t + e;
                if (dim < HEAD_DIM) out[at * HEAD_DIM + dim] = o[j][2 * i + e] * factor;
            }
    }
}
KERNEL(attention_forward)

// dQ. Grid: tiles of rows, key-value heads.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
attention_backward_queries(const float *q, const float *k, const float *v, const float *gradient, const float *lse,
                           const float *delta, const u32 *start, const u32 *end, u32 queries, u32 keys, u32 heads,
                           u32 kv_heads, float scale, float *dq) {
    DYNAMIC_SHARED(u16, memory);
    u16 *q_tile = memory, *g_tile = q_tile + PLAIN_SIZE(TILE), *k_tile = g_tile + PLAIN_SIZE(TILE);
    u16 *v_tile = k_tile + PLAIN_SIZE(BACKWARD_INNER), *k_across = v_tile + PLAIN_SIZE(BACKWARD_INNER);
    u32 head = blockIdx.y, group = heads / kv_heads, rows = queries * group, first = blockIdx.x * TILE;
    Rows of_q = {q, heads, head * group, group}, of_g = {gradient, heads, head * group, group};
    Rows of_k = {k, kv_heads, head, 1}, of_v = {v, kv_heads, head, 1};
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp_row = threadIdx.x / 32 * 16;

    load(q_tile, TILE, of_q, first, rows);
    load(g_tile, TILE, of_g, first, rows);
    u32 bounds[2];
    hull(bounds, start, end, first, rows, group);

    u32 row[2], low[2], high[2];
    size_t at[2];
    float own_lse[2], own_delta[2];
    float sum[HEAD_TILES][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        row[i] = first + warp_row + g + 8 * i;
        bool some = row[i] < rows;
        at[i] = some ? (size_t)(row[i] / group) * heads + head * group + row[i] % group : 0;
        low[i] = some ? start[row[i] / group] : 0;
        high[i] = some ? end[row[i] / group] : 0;
        own_lse[i] = lse[at[i]];
        own_delta[i] = delta[at[i]];
    }
#pragma unroll
    for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[j][i] = 0.0f;

    for (u32 key = bounds[0] / BACKWARD_INNER * BACKWARD_INNER; key < bounds[1]; key += BACKWARD_INNER) {
        __syncthreads();
        load(k_tile, BACKWARD_INNER, of_k, key, keys);
        load(v_tile, BACKWARD_INNER, of_v, key, keys);
        load_transposed(k_across, BACKWARD_INNER, of_k, key, keys);
        __syncthreads();
        float s[BACKWARD_INNER / 8][4], d[BACKWARD_INNER / 8][4];
        products<BACKWARD_INNER>(s, q_tile, TILE, warp_row, k_tile);
        products<BACKWARD_INNER>(d, g_tile, TILE, warp_row, v_tile);
#pragma unroll
        for (int j = 0; j < BACKWARD_INNER / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 of_key = key + 8 * j + 2 * t + i % 2;
                bool seen = of_key >= low[i / 2] && of_key < high[i / 2];
                float weight = seen ? expf(s[j][i] * scale - own_lse[i / 2]) : 0.0f;
                s[j][i] = seen ? weight * (d[j][i] - own_delta[i / 2]) : 0.0f;
            }
        add_products<BACKWARD_INNER>(sum, s, k_across);
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (row[i] >= rows) continue;
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int dim = 8 * j + 2 * t + e;
                if (dim < HEAD_DIM) dq[at[i] * HEAD_DIM + dim] = sum[j][2 * i + e] * scale;
            }
    }
}
KERNEL(attention_backward_queries)

// dK and dV. Grid: tiles of keys, key-value heads. `from` and `until` are the first query that may see a
// tile's keys by its range and the one after the last; `slot` is a key's place in the results of
// attention_singles_backward_keys, or NOWHERE.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
attention_backward_keys(const float *q, const float *k, const float *v, const float *gradient, const float *lse,
                        const float *delta, const u32 *start, const u32 *end, const u32 *from, const u32 *until,
                        const u32 *slot, const float *singles_dk, const float *singles_dv, u32 has_singles, u32 keys,
                        u32 heads, u32 kv_heads, float scale, float *dk, float *dv) {
    DYNAMIC_SHARED(u16, memory);
    u16 *k_tile = memory, *v_tile = k_tile + PLAIN_SIZE(TILE), *q_tile = v_tile + PLAIN_SIZE(TILE);
    u16 *g_tile = q_tile + PLAIN_SIZE(BACKWARD_INNER), *q_across = g_tile + PLAIN_SIZE(BACKWARD_INNER);
    u16 *g_across = q_across + TRANSPOSED_SIZE(BACKWARD_INNER);
    __shared__ float row_lse[BACKWARD_INNER], row_delta[BACKWARD_INNER];
    __shared__ u32 low[BACKWARD_INNER], high[BACKWARD_INNER];
    u32 head = blockIdx.y, group = heads / kv_heads, first = blockIdx.x * TILE;
    u32 last_row = until[blockIdx.x] * group;
    Rows of_q = {q, heads, head * group, group}, of_g = {gradient, heads, head * group, group};
    Rows of_k = {k, kv_heads, head, 1}, of_v = {v, kv_heads, head, 1};
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp_row = threadIdx.x / 32 * 16;

    load(k_tile, TILE, of_k, first, keys);
    load(v_tile, TILE, of_v, first, keys);
    float sum_k[HEAD_TILES][4], sum_v[HEAD_TILES][4];
#pragma unroll
    for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum_k[j][i] = sum_v[j][i] = 0.0f;

    for (u32 row = from[blockIdx.x] * group; row < last_row; row += BACKWARD_INNER) {
        __syncthreads();
        load(q_tile, BACKWARD_INNER, of_q, row, last_row);
        load(g_tile, BACKWARD_INNER, of_g, row, last_row);
        load_transposed(q_across, BACKWARD_INNER, of_q, row, last_row);
        load_transposed(g_across, BACKWARD_INNER, of_g, row, last_row);
        for (int i = threadIdx.x; i < BACKWARD_INNER; i += blockDim.x) {
            u32 own = row + i;
            bool some = own < last_row;
            size_t at = some ? (size_t)(own / group) * heads + head * group + own % group : 0;
            row_lse[i] = lse[at];
            row_delta[i] = delta[at];
            low[i] = some ? start[own / group] : 0;
            high[i] = some ? end[own / group] : 0;
        }
        __syncthreads();
        float s[BACKWARD_INNER / 8][4], d[BACKWARD_INNER / 8][4];
        products<BACKWARD_INNER>(s, k_tile, TILE, warp_row, q_tile);
        products<BACKWARD_INNER>(d, v_tile, TILE, warp_row, g_tile);
#pragma unroll
        for (int j = 0; j < BACKWARD_INNER / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 key = first + warp_row + g + i / 2 * 8;
                int query = 8 * j + 2 * t + i % 2;
                bool seen = key >= low[query] && key < high[query];
                float weight = seen ? expf(s[j][i] * scale - row_lse[query]) : 0.0f;
                s[j][i] = weight;
                d[j][i] = seen ? weight * (d[j][i] - row_delta[query]) : 0.0f;
            }
        add_products<BACKWARD_INNER>(sum_v, s, g_across);
        add_products<BACKWARD_INNER>(sum_k, d, q_across);
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 key = first + warp_row + g + 8 * i;
        if (key >= keys) continue;
        size_t at = ((size_t)key * kv_heads + head) * HEAD_DIM;
        u32 place = has_singles ? slot[key] : NOWHERE;
        size_t more = ((size_t)place * kv_heads + head) * HEAD_DIM;
        // All are read before the first is written: a compiler cannot know that they lie apart.
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int dim = 8 * j + 2 * t + e;
                bool some = dim < HEAD_DIM && place != NOWHERE;
                sum_k[j][2 * i + e] = sum_k[j][2 * i + e] * scale + (some ? singles_dk[more + dim] : 0.0f);
                sum_v[j][2 * i + e] += some ? singles_dv[more + dim] : 0.0f;
            }
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int dim = 8 * j + 2 * t + e;
                if (dim >= HEAD_DIM) continue;
                dk[at + dim] = sum_k[j][2 * i + e];
                dv[at + dim] = sum_v[j][2 * i + e];
            }
    }
}
KERNEL(attention_backward_keys)
