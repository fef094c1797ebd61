/* Causal attention of a ragged batch over the paged KV cache, read in place.
 *
 * Row t of sequence s stands at position p and attends to positions max(0, p - window + 1) .. p. All query heads of one
 * KV head, and all rows of a sequence up to TILE_ROWS, are one tile, so keys and values are read once for them.
 *
 * Positions are cut into chunks of CHUNK, counted from position 0. For each chunk a row computes
 *     m_c = max score,  l_c = sum of exp(score - m_c),  o_c = sum of exp(score - m_c) * value   (in order of position)
 * and the chunks' results are folded in order of position. Scores, exponentials and sums are float. Where the chunks lie
 * depends on absolute positions only, and a row never touches a position that it does not attend to; so its result is
 * the same bit for bit however many rows and sequences the call has, however a prompt was split over calls, and whether
 * the chunks of a long context were computed by one thread or by several (`split`).
 *
 * Caches are [num_blocks, block_size, num_kv_heads, head_dim]. For the scores NB keys are turned into a packed block
 * (dot_tile.h), which makes them the columns of a small matrix product with lanes over keys.
 */
#include <math.h>
#include <stdlib.h>

#include "dot_tile.h"
#include "parallel.h"

enum { CHUNK = 128, TILE_ROWS = 48 };

/* Rows times vectors held in registers while values are summed up */
#if VL == 16
#define SUM_ROWS 6
#define SUM_VECTORS 4
#elif VL == 8
#define SUM_ROWS 3
#define SUM_VECTORS 4
#elif defined(__aarch64__)
#define SUM_ROWS 3
#define SUM_VECTORS 8
#else
#define SUM_ROWS 1
#define SUM_VECTORS 8
#endif

typedef struct {
    TaskQueue queue;
    int64_t num_seqs, num_query_heads, num_kv_heads, head_dim, padded_dim, block_size;
    int64_t group;  /* query heads a KV head */
    int64_t window; /* positions seen, own included; 0 = all */
    float scale;
    int is_float;
    const void *query;
    int64_t query_stride; /* elements from token to token */
    const char *key_cache, *value_cache;
    const int32_t *cu_seqlens_q, *context_lens, *block_tables;
    int64_t table_stride;
    void *out; /* [num_tokens, num_query_heads, head_dim] */
    /* How the work is cut: a task is a tile of rows, for heads_per_task KV heads, and with a split for one chunk only */
    int64_t num_tiles, heads_per_task, num_splits;
    float *partials; /* with a split: [tasks][partial_floats] */
    int failed;      /* a thread could not get its scratch memory */
} AttentionCall;

/* The rows of a task: a sequence's rows times the query heads of a KV head, position-major, from first_row on. */
typedef struct {
    int64_t task, first_head, rows, first_row;
    int64_t first_token;    /* the sequence's first row in the batch */
    int64_t first_position; /* the position of that row */
    int64_t begin, end;     /* chunks to attend to */
    const int32_t *block_table;
} Tile;

/* One chunk of a tile, and where it lies */
typedef struct {
    Tile tile;
    int64_t chunk;
    int count;              /* positions of the chunk up to the last that any row attends to */
    int64_t offsets[CHUNK]; /* bytes from the start of a cache to the first head of a position */
    int low[TILE_ROWS], high[TILE_ROWS]; /* a row attends to positions low .. high - 1 of the chunk */
} Item;

typedef struct {
    float *max, *sum, *out; /* [TILE_ROWS], [TILE_ROWS], [TILE_ROWS, padded_dim] */
} Partial;

typedef struct {
    Item items[2]; /* the one being computed and the one after it, which is being prefetched */
    void *query;   /* [TILE_ROWS, head_dim] float or bf16_row_t, of one head */
    void *keys;    /* a packed block of NB keys */
    float *scores; /* [TILE_ROWS, CHUNK], then their exponentials */
    Partial chunk;
    float *totals; /* [heads_per_task][partial_floats] */
    int64_t prefetched; /* positions of the next item */
} Scratch;

static int64_t partial_floats(const AttentionCall *call) { return TILE_ROWS * (call->padded_dim + 2); }

