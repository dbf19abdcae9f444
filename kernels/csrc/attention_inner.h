/* The inner loops of attention: transposed keys, scores, softmax of one row, weighted values. */
#pragma once

#include "ops.h"

#define GROUP 16    /* positions whose keys are transposed together */
#define ROW_BLOCK 4 /* rows that share a pass over keys or values */
#define IS_DOT(dt) (HAS_DOT_BF16 && (dt) == BF16)

#define LOW_WORDS(x, y) \
    __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH_WORDS(x, y) \
    __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW_PAIRS(x, y) \
    __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH_PAIRS(x, y) \
    __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN_QUARTERS(x, y) \
    __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD_QUARTERS(x, y) \
    __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)

/* Transposes 16 rows of 16 words: a[i] lane j becomes a[j] lane i. */
INLINE void transpose16(v16 a[16]) {
    v16 s[16]; /* s[4g + c] quarter q = column 4q + c of rows 4g … 4g + 3 */
    UNROLL for (int g = 0; g < 16; g += 4) {
        v16 low01 = LOW_WORDS(a[g], a[g + 1]), low23 = LOW_WORDS(a[g + 2], a[g + 3]);
        v16 high01 = HIGH_WORDS(a[g], a[g + 1]), high23 = HIGH_WORDS(a[g + 2], a[g + 3]);
        s[g] = LOW_PAIRS(low01, low23);
        s[g + 1] = HIGH_PAIRS(low01, low23);
        s[g + 2] = LOW_PAIRS(high01, high23);
        s[g + 3] = HIGH_PAIRS(high01, high23);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        v16 even01 = EVEN_QUARTERS(s[c], s[4 + c]), even23 = EVEN_QUARTERS(s[8 + c], s[12 + c]);
        v16 odd01 = ODD_QUARTERS(s[c], s[4 + c]), odd23 = ODD_QUARTERS(s[8 + c], s[12 + c]);
        a[c] = EVEN_QUARTERS(even01, even23);
        a[4 + c] = EVEN_QUARTERS(odd01, odd23);
        a[8 + c] = ODD_QUARTERS(even01, even23);
        a[12 + c] = ODD_QUARTERS(odd01, odd23);
    }
}

/* Lays 16 key rows out as [words][16 positions]; a word is a float, or a bf16 pair for the dot unit. */
INLINE void transpose_keys(const char *const rows[GROUP], long words, v16 *keys, int dt) {
    int word_dt = IS_DOT(dt) ? F32 : dt; /* pairs move as 32-bit words */
    for (long word = 0; word < words; word += 16) {
        v16 block[16];
        if (words - word >= 16) {
            UNROLL for (int i = 0; i < 16; i++) block[i] = load16(at(rows[i], word, word_dt), word_dt);
        } else {
            for (int i = 0; i < 16; i++)
                block[i] = load_some(at(rows[i], word, word_dt), (int)(words - word), word_dt);
        }
        transpose16(block);
        UNROLL for (int i = 0; i < 16; i++) keys[word + i] = block[i];
    }
}

INLINE v16 score_step(v16 word, v16 keys, v16 sum, int is_dot) {
#if HAS_DOT_BF16
    if (is_dot) return (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)word, (__m512bh)keys);
#endif
    (void)is_dot;
    return madd(word, keys, sum);
}

/* Scores of `count` rows against one or two transposed groups, which share the loads of the queries: even and odd words
 * sum apart, then together. */
INLINE void score_rows(const char *const *query, const v16 *const keys[2], long words, v16 scores[ROW_BLOCK][2],
                       int count, int groups, int is_dot) {
    v16 even[ROW_BLOCK][2], odd[ROW_BLOCK][2];
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int g = 0; g < groups; g++) even[r][g] = odd[r][g] = splat(0.0f);
    for (long word = 0; word < words; word += 2)
        UNROLL for (int r = 0; r < count; r++) {
            v16 first = splat(load1(query[r], word, F32)), second = splat(load1(query[r], word + 1, F32));
            UNROLL for (int g = 0; g < groups; g++) {
                even[r][g] = score_step(first, keys[g][word], even[r][g], is_dot);
                odd[r][g] = score_step(second, keys[g][word + 1], odd[r][g], is_dot);
            }
        }
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int g = 0; g < groups; g++) scores[r][g] = even[r][g] + odd[r][g];
}

/* cap · tanh(score / cap) */
INLINE v16 capped16(v16 score, float cap) {
    return splat(cap) - splat(2.0f * cap) / (exp16(score * splat(2.0f / cap)) + splat(1.0f));
}

INLINE void score_groups(const char *const *query, const v16 *const keys[2], long words, float *scores, long stride,
                         float scale, float softcap, long count, int groups, int is_dot) {
    v16 out[ROW_BLOCK][2];
    switch (count) {
    case 1: score_rows(query, keys, words, out, 1, groups, is_dot); break;
    case 2: score_rows(query, keys, words, out, 2, groups, is_dot); break;
    case 3: score_rows(query, keys, words, out, 3, groups, is_dot); break;
    default: score_rows(query, keys, words, out, 4, groups, is_dot);
    }
    for (long r = 0; r < count; r++)
        UNROLL for (int g = 0; g < groups; g++) {
            v16 score = out[r][g] * splat(scale);
            store16(scores + r * stride + g * GROUP, softcap != 0.0f ? capped16(score, softcap) : score, F32);
        }
}

