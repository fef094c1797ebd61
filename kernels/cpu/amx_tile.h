/* The inner product of dot_tile.h in the CPU's matrix unit: AMX, Intel's from Sapphire Rapids on.
 *
 * It takes a block of packed bf16 columns as it is, 32 k at a time: two tiles of 16 pairs by 16 columns. Up to 16 rows
 * then cost what one does. Each output is the same chain whatever the number of rows: within 32 k, even and odd ones are
 * summed apart, then together, then to the sum so far. It is another chain than dot_tile's, so that a weight is
 * multiplied either always here or never: where `has_amx()`, and K (of attention scores the size of a head) is a multiple
 * of AMX_DEPTH.
 *
 * The tile registers' shape is a thread's state, which other libraries on the same thread change, too: it is set at the
 * start of every task (`amx_begin`) and given back at its end (`amx_end`). In between `rows_set` keeps what is set.
 */
#pragma once
#include "simd.h"

enum { AMX_ROWS = 32, AMX_DEPTH = 32 };

/* Whether the sources were compiled for the unit, the system grants it to the process, and it multiplies as it should:
 * asked once. FORERUN_NO_AMX=1 in the environment says no. */
int has_amx(void);

void amx_begin(int *rows_set);
void amx_end(void);

/* out[m][d] += sum over AMX_DEPTH positions of (high + low)[m][position] * values[position][d], for 1 <= rows <=
 * AMX_ADDED_ROWS and D dimensions, a multiple of NB. Values are packed by pairs of positions: [AMX_DEPTH / 2][D][2]. */
enum { AMX_ADDED_ROWS = 16 };
void amx_add_values(const bf16 *high, const bf16 *low, size_t stride, int rows, const bf16 *values, int D, float *out,
                    size_t out_stride, int *rows_set);

/* out[m][column] = sum over k < K of x[m][k] * columns[k][column], for 1 <= rows <= AMX_ROWS and NB columns. */
void amx_dot_tile(const bf16 *x, size_t stride, int rows, const bf16 *columns, int K, float *out, size_t out_stride,
                  int *rows_set);
