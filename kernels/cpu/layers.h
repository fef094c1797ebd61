/* What paged attention calls of layers.c. */
#pragma once
#include <stdint.h>

/* A token's qkv is [query heads, key heads, value heads] of head_dim; the norms may be NULL; a negative slot is not
 * stored. Returns 1 at a position outside the table and 2 at a slot outside the pools, with nothing done. */
int prepare_qkv(int64_t num_threads, int64_t T, int64_t num_query_heads, int64_t num_key_heads, int64_t head_dim,
                int64_t rotary_dim, int is_float, int interleaved, const int64_t *positions, void *qkv,
                int64_t qkv_stride, const void *query_norm, const void *key_norm, float eps, const float *cos_sin,
                int64_t max_position, void *key_cache, void *value_cache, int64_t num_slots, const int64_t *slots);
