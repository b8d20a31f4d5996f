// The backward pass of attention with bf16 factors in one kernel, by groups of four warps. half.cu and group_tiles.cu come
// before. Scores are formed once for the gradients of queries, keys and values: five products in place of seven.
//
// A block has a tile of keys, and adds its part of dQ for a tile of rows after the block of the keys before has added its
// own. So sums are in the order of the keys, and the same in every run. Blocks take their keys by tickets in that order:
// whoever is waited for has a lower ticket, so it runs already, and the lowest one waits for nobody. So no block waits for
// ever, in whatever order the hardware begins them. Rows are taken from the last to the first: with causal masks the
// blocks that have most to do begin first, and those that begin together follow each other one tile apart.

// Floats from a row of a part of dQ to the next one: rows lie in different banks.
#define PART_STRIDE (HEAD_DIM + 8)
// Both groups multiply all rows, each half of the dimensions of wide heads. Else each has half of the rows.
#define SHARES_ROWS (INNER_ROWS == 64)

#ifndef EMULATED
// d [64, 64] = Aᵀ B, or += with `adds`, for 16 rows of both.
DEVICE void group_multiply_turned(float (&d)[8][4], u64 a, u64 b, bool adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGISTERS_32 "}, %32, %33, p, 1, 1, 1, 1; }"
                 : ALL_8(d)
                 : "l"(a), "l"(b), "r"((int)adds));
}

// Begins d = Aᵀ B for panels of KEYS rows.
DEVICE void group_turned_products(float (&d)[8][4], const u16 *a_panel, const u16 *b_panel) {
    u64 a = descriptor(a_panel, KEYS * 128), b = descriptor(b_panel, KEYS * 128);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        group_multiply_turned(d, a + (k * 16 * 128 >> 4), b + (k * 16 * 128 >> 4), k > 0);
}

DEVICE void write_pair(float *to, float first, float second) { *(float2 *)to = make_float2(first, second); }

DEVICE u32 take_ticket(u32 *tickets) {
    u32 own;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(own) : "l"(tickets) : "memory");
    return own;
}
// Whose turn it is. What those before have added is there then.
DEVICE u32 look_at_turn(const u32 *turn) {
    u32 now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    return now;
}
DEVICE void wait_a_moment() {}
// Between what a thread knows to be there and the rows that it begins: they go as copies of memory do.
DEVICE void see_rows() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Begins to write a row of a part of dQ, or to add it.
DEVICE void begin_row(float *to, const float *from, bool adds) {
    if (adds)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                     "r"(shared_address(from)), "n"(HEAD_DIM * 4)
                     : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                     "n"(HEAD_DIM * 4)
                     : "memory");
}
// Waits until what this thread began is there.
DEVICE void wait_for_rows() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    see_rows();
}
// By one thread, after all have waited for their rows and have met.
DEVICE void pass_turn(u32 *turn, u32 next) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turn), "r"(next) : "memory");
}
#else
DEVICE void group_turned_products(float (&d)[8][4], const u16 *a_panel, const u16 *b_panel) {
    int lane = threadIdx.x % 32, own = threadIdx.x % 128 / 32 * 16 + lane / 4;
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 4; i++) {
            float sum = 0.0f;
            for (int key = 0; key < KEYS; key++)
                sum += value_of<KEYS>(a_panel, key, own + i / 2 * 8) *
                       value_of<KEYS>(b_panel, key, 8 * j + lane % 4 * 2 + i % 2);
            d[j][i] = sum;
        }
}

DEVICE void write_pair(float *to, float first, float second) {
    to[0] = first;
    to[1] = second;
}

// The row that each thread has begun. It is read as late as may be.
struct Begun {
    float *to;
    const float *from;
    bool adds;
};
static Begun begun[THREADS];

DEVICE u32 take_ticket(u32 *tickets) { return (*tickets)++; }
DEVICE u32 look_at_turn(const u32 *turn) { return *turn; }
// Blocks run one after the other: a turn that has not come never does.
DEVICE void wait_a_moment() { __builtin_trap(); }
DEVICE void see_rows() {}
DEVICE void begin_row(float *to, const float *from, bool adds) { begun[threadIdx.x] = {to, from, adds}; }
DEVICE void wait_for_rows() {
    Begun &row = begun[threadIdx.x];
    for (int i = 0; row.to && i < HEAD_DIM; i++) row.to[i] = row.adds ? row.to[i] + row.from[i] : row.from[i];
    row.to = nullptr;
}
DEVICE void pass_turn(u32 *turn, u32 next) { *turn = next; }
#endif

// Whether a row of an inner tile does not see all of the block's keys.
DEVICE bool are_some_apart(const float apart[INNER_ROWS / 32]) {
    bool some = false;
#pragma unroll
    for (int i = 0; i < INNER_ROWS / 32; i++) some = some || apart[i] > 0.0f;
    return some;
}

