/* Ops that treat each token's row alone: norms, rope, KV write. Batch-invariant: rows never meet. */
#include "ops.h"

#define PARALLEL_FROM 65536 /* elements below which waking another thread costs more than it saves */

INLINE float sum_of_squares(const void *x, long dim, int dt) {
    v16 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    long m = 0;
    for (; m + 64 <= dim; m += 64)
        UNROLL for (int i = 0; i < 4; i++) {
            v16 v = load16(at(x, m + 16 * i, dt), dt);
            sum[i] = madd(v, v, sum[i]);
        }
    for (; m + 16 <= dim; m += 16) {
        v16 v = load16(at(x, m, dt), dt);
        sum[0] = madd(v, v, sum[0]);
    }
    if (m < dim) {
        v16 v = load_some(at(x, m, dt), (int)(dim - m), dt);
        sum[1] = madd(v, v, sum[1]);
    }
    return sum16((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

INLINE void norm_row(const void *x, const void *w, int w_dt, void *y, long dim, float eps, int dt) {
    v16 scale = splat(1.0f / sqrtf(sum_of_squares(x, dim, dt) / (float)dim + eps));
    long m = 0;
    for (; m + 16 <= dim; m += 16)
        store16(at_mut(y, m, dt), load16(at(x, m, dt), dt) * scale * load16(at(w, m, w_dt), w_dt), dt);
    int rest = (int)(dim - m);
    if (rest) {
        v16 v = load_some(at(x, m, dt), rest, dt) * scale * load_some(at(w, m, w_dt), rest, w_dt);
        store_some(at_mut(y, m, dt), v, rest, dt);
    }
}

void rms_norm_rows(const void *x, long x_stride, const void *w, int w_dt, void *y, long y_stride, long rows, long dim,
                   float eps, int dt) {
    for (long t = 0; t < rows; t++) {
        const void *from = at(x, t * x_stride, dt);
        void *to = at_mut(y, t * y_stride, dt);
        if (dt == F32) norm_row(from, w, F32, to, dim, eps, F32);
        if (dt == BF16 && w_dt == BF16) norm_row(from, w, BF16, to, dim, eps, BF16);
        if (dt == BF16 && w_dt == F32) norm_row(from, w, F32, to, dim, eps, BF16);
        if (dt == F16 && w_dt == F16) norm_row(from, w, F16, to, dim, eps, F16);
        if (dt == F16 && w_dt == F32) norm_row(from, w, F32, to, dim, eps, F16);
    }
}

INLINE void add_row(const void *x, void *residual, long dim, int dt) {
    long m = 0;
    for (; m + 16 <= dim; m += 16) {
        v16 sum = load16(at(x, m, dt), dt) + load16(at(residual, m, dt), dt);
        store16(at_mut(residual, m, dt), sum, dt);
    }
    int rest = (int)(dim - m);
    if (rest) {
        v16 sum = load_some(at(x, m, dt), rest, dt) + load_some(at(residual, m, dt), rest, dt);
        store_some(at_mut(residual, m, dt), sum, rest, dt);
    }
}

void add_rows(const void *x, long x_stride, void *residual, long residual_stride, long rows, long dim, int dt) {
    for (long t = 0; t < rows; t++) {
        const void *from = at(x, t * x_stride, dt);
        void *to = at_mut(residual, t * residual_stride, dt);
        if (dt == F32) add_row(from, to, dim, F32);
        if (dt == BF16) add_row(from, to, dim, BF16);
        if (dt == F16) add_row(from, to, dim, F16);
    }
}

typedef struct {
    const void *x;
    long x_stride;
    void *residual;
    long residual_stride;
    const void *w;
    int w_dt;
    void *y;
    long y_stride, dim;
    float eps;
    int dt;
} norm_args;

static void norm_claim(void *context, long t) {
    const norm_args *n = context;
    const void *x = at(n->x, t * n->x_stride, n->dt);
    if (n->residual) {
        void *residual = at_mut(n->residual, t * n->residual_stride, n->dt);
        add_rows(x, 0, residual, 0, 1, n->dim, n->dt);
        x = residual;
    }
    rms_norm_rows(x, 0, n->w, n->w_dt, at_mut(n->y, t * n->y_stride, n->dt), 0, 1, n->dim, n->eps, n->dt);
}

void nl_rms_norm(const void *x, long x_stride, void *residual, long residual_stride, const void *w, int w_dt, void *y,
                 long y_stride, long rows, long dim, float eps, int dt) {
    norm_args args = {x, x_stride, residual, residual_stride, w, w_dt, y, y_stride, dim, eps, dt};
    if (rows * dim >= PARALLEL_FROM)
        parallel_for(rows, norm_claim, &args);
    else
        for (long t = 0; t < rows; t++) norm_claim(&args, t);
}

/* Σ (x - mean), or Σ (x - mean)² */
INLINE float sum_of_deviations(const void *x, long dim, float mean, int is_squared, int dt) {
    v16 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    long m = 0;
    for (; m + 64 <= dim; m += 64)
        UNROLL for (int i = 0; i < 4; i++) {
            v16 v = load16(at(x, m + 16 * i, dt), dt) - splat(mean);
            sum[i] = is_squared ? madd(v, v, sum[i]) : sum[i] + v;
        }
    for (; m + 16 <= dim; m += 16) {
        v16 v = load16(at(x, m, dt), dt) - splat(mean);
        sum[0] = is_squared ? madd(v, v, sum[0]) : sum[0] + v;
    }
    if (m < dim) {
        v16 v = load_some(at(x, m, dt), (int)(dim - m), dt) - splat(mean);
        v = select16(lane_index() < (int32_t)(dim - m), v, splat(0.0f));
        sum[1] = is_squared ? madd(v, v, sum[1]) : sum[1] + v;
    }
    return sum16((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

INLINE void layer_norm_row(const void *x, const void *w, const void *b, int w_dt, void *y, long dim, float eps, int dt) {
    float mean = sum_of_deviations(x, dim, 0.0f, 0, dt) / (float)dim;
    v16 scale = splat(1.0f / sqrtf(sum_of_deviations(x, dim, mean, 1, dt) / (float)dim + eps));
    long m = 0;
    for (; m + 16 <= dim; m += 16) {
        v16 v = (load16(at(x, m, dt), dt) - splat(mean)) * scale;
        store16(at_mut(y, m, dt), madd(v, load16(at(w, m, w_dt), w_dt), load16(at(b, m, w_dt), w_dt)), dt);
    }
    int rest = (int)(dim - m);
    if (rest) {
        v16 v = (load_some(at(x, m, dt), rest, dt) - splat(mean)) * scale;
        v = madd(v, load_some(at(w, m, w_dt), rest, w_dt), load_some(at(b, m, w_dt), rest, w_dt));
        store_some(at_mut(y, m, dt), v, rest, dt);
    }
}

typedef struct {
    const void *x;
    long x_stride;
    const void *w, *b;
    int w_dt;
    void *y;
    long y_stride, dim;
    float eps;
    int dt;
} layer_norm_args;

static void layer_norm_claim(void *context, long t) {
    const layer_norm_args *n = context;
    const void *x = at(n->x, t * n->x_stride, n->dt);
    void *y = at_mut(n->y, t * n->y_stride, n->dt);
    int dt = n->dt, w_dt = n->w_dt;
    if (dt == F32) layer_norm_row(x, n->w, n->b, F32, y, n->dim, n->eps, F32);
    if (dt == BF16 && w_dt == BF16) layer_norm_row(x, n->w, n->b, BF16, y, n->dim, n->eps, BF16);
    if (dt == BF16 && w_dt == F32) layer_norm_row(x, n->w, n->b, F32, y, n->dim, n->eps, BF16);
    if (dt == F16 && w_dt == F16) layer_norm_row(x, n->w, n->b, F16, y, n->dim, n->eps, F16);
    if (dt == F16 && w_dt == F32) layer_norm_row(x, n->w, n->b, F32, y, n->dim, n->eps, F16);
}

void nl_layer_norm(const void *x, long x_stride, const void *w, const void *b, int w_dt, void *y, long y_stride,
                   long rows, long dim, float eps, int dt) {
    layer_norm_args args = {x, x_stride, w, b, w_dt, y, y_stride, dim, eps, dt};
    if (rows * dim >= PARALLEL_FROM)
        parallel_for(rows, layer_norm_claim, &args);
    else
        for (long t = 0; t < rows; t++) layer_norm_claim(&args, t);
}

INLINE void scale_row(void *x, long dim, float scale, int dt) {
    long m = 0;
    for (; m + 16 <= dim; m += 16) store16(at_mut(x, m, dt), load16(at(x, m, dt), dt) * splat(scale), dt);
    for (; m < dim; m++) store1(x, m, load1(x, m, dt) * scale, dt);
}

void scale_values(void *x, long count, float scale, int dt) {
    if (dt == F32) scale_row(x, count, scale, F32);
    if (dt == BF16) scale_row(x, count, scale, BF16);
    if (dt == F16) scale_row(x, count, scale, F16);
}

INLINE void rotate(void *x, long head_dim, long num_heads, const float *cos_sin, long half, int dt) {
    for (long h = 0; h < num_heads; h++) {
        char *first = at_mut(x, h * head_dim, dt), *second = at_mut(x, h * head_dim + half, dt);
        long d = 0;
        for (; d + 16 <= half; d += 16) {
            v16 a = load16(at(first, d, dt), dt), b = load16(at(second, d, dt), dt);
            v16 cos = load16(cos_sin + d, F32), sin = load16(cos_sin + half + d, F32);
            store16(at_mut(first, d, dt), a * cos - b * sin, dt);
            store16(at_mut(second, d, dt), b * cos + a * sin, dt);
        }
        for (; d < half; d++) {
            float a = load1(first, d, dt), b = load1(second, d, dt), cos = cos_sin[d], sin = cos_sin[half + d];
            store1(first, d, a * cos - b * sin, dt);
            store1(second, d, b * cos + a * sin, dt);
        }
    }
}

void rope_heads(void *x, long num_heads, long head_dim, const float *cos_sin, long rotated, int dt) {
    if (dt == F32) rotate(x, head_dim, num_heads, cos_sin, rotated / 2, F32);
    if (dt == BF16) rotate(x, head_dim, num_heads, cos_sin, rotated / 2, BF16);
    if (dt == F16) rotate(x, head_dim, num_heads, cos_sin, rotated / 2, F16);
}

typedef struct {
    void *q;
    long q_stride, num_heads;
    void *k;
    long k_stride, num_kv_heads, head_dim;
    const int32_t *positions;
    const float *cos_sin;
    long rotated;
    int dt;
} rope_args;

static void rope_claim(void *context, long t) {
    const rope_args *r = context;
    const float *cos_sin = r->cos_sin + r->positions[t] * r->rotated;
    rope_heads(at_mut(r->q, t * r->q_stride, r->dt), r->num_heads, r->head_dim, cos_sin, r->rotated, r->dt);
    rope_heads(at_mut(r->k, t * r->k_stride, r->dt), r->num_kv_heads, r->head_dim, cos_sin, r->rotated, r->dt);
}

int nl_rope(void *q, long q_stride, long num_heads, void *k, long k_stride, long num_kv_heads, long head_dim,
            const int32_t *positions, long num_tokens, const float *cos_sin, long num_positions, long rotated, int dt) {
    rope_args args = {q, q_stride, num_heads, k, k_stride, num_kv_heads, head_dim, positions, cos_sin, rotated, dt};
    for (long t = 0; t < num_tokens; t++)
        if (positions[t] < 0 || positions[t] >= num_positions) return BAD_POSITION;
    if (num_tokens * (num_heads + num_kv_heads) * head_dim >= PARALLEL_FROM)
        parallel_for(num_tokens, rope_claim, &args);
    else
        for (long t = 0; t < num_tokens; t++) rope_claim(&args, t);
    return OK;
}

int nl_write_kv(const void *k, long k_stride, const void *v, long v_stride, void *k_cache, void *v_cache,
                const int32_t *slots, long num_tokens, long num_blocks, long num_kv_heads, long block_size,
                long head_dim, int dt) {
    size_t bytes = (size_t)(head_dim * width_of(dt));
    for (long t = 0; t < num_tokens; t++)
        if (slots[t] >= num_blocks * block_size) return BAD_SLOT;
    for (long t = 0; t < num_tokens; t++) {
        if (slots[t] < 0) continue;
        long block = slots[t] / block_size, offset = slots[t] % block_size;
        for (long h = 0; h < num_kv_heads; h++) {
            long to = ((block * num_kv_heads + h) * block_size + offset) * head_dim;
            memcpy(at_mut(k_cache, to, dt), at(k, t * k_stride + h * head_dim, dt), bytes);
            memcpy(at_mut(v_cache, to, dt), at(v, t * v_stride + h * head_dim, dt), bytes);
        }
    }
    return OK;
}
