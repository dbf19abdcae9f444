/* A small thread pool: one loop at a time, its indices claimed one by one, the caller works too. */
#pragma once

typedef void (*loop_body)(void *context, long index);

/* Runs body(context, 0 … count-1) on the pool and returns when all are done. Order and thread are unspecified. */
void parallel_for(long count, loop_body body, void *context);

/* Per-thread memory of at least `bytes`, 64-byte aligned, valid until the thread asks again; slots are independent. */
void *scratch(int slot, long bytes);
enum { SCRATCH_ATTENTION, SCRATCH_LINEAR, SCRATCH_LORA, SCRATCH_CALLER, SCRATCH_PARTS, SCRATCH_WIDENED, SCRATCH_DECODER, SCRATCH_QUANT, SCRATCH_SLOTS };

void nl_set_num_threads(int num_threads);
int nl_num_threads(void);
