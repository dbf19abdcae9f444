/* A run of decoder layers in one call: the same functions as the single ops, so the same bits, without the trips
 * through Python between them. */
#include "ops.h"

/* How a projection's weights are packed; bits 0: not at all. */
typedef struct {
    const void *scales, *offsets;
    long bits;
} quant_t;

/* What a family lacks is NULL: a norm that is NULL is not applied. */
typedef struct {
    const void *input_norm, *input_norm_bias, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *attention_post_norm,
        *mlp_norm, *mlp_norm_bias, *gate_up, *gate_up_bias, *down, *down_bias, *mlp_post_norm;
    void *k_cache, *v_cache;
    long rope, window; /* rope: NO_ROPE, MAIN_ROPE or SLIDING_ROPE; window 0: all positions */
    quant_t qkv_quant, o_quant, gate_up_quant, down_quant;
} layer_t;

enum { NO_ROPE, MAIN_ROPE, SLIDING_ROPE };

typedef struct {
    long model_dim, num_heads, num_kv_heads, head_dim, ffn_dim, block_size, num_blocks;
    float eps, scale, softcap, residual_scale; /* softcap 0: none */
    int dt, norm_dt, activation, is_gated, is_layer_norm, is_qk_norm_wide, is_transposed;
} shape_t;

enum { SITE_Q, SITE_K, SITE_V, SITE_O, SITE_GATE, SITE_UP, SITE_DOWN, NUM_SITES };

typedef struct {
    struct {
        const void *a, *b;
        const float *gain, *shift;
        long rank; /* 0 with no gain and no shift: the adapter leaves this projection alone */
    } site[NUM_SITES];
} lora_layer;

typedef struct {
    long start, end;
    const lora_layer *layers;
} lora_segment;

typedef struct {
    void *hidden; /* [T, M], updated in place */
    const float *cos_sin, *sliding_cos_sin;
    long num_tokens;
    const int32_t *positions, *slots, *query_starts, *context_lens, *block_tables;
    long num_positions, rotated, table_stride, num_sequences;
    const lora_segment *segments;
    long num_segments;
} step_t;

typedef struct {
    void *normed, *qkv, *attended, *projected, *gate_up, *gated;
    lora_part *parts;
} buffers_t;

static buffers_t buffers_of(const shape_t *s, const step_t *step) {
    long T = step->num_tokens, width = width_of(s->dt), qkv = (s->num_heads + 2 * s->num_kv_heads) * s->head_dim;
    long hidden_halves = (s->is_gated ? 2 : 1) * s->ffn_dim;
    long sizes[6] = {s->model_dim, qkv, s->num_heads * s->head_dim, s->model_dim, hidden_halves, s->ffn_dim};
    long offsets[7] = {0};
    for (int i = 0; i < 6; i++) offsets[i + 1] = offsets[i] + (T * sizes[i] * width + 63) / 64 * 64;
    char *memory = scratch(SCRATCH_DECODER, offsets[6] + step->num_segments * 3 * (long)sizeof(lora_part));
    return (buffers_t){memory,              memory + offsets[1], memory + offsets[2], memory + offsets[3],
                       memory + offsets[4], memory + offsets[5], (lora_part *)(memory + offsets[6])};
}

static void project(const shape_t *s, long num_tokens, const void *x, long dim, const void *w, const quant_t *quant,
                    const void *bias, void *y, long num_outputs, void *gated) {
    if (quant->bits) {
        quant_args packed = {x, dim, w, quant->scales, quant->offsets, bias, y, num_outputs, num_tokens, num_outputs,
                             dim, s->dt, s->dt, (int)quant->bits};
        quant_run(&packed, gated, s->activation);
        return;
    }
    linear_args args = {x, dim, w, bias, y, num_outputs, num_tokens, num_outputs, dim, s->dt, s->dt};
    if (s->is_transposed)
        columns_run(&args);
    else
        linear_run(&args, gated, s->activation);
}

