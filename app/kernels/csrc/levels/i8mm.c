/* Armv8.2 with dot products and matrix products of bytes: AWS Graviton 3 and 4, Arm Neoverse V1, N2, V2, Apple M2 and newer. */
#define LANES 4
#define BLOCK 8
#define TILE_ROWS 12
#define TILE_ALIGN 2

#include "../tile_i8mm.h"
#include "../pick.h"
#include "../quantise.h"
#include "../rowwise.h"
#include "../attention_team.h"
#include "../turn.h"

const level level_i8mm = {
    .name = "i8mm",
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
            [OP_ATTENTION] = attention,
            [OP_TURN] = turn,
        },
};
