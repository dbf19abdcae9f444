/* Causal attention over paged keys and values, read in place.
 *
 * Work item: one sequence, one kv head, a run of query tokens; its rows are (token, query head of the group). The
 * context is cut into tiles at fixed absolute positions. A tile gives each row (max, sum, weighted values); tiles merge
 * in order. Batch-invariant: a row's arithmetic depends on its position, the window and the block size alone, so neither
 * neighbours in the batch, nor prefill chunks, nor the split of long contexts over threads can change its bits.
 */
#include "attention_inner.h"

#define TILE 512 /* positions per tile */
#define KEYS_AHEAD 48   /* positions between a key that is read and the one to prefetch */
#define VALUES_AHEAD 32 /* the same for the values, which are read after the whole tile is scored */
#define SPAN 64  /* positions whose values are widened once for many rows */
#define ROWS_WANTED 48

typedef struct {
    const attention_args *args;
    const int64_t *first_item; /* [B + 1] */
    const int64_t *first_part; /* [items + 1], split mode only */
    float *parts;
    long tokens_per_item, rows_max, num_items;
} attention_loop;

typedef struct {
    long sequence, kv_head, first_query, num_rows, group, context_start; /* context_start: position of query 0 */
    long lowest, highest;                                               /* positions that any row sees */
} item_t;

/* What a run of positions says about each row: its highest score, Σ exp(score - top), Σ exp(score - top) · value. */
typedef struct {
    float *out, *top, *sum; /* [rows, D], [rows], [rows] */
} partial_t;

typedef struct {
    v16 *keys;
    float *scores, *widened, *queries, *state, *part;
    const char **query_rows, **values;
} workspace;

static long partial_floats(long rows, long head_dim) { return (rows * (head_dim + 2) + 15) / 16 * 16; }

static partial_t partial_at(float *memory, long rows, long head_dim) {
    return (partial_t){memory, memory + rows * head_dim, memory + rows * (head_dim + 1)};
}

static void *take(char **cursor, long bytes) {
    void *taken = *cursor;
    *cursor += (bytes + 63) / 64 * 64;
    return taken;
}

static workspace workspace_of(const attention_loop *loop) {
    long D = loop->args->head_dim, rows = loop->rows_max, part_bytes = 4 * partial_floats(rows, D);
    long bytes = 2 * (D + 16) * 64 + rows * TILE * 4 + SPAN * D * 4 + rows * D * 4 + 2 * part_bytes + rows * 8 + TILE * 8;
    char *cursor = scratch(SCRATCH_ATTENTION, bytes + 10 * 64);
    workspace w;
    w.keys = take(&cursor, 2 * (D + 16) * 64);
    w.scores = take(&cursor, rows * TILE * 4);
    w.widened = take(&cursor, SPAN * D * 4);
    w.queries = take(&cursor, rows * D * 4);
    w.state = take(&cursor, part_bytes);
    w.part = take(&cursor, part_bytes);
    w.query_rows = take(&cursor, rows * 8);
    w.values = take(&cursor, TILE * 8);
    return w;
}

INLINE long min_of(long a, long b) { return a < b ? a : b; }
INLINE long max_of(long a, long b) { return a > b ? a : b; }

INLINE long row_high(const item_t *item, long row) {
    return item->context_start + item->first_query + row / item->group + 1;
}

INLINE long row_low(const item_t *item, long row, long window) {
    return window ? max_of(0, row_high(item, row) - window) : 0;
}

static item_t item_of(const attention_loop *loop, long index) {
    const attention_args *args = loop->args;
    long low = 0, high = args->num_sequences;
    while (high - low > 1) {
        long middle = (low + high) / 2;
        if (loop->first_item[middle] <= index)
            low = middle;
        else
            high = middle;
    }
    long within = index - loop->first_item[low];
    long num_new = args->query_starts[low + 1] - args->query_starts[low];
    item_t item = {.sequence = low, .kv_head = within % args->num_kv_heads};
    item.first_query = within / args->num_kv_heads * loop->tokens_per_item;
    item.group = args->num_heads / args->num_kv_heads;
    item.num_rows = min_of(num_new - item.first_query, loop->tokens_per_item) * item.group;
    item.context_start = args->context_lens[low] - num_new;
    item.lowest = row_low(&item, 0, args->window);
    item.highest = row_high(&item, item.num_rows - 1);
    return item;
}

