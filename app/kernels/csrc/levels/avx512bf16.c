/* AVX-512 with VNNI and products of bf16: Intel Cooper Lake and Sapphire Rapids, AMD Zen 4 and newer. */
#define LANES 16
#define BLOCK 4
#define TILE_ROWS 8
#define TILE_ALIGN 1
#define ATTENTION_PANELS 1

#include "../tile_avx512.h"
#include "../pick.h"
#include "../quantise.h"
#include "../rowwise.h"
#include "../linear_bf16.h"
#include "../attention_team.h"
#include "../turn.h"

const level level_avx512bf16 = {
    .name = "avx512bf16",
    .tile_rows = TILE_ROWS,
    .block = BLOCK,
    .align = TILE_ALIGN,
    .kernels =
        {
            [OP_QUANTISE] = quantise,
            [OP_NORM] = norm,
            [OP_GATE] = gate,
            [OP_LINEAR_INT] = linear_int,
            [OP_PICK] = pick,
            [OP_ROWS] = armature_rows,
            [OP_GATHER] = gather,
            [OP_LINEAR_BF16] = linear_bf16,
            [OP_ATTENTION] = attention,
            [OP_TURN] = turn,
        },
};
