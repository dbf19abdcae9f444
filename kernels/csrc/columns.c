/* y = x · w + bias for weights stored [inputs, outputs] (GPT-2), read as they lie in the checkpoint.
 *
 * Batch-invariant: an output is a sum of sums over INPUTS_PER_SUM inputs in order, whatever tile, claim or thread
 * computes it.
 */
#include "ops.h"

#define TOKENS_PER_PANEL 64 /* tokens that pass while a tile of weights stays in the L2 cache */
#define INPUTS_PER_SUM 64   /* even */
#define ROWS_AHEAD 8        /* rows of weights between the one that is read and the one to prefetch: each is another page */
#define WIDE (2 * ROWS_PER_TILE) /* vectors of outputs per tile of one or two tokens, half of it per tile of four */
#define IS_DOT(dt) (HAS_DOT_BF16 && (dt) == BF16)

#if HAS_DOT_BF16
/* Inputs m and m + 1 of sixteen outputs side by side; past the last input, zeros. */
INLINE __m512bh pairs16(const linear_args *args, const char *w, long m, int lanes) {
    __mmask16 mask = (__mmask16)((1u << lanes) - 1), second_mask = m + 1 < args->dim ? mask : 0;
    __m256i first = _mm256_maskz_loadu_epi16(mask, w);
    __m256i second = _mm256_maskz_loadu_epi16(second_mask, w + args->num_outputs * 2);
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), both);
}

INLINE v16 pair_of(const linear_args *args, long token, long m) {
    const char *x = at(args->x, token * args->x_stride + m, BF16);
    uint16_t pair[2] = {0, 0};
    memcpy(pair, x, m + 1 < args->dim ? 4 : 2);
    int32_t bits;
    memcpy(&bits, pair, 4);
    return (v16)_mm512_set1_epi32(bits);
}
#endif

INLINE void column_tile(const linear_args *args, long token, long output, int rows, int vectors, int lanes, int dt) {
    v16 total[4][WIDE], acc[4][WIDE];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) total[r][v] = splat(0.0f);
    for (long start = 0; start < args->dim; start += INPUTS_PER_SUM) {
        long end = start + INPUTS_PER_SUM < args->dim ? start + INPUTS_PER_SUM : args->dim;
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) acc[r][v] = splat(0.0f);
        for (long m = start; m < end; m += IS_DOT(dt) ? 2 : 1) {
            const char *w = at(args->w, m * args->num_outputs + output, dt);
            if (m + ROWS_AHEAD + 1 < args->dim)
                UNROLL for (int v = 0; v < vectors; v += dt == F32 ? 1 : 2) {
                    const char *ahead = w + (ROWS_AHEAD * args->num_outputs + 16 * v) * width_of(dt);
                    __builtin_prefetch(ahead, 0, 2);
                    if (IS_DOT(dt)) __builtin_prefetch(ahead + args->num_outputs * 2, 0, 2);
                }
#if HAS_DOT_BF16
            if (dt == BF16) {
                __m512bh weights[WIDE];
                UNROLL for (int v = 0; v < vectors; v++) weights[v] = pairs16(args, w + 32 * v, m, lanes);
                UNROLL for (int r = 0; r < rows; r++) {
                    __m512bh x = (__m512bh)pair_of(args, token + r, m);
                    UNROLL for (int v = 0; v < vectors; v++)
                        acc[r][v] = (v16)_mm512_dpbf16_ps((__m512)acc[r][v], x, weights[v]);
                }
                continue;
            }
#endif
            v16 weights[WIDE];
            UNROLL for (int v = 0; v < vectors; v++)
                weights[v] = lanes == 16 ? load16(w + 16 * v * width_of(dt), dt) : load_some(w, lanes, dt);
            UNROLL for (int r = 0; r < rows; r++) {
                v16 x = splat(load1(args->x, (token + r) * args->x_stride + m, dt));
                UNROLL for (int v = 0; v < vectors; v++) acc[r][v] = madd(x, weights[v], acc[r][v]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) total[r][v] += acc[r][v];
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) {
        v16 y = total[r][v];
        if (args->bias) y += load_some(at(args->bias, output + 16 * v, dt), lanes, dt);
        char *to = at_mut(args->y, (token + r) * args->y_stride + output + 16 * v, args->out_dt);
        if (args->out_dt == F32)
            store_some(to, y, lanes, F32);
        else
            store_some(to, y, lanes, dt);
    }
}

INLINE void column_span(const linear_args *args, long first, long last, int dt) {
    long n = first, T = args->num_tokens;
    for (; T >= 3 && n + 8 * WIDE <= last; n += 8 * WIDE) {
        long t = 0;
        for (; t + 4 <= T; t += 4) column_tile(args, t, n, 4, WIDE / 2, 16, dt);
        for (; t < T; t++) column_tile(args, t, n, 1, WIDE / 2, 16, dt);
    }
    for (; T < 3 && n + 16 * WIDE <= last; n += 16 * WIDE) {
        if (T == 2) column_tile(args, 0, n, 2, WIDE, 16, dt);
        if (T == 1) column_tile(args, 0, n, 1, WIDE, 16, dt);
    }
    for (; n + 16 <= last; n += 16)
        for (long t = 0; t < T; t++) column_tile(args, t, n, 1, 1, 16, dt);
    for (long t = 0; n < last && t < T; t++) column_tile(args, t, n, 1, 1, (int)(last - n), dt);
}

static __attribute__((noinline)) void columns_f32(const linear_args *a, long n, long end) { column_span(a, n, end, F32); }
static __attribute__((noinline)) void columns_bf16(const linear_args *a, long n, long end) { column_span(a, n, end, BF16); }
static __attribute__((noinline)) void columns_f16(const linear_args *a, long n, long end) { column_span(a, n, end, F16); }

typedef struct {
    linear_args args;
    long num_output_claims;
} columns_loop;

static void columns_claim(void *context, long index) {
    const columns_loop *loop = context;
    linear_args part = loop->args;
    long first = index % loop->num_output_claims * 16 * WIDE, token = index / loop->num_output_claims * TOKENS_PER_PANEL;
    long last = first + 16 * WIDE < part.num_outputs ? first + 16 * WIDE : part.num_outputs;
    part.x = at(part.x, token * part.x_stride, part.dt);
    part.y = at_mut(part.y, token * part.y_stride, part.out_dt);
    part.num_tokens = part.num_tokens - token < TOKENS_PER_PANEL ? part.num_tokens - token : TOKENS_PER_PANEL;
    if (part.dt == F32) columns_f32(&part, first, last);
    if (part.dt == BF16) columns_bf16(&part, first, last);
    if (part.dt == F16) columns_f16(&part, first, last);
}

void columns_run(const linear_args *args) {
    columns_loop loop = {*args, (args->num_outputs + 16 * WIDE - 1) / (16 * WIDE)};
    long panels = (args->num_tokens + TOKENS_PER_PANEL - 1) / TOKENS_PER_PANEL;
    parallel_for(loop.num_output_claims * panels, columns_claim, &loop);
}

void nl_linear_columns(const void *x, long x_stride, const void *w, const void *bias, void *y, long y_stride,
                       long num_tokens, long num_outputs, long dim, int dt, int out_dt) {
    linear_args args = {x, x_stride, w, bias, y, y_stride, num_tokens, num_outputs, dim, dt, out_dt};
    columns_run(&args);
}