/* Addresses of positions [first, last) of the item's head. */
INLINE void find_rows(const attention_args *args, const item_t *item, const void *cache, long first, long last,
                      const char **rows) {
    const int32_t *table = args->block_tables + item->sequence * args->table_stride;
    long bytes = args->head_dim * width_of(args->dt), size = args->block_size;
    for (long position = first; position < last;) {
        long block = position / size, end = min_of(last, (block + 1) * size);
        const char *head = (const char *)cache + (table[block] * args->num_kv_heads + item->kv_head) * size * bytes;
        for (; position < end; position++) *rows++ = head + (position - block * size) * bytes;
    }
}

static void find_queries(const attention_args *args, const item_t *item, workspace *w) {
    for (long row = 0; row < item->num_rows; row++) {
        long token = args->query_starts[item->sequence] + item->first_query + row / item->group;
        long head = item->kv_head * item->group + row % item->group;
        const char *q = at(args->q, token * args->q_stride + head * args->head_dim, args->dt);
        if (!IS_DOT(args->dt) && args->dt != F32) {
            float *to = w->queries + row * args->head_dim;
            for (long d = 0; d < args->head_dim; d++) to[d] = load1(q, d, args->dt);
            q = (const char *)to;
        }
        w->query_rows[row] = q;
    }
}

/* The part of a tile that a block of rows sees, relative to the tile. */
typedef struct {
    long first_row, count, low, high;
} block_t;

INLINE block_t block_of(const item_t *item, long row, long tile, long window) {
    block_t block = {.first_row = row, .count = min_of(ROW_BLOCK, item->num_rows - row)};
    block.low = max_of(row_low(item, row, window) - tile, 0);
    block.high = min_of(row_high(item, row + block.count - 1) - tile, TILE);
    return block;
}

/* Asks for positions [first, last) of the item's head ahead of their use: blocks lie scattered, no hardware guesses. */
INLINE void prefetch_positions(const attention_args *args, const item_t *item, const void *cache, long first, long last) {
    const int32_t *table = args->block_tables + item->sequence * args->table_stride;
    long bytes = args->head_dim * width_of(args->dt), size = args->block_size;
    while (first < last) {
        long block = first / size, end = min_of(last, (block + 1) * size);
        const char *head = (const char *)cache + (table[block] * args->num_kv_heads + item->kv_head) * size * bytes;
        for (long at = (first - block * size) * bytes; at < (end - block * size) * bytes; at += 64)
            __builtin_prefetch(head + at, 0, 2);
        first = end;
    }
}

/* Transposes the keys of the group of positions that begins at `start`, as far as they lie in [first, last). */
INLINE void load_group(const attention_args *args, const item_t *item, long start, long first, long last, v16 *keys,
                       int dt) {
    const char *rows[GROUP];
    long low = max_of(start, first), high = min_of(start + GROUP, last);
    find_rows(args, item, args->k_cache, low, high, rows + (low - start));
    for (long i = 0; i < low - start; i++) rows[i] = rows[low - start]; /* unseen: any readable row, masked later */
    for (long i = high - start; i < GROUP; i++) rows[i] = rows[high - start - 1];
    long keys_at = start + KEYS_AHEAD, values_at = start + VALUES_AHEAD;
    prefetch_positions(args, item, args->k_cache, keys_at, min_of(keys_at + GROUP, last));
    prefetch_positions(args, item, args->v_cache, values_at, min_of(values_at + GROUP, last));
    transpose_keys(rows, args->head_dim / (IS_DOT(dt) ? 2 : 1), keys, dt);
}

