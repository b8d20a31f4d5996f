// Attention with bf16 factors by warps (mma.sync, ldmatrix, cp.async: compute capability 8.0 and above). half.cu
// comes before, keys.cu or keys_shared.cu after it. These are set when it is compiled: rows of a block's own tile, FORWARD_ROWS
// and QUERIES_ROWS; keys of the inner tiles, FORWARD_KEYS and QUERIES_KEYS; how many tiles of values the gradient of
// queries holds, VALUE_PLACES, 1 or 2.

#define STRIDE (DIM + 8)
// A warp has so many times 16 rows: its sums of wide heads leave registers for one.
#define STRIPS (DIM <= 128 ? 2 : 1)
#define WARP_ROWS (16 * STRIPS)
#define FORWARD_THREADS (FORWARD_ROWS / WARP_ROWS * 32)
#define QUERIES_THREADS (QUERIES_ROWS / WARP_ROWS * 32)

// Begins to copy COUNT rows from `first`, those from `end` on as zeros, as [COUNT, STRIDE].
template <int COUNT, int THREADS, class SOURCE>
DEVICE void copy_rows(u16 *tile, const SOURCE &rows, u32 first, u32 end) {
#pragma unroll
    for (int i = 0; i < COUNT * CHUNKS; i += THREADS) {
        int at = i + threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS * 8;
        if (COUNT * CHUNKS % THREADS && at >= COUNT * CHUNKS) break;
        bool some = first + row < end && chunk < HEAD_DIM;
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
    for (int k = 0; k < DIM; k += 16) {
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

// d [16 M, DIM] += S B for S [16 M, COUNT] in registers and rows of B.
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
        for (int n = 0; n < DIM; n += 16) {
            load_turned_tiles(b, b_at + k * STRIDE + n);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(d[m][n / 8], a[m], b);
                mma(d[m][n / 8 + 1], a[m], b + 2);
            }
        }
    }
}

// Row m · 16 + half · 8 of a thread among those of its warp, as a row of the block's tile.
DEVICE int own_row(int m, int half) { return threadIdx.x / 32 * WARP_ROWS + m * 16 + half * 8 + threadIdx.x % 32 / 4; }

// The place after one of three.
DEVICE int after(int place) { return place == 2 ? 0 : place + 1; }

template <int COUNT>
DEVICE void hide_all(float (&s)[STRIPS][COUNT / 8][4], const u32 *starts, const u32 *ends, u32 key) {
#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
        hide<COUNT / 8, 0>(s[m], starts[own_row(m, 0)], ends[own_row(m, 0)], key);
        hide<COUNT / 8, 1>(s[m], starts[own_row(m, 1)], ends[own_row(m, 1)], key);
    }
}

