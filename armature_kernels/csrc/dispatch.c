/* The levels in this library, the ones that the processor supports, and the one in use. */
#include <stdlib.h>
#include <string.h>

#include <omp.h>

#include "level.h"
#include "processor.h"

typedef struct {
    const level *level;
    int (*runs)(void);
} candidate;

/* The best first. The build defines which of them it could compile. */
static const candidate CANDIDATES[] = {
#ifdef ARMATURE_LEVEL_amx
    {&level_amx, has_amx},
#endif
#ifdef ARMATURE_LEVEL_avx512bf16
    {&level_avx512bf16, has_avx512bf16},
#endif
#ifdef ARMATURE_LEVEL_avx512
    {&level_avx512, has_avx512},
#endif
#ifdef ARMATURE_LEVEL_avxvnni
    {&level_avxvnni, has_avxvnni},
#endif
#ifdef ARMATURE_LEVEL_avx2
    {&level_avx2, has_avx2},
#endif
#ifdef ARMATURE_LEVEL_i8mm
    {&level_i8mm, has_i8mm},
#endif
#ifdef ARMATURE_LEVEL_dotprod
    {&level_dotprod, has_dotprod},
#endif
#ifdef ARMATURE_LEVEL_neon
    {&level_neon, always},
#endif
#ifdef ARMATURE_LEVEL_portable
    {&level_portable, always},
#endif
    {NULL, always},
};

static const level *serving;

static const level *find(const char *name) {
    for (const candidate *c = CANDIDATES; c->level; c++)
        if ((!name || strcmp(name, c->level->name) == 0) && c->runs()) return c->level;
    return NULL;
}

const level *armature_now(void) {
    if (!serving) serving = find(NULL);
    return serving;
}

/* app/hardware/probe/software.py reads this from the file before anything is loaded. */
EXPORT const char armature_levels[] = "armature levels: " ARMATURE_LEVELS ";";

/* tools/native.py reads from the file which sources it was made of, and for which processors. */
EXPORT const char armature_build[] = "armature build: " ARMATURE_BUILD ";";

/* Return the name of the level in use, or NULL if there is none. */
EXPORT const char *armature_level(void) { return armature_now() ? armature_now()->name : NULL; }

/* Use another level, NULL for the best. Return 0, or -1 if this library or this processor does not have it. Not while
 * operations run. */
EXPORT int armature_select(const char *name) {
    const level *found = find(name);
    if (found) serving = found;
    return found ? 0 : -1;
}

/* Return whether the level in use has a kernel for this operation. */
EXPORT int armature_has(int64_t code) { return armature_now() && code >= 0 && code < OP_COUNT && armature_now()->kernels[code] != NULL; }

/* Return the tile shape of the level in use: 0 the most rows, 1 BLOCK, 2 TILE_ALIGN (see ops.h), 3 `wide_rows`. */
EXPORT int64_t armature_tiles(int64_t what) {
    const level *l = armature_now();
    return !l ? 0 : what == 0 ? l->tile_rows : what == 1 ? l->block : what == 2 ? l->align : l->wide_rows;
}

/* Return the bytes of an operation's arguments as this library reads them, or of lanes for OP_COUNT. A caller with
 * other sizes belongs to another version. */
EXPORT int64_t armature_size(int64_t code) {
    if (code == OP_COUNT) return sizeof(lanes_arguments) + sizeof(text_steps) + sizeof(row_place);
    static const int64_t sizes[OP_COUNT] = {
        [OP_QUANTISE] = sizeof(quantise_arguments),     [OP_NORM] = sizeof(norm_arguments),     [OP_GATE] = sizeof(gate_arguments),
        [OP_TURN] = sizeof(turn_arguments),             [OP_PICK] = sizeof(pick_arguments),     [OP_LINEAR_INT] = sizeof(linear_int_arguments),
        [OP_ATTENTION] = sizeof(attention_arguments),   [OP_ROWS] = sizeof(rows_arguments),     [OP_GATHER] = sizeof(gather_arguments),
        [OP_LINEAR_BF16] = sizeof(linear_bf16_arguments), [OP_ANGLES] = sizeof(angles_arguments),
        [OP_LAYER_NORM] = sizeof(layer_norm_arguments), [OP_ACTIVATE] = sizeof(activate_arguments),
        [OP_TEXTS] = sizeof(texts_arguments),           [OP_INT4_SCALES] = sizeof(int4_scales_arguments),
        [OP_INT4_GPTQ] = sizeof(int4_gptq_arguments),   [OP_LINEAR_FP32] = sizeof(linear_fp32_arguments),
        [OP_TOP] = sizeof(top_arguments),               [OP_POOL] = sizeof(pool_arguments),
        [OP_LORA] = sizeof(lora_arguments),
        [OP_TOP] = sizeof(top_arguments),               [OP_ROUTE] = sizeof(route_arguments),
        [OP_EXPERTS] = sizeof(experts_arguments),       [OP_LATENT] = sizeof(latent_arguments),
        [OP_CONVOLVE] = sizeof(convolve_arguments),     [OP_CONVOLVED_ROWS] = sizeof(convolved_rows_arguments),
        [OP_ALTUP] = sizeof(altup_arguments),           [OP_MATCH] = sizeof(match_arguments),
    };
    return code >= 0 && code < OP_COUNT ? sizes[code] : 0;
}

/* Run the operations one after the other on `threads` threads. Return 0, or -1 - i if operation i has no kernel; then
 * nothing has run. */
EXPORT int64_t armature_run(const operation *operations, int64_t count, int64_t threads) {
    const level *l = armature_now();
    for (int64_t i = 0; i < count; i++)
        if (!armature_has(operations[i].code)) return -1 - i;
#pragma omp parallel num_threads((int)threads)
    for (int64_t i = 0; i < count; i++) l->kernels[operations[i].code](operations[i].arguments);
    return 0;
}
