// Gradients of keys where a warp has whole heads of 16 keys: heads up to 128, 128 keys a block. pipelined.cu comes
// before.

// dK and dV. Grid: key-value heads, tiles of keys. `from` and `until` are the first query that may see a table's keys by
// its range and the one after the last.
extern "C" __global__ void __launch_bounds__(256)
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
    u32 head = blockIdx.x, group = heads / kv_heads, first = blockIdx.y * KEYS, bounds[2];
    Rows of_q = {q, heads, head * group, group}, of_g = {gradient, heads, head * group, group};
    int warp_key = threadIdx.x / 32 * 16;
    u32 own_key = first + warp_key + threadIdx.x % 32 / 4;

    copy_rows<KEYS, 256>(k_tile, OfHead{k, kv_heads, head}, first, keys);
    copy_rows<KEYS, 256>(v_tile, OfHead{v, kv_heads, head}, first, keys);
    rows_of_keys(bounds, from, until, first, keys, group);
    InnerRows inner = {lse, delta, start, end, of_q, first, bounds[1], {}, 0.0f};
    copy_rows<INNER_ROWS, 256>(q_tiles, of_q, bounds[0], bounds[1]);
    copy_rows<INNER_ROWS, 256>(g_tiles, of_g, bounds[0], bounds[1]);
    end_copies();
    inner.look_at(bounds[0] + threadIdx.x);
    inner.lay_out(of_rows[0], apart[0]);
    float sum_k[1][HEAD_TILES][4], sum_v[1][HEAD_TILES][4];
    clear(sum_k[0]);
    clear(sum_v[0]);
    int turn = 0;
    for (u32 row = bounds[0]; row < bounds[1]; row += INNER_ROWS, turn ^= 1) {
        float s[1][INNER_ROWS / 8][4], d[1][INNER_ROWS / 8][4];
        wait_for_copies<0>();
        __syncthreads();
        u32 after = row + INNER_ROWS;
        copy_rows<INNER_ROWS, 256>(q_tiles + (turn ^ 1) * SIZE, of_q, after, bounds[1]);
        copy_rows<INNER_ROWS, 256>(g_tiles + (turn ^ 1) * SIZE, of_g, after, bounds[1]);
        end_copies();
        if (threadIdx.x < INNER_ROWS) inner.look_at(after + threadIdx.x);
        const u16 *q_tile = q_tiles + turn * SIZE, *g_tile = g_tiles + turn * SIZE;
        products<1, INNER_ROWS>(s, k_tile + warp_key * STRIDE, q_tile);
        products<1, INNER_ROWS>(d, v_tile + warp_key * STRIDE, g_tile);
        weigh(s[0], d[0], of_rows[turn], apart[turn], own_key, scale * LOG2_E);
        add_products<1, INNER_ROWS>(sum_v, s, g_tile);
        add_products<1, INNER_ROWS>(sum_k, d, q_tile);
        inner.lay_out(of_rows[turn ^ 1], apart[turn ^ 1]);
    }
    wait_for_copies<0>();

    OfSingles more = {slot, has_singles, kv_heads, head};
    if (own_key < keys) {
        more.write<0>(dk, sum_k[0], scale, own_key, singles_dk);
        more.write<0>(dv, sum_v[0], 1.0f, own_key, singles_dv);
    }
    if (own_key + 8 < keys) {
        more.write<1>(dk, sum_k[0], scale, own_key + 8, singles_dk);
        more.write<1>(dv, sum_v[0], 1.0f, own_key + 8, singles_dv);
    }
}
KERNEL(attention_half_backward_keys)
