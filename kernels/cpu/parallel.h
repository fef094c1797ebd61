/* Splitting a kernel's tasks over the threads of the OpenMP runtime that torch has already started.
 *
 * A second runtime would have threads of its own, spinning against torch's on the same cores. So the kernels are
 * compiled without -fopenmp and call the one entry point `GOMP_parallel` (exported by libgomp, libomp and libiomp5
 * alike) of the library loaded with torch, handed over once by `set_thread_runtime`. Its threads spin briefly between
 * two calls and then sleep, which makes a call of a few microseconds worth splitting. Without a runtime everything runs
 * serially.
 *
 * Tasks are taken from a counter, so that a core which another process slows down takes fewer. Which thread computes
 * a task, and how many there are, never enters the result.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct {
    int64_t num_tasks;
    int64_t next; /* the counter; threads add to it atomically */
} TaskQueue;

static inline int64_t take_task(TaskQueue *queue) { return __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED); }

/* Memory of the calling thread that lives on between calls (asking the system for it at each would cost more than many
 * a kernel), at least `bytes` long, 64-byte aligned, its contents undefined; one piece for each of NUM_SCRATCH uses.
 * NULL if it cannot be had. */
enum ScratchUse { SCRATCH_TASK, SCRATCH_CALL, NUM_SCRATCH };
void *thread_scratch(enum ScratchUse use, size_t bytes);

/* Calls body(context) on up to num_threads threads at once and returns when all have. */
void run_on_threads(int64_t num_threads, void (*body)(void *), void *context);
