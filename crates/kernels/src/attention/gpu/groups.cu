// Attention with bf16 factors by groups of four warps (wgmma: compute capability 9.0). half.cu comes before. HEAD_DIM is 64
// or 128.
//
// A tile lies in a block's memory as panels of 64 columns, [panels, rows, 64]. Pieces of 8 values of a row are swapped
// by the row's place, as the instructions read panels of 128 bytes. A group multiplies 64 rows. Its threads have rows
// and columns of results as one warp has them of 16 rows. Products of a tile run beside the softmax of the next one.

#define THREADS 256
// Rows of a block's own tile.
#define ROWS 128
// Keys of the inner tiles.
#define FORWARD_KEYS 128
#define QUERIES_KEYS 64

// Where piece `chunk` of a row lies in a tile of COUNT rows.
template <int COUNT> DEVICE int place_of(int row, int chunk) {
    return (chunk / 8 * COUNT + row) * 64 + (chunk % 8 ^ row % 8) * 8;
}

// Begins to copy COUNT rows from `first`, those from `end` on as zeros.
template <int COUNT, class SOURCE> DEVICE void copy_tile(u16 *tile, const SOURCE &rows, u32 first, u32 end) {
#pragma unroll
    for (int i = 0; i < COUNT * CHUNKS; i += THREADS) {
        int at = i + threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS;
        bool some = first + row < end;
        copy_ahead(tile + place_of<COUNT>(row, chunk), rows.at(some ? first + row : 0) + chunk * 8, some);
    }
}

#ifndef EMULATED
#define BLOCK_MEMORY(name) extern __shared__ __align__(1024) u16 name[]
#define REGISTERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
    "%59, %60, %61, %62, %63"

#define FOUR(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define SIXTEEN(d, j) FOUR(d, j), FOUR(d, j + 1), FOUR(d, j + 2), FOUR(d, j + 3)
#define ALL_8(d) SIXTEEN(d, 0), SIXTEEN(d, 4)
#define ALL_16(d) ALL_8(d), SIXTEEN(d, 8), SIXTEEN(d, 12)

// d [64, 64] = A Bᵀ, or += with `adds`, for 16 columns of both.
DEVICE void group_multiply(float (&d)[8][4], u64 a, u64 b, bool adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGISTERS_32 "}, %32, %33, p, 1, 1, 0, 0; }"
                 : ALL_8(d)
                 : "l"(a), "l"(b), "r"((int)adds));
}
// d [64, 64] += S B for 16 columns of S in registers, 16 rows of B.
DEVICE void group_multiply(float (&d)[8][4], const u32 (&s)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGISTERS_32 "}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : ALL_8(d)
                 : "r"(s[0]), "r"(s[1]), "r"(s[2]), "r"(s[3]), "l"(b));
}

// d [64, 128] = A Bᵀ, or += with `adds`, for 16 columns of both.
DEVICE void group_multiply(float (&d)[16][4], u64 a, u64 b, bool adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0; }"
                 : ALL_16(d)
                 : "l"(a), "l"(b), "r"((int)adds));
}
// d [64, 128] += S B for 16 columns of S in registers, 16 rows of B.
DEVICE void group_multiply(float (&d)[16][4], const u32 (&s)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_64 "}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : ALL_16(d)
                 : "r"(s[0]), "r"(s[1]), "r"(s[2]), "r"(s[3]), "l"(b));
}

// Before products that read or add to registers that were written.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// What was begun so far is one group.
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most so many of the newest groups are under way.
template <int GROUPS> DEVICE void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// Makes this thread's copies visible to products, before a barrier.
DEVICE void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A product under way reads or writes these registers: the compiler is not to move them across.
template <int N> DEVICE void settle(float (&d)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[j][i])::"memory");
}
template <int N> DEVICE void settle(u32 (&d)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+r"(d[j][i])::"memory");
}

