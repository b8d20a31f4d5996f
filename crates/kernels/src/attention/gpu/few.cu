// Attention of few queries over many keys, as decoding has it; formulas in attention/mod.rs. HEAD_DIM, and HALVES, whether
// keys and values are bf16, are set when it is compiled.
//
// A row is a (token, query head) pair. A block takes the rows of a key-value head and PIECE keys, of which it
// reads each once; all else is f32. Keys are cut at fixed places, a key's place says which thread takes it,
// and sums run over places, so a row's bits depend on nothing but what it sees.

#define WARPS 8
#define THREADS (32 * WARPS)
// Keys of a block: divides the tiles that caches drop.
#define PIECE 128
// Rows of a step.
#define STEP 4

#define HEAD_QUADS ((HEAD_DIM + 3) / 4)
// Lanes that share a key, and what each of them holds of it.
#define KEY_LANES (HEAD_DIM <= 128 ? 8 : HEAD_DIM <= 256 ? 16 : 32)
#define KEY_QUADS ((HEAD_QUADS + KEY_LANES - 1) / KEY_LANES)
// Keys of a lane at once, of a warp, and of a block.
#define LANE_KEYS 4
#define WARP_KEYS (32 / KEY_LANES * LANE_KEYS)
#define TURN_KEYS (WARPS * WARP_KEYS)
// Lanes that share a value, groups of them, and keys of a group. Wider heads take several spans of dimensions.
#define VALUE_LANES (HEAD_QUADS <= 8 ? 8 : HEAD_QUADS <= 16 ? 16 : 32)
#define SLOTS (THREADS / VALUE_LANES)
#define SLOT_KEYS (PIECE / SLOTS)
#define SPANS ((HEAD_QUADS + VALUE_LANES - 1) / VALUE_LANES)
// Rows of a block.
#define ROWS (256 / KEY_LANES)
// Quads of all queries, and of the sums of groups that take their place.
#define QUERY_QUADS (ROWS * KEY_LANES * KEY_QUADS)
#define SUM_QUADS (STEP * THREADS)
#define SCRATCH (QUERY_QUADS > SUM_QUADS ? QUERY_QUADS : SUM_QUADS)

// What a thread reads at once.
struct __align__(16) Quad {
    float a, b, c, d;
};

// A value of a key, how many of them 128 bytes hold, and whether a lane reads eight values of a key at once.
#if HALVES
typedef u16 Held;
#define LINE 64
#define BY_EIGHT (HEAD_DIM % 8 == 0 && KEY_QUADS % 2 == 0)
#else
typedef float Held;
#define LINE 32
#define BY_EIGHT 0
#endif

