// Products of few rows: out [R, O] = x [R, I] Wᵀ + addend for W [O, I] in f32 or bf16, I even, of up to three
// matrices with the same x. Every weight is read once for a block's rows, 16 bytes at a time where I and where the
// matrix lies allow it, and a row is summed alike whatever is beside it, and however large the blocks are.
//
// bf16 weights that are read so are multiplied on tensor cores with x in three bf16 terms, which add up to it.

// Rows that are summed at once.
#define ROWS 8
// Outputs of a block, or of each of its tiles.
#define OUTPUTS 16
// Warps of a block: with f32, and with bf16.
#define WARPS_F32 4
#define WARPS_BF16 8
// Neighbouring inputs that a warp multiplies at a time.
#define SPAN 64
#define TERMS 3

// What a thread reads at once.
struct __align__(16) Quad {
    u32 a, b, c, d;
};

// One of the matrices. The addend is none, the same for every row [O], or one a row [R, O].
#define NO_ADDEND 0
#define BIAS 1
template <class WEIGHT>
struct Product {
    const WEIGHT *w;
    const float *addend;
    u32 kind, outputs;
    float *out;
    METHOD void put(float sum, u32 row, u32 output) const {
        size_t at = (size_t)row * outputs + output;
        if (kind != NO_ADDEND) sum += addend[kind == BIAS ? output : at];
        out[at] = sum;
    }
};

// COUNT neighbouring values: 2, or 8 that begin at a multiple of 16 bytes.
template <int COUNT>
DEVICE void read(float values[COUNT], const float *from) {
    if constexpr (COUNT == 2) {
        values[0] = from[0];
        values[1] = from[1];
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            Quad all = *(const Quad *)(from + i);
            values[i] = float_of(all.a);
            values[i + 1] = float_of(all.b);
            values[i + 2] = float_of(all.c);
            values[i + 3] = float_of(all.d);
        }
    }
}
DEVICE void unpack(float values[2], u32 both) {
    values[0] = unpack_low(both);
    values[1] = unpack_high(both);
}
template <int COUNT>
DEVICE void read(float values[COUNT], const u16 *from) {
    if constexpr (COUNT == 2) {
        unpack(values, *(const u32 *)from);
    } else {
        Quad all = *(const Quad *)from;
        unpack(values, all.a);
        unpack(values + 2, all.b);
        unpack(values + 4, all.c);
        unpack(values + 6, all.d);
    }
}

// A warp's COUNT columns of `count` rows, at most MOST, by reads of STEP values.
template <class WEIGHT, int COUNT, int MOST, int STEP>
DEVICE void columns(const float *x, const Product<WEIGHT> &product, u32 row, u32 count, u32 inputs, u32 first) {
    int lane = threadIdx.x % 32;
    u32 outputs = product.outputs;
    x += (size_t)row * inputs;
    float sums[MOST][COUNT];
#pragma unroll
    for (int r = 0; r < MOST; r++)
#pragma unroll
        for (int o = 0; o < COUNT; o++) sums[r][o] = 0.0f;
    for (u32 i = STEP * lane; i < inputs; i += 32 * STEP) {
        float weights[COUNT][STEP];
#pragma unroll
        for (int o = 0; o < COUNT; o++)
            read<STEP>(weights[o], product.w + (size_t)min(first + o, outputs - 1) * inputs + i);
#pragma unroll
        for (int r = 0; r < MOST; r++) {
            float own[STEP];
            read<STEP>(own, x + (size_t)min((u32)r, count - 1) * inputs + i);
#pragma unroll
            for (int o = 0; o < COUNT; o++)
#pragma unroll
                for (int e = 0; e < STEP; e++) sums[r][o] = fmaf(own[e], weights[o][e], sums[r][o]);
        }
    }
#pragma unroll
    for (int r = 0; r < MOST; r++)
#pragma unroll
        for (int o = 0; o < COUNT; o++) {
            float sum = warp_sum(sums[r][o]);
            if (lane == 0 && r < count && first + o < outputs) product.put(sum, row + r, first + o);
        }
}