static Partial partial_at(float *memory) {
    return (Partial){.max = memory, .sum = memory + TILE_ROWS, .out = memory + 2 * TILE_ROWS};
}

static int64_t element_size(const AttentionCall *call) { return call->is_float ? 4 : 2; }

static int64_t row_position(const AttentionCall *call, const Tile *tile, int64_t row) {
    return tile->first_position + (tile->first_row + row) / call->group;
}

/* Tasks in the order: sequences, groups of heads, tiles (the longest first), chunks. Returns 0 for one without work. */
static int find_tile(const AttentionCall *call, int64_t task, Tile *tile) {
    int64_t num_groups = call->num_kv_heads / call->heads_per_task, rest = task / call->num_splits;
    int64_t seq = rest / (num_groups * call->num_tiles), index = call->num_tiles - 1 - rest % call->num_tiles;
    int64_t num_rows = (call->cu_seqlens_q[seq + 1] - call->cu_seqlens_q[seq]) * call->group;
    tile->task = task;
    tile->first_head = rest / call->num_tiles % num_groups * call->heads_per_task;
    tile->first_row = index * TILE_ROWS;
    if (tile->first_row >= num_rows) return 0;
    tile->rows = num_rows - tile->first_row < TILE_ROWS ? num_rows - tile->first_row : TILE_ROWS;
    tile->first_token = call->cu_seqlens_q[seq];
    tile->first_position = call->context_lens[seq] - num_rows / call->group;
    tile->block_table = call->block_tables + seq * call->table_stride;
    int64_t first = row_position(call, tile, 0) + 1 - call->window, last = row_position(call, tile, tile->rows - 1);
    tile->begin = call->window && first > 0 ? first / CHUNK : 0;
    tile->end = last < 0 ? tile->begin + 1 : last / CHUNK + 1; /* at least one, so that rows seeing nothing are written */
    if (call->num_splits > 1) {
        int64_t chunk = task % call->num_splits;
        if (chunk < tile->begin || chunk >= tile->end) return 0;
        tile->begin = chunk, tile->end = chunk + 1;
    }
    return 1;
}

static void locate_chunk(const AttentionCall *call, Item *item) {
    const Tile *tile = &item->tile;
    int64_t start = item->chunk * CHUNK;
    item->count = 0;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t position = row_position(call, tile, r);
        int64_t low = call->window ? position + 1 - call->window - start : 0, high = position + 1 - start;
        item->low[r] = low < 0 ? 0 : low > CHUNK ? CHUNK : (int)low;
        item->high[r] = high < 0 ? 0 : high > CHUNK ? CHUNK : (int)high;
        if (item->high[r] > item->count) item->count = item->high[r];
    }
    int64_t head_bytes = call->head_dim * element_size(call), slot_bytes = call->num_kv_heads * head_bytes;
    int64_t block = start / call->block_size, offset = start % call->block_size;
    for (int j = 0; j < item->count; j++) {
        int64_t slot = tile->block_table[block] * call->block_size + offset;
        item->offsets[j] = slot * slot_bytes + tile->first_head * head_bytes;
        if (++offset == call->block_size) block++, offset = 0;
    }
    for (int j = item->count; j % VL; j++) item->offsets[j] = item->offsets[j - 1];
}

/* The chunk after `previous` (NULL: none yet): of the same tile, or the first of the next task. Returns 0 at the end. */
static int next_item(AttentionCall *call, const Item *previous, Item *item) {
    if (previous && previous->chunk + 1 < previous->tile.end) {
        item->tile = previous->tile;
        item->chunk = previous->chunk + 1;
    } else {
        int64_t task;
        do {
            task = take_task(&call->queue);
            if (task >= call->queue.num_tasks) return 0;
        } while (!find_tile(call, task, &item->tile));
        item->chunk = item->tile.begin;
    }
    locate_chunk(call, item);
    return 1;
}

