// Mixtures of experts; formulas in mod.rs, the order of the kernels in gpu.rs. table.cu comes before.

struct alignas(8) Two {
    float low, high;
};

// Row r of the result is row `visitors[r]` of x, times `factors[r]` if there are some, in f32 or bf16. A thread takes two
// neighbours; rows have an even number of values.
extern "C" __global__ void rows_of_visitors(const float *x, const u32 *visitors, const float *factors, u32 has_factors,
                                            u32 width, u32 pairs, u32 half, float *out) {
    begin_in_turn();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    u32 each = width / 2, row = i / each;
    Two two = reinterpret_cast<const Two *>(x)[(size_t)visitors[row] * each + i % each];
    if (has_factors) two = {two.low * factors[row], two.high * factors[row]};
    if (half) reinterpret_cast<u32 *>(out)[i] = pack(two.low, two.high);
    else reinterpret_cast<Two *>(out)[i] = two;
}
KERNEL(rows_of_visitors)

// The gated unit of an expert.
#define SILU 0
#define GELU 1
#define CLAMPED 2
#define SLOPE 0.79788456f
#define CUBIC 0.044715f
struct Unit {
    u32 kind;
    float alpha, limit;
    METHOD float of(float gate, float up) const {
        if (kind == CLAMPED) {
            // Comparisons that are false for NaN let it through.
            gate = gate > limit ? limit : gate;
            up = up > limit ? limit : up;
            up = up < -limit ? -limit : up;
            return (up + 1.0f) * (gate / (1.0f + expf(-alpha * gate)));
        }
        float inner = kind == GELU ? 2.0f * gate * fmaf(gate * gate, SLOPE * CUBIC, SLOPE) : gate;
        return gate / (1.0f + expf(-inner)) * up;
    }
};

// A thread takes a value.
extern "C" __global__ void expert_units(const float *gate, const float *up, u32 kind, float alpha, float limit, u32 count,
                                        float *out) {
    begin_in_turn();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    Unit unit = {kind, alpha, limit};
    if (i < count) out[i] = unit.of(gate[i], up[i]);
}
KERNEL(expert_units)

// Rows of a block, and rows of its weights; both are read by steps of so many inputs, STAGES of them on their way.
#define TILE 128
#define STEP 64
#define STAGES 3
// 16 bytes each.
#define PARTS (STEP / 8)
#define THREADS 256

// Where a part of a row lies in a tile: the same parts of neighbouring rows are in different banks.
DEVICE u32 place(u32 row, u32 part) { return row * STEP + 8 * (part ^ row % PARTS); }

// A piece's rows, and outputs of its expert from `first` on. With gate and up the block has half as many outputs of both:
// 32 of gate and 32 of up in turn, so that a warp has both of an output.
struct Factors {
    const u16 *rows;
    u32 count;
    const u16 *weights, *up;
    u32 first, outputs, inputs;
};

template <bool GATED> DEVICE void ask_for(u16 *tiles, const Factors &f, u32 from) {
    u32 part = threadIdx.x % PARTS, row = threadIdx.x / PARTS, at = from + 8 * part;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 own = row + 32 * i, output = f.first + row + 32 * (GATED ? i / 2 : i);
        bool some = at < f.inputs && own < f.count;
        copy_ahead(tiles + place(own, part), some ? f.rows + (size_t)own * f.inputs + at : f.rows, some);
        const u16 *weights = GATED && i % 2 ? f.up : f.weights;
        some = at < f.inputs && output < f.outputs;
        copy_ahead(tiles + TILE * STEP + place(own, part), some ? weights + (size_t)output * f.inputs + at : weights, some);
    }
}

// The block's products. Warp w has rows 32 (w / 2).. and columns 64 (w % 2).. of them. A row is summed alike whatever is
// beside it.
template <bool GATED> DEVICE void multiply(float sums[2][8][4], const Factors &f) {
    DYNAMIC_SHARED(u16, memory);
    const u32 both = 2 * TILE * STEP;
    u32 lane = threadIdx.x % 32, row = 32 * (threadIdx.x / 64), column = 64 * (threadIdx.x / 32 % 2);
    u32 steps = (f.inputs + STEP - 1) / STEP;
#pragma unroll
    for (u32 m = 0; m < 2; m++)
#pragma unroll
        for (u32 n = 0; n < 8; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
#pragma unroll
    for (u32 step = 0; step < STAGES - 1; step++) {
        if (step < steps) ask_for<GATED>(memory + step * both, f, step * STEP);
        end_copies();
    }
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        // Into what all threads have multiplied before.
        u32 next = step + STAGES - 1;
        if (next < steps) ask_for<GATED>(memory + next % STAGES * both, f, next * STEP);
        end_copies();
        const u16 *rows = memory + step % STAGES * both, *weights = rows + TILE * STEP;
#pragma unroll
        for (u32 k = 0; k < PARTS; k += 2) {
            u32 a[2][4], b[4][4];
#pragma unroll
            for (u32 m = 0; m < 2; m++) load_tiles(a[m], rows + place(row + 16 * m + lane % 16, k + lane / 16));
#pragma unroll
            for (u32 n = 0; n < 4; n++)
                load_tiles(b[n], weights + place(column + 16 * n + lane % 8 + lane / 16 * 8, k + lane / 8 % 2));
#pragma unroll
            for (u32 m = 0; m < 2; m++)
#pragma unroll
                for (u32 n = 0; n < 8; n++) mma(sums[m][n], a[m], b[n / 2] + 2 * (n % 2));
        }
    }
}