// Quad `place` of a head, zeros after its end.
DEVICE Quad quad_of(const float *head, u32 place) {
    Quad own = {0.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (HEAD_DIM % 4 == 0) {
        if (place < HEAD_QUADS) own = ((const Quad *)head)[place];
    } else {
        u32 dim = 4 * place;
        if (dim < HEAD_DIM) own.a = head[dim];
        if (dim + 1 < HEAD_DIM) own.b = head[dim + 1];
        if (dim + 2 < HEAD_DIM) own.c = head[dim + 2];
        if (dim + 3 < HEAD_DIM) own.d = head[dim + 3];
    }
    return own;
}

#if HALVES
struct __align__(8) Pairs {
    u32 first, second;
};
struct __align__(16) EightHalves {
    Pairs first, second;
};

DEVICE Quad widened(const Pairs &pairs) {
    return {unpack_low(pairs.first), unpack_high(pairs.first), unpack_low(pairs.second), unpack_high(pairs.second)};
}

DEVICE float half_at(const u16 *head, u32 dim) { return dim < HEAD_DIM ? float_of((u32)head[dim] << 16) : 0.0f; }

DEVICE Quad quad_of(const u16 *head, u32 place) {
    if constexpr (HEAD_DIM % 4 == 0) {
        return place < HEAD_QUADS ? widened(((const Pairs *)head)[place]) : Quad{0.0f, 0.0f, 0.0f, 0.0f};
    } else {
        u32 dim = 4 * place;
        return {half_at(head, dim), half_at(head, dim + 1), half_at(head, dim + 2), half_at(head, dim + 3)};
    }
}
#endif

// Which quad of a head is the j-th that a lane holds of its key: where it reads eight values at once, two neighbours.
DEVICE u32 own_quad(u32 within, u32 j) {
    return BY_EIGHT ? 2 * (within + j / 2 * KEY_LANES) + j % 2 : within + j * KEY_LANES;
}

// What a lane holds of its key; zeros if there is none.
DEVICE void load_key(Quad (&quads)[KEY_QUADS], const Held *key, u32 within, bool some) {
#if HALVES
    if constexpr (BY_EIGHT) {
#pragma unroll
        for (u32 j = 0; j < KEY_QUADS; j += 2) {
            u32 place = own_quad(within, j);
            EightHalves eight = {{0, 0}, {0, 0}};
            if (some && place < HEAD_QUADS) eight = ((const EightHalves *)key)[place / 2];
            quads[j] = widened(eight.first);
            quads[j + 1] = widened(eight.second);
        }
    } else
#endif
    {
#pragma unroll
        for (u32 j = 0; j < KEY_QUADS; j++)
            quads[j] = some ? quad_of(key, own_quad(within, j)) : Quad{0.0f, 0.0f, 0.0f, 0.0f};
    }
}

DEVICE float add_dot(float sum, const Quad &x, const Quad &y) {
    sum = fmaf(x.a, y.a, sum);
    sum = fmaf(x.b, y.b, sum);
    sum = fmaf(x.c, y.c, sum);
    return fmaf(x.d, y.d, sum);
}

DEVICE void add_scaled(Quad &sum, float factor, const Quad &x) {
    sum.a = fmaf(factor, x.a, sum.a);
    sum.b = fmaf(factor, x.b, sum.b);
    sum.c = fmaf(factor, x.c, sum.c);
    sum.d = fmaf(factor, x.d, sum.d);
}

// Sums of eight values over the lanes that share a key. A lane ends with that of value `own_value()`.
DEVICE int own_value() { return threadIdx.x % KEY_LANES / (KEY_LANES / 8); }
DEVICE float shared_sum(float values[8]) {
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        int step = KEY_LANES / 8 * half;
        bool upper = threadIdx.x & step;
#pragma unroll
        for (int i = 0; i < half; i++) {
            float kept = upper ? values[i + half] : values[i], given = upper ? values[i] : values[i + half];
            values[i] = kept + __shfl_xor_sync(EVERY_LANE, given, step);
        }
    }
    float sum = values[0];
#pragma unroll
    for (int step = KEY_LANES / 16; step > 0; step /= 2) sum += __shfl_xor_sync(EVERY_LANE, sum, step);
    return sum;
}

// Keys by their places: those of a range, then single ones in order, as if they were the cache's next ones.
struct Places {
    const u32 *singles;
    u32 range_end, until;
    METHOD u32 key(u32 place) const { return place < range_end ? place : singles[place - range_end]; }
};

// What a block does.
struct Share {
    u32 piece, first, count;
    Places places;
};

