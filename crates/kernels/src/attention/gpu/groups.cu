// Attention with bf16 factors by groups of four warps: a kernel for the result, one for the gradient of queries, one for those
// of keys. half.cu and group_tiles.cu come before. Products of a tile run beside the softmax of the next one.

// Rows of a block's own tile.
#define ROWS 128
// Keys of the inner tiles.
#define FORWARD_KEYS 128
#define QUERIES_KEYS 64

// Grid: key-value heads, tiles of rows; those that see most begin first. Results are [Tq, N, D], in bf16 if `halves`, and
// the log-sum-exp [Tq, N].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_half_forward(const u16 *q, const u16 *k, const u16 *v, const u32 *start, const u32 *end, u32 has_singles,
                       u32 queries, u32 heads, u32 kv_heads, float scale, u32 halves, float *out, float *lse) {
    BLOCK_MEMORY(memory);
    __shared__ u32 starts[ROWS], ends[ROWS];
    const int SIZE = FORWARD_KEYS * HEAD_DIM;
    u16 *q_tile = memory, *k_tiles = q_tile + ROWS * HEAD_DIM, *v_tiles = k_tiles + 2 * SIZE;
    u32 head = blockIdx.x, group = heads / kv_heads, rows = queries * group;
    u32 first = (gridDim.y - 1 - blockIdx.y) * ROWS;
    Rows of_q = {q, heads, head * group, group};
    OfHead of_k = {k, kv_heads, head}, of_v = {v, kv_heads, head};
    float power = scale * LOG2_E;

    copy_tile<ROWS>(q_tile, of_q, first, rows);
    Hull of = hull(starts, ends, start, end, first, rows, group);
    u32 low[2], high[2];
    float o[HEAD_TILES][4], most[2], total[2], shrink[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        low[i] = starts[own_row() + 8 * i];
        high[i] = ends[own_row() + 8 * i];
        most[i] = -INFINITY;
        total[i] = 0.0f;
    }
    // The weights of a tile are multiplied in the next turn; in the first one they are zeros of a tile of zeros.
    u32 weights[FORWARD_KEYS / 16][4];
    clear(o);
    clear(weights);
    u32 from = of.from / FORWARD_KEYS * FORWARD_KEYS;
    copy_tile<FORWARD_KEYS>(k_tiles, of_k, from, of.until);
    copy_tile<FORWARD_KEYS>(v_tiles + SIZE, of_v, 0, 0);
    end_copies();
    int turn = 0;
    for (u32 key = from; key < of.until; key += FORWARD_KEYS, turn ^= 1) {
        float s[FORWARD_KEYS / 8][4];
        wait_for_copies<0>();
        show_copies();
        __syncthreads();
        copy_tile<FORWARD_KEYS>(k_tiles + (turn ^ 1) * SIZE, of_k, key + FORWARD_KEYS, of.until);
        copy_tile<FORWARD_KEYS>(v_tiles + turn * SIZE, of_v, key, of.until);
        end_copies();
        begin_products();
        group_products<ROWS>(s, q_tile, group_row(), k_tiles + turn * SIZE);
        end_products();
        group_add_products(o, weights, v_tiles + (turn ^ 1) * SIZE);
        end_products();
        wait_for_products<1>();
        settle(s);
        if (!of.is_inner(key, FORWARD_KEYS)) {
            hide<FORWARD_KEYS / 8, 0>(s, low[0], high[0], key);
            hide<FORWARD_KEYS / 8, 1>(s, low[1], high[1], key);
        }
        shrink[0] = softmax_step<FORWARD_KEYS / 8, 0>(s, most[0], total[0], power);
        shrink[1] = softmax_step<FORWARD_KEYS / 8, 1>(s, most[1], total[1], power);
        wait_for_products<0>();
        settle(o);
        settle(weights);
        shrink_row<HEAD_TILES, 0>(o, shrink[0]);
        shrink_row<HEAD_TILES, 1>(o, shrink[1]);
        pack_all(weights, s);
    }
    wait_for_copies<0>();
    show_copies();
    __syncthreads();
    settle(o);
    settle(weights);
    begin_products();
    group_add_products(o, weights, v_tiles + (turn ^ 1) * SIZE);
    end_products();
    wait_for_products<0>();
    settle(o);

    total[0] = over_four(total[0]);
    total[1] = over_four(total[1]);
    u32 row = first + own_row();
    Results results = {out, lse, halves, has_singles};
    if (row < rows) finish_row<0>(results, of_q.place(row), o, most[0], total[0], scale);
    if (row + 8 < rows) finish_row<1>(results, of_q.place(row + 8), o, most[1], total[1], scale);
}
KERNEL(attention_half_forward)