// A block's columns from `first` on, of `count` rows.
template <class WEIGHT, int WARPS, int TILES, int STEP>
DEVICE void columns_of(const float *x, const Product<WEIGHT> &product, u32 row, u32 count, u32 inputs, u32 first) {
    const int own = TILES * OUTPUTS / WARPS;
    first += threadIdx.x / 32 * own;
    for (u32 done = 0; done < count; done += ROWS) {
        u32 some = min(count - done, (u32)ROWS);
        if (some == 1)
            columns<WEIGHT, own, 1, STEP>(x, product, row + done, some, inputs, first);
        else if (some <= 4)
            columns<WEIGHT, own, 4, STEP>(x, product, row + done, some, inputs, first);
        else
            columns<WEIGHT, own, ROWS, STEP>(x, product, row + done, some, inputs, first);
    }
}

#ifdef EMULATED
DEVICE Quad read_once(const u16 *from) { return *(const Quad *)from; }
#else
// Leaves the first cache to what is read again.
DEVICE Quad read_once(const u16 *from) {
    Quad all;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(all.a), "=r"(all.b), "=r"(all.c), "=r"(all.d)
        : "l"(from));
    return all;
}
#endif

// Splits 8 values into bf16 terms that add up to them.
DEVICE void split(u32 terms[TERMS][4], const float values[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low = values[2 * i], high = values[2 * i + 1];
#pragma unroll
        for (int term = 0; term < TERMS; term++) {
            u32 both = pack(low, high);
            terms[term][i] = both;
            low -= unpack_low(both);
            high -= unpack_high(both);
        }
    }
}

// What a warp has of a step for one tile: the neighbouring 8 of SPAN inputs that a lane has in either half, for
// outputs g and g + 8.
struct Weights {
    Quad low[2], high[2];
};

// d = the products of a tile's weights with ROWS rows of x, whose terms have the same inputs. Small terms come first.
DEVICE void multiply(float d[4], const Weights &w, const u32 x[2][TERMS][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] = 0.0f;
#pragma unroll
    for (int term = TERMS - 1; term >= 0; term--)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // Inputs may take any place in a product that they have in both factors.
            u32 first[4] = {w.low[half].a, w.high[half].a, w.low[half].b, w.high[half].b};
            u32 second[4] = {w.low[half].c, w.high[half].c, w.low[half].d, w.high[half].d};
            mma(d, first, x[half][term]);
            mma(d, second, x[half][term] + 2);
        }
}

// A block's TILES tiles of outputs from `first` on, for `count` of GROUPS times ROWS rows. Warps take spans of inputs
// in turn and add up their own in order, and the block adds up the warps.
template <int TILES, int GROUPS>
DEVICE void tiles_of(const float *x, const Product<u16> &product, u32 row, u32 count, u32 inputs, u32 first) {
    __shared__ float of_warps[WARPS_BF16][GROUPS * TILES * 128];
    // Spans whose weights are on their way together. Sums of many rows leave registers for those of one.
    const int ahead = GROUPS > 1 ? 1 : 4 / TILES;
    const u32 stride = WARPS_BF16 * SPAN;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const u16 *low[TILES], *high[TILES];
    float sums[GROUPS][TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        u32 output = first + OUTPUTS * tile + g;
        low[tile] = product.w + (size_t)min(output, product.outputs - 1) * inputs;
        high[tile] = product.w + (size_t)min(output + 8, product.outputs - 1) * inputs;
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[group][tile][i] = 0.0f;
    }
    x += (size_t)row * inputs;
#pragma unroll 1
    for (u32 from = warp * SPAN; from < inputs; from += ahead * stride) {
        Weights weights[ahead][TILES];
#pragma unroll
        for (int step = 0; step < ahead; step++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 at = from + step * stride + 32 * half + 8 * t;
                // Past the end x is 0.
                at = at < inputs ? at : 0;
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    weights[step][tile].low[half] = read_once(low[tile] + at);
                    weights[step][tile].high[half] = read_once(high[tile] + at);
                }
            }
#pragma unroll
        for (int step = 0; step < ahead; step++)
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                u32 terms[2][TERMS][4];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 at = from + step * stride + 32 * half + 8 * t, own = group * ROWS + g;
                    float values[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
                    if (own < count && at < inputs) read<8>(values, x + (size_t)own * inputs + at);
                    split(terms[half], values);
                }
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    float d[4];
                    multiply(d, weights[step][tile], terms);
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[group][tile][i] += d[i];
                }
            }
    }
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                of_warps[warp][((group * TILES + tile) * 4 + i) * 32 + lane] = sums[group][tile][i];
    __syncthreads();
    for (u32 i = threadIdx.x; i < GROUPS * TILES * 128; i += 32 * WARPS_BF16) {
        u32 output = i % (TILES * OUTPUTS), own = i / (TILES * OUTPUTS), tile = output / OUTPUTS;
        if (own >= count || first + output >= product.outputs) continue;
        u32 value = (output % OUTPUTS / 8) * 2 + own % 2, of_lane = output % 8 * 4 + own % ROWS / 2;
        u32 place = ((own / ROWS * TILES + tile) * 4 + value) * 32 + of_lane;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS_BF16; w++) sum += of_warps[w][place];
        product.put(sum, row + own, first + output);
    }
}

