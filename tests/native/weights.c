/* Weights: generated, and packed by the library. */
#include "weights.h"

/* As csrc/pack_int.c declares it. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *minimums;
    uint8_t *panels;
    int64_t outputs, first, padded, group, bits;
} pack_arguments;

void armature_pack_int(const pack_arguments *arguments);

static uint8_t random_code(int64_t bits, int kind) {
    if (bits == 4) return (uint8_t)(kind == EXTREME ? below(2) * 15 : below(16));
    return (uint8_t)(int8_t)(kind == EXTREME ? (below(2) ? 127 : -128) : between(-127, 127));
}

/* In two parts, as from the shards of a checkpoint. */
static void pack(const weights *w) {
    const int64_t ends[] = {0, below(w->outputs + 1), w->outputs};
    for (int i = 0; i < 2; i++) {
        const int64_t first = ends[i], at = first * w->groups;
        const pack_arguments arguments = {
            w->codes + first * w->padded, w->scales + at, w->low ? w->low + at : NULL, w->panels, ends[i + 1] - first, first, w->padded, w->group, w->bits,
        };
        armature_pack_int(&arguments);
    }
}

weights new_weights(int64_t outputs, int64_t inputs, int64_t group, int64_t bits, int64_t minimums, int kind) {
    weights w = {outputs, inputs, 0, group, (inputs + group - 1) / group, bits, minimums, NULL, NULL, NULL, NULL};
    w.padded = w.groups * group;
    w.codes = room(outputs * w.padded);
    w.scales = room(outputs * w.groups * 2);
    w.low = minimums ? room(outputs * w.groups * 2) : NULL;
    for (int64_t i = 0; i < outputs * w.padded; i++) w.codes[i] = random_code(bits, kind);
    for (int64_t i = 0; i < outputs * w.groups; i++) {
        const float power = bits == 4 ? (float)(1 << below(2)) : 1, scale = kind == ANY ? number() / 16 : power;
        w.scales[i] = bf16_of_float(scale);
        if (minimums) w.low[i] = bf16_of_float(kind == ANY ? number() / 2 : power * (float)between(-15, 15));
    }
    const int64_t panels = (outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    const int64_t bytes = panels * w.groups * (64 + (minimums ? 64 : 0) + group * PANEL_OUTPUTS * bits / 8);
    w.panels = memset(room(bytes), 0, (size_t)bytes);
    pack(&w);
    return w;
}

void free_weights(weights *w) {
    free(w->codes), free(w->scales), free(w->low), free(w->panels);
    *w = (weights){0};
}

int32_t code_of(const weights *w, int64_t output, int64_t k) {
    const uint8_t code = w->codes[output * w->padded + k];
    return w->bits == 8 ? (int8_t)code : w->minimums ? code : code - 8;
}

float scale_of(const weights *w, int64_t output, int64_t g) { return float_of_bf16(w->scales[output * w->groups + g]); }

float minimum_of(const weights *w, int64_t output, int64_t g) { return w->minimums ? float_of_bf16(w->low[output * w->groups + g]) : 0; }
