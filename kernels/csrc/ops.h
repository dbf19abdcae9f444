/* What the files of this library offer each other. Strides count elements; `dt` is F32, BF16 or F16 of vec.h. */
#pragma once

#include "pool.h"
#include "vec.h"

/* y[t, n] = Σ_m x[t, m] · w[n, m] + bias[n]; bias may be NULL and has w's type. Rows of w are contiguous. */
typedef struct {
    const void *x;
    long x_stride;
    const void *w;
    const void *bias;
    void *y;
    long y_stride, num_tokens, num_outputs, dim;
    int dt, out_dt;
} linear_args;

/* `gated`, if not NULL: outputs are [gate | up], and gated[t, f] = act(gate) · up is stored too, as [T, F]; `kind` of
 * activation. */
void linear_run(const linear_args *args, void *gated, int kind);
/* The same for weights stored [dim, num_outputs]; no gate. */
void columns_run(const linear_args *args);

/* linear_args for weights of `bits` 8 or 4, packed as quant.c says; offsets at 4 bits only, both bf16. */
typedef struct {
    const void *x;
    long x_stride;
    const void *w, *scales, *offsets;
    const void *bias;
    void *y;
    long y_stride, num_tokens, num_outputs, dim;
    int dt, out_dt, bits;
} quant_args;

enum { QUANT_GROUP_8 = 64, QUANT_GROUP_4 = 32 }; /* columns that share a scale */

/* As linear_run; with `gated`, both halves of the outputs are multiples of sixteen. */
void quant_run(const quant_args *args, void *gated, int kind);

/* Outputs [first, args->num_outputs) on the calling thread. `args` must come from linear_prepare. */
void linear_span(const linear_args *args, long first);
/* Returns args with x in the form the inner loops read (bf16 as it is, or float32 in the caller's scratch slot). */
linear_args linear_prepare(const linear_args *args, int slot);

void rms_norm_rows(const void *x, long x_stride, const void *w, int w_dt, void *y, long y_stride, long rows, long dim,
                   float eps, int dt);
/* residual may be NULL: then y = norm(x), else residual += x and y = norm(residual). On the pool when it is large. */
void nl_rms_norm(const void *x, long x_stride, void *residual, long residual_stride, const void *w, int w_dt, void *y,
                 long y_stride, long rows, long dim, float eps, int dt);
void add_rows(const void *x, long x_stride, void *residual, long residual_stride, long rows, long dim, int dt);
void nl_layer_norm(const void *x, long x_stride, const void *w, const void *b, int w_dt, void *y, long y_stride,
                   long rows, long dim, float eps, int dt);
/* x *= scale, rounded. */
void scale_values(void *x, long count, float scale, int dt);

enum { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };

/* y = act(x), times up unless that is NULL. */
void activate_row(const void *x, const void *up, void *y, long dim, int kind, int dt);
/* Rows of x are [gate | up] of 2 · dim if gated, else dim wide; y is [rows, dim]. */
void nl_activate(const void *x, long x_stride, void *y, long rows, long dim, int is_gated, int kind, int dt);
/* Rotates the heads of one token; `cos_sin` is the table's row of its position. */
void rope_heads(void *x, long num_heads, long head_dim, const float *cos_sin, long rotated, int dt);

typedef struct {
    const void *q;
    long q_stride;
    const void *k_cache, *v_cache;
    void *out;
    long out_stride;
    const int32_t *query_starts, *context_lens, *block_tables;
    long table_stride, num_sequences, num_tokens, num_heads, num_kv_heads, head_dim, block_size, num_blocks, window;
    float scale, softcap; /* softcap 0: none */
    int dt;
} attention_args;

enum { OK = 0, BAD_BLOCK = 1, BAD_SLOT = 2, BAD_POSITION = 3, BAD_META = 4, BAD_ROW = 5 };

int attention_run(const attention_args *args);

/* One adapter's share of one projection: y[t, first_output + n] = gain[n] · y[…] + shift[n] + (x[t] · aᵀ) · b[:, n] for
 * rows [start, end). a is [rank, dim], b is [rank, num_outputs]: both are read along their rows. No gain is 1, no shift 0. */
typedef struct {
    const void *a, *b;
    const float *gain, *shift;
    long rank, start, end, first_output, num_outputs;
} lora_part;

/* Neighbours in `parts` with the same rows share their reading of x; y is of x's type (dt) or float32. */
void lora_run(const lora_part *parts, long num_parts, const void *x, long x_stride, long dim, void *y, long y_stride,
              int dt, int y_dt);
