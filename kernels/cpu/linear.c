/* out[M, N] = x[M, K] @ weight[N, K]^T + bias[N], weights packed in blocks of NB columns (dot_tile.h); or, gated,
 * out[M, N] = silu(x @ gate^T) * (x @ up^T), the weight being [2N, K]: gate, then up.
 *
 * x is bf16 or float like the weights, sums are float, out is bf16 or float. Tasks are blocks of columns, and for many
 * rows panels of rows too; the sum over k is never split. Every output is therefore the same chain of operations
 * whatever M is: row m of a call equals the call on row m alone, bit for bit.
 *
 * With few rows a call is one pass over the weights at memory speed: a block is a contiguous stream. With many, a
 * block stays in the caches while tiles of rows, their sums held in registers, go over it; in the matrix unit (amx_tile.h)
 * the block after it is fetched meanwhile.
 *
 * `grouped_linear` does the same for several weights of one shape, each on rows of its own: experts on their tokens,
 * heads on their part of every token. Weights without rows are not named and cost nothing.
 */
#include "amx_tile.h"
#include "dot_tile.h"
#include "parallel.h"

enum { MOST_ROWS = MAX_ROWS > AMX_ROWS ? MAX_ROWS : AMX_ROWS, PANEL_TILES = 8 };
enum { AMX_PANEL_BYTES = 1 << 20 }; /* of rows that lie in the second cache while a block goes over them */

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
    int gated; /* the weight has 2N rows, N a multiple of NB, and there is no bias */
    int uses_amx;
} LinearCall;

static int tile_rows(const LinearCall *call) { return call->uses_amx ? AMX_ROWS : MAX_ROWS; }

/* Adds the bias and writes `rows` rows of at most NB outputs. */
static void write_tile(const LinearCall *call, int rows, const float *tile, int64_t row, int64_t column) {
    for (int64_t first = column; first < column + NB && first < call->N; first += VL) {
        int lanes = lanes_left(first, call->N);
        vf bias = {0};
        if (call->bias) bias = v_load_any(call->bias, first, lanes, call->weight_is_float);
        for (int m = 0; m < rows; m++) {
            vf value = v_load(tile + m * NB + first - column);
            if (call->bias) value += bias;
            v_store_any(call->out, (row + m) * call->out_stride + first, value, lanes, call->out_is_float);
        }
    }
}

/* Writes silu(gate) * up, rounding both first as if they had been written out. */
static void write_gated_tile(const LinearCall *call, int rows, const float *gate, const float *up, int64_t row,
                             int64_t column) {
    for (int m = 0; m < rows; m++) {
        for (int i = 0; i < NB; i += VL) {
            vf g = v_load(gate + m * NB + i), u = v_load(up + m * NB + i);
            if (!call->out_is_float) g = v_round_bf16(g), u = v_round_bf16(u);
            v_store_any(call->out, (row + m) * call->out_stride + column + i, v_silu(g) * u, VL, call->out_is_float);
        }
    }
}

static const char *block_at(const LinearCall *call, int64_t block) {
    int64_t element = call->weight_is_float ? sizeof(float) : sizeof(bf16);
    int64_t depth = call->weight_is_float ? call->K : (call->K + 1) / 2 * 2;
    return (const char *)call->weight + block * depth * NB * element;
}

/* The products of `rows` rows with a block of the weight */
static void dot_block(const LinearCall *call, int rows, int64_t row, int64_t block, float *tile, int *rows_set) {
    int64_t row_element = call->weight_is_float ? sizeof(float) : sizeof(bf16_row_t);
    const char *x = (const char *)call->x + row * call->row_stride * row_element;
    const char *columns = block_at(call, block);
    if (call->uses_amx) {
        amx_dot_tile((const bf16 *)x, (size_t)call->row_stride, rows, (const bf16 *)columns, (int)call->K, tile, NB,
                     rows_set);
        return;
    }
    dot_tile(x, (size_t)call->row_stride, rows, columns, (int)call->K, call->weight_is_float, tile, NB);
}

/* Fetches the `part`th of `num_parts` of a block into the second cache: the matrix unit is faster than memory, and waits
 * for what it has not seen. */
static void prefetch_block(const LinearCall *call, int64_t block, int64_t part, int64_t num_parts) {
    const char *begin = block_at(call, block);
    int64_t num_lines = (block_at(call, block + 1) - begin) / 64;
    for (int64_t line = part * num_lines / num_parts; line < (part + 1) * num_lines / num_parts; line++)
        __builtin_prefetch(begin + line * 64, 0, 2);
}

