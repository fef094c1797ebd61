/* The hand-over of torch's OpenMP runtime: see parallel.h. */
#include "parallel.h"

typedef void (*ParallelRegion)(void (*body)(void *), void *context, unsigned num_threads, unsigned flags);

static ParallelRegion parallel_region; /* written once, when the library is loaded */

void set_thread_runtime(void *gomp_parallel) { parallel_region = (ParallelRegion)gomp_parallel; }

void run_on_threads(int64_t num_threads, void (*body)(void *), void *context) {
    if (num_threads <= 1 || !parallel_region)
        body(context);
    else
        parallel_region(body, context, (unsigned)num_threads, 0);
}
