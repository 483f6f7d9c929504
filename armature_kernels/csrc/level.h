/* A level: an instruction set with a name, and its kernels. Each is one translation unit in levels/. */
#ifndef ARMATURE_LEVEL_H
#define ARMATURE_LEVEL_H

#include "ops.h"

#define EXPORT __attribute__((visibility("default")))

typedef void (*kernel)(const void *arguments);

typedef struct {
    const char *name;
    int64_t tile_rows; /* the maximum rows of a tile */
    int64_t block;     /* adjacent inputs: 4 or 8 */
    int64_t align;     /* tiles are rounded up to a multiple of this number of rows */
    int64_t wide_rows; /* from this number of rows on, integer weights times bf16 rows are faster (0: never, or no kernel) */
    int64_t streams, stream_ahead; /* parts of memory that a product of one row reads in turns, and its prefetch distance in bytes (division.h) */
    int64_t attention_panels; /* prompts share panels of keys and values in scratch */
    kernel kernels[OP_COUNT];
} level;

extern const level level_amx, level_avx512bf16, level_avx512, level_avxvnni, level_avx2, level_i8mm, level_dotprod, level_neon, level_portable;

/* A function of a level that another part of the level calls (kernels.h): its name begins with the level's, for example
 * `level_avx2_attention`. */
#define JOINED(level, name) level##_##name
#define JOIN(level, name) JOINED(level, name)
#define KERNEL(name) JOIN(LEVEL, name)

/* The same for every level (rows.c). */
void armature_rows(const void *arguments);

/* Inputs [from, from + count) of row `id` from panels (pack_int.c: all of one group; pack_bf16.c; pack_fp32.c). */
void armature_row_int(const rows_arguments *a, int64_t id, int64_t from, int64_t count, float *out);
void armature_row_bf16(const rows_arguments *a, int64_t id, int64_t from, int64_t count, float *out);
void armature_row_fp32(const rows_arguments *a, int64_t id, int64_t from, int64_t count, float *out);

/* The level in use. */
const level *armature_now(void);

EXPORT int armature_has(int64_t code);

/* Where an integer panel has the scales and the codes of its groups, in bytes. `bits` and `header` are constants where a
 * tile is multiplied. */
typedef struct {
    int64_t scales, codes;           /* of the first group */
    int64_t next_scales, next_codes; /* from one group to the next */
    int64_t group_codes;             /* bytes of one group's codes */
    int64_t bytes;                   /* of the panel */
} panel_layout;

static inline __attribute__((always_inline)) panel_layout layout_of(int64_t bits, int64_t header, int64_t group, int64_t groups) {
    const int64_t codes = group * PANEL_OUTPUTS * bits / 8, own = header == SCALES_AND_MINIMUMS ? 128 : header == SCALES ? 64 : 32;
    if (header != DOUBLE_QUANTIZED) return (panel_layout){0, own, own + codes, own + codes, codes, groups * (own + codes)};
    const int64_t first = 64 + (groups * own + 63) / 64 * 64;
    return (panel_layout){64, first, own, codes, codes, first + groups * codes};
}

/* Rows of each tile except the last: tiles are as equal as possible. */
static inline int64_t tile_height(const level *l, int64_t rows) {
    int64_t tiles = (rows + l->tile_rows - 1) / l->tile_rows, height = tiles ? (rows + tiles - 1) / tiles : 1;
    return (height + l->align - 1) / l->align * l->align;
}

#endif
