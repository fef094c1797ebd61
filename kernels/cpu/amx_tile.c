/* See amx_tile.h. */
#define _GNU_SOURCE
#include "amx_tile.h"

#include <stdlib.h>

#include "dot_tile.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18, NUM_REGISTERS = 8, TILE_ROWS = 16, TILE_BYTES = 64 };

/* The registers' numbers, which become part of an instruction's text. Sums are of rows first (top) and last (bottom) by
 * columns first (left) and last (right). */
#define TOP_LEFT 0
#define TOP_RIGHT 1
#define BOTTOM_LEFT 2
#define BOTTOM_RIGHT 3
#define TOP 4
#define BOTTOM 5
#define LEFT 6
#define RIGHT 7

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_a_row[16];
    uint8_t rows[16];
} TileShapes;

static int granted = -1;

int has_amx(void) {
    int known = __atomic_load_n(&granted, __ATOMIC_RELAXED);
    if (known < 0) {
        known = !getenv("FORERUN_NO_AMX") && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
        __atomic_store_n(&granted, known, __ATOMIC_RELAXED);
    }
    return known;
}

void amx_begin(int *rows_set) { *rows_set = 0; }

void amx_end(void) { _tile_release(); }

static void set_rows(int rows) {
    int first = rows < TILE_ROWS ? rows : TILE_ROWS, second = rows - first;
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < NUM_REGISTERS; i++) shapes.bytes_a_row[i] = TILE_BYTES, shapes.rows[i] = TILE_ROWS;
    shapes.rows[TOP_LEFT] = shapes.rows[TOP_RIGHT] = shapes.rows[TOP] = (uint8_t)first;
    shapes.rows[BOTTOM_LEFT] = shapes.rows[BOTTOM_RIGHT] = shapes.rows[BOTTOM] = (uint8_t)(second ? second : 1);
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* the next line's header tells the compiler of 8 bytes only */
    _tile_loadconfig(&shapes);
}

/* At most 16 rows: half of the registers lie idle. */
static void dot_few(const bf16 *x, size_t row_bytes, const bf16 *columns, int K, float *out, size_t out_bytes) {
    _tile_zero(TOP_LEFT);
    _tile_zero(TOP_RIGHT);
    for (int k = 0; k < K; k += AMX_DEPTH) {
        const bf16 *block = columns + (size_t)k * NB;
        _tile_loadd(TOP, x + k, row_bytes);
        _tile_loadd(LEFT, block, 2 * TILE_BYTES);
        _tile_dpbf16ps(TOP_LEFT, TOP, LEFT);
        _tile_loadd(RIGHT, block + NB, 2 * TILE_BYTES);
        _tile_dpbf16ps(TOP_RIGHT, TOP, RIGHT);
    }
    _tile_stored(TOP_LEFT, out, out_bytes);
    _tile_stored(TOP_RIGHT, out + NB / 2, out_bytes);
}

static void dot_many(const bf16 *x, size_t row_bytes, const bf16 *columns, int K, float *out, size_t out_bytes) {
    const char *later = (const char *)x + TILE_ROWS * row_bytes;
    char *out_later = (char *)out + TILE_ROWS * out_bytes;
    _tile_zero(TOP_LEFT);
    _tile_zero(TOP_RIGHT);
    _tile_zero(BOTTOM_LEFT);
    _tile_zero(BOTTOM_RIGHT);
    for (int k = 0; k < K; k += AMX_DEPTH) {
        const bf16 *block = columns + (size_t)k * NB;
        _tile_loadd(LEFT, block, 2 * TILE_BYTES);
        _tile_loadd(TOP, x + k, row_bytes);
        _tile_dpbf16ps(TOP_LEFT, TOP, LEFT);
        _tile_loadd(RIGHT, block + NB, 2 * TILE_BYTES);
        _tile_dpbf16ps(TOP_RIGHT, TOP, RIGHT);
        _tile_loadd(BOTTOM, later + k * sizeof(bf16), row_bytes);
        _tile_dpbf16ps(BOTTOM_LEFT, BOTTOM, LEFT);
        _tile_dpbf16ps(BOTTOM_RIGHT, BOTTOM, RIGHT);
    }
    _tile_stored(TOP_LEFT, out, out_bytes);
    _tile_stored(TOP_RIGHT, out + NB / 2, out_bytes);
    _tile_stored(BOTTOM_LEFT, out_later, out_bytes);
    _tile_stored(BOTTOM_RIGHT, out_later + TILE_BYTES, out_bytes);
}

void amx_dot_tile(const bf16 *x, size_t stride, int rows, const bf16 *columns, int K, float *out, size_t out_stride,
                  int *rows_set) {
    if (*rows_set != rows) {
        set_rows(rows);
        *rows_set = rows;
    }
    (rows > TILE_ROWS ? dot_many : dot_few)(x, stride * sizeof(bf16), columns, K, out, out_stride * sizeof(float));
}

#else

int has_amx(void) { return 0; }
void amx_begin(int *rows_set) { (void)rows_set; }
void amx_end(void) {}
void amx_dot_tile(const bf16 *x, size_t stride, int rows, const bf16 *columns, int K, float *out, size_t out_stride,
                  int *rows_set) {
    (void)x, (void)stride, (void)rows, (void)columns, (void)K, (void)out, (void)out_stride, (void)rows_set;
}

#endif