// Blocks of BESIDE pieces and BESIDE tiles of outputs are neighbours: what they read lies in the second cache.
struct Block {
    u32 piece, tile;
};
DEVICE Block own_block(u32 pieces, u32 tiles) {
    u32 chunk = blockIdx.x / (BESIDE * tiles), within = blockIdx.x % (BESIDE * tiles);
    u32 own_pieces = min(pieces - chunk * BESIDE, (u32)BESIDE);
    u32 group = within / (BESIDE * own_pieces), in_group = within % (BESIDE * own_pieces);
    u32 own_tiles = min(tiles - group * BESIDE, (u32)BESIDE);
    return {chunk * BESIDE + in_group / own_tiles, group * BESIDE + in_group % own_tiles};
}

// Two neighbours of a bias.
DEVICE Two bias_at(const float *bias, u32 output) {
    return bias ? Two{bias[output], bias[output + 1]} : Two{0.0f, 0.0f};
}

// unit(x Gateᵀ, x Upᵀ) of every expert's rows in bf16, rounded once. Inputs and outputs are multiples of 8. Grid: tiles of
// 64 outputs of every piece.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
expert_gates(const u16 *x, const u32 *pieces, const u32 *held, u32 count, u32 inputs, u32 outputs, u32 kind, float alpha,
             float limit, u16 *out) {
    begin_in_turn();
    Block block = own_block(count, (outputs + TILE / 2 - 1) / (TILE / 2));
    Piece piece = piece_of(pieces, block.piece);
    u32 first = TILE / 2 * block.tile;
    float sums[2][8][4];
    Factors factors = {x + (size_t)piece.first * inputs, piece.count, weights_of<u16>(held, piece.expert, GATE),
                       weights_of<u16>(held, piece.expert, UP), first, outputs, inputs};
    multiply<true>(sums, factors);
    const float *of_gate = bias_of(held, piece.expert, GATE), *of_up = bias_of(held, piece.expert, UP);
    u32 lane = threadIdx.x % 32, row = 32 * (threadIdx.x / 64) + lane / 4;
    first += 32 * (threadIdx.x / 32 % 2) + 2 * (lane % 4);
    Unit unit = {kind, alpha, limit};
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        u32 output = first + 8 * n;
        if (output >= outputs) continue;
        Two gate = bias_at(of_gate, output), up = bias_at(of_up, output);
#pragma unroll
        for (u32 m = 0; m < 4; m++) {
            u32 own = row + 8 * m;
            if (own >= piece.count) continue;
            const float *z = sums[m / 2][n] + m % 2 * 2, *u = sums[m / 2][n + 4] + m % 2 * 2;
            *(u32 *)(out + (size_t)(piece.first + own) * outputs + output) =
                pack(unit.of(z[0] + gate.low, u[0] + up.low), unit.of(z[1] + gate.high, u[1] + up.high));
        }
    }
}
KERNEL(expert_gates)

// x Downᵀ of every expert's rows in f32. Grid: tiles of 128 outputs of every piece.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
expert_outputs(const u16 *x, const u32 *pieces, const u32 *held, u32 count, u32 inputs, u32 outputs, float *out) {
    begin_in_turn();
    Block block = own_block(count, (outputs + TILE - 1) / TILE);
    Piece piece = piece_of(pieces, block.piece);
    u32 first = TILE * block.tile;
    float sums[2][8][4];
    const u16 *weights = weights_of<u16>(held, piece.expert, DOWN);
    Factors factors = {x + (size_t)piece.first * inputs, piece.count, weights, weights, first, outputs, inputs};
    multiply<false>(sums, factors);
    const float *bias = bias_of(held, piece.expert, DOWN);
    u32 lane = threadIdx.x % 32, row = 32 * (threadIdx.x / 64) + lane / 4;
    first += 64 * (threadIdx.x / 32 % 2) + 2 * (lane % 4);
#pragma unroll
    for (u32 n = 0; n < 8; n++) {
        u32 output = first + 8 * n;
        if (output >= outputs) continue;
        Two added = bias_at(bias, output);
#pragma unroll
        for (u32 m = 0; m < 4; m++) {
            u32 own = row + 8 * m;
            if (own >= piece.count) continue;
            const float *sum = sums[m / 2][n] + m % 2 * 2;
            *(Two *)(out + (size_t)(piece.first + own) * outputs + output) = {sum[0] + added.low, sum[1] + added.high};
        }
    }
}
KERNEL(expert_outputs)
