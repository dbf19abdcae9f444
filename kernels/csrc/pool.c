/* The thread pool. A waiting thread spins for a bounded time and then sleeps on a futex.
 *
 * Indices are cut into as many runs as there are threads. A thread takes neighbours from its own run, so that memory
 * read in their order streams without restarts, and from the others' runs when its own is empty.
 * Nobody ever waits for a thread that holds no index: if the kernel has taken a worker off its core, the caller does
 * the whole loop alone, so a busy neighbour costs us its share of the cores and no more. A claim is a compare-and-swap
 * on (loop number, claims) in one word, so a worker that wakes late can never take part in a loop it has not read.
 * There are as many claims as indices, so whoever has one finds an index.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE __attribute__((aligned(64)))
#define MAX_THREADS 256
#define MAX_RUNS 64
#define WORKER_SPIN_NS 100000
#define CALLER_SPIN_NS 30000

static struct {
    LINE _Atomic uint64_t ticket; /* loop number << 32 | claims made */
    LINE _Atomic(loop_body) body;
    _Atomic(void *) context;
    _Atomic uint32_t count, num_runs;
    LINE _Atomic uint32_t done;
    _Atomic uint32_t caller_sleeps;
    LINE _Atomic uint32_t bell; /* futex word of the workers */
    _Atomic uint32_t sleepers;
    _Atomic int32_t wanted; /* threads that may work, the caller included */
    int started;            /* workers that exist */
    int caller_cpu;         /* which the workers' affinities leave out */
    _Atomic pid_t threads[MAX_THREADS]; /* of worker number i + 1; 0 until it runs */
} pool = {.wanted = 1, .caller_cpu = -1};
static struct {
    LINE _Atomic uint32_t next;
    uint32_t end;
} runs[MAX_RUNS];
static __thread int thread_number; /* of a worker; 0 for every caller */
static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER;

static __thread void *scratch_memory[SCRATCH_SLOTS];
static __thread long scratch_bytes[SCRATCH_SLOTS];

void *scratch(int slot, long bytes) {
    if (bytes > scratch_bytes[slot]) {
        free(scratch_memory[slot]);
        long rounded = (bytes + 4095) / 4096 * 4096;
        scratch_memory[slot] = aligned_alloc(64, (size_t)rounded);
        if (!scratch_memory[slot]) abort();
        scratch_bytes[slot] = rounded;
    }
    return scratch_memory[slot];
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* Cuts [0, count) into runs; nobody holds a claim now. */
static void cut_runs(uint32_t count, uint32_t threads) {
    uint32_t num_runs = threads < MAX_RUNS ? threads : MAX_RUNS;
    for (uint32_t run = 0; run < num_runs; run++) {
        atomic_store_explicit(&runs[run].next, (uint32_t)((uint64_t)count * run / num_runs), memory_order_relaxed);
        runs[run].end = (uint32_t)((uint64_t)count * (run + 1) / num_runs);
    }
    atomic_store_explicit(&pool.num_runs, num_runs, memory_order_relaxed);
}

/* The index of a claim. */
static long take_index(void) {
    uint32_t num_runs = atomic_load_explicit(&pool.num_runs, memory_order_relaxed);
    for (uint32_t run = (uint32_t)thread_number % num_runs;; run = run + 1 == num_runs ? 0 : run + 1) {
        if (atomic_load_explicit(&runs[run].next, memory_order_relaxed) >= runs[run].end) continue;
        uint32_t index = atomic_fetch_add_explicit(&runs[run].next, 1, memory_order_relaxed);
        if (index < runs[run].end) return index;
    }
}

static void work(void) {
    for (;;) {
        uint64_t ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
        loop_body body = atomic_load_explicit(&pool.body, memory_order_relaxed);
        void *context = atomic_load_explicit(&pool.context, memory_order_relaxed);
        uint32_t count = atomic_load_explicit(&pool.count, memory_order_relaxed);
        if ((uint32_t)ticket >= count) return;
        if (!atomic_compare_exchange_strong(&pool.ticket, &ticket, ticket + 1)) continue;
        body(context, take_index());
        if (atomic_fetch_add(&pool.done, 1) + 1 == count && atomic_load(&pool.caller_sleeps)) futex_wake(&pool.done, 1);
    }
}

static void sleep_until_rung(uint32_t seen_loop, int number) {
    uint32_t bell = atomic_load(&pool.bell);
    atomic_fetch_add(&pool.sleepers, 1);
    int is_idle = number >= atomic_load(&pool.wanted);
    if (is_idle || (uint32_t)(atomic_load(&pool.ticket) >> 32) == seen_loop) futex_wait(&pool.bell, bell);
    atomic_fetch_sub(&pool.sleepers, 1);
}

static void *worker(void *argument) {
    int number = (int)(intptr_t)argument;
    uint32_t seen_loop = 0;
    thread_number = number;
    atomic_store(&pool.threads[number - 1], (pid_t)syscall(SYS_gettid));
    for (;;) {
        if (number >= atomic_load(&pool.wanted)) {
            sleep_until_rung(seen_loop, number);
            continue;
        }
        int64_t give_up_at = now_ns() + WORKER_SPIN_NS;
        uint32_t loop;
        while ((loop = (uint32_t)(atomic_load_explicit(&pool.ticket, memory_order_acquire) >> 32)) == seen_loop) {
            for (int i = 0; i < 16; i++) relax();
            if (now_ns() > give_up_at) break;
        }
        if (loop == seen_loop) {
            sleep_until_rung(seen_loop, number);
        } else {
            seen_loop = loop;
            work();
        }
    }
    return NULL;
}

static void wait_for_all(uint32_t count) {
    int64_t give_up_at = now_ns() + CALLER_SPIN_NS;
    uint32_t done;
    while ((done = atomic_load_explicit(&pool.done, memory_order_acquire)) != count) {
        for (int i = 0; i < 8; i++) relax();
        if (now_ns() < give_up_at) continue;
        atomic_store(&pool.caller_sleeps, 1);
        done = atomic_load(&pool.done);
        if (done != count) futex_wait(&pool.done, done);
        atomic_store(&pool.caller_sleeps, 0);
    }
}

/* A forked child has none of the parent's threads: it starts over, single-threaded until it asks for more. */
static void forget_threads(void) {
    pthread_mutex_init(&in_use, NULL);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.wanted, 1);
    pool.started = 0;
    pool.caller_cpu = -1;
}

