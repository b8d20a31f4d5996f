// Tiles and products of groups of four warps (wgmma: compute capability 9.0). half.cu comes before. HEAD_DIM is 64 or 128.
//
// A tile lies in a block's memory as panels of 64 columns, [panels, rows, 64]. Pieces of 8 values of a row are swapped
// by the row's place, as the instructions read panels of 128 bytes. A group multiplies 64 rows. Its threads have rows
// and columns of results as one warp has them of 16 rows.

#define THREADS 256

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

// A group has 64 rows of a block's own tile; which of them a thread's first rows of results are. The second ones lie 8
// further.
DEVICE int own_row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }
DEVICE int group_row() { return threadIdx.x / 128 * 64; }
