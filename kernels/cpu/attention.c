/* Causal attention of a ragged batch over the paged KV cache, read in place.
 *
 * Row t of sequence s stands at position p and attends to positions max(0, p - window + 1) .. p. All query heads of one
 * KV head, and all rows of a sequence up to TILE_ROWS, are one tile, so keys and values are read once for them.
 *
 * Positions are cut into chunks of CHUNK, counted from position 0. For each chunk a row computes
 *     m_c = max score,  l_c = sum of exp(score - m_c),  o_c = sum of exp(score - m_c) * value   (in order of position)
 * and the chunks' results are folded in order of position. Scores, exponentials and sums are float. Where the chunks
 * lie depends on absolute positions only, and a row never touches a position that it does not attend to; so its result
 * is the same bit for bit however many rows and sequences the call has, however a prompt was split over calls, and
 * whether the chunks of a long context were computed by one thread or by several (`split`).
 *
 * Caches are [num_blocks, block_size, num_kv_heads, head_dim]. For the scores NB keys are turned into a packed block
 * (dot_tile.h), which makes them the columns of a small matrix product with lanes over keys.
 */
#include <math.h>

#include "amx_tile.h"
#include "attention_tile.h"
#include "dot_tile.h"
#include "layers.h"
#include "value_sum.h"

typedef struct {
    float *max, *sum, *out; /* [TILE_ROWS], [TILE_ROWS], [TILE_ROWS, padded_dim] */
} Partial;

typedef struct {
    Item items[2]; /* the one being computed and the one after it, which is being prefetched */
    void *query;   /* [TILE_ROWS, head_dim] float or bf16_row_t, of one head */
    void *keys;    /* a packed block of NB keys */
    float *scores; /* [TILE_ROWS, CHUNK], then their exponentials: the weights of values */
    /* For the matrix unit: the weights as sums of two bf16, [TILE_ROWS, CHUNK] each, and values of AMX_DEPTH positions */
    bf16 *high, *low, *values;
    Partial chunk;  /* where the results of the present one go: `spare`, or straight to where they are wanted */
    Partial spare;
    float *totals; /* [heads_per_task][partial_floats] */
    int rows_set;  /* see amx_tile.h */
} Scratch;

static int64_t partial_floats(const AttentionCall *call) { return TILE_ROWS * (call->padded_dim + 2); }

