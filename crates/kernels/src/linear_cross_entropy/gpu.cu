// Loss, statistics and gradient of rows of logits; formulas in linear_cross_entropy/mod.rs. A block a
// row, which it reads three times: largest logits, sums, gradient.

#define SOFT_NONE 0
#define SOFT_TEACHER 1
#define SOFT_ENTRIES 2
#define STATISTICS 7
#define TAIL_FLOOR 1e-6f

struct Largest {
    float value;
    u32 at;
};

// The larger value; of equal ones the earlier.
DEVICE Largest larger(Largest a, Largest b) {
    return b.value > a.value || (b.value == a.value && b.at < a.at) ? b : a;
}

DEVICE Largest largest_of(const float *z, u32 count) {
    __shared__ float values[33];
    __shared__ u32 places[33];
    Largest best = {-INFINITY, 0};
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) best = larger(best, {z[i], i});
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        best = larger(best, {__shfl_xor_sync(EVERY_LANE, best.value, step), __shfl_xor_sync(EVERY_LANE, best.at, step)});
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    if (lane == 0) {
        values[warp] = best.value;
        places[warp] = best.at;
    }
    __syncthreads();
    best = {values[0], places[0]};
    for (u32 i = 1; i < blockDim.x / 32; i++) best = larger(best, {values[i], places[i]});
    return best;
}

