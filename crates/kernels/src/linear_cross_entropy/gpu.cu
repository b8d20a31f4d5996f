// Loss, statistics and gradient of rows of logits; formulas in linear_cross_entropy/mod.rs. A block a
// row, which it reads twice: largest logits and sums, then acceptance and gradient; a third time where the
// gradient hangs on the acceptance.

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

// The largest of a block's; every thread gets it.
DEVICE Largest largest_of_block(Largest best) {
    __shared__ float values[33];
    __shared__ u32 places[33];
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

// e^x with a relative error of some 6e-8 (1 + |x|); numbers below f32's normal ones are 0.
#ifdef EMULATED
DEVICE float exponential(float x) { return expf(x); }
#else
DEVICE float exponential(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
}
#endif

// Values side by side, read or written at once.
struct alignas(16) Four {
    float at[4];
};
struct alignas(8) FourHalves {
    u32 pairs[2];
};

// Whether a row of so many values can be read four at a time.
DEVICE bool in_fours(const float *row, u32 count) { return count % 4 == 0 && (size_t)row % 16 == 0; }

// Four values of a row; -inf where it has no more.
DEVICE Four four_of(const float *row, u32 first, u32 count, bool whole) {
    if (whole) return *reinterpret_cast<const Four *>(row + first);
    Four four;
#pragma unroll
    for (u32 k = 0; k < 4; k++) four.at[k] = first + k < count ? row[first + k] : -INFINITY;
    return four;
}

DEVICE u16 half_of(float value) { return (u16)pack(value, 0.0f); }

// A row of f32 or bf16 values.
struct Out {
    float *values;
    u16 *halves;
    u32 count;
    bool whole, half;

    METHOD void put(u32 first, Four four) const {
        if (whole && half) {
            FourHalves pairs = {{pack(four.at[0], four.at[1]), pack(four.at[2], four.at[3])}};
            *reinterpret_cast<FourHalves *>(halves + first) = pairs;
        } else if (whole) {
            *reinterpret_cast<Four *>(values + first) = four;
        } else {
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                if (first + k >= count) continue;
                if (half) halves[first + k] = half_of(four.at[k]);
                else values[first + k] = four.at[k];
            }
        }
    }
};

// Less than every logit but -inf.
#define LOWEST -3.0e38f

// The largest of the values so far, and the sum of e^(value - largest).
struct Peak {
    Largest largest;
    float total;

    // Takes the largest of four values into account; what sums so far have to be multiplied by.
    METHOD float rise(const Four &four, u32 first) {
        float most = fmaxf(fmaxf(four.at[0], four.at[1]), fmaxf(four.at[2], four.at[3]));
        if (!(most > largest.value)) return 1.0f;
        float factor = exponential(largest.value - most);
        u32 k = four.at[0] == most ? 0 : four.at[1] == most ? 1 : four.at[2] == most ? 2 : 3;
        largest = {most, first + k};
        total *= factor;
        return factor;
    }
};

// What the gradient of a logit is made of: q (above - slope 1[q < p]) - p of_p, less `of_label` at the label.
struct Slopes {
    float above, of_p, slope, of_label;
    u32 label;
};

// Probabilities of a row: q of the draft, and of the teacher unnormalised ones, which `true_scale` makes true.
struct Shares {
    const float *z, *of_teacher;
    Out out;
    float best, q_scale, teachers_best, true_scale;
    bool has_teacher;

    // Adds a thread's part of Σ min(p, q) and of Σ q where it is less than p, and writes the gradient if asked for.
    METHOD void walk(bool write, Slopes of, float &alpha, float &below) const {
#pragma unroll 2
        for (u32 i = 4 * threadIdx.x; i < out.count; i += 4 * blockDim.x) {
            Four values = four_of(z, i, out.count, out.whole), teachers = values, gradient;
            if (has_teacher) teachers = four_of(of_teacher, i, out.count, out.whole);
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                float q = exponential(values.at[k] - best) * q_scale, factor = of.above;
                float p = has_teacher ? exponential(teachers.at[k] - teachers_best) : 0.0f, exact = p * true_scale;
                alpha += fminf(q, exact);
                if (q < exact) {
                    below += q;
                    factor -= of.slope;
                }
                gradient.at[k] = q * factor - p * of.of_p - (i + k == of.label ? of.of_label : 0.0f);
            }
            if (write) out.put(i, gradient);
        }
    }
};

