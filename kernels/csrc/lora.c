/* Low-rank additions of many adapters to neighbouring projections of one input. Batch-invariant: rows never meet.
 *
 * Parts of the same rows (q, k and v; gate and up) are one group: their A matrices lie one after another in an adapter's
 * memory, so that one product shrinks for all of them. A claim is a group and a few of its rows.
 */
#include "ops.h"

#define ROWS_PER_CLAIM 8
#define LINE_BYTES 64

typedef struct {
    int64_t first_part, num_parts, row, num_rows;
} claim_t;

INLINE v16 changed(v16 y, const lora_part *part, long n, int count) {
    if (part->gain) y *= load_some(part->gain + n, count, F32);
    if (part->shift) y += load_some(part->shift + n, count, F32);
    return y;
}

typedef struct {
    const lora_part *part;
    const float *shrunk; /* of the first row; the next one is `shrunk_stride` further */
    long shrunk_stride;
    void *y;
    long y_stride;
    int dt, y_dt;
} expand_args;

/* Outputs [n, n + 16 · vectors) of `rows` rows: a vector of b is loaded once for all of them. */
INLINE void expand_tile(const expand_args *e, long n, int rows, int vectors, int dt, int y_dt) {
    v16 acc[4][8];
    UNROLL for (int t = 0; t < rows; t++)
        UNROLL for (int i = 0; i < vectors; i++) acc[t][i] = splat(0.0f);
    const char *b = at(e->part->b, n, dt);
    long row_bytes = e->part->num_outputs * width_of(dt);
    for (long r = 0; r < e->part->rank; r++, b += row_bytes) {
        v16 s[4];
        UNROLL for (int t = 0; t < rows; t++) s[t] = splat(e->shrunk[t * e->shrunk_stride + r]);
        UNROLL for (int i = 0; i < vectors; i++) {
            v16 w = load16(at(b, 16 * i, dt), dt);
            UNROLL for (int t = 0; t < rows; t++) acc[t][i] = madd(s[t], w, acc[t][i]);
        }
    }
    UNROLL for (int t = 0; t < rows; t++)
        UNROLL for (int i = 0; i < vectors; i++) {
            char *to = at_mut(e->y, t * e->y_stride + n + 16 * i, y_dt);
            store16(to, changed(load16(to, y_dt), e->part, n + 16 * i, 16) + acc[t][i], y_dt);
        }
}

INLINE void expand_rows(const expand_args *e, int rows, int dt, int y_dt) {
    const lora_part *part = e->part;
    long n = 0, N = part->num_outputs;
    if (rows == 1)
        for (; n + 128 <= N; n += 128) expand_tile(e, n, 1, 8, dt, y_dt);
    for (; n + 64 <= N; n += 64) expand_tile(e, n, rows, 4, dt, y_dt);
    for (; n + 16 <= N; n += 16) expand_tile(e, n, rows, 1, dt, y_dt);
    int rest = (int)(N - n);
    if (!rest) return;
    for (int t = 0; t < rows; t++) {
        v16 acc = splat(0.0f);
        for (long r = 0; r < part->rank; r++)
            acc = madd(splat(e->shrunk[t * e->shrunk_stride + r]), load_some(at(part->b, r * N + n, dt), rest, dt), acc);
        char *to = at_mut(e->y, t * e->y_stride + n, y_dt);
        store_some(to, changed(load_some(to, rest, y_dt), part, n, rest) + acc, rest, y_dt);
    }
}

INLINE void expand(expand_args e, long num_rows, int dt, int y_dt) {
    long t = 0;
    for (; t < num_rows;) {
        long rows = num_rows - t >= 4 ? 4 : 1;
        if (rows == 4) expand_rows(&e, 4, dt, y_dt);
        if (rows == 1) expand_rows(&e, 1, dt, y_dt);
        t += rows;
        e.shrunk += rows * e.shrunk_stride;
        e.y = at_mut(e.y, rows * e.y_stride, y_dt);
    }
}

static __attribute__((noinline)) void expand_any(const expand_args *e, long num_rows) {
    if (e->dt == F32) expand(*e, num_rows, F32, F32);
    if (e->dt == BF16 && e->y_dt == BF16) expand(*e, num_rows, BF16, BF16);
    if (e->dt == BF16 && e->y_dt == F32) expand(*e, num_rows, BF16, F32);
    if (e->dt == F16 && e->y_dt == F16) expand(*e, num_rows, F16, F16);
    if (e->dt == F16 && e->y_dt == F32) expand(*e, num_rows, F16, F32);
}

