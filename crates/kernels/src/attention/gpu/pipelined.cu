// Attention with bf16 factors by warps (mma.sync, ldmatrix, cp.async: compute capability 8.0 and above). half.cu
// comes before.

#define STRIDE (HEAD_DIM + 8)
// Keys of the inner tiles.
#define FORWARD_KEYS 64
#define QUERIES_KEYS 32

// Begins to copy COUNT rows from `first`, those from `end` on as zeros, as [COUNT, STRIDE].
template <int COUNT, int THREADS, class SOURCE>
DEVICE void copy_rows(u16 *tile, const SOURCE &rows, u32 first, u32 end) {
#pragma unroll
    for (int i = 0; i < COUNT * CHUNKS; i += THREADS) {
        int at = i + threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS * 8;
        if (COUNT * CHUNKS % THREADS && at >= COUNT * CHUNKS) break;
        bool some = first + row < end;
        copy_ahead(tile + row * STRIDE + chunk, rows.at(some ? first + row : 0) + chunk, some);
    }
}

// d [16 M, COUNT] = A Bᵀ for rows of A and of B, both [*, STRIDE].
template <int M, int COUNT>
DEVICE void products(float (&d)[M][COUNT / 8][4], const u16 *a_rows, const u16 *b_rows) {
    int lane = threadIdx.x % 32;
    const u16 *a_at = a_rows + lane % 16 * STRIDE + lane / 16 * 8;
    const u16 *b_at = b_rows + (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int m = 0; m < M; m++) clear(d[m]);
#pragma unroll
    for (int k = 0; k < HEAD_DIM; k += 16) {
        u32 a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++) load_tiles(a[m], a_at + 16 * m * STRIDE + k);
#pragma unroll
        for (int n = 0; n < COUNT; n += 16) {
            load_tiles(b, b_at + n * STRIDE + k);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(d[m][n / 8], a[m], b);
                mma(d[m][n / 8 + 1], a[m], b + 2);
            }
        }
    }
}

// d [16 M, HEAD_DIM] += S B for S [16 M, COUNT] in registers and rows of B.
template <int M, int COUNT>
DEVICE void add_products(float (&d)[M][HEAD_TILES][4], const float (&s)[M][COUNT / 8][4], const u16 *b_rows) {
    int lane = threadIdx.x % 32;
    const u16 *b_at = b_rows + lane % 16 * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < COUNT; k += 16) {
        u32 a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *from = s[m][k / 8 + i / 2];
                a[m][i] = pack(from[i % 2 * 2], from[i % 2 * 2 + 1]);
            }
#pragma unroll
        for (int n = 0; n < HEAD_DIM; n += 16) {
            load_turned_tiles(b, b_at + k * STRIDE + n);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(d[m][n / 8], a[m], b);
                mma(d[m][n / 8 + 1], a[m], b + 2);
            }
        }
    }
}

// A warp has 32 rows of a block's ROWS. Row m · 16 + half · 8 of a thread among them.
DEVICE int own_row(int m, int half) { return threadIdx.x / 32 * 32 + m * 16 + half * 8 + threadIdx.x % 32 / 4; }

template <int COUNT>
DEVICE void hide_all(float (&s)[2][COUNT / 8][4], const u32 starts[ROWS], const u32 ends[ROWS], u32 key) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
        hide<COUNT / 8, 0>(s[m], starts[own_row(m, 0)], ends[own_row(m, 0)], key);
        hide<COUNT / 8, 1>(s[m], starts[own_row(m, 1)], ends[own_row(m, 1)], key);
    }
}

// Grid: key-value heads, tiles of rows; those that see most begin first. Results are [Tq, N, D], in bf16 if `halves`, and
// the log-sum-exp [Tq, N].
extern "C" __global__ void __launch_bounds__(128)
attention_half_forward(const u16 *q, const u16 *k, const u16 *v, const u32 *start, const u32 *end, u32 has_singles,
                       u32 queries, u32 heads, u32 kv_heads, float scale, u32 halves, float *out, float *lse) {
    DYNAMIC_SHARED(u16, memory);
    __shared__ u32 starts[ROWS], ends[ROWS];
    const int SIZE = FORWARD_KEYS * STRIDE;
    u16 *q_tile = memory, *k_tiles = q_tile + ROWS * STRIDE, *v_tiles = k_tiles + 2 * SIZE;
    u32 head = blockIdx.x, group = heads / kv_heads, rows = queries * group;
    u32 first = (gridDim.y - 1 - blockIdx.y) * ROWS;
    Rows of_q = {q, heads, head * group, group};
    OfHead of_k = {k, kv_heads, head}, of_v = {v, kv_heads, head};
    const u16 *own_q = q_tile + threadIdx.x / 32 * 32 * STRIDE;

    copy_rows<ROWS, 128>(q_tile, of_q, first, rows);
    Hull of = hull(starts, ends, start, end, first, rows, group);
    float o[2][HEAD_TILES][4], most[2][2], total[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
        clear(o[m]);
        most[m][0] = most[m][1] = -INFINITY;
        total[m][0] = total[m][1] = 0.0f;
    }
    u32 from = of.from / FORWARD_KEYS * FORWARD_KEYS;
    copy_rows<FORWARD_KEYS, 128>(k_tiles, of_k, from, of.until);
    end_copies();
    copy_rows<FORWARD_KEYS, 128>(v_tiles, of_v, from, of.until);
    end_copies();
    int turn = 0;
    for (u32 key = from; key < of.until; key += FORWARD_KEYS, turn ^= 1) {
        float s[2][FORWARD_KEYS / 8][4];
        wait_for_copies<1>();
        __syncthreads();
        copy_rows<FORWARD_KEYS, 128>(k_tiles + (turn ^ 1) * SIZE, of_k, key + FORWARD_KEYS, of.until);
        end_copies();
        products<2, FORWARD_KEYS>(s, own_q, k_tiles + turn * SIZE);
        if (!of.is_inner(key, FORWARD_KEYS)) hide_all<FORWARD_KEYS>(s, starts, ends, key);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float power = scale * LOG2_E;
            shrink_row<HEAD_TILES, 0>(o[m], softmax_step<FORWARD_KEYS / 8, 0>(s[m], most[m][0], total[m][0], power));
            shrink_row<HEAD_TILES, 1>(o[m], softmax_step<FORWARD_KEYS / 8, 1>(s[m], most[m][1], total[m][1], power));
        }
        wait_for_copies<1>();
        __syncthreads();
        copy_rows<FORWARD_KEYS, 128>(v_tiles + (turn ^ 1) * SIZE, of_v, key + FORWARD_KEYS, of.until);
        end_copies();
        add_products<2, FORWARD_KEYS>(o, s, v_tiles + turn * SIZE);
    }
    wait_for_copies<0>();

    Results results = {out, lse, halves, has_singles};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int m = i / 2;
        float sum = over_four(total[m][i % 2]);
        u32 row = first + own_row(m, i % 2);
        if (row >= rows) continue;
        if (i % 2) finish_row<1>(results, of_q.place(row), o[m], most[m][1], sum, scale);
        else finish_row<0>(results, of_q.place(row), o[m], most[m][0], sum, scale);
    }
}
KERNEL(attention_half_forward)

