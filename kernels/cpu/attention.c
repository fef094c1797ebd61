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
    int64_t num_seqs, num_query_heads, num_kv_heads, head_dim, padded_dim, block_size, group; /* group: query heads a KV head */
    int64_t window;  /* positions seen, own included; 0 = all */
    float scale;
    int is_float;
    const void *query;
    int64_t query_stride; /* elements from token to token */
    const void *key_cache, *value_cache;
    const int32_t *cu_seqlens_q, *context_lens, *block_tables;
    int64_t table_stride;
    void *out;         /* [num_tokens, num_query_heads, head_dim] */
    int64_t num_tiles; /* of the longest sequence */
    int64_t num_splits; /* chunks of the longest context if chunks are tasks of their own, else 0 */
    float *partials;    /* with splits: [tasks][num_splits][partial_floats] */
    char *scratch;      /* of every thread */
    int64_t next_scratch;
} AttentionCall;

/* The rows of one task: query heads of one KV head at neighbouring positions, position-major. */
typedef struct {
    int64_t kv_head, rows;
    int64_t first_row;      /* of the sequence's rows times group */
    int64_t first_token;    /* the sequence's first row in the batch */
    int64_t first_position; /* position of that row */
    int64_t begin, end;     /* chunks that any row attends to */
    const int32_t *block_table;
} Tile;

typedef struct {
    float *max, *sum, *out; /* [TILE_ROWS], [TILE_ROWS], [TILE_ROWS, padded_dim] */
} Partial;

typedef struct {
    void *query;  /* [TILE_ROWS, head_dim] float or bf16_row_t */
    void *keys;   /* a packed block of NB keys */
    float *scores; /* [TILE_ROWS, CHUNK], then their exponentials */
    Partial chunk, total;
    const char *key_rows[CHUNK], *value_rows[CHUNK];
    int low[TILE_ROWS], high[TILE_ROWS]; /* the row attends to positions low .. high - 1 of the chunk */
} Scratch;

static int64_t partial_floats(const AttentionCall *call) { return TILE_ROWS * (call->padded_dim + 2); }

static Partial partial_at(float *memory) {
    return (Partial){.max = memory, .sum = memory + TILE_ROWS, .out = memory + 2 * TILE_ROWS};
}

static int64_t row_position(const AttentionCall *call, const Tile *tile, int64_t row) {
    return tile->first_position + (tile->first_row + row) / call->group;
}

/* Returns 0 if the sequence has no such tile. */
static int find_tile(const AttentionCall *call, int64_t task, Tile *tile) {
    int64_t seq = task / (call->num_kv_heads * call->num_tiles);
    int64_t index = call->num_tiles - 1 - task % call->num_tiles; /* the longest first */
    int64_t num_rows = (call->cu_seqlens_q[seq + 1] - call->cu_seqlens_q[seq]) * call->group;
    tile->kv_head = task / call->num_tiles % call->num_kv_heads;
    tile->first_row = index * TILE_ROWS;
    if (tile->first_row >= num_rows) return 0;
    tile->rows = num_rows - tile->first_row < TILE_ROWS ? num_rows - tile->first_row : TILE_ROWS;
    tile->first_token = call->cu_seqlens_q[seq];
    tile->first_position = call->context_lens[seq] - num_rows / call->group;
    tile->block_table = call->block_tables + seq * call->table_stride;
    int64_t first = row_position(call, tile, 0) + 1 - call->window;
    tile->begin = call->window && first > 0 ? first / CHUNK : 0;
    tile->end = row_position(call, tile, tile->rows - 1) / CHUNK + 1;
    return 1;
}

/* The element of query and out at which row `row` of the tile starts, for a distance `stride` between tokens */
static int64_t row_offset(const AttentionCall *call, const Tile *tile, int64_t row, int64_t stride) {
    int64_t flat = tile->first_row + row;
    int64_t head = tile->kv_head * call->group + flat % call->group;
    return (tile->first_token + flat / call->group) * stride + head * call->head_dim;
}

static void gather_query(const AttentionCall *call, const Tile *tile, Scratch *scratch) {
    int64_t D = call->head_dim;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t at = row_offset(call, tile, r, call->query_stride);
        if (call->is_float) {
            memcpy((float *)scratch->query + r * D, (const float *)call->query + at, (size_t)D * sizeof(float));
            continue;
        }
        const bf16 *source = (const bf16 *)call->query + at;
        bf16_row_t *row = (bf16_row_t *)scratch->query + r * D;
        for (int64_t d = 0; d < D; d++) row[d] = BF16_ROWS_AS_FLOAT ? (bf16_row_t)bf16_to_float(source[d]) : (bf16_row_t)source[d];
    }
}