// Transposed scores of the keys `key` and `key` + 8, and of 8 N rows, become weights.
template <int N>
DEVICE void weights_of(float (&s)[N][4], const OfRow *rows, const float apart[INNER_ROWS / 32], u32 key, float scale) {
    bool some_apart = are_some_apart(apart);
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const OfRow &of = rows[8 * j + 2 * (threadIdx.x % 4) + e];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float &score = s[j][2 * i + e];
                score = power_of_two(fmaf(score, scale, -of.lse));
                if (some_apart && (key + 8 * i < of.low || key + 8 * i >= of.high)) score = 0.0f;
            }
        }
}

// Weights become slopes of the loss by their scores.
template <int N> DEVICE void slopes_of(float (&s)[N][4], const float (&d)[N][4], const OfRow *rows) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float delta = rows[8 * j + 2 * (threadIdx.x % 4) + e].delta;
#pragma unroll
            for (int i = 0; i < 2; i++) s[j][2 * i + e] *= d[j][2 * i + e] - delta;
        }
}

// A thread's slopes go to the tile from which they are the left factor of dQ, [KEYS, INNER_ROWS].
DEVICE void lay_out_slopes(u16 *tile, const u32 (&slopes)[INNER_ROWS / 16][4]) {
#pragma unroll
    for (int k = 0; k < INNER_ROWS / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(u32 *)(tile + place_of<KEYS>(own_row() + i % 2 * 8, 2 * k + i / 2) + 2 * (threadIdx.x % 4)) = slopes[k][i];
}

// A thread's part of dQ goes to where its first row begins, and 8 rows further.
DEVICE void lay_out_part(float *first, const float (&part)[8][4], float scale) {
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            write_pair(first + i * 8 * PART_STRIDE + 8 * j + 2 * (threadIdx.x % 4), part[j][2 * i] * scale,
                       part[j][2 * i + 1] * scale);
}

// How a block's parts of dQ are added: that of a tile of rows while the next tile's scores are formed, some rows by each warp.
struct Parts {
    float *dq;
    const float *part;
    // Whose turn it is at each tile of rows of the block's head.
    u32 *turns;
    // The tiles of keys whose blocks add to a tile of rows.
    const u32 *keys_from, *keys_until;
    // The block's tile of keys.
    u32 own;
    // The tile of rows; the block's turn there, NOWHERE if it adds nothing; whose turn it was.
    u32 tile, turn, now;

    METHOD void look_at(u32 next) {
        tile = next;
        u32 from = keys_from[tile];
        turn = own >= from && own < keys_until[tile] ? own - from : NOWHERE;
        if (turn != NOWHERE) now = look_at_turn(turns + tile);
    }
    METHOD void begin(const Rows &of_q, u32 rows) {
        if (turn == NOWHERE) return;
        while (now != turn) {
            wait_a_moment();
            now = look_at_turn(turns + tile);
        }
        see_rows();
        const u32 COUNT = INNER_ROWS / (THREADS / 32);
        u32 i = threadIdx.x / 32 * COUNT + threadIdx.x % 32, row = tile * INNER_ROWS + i;
        if (threadIdx.x % 32 < COUNT && row < rows)
            begin_row(dq + of_q.place(row) * HEAD_DIM, part + i * PART_STRIDE, turn > 0);
#ifndef EMULATED
        // Products of a group need its warps whole.
        __syncwarp();
#endif
    }
    METHOD void pass() const {
        if (turn != NOWHERE && threadIdx.x == 0) pass_turn(turns + tile, turn + 1);
    }
};

// dQ, dK and dV. Blocks: key-value heads times tiles of keys. `rows_from` and `rows_until` are the first tile of rows that a
// tile of keys visits and the one after the last. Of the tiles of keys from `keys_from` to `keys_until` all add to a tile of
// rows, of which there is one at least. `turns` begins with zeros: tickets, then turns by head and tile of rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_half_backward(const u16 *q, const u16 *k, const u16 *v, const u16 *gradient, const float *lse,
                        const float *delta, const u32 *start, const u32 *end, const u32 *rows_from, const u32 *rows_until,
                        const u32 *keys_from, const u32 *keys_until, const u32 *slot, const float *singles_dk,
                        const float *singles_dv, u32 *turns, u32 has_singles, u32 queries, u32 keys, u32 heads,
                        u32 kv_heads, float scale, float *dq, float *dk, float *dv) {
    BLOCK_MEMORY(memory);
    __shared__ OfRow of_rows[2][INNER_ROWS];
    __shared__ float apart[2][INNER_ROWS / 32];
    __shared__ u32 ticket;
    const int SIZE = INNER_ROWS * HEAD_DIM;
    u16 *k_tile = memory, *v_tile = k_tile + KEYS * HEAD_DIM;
    u16 *q_tiles = v_tile + KEYS * HEAD_DIM, *g_tiles = q_tiles + 2 * SIZE, *slope_tile = g_tiles + 2 * SIZE;
    float *part_tile = (float *)(slope_tile + KEYS * INNER_ROWS);
    if (threadIdx.x == 0) ticket = take_ticket(turns);
    __syncthreads();
    u32 head = ticket % kv_heads, own = ticket / kv_heads, first = own * KEYS;
    u32 group = heads / kv_heads, rows = queries * group;
    Rows of_q = {q, heads, head * group, group}, of_g = {gradient, heads, head * group, group};
    u32 own_key = first + own_row(), low = rows_from[own], tile = rows_until[own];
    const u16 *slope_panel = slope_tile + (SHARES_ROWS ? 0 : group_row() * KEYS);
    const u16 *k_panel = k_tile + (SHARES_ROWS ? group_row() * KEYS : 0);
    float *own_part = part_tile + (SHARES_ROWS ? own_row() % 64 * PART_STRIDE + group_row() : own_row() * PART_STRIDE);

    copy_tile<KEYS>(k_tile, OfHead{k, kv_heads, head}, first, keys);
    copy_tile<KEYS>(v_tile, OfHead{v, kv_heads, head}, first, keys);
    InnerRows inner = {lse, delta, start, end, of_q, first, rows, {}, 0.0f};
    u32 tiles = (rows + INNER_ROWS - 1) / INNER_ROWS;
    Parts parts = {dq, part_tile, turns + 1 + head * tiles, keys_from, keys_until, own, 0, NOWHERE, 0};
    if (tile > low) {
        u32 last = (tile - 1) * INNER_ROWS;
        copy_tile<INNER_ROWS>(q_tiles, of_q, last, rows);
        copy_tile<INNER_ROWS>(g_tiles, of_g, last, rows);
        inner.look_at(last + threadIdx.x);
        inner.lay_out(of_rows[0], apart[0]);
    }
    end_copies();
    float sum_k[HEAD_TILES][4], sum_v[HEAD_TILES][4];
    clear(sum_k);
    clear(sum_v);
    for (int turn = 0; tile > low; turn ^= 1) {
        tile--;
        const u16 *q_tile = q_tiles + turn * SIZE, *g_tile = g_tiles + turn * SIZE;
        float s[INNER_ROWS / 8][4], d[INNER_ROWS / 8][4], part[8][4];
        u32 weights[INNER_ROWS / 16][4], by_scores[INNER_ROWS / 16][4];
        wait_for_copies<0>();
        show_copies();
        __syncthreads();
        if (tile > low) {
            u32 next = (tile - 1) * INNER_ROWS;
            copy_tile<INNER_ROWS>(q_tiles + (turn ^ 1) * SIZE, of_q, next, rows);
            copy_tile<INNER_ROWS>(g_tiles + (turn ^ 1) * SIZE, of_g, next, rows);
            if (threadIdx.x < INNER_ROWS) inner.look_at(next + threadIdx.x);
        }
        end_copies();
        begin_products();
        group_products<KEYS>(s, k_tile, group_row(), q_tile);
        end_products();
        group_products<KEYS>(d, v_tile, group_row(), g_tile);
        end_products();
        parts.begin(of_q, rows);
        wait_for_products<1>();
        settle(s);
        weights_of(s, of_rows[turn], apart[turn], own_key, scale * LOG2_E);
        pack_all(weights, s);
        begin_products();
        group_add_products(sum_v, weights, g_tile);
        end_products();
        wait_for_products<1>();
        settle(d);
        slopes_of(s, d, of_rows[turn]);
        pack_all(by_scores, s);
        lay_out_slopes(slope_tile, by_scores);
        inner.lay_out(of_rows[turn ^ 1], apart[turn ^ 1]);
        wait_for_rows();
        show_copies();
        __syncthreads();
        begin_products();
        group_turned_products(part, slope_panel, k_panel);
        end_products();
        group_add_products(sum_k, by_scores, q_tile);
        end_products();
        parts.pass();
        parts.look_at(tile);
        wait_for_products<1>();
        settle(part);
        settle(sum_v);
        settle(weights);
        lay_out_part(own_part, part, scale);
        wait_for_products<0>();
        settle(sum_k);
        settle(by_scores);
    }
    wait_for_copies<0>();
    show_copies();
    __syncthreads();
    parts.begin(of_q, rows);
    wait_for_rows();
    __syncthreads();
    parts.pass();

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
KERNEL(attention_half_backward)