// dQ. Grid: key-value heads, tiles of rows.
extern "C" __global__ void __launch_bounds__(128)
attention_half_backward_queries(const u16 *q, const u16 *k, const u16 *v, const u16 *gradient, const float *lse,
                                const float *delta, const u32 *start, const u32 *end, u32 queries, u32 heads,
                                u32 kv_heads, float scale, float *dq) {
    DYNAMIC_SHARED(u16, memory);
    __shared__ u32 starts[ROWS], ends[ROWS];
    const int SIZE = QUERIES_KEYS * STRIDE;
    u16 *q_tile = memory, *g_tile = q_tile + ROWS * STRIDE;
    u16 *k_tiles = g_tile + ROWS * STRIDE, *v_tiles = k_tiles + 2 * SIZE;
    u32 head = blockIdx.x, group = heads / kv_heads, rows = queries * group;
    u32 first = (gridDim.y - 1 - blockIdx.y) * ROWS;
    Rows of_q = {q, heads, head * group, group};
    OfHead of_k = {k, kv_heads, head}, of_v = {v, kv_heads, head};
    int warp_row = threadIdx.x / 32 * 32;

    copy_rows<ROWS, 128>(q_tile, of_q, first, rows);
    copy_rows<ROWS, 128>(g_tile, Rows{gradient, heads, head * group, group}, first, rows);
    Hull of = hull(starts, ends, start, end, first, rows, group);
    float sum[2][HEAD_TILES][4], own_lse[2][2], own_delta[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 row = first + own_row(i / 2, i % 2);
        own_lse[i / 2][i % 2] = row < rows ? lse[of_q.place(row)] * LOG2_E : 0.0f;
        own_delta[i / 2][i % 2] = row < rows ? delta[of_q.place(row)] : 0.0f;
        clear(sum[i / 2]);
    }
    u32 from = of.from / QUERIES_KEYS * QUERIES_KEYS;
    copy_rows<QUERIES_KEYS, 128>(k_tiles, of_k, from, of.until);
    copy_rows<QUERIES_KEYS, 128>(v_tiles, of_v, from, of.until);
    end_copies();
    int turn = 0;
    for (u32 key = from; key < of.until; key += QUERIES_KEYS, turn ^= 1) {
        float s[2][QUERIES_KEYS / 8][4], d[2][QUERIES_KEYS / 8][4];
        wait_for_copies<0>();
        __syncthreads();
        copy_rows<QUERIES_KEYS, 128>(k_tiles + (turn ^ 1) * SIZE, of_k, key + QUERIES_KEYS, of.until);
        copy_rows<QUERIES_KEYS, 128>(v_tiles + (turn ^ 1) * SIZE, of_v, key + QUERIES_KEYS, of.until);
        end_copies();
        products<2, QUERIES_KEYS>(s, q_tile + warp_row * STRIDE, k_tiles + turn * SIZE);
        products<2, QUERIES_KEYS>(d, g_tile + warp_row * STRIDE, v_tiles + turn * SIZE);
        if (!of.is_inner(key, QUERIES_KEYS)) hide_all<QUERIES_KEYS>(s, starts, ends, key);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            slopes<QUERIES_KEYS / 8, 0>(s[m], d[m], scale * LOG2_E, own_lse[m][0], own_delta[m][0]);
            slopes<QUERIES_KEYS / 8, 1>(s[m], d[m], scale * LOG2_E, own_lse[m][1], own_delta[m][1]);
        }
        add_products<2, QUERIES_KEYS>(sum, s, k_tiles + turn * SIZE);
    }
    wait_for_copies<0>();

#pragma unroll
    for (int m = 0; m < 2; m++) {
        u32 low = first + own_row(m, 0), high = first + own_row(m, 1);
        if (low < rows) write_row<0>(dq + of_q.place(low) * HEAD_DIM, sum[m], scale);
        if (high < rows) write_row<1>(dq + of_q.place(high) * HEAD_DIM, sum[m], scale);
    }
}
KERNEL(attention_half_backward_queries)

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
