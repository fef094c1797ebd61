/* out[M, N] = x[M, K] @ weight[N, K]^T + bias[N], weights packed in blocks of NB columns (dot_tile.h).
 *
 * x is bf16 or float like the weights, sums are float, out is bf16 or float. Tasks are blocks of columns, and for many
 * rows panels of rows too; the sum over k is never split. Every output is therefore the same chain of operations
 * whatever M is: row m of a call equals the call on row m alone, bit for bit.
 *
 * With few rows a call is one pass over the weights at memory speed: a block is a contiguous stream. With many, a
 * block stays in the caches while tiles of MAX_ROWS rows, held in registers, go over it.
 *
 * `grouped_linear` does the same for several weights of one shape, each on rows of its own: experts on their tokens,
 * heads on their part of every token. Weights without rows are not named and cost nothing.
 */
#include "dot_tile.h"
#include "parallel.h"

enum { PANEL_ROWS = 8 * MAX_ROWS };

typedef struct {
    TaskQueue queue; /* a task: `blocks_per_task` blocks of columns times one panel of rows */
    int64_t blocks_per_task, num_panels, panel_rows;
    int64_t M, N, K;
    const void *x; /* rows of float or bf16_row_t, row_stride elements apart */
    int64_t row_stride;
    const void *weight;
    const void *bias; /* [N] of the weights' type, or NULL */
    void *out;        /* M rows of N, out_stride elements apart */
    int64_t out_stride;
    int out_is_float, weight_is_float;
} LinearCall;

/* Adds the bias and writes `rows` rows of `columns` <= NB outputs. */
ALWAYS_INLINE void write_tile(const LinearCall *call, int rows, vf (*acc)[NV], int64_t row, int64_t column) {
    for (int v = 0; v < NV; v++) {
        int64_t first = column + v * VL;
        int lanes = lanes_left(first, call->N);
        if (lanes <= 0) return;
        vf bias = {0};
        if (call->bias) bias = v_load_any(call->bias, first, lanes, call->weight_is_float);
        for (int m = 0; m < rows; m++) {
            vf value = call->bias ? acc[m][v] + bias : acc[m][v];
            v_store_any(call->out, (row + m) * call->out_stride + first, value, lanes, call->out_is_float);
        }
    }
}

ALWAYS_INLINE void compute_tile(const LinearCall *call, int is_float, int rows, int64_t row, int64_t block) {
    vf acc[MAX_ROWS][NV];
    size_t stride = (size_t)call->row_stride;
    if (is_float) {
        const float *columns = (const float *)call->weight + (size_t)block * call->K * NB;
        dot_tile_float(rows, acc, (const float *)call->x + row * stride, stride, columns, (int)call->K);
    } else {
        int pairs = (int)((call->K + 1) / 2);
        const bf16 *columns = (const bf16 *)call->weight + (size_t)block * pairs * NB * 2;
        dot_tile_bf16(rows, acc, (const bf16_row_t *)call->x + row * stride, stride, columns, pairs);
    }
    write_tile(call, rows, acc, row, block * NB);
}

/* One instance a number of rows, so that the accumulators are registers. */
#define CASE(R)                                        \
    case R:                                            \
        compute_tile(call, is_float, R, row, block);   \
        break;

ALWAYS_INLINE void compute_rows(const LinearCall *call, int is_float, int64_t row, int64_t end, int64_t block) {
    int64_t tiles = (end - row + MAX_ROWS - 1) / MAX_ROWS;
    for (; tiles > 0; tiles--) { /* tiles of nearly equal size: a last one of few rows would not hide its latency */
        int rows = (int)((end - row + tiles - 1) / tiles);
        switch (rows) {
            CASE(1)
#if MAX_ROWS >= 3
            CASE(2) CASE(3)
#endif
#if MAX_ROWS >= 12
            CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
        }
        row += rows;
    }
}

