/* Activation functions of feed-forward halves, alone or gating. Batch-invariant: rows never meet. */
#include "ops.h"

#define PARALLEL_FROM 16384 /* elements below which waking another thread costs more than it saves */

/* x · Φ(x). Source: Abramowitz and Stegun 7.1.26, absolute error of erfc below 1.5e-7. */
INLINE v16 gelu16(v16 x) {
    v16 z = select16(x < splat(0.0f), -x, x) * splat(0.70710678118654752f);
    v16 t = splat(1.0f) / madd(z, splat(0.3275911f), splat(1.0f));
    v16 p = splat(1.061405429f);
    p = madd(p, t, splat(-1.453152027f));
    p = madd(p, t, splat(1.421413741f));
    p = madd(p, t, splat(-0.284496736f));
    p = madd(p, t, splat(0.254829592f));
    v16 tail = splat(0.5f) * p * t * exp16(-z * z); /* Φ(-|x|) */
    return x * select16(x < splat(0.0f), tail, splat(1.0f) - tail);
}

INLINE v16 activate16(v16 x, int kind) {
    v16 one = splat(1.0f);
    if (kind == RELU) return select16(x < splat(0.0f), splat(0.0f), x);
    if (kind == GELU) return gelu16(x);
    /* ½x(1 + tanh u) = x / (1 + exp(-2u)) */
    v16 u = kind == GELU_TANH ? splat(1.59576912160573071f) * madd(splat(0.044715f) * x * x, x, x) : x;
    return x / (one + exp16(-u));
}

INLINE void activate_any(const void *x, const void *up, void *y, long dim, int kind, int dt) {
    long f = 0;
    for (; f + 16 <= dim; f += 16) {
        v16 a = activate16(load16(at(x, f, dt), dt), kind);
        if (up) a = a * load16(at(up, f, dt), dt);
        store16(at_mut(y, f, dt), a, dt);
    }
    int rest = (int)(dim - f);
    if (rest) {
        v16 a = activate16(load_some(at(x, f, dt), rest, dt), kind);
        if (up) a = a * load_some(at(up, f, dt), rest, dt);
        store_some(at_mut(y, f, dt), a, rest, dt);
    }
}

INLINE void activate_of(const void *x, const void *up, void *y, long dim, int kind, int dt) {
    if (kind == SILU) activate_any(x, up, y, dim, SILU, dt);
    if (kind == GELU) activate_any(x, up, y, dim, GELU, dt);
    if (kind == GELU_TANH) activate_any(x, up, y, dim, GELU_TANH, dt);
    if (kind == RELU) activate_any(x, up, y, dim, RELU, dt);
}

void activate_row(const void *x, const void *up, void *y, long dim, int kind, int dt) {
    if (dt == F32) activate_of(x, up, y, dim, kind, F32);
    if (dt == BF16) activate_of(x, up, y, dim, kind, BF16);
    if (dt == F16) activate_of(x, up, y, dim, kind, F16);
}

typedef struct {
    const void *x;
    long x_stride;
    void *y;
    long dim;
    int is_gated, kind, dt;
} activate_args;

static void activate_claim(void *context, long t) {
    const activate_args *a = context;
    const void *x = at(a->x, t * a->x_stride, a->dt);
    activate_row(x, a->is_gated ? at(x, a->dim, a->dt) : NULL, at_mut(a->y, t * a->dim, a->dt), a->dim, a->kind, a->dt);
}

void nl_activate(const void *x, long x_stride, void *y, long rows, long dim, int is_gated, int kind, int dt) {
    activate_args args = {x, x_stride, y, dim, is_gated, kind, dt};
    if (rows * dim >= PARALLEL_FROM)
        parallel_for(rows, activate_claim, &args);
    else
        for (long t = 0; t < rows; t++) activate_claim(&args, t);
}