/* Adds the adapters of `count` neighbouring projections, whose outputs have the given widths, to y. */
static void adapt(const shape_t *s, const step_t *step, long layer, const buffers_t *b, int first_site, int count,
                  const long *widths, const void *x, long dim, void *y) {
    long num_parts = 0, y_stride = 0;
    for (int i = 0; i < count; i++) y_stride += widths[i];
    for (long g = 0; g < step->num_segments; g++) {
        const lora_segment *segment = &step->segments[g];
        long first_output = 0;
        for (int i = 0; i < count; first_output += widths[i++]) {
            const lora_layer *adapter = &segment->layers[layer];
            const lora_part part = {adapter->site[first_site + i].a, adapter->site[first_site + i].b,
                                    adapter->site[first_site + i].gain, adapter->site[first_site + i].shift,
                                    adapter->site[first_site + i].rank, segment->start, segment->end,
                                    first_output, widths[i]};
            if (part.rank || part.gain || part.shift) b->parts[num_parts++] = part;
        }
    }
    if (num_parts) lora_run(b->parts, num_parts, x, dim, dim, y, y_stride, s->dt, s->dt);
}

typedef struct {
    const shape_t *shape;
    const layer_t *layer;
    const step_t *step;
    char *qkv;
} place_args;

/* Norms and rotates one token's q and k, and stores its k and v. */
static void place_token(void *context, long t) {
    const place_args *p = context;
    const shape_t *s = p->shape;
    long H = s->num_heads, K = s->num_kv_heads, D = s->head_dim, width = width_of(s->dt);
    char *q = p->qkv + t * (H + 2 * K) * D * width, *k = q + H * D * width, *v = k + K * D * width;
    long q_span = s->is_qk_norm_wide ? H * D : D, k_span = s->is_qk_norm_wide ? K * D : D;
    if (p->layer->q_norm)
        rms_norm_rows(q, q_span, p->layer->q_norm, s->norm_dt, q, q_span, H * D / q_span, q_span, s->eps, s->dt);
    if (p->layer->k_norm)
        rms_norm_rows(k, k_span, p->layer->k_norm, s->norm_dt, k, k_span, K * D / k_span, k_span, s->eps, s->dt);
    if (p->layer->rope != NO_ROPE) {
        const float *table = p->layer->rope == SLIDING_ROPE ? p->step->sliding_cos_sin : p->step->cos_sin;
        const float *row = table + p->step->positions[t] * p->step->rotated;
        rope_heads(q, H, D, row, p->step->rotated, s->dt);
        rope_heads(k, K, D, row, p->step->rotated, s->dt);
    }
    long slot = p->step->slots[t];
    if (slot < 0) return;
    for (long h = 0; h < K; h++) {
        long to = ((slot / s->block_size * K + h) * s->block_size + slot % s->block_size) * D * width;
        memcpy((char *)p->layer->k_cache + to, k + h * D * width, (size_t)(D * width));
        memcpy((char *)p->layer->v_cache + to, v + h * D * width, (size_t)(D * width));
    }
}

static int attend(const shape_t *s, const layer_t *layer, const step_t *step, const buffers_t *b) {
    long H = s->num_heads, K = s->num_kv_heads, D = s->head_dim;
    place_args place = {s, layer, step, b->qkv};
    if (step->num_tokens * (H + K) * D >= 1 << 16)
        parallel_for(step->num_tokens, place_token, &place);
    else
        for (long t = 0; t < step->num_tokens; t++) place_token(&place, t);
    attention_args args = {b->qkv, (H + 2 * K) * D, layer->k_cache, layer->v_cache, b->attended, H * D,
                           step->query_starts, step->context_lens, step->block_tables, step->table_stride,
                           step->num_sequences, step->num_tokens, H, K, D, s->block_size, s->num_blocks, layer->window,
                           s->scale, s->softcap, s->dt};
    return attention_run(&args);
}

/* Normalises rows of [T, M]; a residual, which only RMS norms may have, is updated by x first. */
static void norm(const shape_t *s, long T, const void *x, void *residual, const void *weight, const void *bias, void *y) {
    long M = s->model_dim;
    if (s->is_layer_norm)
        nl_layer_norm(x, M, weight, bias, s->norm_dt, y, M, T, M, s->eps, s->dt);
    else
        nl_rms_norm(x, M, residual, M, weight, s->norm_dt, y, M, T, M, s->eps, s->dt);
}