/* Keeps the workers off the caller's core: on a busy machine they are woken there, where they only wait for it. */
static void leave_core(int cpu) {
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores)) return;
    CPU_CLR(cpu, &cores);
    pool.caller_cpu = cpu;
    if (!CPU_COUNT(&cores)) return;
    for (int i = 0; i < pool.started; i++) {
        pid_t thread = atomic_load(&pool.threads[i]);
        if (!thread || sched_setaffinity(thread, sizeof cores, &cores)) pool.caller_cpu = -1; /* again next time */
    }
}

static void start_workers(int wanted) {
    static int is_registered = 0;
    if (!is_registered) is_registered = !pthread_atfork(NULL, NULL, forget_threads);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to Python's main thread */
    for (; pool.started < wanted - 1; pool.started++) {
        pthread_t thread;
        pool.caller_cpu = -1;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)(pool.started + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void nl_set_num_threads(int num_threads) {
    int wanted = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    pthread_mutex_lock(&in_use);
    atomic_store(&pool.wanted, wanted);
    start_workers(wanted);
    atomic_fetch_add(&pool.bell, 1);
    futex_wake(&pool.bell, MAX_THREADS);
    pthread_mutex_unlock(&in_use);
}

int nl_num_threads(void) { return atomic_load(&pool.wanted); }

void parallel_for(long count, loop_body body, void *context) {
    /* A second caller at the same moment does not wait for the pool: it runs its loop alone. */
    if (count <= 1 || atomic_load(&pool.wanted) <= 1 || pthread_mutex_trylock(&in_use)) {
        for (long i = 0; i < count; i++) body(context, i);
        return;
    }
    int cpu = sched_getcpu();
    if (cpu >= 0 && cpu != pool.caller_cpu) leave_core(cpu);
    uint32_t loop = (uint32_t)(atomic_load(&pool.ticket) >> 32) + 1;
    /* Closing the old loop first keeps a late reader from pairing its ticket with the new loop's count. */
    atomic_store(&pool.ticket, (uint64_t)(loop - 1) << 32 | 0xffffffffu);
    atomic_store(&pool.body, body);
    atomic_store(&pool.context, context);
    atomic_store(&pool.done, 0);
    atomic_store(&pool.count, (uint32_t)count);
    cut_runs((uint32_t)count, (uint32_t)atomic_load(&pool.wanted));
    atomic_store(&pool.ticket, (uint64_t)loop << 32);
    if (atomic_load(&pool.sleepers)) {
        atomic_fetch_add(&pool.bell, 1);
        int has_idle = pool.started >= atomic_load(&pool.wanted); /* those would swallow the wake-up of another */
        futex_wake(&pool.bell, has_idle || count > MAX_THREADS ? MAX_THREADS : (int)count - 1);
    }
    work();
    wait_for_all((uint32_t)count);
    pthread_mutex_unlock(&in_use);
}
