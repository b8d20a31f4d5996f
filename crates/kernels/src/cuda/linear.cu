// Products of few rows: out [R, O] = x [R, I] Wᵀ + addend for W [O, I] in f32 or bf16, I even, of up to three
// matrices with the same x. Every weight is read once for ROWS rows, and a row is summed alike whatever is
// beside it.

#define ROWS 8
#define OUTPUTS 4

struct Pair {
    float first, second;
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

DEVICE Pair pair_of(const float *weights, size_t at) { return {weights[at], weights[at + 1]}; }
DEVICE Pair pair_of(const u16 *weights, size_t at) {
    u32 both = *(const u32 *)(weights + at);
    return {unpack_low(both), unpack_high(both)};
}

// A warp's OUTPUTS columns of `count` rows, at most MOST.
template <class WEIGHT, int MOST>
DEVICE void columns(const float *x, const Product<WEIGHT> &product, u32 row, u32 count, u32 inputs, u32 first) {
    int lane = threadIdx.x % 32;
    u32 outputs = product.outputs;
    x += (size_t)row * inputs;
    float sums[MOST][OUTPUTS];
#pragma unroll
    for (int r = 0; r < MOST; r++)
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) sums[r][o] = 0.0f;
    for (u32 i = 2 * lane; i < inputs; i += 64) {
        Pair weights[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) weights[o] = pair_of(product.w, (size_t)min(first + o, outputs - 1) * inputs + i);
#pragma unroll
        for (int r = 0; r < MOST; r++) {
            Pair own = pair_of(x, (size_t)min((u32)r, count - 1) * inputs + i);
#pragma unroll
            for (int o = 0; o < OUTPUTS; o++)
                sums[r][o] = fmaf(own.second, weights[o].second, fmaf(own.first, weights[o].first, sums[r][o]));
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

// Grid: blocks of columns, those of one matrix behind those of the other; ROWS rows each.
template <class WEIGHT, int COUNT>
DEVICE void few_rows(const float *x, const Product<WEIGHT> (&products)[COUNT], u32 rows, u32 inputs) {
    u32 group = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, row = blockIdx.y * ROWS;
    u32 count = min(rows - row, (u32)ROWS);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        u32 groups = (products[i].outputs + OUTPUTS - 1) / OUTPUTS;
        if (group < groups) {
            u32 first = group * OUTPUTS;
            if (count == 1)
                columns<WEIGHT, 1>(x, products[i], row, count, inputs, first);
            else if (count <= 4)
                columns<WEIGHT, 4>(x, products[i], row, count, inputs, first);
            else
                columns<WEIGHT, ROWS>(x, products[i], row, count, inputs, first);
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
