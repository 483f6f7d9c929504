/* Rows of weights, widened: an embedding from any form of its table. Plain C, since it touches few bytes, and the
 * same for every level. Threads also share the parts of a row, because most steps read a single row. */
#include <math.h>
#include <string.h>

#include "level.h"

#define PART 256 /* inputs that a thread widens at a time, for forms without groups */

static inline float from_bits(uint32_t bits) {
    union { uint32_t bits; float number; } cast = {bits};
    return cast.number;
}

/* IEEE half: the exponent moves by 112. A multiplication does that for denormals too; infinity and NaN keep their
 * exponent. */
static inline float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    const union { float number; uint32_t bits; } moved = {from_bits(rest) * 0x1p112f};
    const uint32_t special = rest >= 0x0f800000 ? 0xffffffff : 0; /* no branches, so that compilers vectorize it */
    return from_bits(sign | (((rest | 0x7f800000) & special) | (moved.bits & ~special)));
}

/* A table may begin at any byte of its file. */
static void stored(const rows_arguments *a, int64_t id, int64_t from, int64_t count, float *out) {
    const uint8_t *at = a->weight + (id * a->inputs + from) * (a->form == FORM_STORED_FP32 ? 4 : 2);
    if (a->form == FORM_STORED_FP32) {
        memcpy(out, at, (size_t)count * 4);
        return;
    }
    uint16_t halves[PART];
    memcpy(halves, at, (size_t)count * 2);
    if (a->form == FORM_STORED_FP16)
        for (int64_t k = 0; k < count; k++) out[k] = from_half(halves[k]);
    else
        for (int64_t k = 0; k < count; k++) out[k] = from_bits((uint32_t)halves[k] << 16);
}

static void widen(const rows_arguments *a, int64_t id, int64_t from, int64_t count, float *out) {
    if (a->absent_first && (id < 0 || id >= a->outputs)) id = 0;
    if (id < 0 || id >= a->outputs)
        for (int64_t k = 0; k < count; k++) out[k] = NAN;
    else if (a->form == FORM_INT4 || a->form == FORM_INT8) armature_row_int(a, id, from, count, out);
    else if (a->form == FORM_BF16_PANELS) armature_row_bf16(a, id, from, count, out);
    else if (a->form == FORM_FP32_PANELS) armature_row_fp32(a, id, from, count, out);
    else stored(a, id, from, count, out);
}

static void finish(const rows_arguments *a, int64_t from, int64_t count, float *values) {
    const float factor = (float)a->factor;
    for (int64_t k = 0; a->factors && k < count; k++) values[k] *= a->factors[from + k];
    for (int64_t k = 0; factor != 1.0f && k < count; k++) values[k] *= factor;
}

/* A team function of every level. */
void armature_rows(const void *arguments) {
    const rows_arguments *a = arguments;
    const int64_t size = a->form == FORM_INT4 || a->form == FORM_INT8 ? a->group : PART, parts = (a->inputs + size - 1) / size;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->count * parts; i++) {
        const int64_t row = i / parts, begin = i % parts * size, end = begin + size < a->inputs ? begin + size : a->inputs;
        for (int64_t from = begin; from < end; from += a->add ? PART : size) {
            const int64_t step = a->add ? PART : size, count = end - from < step ? end - from : step;
            float *out = a->out + row * a->inputs + from, part[PART], *values = a->add ? part : out;
            widen(a, a->ids[row], from, count, values);
            finish(a, from, count, values);
            for (int64_t k = 0; a->add && k < count; k++) out[k] += part[k];
        }
    }
}