INLINE void score_tile(const attention_args *args, const item_t *item, long tile, workspace *w, int dt) {
    long first = max_of(tile, item->lowest), last = min_of(tile + TILE, item->highest);
    long words = args->head_dim / (IS_DOT(dt) ? 2 : 1);
    const v16 *const keys[2] = {w->keys, w->keys + args->head_dim + 16};
    for (long start = first / GROUP * GROUP; start < last; start += 2 * GROUP) {
        long group = start - tile, next = start + GROUP;
        load_group(args, item, start, first, last, w->keys, dt);
        if (next < last) load_group(args, item, next, first, last, w->keys + args->head_dim + 16, dt);
        for (long row = 0; row < item->num_rows; row += ROW_BLOCK) {
            block_t b = block_of(item, row, tile, args->window);
            const char **queries = w->query_rows + row;
            float *scores = w->scores + row * TILE + group;
            if (b.low >= group + 2 * GROUP || b.high <= group) continue;
            if (b.high > group + GROUP) /* two groups share the loads of the queries */
                score_groups(queries, keys, words, scores, TILE, args->scale, args->softcap, b.count, 2, IS_DOT(dt));
            else
                score_groups(queries, keys, words, scores, TILE, args->scale, args->softcap, b.count, 1, IS_DOT(dt));
        }
    }
}

static void softmax_tile(const attention_args *args, const item_t *item, long tile, workspace *w, partial_t part) {
    for (long row = 0; row < item->num_rows; row++) {
        block_t b = block_of(item, row / ROW_BLOCK * ROW_BLOCK, tile, args->window);
        long low = row_low(item, row, args->window) - tile, high = row_high(item, row) - tile;
        long first = b.low / GROUP * GROUP;
        softmax_row(w->scores + row * TILE, low, high, first, max_of(first, b.high), &part.top[row], &part.sum[row]);
    }
}

INLINE void weigh_tile(const attention_args *args, const item_t *item, long tile, workspace *w, partial_t part, int dt) {
    long first = max_of(tile, item->lowest) - tile, last = min_of(tile + TILE, item->highest) - tile;
    long D = args->head_dim;
    int is_widened = dt != F32 && item->num_rows > ROW_BLOCK;
    long step = is_widened ? SPAN : TILE;
    find_rows(args, item, args->v_cache, tile + first, tile + last, w->values + first);
    for (long start = first / step * step; start < last; start += step) {
        long low = max_of(start, first), high = min_of(start + step, last);
        if (is_widened)
            for (long i = low; i < high; i++) {
                float *to = w->widened + (i - start) * D;
                long d = 0;
                for (; d + 16 <= D; d += 16) store16(to + d, load16(at(w->values[i], d, dt), dt), F32);
                for (; d < D; d++) to[d] = load1(w->values[i], d, dt);
                w->values[i] = (const char *)to;
            }
        for (long row = 0; row < item->num_rows; row += ROW_BLOCK) {
            block_t b = block_of(item, row, tile, args->window);
            long from = max_of(low, b.low), to = min_of(high, b.high);
            const float *weights = w->scores + row * TILE + from;
            if (from >= to) continue;
            if (is_widened)
                weigh_block(weights, TILE, w->values + from, to - from, part.out + row * D, D, b.count, F32);
            else
                weigh_block(weights, TILE, w->values + from, to - from, part.out + row * D, D, b.count, dt);
        }
    }
}

/* Asks for what the item after this one reads first; blocks of other sequences lie elsewhere. */
static void prefetch_item(const attention_loop *loop, long index) {
    if (index >= loop->num_items) return;
    item_t next = item_of(loop, index);
    long first = next.lowest / GROUP * GROUP;
    prefetch_positions(loop->args, &next, loop->args->k_cache, first, min_of(first + KEYS_AHEAD, next.highest));
    prefetch_positions(loop->args, &next, loop->args->v_cache, first, min_of(first + VALUES_AHEAD, next.highest));
}