// A tile as the instructions read it: its address, bytes from a panel to the next one, bytes of 8 rows, swapped pieces.
DEVICE u64 descriptor(const u16 *at, u32 panel_bytes) {
    u64 address = shared_address(at);
    return (address & 0x3ffff) >> 4 | (u64)(panel_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Begins d = A Bᵀ: A 64 rows from `row` of a tile of A_COUNT, B all rows of a tile of 8 N.
template <int A_COUNT, int N>
DEVICE void group_products(float (&d)[N][4], const u16 *a_tile, int row, const u16 *b_tile) {
    // Rows of 16 columns lie in one panel: there is no next one.
    u64 a = descriptor(a_tile + row * 64, 16), b = descriptor(b_tile, 16);
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        int of_a = k / 4 * A_COUNT * 128 + k % 4 * 32, of_b = k / 4 * N * 8 * 128 + k % 4 * 32;
        group_multiply(d, a + (of_a >> 4), b + (of_b >> 4), k > 0);
    }
}

// Begins d += S B: S [64, 16 M] as pairs in registers, B a tile of 16 M rows.
template <int M> DEVICE void group_add_products(float (&d)[HEAD_TILES][4], const u32 (&s)[M][4], const u16 *b_tile) {
    u64 b = descriptor(b_tile, M * 16 * 128);
#pragma unroll
    for (int k = 0; k < M; k++) group_multiply(d, s[k], b + (k * 16 * 128 >> 4));
}
#else
#define BLOCK_MEMORY(name) DYNAMIC_SHARED(u16, name)
// The same tiles read value by value; products are there at once.
DEVICE void begin_products() {}
DEVICE void end_products() {}
template <int GROUPS> DEVICE void wait_for_products() {}
DEVICE void show_copies() {}
template <class T, int N> DEVICE void settle(T (&)[N][4]) {}

template <int COUNT> DEVICE float value_of(const u16 *tile, int row, int dim) {
    return unpack_low(tile[place_of<COUNT>(row, dim / 8) + dim % 8]);
}

template <int A_COUNT, int N>
DEVICE void group_products(float (&d)[N][4], const u16 *a_tile, int row, const u16 *b_tile) {
    int lane = threadIdx.x % 32, own = row + threadIdx.x % 128 / 32 * 16 + lane / 4;
    for (int j = 0; j < N; j++)
        for (int i = 0; i < 4; i++) {
            float sum = 0.0f;
            for (int dim = 0; dim < HEAD_DIM; dim++)
                sum += value_of<A_COUNT>(a_tile, own + i / 2 * 8, dim) *
                       value_of<8 * N>(b_tile, 8 * j + lane % 4 * 2 + i % 2, dim);
            d[j][i] = sum;
        }
}

template <int M> DEVICE void group_add_products(float (&d)[HEAD_TILES][4], const u32 (&s)[M][4], const u16 *b_tile) {
    int lane = threadIdx.x % 32;
    for (int k = 0; k < M; k++) {
        // What the four lanes of a row have of its 16 columns.
        u32 all[4][4];
        for (int i = 0; i < 4; i++)
            for (int other = 0; other < 4; other++) all[(lane ^ other) % 4][i] = __shfl_xor_sync(EVERY_LANE, s[k][i], other);
        for (int j = 0; j < HEAD_TILES; j++)
            for (int i = 0; i < 4; i++)
                for (int column = 0; column < 16; column++) {
                    u32 pair = all[column % 8 / 2][column / 8 * 2 + i / 2];
                    float weight = column % 2 ? unpack_high(pair) : unpack_low(pair);
                    d[j][i] += weight * value_of<16 * M>(b_tile, 16 * k + column, 8 * j + lane % 4 * 2 + i % 2);
                }
    }
}
#endif

// Results of a product as the left factor of the next one.
template <int M> DEVICE void pack_all(u32 (&to)[M][4], const float (&s)[2 * M][4]) {
#pragma unroll
    for (int k = 0; k < M; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) to[k][i] = pack(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]);
}

// A group has 64 rows of a block's ROWS; which of them a thread's first rows of results are. The second ones lie 8
// further.
DEVICE int own_row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }
DEVICE int group_row() { return threadIdx.x / 128 * 64; }

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