// dQ. Grid: key-value heads, tiles of rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_half_backward_queries(const u16 *q, const u16 *k, const u16 *v, const u16 *gradient, const float *lse,
                                const float *delta, const u32 *start, const u32 *end, u32 queries, u32 heads,
                                u32 kv_heads, float scale, float *dq) {
    BLOCK_MEMORY(memory);
    __shared__ u32 starts[ROWS], ends[ROWS];
    const int SIZE = QUERIES_KEYS * HEAD_DIM;
    u16 *q_tile = memory, *g_tile = q_tile + ROWS * HEAD_DIM;
    u16 *k_tiles = g_tile + ROWS * HEAD_DIM, *v_tiles = k_tiles + 3 * SIZE;
    u32 head = blockIdx.x, group = heads / kv_heads, rows = queries * group;
    u32 first = (gridDim.y - 1 - blockIdx.y) * ROWS;
    Rows of_q = {q, heads, head * group, group};
    OfHead of_k = {k, kv_heads, head}, of_v = {v, kv_heads, head};
    float power = scale * LOG2_E;

    copy_tile<ROWS>(q_tile, of_q, first, rows);
    copy_tile<ROWS>(g_tile, Rows{gradient, heads, head * group, group}, first, rows);
    Hull of = hull(starts, ends, start, end, first, rows, group);
    u32 low[2], high[2];
    float sum[HEAD_TILES][4], own_lse[2], own_delta[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 row = first + own_row() + 8 * i;
        low[i] = starts[own_row() + 8 * i];
        high[i] = ends[own_row() + 8 * i];
        own_lse[i] = row < rows ? lse[of_q.place(row)] * LOG2_E : 0.0f;
        own_delta[i] = row < rows ? delta[of_q.place(row)] : 0.0f;
    }
    u32 by_scores[QUERIES_KEYS / 16][4];
    clear(sum);
    clear(by_scores);
    u32 from = of.from / QUERIES_KEYS * QUERIES_KEYS;
    copy_tile<QUERIES_KEYS>(k_tiles, of_k, from, of.until);
    copy_tile<QUERIES_KEYS>(v_tiles, of_v, from, of.until);
    copy_tile<QUERIES_KEYS>(k_tiles + 2 * SIZE, of_k, 0, 0);
    end_copies();
    // Keys are read in two turns, so they have three places.
    int turn = 0, place = 0, before = 2;
    for (u32 key = from; key < of.until; key += QUERIES_KEYS, turn ^= 1) {
        float s[QUERIES_KEYS / 8][4], d[QUERIES_KEYS / 8][4];
        int after = place == 2 ? 0 : place + 1;
        wait_for_copies<0>();
        show_copies();
        __syncthreads();
        copy_tile<QUERIES_KEYS>(k_tiles + after * SIZE, of_k, key + QUERIES_KEYS, of.until);
        copy_tile<QUERIES_KEYS>(v_tiles + (turn ^ 1) * SIZE, of_v, key + QUERIES_KEYS, of.until);
        end_copies();
        begin_products();
        group_products<ROWS>(s, q_tile, group_row(), k_tiles + place * SIZE);
        group_products<ROWS>(d, g_tile, group_row(), v_tiles + turn * SIZE);
        end_products();
        group_add_products(sum, by_scores, k_tiles + before * SIZE);
        end_products();
        wait_for_products<1>();
        settle(s);
        settle(d);
        if (!of.is_inner(key, QUERIES_KEYS)) {
            hide<QUERIES_KEYS / 8, 0>(s, low[0], high[0], key);
            hide<QUERIES_KEYS / 8, 1>(s, low[1], high[1], key);
        }
        slopes<QUERIES_KEYS / 8, 0>(s, d, power, own_lse[0], own_delta[0]);
        slopes<QUERIES_KEYS / 8, 1>(s, d, power, own_lse[1], own_delta[1]);
        wait_for_products<0>();
        settle(sum);
        settle(by_scores);
        pack_all(by_scores, s);
        before = place;
        place = after;
    }
    wait_for_copies<0>();
    show_copies();
    __syncthreads();
    settle(sum);
    settle(by_scores);
    begin_products();
    group_add_products(sum, by_scores, k_tiles + before * SIZE);
    end_products();
    wait_for_products<0>();
    settle(sum);

    u32 row = first + own_row();
    if (row < rows) write_row<0>(dq + of_q.place(row) * HEAD_DIM, sum, scale);
    if (row + 8 < rows) write_row<1>(dq + of_q.place(row + 8) * HEAD_DIM, sum, scale);
}
KERNEL(attention_half_backward_queries)