/* `next`: the block that comes after this one, or -1. */
static void compute_block(const LinearCall *call, int64_t row, int64_t end, int64_t block, int64_t next,
                          int *rows_set) {
    float tile[MOST_ROWS * NB], up[MOST_ROWS * NB];
    int64_t num_tiles = (end - row + tile_rows(call) - 1) / tile_rows(call);
    for (int64_t tiles = num_tiles; tiles > 0; tiles--) { /* of nearly equal size: few rows would not hide latency */
        if (call->uses_amx && next >= 0 && num_tiles > 1) {
            prefetch_block(call, next, tiles - 1, num_tiles);
            if (call->gated) prefetch_block(call, next + call->N / NB, tiles - 1, num_tiles);
        }
        int rows = (int)((end - row + tiles - 1) / tiles);
        dot_block(call, rows, row, block, tile, rows_set);
        if (call->gated) {
            dot_block(call, rows, row, block + call->N / NB, up, rows_set);
            write_gated_tile(call, rows, tile, up, row, block * NB);
        } else {
            write_tile(call, rows, tile, row, block * NB);
        }
        row += rows;
    }
}

/* The blocks of one task, from `block` on */
static void compute_blocks(const LinearCall *call, int64_t row, int64_t end, int64_t block) {
    int64_t num_blocks = (call->N + NB - 1) / NB;
    int64_t end_block = block + call->blocks_per_task < num_blocks ? block + call->blocks_per_task : num_blocks;
    int rows_set;
    if (call->uses_amx) amx_begin(&rows_set);
    for (; block < end_block; block++)
        compute_block(call, row, end, block, block + 1 < end_block ? block + 1 : -1, &rows_set);
    if (call->uses_amx) amx_end();
}

static void compute_tasks(void *context) {
    LinearCall *call = context;
    for (int64_t task; (task = take_task(&call->queue)) < call->queue.num_tasks;) {
        int64_t block = task / call->num_panels * call->blocks_per_task;
        int64_t row = task % call->num_panels * call->panel_rows;
        int64_t end = row + call->panel_rows < call->M ? row + call->panel_rows : call->M;
        compute_blocks(call, row, end, block);
    }
}

/* Panels of nearly equal size for as many rows as any matrix of the call has */
static void cut_panels(LinearCall *call, int64_t num_rows) {
    int64_t most = PANEL_TILES * tile_rows(call);
    if (call->uses_amx) {
        int64_t num_tiles = AMX_PANEL_BYTES / (call->K * AMX_ROWS * (int64_t)sizeof(bf16));
        most = (num_tiles < 1 ? 1 : num_tiles > 2 * PANEL_TILES ? 2 * PANEL_TILES : num_tiles) * AMX_ROWS;
    }
    call->num_panels = (num_rows + most - 1) / most;
    call->panel_rows = (num_rows + call->num_panels - 1) / call->num_panels;
}

static void run(LinearCall *call, int64_t num_threads) {
    int64_t num_blocks = (call->N + NB - 1) / NB;
    cut_panels(call, call->M);
    /* about 16 tasks a thread: few enough to stream, many enough to even out; less for the matrix unit with many rows,
     * which gets its next block while it works on one */
    int64_t tasks = call->uses_amx && call->M > 2 * AMX_ROWS ? 4 : 16;
    int64_t blocks = num_blocks * call->num_panels / (num_threads * tasks);
    call->blocks_per_task = blocks < 1 ? 1 : blocks > 8 ? 8 : blocks;
    int64_t columns = (num_blocks + call->blocks_per_task - 1) / call->blocks_per_task;
    call->queue = (TaskQueue){.num_tasks = columns * call->num_panels, .next = 0};
    if (call->M * call->N * call->K * (1 + call->gated) < 1 << 16)
        num_threads = 1; /* a microsecond's work: not worth a second core */
    run_on_threads(num_threads, compute_tasks, call);
}

/* Rows as dot_tile_bf16 wants them: padded to whole pairs, converted where there is no bf16 instruction. */
static bf16_row_t *convert_rows(const bf16 *x, int64_t M, int64_t K, int64_t row_stride) {
    int64_t padded = (K + 1) / 2 * 2;
    bf16_row_t *rows = thread_scratch(SCRATCH_CALL, (size_t)(M * padded) * sizeof *rows);
    if (!rows) return NULL;
    for (int64_t m = 0; m < M; m++) {
        const bf16 *source = x + m * row_stride;
        bf16_row_t *row = rows + m * padded;
        for (int64_t k = 0; k < K; k++)
            row[k] = BF16_ROWS_AS_FLOAT ? (bf16_row_t)bf16_to_float(source[k]) : (bf16_row_t)source[k];
        if (padded > K) row[K] = 0;
    }
    return rows;
}

/* A weight [2N, K] and no bias if gated, N being a multiple of NB. */
int linear_float(int64_t num_threads, int64_t M, int64_t N, int64_t K, const float *x, int64_t row_stride,
                 const float *weight, const float *bias, void *out, int out_is_float, int gated) {
    LinearCall call = {.M = M,
                       .N = N,
                       .K = K,
                       .x = x,
                       .row_stride = row_stride,
                       .weight = weight,
                       .bias = bias,
                       .out = out,
                       .out_stride = N,
                       .out_is_float = out_is_float,
                       .weight_is_float = 1,
                       .gated = gated};
    run(&call, num_threads);
    return 0;
}

