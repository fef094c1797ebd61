/* How a call of paged attention (attention.c) is cut into tiles of rows and chunks of context, and where those lie. */
#pragma once
#include "parallel.h"
#include "simd.h"

enum { CHUNK = 128, TILE_ROWS = 48 };

typedef struct {
    TaskQueue queue;
    int64_t num_seqs, num_query_heads, num_kv_heads, head_dim, padded_dim, block_size;
    int64_t group;  /* query heads a KV head */
    int64_t window; /* positions seen, own included; 0 = all */
    float scale;
    int is_float;
    int uses_amx; /* for scores */
    const void *query;
    int64_t query_stride; /* elements from token to token */
    const char *key_cache, *value_cache;
    const int32_t *cu_seqlens_q, *context_lens, *block_tables;
    int64_t table_stride;
    void *out; /* [num_tokens, num_query_heads, head_dim] */
    /* A task is a tile of rows for heads_per_task KV heads, and with a split for one chunk only. */
    int64_t num_tiles, heads_per_task, num_splits;
    float *partials; /* with a split: what every task has computed */
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
    int count;                           /* positions of the chunk up to the last that any row attends to */
    int64_t offsets[CHUNK];              /* bytes from the start of a cache to the first head of a position */
    int low[TILE_ROWS], high[TILE_ROWS]; /* a row attends to positions low .. high - 1 of the chunk */
} Item;

static inline int64_t element_size(const AttentionCall *call) { return call->is_float ? 4 : 2; }

static inline int64_t row_position(const AttentionCall *call, const Tile *tile, int64_t row) {
    return tile->first_position + (tile->first_row + row) / call->group;
}

/* Tasks in the order: sequences, groups of heads, tiles (the longest first), chunks. Returns 0 for one without work. */
static inline int find_tile(const AttentionCall *call, int64_t task, Tile *tile) {
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
    /* At least one, so that rows seeing nothing are written */
    tile->end = last < 0 ? tile->begin + 1 : last / CHUNK + 1;
    if (call->num_splits > 1) {
        int64_t chunk = task % call->num_splits;
        if (chunk < tile->begin || chunk >= tile->end) return 0;
        tile->begin = chunk, tile->end = chunk + 1;
    }
    return 1;
}

static inline void locate_chunk(const AttentionCall *call, Item *item) {
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

/* The chunk after `previous` (NULL: none yet), of the same tile or the next task's. Returns 0 at the end. */
static inline int next_item(AttentionCall *call, const Item *previous, Item *item) {
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
static inline int64_t row_offset(const AttentionCall *call, const Tile *tile, int64_t head, int64_t row,
                                 int64_t stride) {
    int64_t flat = tile->first_row + row;
    int64_t query_head = (tile->first_head + head) * call->group + flat % call->group;
    return (tile->first_token + flat / call->group) * stride + query_head * call->head_dim;
}