// Rows of logits [R, V]; `teachers` [U, V] are the teacher's, `teacher_of` [R] says which; `true_lse` [R]
// the normaliser of its whole vocabulary (when `has_lse`). Entries `entry_from[r]` to `entry_until[r]`
// are ids and probabilities p that sum to 1 with `rest[r]`, a bucket for all others (when `bucket`);
// `rescale[r]` makes p true. `label_weights` are those of the hard loss. `cross_entropy` and `rejection` are the row's factors, `log_form` chooses
// -log α against 1 - α. `gradient` [R, V] is room for sums of entries even where nobody wants it, and else not touched; `statistics` are
// hard, soft, acceptance by the teacher, by the entries, most likely token, the teacher's, loss.
extern "C" __global__ void cross_entropy_rows(
    const float *logits, const float *teachers, const u32 *teacher_of, const float *true_lse, const u32 *labels,
    const u32 *entry_from, const u32 *entry_until, const u32 *ids, const float *probabilities, const float *rest,
    const float *rescale, const float *label_weights, const float *cross_entropy, const float *rejection, u32 vocabulary, u32 soft, u32 has_teacher,
    u32 has_lse, u32 bucket, u32 log_form, float soft_weight, u32 want_gradient, float *gradient, float *statistics) {
    __shared__ float scratch[33];
    u32 row = blockIdx.x, label = labels[row];
    const float *z = logits + (size_t)row * vocabulary;
    const float *of_teacher = teachers + (has_teacher ? (size_t)teacher_of[row] * vocabulary : 0);
    float *out = gradient + (size_t)row * vocabulary;

    Largest best = largest_of(z, vocabulary), teachers_best = {0.0f, 0};
    if (has_teacher) teachers_best = largest_of(of_teacher, vocabulary);
    float total = 0.0f, teacher_total = 0.0f, expected = 0.0f;
    for (u32 i = threadIdx.x; i < vocabulary; i += blockDim.x) {
        float above = z[i] - best.value, weight = expf(above);
        total += weight;
        // Room for the sum of what the entries leave.
        if (soft == SOFT_ENTRIES) out[i] = weight;
        if (has_teacher) {
            float p = expf(of_teacher[i] - teachers_best.value);
            teacher_total += p;
            expected = fmaf(p, above, expected);
        }
    }
    total = block_sum(total, scratch);
    float log_total = logf(total), q_scale = 1.0f / total, p_scale = 0.0f, true_scale = 0.0f;
    float alpha = 0.0f, below = 0.0f, soft_loss = 0.0f;
    if (has_teacher) {
        teacher_total = block_sum(teacher_total, scratch);
        expected = block_sum(expected, scratch);
        p_scale = 1.0f / teacher_total;
        true_scale = has_lse ? expf(teachers_best.value - true_lse[row]) : p_scale;
        for (u32 i = threadIdx.x; i < vocabulary; i += blockDim.x) {
            float q = expf(z[i] - best.value) * q_scale;
            float p = expf(of_teacher[i] - teachers_best.value) * true_scale;
            alpha += fminf(q, p);
            if (q < p) below += q;
        }
        alpha = block_sum(alpha, scratch);
        below = block_sum(below, scratch);
        if (soft == SOFT_TEACHER) soft_loss = log_total - expected * p_scale;
    }

    float entry_alpha = 0.0f, on_ids = 0.0f, mass = 0.0f, entry_below = 0.0f;
    float ids_factor = 0.0f, others_factor = 0.0f;
    u32 from = 0, until = 0;
    if (soft == SOFT_ENTRIES) {
        from = entry_from[row];
        until = entry_until[row];
        float loss = 0.0f;
        __syncthreads();
        for (u32 i = from + threadIdx.x; i < until; i += blockDim.x) {
            float above = z[ids[i]] - best.value, q = expf(above) * q_scale, p = probabilities[i];
            loss -= p * (above - log_total);
            on_ids += q;
            mass += p;
            entry_alpha += fminf(p * rescale[row], q);
            if (q < p * rescale[row]) entry_below += q;
            out[ids[i]] = 0.0f;
        }
        soft_loss = block_sum(loss, scratch);
        on_ids = block_sum(on_ids, scratch);
        mass = block_sum(mass, scratch);
        entry_alpha = block_sum(entry_alpha, scratch);
        entry_below = block_sum(entry_below, scratch);
        ids_factor = others_factor = mass;
        if (bucket) {
            float tail = 1.0f - on_ids;
            // The difference loses its digits where the draft is sure.
            if (on_ids >= 0.99f) {
                float others = 0.0f;
                for (u32 i = threadIdx.x; i < vocabulary; i += blockDim.x) others += out[i];
                tail = block_sum(others, scratch) * q_scale;
            }
            soft_loss -= rest[row] * logf(fmaxf(tail, TAIL_FLOOR));
            if (tail > TAIL_FLOOR) {
                ids_factor = mass + rest[row];
                others_factor = mass + rest[row] - rest[row] / tail;
            }
        }
        below = entry_below;
    }

    float accepted = soft == SOFT_ENTRIES ? entry_alpha : alpha;
    float hard = best.value - z[label] + log_total, value = 1.0f - accepted, slope = rejection[row];
    if (log_form) {
        value = accepted > 0.0f ? -logf(accepted) : 0.0f;
        slope = accepted > 0.0f ? slope / accepted : 0.0f;
    }
    slope *= soft_weight;
    float of_label = label_weights[row], of_soft = soft_weight * cross_entropy[row], everywhere = of_label + slope * below;
    if (threadIdx.x == 0) {
        float *own = statistics + (size_t)row * STATISTICS;
        own[0] = hard;
        own[1] = soft_loss;
        own[2] = alpha;
        own[3] = entry_alpha;
        own[4] = (float)best.at;
        own[5] = (float)teachers_best.at;
        own[6] = of_label * hard + soft_weight * (cross_entropy[row] * soft_loss + rejection[row] * value);
    }
    if (!want_gradient) return;
    float above = everywhere, of_p = 0.0f;
    if (soft == SOFT_TEACHER) {
        above += of_soft;
        of_p = of_soft * p_scale;
    }
    if (soft == SOFT_ENTRIES) above += of_soft * others_factor;
    __syncthreads();
    for (u32 i = threadIdx.x; i < vocabulary; i += blockDim.x) {
        float q = expf(z[i] - best.value) * q_scale, factor = above, p = 0.0f;
        if (soft == SOFT_TEACHER) {
            p = expf(of_teacher[i] - teachers_best.value);
            if (q < p * true_scale) factor -= slope;
        }
        out[i] = q * factor - p * of_p;
    }
    __syncthreads();
    for (u32 i = from + threadIdx.x; i < until; i += blockDim.x) {
        float q = expf(z[ids[i]] - best.value) * q_scale, p = probabilities[i];
        float less = q < p * rescale[row] ? slope * q : 0.0f;
        out[ids[i]] = everywhere * q + of_soft * (q * ids_factor - p) - less;
    }
    __syncthreads();
    if (threadIdx.x == 0) out[label] -= of_label;
}
KERNEL(cross_entropy_rows)