static void compute_tasks(LinearCall *call, int is_float) {
    int64_t num_blocks = (call->N + NB - 1) / NB;
    for (int64_t task; (task = take_task(&call->queue)) < call->queue.num_tasks;) {
        int64_t block = task / call->num_panels * call->blocks_per_task;
        int64_t end_block = block + call->blocks_per_task < num_blocks ? block + call->blocks_per_task : num_blocks;
        int64_t row = task % call->num_panels * call->panel_rows;
        int64_t end = row + call->panel_rows < call->M ? row + call->panel_rows : call->M;
        for (; block < end_block; block++) compute_rows(call, is_float, row, end, block);
    }
}

static void work_float(void *call) { compute_tasks(call, 1); }
static void work_bf16(void *call) { compute_tasks(call, 0); }

static void run(LinearCall *call, int64_t num_threads) {
    int64_t num_blocks = (call->N + NB - 1) / NB;
    call->num_panels = (call->M + PANEL_ROWS - 1) / PANEL_ROWS;
    call->panel_rows = (call->M + call->num_panels - 1) / call->num_panels;
    /* about 16 tasks a thread: few enough to stream, many enough to even out */
    int64_t blocks = num_blocks * call->num_panels / (num_threads * 16);
    call->blocks_per_task = blocks < 1 ? 1 : blocks > 8 ? 8 : blocks;
    int64_t columns = (num_blocks + call->blocks_per_task - 1) / call->blocks_per_task;
    call->queue = (TaskQueue){.num_tasks = columns * call->num_panels, .next = 0};
    if (call->M * call->N * call->K < 1 << 16) num_threads = 1; /* a microsecond's work: not worth a second core */
    run_on_threads(num_threads, call->weight_is_float ? work_float : work_bf16, call);
}

/* Rows as dot_tile_bf16 wants them: padded to whole pairs, converted where there is no bf16 instruction. */
static bf16_row_t *convert_rows(const bf16 *x, int64_t M, int64_t K, int64_t row_stride) {
    int64_t padded = (K + 1) / 2 * 2;
    bf16_row_t *rows = thread_scratch(SCRATCH_CALL, (size_t)(M * padded) * sizeof *rows);
    if (!rows) return NULL;
    for (int64_t m = 0; m < M; m++) {
        const bf16 *source = x + m * row_stride;
        bf16_row_t *row = rows + m * padded;
        for (int64_t k = 0; k < K; k++) row[k] = BF16_ROWS_AS_FLOAT ? (bf16_row_t)bf16_to_float(source[k]) : (bf16_row_t)source[k];
        if (padded > K) row[K] = 0;
    }
    return rows;
}

int linear_float(int64_t num_threads, int64_t M, int64_t N, int64_t K, const float *x, int64_t row_stride,
                 const float *weight, const float *bias, void *out, int out_is_float) {
    LinearCall call = {.M = M, .N = N, .K = K, .x = x, .row_stride = row_stride, .weight = weight, .bias = bias,
                       .out = out, .out_stride = N, .out_is_float = out_is_float, .weight_is_float = 1};
    run(&call, num_threads);
    return 0;
}

/* Returns non-zero if memory for converted rows could not be had. */
int linear_bf16(int64_t num_threads, int64_t M, int64_t N, int64_t K, const bf16 *x, int64_t row_stride,
                const bf16 *weight, const bf16 *bias, void *out, int out_is_float) {
    LinearCall call = {.M = M, .N = N, .K = K, .x = x, .row_stride = row_stride, .weight = weight, .bias = bias,
                       .out = out, .out_stride = N, .out_is_float = out_is_float, .weight_is_float = 0};
    if (BF16_ROWS_AS_FLOAT || K % 2) {
        bf16_row_t *rows = convert_rows(x, M, K, row_stride);
        if (!rows) return 1;
        call.x = rows;
        call.row_stride = (K + 1) / 2 * 2;
    }
    run(&call, num_threads);
    return 0;
}