// dK and dV. Grid: key-value heads, tiles of keys. `from` and `until` are the first query that may see a table's keys by
// its range and the one after the last.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_half_backward_keys(const u16 *q, const u16 *k, const u16 *v, const u16 *gradient, const float *lse,
                             const float *delta, const u32 *start, const u32 *end, const u32 *from, const u32 *until,
                             const u32 *slot, const float *singles_dk, const float *singles_dv, u32 has_singles,
                             u32 keys, u32 heads, u32 kv_heads, float scale, float *dk, float *dv) {
    BLOCK_MEMORY(memory);
    __shared__ OfRow of_rows[2][INNER_ROWS];
    __shared__ float apart[2][INNER_ROWS / 32];
    const int SIZE = INNER_ROWS * HEAD_DIM;
    u16 *k_tile = memory, *v_tile = k_tile + KEYS * HEAD_DIM;
    u16 *q_tiles = v_tile + KEYS * HEAD_DIM, *g_tiles = q_tiles + 3 * SIZE;
    u32 head = blockIdx.x, group = heads / kv_heads, first = blockIdx.y * KEYS, bounds[2];
    Rows of_q = {q, heads, head * group, group}, of_g = {gradient, heads, head * group, group};
    u32 own_key = first + own_row();

    copy_tile<KEYS>(k_tile, OfHead{k, kv_heads, head}, first, keys);
    copy_tile<KEYS>(v_tile, OfHead{v, kv_heads, head}, first, keys);
    rows_of_keys(bounds, from, until, first, keys, group);
    InnerRows inner = {lse, delta, start, end, of_q, first, bounds[1], {}, 0.0f};
    copy_tile<INNER_ROWS>(q_tiles, of_q, bounds[0], bounds[1]);
    copy_tile<INNER_ROWS>(g_tiles, of_g, bounds[0], bounds[1]);
    copy_tile<INNER_ROWS>(q_tiles + 2 * SIZE, of_q, 0, 0);
    copy_tile<INNER_ROWS>(g_tiles + 2 * SIZE, of_g, 0, 0);
    end_copies();
    inner.look_at(bounds[0] + threadIdx.x);
    inner.lay_out(of_rows[0], apart[0]);
    float sum_k[HEAD_TILES][4], sum_v[HEAD_TILES][4];
    u32 weights[INNER_ROWS / 16][4], by_scores[INNER_ROWS / 16][4];
    clear(sum_k);
    clear(sum_v);
    clear(weights);
    clear(by_scores);
    int turn = 0, place = 0, before = 2;
    for (u32 row = bounds[0]; row < bounds[1]; row += INNER_ROWS, turn ^= 1) {
        float s[INNER_ROWS / 8][4], d[INNER_ROWS / 8][4];
        int after = place == 2 ? 0 : place + 1;
        wait_for_copies<0>();
        show_copies();
        __syncthreads();
        copy_tile<INNER_ROWS>(q_tiles + after * SIZE, of_q, row + INNER_ROWS, bounds[1]);
        copy_tile<INNER_ROWS>(g_tiles + after * SIZE, of_g, row + INNER_ROWS, bounds[1]);
        end_copies();
        if (threadIdx.x < INNER_ROWS) inner.look_at(row + INNER_ROWS + threadIdx.x);
        begin_products();
        group_products<KEYS>(s, k_tile, group_row(), q_tiles + place * SIZE);
        group_products<KEYS>(d, v_tile, group_row(), g_tiles + place * SIZE);
        end_products();
        group_add_products(sum_v, weights, g_tiles + before * SIZE);
        group_add_products(sum_k, by_scores, q_tiles + before * SIZE);
        end_products();
        wait_for_products<1>();
        settle(s);
        settle(d);
        weigh(s, d, of_rows[turn], apart[turn], own_key, scale * LOG2_E);
        wait_for_products<0>();
        settle(sum_v);
        settle(sum_k);
        settle(weights);
        settle(by_scores);
        pack_all(weights, s);
        pack_all(by_scores, d);
        inner.lay_out(of_rows[turn ^ 1], apart[turn ^ 1]);
        before = place;
        place = after;
    }
    wait_for_copies<0>();
    show_copies();
    __syncthreads();
    settle(sum_v);
    settle(sum_k);
    settle(weights);
    settle(by_scores);
    begin_products();
    group_add_products(sum_v, weights, g_tiles + before * SIZE);
    group_add_products(sum_k, by_scores, q_tiles + before * SIZE);
    end_products();
    wait_for_products<0>();
    settle(sum_v);
    settle(sum_k);

    OfSingles more = {slot, has_singles, kv_heads, head};
    if (own_key < keys) {
        more.write<0>(dk, sum_k, scale, own_key, singles_dk);
        more.write<0>(dv, sum_v, 1.0f, own_key, singles_dv);
    }
    if (own_key + 8 < keys) {
        more.write<1>(dk, sum_k, scale, own_key + 8, singles_dk);
        more.write<1>(dv, sum_v, 1.0f, own_key + 8, singles_dv);
    }
}
KERNEL(attention_half_backward_keys)