typedef struct {
    const lora_part *parts;
    const claim_t *claims;
    long num_claims;
    const void *x;
    long x_stride, dim;
    void *y;
    long y_stride;
    int dt, y_dt;
} lora_loop;

/* Memory of adapters is read once a step, in pieces too short for the hardware to follow: ask for them ahead. */
INLINE void prefetch(const void *memory, long bytes) {
    for (long i = 0; i < bytes; i += LINE_BYTES) __builtin_prefetch((const char *)memory + i, 0, 2);
}

/* Shrinks for all parts of a group: [rows, sum of ranks]; neighbours in memory are one product. */
static void shrink(const lora_loop *loop, const claim_t *claim, float *shrunk, long total_rank) {
    const lora_part *part = &loop->parts[claim->first_part], *end = part + claim->num_parts;
    linear_args args = {.x = at(loop->x, claim->row * loop->x_stride, loop->dt), .x_stride = loop->x_stride,
                        .y_stride = total_rank, .num_tokens = claim->num_rows, .dim = loop->dim, .dt = loop->dt,
                        .out_dt = F32};
    args = linear_prepare(&args, SCRATCH_WIDENED);
    long row_bytes = loop->dim * width_of(loop->dt);
    while (part < end) {
        args.w = part->a;
        args.y = shrunk;
        args.num_outputs = part->rank;
        for (part++; part < end && (!part->rank || part->a == (const char *)args.w + args.num_outputs * row_bytes); part++)
            args.num_outputs += part->rank;
        if (args.num_outputs) linear_span(&args, 0);
        shrunk += args.num_outputs;
    }
}

static void lora_claim(void *context, long index) {
    const lora_loop *loop = context;
    const claim_t *claim = &loop->claims[index];
    const lora_part *first = &loop->parts[claim->first_part];
    int width = width_of(loop->dt);
    long total_rank = 0;
    for (long p = 0; p < claim->num_parts; p++) {
        total_rank += first[p].rank;
        prefetch(first[p].b, first[p].rank * first[p].num_outputs * width);
    }
    float *shrunk = scratch(SCRATCH_LORA, ROWS_PER_CLAIM * total_rank * 4 + 64);
    shrink(loop, claim, shrunk, total_rank);
    if (index + 1 < loop->num_claims) { /* what this thread takes next, for threads take neighbours */
        const claim_t *next = &loop->claims[index + 1];
        const lora_part *part = &loop->parts[next->first_part];
        for (long p = 0; p < next->num_parts; p++) prefetch(part[p].a, part[p].rank * loop->dim * width);
    }
    for (long p = 0; p < claim->num_parts; p++) {
        void *y = at_mut(loop->y, claim->row * loop->y_stride + first[p].first_output, loop->y_dt);
        const expand_args e = {&first[p], shrunk, total_rank, y, loop->y_stride, loop->dt, loop->y_dt};
        expand_any(&e, claim->num_rows);
        shrunk += first[p].rank;
    }
}

/* Cuts groups of parts with the same rows into claims; returns how many. `claims` may be NULL to count them only. */
static long cut(const lora_part *parts, long num_parts, claim_t *claims) {
    long count = 0;
    for (long p = 0, end; p < num_parts; p = end) {
        for (end = p + 1; end < num_parts && parts[end].start == parts[p].start && parts[end].end == parts[p].end;) end++;
        for (long row = parts[p].start; row < parts[p].end; row += ROWS_PER_CLAIM, count++) {
            long left = parts[p].end - row;
            if (claims) claims[count] = (claim_t){p, end - p, row, left < ROWS_PER_CLAIM ? left : ROWS_PER_CLAIM};
        }
    }
    return count;
}

void lora_run(const lora_part *parts, long num_parts, const void *x, long x_stride, long dim, void *y, long y_stride,
              int dt, int y_dt) {
    long num_claims = cut(parts, num_parts, NULL);
    claim_t *claims = scratch(SCRATCH_CALLER, num_claims * (long)sizeof(claim_t) + 64);
    cut(parts, num_parts, claims);
    lora_loop loop = {parts, claims, num_claims, x, x_stride, dim, y, y_stride, dt, y_dt};
    parallel_for(num_claims, lora_claim, &loop);
}

void nl_lora(const lora_part *parts, long num_parts, const void *x, long x_stride, long dim, void *y, long y_stride,
             int dt, int y_dt) {
    lora_run(parts, num_parts, x, x_stride, dim, y, y_stride, dt, y_dt);
}
