/* y = x · wᵀ + bias for row-major weights, streamed once and read as they lie in the checkpoint.
 *
 * Batch-invariant: an output is sixteen running sums over the inner dimension, folded by the fixed tree of vec.h, and
 * that is so whatever tile, chunk or thread computes it. A tile is up to 4 weight rows × TOKENS_PER_TILE tokens.
 */
#include "ops.h"

#define OUTPUTS_PER_TILE 4
#if defined(__AVX512F__)
#define TOKENS_PER_TILE 6
#else
#define TOKENS_PER_TILE 2
#endif
#define PANEL_BYTES 20480 /* of activations that stay in the L1 cache while weights pass from L2 */
#define MAX_PANEL_TOKENS 64
#define TOKENS_PER_CLAIM 256
#define IS_DOT(dt) (HAS_DOT_BF16 && (dt) == BF16)

typedef struct {
    const char *x[TOKENS_PER_TILE];
    const char *w[OUTPUTS_PER_TILE];
    const char *next; /* weights to prefetch meanwhile: `lines` cache lines for each one that is read of a row */
    long lines;
} tile_rows;

/* The next four rows of weights come in while this tile computes: the hardware follows such short rows too late. */
INLINE void prefetch_step(const tile_rows *rows, long byte) {
    if (!rows->lines) return;
    const char *line = rows->next + byte * rows->lines;
    __builtin_prefetch(line, 0, 2);
    if (rows->lines == 1) return;
    __builtin_prefetch(line + 64, 0, 2);
    if (rows->lines == 2) return;
    __builtin_prefetch(line + 128, 0, 2);
    __builtin_prefetch(line + 192, 0, 2);
}

#if HAS_DOT_BF16
INLINE void dot_step(v16 acc[OUTPUTS_PER_TILE][TOKENS_PER_TILE], const tile_rows *rows, long m, int num_rows,
                     __mmask32 mask) {
    __m512bh w[OUTPUTS_PER_TILE];
    UNROLL for (int n = 0; n < OUTPUTS_PER_TILE; n++)
        w[n] = (__m512bh)_mm512_maskz_loadu_epi16(mask, rows->w[n] + 2 * m);
    UNROLL for (int r = 0; r < num_rows; r++) {
        __m512bh x = (__m512bh)_mm512_maskz_loadu_epi16(mask, rows->x[r] + 2 * m);
        UNROLL for (int n = 0; n < OUTPUTS_PER_TILE; n++)
            acc[n][r] = (v16)_mm512_dpbf16_ps((__m512)acc[n][r], x, w[n]);
    }
}

INLINE void accumulate_dot(v16 acc[OUTPUTS_PER_TILE][TOKENS_PER_TILE], const tile_rows *rows, long dim, int num_rows) {
    long m = 0;
    for (; m + 32 <= dim; m += 32) {
        prefetch_step(rows, 2 * m);
        dot_step(acc, rows, m, num_rows, 0xffffffffu);
    }
    if (m < dim) dot_step(acc, rows, m, num_rows, (1u << (dim - m)) - 1);
}
#endif

INLINE void accumulate_fma(v16 acc[OUTPUTS_PER_TILE][TOKENS_PER_TILE], const tile_rows *rows, long dim, int num_rows,
                           int dt) {
    long m = 0;
    for (; m + 16 <= dim; m += 16) {
        v16 w[OUTPUTS_PER_TILE];
        UNROLL for (int n = 0; n < OUTPUTS_PER_TILE; n++) w[n] = load16(at(rows->w[n], m, dt), dt);
        prefetch_step(rows, m * width_of(dt));
        UNROLL for (int r = 0; r < num_rows; r++) {
            v16 x = load16(at(rows->x[r], m, F32), F32);
            UNROLL for (int n = 0; n < OUTPUTS_PER_TILE; n++) acc[n][r] = madd(x, w[n], acc[n][r]);
        }
    }
    int rest = (int)(dim - m);
    if (!rest) return;
    for (int n = 0; n < OUTPUTS_PER_TILE; n++) {
        v16 w = load_some(at(rows->w[n], m, dt), rest, dt);
        for (int r = 0; r < num_rows; r++)
            acc[n][r] = madd(load_some(at(rows->x[r], m, F32), rest, F32), w, acc[n][r]);
    }
}

/* Returns lanes [4r … 4r+3] = the four outputs of token `first` + r, r < 4. */
INLINE v16 fold_tile(v16 acc[OUTPUTS_PER_TILE][TOKENS_PER_TILE], int first, int num_rows) {
    v16 zero = splat(0.0f), by_output[OUTPUTS_PER_TILE];
    UNROLL for (int n = 0; n < OUTPUTS_PER_TILE; n++) {
        const v16 *of = acc[n] + first;
        v16 low = num_rows > 1 ? FOLD8(of[0], of[1]) : FOLD8(of[0], zero);
        v16 high = num_rows > 3 ? FOLD8(of[2], of[3]) : num_rows > 2 ? FOLD8(of[2], zero) : zero;
        by_output[n] = FOLD4(low, high);
    }
    v16 even = FOLD2(by_output[0], by_output[1]), odd = FOLD2(by_output[2], by_output[3]);
    return FOLD1(even, odd);
}

