// What the ways with bf16 factors share (pipelined.cu, groups.cu, one_pass.cu): attention within ranges of keys, forward and
// backward (Dao 2023), formulas in attention/mod.rs. These are set when it is compiled: HEAD_DIM, a multiple of 8 up to
// 256; KEYS, those of a block where a block's own tile is keys; INNER_ROWS, rows of the inner tiles there, 32 or 64
// (128 in one_pass.cu).
//
// A tile's rows are (token, query head) pairs that share a key-value head, token by token. Tiles of the other side are
// copied while those before are multiplied. Keys are cut at fixed places and a row's sums run over keys in order, so
// its bits depend on nothing but what it sees. Exponents are those of 2. Single keys are added by singles.cu.

// Values of a head in a block's memory: zeros fill it up to whole tiles.
#define DIM ((HEAD_DIM + 15) / 16 * 16)
#define HEAD_TILES (DIM / 8)
// Pieces of a head that are copied at once.
#define CHUNKS (DIM / 8)
// Keys of an entry of `from` and `until`.
#define TABLE_KEYS 64
#define NOWHERE 0xffffffffu
#define LOG2_E 1.4426950408889634f

// Row i belongs to token i / group and head `first` + i % group.
struct Rows {
    const u16 *base;
    u32 heads, first, group;
    METHOD size_t place(u32 i) const { return (size_t)(i / group) * heads + first + i % group; }
    METHOD const u16 *at(u32 i) const { return base + place(i) * HEAD_DIM; }
};

// Row i of one head.
struct OfHead {
    const u16 *base;
    u32 heads, head;
    METHOD const u16 *at(u32 i) const { return base + ((size_t)i * heads + head) * HEAD_DIM; }
};

template <class T, int N> DEVICE void clear(T (&d)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) d[j][i] = 0;
}

// Bounds of a tile's rows. All of them see the keys from `inner_from` to `inner_until`.
struct Hull {
    u32 from, until, inner_from, inner_until;
    METHOD bool is_inner(u32 key, u32 count) const { return key >= inner_from && key + count <= inner_until; }
};

// Starts and ends of the rows from `first` go to the block's memory.
template <int COUNT>
DEVICE Hull hull(u32 (&starts)[COUNT], u32 (&ends)[COUNT], const u32 *start, const u32 *end, u32 first, u32 rows,
                 u32 group) {
    for (int i = threadIdx.x; i < COUNT; i += blockDim.x) {
        u32 row = first + i;
        starts[i] = row < rows ? start[row / group] : NOWHERE;
        ends[i] = row < rows ? end[row / group] : 0;
    }
    __syncthreads();
    Hull of = {NOWHERE, 0, 0, NOWHERE};
    for (int i = 0; i < COUNT; i++) {
        of.inner_from = max(of.inner_from, starts[i]);
        of.inner_until = min(of.inner_until, ends[i]);
        if (starts[i] >= ends[i]) continue;
        of.from = min(of.from, starts[i]);
        of.until = max(of.until, ends[i]);
    }
    return of;
}

DEVICE float over_four(float value) {
    value += __shfl_xor_sync(EVERY_LANE, value, 1);
    return value + __shfl_xor_sync(EVERY_LANE, value, 2);
}

DEVICE float largest_of_four(float value) {
    value = fmaxf(value, __shfl_xor_sync(EVERY_LANE, value, 1));
    return fmaxf(value, __shfl_xor_sync(EVERY_LANE, value, 2));
}

// Scores of the keys from `key` on that a row with these bounds does not see become -INFINITY. HALF is which of the two
// rows of a thread's tiles it is.
template <int N, int HALF> DEVICE void hide(float (&s)[N][4], u32 low, u32 high, u32 key) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            u32 at = key + 8 * j + 2 * (threadIdx.x % 4) + e;
            if (at < low || at >= high) s[j][2 * HALF + e] = -INFINITY;
        }
}

// One step of the online softmax for one row of a thread: scores become weights. Returns by how much the sums so far
// shrink to the new largest score. `total` is this lane's share. `scale` is that of scores as powers of two.
template <int N, int HALF> DEVICE float softmax_step(float (&s)[N][4], float &most, float &total, float scale) {
    float largest = most;
#pragma unroll
    for (int j = 0; j < N; j++) largest = fmaxf(largest, fmaxf(s[j][2 * HALF], s[j][2 * HALF + 1]));
    largest = largest_of_four(largest);
    // A row that has seen nothing so far keeps zeros.
    float base = largest == -INFINITY ? 0.0f : largest * scale, sum = 0.0f;
    float shrink = power_of_two(fmaf(most, scale, -base));
    most = largest;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float &score = s[j][2 * HALF + e];
            score = power_of_two(fmaf(score, scale, -base));
            sum += score;
        }
    total = fmaf(total, shrink, sum);
    return shrink;
}

template <int N, int HALF> DEVICE void shrink_row(float (&o)[N][4], float by) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        o[j][2 * HALF] *= by;
        o[j][2 * HALF + 1] *= by;
    }
}

// A thread's part of a row of results, whose tiles begin with dimension `first`.
template <int HALF, int N> DEVICE void write_row(float *row, const float (&o)[N][4], float times, int first = 0) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (first + 8 * j < HEAD_DIM) row[first + 8 * j + 2 * (threadIdx.x % 4) + e] = o[j][2 * HALF + e] * times;
}

