/* Low-rank additions of many adapters to one projection. Batch-invariant: rows never meet. */
#include "ops.h"

#define TOKENS_PER_CLAIM 8

INLINE void expand_row(const float *shrunk, const lora_part *part, void *y, int dt) {
    long n = 0, N = part->num_outputs;
    for (; n + 16 <= N; n += 16) {
        v16 acc = splat(0.0f);
        for (long r = 0; r < part->rank; r++) acc = madd(splat(shrunk[r]), load16(at(part->b, r * N + n, dt), dt), acc);
        store16(at_mut(y, n, dt), load16(at(y, n, dt), dt) + acc, dt);
    }
    int rest = (int)(N - n);
    if (!rest) return;
    v16 acc = splat(0.0f);
    for (long r = 0; r < part->rank; r++)
        acc = madd(splat(shrunk[r]), load_some(at(part->b, r * N + n, dt), rest, dt), acc);
    store_some(at_mut(y, n, dt), load_some(at(y, n, dt), rest, dt) + acc, rest, dt);
}

typedef struct {
    const lora_part *parts;
    const int64_t *first_claim;
    const void *x;
    long x_stride, dim;
    void *y;
    long y_stride;
    int dt;
} lora_loop;

static void lora_claim(void *context, long index) {
    const lora_loop *loop = context;
    long p = 0;
    while (loop->first_claim[p + 1] <= index) p++;
    const lora_part *part = &loop->parts[p];
    long start = part->start + (index - loop->first_claim[p]) * TOKENS_PER_CLAIM;
    long count = part->end - start < TOKENS_PER_CLAIM ? part->end - start : TOKENS_PER_CLAIM;
    float *shrunk = scratch(SCRATCH_LORA, TOKENS_PER_CLAIM * part->rank * 4);
    linear_args shrink = {.x = at(loop->x, start * loop->x_stride, loop->dt), .x_stride = loop->x_stride, .w = part->a,
                          .y = shrunk, .y_stride = part->rank, .num_tokens = count, .num_outputs = part->rank,
                          .dim = loop->dim, .dt = loop->dt, .out_dt = F32};
    shrink = linear_prepare(&shrink, SCRATCH_WIDENED);
    linear_span(&shrink, 0);
    for (long t = 0; t < count; t++) {
        void *y = at_mut(loop->y, (start + t) * loop->y_stride + part->first_output, loop->dt);
        if (loop->dt == F32) expand_row(shrunk + t * part->rank, part, y, F32);
        if (loop->dt == BF16) expand_row(shrunk + t * part->rank, part, y, BF16);
        if (loop->dt == F16) expand_row(shrunk + t * part->rank, part, y, F16);
    }
}

void lora_run(const lora_part *parts, long num_parts, const void *x, long x_stride, long dim, void *y, long y_stride,
              int dt) {
    int64_t *first_claim = scratch(SCRATCH_CALLER, (num_parts + 1) * 8);
    first_claim[0] = 0;
    for (long p = 0; p < num_parts; p++)
        first_claim[p + 1] = first_claim[p] + (parts[p].end - parts[p].start + TOKENS_PER_CLAIM - 1) / TOKENS_PER_CLAIM;
    lora_loop loop = {parts, first_claim, x, x_stride, dim, y, y_stride, dt};
    parallel_for(first_claim[num_parts], lora_claim, &loop);
}

void nl_lora(const lora_part *parts, long num_parts, const void *x, long x_stride, long dim, void *y, long y_stride,
             int dt) {
    lora_run(parts, num_parts, x, x_stride, dim, y, y_stride, dt);
}
