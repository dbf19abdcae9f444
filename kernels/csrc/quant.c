/* y = x · wᵀ + bias for weights of 8 or 4 bits with one scale (and, at 4 bits, one offset) per row and group.
 *
 * Packed as the sums want them: sixteen rows side by side, one 32-bit lane each; a lane holds four (8 bits) or eight
 * (4 bits) neighbouring columns, ordered so that masks and shifts give pairs of 16-bit integers. Activations become
 * 16-bit integers with one scale per group, so products are exact integers and only scales are rounded. Batch-invariant:
 * an output is one running float sum over the groups in order, whatever tile, claim or thread computes it.
 */
#include "ops.h"

#define LANES 16 /* rows side by side */
#define TOKENS_PER_PANEL 64
#define LEVELS 32767.0f  /* of activations, each way */
#define BYTES_AHEAD 2048 /* between a weight that is read and the one to prefetch */
#define PARALLEL_FROM (1 << 15)
#if defined(__AVX512F__)
#define TOKENS_PER_TILE 8
#else
#define TOKENS_PER_TILE 2
#endif

/* Activations as integers: groups of one token are adjacent, columns past the last are zero. */
typedef struct {
    const quant_args *args;
    int16_t *values; /* [T, G · group] */
    float *scales;   /* [T, G] */
    int32_t *sums;   /* [T, G]: of the group's integers */
    long num_groups;
} activations_t;

INLINE int group_of(int bits) { return bits == 8 ? QUANT_GROUP_8 : QUANT_GROUP_4; }

/* acc[i] += the low halves' product + the high halves' product; `pair` is the same in every lane. */
INLINE i32x16 dot_pairs(i32x16 acc, u32x16 w, int32_t pair) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(pair));
#elif defined(__AVX512BW__)
    return acc + (i32x16)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
    __m256i lo = _mm256_madd_epi16(((__m256i *)&w)[0], _mm256_set1_epi32(pair));
    __m256i hi = _mm256_madd_epi16(((__m256i *)&w)[1], _mm256_set1_epi32(pair));
    i32x16 product;
    memcpy(&product, &lo, 32);
    memcpy((char *)&product + 32, &hi, 32);
    return acc + product;
#else
    return acc + (i32x16)(w & 0xffff) * (int32_t)(int16_t)pair + (i32x16)(w >> 16) * (pair >> 16);
#endif
}

INLINE int32_t pair_at(const int16_t *values) {
    int32_t pair;
    memcpy(&pair, values, 4);
    return pair;
}

/* Adds the integer products of one group of sixteen rows with `count` tokens to acc. */
INLINE void dot_group(i32x16 *acc, const uint8_t *w, const int16_t *x, long x_stride, int count, int bits) {
    int steps = 16 / bits, columns = 2 * steps, group = group_of(bits);
    uint32_t mask = bits == 8 ? 0x00ff00ff : 0x000f000f;
    UNROLL for (int k = 0; k < group; k += columns) {
        u32x16 lanes;
        memcpy(&lanes, w + k / columns * 64, 64);
        UNROLL for (int s = 0; s < steps; s++) {
            u32x16 values = (lanes >> (bits * s)) & mask;
            UNROLL for (int t = 0; t < count; t++)
                acc[t] = dot_pairs(acc[t], values, pair_at(x + t * x_stride + k + 2 * s));
        }
    }
}

INLINE void store_outputs(const quant_args *args, v16 y, long token, long output, int dt) {
    int count = args->num_outputs - output < LANES ? (int)(args->num_outputs - output) : LANES;
    if (args->bias) y += load_some(at(args->bias, output, dt), count, dt);
    if (args->out_dt == F32) {
        void *to = at_mut(args->y, token * args->y_stride + output, F32);
        count == LANES ? store16(to, y, F32) : store_some(to, y, count, F32);
    } else {
        void *to = at_mut(args->y, token * args->y_stride + output, dt);
        count == LANES ? store16(to, y, dt) : store_some(to, y, count, dt);
    }
}

/* Sixteen rows, one output each, against `count` tokens. */
INLINE void quant_tile(const activations_t *x, v16 *sum, long token, long block, int count, int bits) {
    int group = group_of(bits), group_bytes = group * LANES * bits / 8;
    long G = x->num_groups, stride = G * group;
    const uint8_t *w = (const uint8_t *)x->args->w + block * G * group_bytes;
    const char *scales = (const char *)x->args->scales + block * G * LANES * 2;
    const char *offsets = (const char *)x->args->offsets + block * G * LANES * 2;
    UNROLL for (int t = 0; t < count; t++) sum[t] = splat(0.0f);
    for (long g = 0; g < G; g++, w += group_bytes) {
        i32x16 acc[TOKENS_PER_TILE];
        UNROLL for (int t = 0; t < count; t++) {
            int32_t start = bits == 8 ? -128 * x->sums[(token + t) * G + g] : 0; /* bytes are stored plus 128 */
            acc[t] = (i32x16){0} + start;
        }
        UNROLL for (int line = 0; line < group_bytes; line += 64) __builtin_prefetch(w + BYTES_AHEAD + line, 0, 2);
        dot_group(acc, w, x->values + token * stride + g * group, stride, count, bits);
        v16 scale = load16(scales + g * LANES * 2, BF16);
        UNROLL for (int t = 0; t < count; t++) {
            v16 dot = __builtin_convertvector(acc[t], v16) * splat(x->scales[(token + t) * G + g]);
            sum[t] = madd(dot, scale, sum[t]);
        }
        if (bits == 8) continue;
        v16 offset = load16(offsets + g * LANES * 2, BF16);
        UNROLL for (int t = 0; t < count; t++) {
            float total = (float)x->sums[(token + t) * G + g] * x->scales[(token + t) * G + g];
            sum[t] = madd(splat(total), offset, sum[t]);
        }
    }
}

