// Products of few rows: out [R, O] = x [R, I] Wᵀ + addend for W [O, I] in f32 or bf16, I even, of up to three
// matrices with the same x. Every weight is read once for ROWS rows, 16 bytes at a time where I and where the
// matrix lies allow it, and a row is summed alike whatever is beside it.

#define ROWS 8
#define OUTPUTS 4

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

// A warp's OUTPUTS columns of `count` rows, at most MOST, by reads of STEP values.
template <class WEIGHT, int MOST, int STEP>
DEVICE void columns(const float *x, const Product<WEIGHT> &product, u32 row, u32 count, u32 inputs, u32 first) {
    int lane = threadIdx.x % 32;
    u32 outputs = product.outputs;
    x += (size_t)row * inputs;
    float sums[MOST][OUTPUTS];
#pragma unroll
    for (int r = 0; r < MOST; r++)
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) sums[r][o] = 0.0f;
    for (u32 i = STEP * lane; i < inputs; i += 32 * STEP) {
        float weights[OUTPUTS][STEP];
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++)
            read<STEP>(weights[o], product.w + (size_t)min(first + o, outputs - 1) * inputs + i);
#pragma unroll
        for (int r = 0; r < MOST; r++) {
            float own[STEP];
            read<STEP>(own, x + (size_t)min((u32)r, count - 1) * inputs + i);
#pragma unroll
            for (int o = 0; o < OUTPUTS; o++)
#pragma unroll
                for (int e = 0; e < STEP; e++) sums[r][o] = fmaf(own[e], weights[o][e], sums[r][o]);
        }
    }
#pragma unroll
    for (int r = 0; r < MOST; r++)
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) {
            float sum = warp_sum(sums[r][o]);
            if (lane != 0 || r >= count || first + o >= outputs) continue;
            size_t at = (size_t)(row + r) * outputs + first + o;
            if (product.kind != NO_ADDEND) sum += product.addend[product.kind == BIAS ? first + o : at];
            product.out[at] = sum;
        }
}

template <class WEIGHT, int STEP>
DEVICE void columns_of(const float *x, const Product<WEIGHT> &product, u32 row, u32 count, u32 inputs, u32 first) {
    if (count == 1)
        columns<WEIGHT, 1, STEP>(x, product, row, count, inputs, first);
    else if (count <= 4)
        columns<WEIGHT, 4, STEP>(x, product, row, count, inputs, first);
    else
        columns<WEIGHT, ROWS, STEP>(x, product, row, count, inputs, first);
}

// Grid: blocks of columns, those of one matrix after those of the other; ROWS rows each.
template <class WEIGHT, int COUNT>
DEVICE void few_rows(const float *x, const Product<WEIGHT> (&products)[COUNT], u32 rows, u32 inputs) {
    u32 group = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, row = blockIdx.y * ROWS;
    u32 count = min(rows - row, (u32)ROWS);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        u32 groups = (products[i].outputs + OUTPUTS - 1) / OUTPUTS;
        if (group < groups) {
            // x begins at a multiple of 16 bytes: what a row is summed like hangs on the matrix alone.
            if (inputs % 8 == 0 && (size_t)products[i].w % 16 == 0)
                columns_of<WEIGHT, 8>(x, products[i], row, count, inputs, group * OUTPUTS);
            else
                columns_of<WEIGHT, 2>(x, products[i], row, count, inputs, group * OUTPUTS);
            return;
        }
        group -= groups;
    }
}

#define MATRIX(i) const WEIGHT *w##i, const float *addend##i, u32 kind##i, u32 outputs##i
#define PRODUCT(i) {w##i, addend##i, kind##i, outputs##i, out##i}
#define FEW_ROWS(name)                                                                                            \
    extern "C" __global__ void name##_1(const float *x, u32 rows, u32 inputs, MATRIX(0), float *out0) {            \
        Product<WEIGHT> products[1] = {PRODUCT(0)};                                                               \
        few_rows(x, products, rows, inputs);                                                                      \
    }                                                                                                             \
    KERNEL(name##_1)                                                                                              \
    extern "C" __global__ void name##_2(const float *x, u32 rows, u32 inputs, MATRIX(0), MATRIX(1), float *out0,   \
                                        float *out1) {                                                            \
        Product<WEIGHT> products[2] = {PRODUCT(0), PRODUCT(1)};                                                   \
        few_rows(x, products, rows, inputs);                                                                      \
    }                                                                                                             \
    KERNEL(name##_2)                                                                                              \
    extern "C" __global__ void name##_3(const float *x, u32 rows, u32 inputs, MATRIX(0), MATRIX(1), MATRIX(2),     \
                                        float *out0, float *out1, float *out2) {                                  \
        Product<WEIGHT> products[3] = {PRODUCT(0), PRODUCT(1), PRODUCT(2)};                                       \
        few_rows(x, products, rows, inputs);                                                                      \
    }                                                                                                             \
    KERNEL(name##_3)

#define WEIGHT float
FEW_ROWS(few_rows_f32)
#undef WEIGHT
#define WEIGHT u16
FEW_ROWS(few_rows_bf16)
#undef WEIGHT