/* Where the chunk's keys and values lie, and which of them each row attends to; returns how many any row does. */
static int locate_chunk(const AttentionCall *call, const Tile *tile, int64_t chunk, Scratch *scratch) {
    int64_t start = chunk * CHUNK;
    int count = 0;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t position = row_position(call, tile, r);
        int64_t low = call->window ? position + 1 - call->window - start : 0, high = position + 1 - start;
        scratch->low[r] = low < 0 ? 0 : low > CHUNK ? CHUNK : (int)low;
        scratch->high[r] = high < 0 ? 0 : high > CHUNK ? CHUNK : (int)high;
        if (scratch->high[r] > count) count = scratch->high[r];
    }
    int64_t head_bytes = call->head_dim * (call->is_float ? 4 : 2), slot_bytes = call->num_kv_heads * head_bytes;
    int64_t block = start / call->block_size, offset = start % call->block_size;
    for (int j = 0; j < count; j++) {
        int64_t slot = tile->block_table[block] * call->block_size + offset;
        int64_t at = slot * slot_bytes + tile->kv_head * head_bytes;
        scratch->key_rows[j] = (const char *)call->key_cache + at;
        scratch->value_rows[j] = (const char *)call->value_cache + at;
        if (++offset == call->block_size) block++, offset = 0;
    }
    return count;
}

/* NB rows of `words` 32-bit words (floats, or pairs of bf16) become `words` rows of NB lanes; missing keys read as 0. */
static void pack_keys(const char **rows, int count, int64_t words, uint32_t *packed) {
    for (int j = 0; j < NB; j++) {
        for (int64_t w = 0; w < words; w++) {
            uint32_t word = 0;
            if (j < count) memcpy(&word, rows[j] + w * 4, 4);
            packed[w * NB + j] = word;
        }
    }
}

ALWAYS_INLINE void score_rows(const AttentionCall *call, int rows, int64_t row, int first_key, Scratch *scratch) {
    vf acc[MAX_ROWS][NV];
    int64_t D = call->head_dim;
    if (call->is_float)
        dot_tile_float(rows, acc, (const float *)scratch->query + row * D, (size_t)D, scratch->keys, (int)D);
    else
        dot_tile_bf16(rows, acc, (const bf16_row_t *)scratch->query + row * D, (size_t)D, scratch->keys, (int)(D / 2));
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < NV; v++)
            v_store(scratch->scores + (row + m) * CHUNK + first_key + v * VL, acc[m][v] * v_set1(call->scale));
}

#define CASE(R)                                             \
    case R:                                                 \
        score_rows(call, R, row, first_key, scratch);       \
        break;