static __attribute__((noinline)) void tile_8(const activations_t *x, v16 *sum, long token, long block, int count) {
#if TOKENS_PER_TILE == 8
    if (count == 8) quant_tile(x, sum, token, block, 8, 8);
    if (count == 4) quant_tile(x, sum, token, block, 4, 8);
#endif
    if (count == 2) quant_tile(x, sum, token, block, 2, 8);
    if (count == 1) quant_tile(x, sum, token, block, 1, 8);
}

static __attribute__((noinline)) void tile_4(const activations_t *x, v16 *sum, long token, long block, int count) {
#if TOKENS_PER_TILE == 8
    if (count == 8) quant_tile(x, sum, token, block, 8, 4);
    if (count == 4) quant_tile(x, sum, token, block, 4, 4);
#endif
    if (count == 2) quant_tile(x, sum, token, block, 2, 4);
    if (count == 1) quant_tile(x, sum, token, block, 1, 4);
}

/* Outputs of blocks [first, last) for tokens [start, end), on the calling thread. */
static void quant_span(const activations_t *x, long start, long end, long first, long last) {
    const quant_args *args = x->args;
    v16 sum[TOKENS_PER_TILE];
    for (long panel = start; panel < end; panel += TOKENS_PER_PANEL) {
        long stop = panel + TOKENS_PER_PANEL < end ? panel + TOKENS_PER_PANEL : end;
        for (long block = first; block < last; block++)
            for (long t = panel, count; t < stop; t += count) {
                for (count = TOKENS_PER_TILE; count > stop - t; count /= 2) {}
                args->bits == 8 ? tile_8(x, sum, t, block, (int)count) : tile_4(x, sum, t, block, (int)count);
                for (long i = 0; i < count; i++) {
                    if (args->dt == F32) store_outputs(args, sum[i], t + i, block * LANES, F32);
                    if (args->dt == BF16) store_outputs(args, sum[i], t + i, block * LANES, BF16);
                    if (args->dt == F16) store_outputs(args, sum[i], t + i, block * LANES, F16);
                }
            }
    }
}

/* One group of one token as integers: returns their sum, gives the scale. */
INLINE int32_t round_group(const float *x, int16_t *values, int group, float *scale) {
    v16 top = splat(0.0f);
    for (int k = 0; k < group; k += 16) {
        v16 v = load16(x + k, F32);
        top = max16(top, max16(v, -v));
    }
    float most = top16(top), inverse = most > 0.0f ? LEVELS / most : 0.0f;
    *scale = most / LEVELS;
    i32x16 sum = {0};
    for (int k = 0; k < group; k += 16) {
        /* The magic number leaves the nearest integer in the low bits, ties to even. */
        v16 shifted = load16(x + k, F32) * splat(inverse) + splat(12582912.0f);
        i32x16 rounded = (i32x16)shifted - (i32x16)splat(12582912.0f);
        typedef int16_t i16x16 __attribute__((vector_size(32)));
        i16x16 narrow = __builtin_convertvector(rounded, i16x16);
        memcpy(values + k, &narrow, 32);
        sum += rounded;
    }
    int32_t total = 0;
    for (int i = 0; i < 16; i++) total += sum[i];
    return total;
}

static void round_token(void *context, long t) {
    const activations_t *x = context;
    const quant_args *args = x->args;
    int group = group_of(args->bits);
    for (long g = 0; g < x->num_groups; g++) {
        float widened[QUANT_GROUP_8 > QUANT_GROUP_4 ? QUANT_GROUP_8 : QUANT_GROUP_4];
        for (int k = 0; k < group; k += 16) {
            long column = g * group + k, left = args->dim - column;
            int count = left < 0 ? 0 : left < 16 ? (int)left : 16;
            const void *p = at(args->x, t * args->x_stride + (count ? column : 0), args->dt);
            v16 v;
            if (args->dt == F32) v = count == 16 ? load16(p, F32) : load_some(p, count, F32);
            else if (args->dt == BF16) v = count == 16 ? load16(p, BF16) : load_some(p, count, BF16);
            else v = count == 16 ? load16(p, F16) : load_some(p, count, F16);
            store16(widened + k, v, F32);
        }
        long at_group = t * x->num_groups + g;
        x->sums[at_group] = round_group(widened, x->values + at_group * group, group, &x->scales[at_group]);
    }
}

