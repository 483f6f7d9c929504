/* AVX-512 with VNNI: Intel Ice Lake, AMD Zen 4 and newer. */
#define LANES 16
#define BLOCK 4
#define TILE_ROWS 8
#define TILE_ALIGN 1

#include "../tile_avx512.h"
#include "../quantise.h"

const level level_avx512 = {
    .name = "avx512",
    .tile_rows = TILE_ROWS,
    .block = BLOCK,
    .align = TILE_ALIGN,
    .kernels = {[OP_QUANTISE] = quantise, [OP_LINEAR_INT] = linear_int, [OP_ROWS] = armature_rows},
};