// What a block computes of one matrix. x begins at a multiple of 16 bytes: what a row is summed like hangs on the
// matrix alone.
template <int TILES, int GROUPS>
DEVICE void block_of(const float *x, const Product<float> &product, u32 row, u32 count, u32 inputs, u32 first) {
    if (inputs % 8 == 0 && (size_t)product.w % 16 == 0)
        columns_of<float, WARPS_F32, TILES, 8>(x, product, row, count, inputs, first);
    else
        columns_of<float, WARPS_F32, TILES, 2>(x, product, row, count, inputs, first);
}
template <int TILES, int GROUPS>
DEVICE void block_of(const float *x, const Product<u16> &product, u32 row, u32 count, u32 inputs, u32 first) {
    if (inputs % 8 == 0 && (size_t)product.w % 16 == 0)
        tiles_of<TILES, GROUPS>(x, product, row, count, inputs, first);
    else
        columns_of<u16, WARPS_BF16, TILES, 2>(x, product, row, count, inputs, first);
}

// Bytes of each output's weights that a block asks for before x is there.
#define AHEAD 8192

template <class WEIGHT>
DEVICE void ask_for_weights(const Product<WEIGHT> &product, u32 first, u32 outputs, u32 inputs) {
    u32 bytes = min(inputs * (u32)sizeof(WEIGHT), (u32)AHEAD), lines = (bytes + 127) / 128;
    outputs = min(outputs, product.outputs - first);
    for (u32 i = threadIdx.x; i < outputs * lines; i += blockDim.x)
        prefetch((const char *)(product.w + (size_t)(first + i / lines) * inputs) + 128 * (i % lines));
}

// Grid: blocks of outputs, those of one matrix after those of the other, and for each of them blocks of rows.
template <int TILES, int GROUPS, class WEIGHT, int COUNT>
DEVICE void few_rows(const float *x, const Product<WEIGHT> (&products)[COUNT], u32 rows, u32 inputs) {
    const u32 own = TILES * OUTPUTS, most = GROUPS * ROWS;
    u32 of_rows = (rows + most - 1) / most, block = blockIdx.x / of_rows, row = blockIdx.x % of_rows * most;
    Product<WEIGHT> product = products[0];
    bool found = false;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        u32 blocks = (products[i].outputs + own - 1) / own;
        if (found) continue;
        product = products[i];
        found = block < blocks;
        if (!found) block -= blocks;
    }
    // Blocks that begin later read at once.
    if (found && begins_first(2)) ask_for_weights(product, block * own, own, inputs);
    begin_in_turn();
    if (found) block_of<TILES, GROUPS>(x, product, row, min(rows - row, most), inputs, block * own);
}

