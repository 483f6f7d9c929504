/* Plain C, for whatever has no better level. */
#define LANES 4
#define BLOCK 4
#define TILE_ROWS 4
#define TILE_ALIGN 1

#include "../tile_portable.h"
#include "../quantise.h"

const level level_portable = {
    .name = "portable",
    .tile_rows = TILE_ROWS,
    .block = BLOCK,
    .align = TILE_ALIGN,
    .kernels = {[OP_QUANTISE] = quantise, [OP_LINEAR_INT] = linear_int, [OP_ROWS] = armature_rows},
};