/* The element of query and out at which row `row` of the tile starts, for a distance `stride` between tokens */
static int64_t row_offset(const AttentionCall *call, const Tile *tile, int64_t head, int64_t row, int64_t stride) {
    int64_t flat = tile->first_row + row;
    int64_t query_head = (tile->first_head + head) * call->group + flat % call->group;
    return (tile->first_token + flat / call->group) * stride + query_head * call->head_dim;
}

static void gather_query(const AttentionCall *call, const Tile *tile, int64_t head, Scratch *scratch) {
    int64_t D = call->head_dim;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t at = row_offset(call, tile, head, r, call->query_stride);
        if (call->is_float || !BF16_ROWS_AS_FLOAT) {
            size_t bytes = (size_t)(D * element_size(call));
            memcpy((char *)scratch->query + r * bytes, (const char *)call->query + at * element_size(call), bytes);
            continue;
        }
        float *row = (float *)scratch->query + r * D;
        for (int64_t d = 0; d < D; d++) row[d] = bf16_to_float(((const bf16 *)call->query)[at + d]);
    }
}

/* The chunk's keys from first_key on as a packed block. Columns past `count` repeat the last key and are not used. */
static void pack_keys(const AttentionCall *call, const Item *item, int64_t head, int first_key, float *packed) {
    int64_t head_bytes = call->head_dim * element_size(call), words = head_bytes / 4;
    const char *cache = call->key_cache + head * head_bytes;
    for (int column = 0; column < NB && first_key + column < item->count; column += VL) {
        const int64_t *offsets = item->offsets + first_key + column;
        int64_t w = 0;
        for (; w + VL <= words; w += VL) {
            vi rows[VL];
            UNROLL
            for (int j = 0; j < VL; j++) rows[j] = (vi)v_load((const float *)(cache + offsets[j]) + w);
            v_transpose(rows);
            UNROLL
            for (int i = 0; i < VL; i++) v_store(packed + (w + i) * NB + column, (vf)rows[i]);
        }
        for (; w < words; w++)
            for (int j = 0; j < VL; j++) memcpy(packed + w * NB + column + j, cache + offsets[j] + w * 4, 4);
    }
}

/* Fetches a part of the next item's rows into the L2 cache: blocks lie scattered, out of reach of the CPU's own
 * prefetching, and the parts are small enough for the fetches to pass while the current item is computed. */
static void prefetch_next(const AttentionCall *call, const Item *next, int64_t positions, Scratch *scratch) {
    int64_t bytes = call->heads_per_task * call->head_dim * element_size(call);
    int64_t end = scratch->prefetched + positions < next->count ? scratch->prefetched + positions : next->count;
    for (; scratch->prefetched < end; scratch->prefetched++) {
        int64_t at = next->offsets[scratch->prefetched];
        for (int64_t i = 0; i < bytes; i += 64) {
            __builtin_prefetch(call->key_cache + at + i, 0, 2);
            __builtin_prefetch(call->value_cache + at + i, 0, 2);
        }
    }
}

/* Scores of a head, not yet scaled; `next` may be NULL. */
static void score_chunk(const AttentionCall *call, const Item *item, const Item *next, int64_t head, Scratch *scratch) {
    int64_t num_parts = (item->count + NB - 1) / NB * call->heads_per_task, D = call->head_dim;
    int64_t row_bytes = D * (int64_t)(call->is_float ? sizeof(float) : sizeof(bf16_row_t));
    for (int first_key = 0; first_key < item->count; first_key += NB) {
        if (next) prefetch_next(call, next, next->count / num_parts + 1, scratch);
        pack_keys(call, item, head, first_key, scratch->keys);
        for (int64_t row = 0; row < item->tile.rows; row += MAX_ROWS) {
            int rows = (int)(item->tile.rows - row < MAX_ROWS ? item->tile.rows - row : MAX_ROWS);
            dot_tile((const char *)scratch->query + row * row_bytes, (size_t)D, rows, scratch->keys, (int)D, call->is_float,
                     scratch->scores + row * CHUNK + first_key, CHUNK);
        }
    }
}