// Rows of logits [R, V]; `teachers` [U, V] are the teacher's, `teacher_of` [R] says which; `true_lse` [R]
// the normaliser of its whole vocabulary (when `has_lse`). Entries `entry_from[r]` to `entry_until[r]`
// are ids and probabilities p that sum to 1 with `rest[r]`, a bucket for all others (when `bucket`);
// `rescale[r]` makes p true. `label_weights` are those of the hard loss. `cross_entropy` and `rejection` are the row's factors, `log_form` chooses
// -log α against 1 - α. `gradient` [R, V], in bf16 if `half_gradient`, is room for sums of entries even where nobody wants it (in f32 then), and else not touched; `statistics` are
// hard, soft, acceptance by the teacher, by the entries, most likely token, the teacher's, loss.
extern "C" __global__ void cross_entropy_rows(
    const float *__restrict__ logits, const float *__restrict__ teachers, const u32 *teacher_of, const float *true_lse, const u32 *labels,
    const u32 *entry_from, const u32 *entry_until, const u32 *ids, const float *probabilities, const float *rest,
    const float *rescale, const float *label_weights, const float *cross_entropy, const float *rejection, u32 vocabulary, u32 soft, u32 has_teacher,
    u32 has_lse, u32 bucket, u32 log_form, float soft_weight, u32 want_gradient,
    u32 half_gradient, float *__restrict__ gradient, float *statistics) {
    __shared__ float scratch[33];
    u32 row = blockIdx.x, label = labels[row];
    const float *z = logits + (size_t)row * vocabulary;
    const float *of_teacher = teachers + (has_teacher ? (size_t)teacher_of[row] * vocabulary : 0);
    float *out = gradient + (size_t)row * vocabulary;
    bool whole = in_fours(z, vocabulary) && in_fours(of_teacher, vocabulary);

    Peak own = {{LOWEST, 0}, 0.0f}, teachers_own = own;
    // Of e^(teacher's - its largest) (z - largest).
    float expected = 0.0f;
#pragma unroll 2
    for (u32 i = 4 * threadIdx.x; i < vocabulary; i += 4 * blockDim.x) {
        Four values = four_of(z, i, vocabulary, whole);
        float before = own.largest.value;
        own.rise(values, i);
        float largest = own.largest.value;
        if (!has_teacher) {
#pragma unroll
            for (u32 k = 0; k < 4; k++) own.total += exponential(values.at[k] - largest);
            continue;
        }
        Four teachers = four_of(of_teacher, i, vocabulary, whole);
        if (largest > before) expected -= (largest - before) * teachers_own.total;
        expected *= teachers_own.rise(teachers, i);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            float above = values.at[k] - largest, p = exponential(teachers.at[k] - teachers_own.largest.value);
            own.total += exponential(above);
            teachers_own.total += p;
            if (p > 0.0f) expected = fmaf(p, above, expected);
        }
    }
    Largest best = largest_of_block(own.largest), teachers_best = {0.0f, 0};
    float total = block_sum(own.total * exponential(own.largest.value - best.value), scratch);
    float log_total = logf(total), q_scale = 1.0f / total, p_scale = 0.0f, true_scale = 0.0f, soft_loss = 0.0f;
    if (has_teacher) {
        teachers_best = largest_of_block(teachers_own.largest);
        expected -= (best.value - own.largest.value) * teachers_own.total;
        float factor = exponential(teachers_own.largest.value - teachers_best.value);
        p_scale = 1.0f / block_sum(teachers_own.total * factor, scratch);
        expected = block_sum(expected * factor, scratch);
        true_scale = has_lse ? expf(teachers_best.value - true_lse[row]) : p_scale;
        if (soft == SOFT_TEACHER) soft_loss = log_total - expected * p_scale;
    }
    Shares shares = {z, of_teacher, {out, reinterpret_cast<u16 *>(gradient) + (size_t)row * vocabulary, vocabulary, whole, half_gradient != 0},
                     best.value, q_scale, teachers_best.value, true_scale, has_teacher != 0};
    // Without a factor of its own the acceptance is a statistic alone.
    bool at_once = want_gradient && soft != SOFT_ENTRIES && rejection[row] == 0.0f;
    float alpha = 0.0f, below = 0.0f;
    if (has_teacher && !at_once) {
        shares.walk(false, {}, alpha, below);
        alpha = block_sum(alpha, scratch);
        below = block_sum(below, scratch);
    }

    float entry_alpha = 0.0f, on_ids = 0.0f, mass = 0.0f, entry_below = 0.0f;
    float ids_factor = 0.0f, others_factor = 0.0f;
    u32 from = 0, until = 0;
    if (soft == SOFT_ENTRIES) {
        from = entry_from[row];
        until = entry_until[row];
        float loss = 0.0f;
        for (u32 i = from + threadIdx.x; i < until; i += blockDim.x) {
            float above = z[ids[i]] - best.value, q = expf(above) * q_scale, p = probabilities[i];
            loss -= p * (above - log_total);
            on_ids += q;
            mass += p;
            entry_alpha += fminf(p * rescale[row], q);
            if (q < p * rescale[row]) entry_below += q;
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
                for (u32 i = threadIdx.x; i < vocabulary; i += blockDim.x) out[i] = expf(z[i] - best.value);
                __syncthreads();
                for (u32 i = from + threadIdx.x; i < until; i += blockDim.x) out[ids[i]] = 0.0f;
                __syncthreads();
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
    if (want_gradient) {
        float above = everywhere + (soft == SOFT_TEACHER ? of_soft : soft == SOFT_ENTRIES ? of_soft * others_factor : 0.0f);
        bool by_teacher = soft == SOFT_TEACHER;
        // Sums of what is written over are read before.
        __syncthreads();
        float of_walk = 0.0f, unused = 0.0f;
        shares.walk(true, {above, by_teacher ? of_soft * p_scale : 0.0f, by_teacher ? slope : 0.0f, of_label, label}, of_walk, unused);
        if (at_once && has_teacher) alpha = block_sum(of_walk, scratch);
        __syncthreads();
        for (u32 i = from + threadIdx.x; i < until; i += blockDim.x) {
            float q = expf(z[ids[i]] - best.value) * q_scale, p = probabilities[i];
            float less = q < p * rescale[row] ? slope * q : 0.0f;
            if (ids[i] == label) less += of_label;
            out[ids[i]] = everywhere * q + of_soft * (q * ids_factor - p) - less;
        }
    }
    if (threadIdx.x == 0) {
        float *numbers = statistics + (size_t)row * STATISTICS;
        numbers[0] = hard;
        numbers[1] = soft_loss;
        numbers[2] = alpha;
        numbers[3] = entry_alpha;
        numbers[4] = (float)best.at;
        numbers[5] = (float)teachers_best.at;
        numbers[6] = of_label * hard + soft_weight * (cross_entropy[row] * soft_loss + rejection[row] * value);
    }
}
KERNEL(cross_entropy_rows)

// log Σ e^z and the most likely token of rows of logits [R, V], rounded to bf16 before if `rounded`; out [R, 2].
extern "C" __global__ void log_sum_exp_rows(const float *logits, u32 vocabulary, u32 rounded, float *out) {
    __shared__ float scratch[33];
    const float *z = logits + (size_t)blockIdx.x * vocabulary;
    bool whole = in_fours(z, vocabulary);
    Peak own = {{LOWEST, 0}, 0.0f};
#pragma unroll 2
    for (u32 i = 4 * threadIdx.x; i < vocabulary; i += 4 * blockDim.x) {
        Four values = four_of(z, i, vocabulary, whole);
        if (rounded) {
            u32 low = pack(values.at[0], values.at[1]), high = pack(values.at[2], values.at[3]);
            values = {{unpack_low(low), unpack_high(low), unpack_low(high), unpack_high(high)}};
        }
        own.rise(values, i);
#pragma unroll
        for (u32 k = 0; k < 4; k++) own.total += exponential(values.at[k] - own.largest.value);
    }
    Largest best = largest_of_block(own.largest);
    float total = block_sum(own.total * exponential(own.largest.value - best.value), scratch);
    if (threadIdx.x == 0) {
        out[2 * (size_t)blockIdx.x] = best.value + logf(total);
        out[2 * (size_t)blockIdx.x + 1] = (float)best.at;
    }
}
KERNEL(log_sum_exp_rows)

// Values times a number that lies on the device, added to the base (0 without one).
extern "C" __global__ void scale(const float *__restrict__ values, const float *__restrict__ base, const float *factor, u32 count,
                                 u32 has_base, float *__restrict__ out) {
    u32 first = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (first >= count) return;
    float by = *factor;
    bool whole = in_fours(values, count) && in_fours(base, count);
    Four four = four_of(values, first, count, whole), sum = {};
    if (has_base) sum = four_of(base, first, count, whole);
#pragma unroll
    for (u32 k = 0; k < 4; k++) four.at[k] = has_base ? fmaf(four.at[k], by, sum.at[k]) : four.at[k] * by;
    Out{out, nullptr, count, whole, false}.put(first, four);
}
KERNEL(scale)
