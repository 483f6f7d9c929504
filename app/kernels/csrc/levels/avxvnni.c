/* AVX2 with AVX-VNNI: Intel Alder Lake, Meteor Lake and their like, which have no AVX-512. */
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

const level level_avxvnni = {
    .name = "avxvnni",
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
