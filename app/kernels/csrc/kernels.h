/* The kernels that every level has, and the table of them. A level's file includes this last. LEVEL is its symbol and
 * NAME its public name. */
#ifndef ARMATURE_KERNELS_H
#define ARMATURE_KERNELS_H

#ifndef ATTENTION_PANELS
#define ATTENTION_PANELS 0
#endif

#include "activate.h"
#include "altup.h"
#include "angles.h"
#include "convolve.h"
#include "latent.h"
#include "layer_norm.h"
#include "linear_fp32.h"
#include "lora.h"
#include "pick.h"
#include "pool.h"
#include "quantise.h"
#include "round_int4.h"
#include "rowwise.h"
#include "attention_team.h"
#include "texts.h"
#include "top.h"
#include "turn.h"

#define BF16_PRODUCT (AMX_TILES || ATTENTION_PANELS || BF16_UNITS)
#if AMX_TILES
#include "linear_amx.h"
#elif ATTENTION_PANELS /* bf16 products */
#include "linear_bf16.h"
#elif BF16_UNITS
#include "linear_bf16_arm.h"
#endif

#include "experts.h"
#include "route.h"

#ifndef MIN_WIDE_ROWS
#define MIN_WIDE_ROWS 0
#endif

const level LEVEL = {
    .name = NAME,
    .tile_rows = TILE_ROWS,
    .block = BLOCK,
    .align = TILE_ALIGN,
    .wide_rows = MIN_WIDE_ROWS,
    .streams = STREAMS,
    .stream_ahead = STREAM_AHEAD,
    .attention_panels = ATTENTION_PANELS,
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
            [OP_ANGLES] = angles,
            [OP_LAYER_NORM] = layer_norm,
            [OP_ACTIVATE] = activate,
            [OP_TEXTS] = texts,
            [OP_INT4_SCALES] = int4_scales,
            [OP_INT4_GPTQ] = int4_gptq,
            [OP_LINEAR_FP32] = linear_fp32,
            [OP_TOP] = top,
            [OP_POOL] = pool,
            [OP_LORA] = lora,
            [OP_ROUTE] = route,
            [OP_EXPERTS] = experts,
            [OP_LATENT] = latent,
            [OP_CONVOLVE] = convolve,
            [OP_CONVOLVED_ROWS] = convolved_rows,
            [OP_ALTUP] = altup,
            [OP_MATCH] = match,
#if BF16_PRODUCT
            [OP_LINEAR_BF16] = linear_bf16,
#endif
        },
};

#endif