#define MATRIX(i) const WEIGHT *w##i, const float *addend##i, u32 kind##i, u32 outputs##i
#define PRODUCT(i) {w##i, addend##i, kind##i, outputs##i, out##i}
#define FEW_ROWS(name, warps, blocks, tiles, groups)                                                            \
    extern "C" __global__ void __launch_bounds__(32 * warps, blocks)                                            \
    name##_1(const float *x, u32 rows, u32 inputs, MATRIX(0), float *out0) {                                    \
        Product<WEIGHT> products[1] = {PRODUCT(0)};                                                             \
        few_rows<tiles, groups>(x, products, rows, inputs);                                                     \
    }                                                                                                           \
    KERNEL(name##_1)                                                                                            \
    extern "C" __global__ void __launch_bounds__(32 * warps, blocks)                                            \
    name##_2(const float *x, u32 rows, u32 inputs, MATRIX(0), MATRIX(1), float *out0, float *out1) {            \
        Product<WEIGHT> products[2] = {PRODUCT(0), PRODUCT(1)};                                                 \
        few_rows<tiles, groups>(x, products, rows, inputs);                                                     \
    }                                                                                                           \
    KERNEL(name##_2)                                                                                            \
    extern "C" __global__ void __launch_bounds__(32 * warps, blocks)                                            \
    name##_3(const float *x, u32 rows, u32 inputs, MATRIX(0), MATRIX(1), MATRIX(2), float *out0, float *out1,   \
             float *out2) {                                                                                     \
        Product<WEIGHT> products[3] = {PRODUCT(0), PRODUCT(1), PRODUCT(2)};                                     \
        few_rows<tiles, groups>(x, products, rows, inputs);                                                     \
    }                                                                                                           \
    KERNEL(name##_3)

#ifdef OF_EXPERTS
// Rows of a mixture's experts, each with its expert's matrices from `first` on; table.cu comes before. Grid: blocks of
// outputs of each matrix, for every piece.
template <int TILES, int GROUPS, class WEIGHT, int COUNT>
DEVICE void rows_of_experts(const float *x, const u32 *pieces, const u32 *held, u32 first, u32 inputs, u32 outputs,
                            float *const (&outs)[COUNT]) {
    const u32 own = TILES * OUTPUTS;
    begin_in_turn();
    u32 blocks = (outputs + own - 1) / own, block = blockIdx.x % (COUNT * blocks), matrix = block / blocks;
    Piece piece = piece_of(pieces, blockIdx.x / (COUNT * blocks));
    const float *bias = bias_of(held, piece.expert, first + matrix);
    Product<WEIGHT> product = {weights_of<WEIGHT>(held, piece.expert, first + matrix), bias,
                               (u32)(bias ? BIAS : NO_ADDEND), outputs, matrix == 0 ? outs[0] : outs[COUNT - 1]};
    block_of<TILES, GROUPS>(x, product, piece.first, piece.count, inputs, block % blocks * own);
}

#define KERNELS(name, warps, blocks, tiles, groups)                                                             \
    extern "C" __global__ void __launch_bounds__(32 * warps, blocks)                                            \
    name##_experts_1(const float *x, const u32 *pieces, const u32 *held, u32 first, u32 inputs, u32 outputs,    \
                     float *out0) {                                                                             \
        float *outs[1] = {out0};                                                                                \
        rows_of_experts<tiles, groups, WEIGHT>(x, pieces, held, first, inputs, outputs, outs);                  \
    }                                                                                                           \
    KERNEL(name##_experts_1)                                                                                    \
    extern "C" __global__ void __launch_bounds__(32 * warps, blocks)                                            \
    name##_experts_2(const float *x, const u32 *pieces, const u32 *held, u32 first, u32 inputs, u32 outputs,    \
                     float *out0, float *out1) {                                                                \
        float *outs[2] = {out0, out1};                                                                          \
        rows_of_experts<tiles, groups, WEIGHT>(x, pieces, held, first, inputs, outputs, outs);                  \
    }                                                                                                           \
    KERNEL(name##_experts_2)
#else
#define KERNELS FEW_ROWS
#endif

// Each kind of blocks is a program of its own, because compiling all of them takes several seconds. KIND says which.
#if KIND == 0
#define WEIGHT float
KERNELS(few_rows_f32, WARPS_F32, 3, 1, 1)
#else
#define WEIGHT u16
#if KIND == 1
KERNELS(few_rows_bf16, WARPS_BF16, 2, 1, 1)
#elif KIND == 2
KERNELS(few_rows_bf16_wide, WARPS_BF16, 2, 2, 1)
#else
KERNELS(few_rows_bf16_tall, WARPS_BF16, 2, 2, 4)
#endif
#endif
