// What kernels of a mixture read beside rows. The rows of its experts lie one expert's after the other's.

// Neighbouring rows of one expert, whose number counts the experts that have rows.
struct Piece {
    u32 expert, first, count;
};
DEVICE Piece piece_of(const u32 *pieces, u32 piece) {
    return {pieces[3 * piece], pieces[3 * piece + 1], pieces[3 * piece + 2]};
}

#define GATE 0
#define UP 1
#define DOWN 2
#define MATRICES 3

// `held` has the addresses of every expert's three matrices, then of their biases, null without. Each is two words.
DEVICE size_t address_of(const u32 *held, u32 expert, u32 which) {
    const u32 *at = held + 2 * (2 * MATRICES * expert + which);
    return (size_t)((u64)at[1] << 32 | at[0]);
}
template <class WEIGHT> DEVICE const WEIGHT *weights_of(const u32 *held, u32 expert, u32 matrix) {
    return (const WEIGHT *)address_of(held, expert, matrix);
}
DEVICE const float *bias_of(const u32 *held, u32 expert, u32 matrix) {
    return (const float *)address_of(held, expert, MATRICES + matrix);
}
