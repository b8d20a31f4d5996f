// The k most likely of every row of logits [R, V] with their log-probabilities, a block a row; the order of
// ties and of what is no number is that of top_k/mod.rs. k is at most THREADS and V.
//
// The k-th largest of the threads' own largest logits is a bound that at least k of the row reach, and in
// most rows few more: these candidates are ranked among themselves. A row with more than CANDIDATES of
// them, whose largest logits lie a multiple of THREADS apart, is read k times.

typedef unsigned long long u64;

// Larger for a larger logit in f32's total order (-NaN, -inf, .., -0, 0, .., inf, NaN), of equal ones for
// the lower id; never 0.
DEVICE u64 key_of(float logit, u32 id) {
    u32 bits = bits_of(logit), ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)ordered << 32 | (u32)~id;
}
DEVICE float logit_of(u64 key) {
    u32 ordered = (u32)(key >> 32);
    return float_of(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}
DEVICE u32 id_of(u64 key) { return ~(u32)key; }

// The largest key of a thread's own logits that is at most `limit`; 0 if there is none.
DEVICE u64 largest_own(const float *logits, u32 count, u64 limit) {
    u64 largest = 0;
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        u64 key = key_of(logits[i], i);
        if (key <= limit && key > largest) largest = key;
    }
    return largest;
}

// Of [R, k]: the bits of ids, and log-probabilities.
struct Ranked {
    float *ids, *log_probs;
    double log_sum_exp;
    METHOD void put(u32 rank, u64 key) const {
        ids[rank] = float_of(id_of(key));
        log_probs[rank] = (float)((double)logit_of(key) - log_sum_exp);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
top_k_rows(const float *logits, u32 vocabulary, u32 k, float *ids, float *log_probs) {
    __shared__ u64 keys[THREADS], found[CANDIDATES], largest, bound;
    __shared__ double sums[THREADS];
    __shared__ u32 counts[THREADS];
    u32 own = threadIdx.x;
    logits += (size_t)blockIdx.x * vocabulary;

    u64 best = largest_own(logits, vocabulary, ~0ull);
    keys[own] = best;
    __syncthreads();
    u32 above = 0;
    for (u32 i = 0; i < THREADS; i++) above += keys[i] > best;
    // A thread without logits is above nobody's.
    if (best && above == 0) largest = best;
    if (best && above == k - 1) bound = best;
    __syncthreads();

    float most = logit_of(largest);
    double sum = 0.0;
    u32 count = 0;
    for (u32 i = own; i < vocabulary; i += THREADS) {
        float logit = logits[i];
        sum += exp((double)(logit - most));
        count += key_of(logit, i) >= bound;
    }
    sums[own] = sum;
    counts[own] = count;
    __syncthreads();
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        if (own < half) sums[own] += sums[own + half];
        __syncthreads();
    }
    size_t first = (size_t)blockIdx.x * k;
    Ranked ranked = {ids + first, log_probs + first, (double)most + log(sums[0])};

    u32 place = 0, candidates = 0;
    for (u32 i = 0; i < THREADS; i++) {
        place += i < own ? counts[i] : 0;
        candidates += counts[i];
    }
    if (candidates <= CANDIDATES) {
        for (u32 i = own; count && i < vocabulary; i += THREADS) {
            u64 key = key_of(logits[i], i);
            if (key >= bound) found[place++] = key;
        }
        __syncthreads();
        for (u32 candidate = own; candidate < candidates; candidate += THREADS) {
            u64 key = found[candidate];
            u32 rank = 0;
            for (u32 i = 0; i < candidates; i++) rank += found[i] > key;
            if (rank < k) ranked.put(rank, key);
        }
        return;
    }
    u64 limit = ~0ull;
    for (u32 rank = 0; rank < k; rank++) {
        keys[own] = largest_own(logits, vocabulary, limit);
        __syncthreads();
        for (u32 half = THREADS / 2; half > 0; half /= 2) {
            if (own < half) keys[own] = max(keys[own], keys[own + half]);
            __syncthreads();
        }
        if (own == 0) ranked.put(rank, keys[0]);
        limit = keys[0] - 1;
        __syncthreads();
    }
}
KERNEL(top_k_rows)