static void attend_tile(const attention_args *args, const item_t *item, long tile, workspace *w, partial_t part) {
    memset(part.out, 0, (size_t)(item->num_rows * args->head_dim * 4));
    if (args->dt == F32) score_tile(args, item, tile, w, F32);
    if (args->dt == BF16) score_tile(args, item, tile, w, BF16);
    if (args->dt == F16) score_tile(args, item, tile, w, F16);
    softmax_tile(args, item, tile, w, part);
    if (args->dt == F32) weigh_tile(args, item, tile, w, part, F32);
    if (args->dt == BF16) weigh_tile(args, item, tile, w, part, BF16);
    if (args->dt == F16) weigh_tile(args, item, tile, w, part, F16);
}

static void start_state(partial_t state, long rows, long head_dim) {
    memset(state.out, 0, (size_t)(rows * head_dim * 4));
    for (long row = 0; row < rows; row++) state.top[row] = -INFINITY, state.sum[row] = 0.0f;
}

static void merge(partial_t state, partial_t part, long rows, long head_dim) {
    for (long row = 0; row < rows; row++) {
        if (part.top[row] == -INFINITY && part.sum[row] == 0.0f) continue;
        float top = state.top[row] > part.top[row] ? state.top[row] : part.top[row];
        float keep = expf(state.top[row] - top), add = expf(part.top[row] - top);
        float *to = state.out + row * head_dim, *from = part.out + row * head_dim;
        for (long d = 0; d < head_dim; d += 8)
            for (long j = d; j < d + 8; j++) to[j] = to[j] * keep + from[j] * add;
        state.sum[row] = state.sum[row] * keep + part.sum[row] * add;
        state.top[row] = top;
    }
}

INLINE void store_upto(void *to, v16 x, int lanes, int dt) {
    if (lanes == 16)
        store16(to, x, dt);
    else
        store_some(to, x, lanes, dt);
}

static void finish(const attention_args *args, const item_t *item, partial_t state) {
    long D = args->head_dim;
    for (long row = 0; row < item->num_rows; row++) {
        long token = args->query_starts[item->sequence] + item->first_query + row / item->group;
        long head = item->kv_head * item->group + row % item->group;
        void *to = at_mut(args->out, token * args->out_stride + head * D, args->dt);
        for (long d = 0; d < D; d += 16) {
            int lanes = (int)min_of(16, D - d);
            float *from = state.out + row * D + d;
            v16 o = (lanes == 16 ? load16(from, F32) : load_some(from, lanes, F32)) / splat(state.sum[row]);
            if (args->dt == F32) store_upto(at_mut(to, d, F32), o, lanes, F32);
            if (args->dt == BF16) store_upto(at_mut(to, d, BF16), o, lanes, BF16);
            if (args->dt == F16) store_upto(at_mut(to, d, F16), o, lanes, F16);
        }
    }
}

static void attend_item(void *context, long index) {
    const attention_loop *loop = context;
    workspace w = workspace_of(loop);
    item_t item = item_of(loop, index);
    long D = loop->args->head_dim;
    partial_t state = partial_at(w.state, item.num_rows, D), part = partial_at(w.part, item.num_rows, D);
    start_state(state, item.num_rows, D);
    find_queries(loop->args, &item, &w);
    for (long tile = item.lowest / TILE * TILE; tile < item.highest; tile += TILE) {
        if (tile + TILE >= item.highest) prefetch_item(loop, index + 1);
        attend_tile(loop->args, &item, tile, &w, part);
        merge(state, part, item.num_rows, D);
    }
    finish(loop->args, &item, state);
}

/* Split mode, first loop: one tile of one item. */
static void attend_part(void *context, long index) {
    const attention_loop *loop = context;
    workspace w = workspace_of(loop);
    long i = 0;
    while (loop->first_part[i + 1] <= index) i++;
    item_t item = item_of(loop, i);
    find_queries(loop->args, &item, &w);
    long tile = (item.lowest / TILE + index - loop->first_part[i]) * TILE, D = loop->args->head_dim;
    float *memory = loop->parts + index * partial_floats(loop->rows_max, D);
    attend_tile(loop->args, &item, tile, &w, partial_at(memory, item.num_rows, D));
}