/* The rows of one weight: row i is `first + i * row_step` of x and of out. */
typedef struct {
    int64_t weight, first, count;
} Group;

typedef struct {
    TaskQueue queue; /* a task: `call.blocks_per_task` blocks of columns of one group */
    int64_t tasks_per_group, row_step, weight_bytes;
    const Group *groups;
    LinearCall call; /* what the groups have in common: x, weight and out are the first of each */
} GroupedCall;

static void compute_group_tasks(GroupedCall *grouped, int is_float) {
    int64_t num_blocks = (grouped->call.N + NB - 1) / NB, size = is_float ? sizeof(float) : sizeof(bf16_row_t);
    int64_t out_size = grouped->call.out_is_float ? sizeof(float) : sizeof(bf16);
    for (int64_t task; (task = take_task(&grouped->queue)) < grouped->queue.num_tasks;) {
        const Group *group = grouped->groups + task / grouped->tasks_per_group;
        LinearCall call = grouped->call;
        call.x = (const char *)call.x + group->first * call.row_stride * size;
        call.row_stride *= grouped->row_step;
        call.weight = (const char *)call.weight + group->weight * grouped->weight_bytes;
        call.out = (char *)call.out + group->first * call.out_stride * out_size;
        call.out_stride *= grouped->row_step;
        int64_t first_block = task % grouped->tasks_per_group * call.blocks_per_task;
        int64_t end_block = first_block + call.blocks_per_task < num_blocks ? first_block + call.blocks_per_task : num_blocks;
        for (int64_t row = 0; row < group->count; row += PANEL_ROWS) {
            int64_t end = row + PANEL_ROWS < group->count ? row + PANEL_ROWS : group->count;
            for (int64_t block = first_block; block < end_block; block++) compute_rows(&call, is_float, row, end, block);
        }
    }
}

static void work_groups_float(void *grouped) { compute_group_tasks(grouped, 1); }
static void work_groups_bf16(void *grouped) { compute_group_tasks(grouped, 0); }

/* x: M rows, row_stride elements apart; out: M rows of N; weights [.., N, K] packed one behind the other.
 * Returns non-zero if memory for converted rows could not be had. */
int grouped_linear(int64_t num_threads, int64_t num_groups, const Group *groups, int64_t row_step, int64_t M, int64_t N, int64_t K,
                   int is_float, const void *x, int64_t row_stride, const void *weight, void *out, int out_is_float) {
    int64_t num_blocks = (N + NB - 1) / NB, depth = is_float ? K : (K + 1) / 2 * 2;
    GroupedCall grouped = {
        .groups = groups,
        .row_step = row_step,
        .weight_bytes = num_blocks * NB * depth * (int64_t)(is_float ? sizeof(float) : sizeof(bf16)),
        .call = {.N = N, .K = K, .x = x, .row_stride = row_stride, .weight = weight, .out = out, .out_stride = N,
                 .out_is_float = out_is_float, .weight_is_float = is_float}};
    if (!is_float && (BF16_ROWS_AS_FLOAT || K % 2)) {
        bf16_row_t *rows = convert_rows(x, M, K, row_stride);
        if (!rows) return 1;
        grouped.call.x = rows;
        grouped.call.row_stride = (K + 1) / 2 * 2;
    }
    int64_t blocks = num_blocks * num_groups / (num_threads * 16);
    grouped.call.blocks_per_task = blocks < 1 ? 1 : blocks > 8 ? 8 : blocks;
    grouped.tasks_per_group = (num_blocks + grouped.call.blocks_per_task - 1) / grouped.call.blocks_per_task;
    grouped.queue = (TaskQueue){.num_tasks = grouped.tasks_per_group * num_groups, .next = 0};
    if (M * N * K < 1 << 16) num_threads = 1;
    run_on_threads(num_threads, is_float ? work_groups_float : work_groups_bf16, &grouped);
    return 0;
}