/* Scores are scaled and become exponentials below their maximum; those that the row does not attend to become 0. */
static void exponentiate_row(const AttentionCall *call, const Item *item, Scratch *scratch, int64_t row) {
    int low = item->low[row], high = item->high[row];
    float *scores = scratch->scores + row * CHUNK;
    scratch->chunk.max[row] = -INFINITY;
    scratch->chunk.sum[row] = 0;
    if (low >= high) return;
    int first = low / VL * VL, last = (high + VL - 1) / VL * VL;
    for (int j = first; j < low; j++) scores[j] = -INFINITY;
    for (int j = high; j < last; j++) scores[j] = -INFINITY;
    vf scale = v_set1(call->scale), max = v_set1(-INFINITY), sum = {0};
    for (int j = first; j < last; j += VL) {
        vf score = v_load(scores + j) * scale;
        v_store(scores + j, score);
        max = v_max(max, score);
    }
    scratch->chunk.max[row] = v_hmax(max);
    max = v_set1(scratch->chunk.max[row]);
    for (int j = first; j < last; j += VL) {
        vf weight = v_exp(v_load(scores + j) - max);
        v_store(scores + j, weight);
        sum += weight;
    }
    scratch->chunk.sum[row] = v_sum(sum);
}

/* The arguments of a sum of values that do not change within a tile */
typedef struct {
    const char *cache; /* of the head */
    const int64_t *offsets;
    const float *weights; /* [TILE_ROWS, CHUNK] */
    float *out;           /* [TILE_ROWS, padded_dim] */
    int64_t head_dim, padded_dim;
    int is_float;
} ValueSum;

/* out[row + m] += sum over low <= j < high of weight[row + m][j] * value[j], for `vectors` vectors from dimension d */
ALWAYS_INLINE void sum_vectors(const ValueSum *sum, int is_float, int rows, int vectors, int64_t row, int64_t d, int low, int high) {
    vf acc[SUM_ROWS][SUM_VECTORS];
    int64_t padded_dim = sum->padded_dim;
    float *out = sum->out + row * padded_dim + d;
    const float *weights = sum->weights + row * CHUNK;
    int lanes = vectors > 1 ? VL : lanes_left(d, sum->head_dim);
    UNROLL
    for (int m = 0; m < rows; m++)
        UNROLL
        for (int v = 0; v < vectors; v++) acc[m][v] = v_load(out + m * padded_dim + v * VL);
    for (int j = low; j < high; j++) {
        vf value[SUM_VECTORS];
        UNROLL
        for (int v = 0; v < vectors; v++) value[v] = v_load_any(sum->cache + sum->offsets[j], d + v * VL, lanes, is_float);
        UNROLL
        for (int m = 0; m < rows; m++) {
            vf weight = v_set1(weights[m * CHUNK + j]);
            UNROLL
            for (int v = 0; v < vectors; v++) acc[m][v] = v_fma(weight, value[v], acc[m][v]);
        }
    }
    UNROLL
    for (int m = 0; m < rows; m++)
        UNROLL
        for (int v = 0; v < vectors; v++) v_store(out + m * padded_dim + v * VL, acc[m][v]);
}

ALWAYS_INLINE void sum_dimensions(const ValueSum *sum, int is_float, int rows, int64_t row, int low, int high) {
    int64_t d = 0;
    for (; d + SUM_VECTORS * VL <= sum->head_dim; d += SUM_VECTORS * VL)
        sum_vectors(sum, is_float, rows, SUM_VECTORS, row, d, low, high);
    for (; d < sum->head_dim; d += VL) sum_vectors(sum, is_float, rows, 1, row, d, low, high);
}

#define CASE(R)                                             \
    case R:                                                 \
        if (sum->is_float)                                  \
            sum_dimensions(sum, 1, R, row, low, high);      \
        else                                                \
            sum_dimensions(sum, 0, R, row, low, high);      \
        break;

static void sum_block(const ValueSum *sum, int64_t rows, int64_t row, int low, int high) {
    if (low >= high) return;
    switch (rows) {
        CASE(1)
#if SUM_ROWS >= 3
        CASE(2) CASE(3)
#endif
#if SUM_ROWS >= 6
        CASE(4) CASE(5) CASE(6)
#endif
    }
}
#undef CASE

