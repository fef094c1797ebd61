/* Splitting a kernel's tasks over threads, on cores that other processes want, too.
 *
 * Tasks are taken from a counter, so that a core which another process slows down takes fewer. Which thread computes a
 * task, and how many there are, never enters the result.
 *
 * OpenMP ends a region when all threads of a team have come to its end, so that one which has lost its core for a
 * moment stops the others even where it has nothing left to do. Here a call waits only for threads that are in the
 * middle of it: whoever comes too late for a call is not waited for. And threads that wait let others run on their
 * cores meanwhile, rather than spin on; what those others want is then done when it delays nobody.
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

/* Calls body(context) on the calling thread and on up to num_threads - 1 others at once; returns when all have. One
 * call of `body` does all that is left to do, so that others may come late, twice or not at all. Of two threads that
 * call this at the same time one gets no help. */
void run_on_threads(int64_t num_threads, void (*body)(void *), void *context);
