/* The kernels that every level has, and the table of them. A level's file includes this last. LEVEL is its symbol and
 * NAME its public name.
 *
 * A level's file is compiled once for each part, so that several cores share the work (CMakeLists.txt). The first three
 * parts take about equally long. The part REST has the table. */
#ifndef ARMATURE_KERNELS_H
#define ARMATURE_KERNELS_H

#ifndef ATTENTION_PANELS
#define ATTENTION_PANELS 0
#endif

#include "level.h"
#include "simd.h"

#define BF16_PRODUCT (AMX_TILES || ATTENTION_PANELS || BF16_UNITS)
#define DECLARE(name) void KERNEL(name)(const void *arguments);
/* The kernels are static in their headers, which other parts include for the functions that they share: there the
 * compiler drops them. */
#define DEFINE(name) \
    void KERNEL(name)(const void *arguments) { name(arguments); }

#if defined(PART_ATTENTION)
#include "attention_team.h"
DEFINE(attention)

#elif defined(PART_INTEGERS)
#include "linear_int.h"
DEFINE(linear_int)

#elif defined(PART_PRODUCTS)
#include "linear_fp32.h"
#include "lora.h"
#include "pick.h"
#include "top.h"
#if AMX_TILES
#include "linear_amx.h"
#elif ATTENTION_PANELS /* bf16 products */
#include "linear_bf16.h"
#elif BF16_UNITS
#include "linear_bf16_arm.h"
#endif
#include "experts.h"
DEFINE(linear_fp32)
DEFINE(lora)
DEFINE(pick)
DEFINE(top)
DEFINE(experts)
#if BF16_PRODUCT
DEFINE(linear_bf16)
#endif

#elif defined(PART_REST)
#include "activate.h"
#include "altup.h"
#include "angles.h"
#include "division.h"
#include "latent.h"
#include "layer_norm.h"
#include "pool.h"
#include "quantize.h"
#include "recur.h"
#include "round_int4.h"
#include "route.h"
#include "rowwise.h"
#include "texts.h"
#include "turn.h"

DECLARE(attention)
DECLARE(linear_int)
DECLARE(pick)
DECLARE(top)
DECLARE(experts)
DECLARE(linear_fp32)
DECLARE(lora)
DECLARE(linear_bf16)

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
            [OP_QUANTIZE] = quantize,
            [OP_NORM] = norm,
            [OP_GATE] = gate,
            [OP_LINEAR_INT] = KERNEL(linear_int),
            [OP_PICK] = KERNEL(pick),
            [OP_ROWS] = armature_rows,
            [OP_GATHER] = gather,
            [OP_ATTENTION] = KERNEL(attention),
            [OP_TURN] = turn,
            [OP_ANGLES] = angles,
            [OP_LAYER_NORM] = layer_norm,
            [OP_ACTIVATE] = activate,
            [OP_TEXTS] = texts,
            [OP_INT4_SCALES] = int4_scales,
            [OP_INT4_GPTQ] = int4_gptq,
            [OP_LINEAR_FP32] = KERNEL(linear_fp32),
            [OP_TOP] = KERNEL(top),
            [OP_POOL] = pool,
            [OP_LORA] = KERNEL(lora),
            [OP_ROUTE] = route,
            [OP_EXPERTS] = KERNEL(experts),
            [OP_LATENT] = latent,
            [OP_ALTUP] = altup,
            [OP_MATCH] = match,
            [OP_RECUR_INPUTS] = recur_inputs,
            [OP_RECUR] = recur,
            [OP_GATED_NORM] = gated_norm,
#if BF16_PRODUCT
            [OP_LINEAR_BF16] = KERNEL(linear_bf16),
#endif
        },
};

#else
#error "no part of the level was chosen (CMakeLists.txt)"
#endif

#endif