// Grid: key-value heads, tiles of rows; those that see most begin first. Results are [Tq, N, D], in bf16 if `halves`, and
// the log-sum-exp [Tq, N].
extern "C" __global__ void __launch_bounds__(FORWARD_THREADS)
attention_half_forward(const u16 *q, const u16 *k, const u16 *v, const u32 *start, const u32 *end, u32 has_singles,
                       u32 queries, u32 heads, u32 kv_heads, float scale, u32 halves, float *out, float *lse) {
    DYNAMIC_SHARED(u16, memory);
    __shared__ u32 starts[FORWARD_ROWS], ends[FORWARD_ROWS];
    const int SIZE = FORWARD_KEYS * STRIDE;
    // Tiles of keys and of values take turns at three places.
    u16 *q_tile = memory, *tiles = q_tile + FORWARD_ROWS * STRIDE;
    u32 head = blockIdx.x, group = heads / kv_heads, rows = queries * group;
    u32 first = (gridDim.y - 1 - blockIdx.y) * FORWARD_ROWS;
    Rows of_q = {q, heads, head * group, group};
    OfHead of_k = {k, kv_heads, head}, of_v = {v, kv_heads, head};
    const u16 *own_q = q_tile + threadIdx.x / 32 * WARP_ROWS * STRIDE;

    copy_rows<FORWARD_ROWS, FORWARD_THREADS>(q_tile, of_q, first, rows);
    Hull of = hull(starts, ends, start, end, first, rows, group);
    float o[STRIPS][HEAD_TILES][4], most[STRIPS][2], total[STRIPS][2];
#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
        clear(o[m]);
        most[m][0] = most[m][1] = -INFINITY;
        total[m][0] = total[m][1] = 0.0f;
    }
    u32 from = of.from / FORWARD_KEYS * FORWARD_KEYS;
    copy_rows<FORWARD_KEYS, FORWARD_THREADS>(tiles, of_k, from, of.until);
    end_copies();
    copy_rows<FORWARD_KEYS, FORWARD_THREADS>(tiles + SIZE, of_v, from, of.until);
    end_copies();
    int of_keys = 0;
    for (u32 key = from; key < of.until; key += FORWARD_KEYS) {
        float s[STRIPS][FORWARD_KEYS / 8][4];
        int of_values = after(of_keys), next = after(of_values);
        wait_for_copies<1>();
        __syncthreads();
        copy_rows<FORWARD_KEYS, FORWARD_THREADS>(tiles + next * SIZE, of_k, key + FORWARD_KEYS, of.until);
        end_copies();
        products<STRIPS, FORWARD_KEYS>(s, own_q, tiles + of_keys * SIZE);
        if (!of.is_inner(key, FORWARD_KEYS)) hide_all<FORWARD_KEYS>(s, starts, ends, key);
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            float power = scale * LOG2_E;
            shrink_row<HEAD_TILES, 0>(o[m], softmax_step<FORWARD_KEYS / 8, 0>(s[m], most[m][0], total[m][0], power));
            shrink_row<HEAD_TILES, 1>(o[m], softmax_step<FORWARD_KEYS / 8, 1>(s[m], most[m][1], total[m][1], power));
        }
        wait_for_copies<1>();
        __syncthreads();
        copy_rows<FORWARD_KEYS, FORWARD_THREADS>(tiles + of_keys * SIZE, of_v, key + FORWARD_KEYS, of.until);
        end_copies();
        add_products<STRIPS, FORWARD_KEYS>(o, s, tiles + of_values * SIZE);
        of_keys = next;
    }
    wait_for_copies<0>();

    Results results = {out, lse, halves, has_singles};
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; i++) {
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
extern "C" __global__ void __launch_bounds__(QUERIES_THREADS)
attention_half_backward_queries(const u16 *q, const u16 *k, const u16 *v, const u16 *gradient, const float *lse,
                                const float *delta, const u32 *start, const u32 *end, u32 queries, u32 heads,
                                u32 kv_heads, float scale, float *dq) {
    DYNAMIC_SHARED(u16, memory);
    __shared__ u32 starts[QUERIES_ROWS], ends[QUERIES_ROWS];
    const int SIZE = QUERIES_KEYS * STRIDE;
    u16 *q_tile = memory, *g_tile = q_tile + QUERIES_ROWS * STRIDE;
    u16 *k_tiles = g_tile + QUERIES_ROWS * STRIDE, *v_tiles = k_tiles + 2 * SIZE;
    u32 head = blockIdx.x, group = heads / kv_heads, rows = queries * group;
    u32 first = (gridDim.y - 1 - blockIdx.y) * QUERIES_ROWS;
    Rows of_q = {q, heads, head * group, group};
    OfHead of_k = {k, kv_heads, head}, of_v = {v, kv_heads, head};
    int warp_row = threadIdx.x / 32 * WARP_ROWS;

    copy_rows<QUERIES_ROWS, QUERIES_THREADS>(q_tile, of_q, first, rows);
    copy_rows<QUERIES_ROWS, QUERIES_THREADS>(g_tile, Rows{gradient, heads, head * group, group}, first, rows);
    Hull of = hull(starts, ends, start, end, first, rows, group);
    float sum[STRIPS][HEAD_TILES][4], own_lse[STRIPS][2], own_delta[STRIPS][2];
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; i++) {
        u32 row = first + own_row(i / 2, i % 2);
        own_lse[i / 2][i % 2] = row < rows ? lse[of_q.place(row)] * LOG2_E : 0.0f;
        own_delta[i / 2][i % 2] = row < rows ? delta[of_q.place(row)] : 0.0f;
        clear(sum[i / 2]);
    }
    u32 from = of.from / QUERIES_KEYS * QUERIES_KEYS;
    copy_rows<QUERIES_KEYS, QUERIES_THREADS>(k_tiles, of_k, from, of.until);
    copy_rows<QUERIES_KEYS, QUERIES_THREADS>(v_tiles, of_v, from, of.until);
    end_copies();
    int turn = 0;
    for (u32 key = from; key < of.until; key += QUERIES_KEYS, turn ^= 1) {
        float s[STRIPS][QUERIES_KEYS / 8][4], d[STRIPS][QUERIES_KEYS / 8][4];
        const u16 *v_tile = v_tiles + turn % VALUE_PLACES * SIZE;
        wait_for_copies<0>();
        __syncthreads();
        copy_rows<QUERIES_KEYS, QUERIES_THREADS>(k_tiles + (turn ^ 1) * SIZE, of_k, key + QUERIES_KEYS, of.until);
        if (VALUE_PLACES == 2)
            copy_rows<QUERIES_KEYS, QUERIES_THREADS>(v_tiles + (turn ^ 1) * SIZE, of_v, key + QUERIES_KEYS, of.until);
        end_copies();
        products<STRIPS, QUERIES_KEYS>(s, q_tile + warp_row * STRIDE, k_tiles + turn * SIZE);
        products<STRIPS, QUERIES_KEYS>(d, g_tile + warp_row * STRIDE, v_tile);
        if (VALUE_PLACES == 1) {
            __syncthreads();
            copy_rows<QUERIES_KEYS, QUERIES_THREADS>(v_tiles, of_v, key + QUERIES_KEYS, of.until);
            end_copies();
        }
        if (!of.is_inner(key, QUERIES_KEYS)) hide_all<QUERIES_KEYS>(s, starts, ends, key);
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            slopes<QUERIES_KEYS / 8, 0>(s[m], d[m], scale * LOG2_E, own_lse[m][0], own_delta[m][0]);
            slopes<QUERIES_KEYS / 8, 1>(s[m], d[m], scale * LOG2_E, own_lse[m][1], own_delta[m][1]);
        }
        add_products<STRIPS, QUERIES_KEYS>(sum, s, k_tiles + turn * SIZE);
    }
    wait_for_copies<0>();

#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
        u32 low = first + own_row(m, 0), high = first + own_row(m, 1);
        if (low < rows) write_row<0>(dq + of_q.place(low) * HEAD_DIM, sum[m], scale);
        if (high < rows) write_row<1>(dq + of_q.place(high) * HEAD_DIM, sum[m], scale);
    }
}
KERNEL(attention_half_backward_queries)
