// Products with quantised blocks as they are stored, and what the blocks stand for. 16 rows of a matrix [O, I] lie side
// by side (side_by_side.rs says how), here called columns, and 16 threads read a group of them, one each.
//
// The numbers that tell one type of blocks from another are defined before this text: VALUES of a block and PARTS of 32
// of them; FLOATS and SCALES, which say what scales them; SCALE_BYTES of 32 values; LOW and HIGH bits of a code; ZERO, its
// code of zero; TABLE_0 to TABLE_3, whose bytes codes choose among, if TABLED.

#define GROUP 16

#define FLOATS_SCALE_AND_LEAST 1
#define FLOATS_POWER 2
#define SCALES_NONE 0
#define SCALES_SIGNED 1
#define SCALES_SIGNED_HALVES 2
#define SCALES_WITH_LEAST 3
#define SCALES_NIBBLE_HALVES 4

#define HAS_LEAST (FLOATS == FLOATS_SCALE_AND_LEAST)
// Whether 16 values have a scale of their own.
#define HALVED (SCALES == SCALES_SIGNED_HALVES || SCALES == SCALES_NIBBLE_HALVES)
#define FLOAT_BYTES (HAS_LEAST ? 4 : 2)
#define PART_BYTES (SCALE_BYTES + 4 * (LOW + HIGH))
// Bytes of a block of a group.
#define SIZE (GROUP * (FLOAT_BYTES + PARTS * PART_BYTES))
// Words of a column's 32 codes.
#define HELD (LOW + HIGH)

#ifdef EMULATED
DEVICE float of_f16(u16 bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float size = exponent ? std::ldexp(float(mantissa + 1024), exponent - 25) : std::ldexp(float(mantissa), -24);
    if (exponent == 31) size = mantissa ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
}
// Sum of products of four unsigned and four signed bytes, and c.
DEVICE int four_products(u32 a, u32 b, int c) {
    for (int i = 0; i < 32; i += 8) c += int(a >> i & 255) * int(int8_t(b >> i & 255));
    return c;
}
// Four of the bytes of low and high, by the lowest three bits of the lowest four halves of bytes.
DEVICE u32 four_bytes(u32 low, u32 high, u32 choice) {
    u64 all = u64(high) << 32 | low;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= u32(all >> (8 * (choice >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}
#else
DEVICE float of_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
DEVICE int four_products(u32 a, u32 b, int c) {
    int sum;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}
DEVICE u32 four_bytes(u32 low, u32 high, u32 choice) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(choice));
    return out;
}
#endif

// 32 values of a column as they are stored.
struct Part {
    u32 words[HELD];
    u16 floats[2];
    u8 scales[2];
};

DEVICE Part part_of(const u8 *group, u32 part, u32 lane) {
    Part out;
    const u8 *block = group + (size_t)(part / PARTS) * SIZE;
    const u8 *own = block + GROUP * (FLOAT_BYTES + part % PARTS * PART_BYTES);
    const u16 *floats = (const u16 *)block;
    out.floats[0] = floats[lane];
    out.floats[1] = HAS_LEAST ? floats[GROUP + lane] : 0;
    out.scales[0] = SCALE_BYTES > 0 ? own[lane] : 0;
    out.scales[1] = SCALE_BYTES > 1 ? own[GROUP + lane] : 0;
    const u32 *words = (const u32 *)(own + GROUP * SCALE_BYTES);
#pragma unroll
    for (int w = 0; w < HELD; w++) out.words[w] = words[GROUP * w + lane];
    return out;
}

// What the codes of each half of 32 values are multiplied with, and what is added.
struct Factors {
    float scale[2], least[2];
};

DEVICE float signed_scale(float d, u8 byte) { return product_of(d, (float)(int)(signed char)byte); }

DEVICE Factors factors_of(const Part &part) {
    float d = FLOATS == FLOATS_POWER ? float_of((u32)part.floats[0] << 16) : of_f16(part.floats[0]);
    float m = HAS_LEAST ? of_f16(part.floats[1]) : 0.0f;
    Factors out;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float scale = d, least = m;
        if (SCALES == SCALES_SIGNED) scale = signed_scale(d, part.scales[0]);
        if (SCALES == SCALES_SIGNED_HALVES) scale = signed_scale(d, part.scales[half]);
        if (SCALES == SCALES_WITH_LEAST) {
            scale = product_of(d, (float)part.scales[0]);
            least = -product_of(m, (float)part.scales[1]);
        }
        if (SCALES == SCALES_NIBBLE_HALVES) {
            scale = product_of(d, (float)(part.scales[half] & 15));
            least = -product_of(m, (float)(part.scales[half] >> 4));
        }
        out.scale[half] = scale;
        out.least[half] = least;
    }
    return out;
}