static activations_t round_activations(const quant_args *args) {
    int group = group_of(args->bits);
    long T = args->num_tokens, G = (args->dim + group - 1) / group;
    char *memory = scratch(SCRATCH_QUANT, T * G * (2 * group + 8) + 64);
    activations_t x = {.args = args, .num_groups = G, .values = (int16_t *)memory};
    x.scales = (float *)(memory + T * G * group * 2);
    x.sums = (int32_t *)(x.scales + T * G);
    if (T > 1 && T * args->dim >= PARALLEL_FROM)
        parallel_for(T, round_token, &x);
    else
        for (long t = 0; t < T; t++) round_token(&x, t);
    return x;
}

typedef struct {
    const activations_t *x;
    void *gated;
    int kind;
    long blocks_per_claim, num_block_claims, tokens_per_claim;
} quant_loop;

static void quant_claim(void *context, long index) {
    const quant_loop *loop = context;
    const quant_args *args = loop->x->args;
    long num_outputs = loop->gated ? args->num_outputs / 2 : args->num_outputs;
    long num_blocks = (num_outputs + LANES - 1) / LANES;
    long first = index % loop->num_block_claims * loop->blocks_per_claim;
    long start = index / loop->num_block_claims * loop->tokens_per_claim;
    long last = first + loop->blocks_per_claim < num_blocks ? first + loop->blocks_per_claim : num_blocks;
    long end = start + loop->tokens_per_claim < args->num_tokens ? start + loop->tokens_per_claim : args->num_tokens;
    quant_span(loop->x, start, end, first, last);
    if (!loop->gated) return;
    quant_span(loop->x, start, end, num_blocks + first, num_blocks + last);
    for (long t = start; t < end; t++) {
        const void *gate = at(args->y, t * args->y_stride + first * LANES, args->dt);
        void *to = at_mut(loop->gated, t * num_outputs + first * LANES, args->dt);
        activate_row(gate, at(gate, num_outputs, args->dt), to, (last - first) * LANES, loop->kind, args->dt);
    }
}

void quant_run(const quant_args *args, void *gated, int kind) {
    if (!args->num_tokens || !args->num_outputs) return;
    activations_t x = round_activations(args);
    quant_loop loop = {.x = &x, .gated = gated, .kind = kind, .tokens_per_claim = 4 * TOKENS_PER_PANEL};
    long num_blocks = ((gated ? args->num_outputs / 2 : args->num_outputs) + LANES - 1) / LANES;
    long block_bytes = x.num_groups * group_of(args->bits) * LANES * args->bits / 8;
    long grain = (args->num_tokens <= 16 ? 1 << 15 : 1 << 16) / block_bytes;
    loop.blocks_per_claim = grain < 1 ? 1 : grain;
    loop.num_block_claims = (num_blocks + loop.blocks_per_claim - 1) / loop.blocks_per_claim;
    long token_claims = (args->num_tokens + loop.tokens_per_claim - 1) / loop.tokens_per_claim;
    parallel_for(loop.num_block_claims * token_claims, quant_claim, &loop);
}

void nl_quant_linear(const void *x, long x_stride, const void *w, const void *scales, const void *offsets,
                     const void *bias, void *y, long y_stride, long num_tokens, long num_outputs, long dim, int dt,
                     int out_dt, int bits) {
    quant_args args = {x, x_stride, w, scales, offsets, bias, y, y_stride, num_tokens, num_outputs, dim, dt, out_dt, bits};
    quant_run(&args, NULL, SILU);
}

typedef struct {
    const void *w, *scales, *offsets;
    void *y;
    long y_stride, dim;
    int dt, bits;
} rows_args;

/* Row `row` of the matrix, as numbers of y's type. */
static void unpack_row(const rows_args *args, long row, long t) {
    int group = group_of(args->bits), columns = 32 / args->bits;
    long G = (args->dim + group - 1) / group, lane = row % LANES, first_group = row / LANES * G;
    for (long k = 0; k < args->dim; k++) {
        long g = k / group, at_group = (first_group + g) * LANES + lane, within = k % columns;
        long word = (first_group * group + k) / columns * LANES + lane, place = within % 2 * (columns / 2) + within / 2;
        uint32_t codes;
        memcpy(&codes, (const char *)args->w + word * 4, 4);
        float code = (float)(codes >> (place * args->bits) & ((1u << args->bits) - 1));
        float scale = load1(args->scales, at_group, BF16);
        float value = args->bits == 8 ? scale * (code - 128.0f) : scale * code + load1(args->offsets, at_group, BF16);
        store1(args->y, t * args->y_stride + k, value, args->dt);
    }
}

int nl_quant_rows(const void *w, const void *scales, const void *offsets, const int64_t *rows, void *y, long y_stride,
                  long num_tokens, long num_rows, long dim, int dt, int bits) {
    rows_args args = {w, scales, offsets, y, y_stride, dim, dt, bits};
    for (long t = 0; t < num_tokens; t++)
        if (rows[t] < 0 || rows[t] >= num_rows) return BAD_ROW;
    for (long t = 0; t < num_tokens; t++) unpack_row(&args, rows[t], t);
    return OK;
}
