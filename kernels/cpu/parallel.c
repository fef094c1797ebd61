/* The hand-over of torch's OpenMP runtime, and memory of threads: see parallel.h. */
#include "parallel.h"

#include <stdlib.h>

typedef void (*ParallelRegion)(void (*body)(void *), void *context, unsigned num_threads, unsigned flags);

static ParallelRegion parallel_region; /* written once, when the library is loaded */

void set_thread_runtime(void *gomp_parallel) { parallel_region = (ParallelRegion)gomp_parallel; }

void run_on_threads(int64_t num_threads, void (*body)(void *), void *context) {
    if (num_threads <= 1 || !parallel_region)
        body(context);
    else
        parallel_region(body, context, (unsigned)num_threads, 0);
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
