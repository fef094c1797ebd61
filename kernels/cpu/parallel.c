/* A team of threads that waits for kernels, and memory of threads: see parallel.h. */
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

enum {
    SPIN_NS = 20000,      /* a thread that waits keeps its core for so long: the next kernel is often nearer */
    AWAKE_NS = 5000000,   /* then it lets others run, but comes back at once, for so long; then it sleeps */
    SPINS_A_LOOK = 32,    /* at the clock */
    MAX_HELPERS = 0xffff,
};

/* The call that threads may join: its helpers' places and those at work in one word, so that both change at once.
 * `body` and `context` are written before there are places, and kept until nobody is at work. */
#define AT_WORK 0xffffu
#define ONE_PLACE 0x10000u
static struct {
    _Alignas(64) uint32_t state; /* places << 16 | helpers at work */
    void (*body)(void *);
    void *context;
} call;

static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER; /* held during a call */
static int64_t num_helpers;                                /* changed by the holder of `caller` */

/* Helpers that have waited long sleep here; a caller wakes them. */
static pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t morning = PTHREAD_COND_INITIALIZER;
static uint32_t num_asleep; /* changed by holders of `bed` */

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static uint32_t state(void) { return __atomic_load_n(&call.state, __ATOMIC_SEQ_CST); }

static bool has_places(void) { return state() >= ONE_PLACE; }
static bool nobody_works(void) { return !(state() & AT_WORK); }

/* Waits up to limit_ns, or for ever where that is 0; whether `done` came true. */
static bool await(bool (*done)(void), int64_t limit_ns) {
    int64_t start = 0, waited = 0;
    for (int64_t spins = 1; !done(); spins++) {
        relax();
        if (spins % SPINS_A_LOOK) continue;
        int64_t now = now_ns();
        start = start ? start : now;
        waited = now - start;
        if (limit_ns && waited >= limit_ns) return false;
        if (waited >= SPIN_NS) sched_yield();
    }
    return true;
}

static void sleep_until_called(void) {
    pthread_mutex_lock(&bed);
    __atomic_fetch_add(&num_asleep, 1, __ATOMIC_SEQ_CST); /* before the look: a caller looks in the other order */
    while (!has_places()) pthread_cond_wait(&morning, &bed);
    __atomic_fetch_sub(&num_asleep, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&bed);
}

static bool take_place(void) {
    uint32_t before = state();
    while (before >= ONE_PLACE)
        if (__atomic_compare_exchange_n(&call.state, &before, before - ONE_PLACE + 1, true, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
            return true;
    return false;
}

static void *help(void *unused) {
    (void)unused;
    for (;;) {
        if (!await(has_places, AWAKE_NS)) sleep_until_called();
        if (!take_place()) continue;
        call.body(call.context);
        __atomic_fetch_sub(&call.state, 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

/* In the child of a fork, which has none of the helpers. */
static void forget_helpers(void) {
    call.state = 0;
    num_helpers = num_asleep = 0;
    pthread_mutex_init(&caller, NULL);
    pthread_mutex_init(&bed, NULL);
    pthread_cond_init(&morning, NULL);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_helpers); }

static void hire(int64_t wanted) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    for (; num_helpers < wanted; num_helpers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL)) return;
        pthread_detach(thread);
    }
}

void run_on_threads(int64_t num_threads, void (*body)(void *), void *context) {
    int64_t wanted = num_threads <= MAX_HELPERS ? num_threads - 1 : MAX_HELPERS;
    if (wanted <= 0 || pthread_mutex_trylock(&caller)) {
        body(context);
        return;
    }
    hire(wanted);
    call.body = body;
    call.context = context;
    __atomic_store_n(&call.state, (uint32_t)wanted * ONE_PLACE, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&num_asleep, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&bed);
        pthread_cond_broadcast(&morning);
        pthread_mutex_unlock(&bed);
    }
    body(context);
    __atomic_fetch_and(&call.state, AT_WORK, __ATOMIC_SEQ_CST); /* who is not in yet need not come */
    await(nobody_works, 0);
    pthread_mutex_unlock(&caller);
}

void *thread_scratch(enum ScratchUse use, size_t bytes) {
    static __thread struct {
        void *memory;
        size_t bytes;
    } pieces[NUM_SCRATCH];
    if (pieces[use].bytes < bytes) {
        free(pieces[use].memory);
        pieces[use].bytes = (bytes + 4095) / 4096 * 4096;
        pieces[use].memory = aligned_alloc(64, pieces[use].bytes);
        if (!pieces[use].memory) pieces[use].bytes = 0;
    }
    return pieces[use].memory;
}