// A call's queries and what they see.
struct Queries {
    const u32 *start, *end, *singles, *singles_end;
    u32 has_singles, count, group;
    METHOD u32 singles_from(u32 token) const { return has_singles && token ? singles_end[token - 1] : 0; }
    METHOD u32 until(u32 token) const {
        return end[token] + (has_singles ? singles_end[token] - singles_from(token) : 0);
    }
    // Blocks of the first pieces share their keys among all rows; later ones are of one token each, as tokens
    // of a tree have different keys at the same place.
    METHOD Share share(u32 block, u32 together, u32 keys) const {
        u32 rows = count * group, tiles = (rows + ROWS - 1) / ROWS;
        if (block < together * tiles) {
            u32 first = block % tiles * ROWS;
            return {block / tiles, first, min((u32)ROWS, rows - first), {singles, keys, keys}};
        }
        block -= together * tiles;
        u32 of_token = (group + ROWS - 1) / ROWS, blocks = count * of_token;
        u32 token = block % blocks / of_token, within = block % of_token * ROWS;
        return {together + block / blocks, token * group + within, min((u32)ROWS, group - within),
                {singles + singles_from(token), end[token], until(token)}};
    }
};

// A block's rows of scores, then of weights.
#define SCORES float (*scores)[PIECE]

// Scores of all rows: q in `queries`, [ROWS, KEY_LANES * KEY_QUADS] quads.
DEVICE void score(SCORES, const Quad *queries, const u32 *sees, const Held *k, const Share &share, u32 place,
                  u32 stride, float scale) {
    int lane = threadIdx.x % 32, within = lane % KEY_LANES, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int turn = 0; turn < PIECE; turn += TURN_KEYS) {
        int first = turn + warp * WARP_KEYS + lane / KEY_LANES;
        Quad keys[LANE_KEYS][KEY_QUADS];
#pragma unroll
        for (int i = 0; i < LANE_KEYS; i++) {
            u32 at = place + first + i * (32 / KEY_LANES);
            bool some = at < share.places.until;
            load_key(keys[i], k + (size_t)(some ? share.places.key(at) : 0) * stride, within, some);
        }
        if (turn == 0) __syncthreads();
#pragma unroll 1
        for (u32 row = 0; row < share.count; row += 2) {
            if (!sees[row / STEP]) continue;
            float sums[2 * LANE_KEYS];
#pragma unroll
            for (int i = 0; i < 2 * LANE_KEYS; i++) sums[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < KEY_QUADS; j++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    Quad q = queries[((row + r) * KEY_QUADS + j) * KEY_LANES + within];
#pragma unroll
                    for (int i = 0; i < LANE_KEYS; i++)
                        sums[r * LANE_KEYS + i] = add_dot(sums[r * LANE_KEYS + i], q, keys[i][j]);
                }
            float sum = shared_sum(sums);
            int own = own_value();
            if (within % (KEY_LANES / 8) == 0)
                scores[row + own / LANE_KEYS][first + own % LANE_KEYS * (32 / KEY_LANES)] = sum * scale;
        }
    }
}

// Scores become weights, a warp a row; largest scores and totals go to `softmax`.
DEVICE void soften(SCORES, const u32 *low, const u32 *high, const Share &share, const size_t *places,
                   float *softmax) {
    int lane = threadIdx.x % 32;
    for (u32 row = threadIdx.x / 32; row < share.count; row += WARPS) {
        Quad *own = (Quad *)scores[row] + lane, all = *own;
        float values[4] = {all.a, all.b, all.c, all.d}, largest = -INFINITY;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (4 * lane + i < low[row] || 4 * lane + i >= high[row]) values[i] = -INFINITY;
            largest = fmaxf(largest, values[i]);
        }
        largest = warp_max(largest);
        // A row that sees nothing here gets zeros.
        float base = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = expf(values[i] - base);
        *own = {values[0], values[1], values[2], values[3]};
        float total = warp_sum((values[0] + values[1]) + (values[2] + values[3]));
        if (lane == 0) {
            softmax[2 * places[row]] = largest;
            softmax[2 * places[row] + 1] = total;
        }
    }
}