INLINE void store_tile(const linear_args *args, v16 out, long token, long output, int num_rows,
                       int out_dt) {
    long count = args->num_outputs - output < OUTPUTS_PER_TILE ? args->num_outputs - output : OUTPUTS_PER_TILE;
    char lanes[64];
    store16(lanes, out, out_dt);
    long width = width_of(out_dt);
    for (int r = 0; r < num_rows; r++) {
        char *y = at_mut(args->y, (token + r) * args->y_stride + output, out_dt);
        if (count == OUTPUTS_PER_TILE)
            memcpy(y, lanes + OUTPUTS_PER_TILE * width * r, (size_t)(OUTPUTS_PER_TILE * width));
        else
            memcpy(y, lanes + OUTPUTS_PER_TILE * width * r, (size_t)(count * width));
    }
}

INLINE v16 bias_lanes(const linear_args *args, long output, int dt) {
    float b[OUTPUTS_PER_TILE];
    for (int n = 0; n < OUTPUTS_PER_TILE; n++)
        b[n] = output + n < args->num_outputs ? load1(args->bias, output + n, dt) : 0.0f;
    return (v16){b[0], b[1], b[2], b[3], b[0], b[1], b[2], b[3], b[0], b[1], b[2], b[3], b[0], b[1], b[2], b[3]};
}

INLINE void tile(const linear_args *args, long token, long output, int num_rows, int dt, const char *next, long lines) {
    long x_width = IS_DOT(dt) ? 2 : 4;
    tile_rows rows = {.next = next, .lines = lines};
    UNROLL for (int n = 0; n < OUTPUTS_PER_TILE; n++) { /* past the last output: its row again, not stored */
        long row = output + n < args->num_outputs ? output + n : args->num_outputs - 1;
        rows.w[n] = at(args->w, row * args->dim, dt);
    }
    UNROLL for (int r = 0; r < num_rows; r++)
        rows.x[r] = (const char *)args->x + (token + r) * args->x_stride * x_width;
    v16 acc[OUTPUTS_PER_TILE][TOKENS_PER_TILE];
    UNROLL for (int n = 0; n < OUTPUTS_PER_TILE; n++)
        UNROLL for (int r = 0; r < num_rows; r++) acc[n][r] = splat(0.0f);
#if HAS_DOT_BF16
    if (dt == BF16)
        accumulate_dot(acc, &rows, args->dim, num_rows);
    else
#endif
        accumulate_fma(acc, &rows, args->dim, num_rows, dt);
    UNROLL for (int first = 0; first < num_rows; first += 4) {
        int count = num_rows - first < 4 ? num_rows - first : 4;
        v16 out = fold_tile(acc, first, count);
        if (args->bias) out += bias_lanes(args, output, dt);
        if (args->out_dt == F32)
            store_tile(args, out, token + first, output, count, F32);
        else
            store_tile(args, out, token + first, output, count, dt);
    }
}

INLINE void tile_of(const linear_args *args, long token, long output, long count, int dt, const char *next,
                    long lines) {
#if TOKENS_PER_TILE == 6
    if (count == 6) tile(args, token, output, 6, dt, next, lines);
    if (count == 5) tile(args, token, output, 5, dt, next, lines);
    if (count == 4) tile(args, token, output, 4, dt, next, lines);
    if (count == 3) tile(args, token, output, 3, dt, next, lines);
#endif
    if (count == 2) tile(args, token, output, 2, dt, next, lines);
    if (count == 1) tile(args, token, output, 1, dt, next, lines);
}

/* Equal panels of at most PANEL_BYTES, and equal tiles of a panel: a small last one would waste registers. */
INLINE void span(const linear_args *args, long first, int dt) {
    long row_bytes = args->dim * width_of(dt), x_bytes = args->dim * (IS_DOT(dt) ? 2 : 4);
    long ahead = OUTPUTS_PER_TILE * (row_bytes <= 2048 ? 2 : 1); /* short rows leave little time: ask earlier */
    long most = PANEL_BYTES / (x_bytes ? x_bytes : 1) / TOKENS_PER_TILE * TOKENS_PER_TILE;
    most = most < TOKENS_PER_TILE ? TOKENS_PER_TILE : most < MAX_PANEL_TOKENS ? most : MAX_PANEL_TOKENS;
    long num_panels = (args->num_tokens + most - 1) / most;
    for (long p = 0; p < num_panels; p++) {
        long panel = args->num_tokens * p / num_panels, end = args->num_tokens * (p + 1) / num_panels;
        long num_tiles = (end - panel + TOKENS_PER_TILE - 1) / TOKENS_PER_TILE;
        long lines = p ? 0 : num_tiles >= 4 ? 1 : num_tiles >= 2 ? 2 : 4; /* per tile: they share the four rows */
        for (long n = first; n < args->num_outputs; n += OUTPUTS_PER_TILE) {
            const char *next = (const char *)args->w + (n + ahead) * row_bytes;
            const char *stop = next + OUTPUTS_PER_TILE * row_bytes;
            long t = panel;
            for (long left = num_tiles; left; left--, next += lines * row_bytes) {
                long count = (end - t + left - 1) / left;
                tile_of(args, t, n, count, dt, next, next < stop ? lines : 0);
                t += count;
            }
        }
    }
}