/* Split mode, second loop: the tiles of one item, in order. */
static void merge_parts(void *context, long i) {
    const attention_loop *loop = context;
    workspace w = workspace_of(loop);
    item_t item = item_of(loop, i);
    long D = loop->args->head_dim;
    partial_t state = partial_at(w.state, item.num_rows, D);
    start_state(state, item.num_rows, D);
    for (long index = loop->first_part[i]; index < loop->first_part[i + 1]; index++) {
        float *memory = loop->parts + index * partial_floats(loop->rows_max, D);
        merge(state, partial_at(memory, item.num_rows, D), item.num_rows, D);
    }
    finish(loop->args, &item, state);
}

static int check_meta(const attention_args *args) {
    if (args->query_starts[0] || args->query_starts[args->num_sequences] > args->num_tokens) return BAD_META;
    for (long b = 0; b < args->num_sequences; b++) {
        long num_new = args->query_starts[b + 1] - args->query_starts[b], context = args->context_lens[b];
        if (num_new < 0 || context < num_new || context > args->table_stride * args->block_size) return BAD_META;
        if (!num_new) continue;
        const int32_t *table = args->block_tables + b * args->table_stride;
        long oldest = args->window ? max_of(0, context - num_new + 1 - args->window) : 0;
        for (long i = oldest / args->block_size; i * args->block_size < context; i++)
            if (table[i] < 0 || table[i] >= args->num_blocks) return BAD_BLOCK;
    }
    return OK;
}

int attention_run(const attention_args *args) {
    int problem = check_meta(args);
    if (problem) return problem;
    long B = args->num_sequences, group = args->num_heads / args->num_kv_heads;
    attention_loop loop = {.args = args, .tokens_per_item = max_of(1, ROWS_WANTED / group)};
    loop.rows_max = loop.tokens_per_item * group;
    int64_t *first_item = scratch(SCRATCH_CALLER, (B + 1) * 8);
    first_item[0] = 0;
    for (long b = 0; b < B; b++) {
        long num_new = args->query_starts[b + 1] - args->query_starts[b];
        first_item[b + 1] = first_item[b] + (num_new + loop.tokens_per_item - 1) / loop.tokens_per_item * args->num_kv_heads;
    }
    loop.first_item = first_item;
    loop.num_items = first_item[B];
    if (loop.num_items >= 4 * nl_num_threads() || nl_num_threads() == 1) {
        parallel_for(loop.num_items, attend_item, &loop);
        return OK;
    }
    int64_t first_part[4 * 256 + 1];
    first_part[0] = 0;
    for (long i = 0; i < loop.num_items; i++) {
        item_t item = item_of(&loop, i);
        first_part[i + 1] = first_part[i] + (item.highest - 1) / TILE - item.lowest / TILE + 1;
    }
    if (first_part[loop.num_items] <= 2 * loop.num_items) { /* short contexts: splitting would not pay */
        parallel_for(loop.num_items, attend_item, &loop);
        return OK;
    }
    loop.first_part = first_part;
    loop.parts = scratch(SCRATCH_PARTS, first_part[loop.num_items] * partial_floats(loop.rows_max, args->head_dim) * 4);
    parallel_for(first_part[loop.num_items], attend_part, &loop);
    parallel_for(loop.num_items, merge_parts, &loop);
    return OK;
}

int nl_attention(const void *q, long q_stride, const void *k_cache, const void *v_cache, void *out, long out_stride,
                 const int32_t *query_starts, const int32_t *context_lens, const int32_t *block_tables,
                 long table_stride, long num_sequences, long num_tokens, long num_heads, long num_kv_heads, long head_dim,
                 long block_size, long num_blocks, long window, float scale, float softcap,
                 int dt) {
    attention_args args = {q, q_stride, k_cache, v_cache, out, out_stride, query_starts, context_lens, block_tables,
                           table_stride, num_sequences, num_tokens, num_heads, num_kv_heads, head_dim, block_size,
                           num_blocks, window, scale, softcap, dt};
    return attention_run(&args);
}