// The lowest bits of every byte.
#define BYTE_MASK(bits) (0x01010101u * ((1u << (bits)) - 1u))

// Four codes below 16 turned into what they choose.
DEVICE u32 looked_up(u32 codes) {
#if TABLED
    // The lowest three bits of all four side by side.
    u32 pairs = codes & 0x07070707u;
    pairs |= pairs >> 4;
    u32 choice = (pairs & 0xffu) | (pairs >> 8 & 0xff00u);
    u32 low = four_bytes(TABLE_0, TABLE_1, choice), high = four_bytes(TABLE_2, TABLE_3, choice);
    u32 upper = (codes >> 3 & 0x01010101u) * 255u;
    return (low & ~upper) | (high & upper);
#else
    return codes;
#endif
}

// Unsigned codes, four to a word.
DEVICE void unpack(u32 codes[WORDS], const Part &part) {
#pragma unroll
    for (int step = 0; step < WORDS; step++) {
        u32 code = part.words[step * LOW / 8] >> (step * LOW % 8) & BYTE_MASK(LOW);
#if HIGH > 0
        code |= (part.words[LOW + step * HIGH / 8] >> (step * HIGH % 8) & BYTE_MASK(HIGH)) << LOW;
#endif
        codes[step] = looked_up(code);
    }
}

// Exact sums of products of codes and a row's codes, of each half of 32 values.
DEVICE void exact_sums(int exact[2], const u32 codes[WORDS], const Fixed &row) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        exact[half] = -ZERO * row.sums[half];
#pragma unroll
        for (int step = 0; step < WORDS / 2; step++) {
            int at = half * (WORDS / 2) + step;
            exact[half] = four_products(codes[at], row.codes[at], exact[half]);
        }
    }
}

// Groups of threads of a block, each of which reads 32 values of every column at a time.
#define READERS 16
// Times 32 values that a block reads of every column in one turn.
#define TURN(rows) (READERS * ((rows) > 8 ? 1 : 2))

// What a column's sum takes of 32 values and a row: it becomes sum + product * factor + least * offset, rounded after each
// addition. With scales of halves the product has them already, and the factor is the row's scale.
struct __align__(16) Term {
    float product, factor, least, offset;
};

// What readers leave for those that sum. One row has all of its terms; several share the columns' numbers.
template <int ROWS, int TURN> struct Left {
    float products[TURN][ROWS][GROUP];
    float scales[HALVED ? 1 : TURN][GROUP];
    float leasts[!HALVED && HAS_LEAST ? TURN : 1][GROUP];

    METHOD void keep(int place, u32 lane, const Factors &factors) {
        if (!HALVED) scales[HALVED ? 0 : place][lane] = factors.scale[0];
        if (!HALVED && HAS_LEAST) leasts[!HALVED && HAS_LEAST ? place : 0][lane] = factors.least[0];
    }
    METHOD void put(int place, u32 row, u32 lane, float product, const Factors &, const Fixed &) { products[place][row][lane] = product; }
    METHOD Term term(int place, u32 row, u32 lane, const Fixed &x) const {
        float product = products[place][row][lane];
        if (HALVED) return {product, x.scale, 0.0f, 0.0f};
        float least = HAS_LEAST ? leasts[!HALVED && HAS_LEAST ? place : 0][lane] : 0.0f;
        return {product, product_of(scales[HALVED ? 0 : place][lane], x.scale), least, x.offset};
    }
};

template <int TURN> struct Left<1, TURN> {
    Term terms[TURN][GROUP];

    METHOD void keep(int, u32, const Factors &) {}
    METHOD void put(int place, u32, u32 lane, float product, const Factors &factors, const Fixed &x) {
        float factor = HALVED ? x.scale : product_of(factors.scale[0], x.scale);
        terms[place][lane] = {product, factor, factors.least[0], x.offset};
    }
    METHOD Term term(int place, u32, u32 lane, const Fixed &) const { return terms[place][lane]; }
};

