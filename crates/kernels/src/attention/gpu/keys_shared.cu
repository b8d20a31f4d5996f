// Gradients of keys where a warp's registers do not hold whole heads, or a block's memory does not hold 128 keys.
// pipelined.cu comes before. GRADIENT_PLACES, how many tiles of the result's gradient a block holds, 1 or 2, is set when it is
// compiled; KEYS is 32 or 64.
//
// Two warps share the scores of 16 keys, half of the inner rows each. Weights and slopes go through the block's memory in
// bf16. Then four warps share the sums of 32 keys, a quarter of the dimensions each.

#define KEYS_THREADS (4 * KEYS)
#define WEIGHT_STRIDE (INNER_ROWS + 8)
// Of 16 dimensions each.
#define PART_TILES ((DIM / 16 + 3) / 4)

// What a warp has of 16 keys and 8 N rows goes to [keys, WEIGHT_STRIDE] in bf16.
template <int N> DEVICE void lay_down(u16 *to, const float (&s)[N][4]) {
    u16 *own = to + threadIdx.x % 32 / 4 * WEIGHT_STRIDE + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            *(u32 *)(own + 8 * i * WEIGHT_STRIDE + 8 * j) = pack(s[j][2 * i], s[j][2 * i + 1]);
}

// d [32, 16 PART_TILES] += S B for rows of S [32, INNER_ROWS] and dimensions of B from `dim` on. Those after the head's end are
// left out.
DEVICE void add_part(float (&d)[2][2 * PART_TILES][4], const u16 *s_rows, const u16 *b_rows, int dim) {
    int lane = threadIdx.x % 32;
    const u16 *s_at = s_rows + lane % 16 * WEIGHT_STRIDE + lane / 16 * 8;
    const u16 *b_at = b_rows + lane % 16 * STRIDE + lane / 16 * 8 + dim;
#pragma unroll
    for (int k = 0; k < INNER_ROWS; k += 16) {
        u32 a[2][4], b[4];
#pragma unroll
        for (int m = 0; m < 2; m++) load_tiles(a[m], s_at + 16 * m * WEIGHT_STRIDE + k);
#pragma unroll
        for (int n = 0; n < PART_TILES; n++) {
            if (DIM % 64 && dim + 16 * n >= DIM) continue;
            load_turned_tiles(b, b_at + k * STRIDE + 16 * n);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma(d[m][2 * n], a[m], b);
                mma(d[m][2 * n + 1], a[m], b + 2);
            }
        }
    }
}

