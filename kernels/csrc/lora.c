/* Low-rank additions of many adapters to one projection. Batch-invariant: rows never meet. */
#include "ops.h"

#define TOKENS_PER_CLAIM 8

#define WIDE 4 /* vectors of outputs that are summed side by side: their loads overlap */

INLINE v16 changed(v16 y, const lora_part *part, long n, int count) {
    if (part->gain) y *= load_some(part->gain + n, count, F32);
    if (part->shift) y += load_some(part->shift + n, count, F32);
    return y;
}

/* Outputs [n, n + 16 · vectors). */
INLINE void expand_span(const float *shrunk, const lora_part *part, void *y, long n, int vectors, int dt) {
    v16 acc[WIDE];
    for (int i = 0; i < vectors; i++) acc[i] = splat(0.0f);
    for (long r = 0; r < part->rank; r++) {
        const char *row = at(part->b, r * part->num_outputs + n, dt);
        for (int i = 0; i < vectors; i++) acc[i] = madd(splat(shrunk[r]), load16(at(row, 16 * i, dt), dt), acc[i]);
    }
    for (int i = 0; i < vectors; i++) {
        char *to = at_mut(y, n + 16 * i, dt);
        store16(to, changed(load16(to, dt), part, n + 16 * i, 16) + acc[i], dt);
    }
}

INLINE void expand_row(const float *shrunk, const lora_part *part, void *y, int dt) {
    long n = 0, N = part->num_outputs;
    for (; n + 16 * WIDE <= N; n += 16 * WIDE) expand_span(shrunk, part, y, n, WIDE, dt);
    for (; n + 16 <= N; n += 16) expand_span(shrunk, part, y, n, 1, dt);
    int rest = (int)(N - n);
    if (!rest) return;
    v16 acc = splat(0.0f);
    for (long r = 0; r < part->rank; r++)
        acc = madd(splat(shrunk[r]), load_some(at(part->b, r * N + n, dt), rest, dt), acc);
    store_some(at_mut(y, n, dt), changed(load_some(at(y, n, dt), rest, dt), part, n, rest) + acc, rest, dt);
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
    float *shrunk = scratch(SCRATCH_LORA, TOKENS_PER_CLAIM * part->rank * 4 + 4);
    linear_args shrink = {.x = at(loop->x, start * loop->x_stride, loop->dt), .x_stride = loop->x_stride, .w = part->a,
                          .y = shrunk, .y_stride = part->rank, .num_tokens = count, .num_outputs = part->rank,
                          .dim = loop->dim, .dt = loop->dt, .out_dt = F32};
    if (part->rank) {
        shrink = linear_prepare(&shrink, SCRATCH_WIDENED);
        linear_span(&shrink, 0);
    }
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
