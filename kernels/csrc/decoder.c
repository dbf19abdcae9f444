/* A run of decoder layers in one call: the same functions as the single ops, so the same bits, without the trips
 * through Python between them. */
#include "ops.h"

typedef struct {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *gate_up_bias, *down,
        *down_bias;
    void *k_cache, *v_cache;
    long has_rope, window; /* window 0: all positions */
} layer_t;

typedef struct {
    long model_dim, num_heads, num_kv_heads, head_dim, ffn_dim, block_size, num_blocks;
    float eps, scale;
    int dt, norm_dt;
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
    const float *cos_sin;
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
    long sizes[6] = {s->model_dim, qkv, s->num_heads * s->head_dim, s->model_dim, 2 * s->ffn_dim, s->ffn_dim};
    long offsets[7] = {0};
    for (int i = 0; i < 6; i++) offsets[i + 1] = offsets[i] + (T * sizes[i] * width + 63) / 64 * 64;
    char *memory = scratch(SCRATCH_DECODER, offsets[6] + step->num_segments * 3 * (long)sizeof(lora_part));
    return (buffers_t){memory,              memory + offsets[1], memory + offsets[2], memory + offsets[3],
                       memory + offsets[4], memory + offsets[5], (lora_part *)(memory + offsets[6])};
}

static void project(const shape_t *s, long num_tokens, const void *x, long dim, const void *w, const void *bias, void *y,
                    long num_outputs, void *gated) {
    linear_args args = {x, dim, w, bias, y, num_outputs, num_tokens, num_outputs, dim, s->dt, s->dt};
    linear_run(&args, gated);
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
    if (num_parts) lora_run(b->parts, num_parts, x, dim, dim, y, y_stride, s->dt);
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
    if (p->layer->q_norm) rms_norm_rows(q, D, p->layer->q_norm, s->norm_dt, q, D, H, D, s->eps, s->dt);
    if (p->layer->k_norm) rms_norm_rows(k, D, p->layer->k_norm, s->norm_dt, k, D, K, D, s->eps, s->dt);
    if (p->layer->has_rope) {
        const float *row = p->step->cos_sin + p->step->positions[t] * p->step->rotated;
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
                           s->scale, 0.0f, s->dt};
    return attention_run(&args);
}

static int run_layer(const shape_t *s, const layer_t *layer, long index, const step_t *step, const buffers_t *b) {
    long T = step->num_tokens, M = s->model_dim, F = s->ffn_dim, D = s->head_dim;
    long q = s->num_heads * D, kv = s->num_kv_heads * D;
    project(s, T, b->normed, M, layer->qkv, layer->qkv_bias, b->qkv, q + 2 * kv, NULL);
    adapt(s, step, index, b, SITE_Q, 3, (long[]){q, kv, kv}, b->normed, M, b->qkv);
    int problem = attend(s, layer, step, b);
    if (problem) return problem;
    project(s, T, b->attended, q, layer->o, layer->o_bias, b->projected, M, NULL);
    adapt(s, step, index, b, SITE_O, 1, (long[]){M}, b->attended, q, b->projected);
    nl_rms_norm(b->projected, M, step->hidden, M, layer->post_norm, s->norm_dt, b->normed, M, T, M, s->eps, s->dt);
    if (step->num_segments) {
        project(s, T, b->normed, M, layer->gate_up, layer->gate_up_bias, b->gate_up, 2 * F, NULL);
        adapt(s, step, index, b, SITE_GATE, 2, (long[]){F, F}, b->normed, M, b->gate_up);
        nl_silu_mul(b->gate_up, 2 * F, b->gated, T, F, s->dt);
    } else {
        project(s, T, b->normed, M, layer->gate_up, layer->gate_up_bias, b->gate_up, 2 * F, b->gated);
    }
    project(s, T, b->gated, F, layer->down, layer->down_bias, b->projected, M, NULL);
    adapt(s, step, index, b, SITE_DOWN, 1, (long[]){M}, b->gated, F, b->projected);
    return OK;
}

int nl_decoder_layers(const shape_t *s, const layer_t *layers, long first, long last, const step_t *step) {
    long T = step->num_tokens, M = s->model_dim;
    for (long t = 0; t < T; t++) {
        if (step->positions[t] < 0 || step->positions[t] >= step->num_positions) return BAD_POSITION;
        if (step->slots[t] >= s->num_blocks * s->block_size) return BAD_SLOT;
    }
    buffers_t b = buffers_of(s, step);
    for (long i = first; i < last; i++) {
        const void *w = layers[i].input_norm;
        if (i == first)
            nl_rms_norm(step->hidden, M, NULL, 0, w, s->norm_dt, b.normed, M, T, M, s->eps, s->dt);
        else
            nl_rms_norm(b.projected, M, step->hidden, M, w, s->norm_dt, b.normed, M, T, M, s->eps, s->dt);
        int problem = run_layer(s, &layers[i], i, step, &b);
        if (problem) return problem;
    }
    if (first < last) add_rows(b.projected, M, step->hidden, M, T, M, s->dt);
    return OK;
}