/* SUM_ROWS rows share each value as far as all of them attend to it; what lies before and after is summed row by row. */
static void sum_values(const AttentionCall *call, const Item *item, int64_t head, Scratch *scratch) {
    ValueSum sum = {.cache = call->value_cache + head * call->head_dim * element_size(call), .offsets = item->offsets,
                    .weights = scratch->scores, .out = scratch->chunk.out, .head_dim = call->head_dim,
                    .padded_dim = call->padded_dim, .is_float = call->is_float};
    memset(sum.out, 0, (size_t)(item->tile.rows * call->padded_dim) * sizeof(float));
    for (int64_t row = 0; row < item->tile.rows; row += SUM_ROWS) {
        int64_t end = row + SUM_ROWS < item->tile.rows ? row + SUM_ROWS : item->tile.rows;
        int low = 0, high = CHUNK;
        for (int64_t r = row; r < end; r++) {
            if (item->low[r] > low) low = item->low[r];
            if (item->high[r] < high) high = item->high[r];
        }
        if (low > high) low = high = 0;
        for (int64_t r = row; r < end; r++) sum_block(&sum, 1, r, item->low[r], item->high[r] < low ? item->high[r] : low);
        sum_block(&sum, end - row, row, low, high);
        for (int64_t r = row; r < end; r++) sum_block(&sum, 1, r, item->low[r] > high ? item->low[r] : high, item->high[r]);
    }
}

static void clear(const AttentionCall *call, const Tile *tile, Partial *total) {
    for (int64_t r = 0; r < tile->rows; r++) total->max[r] = -INFINITY, total->sum[r] = 0;
    memset(total->out, 0, (size_t)(tile->rows * call->padded_dim) * sizeof(float));
}

/* Folds a chunk's result into the total of the chunks before it; a row that skips the chunk stays as it is. */
static void fold(const AttentionCall *call, const Tile *tile, Partial *total, const Partial *chunk) {
    for (int64_t r = 0; r < tile->rows; r++) {
        if (chunk->max[r] == -INFINITY) continue;
        float max = total->max[r] > chunk->max[r] ? total->max[r] : chunk->max[r];
        float factors[VL] = {total->max[r] - max, chunk->max[r] - max};
        v_store(factors, v_exp(v_load(factors)));
        vf old = v_set1(factors[0]), new = v_set1(factors[1]);
        total->max[r] = max;
        total->sum[r] = total->sum[r] * factors[0] + chunk->sum[r] * factors[1];
        float *out = total->out + r * call->padded_dim;
        const float *added = chunk->out + r * call->padded_dim;
        for (int64_t d = 0; d < call->padded_dim; d += VL)
            v_store(out + d, v_fma(v_load(added + d), new, v_load(out + d) * old));
    }
}

static void write_rows(const AttentionCall *call, const Tile *tile, int64_t head, const Partial *total) {
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t at = row_offset(call, tile, head, r, call->num_query_heads * call->head_dim);
        vf scale = v_set1(total->sum[r] == 0 ? 0 : 1.0f / total->sum[r]); /* 0: the row sees nothing */
        for (int64_t d = 0; d < call->head_dim; d += VL) {
            vf value = v_load(total->out + r * call->padded_dim + d) * scale;
            v_store_any(call->out, at + d, value, lanes_left(d, call->head_dim), call->is_float);
        }
    }
}

/* One head of a chunk, into scratch->chunk */
static void attend_chunk(const AttentionCall *call, const Item *item, const Item *next, int64_t head, Scratch *scratch) {
    gather_query(call, &item->tile, head, scratch);
    score_chunk(call, item, next, head, scratch);
    for (int64_t r = 0; r < item->tile.rows; r++) exponentiate_row(call, item, scratch, r);
    sum_values(call, item, head, scratch);
}

