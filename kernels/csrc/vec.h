/* Sixteen float lanes on any CPU: loads and stores of the three element types, reductions, exp.
 *
 * Written with GCC vector extensions; the compiler splits a v16 into what the target has. Intrinsics appear only where
 * the extensions cannot reach (bf16 dot products, f16 conversion). Everything is inlined, `dt` arguments are constants.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

enum { F32 = 0, BF16 = 1, F16 = 2 };

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_DOT_BF16 1
#else
#define HAS_DOT_BF16 0
#endif
#if defined(__AVX512F__)
#define ROWS_PER_TILE 4
#else
#define ROWS_PER_TILE 2
#endif

INLINE long width_of(int dt) { return dt == F32 ? 4 : 2; }

INLINE const char *at(const void *base, long index, int dt) { return (const char *)base + index * width_of(dt); }

INLINE char *at_mut(void *base, long index, int dt) { return (char *)base + index * width_of(dt); }

INLINE v16 splat(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

/* One multiply-add whose rounding does not depend on what the optimiser contracts. */
INLINE v16 madd(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 lo = _mm256_fmadd_ps(((__m256 *)&a)[0], ((__m256 *)&b)[0], ((__m256 *)&c)[0]);
    __m256 hi = _mm256_fmadd_ps(((__m256 *)&a)[1], ((__m256 *)&b)[1], ((__m256 *)&c)[1]);
    v16 out;
    memcpy(&out, &lo, 32);
    memcpy((char *)&out + 32, &hi, 32);
    return out;
#else
    return a * b + c;
#endif
}

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | fraction << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    } else {
        float magnitude = (float)fraction * 0x1p-24f;
        memcpy(&bits, &magnitude, 4);
        bits |= sign;
    }
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

INLINE uint16_t float_to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t sign = (bits >> 16) & 0x8000;
    uint32_t size = bits & 0x7fffffff;
    if (size > 0x7f800000) return sign | 0x7e00;
    if (size >= 0x477ff000) return sign | 0x7c00;
    if (size < 0x38800000) { /* below the smallest normal half: let the float unit round at its last bit */
        float magnitude;
        memcpy(&magnitude, &size, 4);
        return sign | (uint16_t)(uint32_t)nearbyintf(magnitude * 0x1p24f);
    }
    return sign | (uint16_t)((size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13);
}

INLINE uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE v16 widen_bf16(u16x16 h) {
#if defined(__AVX512F__) /* gcc 12 would convert in halves */
    return (v16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#else
    return (v16)(__builtin_convertvector(h, u32x16) << 16);
#endif
}

INLINE u16x16 narrow_bf16(v16 x) {
#if HAS_DOT_BF16
    return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 nan = (u32x16)(x != x);
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), u16x16);
#endif
}

INLINE v16 load16(const void *p, int dt) {
    if (dt == F32) {
        v16 x;
        memcpy(&x, p, 64);
        return x;
    }
    u16x16 h;
    memcpy(&h, p, 32);
    if (dt == BF16) return widen_bf16(h);
#if defined(__AVX512F__)
    return (v16)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    v16 x;
    __m256 lo = _mm256_cvtph_ps(((__m128i *)&h)[0]), hi = _mm256_cvtph_ps(((__m128i *)&h)[1]);
    memcpy(&x, &lo, 32);
    memcpy((char *)&x + 32, &hi, 32);
    return x;
#else
    v16 x;
    for (int i = 0; i < 16; i++) x[i] = half_to_float(h[i]);
    return x;
#endif
}

INLINE u16x16 narrow16(v16 x, int dt) {
    if (dt == BF16) return narrow_bf16(x);
#if defined(__AVX512F__)
    return (u16x16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
    u16x16 h;
    for (int i = 0; i < 16; i++) h[i] = float_to_half(x[i]);
    return h;
#endif
}

INLINE void store16(void *p, v16 x, int dt) {
    if (dt == F32) {
        memcpy(p, &x, 64);
    } else {
        u16x16 h = narrow16(x, dt);
        memcpy(p, &h, 32);
    }
}

/* First n (0..16) lanes; absent lanes are zero. */
INLINE v16 load_some(const void *p, int n, int dt) {
    char lanes[64] = {0};
    memcpy(lanes, p, (size_t)(n * width_of(dt)));
    return load16(lanes, dt);
}

INLINE void store_some(void *p, v16 x, int n, int dt) {
    char lanes[64];
    store16(lanes, x, dt);
    memcpy(p, lanes, (size_t)(n * width_of(dt)));
}

INLINE float load1(const void *base, long index, int dt) {
    const char *p = at(base, index, dt);
    if (dt == F32) {
        float x;
        memcpy(&x, p, 4);
        return x;
    }
    uint16_t h;
    memcpy(&h, p, 2);
    if (dt == F16) return half_to_float(h);
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE void store1(void *base, long index, float x, int dt) {
    char *p = at_mut(base, index, dt);
    if (dt == F32) {
        memcpy(p, &x, 4);
    } else {
        uint16_t h = dt == BF16 ? float_to_bf16(x) : float_to_half(x);
        memcpy(p, &h, 2);
    }
}

INLINE v16 select16(i32x16 mask, v16 yes, v16 no) {
    return (v16)(((i32x16)yes & mask) | ((i32x16)no & ~mask));
}

INLINE v16 max16(v16 a, v16 b) { return select16(a > b, a, b); }

INLINE i32x16 lane_index(void) { return (i32x16){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

/* The four folding steps of a lane sum: every sum in this library pairs lanes (i, i+8), (i, i+4), (i, i+2), (i, i+1). */
#define FOLD8(a, b)                                                                            \
    (__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
     __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD4(a, b)                                                                            \
    (__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) + \
     __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define FOLD2(a, b)                                                                            \
    (__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) + \
     __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define FOLD1(a, b)                                                                            \
    (__builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) + \
     __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31))

INLINE float sum16(v16 a) {
    v16 s = FOLD8(a, a);
    s = FOLD4(s, s);
    s = FOLD2(s, s);
    s = FOLD1(s, s);
    return s[0];
}

INLINE float top16(v16 a) {
    a = max16(a, __builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    a = max16(a, __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    a = max16(a, __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    a = max16(a, __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return a[0];
}

/* exp with a relative error below 2e-7; arguments under -87 give 0. */
INLINE v16 exp16(v16 x) {
    i32x16 tiny = x < splat(-87.0f);
    x = select16(tiny, splat(-87.0f), x);
    x = select16(x > splat(88.0f), splat(88.0f), x);
    v16 k = madd(x, splat(1.44269504088896341f), splat(12582912.0f)) - splat(12582912.0f);
    v16 r = madd(k, splat(-0.693359375f), x);
    r = madd(k, splat(2.12194440e-4f), r);
    v16 p = splat(1.9875691500e-4f);
    p = madd(p, r, splat(1.3981999507e-3f));
    p = madd(p, r, splat(8.3334519073e-3f));
    p = madd(p, r, splat(4.1665795894e-2f));
    p = madd(p, r, splat(1.6666665459e-1f));
    p = madd(p, r, splat(5.0000001201e-1f));
    p = madd(p, r * r, r) + splat(1.0f);
    i32x16 exponent = (__builtin_convertvector(k, i32x16) + 127) << 23;
    return select16(tiny, splat(0.0f), p * (v16)exponent);
}