template <int ROWS, int TURN>
DEVICE void leave(Left<ROWS, TURN> &left, int place, u32 lane, const Part &part, const Fixed *x, u32 count) {
    Factors factors = factors_of(part);
    u32 codes[WORDS];
    unpack(codes, part);
    left.keep(place, lane, factors);
#pragma unroll 4
    for (int r = 0; r < ROWS; r++) {
        const Fixed row = x[min((u32)r, count - 1)];
        int exact[2];
        exact_sums(exact, codes, row);
        float sum = (float)(exact[0] + exact[1]);
        if (HALVED) {
            sum = fmaf((float)exact[1], factors.scale[1], product_of((float)exact[0], factors.scale[0]));
            if (HAS_LEAST) {
                sum = fmaf(factors.least[0], (float)row.sums[0], sum);
                sum = fmaf(factors.least[1], (float)row.sums[1], sum);
            }
        }
        left.put(place, r, lane, sum, factors, row);
    }
}

// A column's sum with 32 values more.
DEVICE float added(float sum, const Term &term) {
    sum = fmaf(term.product, term.factor, sum);
    return !HALVED && HAS_LEAST ? fmaf(term.least, term.offset, sum) : sum;
}

#define NO_ADDEND 0
#define BIAS 1
// Bytes of blocks that are asked for before x is there.
#define AHEAD 65536

// One of the matrices [O, I]. The addend is none, the same for every row [O], or one a row [R, O].
struct Matrix {
    const u8 *blocks;
    const float *addend;
    u32 kind, outputs;
};
#define MATRICES 3

// out: [R, O] = x Wᵀ + addend of each matrix, one after the other. Readers take 32 values in turn; one thread for each row and
// column then sums what they left, in order: the sum has the bits that the CPU gives it.
// Grid: for every group of columns, those of a matrix after those of the one before, the tiles of rows. ROWS are at least those
// of a tile.
template <int ROWS>
DEVICE void products(Left<ROWS, TURN(ROWS)> left[2], const Matrix (&matrices)[MATRICES], const Fixed *x, u32 rows, u32 inputs,
                     float *out) {
    const int turn = TURN(ROWS), each = turn / READERS;
    u32 tiles = (rows + TILE - 1) / TILE, tile = blockIdx.x % tiles, group = blockIdx.x / tiles;
    Matrix matrix = matrices[0];
#pragma unroll
    for (int i = 1; i < MATRICES; i++) {
        u32 groups = (matrix.outputs + GROUP - 1) / GROUP;
        if (group < groups) continue;
        group -= groups;
        out += (size_t)rows * matrix.outputs;
        matrix = matrices[i];
    }
    u32 first = tile * TILE, count = min(rows - first, (u32)TILE), parts = inputs / BLOCK;
    u32 reader = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    const u8 *own = matrix.blocks + (size_t)group * (inputs / VALUES) * SIZE;
    // Blocks that begin later read at once.
    if (begins_first(2))
        for (u32 at = 128 * threadIdx.x; at < min(inputs / VALUES * SIZE, (u32)AHEAD); at += 128 * blockDim.x) prefetch(own + at);
    begin_in_turn();
    x += (size_t)first * parts;
    float sum = 0.0f;
    u32 which = 0;
    Part next[each];
#pragma unroll
    for (int e = 0; e < each; e++) next[e] = part_of(own, min(e * READERS + reader, parts - 1), lane);
    for (u32 from = 0; from < parts; from += turn) {
        Part part[each];
#pragma unroll
        for (int e = 0; e < each; e++) {
            part[e] = next[e];
            // On its way until the next turn.
            next[e] = part_of(own, min(from + turn + e * READERS + reader, parts - 1), lane);
        }
#pragma unroll
        for (int e = 0; e < each; e++) {
            u32 place = e * READERS + reader, at = min(from + place, parts - 1);
            leave(left[which], place, lane, part[e], x + (size_t)at * count, count);
        }
        __syncthreads();
        // Others are at the next turn meanwhile, which they leave elsewhere.
        if (reader < count) {
            u32 some = min(parts - from, (u32)turn);
#pragma unroll 8
            for (u32 i = 0; i < some; i++)
                sum = added(sum, left[which].term(i, reader, lane, x[(size_t)(from + i) * count + reader]));
        }
        which ^= 1;
    }
    u32 output = group * GROUP + lane, row = first + reader;
    if (reader >= count || output >= matrix.outputs) return;
    size_t at = (size_t)row * matrix.outputs + output;
    if (matrix.kind != NO_ADDEND) sum = sum_of(matrix.addend[matrix.kind == BIAS ? output : at], sum);
    out[at] = sum;
}