/* Adds a branch (b->projected) to the residual stream, and returns what the next branch reads. */
static void *join(const shape_t *s, const step_t *step, const buffers_t *b, const void *post, const void *following,
                  const void *following_bias) {
    long T = step->num_tokens, M = s->model_dim;
    if (post) norm(s, T, b->projected, NULL, post, NULL, b->projected);
    if (s->residual_scale != 1.0f) scale_values(b->projected, T * M, s->residual_scale, s->dt);
    if (following && !s->is_layer_norm) {
        norm(s, T, b->projected, step->hidden, following, NULL, b->normed);
        return b->normed;
    }
    add_rows(b->projected, M, step->hidden, M, T, M, s->dt);
    if (!following) return step->hidden;
    norm(s, T, step->hidden, NULL, following, following_bias, b->normed);
    return b->normed;
}

static void feed_forward(const shape_t *s, const layer_t *layer, long index, const step_t *step, const buffers_t *b,
                         const void *x) {
    long T = step->num_tokens, M = s->model_dim, F = s->ffn_dim;
    int is_fused = s->is_gated && !step->num_segments && !s->is_transposed;
    project(s, T, x, M, layer->gate_up, &layer->gate_up_quant, layer->gate_up_bias, b->gate_up, (s->is_gated ? 2 : 1) * F,
            is_fused ? b->gated : NULL);
    if (s->is_gated)
        adapt(s, step, index, b, SITE_GATE, 2, (long[]){F, F}, x, M, b->gate_up);
    else
        adapt(s, step, index, b, SITE_UP, 1, (long[]){F}, x, M, b->gate_up);
    if (!is_fused)
        nl_activate(b->gate_up, (s->is_gated ? 2 : 1) * F, b->gated, T, F, s->is_gated, s->activation, s->dt);
    project(s, T, b->gated, F, layer->down, &layer->down_quant, layer->down_bias, b->projected, M, NULL);
    adapt(s, step, index, b, SITE_DOWN, 1, (long[]){M}, b->gated, F, b->projected);
}

/* Runs one layer on x; `next`, the following layer or NULL, says what to return besides the residual stream. */
static int run_layer(const shape_t *s, const layer_t *layer, long index, const layer_t *next, const step_t *step,
                     const buffers_t *b, void **x) {
    long T = step->num_tokens, M = s->model_dim, D = s->head_dim;
    long q = s->num_heads * D, kv = s->num_kv_heads * D;
    project(s, T, *x, M, layer->qkv, &layer->qkv_quant, layer->qkv_bias, b->qkv, q + 2 * kv, NULL);
    adapt(s, step, index, b, SITE_Q, 3, (long[]){q, kv, kv}, *x, M, b->qkv);
    int problem = attend(s, layer, step, b);
    if (problem) return problem;
    project(s, T, b->attended, q, layer->o, &layer->o_quant, layer->o_bias, b->projected, M, NULL);
    adapt(s, step, index, b, SITE_O, 1, (long[]){M}, b->attended, q, b->projected);
    *x = join(s, step, b, layer->attention_post_norm, layer->mlp_norm, layer->mlp_norm_bias);
    feed_forward(s, layer, index, step, b, *x);
    *x = join(s, step, b, layer->mlp_post_norm, next ? next->input_norm : NULL, next ? next->input_norm_bias : NULL);
    return OK;
}

int nl_decoder_layers(const shape_t *s, const layer_t *layers, long first, long last, const step_t *step) {
    for (long t = 0; t < step->num_tokens; t++) {
        if (step->positions[t] < 0 || step->positions[t] >= step->num_positions) return BAD_POSITION;
        if (step->slots[t] >= s->num_blocks * s->block_size) return BAD_SLOT;
    }
    if (first >= last) return OK;
    buffers_t b = buffers_of(s, step);
    const layer_t *layer = &layers[first];
    void *x = layer->input_norm ? b.normed : step->hidden;
    if (layer->input_norm)
        norm(s, step->num_tokens, step->hidden, NULL, layer->input_norm, layer->input_norm_bias, b.normed);
    for (long i = first; i < last; i++) {
        int problem = run_layer(s, &layers[i], i, i + 1 < last ? &layers[i + 1] : NULL, step, &b, &x);
        if (problem) return problem;
    }
    return OK;
}