static void attend_item(const AttentionCall *call, const Item *item, const Item *next, Scratch *scratch) {
    const Tile *tile = &item->tile;
    scratch->prefetched = 0;
    for (int64_t head = 0; head < call->heads_per_task; head++) {
        if (call->num_splits > 1) { /* the fold comes later, when all chunks are there */
            scratch->chunk = partial_at(call->partials + tile->task * partial_floats(call));
            attend_chunk(call, item, next, head, scratch);
            continue;
        }
        Partial total = partial_at(scratch->totals + head * partial_floats(call));
        attend_chunk(call, item, next, head, scratch);
        if (item->chunk == tile->begin) clear(call, tile, &total);
        fold(call, tile, &total, &scratch->chunk);
        if (item->chunk + 1 == tile->end) write_rows(call, tile, head, &total);
    }
}

static size_t scratch_bytes(const AttentionCall *call) {
    int64_t floats = (TILE_ROWS + NB) * call->padded_dim + TILE_ROWS * CHUNK + (1 + call->heads_per_task) * partial_floats(call);
    return (sizeof(Scratch) + (size_t)floats * sizeof(float) + 127) / 64 * 64;
}

static Scratch *new_scratch(const AttentionCall *call) {
    Scratch *scratch = thread_scratch(SCRATCH_TASK, scratch_bytes(call));
    if (!scratch) return NULL;
    float *memory = (float *)((char *)scratch + (sizeof(Scratch) + 63) / 64 * 64);
    scratch->query = memory, memory += TILE_ROWS * call->padded_dim;
    scratch->keys = memory, memory += NB * call->padded_dim;
    scratch->scores = memory, memory += TILE_ROWS * CHUNK;
    scratch->chunk = partial_at(memory), memory += partial_floats(call);
    scratch->totals = memory;
    return scratch;
}

