/* The layers between the matrix products, each one pass over its rows: RMSNorm, SiLU-gated product, rotary embedding,
 * storing keys and values, all that is done to queries and keys at once, and the embedding lookup in packed weights.
 * Values are bf16 or float (`is_float`), arithmetic is float, every result is rounded once. A row's result is a
 * function of that row only.
 */
#include "layers.h"

#include <math.h>

#include "dot_tile.h"
#include "parallel.h"

typedef struct RowsCall RowsCall;
typedef void (*RowKernel)(const RowsCall *call, int64_t row);

/* One call over rows; each kernel reads the fields that its launcher below sets. */
struct RowsCall {
    TaskQueue queue; /* a task: ROWS_PER_TASK rows */
    RowKernel kernel;
    int64_t num_rows, width;
    const void *x;
    int64_t x_stride;
    void *out;
    void *residual;
    const void *weight;
    float eps;
    const void *second; /* of two that are joined */
    int64_t second_stride;
    const void *second_weight;
    const int64_t *positions;
    int second_leads;
};

enum { ROWS_PER_TASK = 8, ELEMENTS_WORTH_A_THREAD = 1 << 14 };

static void run_rows(void *context) {
    RowsCall *call = context;
    for (int64_t task; (task = take_task(&call->queue)) < call->queue.num_tasks;) {
        int64_t end = (task + 1) * ROWS_PER_TASK < call->num_rows ? (task + 1) * ROWS_PER_TASK : call->num_rows;
        for (int64_t row = task * ROWS_PER_TASK; row < end; row++) call->kernel(call, row);
    }
}