// The same in bf16.
template <int HALF> DEVICE void write_halves(u16 *row, const float (&o)[HEAD_TILES][4], float times) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j++)
        *(u32 *)(row + 8 * j + 2 * (threadIdx.x % 4)) = pack(o[j][2 * HALF] * times, o[j][2 * HALF + 1] * times);
}

// Where results and log-sum-exps go. Results are bf16 if `halves`.
struct Results {
    float *out, *lse;
    u32 halves, has_singles;
};

// The end of the softmax for one row: its result, and its log-sum-exp. That of a row that sees nothing is 0, or
// -INFINITY where single keys are still to come.
template <int HALF>
DEVICE void finish_row(const Results &results, size_t place, const float (&o)[HEAD_TILES][4], float most, float total,
                       float scale) {
    float times = total > 0.0f ? 1.0f / total : 0.0f;
    if (results.halves) write_halves<HALF>((u16 *)results.out + place * HEAD_DIM, o, times);
    else write_row<HALF>(results.out + place * HEAD_DIM, o, times);
    if (threadIdx.x % 4) return;
    results.lse[place] = total > 0.0f ? most * scale + logf(total) : results.has_singles ? -INFINITY : 0.0f;
}

// Scores become slopes of the loss by them: exp2(s · scale − lse) · (d − delta).
template <int N, int HALF>
DEVICE void slopes(float (&s)[N][4], const float (&d)[N][4], float scale, float lse, float delta) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float &score = s[j][2 * HALF + e];
            score = power_of_two(fmaf(score, scale, -lse)) * (d[j][2 * HALF + e] - delta);
        }
}

// What the gradients of keys need of a row.
struct OfRow {
    float lse, delta;
    u32 low, high;
};

// The rows of the inner tiles that the gradients of keys read: two tiles' at a time, by one thread a row.
struct InnerRows {
    const float *lse, *delta;
    const u32 *start, *end;
    Rows of_q;
    u32 first_key, last;
    OfRow next;
    // Whether a row does not see all of the block's keys.
    float is_apart;

    METHOD void look_at(u32 row) {
        bool some = row < last;
        size_t at = some ? of_q.place(row) : 0;
        u32 token = row / of_q.group;
        next = {some ? lse[at] * LOG2_E : 0.0f, some ? delta[at] : 0.0f, some ? start[token] : 0, some ? end[token] : 0};
        is_apart = next.low <= first_key && next.high >= first_key + KEYS ? 0.0f : 1.0f;
    }
    METHOD void lay_out(OfRow rows[INNER_ROWS], float apart[INNER_ROWS / 32]) {
        if (threadIdx.x >= INNER_ROWS) return;
        rows[threadIdx.x] = next;
        float some = warp_max(is_apart);
        if (threadIdx.x % 32 == 0) apart[threadIdx.x / 32] = some;
    }
};

// Transposed scores of the keys `key` and `key` + 8, and of 8 N rows, become weights `s` and slopes `d`.
template <int N>
DEVICE void weigh(float (&s)[N][4], float (&d)[N][4], const OfRow *rows, const float apart[INNER_ROWS / 32], u32 key,
                  float scale) {
    bool some_apart = apart[0] > 0.0f || apart[INNER_ROWS / 32 - 1] > 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            OfRow of = rows[8 * j + 2 * (threadIdx.x % 4) + e];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float weight = power_of_two(fmaf(s[j][2 * i + e], scale, -of.lse));
                if (some_apart && (key + 8 * i < of.low || key + 8 * i >= of.high)) weight = 0.0f;
                s[j][2 * i + e] = weight;
                d[j][2 * i + e] = weight * (d[j][2 * i + e] - of.delta);
            }
        }
}

// The rows that may see a block's keys by their range, from the tables of the queries that do.
DEVICE void rows_of_keys(u32 bounds[2], const u32 *from, const u32 *until, u32 first, u32 keys, u32 group) {
    u32 first_query = NOWHERE, last_query = 0;
    u32 last = min(first + KEYS, keys);
    for (u32 table = first / TABLE_KEYS; table * TABLE_KEYS < last; table++) {
        if (until[table] == 0) continue;
        first_query = min(first_query, from[table]);
        last_query = max(last_query, until[table]);
    }
    bounds[0] = last_query ? first_query * group : 0;
    bounds[1] = last_query * group;
}

// Writes gradients of keys, whose tiles begin with dimension `dim`, with what single keys give to them: `slot` is a key's
// place among these, or NOWHERE.
struct OfSingles {
    const u32 *slot;
    u32 has_singles, kv_heads, head;
    template <int HALF, int N>
    METHOD void write(float *to, const float (&sum)[N][4], float times, u32 key, const float *more, int dim = 0) const {
        size_t at = ((size_t)key * kv_heads + head) * HEAD_DIM;
        u32 place = has_singles ? slot[key] : NOWHERE;
        if (place == NOWHERE) {
            write_row<HALF>(to + at, sum, times, dim);
            return;
        }
        // All are read before the first is written: a compiler cannot know that they lie apart.
        const float *from = more + ((size_t)place * kv_heads + head) * HEAD_DIM;
        float all[N][4];
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (dim + 8 * j < HEAD_DIM)
                    all[j][2 * HALF + e] =
                        fmaf(sum[j][2 * HALF + e], times, from[dim + 8 * j + 2 * (threadIdx.x % 4) + e]);
        write_row<HALF>(to + at, all, 1.0f, dim);
    }
};