// dK and dV. Grid: key-value heads, tiles of keys. `from` and `until` are the first query that may see a table's keys by
// its range and the one after the last.
extern "C" __global__ void __launch_bounds__(KEYS_THREADS)
attention_half_backward_keys(const u16 *q, const u16 *k, const u16 *v, const u16 *gradient, const float *lse,
                             const float *delta, const u32 *start, const u32 *end, const u32 *from, const u32 *until,
                             const u32 *slot, const float *singles_dk, const float *singles_dv, u32 has_singles,
                             u32 keys, u32 heads, u32 kv_heads, float scale, float *dk, float *dv) {
    DYNAMIC_SHARED(u16, memory);
    __shared__ OfRow of_rows[2][INNER_ROWS];
    __shared__ float apart[2][INNER_ROWS / 32];
    const int SIZE = INNER_ROWS * STRIDE;
    u16 *k_tile = memory, *v_tile = k_tile + KEYS * STRIDE;
    u16 *q_tiles = v_tile + KEYS * STRIDE, *g_tiles = q_tiles + 2 * SIZE;
    u16 *weights = g_tiles + GRADIENT_PLACES * SIZE, *by_scores = weights + KEYS * WEIGHT_STRIDE;
    u32 head = blockIdx.x, group = heads / kv_heads, first = blockIdx.y * KEYS, bounds[2];
    Rows of_q = {q, heads, head * group, group}, of_g = {gradient, heads, head * group, group};
    // Its scores, and its sums.
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int score_key = warp / 2 * 16, score_row = warp % 2 * (INNER_ROWS / 2);
    int sum_key = warp / 4 * 32, sum_dim = warp % 4 * PART_TILES * 16;
    u16 *own_weights = weights + score_key * WEIGHT_STRIDE + score_row;
    u16 *own_by_scores = by_scores + score_key * WEIGHT_STRIDE + score_row;

    copy_rows<KEYS, KEYS_THREADS>(k_tile, OfHead{k, kv_heads, head}, first, keys);
    copy_rows<KEYS, KEYS_THREADS>(v_tile, OfHead{v, kv_heads, head}, first, keys);
    rows_of_keys(bounds, from, until, first, keys, group);
    InnerRows inner = {lse, delta, start, end, of_q, first, bounds[1], {}, 0.0f};
    copy_rows<INNER_ROWS, KEYS_THREADS>(q_tiles, of_q, bounds[0], bounds[1]);
    copy_rows<INNER_ROWS, KEYS_THREADS>(g_tiles, of_g, bounds[0], bounds[1]);
    end_copies();
    inner.look_at(bounds[0] + threadIdx.x);
    inner.lay_out(of_rows[0], apart[0]);
    float sum_k[2][2 * PART_TILES][4], sum_v[2][2 * PART_TILES][4];
#pragma unroll
    for (int m = 0; m < 2; m++) {
        clear(sum_k[m]);
        clear(sum_v[m]);
    }
    int turn = 0;
    for (u32 row = bounds[0]; row < bounds[1]; row += INNER_ROWS, turn ^= 1) {
        wait_for_copies<0>();
        __syncthreads();
        u32 next = row + INNER_ROWS;
        copy_rows<INNER_ROWS, KEYS_THREADS>(q_tiles + (turn ^ 1) * SIZE, of_q, next, bounds[1]);
        if (GRADIENT_PLACES == 2)
            copy_rows<INNER_ROWS, KEYS_THREADS>(g_tiles + (turn ^ 1) * SIZE, of_g, next, bounds[1]);
        end_copies();
        if (threadIdx.x < INNER_ROWS) inner.look_at(next + threadIdx.x);
        const u16 *q_tile = q_tiles + turn * SIZE, *g_tile = g_tiles + turn % GRADIENT_PLACES * SIZE;
        float s[1][INNER_ROWS / 16][4], d[1][INNER_ROWS / 16][4];
        products<1, INNER_ROWS / 2>(s, k_tile + score_key * STRIDE, q_tile + score_row * STRIDE);
        products<1, INNER_ROWS / 2>(d, v_tile + score_key * STRIDE, g_tile + score_row * STRIDE);
        weigh(s[0], d[0], of_rows[turn] + score_row, apart[turn], first + score_key + lane / 4, scale * LOG2_E);
        lay_down(own_weights, s[0]);
        lay_down(own_by_scores, d[0]);
        __syncthreads();
        add_part(sum_v, weights + sum_key * WEIGHT_STRIDE, g_tile, sum_dim);
        if (GRADIENT_PLACES == 1) {
            __syncthreads();
            copy_rows<INNER_ROWS, KEYS_THREADS>(g_tiles, of_g, next, bounds[1]);
            end_copies();
        }
        add_part(sum_k, by_scores + sum_key * WEIGHT_STRIDE, q_tile, sum_dim);
        inner.lay_out(of_rows[turn ^ 1], apart[turn ^ 1]);
    }
    wait_for_copies<0>();

    OfSingles more = {slot, has_singles, kv_heads, head};
#pragma unroll
    for (int m = 0; m < 2; m++) {
        u32 key = first + sum_key + 16 * m + lane / 4;
        if (key < keys) {
            more.write<0>(dk, sum_k[m], scale, key, singles_dk, sum_dim);
            more.write<0>(dv, sum_v[m], 1.0f, key, singles_dv, sum_dim);
        }
        if (key + 8 < keys) {
            more.write<1>(dk, sum_k[m], scale, key + 8, singles_dk, sum_dim);
            more.write<1>(dv, sum_v[m], 1.0f, key + 8, singles_dv, sum_dim);
        }
    }
}
KERNEL(attention_half_backward_keys)