// Sums of values by the weights of all rows.
DEVICE void gather(SCORES, Quad *scratch, const u32 *sees, const Held *v, const Share &share, u32 place, u32 stride,
                   const size_t *places, float *parts) {
    int slot = threadIdx.x / VALUE_LANES, within = threadIdx.x % VALUE_LANES;
#pragma unroll 1
    for (int span = 0; span < SPANS; span++) {
        Quad values[SLOT_KEYS];
#pragma unroll
        for (int i = 0; i < SLOT_KEYS; i++) {
            u32 at = place + slot * SLOT_KEYS + i;
            bool some = at < share.places.until;
            const Held *value = v + (size_t)(some ? share.places.key(at) : 0) * stride;
            values[i] = some ? quad_of(value, span * VALUE_LANES + within) : Quad{0.0f, 0.0f, 0.0f, 0.0f};
        }
        // The first span waits for weights, later ones for who reads the sums before.
        __syncthreads();
#pragma unroll 1
        for (u32 row = 0; row < share.count; row += STEP) {
            if (!sees[row / STEP]) continue;
#pragma unroll
            for (int r = 0; r < STEP; r++) {
                Quad sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < SLOT_KEYS; i += 4) {
                    Quad weights = *(const Quad *)&scores[row + r][slot * SLOT_KEYS + i];
                    add_scaled(sum, weights.a, values[i]);
                    add_scaled(sum, weights.b, values[i + 1]);
                    add_scaled(sum, weights.c, values[i + 2]);
                    add_scaled(sum, weights.d, values[i + 3]);
                }
                scratch[r * THREADS + threadIdx.x] = sum;
            }
            __syncthreads();
            u32 own = row + threadIdx.x / VALUE_LANES;
            if (threadIdx.x < STEP * VALUE_LANES && own < share.count) {
                const Quad *of_slots = scratch + threadIdx.x / VALUE_LANES * THREADS + within;
                Quad sum = of_slots[0];
#pragma unroll
                for (int i = 1; i < SLOTS; i++) add_scaled(sum, 1.0f, of_slots[i * VALUE_LANES]);
                u32 dim = 4 * (span * VALUE_LANES + within);
                float *out = parts + places[own] * HEAD_DIM + dim, all[4] = {sum.a, sum.b, sum.c, sum.d};
#pragma unroll
                for (u32 e = 0; e < 4; e++)
                    if (dim + e < HEAD_DIM) out[e] = all[e];
            }
            __syncthreads();
        }
    }
}