static void run_items(void *context) {
    AttentionCall *call = context;
    Scratch *scratch = new_scratch(call);
    if (!scratch) {
        __atomic_store_n(&call->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    Item *item = &scratch->items[0], *next = &scratch->items[1];
    int more = next_item(call, NULL, item);
    while (more) {
        more = next_item(call, item, next);
        attend_item(call, item, more ? next : NULL, scratch);
        Item *done = item;
        item = next, next = done;
    }
}

/* After a split: folds the chunks of every tile in the order in which attend_item would. */
static void fold_splits(AttentionCall *call, int64_t num_tasks) {
    Scratch *scratch = new_scratch(call); /* this thread's, so it is there */
    Partial total = partial_at(scratch->totals);
    Tile tile;
    for (int64_t task = 0; task < num_tasks; task++) {
        if (!find_tile(call, task, &tile)) continue;
        int first = task % call->num_splits == 0 || !find_tile(call, task - 1, &(Tile){0});
        if (first) clear(call, &tile, &total);
        Partial chunk = partial_at(call->partials + task * partial_floats(call));
        fold(call, &tile, &total, &chunk);
        int last = (task + 1) % call->num_splits == 0 || !find_tile(call, task + 1, &(Tile){0});
        if (last) write_rows(call, &tile, 0, &total);
    }
}

/* Threads take tiles of all heads if that makes enough tasks, since a position's heads are neighbours in memory; else
 * tiles of one head; else, if contexts are long, chunks of those. */
static int run(AttentionCall *call, int64_t num_threads, int64_t max_context) {
    int64_t num_chunks = (max_context + CHUNK - 1) / CHUNK, num_tasks = call->num_seqs * call->num_tiles;
    call->heads_per_task = call->num_kv_heads;
    call->num_splits = 1;
    if (num_tasks < 4 * num_threads && num_threads > 1) {
        call->heads_per_task = 1;
        num_tasks *= call->num_kv_heads;
        if (num_tasks < 4 * num_threads) call->num_splits = num_chunks;
    }
    num_tasks *= call->num_splits;
    if (call->num_splits > 1) {
        call->partials = thread_scratch(SCRATCH_CALL, (size_t)(num_tasks * partial_floats(call)) * sizeof(float));
        if (!call->partials) return 1;
    }
    call->queue = (TaskQueue){.num_tasks = num_tasks};
    run_on_threads(num_threads < num_tasks ? num_threads : num_tasks, run_items, call);
    if (call->num_splits > 1 && !call->failed) fold_splits(call, num_tasks);
    return call->failed;
}

/* query may have gaps between tokens, not between heads; bf16 needs an even head_dim; rows past the last sequence are
 * set to 0, and so are rows that see nothing. Returns non-zero if scratch memory could not be had. */
int paged_attention(int64_t num_threads, int64_t num_tokens, int64_t num_seqs, int64_t num_query_heads, int64_t num_kv_heads,
                    int64_t head_dim, int64_t block_size, int64_t window, int is_float, float scale, const void *query,
                    int64_t query_stride, const void *key_cache, const void *value_cache, const int32_t *cu_seqlens_q,
                    const int32_t *context_lens, const int32_t *block_tables, int64_t table_stride, void *out) {
    AttentionCall call = {.num_seqs = num_seqs, .num_query_heads = num_query_heads, .num_kv_heads = num_kv_heads,
                          .head_dim = head_dim, .padded_dim = (head_dim + VL - 1) / VL * VL, .block_size = block_size,
                          .group = num_query_heads / num_kv_heads, .window = window, .scale = scale, .is_float = is_float,
                          .query = query, .query_stride = query_stride, .key_cache = key_cache, .value_cache = value_cache,
                          .cu_seqlens_q = cu_seqlens_q, .context_lens = context_lens, .block_tables = block_tables,
                          .table_stride = table_stride, .out = out};
    int64_t max_rows = 0, max_context = 0, width = num_query_heads * head_dim * (is_float ? 4 : 2);
    for (int64_t s = 0; s < num_seqs; s++) {
        int64_t rows = (cu_seqlens_q[s + 1] - cu_seqlens_q[s]) * call.group;
        if (rows > max_rows) max_rows = rows;
        if (context_lens[s] > max_context) max_context = context_lens[s];
    }
    int64_t covered = num_seqs ? cu_seqlens_q[num_seqs] : 0;
    memset((char *)out + covered * width, 0, (size_t)((num_tokens - covered) * width));
    call.num_tiles = (max_rows + TILE_ROWS - 1) / TILE_ROWS;
    return max_rows ? run(&call, num_threads, max_context) : 0;
}

int prepare_qkv(int64_t num_threads, int64_t T, int64_t num_query_heads, int64_t num_key_heads, int64_t head_dim,
                int64_t rotary_dim, int is_float, int interleaved, const int64_t *positions, void *qkv, int64_t qkv_stride,
                const void *query_norm, const void *key_norm, float eps, const float *cos_sin, int64_t max_position,
                void *key_cache, void *value_cache, int64_t num_slots, const int64_t *slots);

/* prepare_qkv (layers.c), then paged_attention: one call a layer instead of four. Returns what prepare_qkv does, or 3 if
 * scratch memory could not be had. */
int qkv_attention(int64_t num_threads, int64_t num_tokens, int64_t num_seqs, int64_t num_query_heads, int64_t num_kv_heads,
                  int64_t head_dim, int64_t rotary_dim, int64_t block_size, int64_t num_blocks, int64_t window, int is_float,
                  int interleaved, float scale, float eps, const int64_t *positions, void *qkv, int64_t qkv_stride,
                  const void *query_norm, const void *key_norm, const float *cos_sin, int64_t max_position, void *key_cache,
                  void *value_cache, const int64_t *slots, const int32_t *cu_seqlens_q, const int32_t *context_lens,
                  const int32_t *block_tables, int64_t table_stride, void *out) {
    int refused = prepare_qkv(num_threads, num_tokens, num_query_heads, num_kv_heads, head_dim, rotary_dim, is_float,
                              interleaved, positions, qkv, qkv_stride, query_norm, key_norm, eps, cos_sin, max_position,
                              key_cache, value_cache, num_blocks * block_size, slots);
    if (refused) return refused;
    int failed = paged_attention(num_threads, num_tokens, num_seqs, num_query_heads, num_kv_heads, head_dim, block_size,
                                 window, is_float, scale, qkv, qkv_stride, key_cache, value_cache, cu_seqlens_q,
                                 context_lens, block_tables, table_stride, out);
    return failed ? 3 : 0;
}