#define MATRIX(i) const u8 *blocks##i, const float *addend##i, u32 kind##i, u32 outputs##i
#define PRODUCTS(rows_of_tile)                                                                                          \
    extern "C" __global__ void __launch_bounds__(GROUP *READERS, 2)                                                    \
    products_##rows_of_tile(const Fixed *x, u32 rows, u32 inputs, MATRIX(0), MATRIX(1), MATRIX(2), float *out) {       \
        __shared__ Left<rows_of_tile, TURN(rows_of_tile)> left[2];                                                     \
        Matrix matrices[MATRICES] = {{blocks0, addend0, kind0, outputs0},                                              \
                                     {blocks1, addend1, kind1, outputs1},                                              \
                                     {blocks2, addend2, kind2, outputs2}};                                             \
        products<rows_of_tile>(left, matrices, x, rows, inputs, out);                                                  \
    }                                                                                                                  \
    KERNEL(products_##rows_of_tile)

PRODUCTS(1)
PRODUCTS(4)
PRODUCTS(8)
PRODUCTS(16)

DEVICE float value_of(u32 code, float scale, float least) {
    float value = product_of((float)((int)code - ZERO), scale);
    return HAS_LEAST ? sum_of(value, least) : value;
}

// 32 values of a column, `apart` from each other.
DEVICE void widen_part(float *out, const Part &part) {
    Factors factors = factors_of(part);
    u32 codes[WORDS];
    unpack(codes, part);
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        int half = i / (BLOCK / 2);
        out[i] = value_of(codes[i / 4] >> (8 * (i % 4)) & 255u, factors.scale[half], factors.least[half]);
    }
}

// Parts of 32 values that a block widens of every column of a group.
#define WIDENED 8

struct __align__(8) TwoValues {
    float low, high;
};

DEVICE void put_pair(float *out, float low, float high) { *(TwoValues *)out = {low, high}; }
DEVICE void put_pair(u16 *out, float low, float high) { *(u32 *)out = pack(low, high); }

// out [C, I]: columns from the first of group `from` on. Grid: for every group the runs of WIDENED parts.
template <class TO>
DEVICE void widen(float tile[GROUP][WIDENED * BLOCK + 1], const u8 *blocks, u32 from, u32 columns, u32 inputs, TO *out) {
    u32 parts = inputs / BLOCK, runs = (parts + WIDENED - 1) / WIDENED;
    u32 group = blockIdx.x / runs, first = blockIdx.x % runs * WIDENED, some = min(parts - first, (u32)WIDENED);
    u32 reader = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    const u8 *own = blocks + (size_t)(from + group) * (inputs / VALUES) * SIZE;
    if (reader < some) widen_part(&tile[lane][reader * BLOCK], part_of(own, first + reader, lane));
    __syncthreads();
    for (u32 column = 0; column < GROUP && group * GROUP + column < columns; column++) {
        TO *to = out + (size_t)(group * GROUP + column) * inputs + first * BLOCK;
        for (u32 i = 2 * threadIdx.x; i < some * BLOCK; i += 2 * GROUP * WIDENED)
            put_pair(to + i, tile[column][i], tile[column][i + 1]);
    }
}

extern "C" __global__ void widen_f32(const u8 *blocks, u32 from, u32 columns, u32 inputs, float *out) {
    begin_in_turn();
    __shared__ float tile[GROUP][WIDENED * BLOCK + 1];
    widen(tile, blocks, from, columns, inputs, out);
}
KERNEL(widen_f32)

extern "C" __global__ void widen_bf16(const u8 *blocks, u32 from, u32 columns, u32 inputs, u16 *out) {
    begin_in_turn();
    __shared__ float tile[GROUP][WIDENED * BLOCK + 1];
    widen(tile, blocks, from, columns, inputs, out);
}
KERNEL(widen_bf16)

// out [T, I]: the columns `ids`. A thread widens 32 values, one of `count` such.
extern "C" __global__ void widen_rows(const u8 *blocks, const u32 *ids, u32 count, u32 inputs, float *out) {
    begin_in_turn();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, parts = inputs / BLOCK;
    if (i >= count) return;
    u32 id = ids[i / parts];
    const u8 *own = blocks + (size_t)(id / GROUP) * (inputs / VALUES) * SIZE;
    float values[BLOCK];
    widen_part(values, part_of(own, i % parts, id % GROUP));
    FourValues *to = (FourValues *)(out + (size_t)i * BLOCK);
#pragma unroll
    for (int w = 0; w < WORDS; w++) to[w] = {values[4 * w], values[4 * w + 1], values[4 * w + 2], values[4 * w + 3]};
}
KERNEL(widen_rows)