INLINE i32x16 lanes_within(long group, long low, long high) {
    i32x16 lane = lane_index() + (int32_t)group;
    return (lane >= (int32_t)low) & (lane < (int32_t)high);
}

/* Turns scores [first, last) of a row into exp(score - max) in place, zero outside [low, high); gives max and sum. */
INLINE void softmax_row(float *scores, long low, long high, long first, long last, float *top, float *sum) {
    v16 best = splat(-INFINITY), total = splat(0.0f);
    for (long g = first; g < last; g += GROUP) {
        v16 score = load16(scores + g, F32);
        if (g < low || g + GROUP > high) score = select16(lanes_within(g, low, high), score, splat(-INFINITY));
        best = max16(best, score);
    }
    *top = top16(best);
    for (long g = first; g < last; g += GROUP) {
        v16 p = exp16(load16(scores + g, F32) - splat(*top));
        if (g < low || g + GROUP > high) p = select16(lanes_within(g, low, high), p, splat(0.0f));
        total += p;
        store16(scores + g, p, F32);
    }
    *sum = sum16(total);
}

#define EVEN_LANES(x, y) \
    __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD_LANES(x, y) \
    __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define LOW_LANES(x, y) \
    __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_LANES(x, y) \
    __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

/* Thirty-two values in two vectors, which bf16 splits into even and odd ones: half the work of widening in order. */
INLINE void load_pair(const char *from, v16 to[2], int dt) {
    if (dt == BF16) {
        u32x16 words;
        memcpy(&words, from, 64);
        to[0] = (v16)(words << 16);
        to[1] = (v16)(words & 0xffff0000u);
    } else {
        to[0] = load16(from, dt);
        to[1] = load16(at(from, 16, dt), dt);
    }
}

INLINE void load_sums(const float *from, v16 to[2], int dt) {
    v16 a = load16(from, F32), b = load16(from + 16, F32);
    to[0] = dt == BF16 ? EVEN_LANES(a, b) : a;
    to[1] = dt == BF16 ? ODD_LANES(a, b) : b;
}

INLINE void store_sums(float *to, const v16 from[2], int dt) {
    store16(to, dt == BF16 ? LOW_LANES(from[0], from[1]) : from[0], F32);
    store16(to + 16, dt == BF16 ? HIGH_LANES(from[0], from[1]) : from[1], F32);
}

/* out[r, d] += Σ_i weight[r, i] · value[i, d] for i = 0 … n-1 in order. */
INLINE void weigh_rows(const float *weights, long stride, const char *const *values, long n, float *out, long head_dim,
                       int count, int dt) {
    for (long d = 0; d + 64 <= head_dim; d += 64) {
        v16 acc[ROW_BLOCK][4];
        UNROLL for (int r = 0; r < count; r++) UNROLL for (int j = 0; j < 4; j += 2)
            load_sums(out + r * head_dim + d + 16 * j, acc[r] + j, dt);
        for (long i = 0; i < n; i++) {
            v16 v[4];
            UNROLL for (int j = 0; j < 4; j += 2) load_pair(at(values[i], d + 16 * j, dt), v + j, dt);
            UNROLL for (int r = 0; r < count; r++) {
                v16 p = splat(weights[r * stride + i]);
                UNROLL for (int j = 0; j < 4; j++) acc[r][j] = madd(p, v[j], acc[r][j]);
            }
        }
        UNROLL for (int r = 0; r < count; r++) UNROLL for (int j = 0; j < 4; j += 2)
            store_sums(out + r * head_dim + d + 16 * j, acc[r] + j, dt);
    }
    for (long d = head_dim / 64 * 64; d < head_dim; d += 16) {
        int lanes = head_dim - d < 16 ? (int)(head_dim - d) : 16;
        for (int r = 0; r < count; r++) {
            v16 acc = load_some(out + r * head_dim + d, lanes, F32);
            for (long i = 0; i < n; i++)
                acc = madd(splat(weights[r * stride + i]), load_some(at(values[i], d, dt), lanes, dt), acc);
            store_some(out + r * head_dim + d, acc, lanes, F32);
        }
    }
}

INLINE void weigh_block(const float *weights, long stride, const char *const *values, long n, float *out, long head_dim,
                        long count, int dt) {
    switch (count) {
    case 1: weigh_rows(weights, stride, values, n, out, head_dim, 1, dt); break;
    case 2: weigh_rows(weights, stride, values, n, out, head_dim, 2, dt); break;
    case 3: weigh_rows(weights, stride, values, n, out, head_dim, 3, dt); break;
    default: weigh_rows(weights, stride, values, n, out, head_dim, 4, dt);
    }
}
