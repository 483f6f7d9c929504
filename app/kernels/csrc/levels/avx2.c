/* AVX2 with FMA: Intel Haswell, AMD Excavator and newer. */
#define LANES 8
#define BLOCK 4
#define TILE_ROWS 6
#define TILE_ALIGN 1

#include "../tile_avx2.h"
#include "../pick.h"
#include "../quantise.h"
#include "../rowwise.h"
#include "../attention_team.h"
#include "../turn.h"

const level level_avx2 = {
    .name = "avx2",
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