static void launch_rows(int64_t num_threads, RowsCall *call) {
    call->queue = (TaskQueue){.num_tasks = (call->num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, .next = 0};
    if (call->num_rows * call->width < 2 * ELEMENTS_WORTH_A_THREAD) num_threads = 1;
    run_on_threads(num_threads, run_rows, call);
}

/* RMSNorm: out = x / sqrt(mean(x^2) + eps) * weight; with a residual, x + residual takes the place of x. */

/* out[out_at + i] = x[at + i] * scale * weight[i], x and out being one array or two */
ALWAYS_INLINE void scale_row(const void *x, int64_t at, void *out, int64_t out_at, const void *weight, int64_t H,
                             float squares, float eps, int is_float) {
    vf scale = v_set1(1.0f / sqrtf(squares / (float)H + eps));
    for (int64_t i = 0; i < H; i += VL) {
        int lanes = lanes_left(i, H);
        vf value = v_load_any(x, at + i, lanes, is_float) * scale;
        v_store_any(out, out_at + i, value * v_load_any(weight, i, lanes, is_float), lanes, is_float);
    }
}

/* out[out_at + i] = x[at + i] / sqrt(mean(x^2) + eps) * weight[i], likewise */
ALWAYS_INLINE void norm_span(const void *x, int64_t at, void *out, int64_t out_at, const void *weight, int64_t H,
                             float eps, int is_float) {
    vf squares = {0};
    for (int64_t i = 0; i < H; i += VL) {
        vf value = v_load_any(x, at + i, lanes_left(i, H), is_float);
        squares = v_fma(value, value, squares);
    }
    scale_row(x, at, out, out_at, weight, H, v_sum(squares), eps, is_float);
}

ALWAYS_INLINE void norm_row(const RowsCall *call, int64_t row, int is_float) {
    int64_t H = call->width;
    norm_span(call->x, row * call->x_stride, call->out, row * H, call->weight, H, call->eps, is_float);
}

ALWAYS_INLINE void add_norm_row(const RowsCall *call, int64_t row, int is_float) {
    int64_t H = call->width, at = row * call->x_stride, out_at = row * H;
    vf squares = {0};
    for (int64_t i = 0; i < H; i += VL) {
        int lanes = lanes_left(i, H);
        vf value = v_load_any(call->x, at + i, lanes, is_float);
        value += v_load_any(call->residual, out_at + i, lanes, is_float);
        v_store_any(call->residual, out_at + i, value, lanes, is_float);
        if (!is_float) value = v_load_any(call->residual, out_at + i, lanes, is_float); /* the rounded sum */
        squares = v_fma(value, value, squares);
    }
    scale_row(call->residual, out_at, call->out, out_at, call->weight, H, v_sum(squares), call->eps, is_float);
}

static void norm_row_float(const RowsCall *call, int64_t row) { norm_row(call, row, 1); }
static void norm_row_bf16(const RowsCall *call, int64_t row) { norm_row(call, row, 0); }
static void add_norm_row_float(const RowsCall *call, int64_t row) { add_norm_row(call, row, 1); }
static void add_norm_row_bf16(const RowsCall *call, int64_t row) { add_norm_row(call, row, 0); }

/* residual [T, H] may be NULL; otherwise it is replaced by x + residual. */
void rms_norm(int64_t num_threads, int64_t T, int64_t H, int is_float, const void *x, int64_t x_stride, void *residual,
              const void *weight, void *out, float eps) {
    RowKernel kernel =
        residual ? (is_float ? add_norm_row_float : add_norm_row_bf16) : (is_float ? norm_row_float : norm_row_bf16);
    RowsCall call = {.kernel = kernel,
                     .num_rows = T,
                     .width = H,
                     .x = x,
                     .x_stride = x_stride,
                     .residual = residual,
                     .weight = weight,
                     .out = out,
                     .eps = eps};
    launch_rows(num_threads, &call);
}

/* A row of out: the norms of a row of x and of one of the second input, side by side. x counts as zeros at position 0. */

ALWAYS_INLINE void join_norms_row(const RowsCall *call, int64_t row, int is_float) {
    int64_t H = call->width, out_at = row * 2 * H;
    int64_t x_at = out_at + (call->second_leads ? H : 0), second_at = out_at + (call->second_leads ? 0 : H);
    size_t size = is_float ? sizeof(float) : sizeof(bf16);
    if (call->positions[row] == 0)
        memset((char *)call->out + x_at * size, 0, H * size);
    else
        norm_span(call->x, row * call->x_stride, call->out, x_at, call->weight, H, call->eps, is_float);
    norm_span(call->second, row * call->second_stride, call->out, second_at, call->second_weight, H, call->eps,
              is_float);
}

static void join_norms_row_float(const RowsCall *call, int64_t row) { join_norms_row(call, row, 1); }
static void join_norms_row_bf16(const RowsCall *call, int64_t row) { join_norms_row(call, row, 0); }

void join_norms(int64_t num_threads, int64_t T, int64_t H, int is_float, int second_leads, float eps,
                const int64_t *positions, const void *x, int64_t x_stride, const void *weight, const void *second,
                int64_t second_stride, const void *second_weight, void *out) {
    RowsCall call = {.kernel = is_float ? join_norms_row_float : join_norms_row_bf16,
                     .num_rows = T,
                     .width = H,
                     .x = x,
                     .x_stride = x_stride,
                     .out = out,
                     .weight = weight,
                     .eps = eps,
                     .second = second,
                     .second_stride = second_stride,
                     .second_weight = second_weight,
                     .positions = positions,
                     .second_leads = second_leads};
    launch_rows(num_threads, &call);
}

/* out = silu(gate) * up, gate and up being the halves of a row. */

ALWAYS_INLINE void silu_row(const RowsCall *call, int64_t row, int is_float) {
    int64_t I = call->width, at = row * call->x_stride;
    for (int64_t i = 0; i < I; i += VL) {
        int lanes = lanes_left(i, I);
        vf gate = v_load_any(call->x, at + i, lanes, is_float), up = v_load_any(call->x, at + I + i, lanes, is_float);
        v_store_any(call->out, row * I + i, v_silu(gate) * up, lanes, is_float);
    }
}

static void silu_row_float(const RowsCall *call, int64_t row) { silu_row(call, row, 1); }
static void silu_row_bf16(const RowsCall *call, int64_t row) { silu_row(call, row, 0); }

void silu_and_mul(int64_t num_threads, int64_t T, int64_t I, int is_float, const void *gate_up, int64_t row_stride,
                  void *out) {
    RowsCall call = {.kernel = is_float ? silu_row_float : silu_row_bf16,
                     .num_rows = T,
                     .width = I,
                     .x = gate_up,
                     .x_stride = row_stride,
                     .out = out};
    launch_rows(num_threads, &call);
}

/* Queries and keys: norm of every head, rotary embedding, both in place; keys and values into their slots. */

typedef struct {
    TaskQueue queue; /* a task: ROWS_PER_TASK tokens */
    int64_t num_tokens, num_query_heads, num_key_heads, head_dim, rotary_dim;
    int is_float, interleaved;
    const int64_t *positions;
    void *query, *key;
    int64_t query_stride, key_stride;  /* elements from token to token; heads of a token are contiguous */
    const float *cos_sin;              /* [max_position, rotary_dim]: cosines, then sines */
    const void *query_norm, *key_norm; /* [head_dim], or NULL */
    float eps;
    const void *value; /* strided like the key; NULL if nothing is stored */
    char *key_cache, *value_cache;
    const int64_t *slots;
} TokensCall;

ALWAYS_INLINE void rotate_head(void *head, int64_t at, const float *cosine, const float *sine, int64_t half,
                               int is_float, int interleaved) {
    if (interleaved) { /* pairs (2i, 2i + 1) */
        for (int64_t i = 0; i < half; i++) {
            float *f = (float *)head + at + 2 * i;
            bf16 *h = (bf16 *)head + at + 2 * i;
            float first = is_float ? f[0] : bf16_to_float(h[0]), second = is_float ? f[1] : bf16_to_float(h[1]);
            float rotated_first = first * cosine[i] - second * sine[i];
            float rotated_second = second * cosine[i] + first * sine[i];
            if (is_float)
                f[0] = rotated_first, f[1] = rotated_second;
            else
                h[0] = float_to_bf16(rotated_first), h[1] = float_to_bf16(rotated_second);
        }
        return;
    }
    for (int64_t i = 0; i < half; i += VL) { /* pairs (i, half + i) */
        int lanes = lanes_left(i, half);
        vf first = v_load_any(head, at + i, lanes, is_float), second = v_load_any(head, at + half + i, lanes, is_float);
        vf c = v_load_any(cosine, i, lanes, 1), s = v_load_any(sine, i, lanes, 1);
        v_store_any(head, at + i, first * c - second * s, lanes, is_float);
        v_store_any(head, at + half + i, second * c + first * s, lanes, is_float);
    }
}

ALWAYS_INLINE void prepare_heads(const TokensCall *call, int64_t token, void *heads, int64_t at, int64_t num_heads,
                                 const void *norm, int is_float, int interleaved) {
    int64_t half = call->rotary_dim / 2;
    const float *cosine = call->cos_sin + call->positions[token] * call->rotary_dim, *sine = cosine + half;
    for (int64_t h = 0; h < num_heads; h++, at += call->head_dim) {
        if (norm) norm_span(heads, at, heads, at, norm, call->head_dim, call->eps, is_float);
        rotate_head(heads, at, cosine, sine, half, is_float, interleaved);
    }
}

ALWAYS_INLINE void prepare_token(const TokensCall *call, int64_t token, int is_float, int interleaved) {
    int64_t query_at = token * call->query_stride, key_at = token * call->key_stride;
    prepare_heads(call, token, call->query, query_at, call->num_query_heads, call->query_norm, is_float, interleaved);
    prepare_heads(call, token, call->key, key_at, call->num_key_heads, call->key_norm, is_float, interleaved);
    if (!call->value || call->slots[token] < 0) return;
    int64_t size = is_float ? sizeof(float) : sizeof(bf16), bytes = call->num_key_heads * call->head_dim * size;
    memcpy(call->key_cache + call->slots[token] * bytes, (const char *)call->key + key_at * size, (size_t)bytes);
    memcpy(call->value_cache + call->slots[token] * bytes, (const char *)call->value + key_at * size, (size_t)bytes);
}

static void run_tokens(void *context) {
    TokensCall *call = context;
    for (int64_t task; (task = take_task(&call->queue)) < call->queue.num_tasks;) {
        int64_t end = (task + 1) * ROWS_PER_TASK < call->num_tokens ? (task + 1) * ROWS_PER_TASK : call->num_tokens;
        for (int64_t token = task * ROWS_PER_TASK; token < end; token++) {
            if (call->is_float && call->interleaved)
                prepare_token(call, token, 1, 1);
            else if (call->is_float)
                prepare_token(call, token, 1, 0);
            else if (call->interleaved)
                prepare_token(call, token, 0, 1);
            else
                prepare_token(call, token, 0, 0);
        }
    }
}

static void launch_tokens(int64_t num_threads, TokensCall *call) {
    call->queue = (TaskQueue){.num_tasks = (call->num_tokens + ROWS_PER_TASK - 1) / ROWS_PER_TASK};
    int64_t elements = call->num_tokens * (call->num_query_heads + call->num_key_heads) * call->head_dim;
    run_on_threads(elements < 2 * ELEMENTS_WORTH_A_THREAD ? 1 : num_threads, run_tokens, call);
}

static int all_below(const int64_t *values, int64_t count, int64_t low, int64_t high) {
    for (int64_t i = 0; i < count; i++)
        if (values[i] < low || values[i] >= high) return 0;
    return 1;
}

/* Returns non-zero at a position outside the table, with nothing rotated. */
int rotary_embedding(int64_t num_threads, int64_t T, int64_t num_query_heads, int64_t num_key_heads, int64_t head_dim,
                     int64_t rotary_dim, int is_float, int interleaved, const int64_t *positions, void *query,
                     int64_t query_stride, void *key, int64_t key_stride, const float *cos_sin, int64_t max_position) {
    TokensCall call = {.num_tokens = T,
                       .num_query_heads = num_query_heads,
                       .num_key_heads = num_key_heads,
                       .head_dim = head_dim,
                       .rotary_dim = rotary_dim,
                       .is_float = is_float,
                       .interleaved = interleaved,
                       .positions = positions,
                       .query = query,
                       .key = key,
                       .query_stride = query_stride,
                       .key_stride = key_stride,
                       .cos_sin = cos_sin};
    if (!all_below(positions, T, 0, max_position)) return 1;
    launch_tokens(num_threads, &call);
    return 0;
}

int prepare_qkv(int64_t num_threads, int64_t T, int64_t num_query_heads, int64_t num_key_heads, int64_t head_dim,
                int64_t rotary_dim, int is_float, int interleaved, const int64_t *positions, void *qkv,
                int64_t qkv_stride, const void *query_norm, const void *key_norm, float eps, const float *cos_sin,
                int64_t max_position, void *key_cache, void *value_cache, int64_t num_slots, const int64_t *slots) {
    int64_t size = is_float ? sizeof(float) : sizeof(bf16);
    char *key = (char *)qkv + num_query_heads * head_dim * size, *value = key + num_key_heads * head_dim * size;
    TokensCall call = {.num_tokens = T,
                       .num_query_heads = num_query_heads,
                       .num_key_heads = num_key_heads,
                       .head_dim = head_dim,
                       .rotary_dim = rotary_dim,
                       .is_float = is_float,
                       .interleaved = interleaved,
                       .positions = positions,
                       .query = qkv,
                       .key = key,
                       .query_stride = qkv_stride,
                       .key_stride = qkv_stride,
                       .cos_sin = cos_sin,
                       .query_norm = query_norm,
                       .key_norm = key_norm,
                       .eps = eps,
                       .value = value,
                       .key_cache = key_cache,
                       .value_cache = value_cache,
                       .slots = slots};
    if (!all_below(positions, T, 0, max_position)) return 1;
    if (!all_below(slots, T, INT64_MIN, num_slots)) return 2;
    launch_tokens(num_threads, &call);
    return 0;
}

/* Copies token t's key and value, key_bytes and value_bytes long, to slot slots[t] of the pools; a negative slot is
 * skipped. Returns non-zero at a slot past the end, with nothing written there. */
int store_kv(int64_t T, int64_t num_slots, int64_t key_bytes, int64_t value_bytes, const char *key, int64_t key_stride,
             const char *value, int64_t value_stride, char *key_cache, char *value_cache, const int64_t *slots) {
    for (int64_t t = 0; t < T; t++) {
        if (slots[t] < 0) continue;
        if (slots[t] >= num_slots) return 1;
        memcpy(key_cache + slots[t] * key_bytes, key + t * key_stride, (size_t)key_bytes);
        memcpy(value_cache + slots[t] * value_bytes, value + t * value_stride, (size_t)value_bytes);
    }
    return 0;
}

/* out[t] = row ids[t] of packed weights [N, K] (dot_tile.h). Returns non-zero at an id that is no row. */
int embedding(int64_t T, int64_t N, int64_t K, int is_float, const int64_t *ids, const void *weight, void *out) {
    for (int64_t t = 0; t < T; t++) {
        if (ids[t] < 0 || ids[t] >= N) return 1;
        int64_t block = ids[t] / NB, column = ids[t] % NB;
        if (is_float) {
            const float *source = (const float *)weight + block * K * NB + column;
            float *row = (float *)out + t * K;
            for (int64_t k = 0; k < K; k++) row[k] = source[k * NB];
        } else {
            int64_t pairs = (K + 1) / 2;
            const bf16 *source = (const bf16 *)weight + (block * pairs * NB + column) * 2;
            bf16 *row = (bf16 *)out + t * K;
            for (int64_t k = 0; k < K; k++) row[k] = source[k / 2 * NB * 2 + k % 2];
        }
    }
    return 0;
}