static __attribute__((noinline)) void span_f32(const linear_args *args, long first) { span(args, first, F32); }
static __attribute__((noinline)) void span_bf16(const linear_args *args, long first) { span(args, first, BF16); }
static __attribute__((noinline)) void span_f16(const linear_args *args, long first) { span(args, first, F16); }

void linear_span(const linear_args *args, long first) {
    if (args->dt == F32) span_f32(args, first);
    if (args->dt == BF16) span_bf16(args, first);
    if (args->dt == F16) span_f16(args, first);
}

typedef struct {
    const linear_args *from;
    float *to;
} widen_args;

static void widen_row(void *context, long t) {
    const widen_args *w = context;
    const linear_args *args = w->from;
    float *to = w->to + t * args->dim;
    long m = 0;
    for (; m + 16 <= args->dim; m += 16) {
        const char *p = at(args->x, t * args->x_stride + m, args->dt);
        store16(to + m, args->dt == BF16 ? load16(p, BF16) : load16(p, F16), F32);
    }
    for (; m < args->dim; m++) to[m] = load1(args->x, t * args->x_stride + m, args->dt);
}

linear_args linear_prepare(const linear_args *args, int slot) {
    linear_args ready = *args;
    if (args->dt == F32 || IS_DOT(args->dt)) return ready;
    widen_args widen = {args, scratch(slot, args->num_tokens * args->dim * 4 + 64)};
    if (args->num_tokens * args->dim > 1 << 16)
        parallel_for(args->num_tokens, widen_row, &widen);
    else
        for (long t = 0; t < args->num_tokens; t++) widen_row(&widen, t);
    ready.x = widen.to;
    ready.x_stride = args->dim;
    return ready;
}

static long linear_grain(const linear_args *args) {
    long row_bytes = args->dim * width_of(args->dt);
    long target = args->num_tokens <= 16 ? 1 << 16 : 1 << 17;
    long grain = target / (row_bytes ? row_bytes : 1) / OUTPUTS_PER_TILE * OUTPUTS_PER_TILE;
    return grain < OUTPUTS_PER_TILE ? OUTPUTS_PER_TILE : grain;
}

typedef struct {
    linear_args args;
    void *gated; /* [T, F] if outputs are [gate | up] and act(gate) · up is wanted, else NULL */
    int kind;
    long outputs_per_claim, num_output_claims, tokens_per_claim;
} linear_loop;

static void linear_claim(void *context, long index) {
    const linear_loop *loop = context;
    linear_args part = loop->args;
    long num_outputs = loop->gated ? part.num_outputs / 2 : part.num_outputs;
    long first = index % loop->num_output_claims * loop->outputs_per_claim;
    long token = index / loop->num_output_claims * loop->tokens_per_claim;
    long last = first + loop->outputs_per_claim < num_outputs ? first + loop->outputs_per_claim : num_outputs;
    long left = part.num_tokens - token;
    part.x = (const char *)part.x + token * part.x_stride * (IS_DOT(part.dt) ? 2 : 4);
    part.y = at_mut(part.y, token * part.y_stride, part.out_dt);
    part.num_tokens = left < loop->tokens_per_claim ? left : loop->tokens_per_claim;
    part.num_outputs = last;
    linear_span(&part, first);
    if (!loop->gated) return;
    part.num_outputs = num_outputs + last;
    linear_span(&part, num_outputs + first);
    for (long t = 0; t < part.num_tokens; t++) {
        const void *gate = at(part.y, t * part.y_stride + first, part.dt);
        void *to = at_mut(loop->gated, (token + t) * num_outputs + first, part.dt);
        activate_row(gate, at(gate, num_outputs, part.dt), to, last - first, loop->kind, part.dt);
    }
}

void linear_run(const linear_args *args, void *gated, int kind) {
    if (!args->num_tokens || !args->num_outputs) return;
    linear_loop loop = {.args = linear_prepare(args, SCRATCH_LINEAR), .gated = gated, .kind = kind};
    loop.outputs_per_claim = linear_grain(args);
    loop.tokens_per_claim = TOKENS_PER_CLAIM;
    long num_outputs = gated ? args->num_outputs / 2 : args->num_outputs;
    loop.num_output_claims = (num_outputs + loop.outputs_per_claim - 1) / loop.outputs_per_claim;
    long token_claims = (args->num_tokens + loop.tokens_per_claim - 1) / loop.tokens_per_claim;
    parallel_for(loop.num_output_claims * token_claims, linear_claim, &loop);
}

void nl_linear(const void *x, long x_stride, const void *w, const void *bias, void *y, long y_stride, long num_tokens,
               long num_outputs, long dim, int dt, int out_dt) {
    linear_args args = {x, x_stride, w, bias, y, y_stride, num_tokens, num_outputs, dim, dt, out_dt};
    linear_run(&args, NULL, SILU);
}