static void score_chunk(const AttentionCall *call, const Tile *tile, int count, Scratch *scratch) {
    int64_t words = call->is_float ? call->head_dim : call->head_dim / 2;
    for (int first_key = 0; first_key < count; first_key += NB) {
        pack_keys(scratch->key_rows + first_key, count - first_key, words, scratch->keys);
        for (int64_t row = 0; row < tile->rows; row += MAX_ROWS) {
            switch (tile->rows - row < MAX_ROWS ? tile->rows - row : MAX_ROWS) {
                CASE(1)
#if MAX_ROWS >= 3
                CASE(2) CASE(3)
#endif
#if MAX_ROWS >= 12
                CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
        }
    }
}
#undef CASE

/* Scores become exponentials below their maximum; those that the row does not attend to become 0. */
static void exponentiate_row(Scratch *scratch, int64_t row) {
    int low = scratch->low[row], high = scratch->high[row];
    float *scores = scratch->scores + row * CHUNK;
    scratch->chunk.max[row] = -INFINITY;
    scratch->chunk.sum[row] = 0;
    if (low >= high) return;
    int first = low / VL * VL, last = (high + VL - 1) / VL * VL;
    for (int j = first; j < low; j++) scores[j] = -INFINITY;
    for (int j = high; j < last; j++) scores[j] = -INFINITY;
    vf max = v_load(scores + first), sum = {0};
    for (int j = first + VL; j < last; j += VL) max = v_max(max, v_load(scores + j));
    scratch->chunk.max[row] = v_hmax(max);
    max = v_set1(scratch->chunk.max[row]);
    for (int j = first; j < last; j += VL) {
        vf weight = v_exp(v_load(scores + j) - max);
        v_store(scores + j, weight);
        sum += weight;
    }
    scratch->chunk.sum[row] = v_sum(sum);
}

/* out[row + m] += sum over low <= j < high of weight[row + m][j] * value[j], for `vectors` vectors from dimension d */
ALWAYS_INLINE void sum_values(const AttentionCall *call, const Scratch *scratch, int rows, int vectors, int64_t row, int64_t d,
                              int low, int high, int is_float) {
    vf acc[SUM_ROWS][SUM_VECTORS];
    float *out = scratch->chunk.out + row * call->padded_dim + d;
    const float *weights = scratch->scores + row * CHUNK;
    int lanes = lanes_left(d, call->head_dim);
UNROLL
    for (int m = 0; m < rows; m++)
UNROLL
        for (int v = 0; v < vectors; v++) acc[m][v] = v_load(out + m * call->padded_dim + v * VL);
    for (int j = low; j < high; j++) {
        vf value[SUM_VECTORS];
UNROLL
        for (int v = 0; v < vectors; v++)
            value[v] = v_load_any(scratch->value_rows[j], d + v * VL, vectors > 1 ? VL : lanes, is_float);
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
        for (int v = 0; v < vectors; v++) v_store(out + m * call->padded_dim + v * VL, acc[m][v]);
}

ALWAYS_INLINE void sum_values_rows(const AttentionCall *call, const Scratch *scratch, int rows, int64_t row, int low, int high, int is_float) {
    int64_t d = 0;
    for (; d + SUM_VECTORS * VL <= call->head_dim; d += SUM_VECTORS * VL)
        sum_values(call, scratch, rows, SUM_VECTORS, row, d, low, high, is_float);
    for (; d < call->head_dim; d += VL) sum_values(call, scratch, rows, 1, row, d, low, high, is_float);
}

#define CASE(R)                                                                                                   \
    case R:                                                                                                           \
        if (call->is_float)                                                                                           \
            sum_values_rows(call, scratch, R, row, low, high, 1);                                                     \
        else                                                                                                          \
            sum_values_rows(call, scratch, R, row, low, high, 0);                                                     \
        break;

static void sum_block(const AttentionCall *call, const Scratch *scratch, int64_t rows, int64_t row, int low, int high) {
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
static void sum_values_tile(const AttentionCall *call, const Tile *tile, Scratch *scratch) {
    for (int64_t i = 0; i < tile->rows * call->padded_dim; i++) scratch->chunk.out[i] = 0;
    for (int64_t row = 0; row < tile->rows; row += SUM_ROWS) {
        int64_t end = row + SUM_ROWS < tile->rows ? row + SUM_ROWS : tile->rows;
        int low = 0, high = CHUNK;
        for (int64_t r = row; r < end; r++) {
            if (scratch->low[r] > low) low = scratch->low[r];
            if (scratch->high[r] < high) high = scratch->high[r];
        }
        if (low > high) low = high = 0;
        for (int64_t r = row; r < end; r++)
            sum_block(call, scratch, 1, r, scratch->low[r], scratch->high[r] < low ? scratch->high[r] : low);
        sum_block(call, scratch, end - row, row, low, high);
        for (int64_t r = row; r < end; r++)
            sum_block(call, scratch, 1, r, scratch->low[r] > high ? scratch->low[r] : high, scratch->high[r]);
    }
}

static void attend_chunk(const AttentionCall *call, const Tile *tile, int64_t chunk, Scratch *scratch) {
    int count = locate_chunk(call, tile, chunk, scratch);
    score_chunk(call, tile, count, scratch);
    for (int64_t r = 0; r < tile->rows; r++) exponentiate_row(scratch, r);
    sum_values_tile(call, tile, scratch);
}

static void clear(const AttentionCall *call, const Tile *tile, Partial *total) {
    for (int64_t r = 0; r < tile->rows; r++) total->max[r] = -INFINITY, total->sum[r] = 0;
    for (int64_t i = 0; i < tile->rows * call->padded_dim; i++) total->out[i] = 0;
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

static void write_rows(const AttentionCall *call, const Tile *tile, const Partial *total) {
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t at = row_offset(call, tile, r, call->num_query_heads * call->head_dim);
        vf scale = v_set1(total->sum[r] > 0 ? 1.0f / total->sum[r] : total->sum[r]); /* 0: it saw nothing; NaN stays */
        for (int64_t d = 0; d < call->head_dim; d += VL) {
            vf value = v_load(total->out + r * call->padded_dim + d) * scale;
            v_store_any(call->out, at + d, value, lanes_left(d, call->head_dim), call->is_float);
        }
    }
}

/* Bytes of a thread's Scratch with the arrays that it points to */
static size_t scratch_bytes(const AttentionCall *call) {
    size_t floats = (TILE_ROWS + NB) * call->padded_dim + TILE_ROWS * CHUNK + 2 * partial_floats(call);
    return (sizeof(Scratch) + floats * sizeof(float) + 127) / 64 * 64;
}

/* Each thread that enters takes the next piece of the call's scratch memory. */
static Scratch *take_scratch(AttentionCall *call) {
    int64_t index = __atomic_fetch_add(&call->next_scratch, 1, __ATOMIC_RELAXED);
    Scratch *scratch = (Scratch *)(call->scratch + index * scratch_bytes(call));
    float *memory = (float *)((char *)scratch + (sizeof(Scratch) + 63) / 64 * 64);
    scratch->query = memory, memory += TILE_ROWS * call->padded_dim;
    scratch->keys = memory, memory += NB * call->padded_dim;
    scratch->scores = memory, memory += TILE_ROWS * CHUNK;
    scratch->chunk = partial_at(memory), memory += partial_floats(call);
    scratch->total = partial_at(memory);
    return scratch;
}

/* A tile over all of its chunks */
static void run_tiles(void *context) {
    AttentionCall *call = context;
    Scratch *scratch = take_scratch(call);
    Tile tile;
    for (int64_t task; (task = take_task(&call->queue)) < call->queue.num_tasks;) {
        if (!find_tile(call, task, &tile)) continue;
        gather_query(call, &tile, scratch);
        clear(call, &tile, &scratch->total);
        for (int64_t chunk = tile.begin; chunk < tile.end; chunk++) {
            attend_chunk(call, &tile, chunk, scratch);
            fold(call, &tile, &scratch->total, &scratch->chunk);
        }
        write_rows(call, &tile, &scratch->total);
    }
}

/* One chunk of a tile, into its place in `partials` */
static void run_chunks(void *context) {
    AttentionCall *call = context;
    Scratch *scratch = take_scratch(call);
    Tile tile;
    for (int64_t task; (task = take_task(&call->queue)) < call->queue.num_tasks;) {
        int64_t chunk = task % call->num_splits;
        if (!find_tile(call, task / call->num_splits, &tile) || chunk < tile.begin || chunk >= tile.end) continue;
        gather_query(call, &tile, scratch);
        scratch->chunk = partial_at(call->partials + task * partial_floats(call));
        attend_chunk(call, &tile, chunk, scratch);
    }
}

/* The chunks of a tile, folded in the order in which run_tiles would */
static void run_folds(void *context) {
    AttentionCall *call = context;
    Scratch *scratch = take_scratch(call);
    Tile tile;
    for (int64_t task; (task = take_task(&call->queue)) < call->queue.num_tasks;) {
        if (!find_tile(call, task, &tile)) continue;
        clear(call, &tile, &scratch->total);
        for (int64_t chunk = tile.begin; chunk < tile.end; chunk++) {
            Partial partial = partial_at(call->partials + (task * call->num_splits + chunk) * partial_floats(call));
            fold(call, &tile, &scratch->total, &partial);
        }
        write_rows(call, &tile, &scratch->total);
    }
}

static int run(AttentionCall *call, int64_t num_threads, int64_t max_context) {
    int64_t num_tiles = call->num_seqs * call->num_kv_heads * call->num_tiles, num_chunks = (max_context + CHUNK - 1) / CHUNK;
    if (num_tiles * num_chunks == 1) num_threads = 1;
    call->scratch = aligned_alloc(64, (size_t)num_threads * scratch_bytes(call));
    if (!call->scratch) return 1;
    int split = num_threads > 1 && num_tiles < 4 * num_threads && num_chunks > 1;
    if (split) {
        call->num_splits = num_chunks;
        call->partials = malloc((size_t)(num_tiles * num_chunks * partial_floats(call)) * sizeof(float));
        split = call->partials != NULL;
    }
    if (split) {
        call->queue = (TaskQueue){.num_tasks = num_tiles * num_chunks};
        run_on_threads(num_threads, run_chunks, call);
        call->next_scratch = 0;
    }
    call->queue = (TaskQueue){.num_tasks = num_tiles};
    run_on_threads(split ? 1 : num_threads, split ? run_folds : run_tiles, call);
    free(call->partials);
    free(call->scratch);
    return 0;
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