/* The same in bf16. Returns non-zero if memory for converted rows could not be had. */
int linear_bf16(int64_t num_threads, int64_t M, int64_t N, int64_t K, const bf16 *x, int64_t row_stride,
                const bf16 *weight, const bf16 *bias, void *out, int out_is_float, int gated) {
    LinearCall call = {.M = M,
                       .N = N,
                       .K = K,
                       .x = x,
                       .row_stride = row_stride,
                       .weight = weight,
                       .bias = bias,
                       .out = out,
                       .out_stride = N,
                       .out_is_float = out_is_float,
                       .weight_is_float = 0,
                       .gated = gated,
                       .uses_amx = K % AMX_DEPTH == 0 && has_amx()};
    if (BF16_ROWS_AS_FLOAT || K % 2) {
        bf16_row_t *rows = convert_rows(x, M, K, row_stride);
        if (!rows) return 1;
        call.x = rows;
        call.row_stride = (K + 1) / 2 * 2;
    }
    run(&call, num_threads);
    return 0;
}

/* The rows first_row, first_row + row_step, ... of x and out, and the matrix that is theirs */
typedef struct {
    int64_t weight, first_row, num_rows;
} Group;

typedef struct {
    LinearCall call; /* of all rows; a group's differs in where its rows and its matrix start */
    const Group *groups;
    int64_t row_step, matrix_bytes;
} GroupedCall;

static void compute_group_tasks(void *context) {
    GroupedCall *grouped = context;
    const LinearCall *all = &grouped->call;
    int64_t num_blocks = (all->N + NB - 1) / NB;
    int64_t columns = (num_blocks + all->blocks_per_task - 1) / all->blocks_per_task;
    size_t row_bytes = (size_t)all->row_stride * (all->weight_is_float ? sizeof(float) : sizeof(bf16_row_t));
    size_t out_bytes = (size_t)all->N * (all->out_is_float ? sizeof(float) : sizeof(bf16));
    for (int64_t task; (task = take_task(&grouped->call.queue)) < all->queue.num_tasks;) {
        const Group *group = &grouped->groups[task / (columns * all->num_panels)];
        int64_t row = task % all->num_panels * all->panel_rows;
        int64_t end = row + all->panel_rows < group->num_rows ? row + all->panel_rows : group->num_rows;
        if (row >= end) continue; /* the panels are those of the largest group */
        LinearCall part = *all;
        part.x = (const char *)all->x + group->first_row * row_bytes;
        part.row_stride = all->row_stride * grouped->row_step;
        part.weight = (const char *)all->weight + group->weight * grouped->matrix_bytes;
        part.out = (char *)all->out + group->first_row * out_bytes;
        part.out_stride = all->N * grouped->row_step;
        compute_blocks(&part, row, end, task / all->num_panels % columns * all->blocks_per_task);
    }
}

/* x [M, K], groups [num_groups][3], weight: the packed matrices one after the other, out [M, N]. Returns non-zero if
 * memory for converted rows could not be had. */
int grouped_linear(int64_t num_threads, int64_t num_groups, const int64_t *groups, int64_t row_step, int64_t M,
                   int64_t N, int64_t K, int is_float, const void *x, int64_t row_stride, const void *weight, void *out,
                   int out_is_float) {
    GroupedCall grouped = {.call = {.M = M,
                                    .N = N,
                                    .K = K,
                                    .x = x,
                                    .row_stride = row_stride,
                                    .weight = weight,
                                    .out = out,
                                    .out_stride = N,
                                    .out_is_float = out_is_float,
                                    .weight_is_float = is_float,
                                    .uses_amx = !is_float && K % AMX_DEPTH == 0 && has_amx()},
                           .groups = (const Group *)groups,
                           .row_step = row_step};
    LinearCall *call = &grouped.call;
    int64_t num_blocks = (N + NB - 1) / NB, largest = 0;
    grouped.matrix_bytes =
        num_blocks * NB * (is_float ? K * (int64_t)sizeof(float) : (K + 1) / 2 * 2 * (int64_t)sizeof(bf16));
    for (int64_t g = 0; g < num_groups; g++)
        if (grouped.groups[g].num_rows > largest) largest = grouped.groups[g].num_rows;
    if (!largest) return 0;
    if (!is_float && (BF16_ROWS_AS_FLOAT || K % 2)) {
        call->x = convert_rows(x, M, K, row_stride);
        if (!call->x) return 1;
        call->row_stride = (K + 1) / 2 * 2;
    }
    cut_panels(call, largest);
    int64_t blocks = num_groups * num_blocks * call->num_panels / (num_threads * 16);
    call->blocks_per_task = blocks < 1 ? 1 : blocks > 8 ? 8 : blocks;
    int64_t columns = (num_blocks + call->blocks_per_task - 1) / call->blocks_per_task;
    call->queue = (TaskQueue){.num_tasks = num_groups * columns * call->num_panels};
    if (M * N * K < 1 << 16) num_threads = 1;
    run_on_threads(num_threads, compute_group_tasks, &grouped);
    return 0;
}