static Partial partial_at(float *memory) {
    return (Partial){.max = memory, .sum = memory + TILE_ROWS, .out = memory + 2 * TILE_ROWS};
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

/* Scores of a head, not yet scaled */
static void score_chunk(const AttentionCall *call, const Item *item, int64_t head, Scratch *scratch) {
    int64_t D = call->head_dim;
    int64_t row_bytes = D * (int64_t)(call->is_float ? sizeof(float) : sizeof(bf16_row_t));
    int64_t most = call->uses_amx ? AMX_ROWS : MAX_ROWS, num_tiles = (item->tile.rows + most - 1) / most;
    int64_t step = (item->tile.rows + num_tiles - 1) / num_tiles;
    for (int first_key = 0; first_key < item->count; first_key += NB) {
        pack_keys(call, item, head, first_key, scratch->keys);
        for (int64_t row = 0; row < item->tile.rows; row += step) {
            int rows = (int)(item->tile.rows - row < step ? item->tile.rows - row : step);
            const char *query = (const char *)scratch->query + row * row_bytes;
            float *scores = scratch->scores + row * CHUNK + first_key;
            if (call->uses_amx)
                amx_dot_tile((const bf16 *)query, (size_t)D, rows, scratch->keys, (int)D, scores, CHUNK,
                             &scratch->rows_set);
            else
                dot_tile(query, (size_t)D, rows, scratch->keys, (int)D, call->is_float, scores, CHUNK);
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
    for (int j = first; j < last; j += VL) max = v_max(max, v_load(scores + j));
    scratch->chunk.max[row] = v_hmax(max) * call->scale; /* which is positive */
    vf shift = v_set1(-scratch->chunk.max[row]);
    for (int j = first; j < last; j += VL) {
        vf weight = v_exp(v_fma(v_load(scores + j), scale, shift));
        v_store(scores + j, weight);
        sum += weight;
        if (call->uses_amx) {
            v_store_bf16(scratch->high + row * CHUNK + j, weight);
            v_store_bf16(scratch->low + row * CHUNK + j, weight - v_round_bf16(weight));
        }
    }
    scratch->chunk.sum[row] = v_sum(sum);
}

/* Adds the values of positions low[r] .. high[r] - 1 to each row r. SUM_ROWS rows share each value as far as all of them
 * attend to it; what lies before and after is summed row by row. */
static void sum_positions(ValueSum *sum, int64_t num_rows, const int *lows, const int *highs) {
    for (int64_t row = 0; row < num_rows; row += SUM_ROWS) {
        int64_t end = row + SUM_ROWS < num_rows ? row + SUM_ROWS : num_rows;
        int low = 0, high = CHUNK;
        for (int64_t r = row; r < end; r++) {
            if (lows[r] > low) low = lows[r];
            if (highs[r] < high) high = highs[r];
        }
        if (low > high) low = high = 0;
        for (int64_t r = row; r < end; r++) sum_block(sum, 1, r, lows[r], highs[r] < low ? highs[r] : low);
        sum_block(sum, end - row, row, low, high);
        if (high > sum->next_begin) sum->next_begin = high; /* the rows that follow read the same positions */
        for (int64_t r = row; r < end; r++) sum_block(sum, 1, r, lows[r] > high ? lows[r] : high, highs[r]);
    }
}

/* Adds in the matrix unit the values of whole blocks of AMX_DEPTH positions, counted from the chunk's start, to the rows
 * that attend to all of a block: [from[r], to[r]) of each row r, at the row's end where it has none. Which blocks those
 * are is the row's own affair; and since windows move on with the rows, the rows of a block are neighbours. */
static void sum_whole_blocks(const AttentionCall *call, const Item *item, Scratch *scratch, ValueSum *sum, int *from,
                             int *to) {
    for (int64_t r = 0; r < item->tile.rows; r++) {
        from[r] = (item->low[r] + AMX_DEPTH - 1) / AMX_DEPTH * AMX_DEPTH;
        to[r] = item->high[r] / AMX_DEPTH * AMX_DEPTH;
        if (from[r] >= to[r]) from[r] = to[r] = item->high[r];
    }
    for (int block = 0; block + AMX_DEPTH <= item->count; block += AMX_DEPTH) {
        int64_t row = 0, end = item->tile.rows;
        while (row < end && (from[row] > block || to[row] < block + AMX_DEPTH)) row++;
        while (end > row && (from[end - 1] > block || to[end - 1] < block + AMX_DEPTH)) end--;
        if (row == end) continue;
        pack_values(sum, block, AMX_DEPTH, scratch->values);
        if (block + AMX_DEPTH > sum->next_begin) sum->next_begin = block + AMX_DEPTH;
        for (; row < end; row += AMX_ADDED_ROWS) {
            int rows = (int)(end - row < AMX_ADDED_ROWS ? end - row : AMX_ADDED_ROWS);
            int64_t at = row * CHUNK + block;
            amx_add_values(scratch->high + at, scratch->low + at, CHUNK, rows, scratch->values, (int)call->head_dim,
                           sum->out + row * call->padded_dim, (size_t)call->padded_dim, &scratch->rows_set);
        }
    }
}

/* The chunk's values under their weights; `next` may be NULL. */
static void sum_values(const AttentionCall *call, const Item *item, const Item *next, int64_t head, Scratch *scratch) {
    int64_t head_offset = head * call->head_dim * element_size(call);
    ValueSum sum = {.cache = call->value_cache + head_offset,
                    .offsets = item->offsets,
                    .weights = scratch->scores,
                    .weight_stride = CHUNK,
                    .out = scratch->chunk.out,
                    .head_dim = call->head_dim,
                    .padded_dim = call->padded_dim,
                    .is_float = call->is_float};
    if (next && item->count) {
        sum.next_keys = call->key_cache + head_offset, sum.next_values = call->value_cache + head_offset;
        sum.next_offsets = next->offsets, sum.next_count = next->count;
        sum.next_step = (next->count + item->count - 1) / item->count;
    }
    memset(sum.out, 0, (size_t)(item->tile.rows * call->padded_dim) * sizeof(float));
    if (call->uses_amx) {
        int from[TILE_ROWS], to[TILE_ROWS];
        sum_whole_blocks(call, item, scratch, &sum, from, to);
        sum_positions(&sum, item->tile.rows, item->low, from);
        sum_positions(&sum, item->tile.rows, to, item->high);
    } else {
        sum_positions(&sum, item->tile.rows, item->low, item->high);
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
static void attend_chunk(const AttentionCall *call, const Item *item, const Item *next, int64_t head,
                         Scratch *scratch) {
    gather_query(call, &item->tile, head, scratch);
    score_chunk(call, item, head, scratch);
    for (int64_t r = 0; r < item->tile.rows; r++) exponentiate_row(call, item, scratch, r);
    sum_values(call, item, next, head, scratch);
}

static void attend_item(const AttentionCall *call, const Item *item, const Item *next, Scratch *scratch) {
    const Tile *tile = &item->tile;
    for (int64_t head = 0; head < call->heads_per_task; head++) {
        if (call->num_splits > 1) { /* the fold comes later, when all chunks are there */
            scratch->chunk = partial_at(call->partials + tile->task * partial_floats(call));
            attend_chunk(call, item, next, head, scratch);
            continue;
        }
        Partial total = partial_at(scratch->totals + head * partial_floats(call));
        int is_first = item->chunk == tile->begin;
        scratch->chunk = is_first ? total : scratch->spare;
        attend_chunk(call, item, next, head, scratch);
        if (!is_first) fold(call, tile, &total, &scratch->chunk);
        if (item->chunk + 1 == tile->end) write_rows(call, tile, head, &total);
    }
}

static size_t scratch_bytes(const AttentionCall *call) {
    int64_t floats =
        (TILE_ROWS + NB) * call->padded_dim + TILE_ROWS * CHUNK + (1 + call->heads_per_task) * partial_floats(call);
    if (call->uses_amx) floats += TILE_ROWS * CHUNK + AMX_DEPTH * call->head_dim / 2;
    return (sizeof(Scratch) + (size_t)floats * sizeof(float) + 127) / 64 * 64;
}

static Scratch *new_scratch(const AttentionCall *call) {
    Scratch *scratch = thread_scratch(SCRATCH_TASK, scratch_bytes(call));
    if (!scratch) return NULL;
    float *memory = (float *)((char *)scratch + (sizeof(Scratch) + 63) / 64 * 64);
    scratch->query = memory, memory += TILE_ROWS * call->padded_dim;
    scratch->keys = memory, memory += NB * call->padded_dim;
    scratch->scores = memory, memory += TILE_ROWS * CHUNK;
    scratch->spare = partial_at(memory), memory += partial_floats(call);
    scratch->totals = memory, memory += call->heads_per_task * partial_floats(call);
    if (call->uses_amx) {
        scratch->high = (bf16 *)memory, scratch->low = scratch->high + TILE_ROWS * CHUNK;
        scratch->values = scratch->low + TILE_ROWS * CHUNK;
    }
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
    if (call->uses_amx) amx_begin(&scratch->rows_set);
    int more = next_item(call, NULL, item);
    while (more) {
        more = next_item(call, item, next);
        attend_item(call, item, more ? next : NULL, scratch);
        Item *done = item;
        item = next, next = done;
    }
    if (call->uses_amx) amx_end();
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
int paged_attention(int64_t num_threads, int64_t num_tokens, int64_t num_seqs, int64_t num_query_heads,
                    int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t window, int is_float,
                    float scale, const void *query, int64_t query_stride, const void *key_cache,
                    const void *value_cache, const int32_t *cu_seqlens_q, const int32_t *context_lens,
                    const int32_t *block_tables, int64_t table_stride, void *out) {
    AttentionCall call = {.num_seqs = num_seqs,
                          .num_query_heads = num_query_heads,
                          .num_kv_heads = num_kv_heads,
                          .head_dim = head_dim,
                          .padded_dim = (head_dim + VL - 1) / VL * VL,
                          .block_size = block_size,
                          .group = num_query_heads / num_kv_heads,
                          .window = window,
                          .scale = scale,
                          .is_float = is_float,
                          .uses_amx = !is_float && head_dim % AMX_DEPTH == 0 && has_amx(),
                          .query = query,
                          .query_stride = query_stride,
                          .key_cache = key_cache,
                          .value_cache = value_cache,
                          .cu_seqlens_q = cu_seqlens_q,
                          .context_lens = context_lens,
                          .block_tables = block_tables,
                          .table_stride = table_stride,
                          .out = out};
    int64_t max_rows = 0, max_context = 0, work = 0, width = num_query_heads * head_dim * (is_float ? 4 : 2);
    for (int64_t s = 0; s < num_seqs; s++) {
        int64_t rows = (cu_seqlens_q[s + 1] - cu_seqlens_q[s]) * call.group;
        if (rows > max_rows) max_rows = rows;
        if (context_lens[s] > max_context) max_context = context_lens[s];
        work += context_lens[s] * num_kv_heads * head_dim * (rows + 8); /* to read a key costs as much as 8 rows */
    }
    int64_t covered = num_seqs ? cu_seqlens_q[num_seqs] : 0;
    memset((char *)out + covered * width, 0, (size_t)((num_tokens - covered) * width));
    call.num_tiles = (max_rows + TILE_ROWS - 1) / TILE_ROWS;
    if (work < 1 << 18) num_threads = 1; /* some microseconds: not worth a second core */
    return max_rows ? run(&call, num_threads, max_context) : 0;
}

/* prepare_qkv (layers.c), then paged_attention: one call a layer instead of four. Returns what prepare_qkv does, or 3
 * if scratch memory could not be had. */
int qkv_attention(int64_t num_threads, int64_t num_tokens, int64_t num_seqs, int64_t num_query_heads,
                  int64_t num_kv_heads, int64_t head_dim, int64_t rotary_dim, int64_t block_size, int64_t num_blocks,
                  int64_t window, int is_float, int interleaved, float scale, float eps, const int64_t *positions,
                  void *qkv, int64_t qkv_stride, const void *query_norm, const void *key_norm, const float *cos_sin,
                  int64_t max_position, void *key_cache, void *value_cache, const int64_t *slots,
                  const int32_t *cu_seqlens_q, const int32_t *context_lens, const int32_t *block_tables,
                  int64_t table_stride, void *out) {
    int refused = prepare_qkv(num_threads, num_tokens, num_query_heads, num_kv_heads, head_dim, rotary_dim, is_float,
                              interleaved, positions, qkv, qkv_stride, query_norm, key_norm, eps, cos_sin, max_position,
                              key_cache, value_cache, num_blocks * block_size, slots);
    if (refused) return refused;
    int failed = paged_attention(num_threads, num_tokens, num_seqs, num_query_heads, num_kv_heads, head_dim, block_size,
                                 window, is_float, scale, qkv, qkv_stride, key_cache, value_cache, cu_seqlens_q,
                                 context_lens, block_tables, table_stride, out);
    return failed ? 3 : 0;
}