// Grid: blocks of pieces as `Queries::share` says, key-value heads. `sizes`: where the last range ends, the first piece that
// a row sees, how many pieces have the same keys for all rows, and how many are seen; there is room for `pieces`.
// `parts` is [Tq, N, pieces, D], not divided by the totals and not written where a row sees nothing, `softmax`
// [Tq, N, pieces, 2] the largest score and total. What is not seen is not written.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_few(const float *q, const Held *k, const Held *v, const u32 *sizes, const u32 *start, const u32 *end,
              const u32 *singles, const u32 *singles_end, u32 has_singles, u32 queries, u32 heads, u32 kv_heads,
              u32 pieces, float scale, float *parts, float *softmax) {
    begin_in_turn();
    __shared__ Quad scratch[SCRATCH], weights[ROWS * PIECE / 4];
    __shared__ u32 low[ROWS], high[ROWS], sees[ROWS / STEP];
    __shared__ size_t places[ROWS];
    u32 head = blockIdx.y, group = heads / kv_heads, stride = kv_heads * HEAD_DIM;
    Queries all = {start, end, singles, singles_end, has_singles, queries, group};
    u32 keys = sizes[0], first_piece = sizes[1], together = sizes[2], count = sizes[3];
    Share share = all.share(blockIdx.x, together, keys);
    // Room that nobody sees yet.
    if (share.piece >= count) return;
    u32 place = (first_piece + share.piece) * PIECE;
    float (*scores)[PIECE] = (float (*)[PIECE])weights;
    k += head * HEAD_DIM;
    v += head * HEAD_DIM;

    const u32 lines = (HEAD_DIM + LINE - 1) / LINE;
    for (u32 i = threadIdx.x; i < PIECE * lines; i += THREADS)
        if (place + i / lines < share.places.range_end)
            prefetch(v + (size_t)(place + i / lines) * stride + i % lines * LINE);
    for (u32 i = threadIdx.x; i < share.count * KEY_LANES * KEY_QUADS; i += THREADS) {
        u32 row = share.first + i / (KEY_LANES * KEY_QUADS);
        const float *own = q + ((size_t)(row / group) * heads + head * group + row % group) * HEAD_DIM;
        u32 of_row = i % (KEY_LANES * KEY_QUADS);
        scratch[i] = quad_of(own, own_quad(of_row % KEY_LANES, of_row / KEY_LANES));
    }
    // Warp 0 alone: each lane has a row.
    if (threadIdx.x < 32) {
        u32 token = (share.first + threadIdx.x) / group, row = (share.first + threadIdx.x) % group, from = 0, until = 0;
        if (threadIdx.x < share.count) {
            from = max(start[token], place) - place;
            until = min(max(all.until(token), place) - place, (u32)PIECE);
            places[threadIdx.x] = ((size_t)token * heads + head * group + row) * pieces + share.piece;
            low[threadIdx.x] = from;
            high[threadIdx.x] = until;
        }
        float any = from < until ? 1.0f : 0.0f;
#pragma unroll
        for (int step = 1; step < STEP; step *= 2) any = fmaxf(any, __shfl_xor_sync(EVERY_LANE, any, step));
        if (threadIdx.x < ROWS && threadIdx.x % STEP == 0) sees[threadIdx.x / STEP] = any > 0.0f;
    }

    score(scores, scratch, sees, k, share, place, stride, scale);
    __syncthreads();
    soften(scores, low, high, share, places, softmax);
    gather(scores, scratch, sees, v, share, place, stride, places, parts);
}
KERNEL(attention_few)

// Joins the pieces of a row: a block a row, a thread a dimension.
extern "C" __global__ void attention_few_join(const float *parts, const float *softmax, const u32 *sizes, u32 room,
                                              float *out) {
    begin_in_turn();
    __shared__ float weights[512], totals[512];
    const u32 at_once = 32;
    size_t first = (size_t)blockIdx.x * room;
    u32 dim = threadIdx.x, pieces = sizes[3];
    float largest = -INFINITY, total = 0.0f, sum = 0.0f;
    for (u32 i = threadIdx.x % 32; i < pieces; i += 32) largest = fmaxf(largest, softmax[2 * (first + i)]);
    largest = warp_max(largest);
    for (u32 piece = 0; piece < pieces; piece += blockDim.x) {
        u32 own = piece + threadIdx.x;
        float own_total = own < pieces ? softmax[2 * (first + own) + 1] : 0.0f;
        // Pieces that a row does not see are left out, so their number changes no bit.
        float weight = own_total == 0.0f ? 0.0f : expf(softmax[2 * (first + own)] - largest);
        __syncthreads();
        weights[threadIdx.x] = weight;
        totals[threadIdx.x] = own_total * weight;
        __syncthreads();
        for (u32 i = 0; i < min(blockDim.x, pieces - piece); i += at_once) {
            float values[at_once];
#pragma unroll
            for (u32 j = 0; j < at_once; j++) {
                bool seen = weights[i + j] != 0.0f && dim < HEAD_DIM;
                values[j] = seen ? parts[(first + piece + i + j) * HEAD_DIM + dim] : 0.0f;
            }
#pragma unroll
            for (u32 j = 0; j < at_once; j++) {
                sum = fmaf(weights[i + j], values[j], sum);
                total += totals[i + j];
            }
        }
    }
    if (dim < HEAD_DIM) out[(size_t)blockIdx.x * HEAD_DIM + dim] = total == 0.0f ? 0.0f : sum * (1.0f / total);
}
KERNEL(attention_few_join)
