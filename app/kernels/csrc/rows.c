/* Rows of weights, widened: an embedding, out of whatever form its table is held in. Plain C, as it touches few bytes; the same for every
 * level. Threads share the parts of a row too: most steps want one. */
#include <math.h>
#include <string.h>

#include "level.h"

#define PART 256 /* inputs that one thread widens at a time, where no group says how many */

static float from_bits(uint32_t bits) {
    union { uint32_t bits; float number; } cast = {bits};
    return cast.number;
}

/* IEEE half: the exponent moves by 112, which a product does also where it is denormal; infinity and NaN keep theirs. */
static float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    if (rest >= 0x0f800000) return from_bits(sign | rest | 0x7f800000);
    const float number = from_bits(rest) * 0x1p112f;
    return sign ? -number : number;
}

/* A table may begin at any byte of its file. */
static void stored(const rows_arguments *a, int64_t id, int64_t from, int64_t count, float *out) {
    const uint8_t *at = a->weight + (id * a->inputs + from) * (a->form == FORM_STORED_FP32 ? 4 : 2);
    if (a->form == FORM_STORED_FP32) {
        memcpy(out, at, (size_t)count * 4);
        return;
    }
    for (int64_t k = 0; k < count; k++) {
        uint16_t half;
        memcpy(&half, at + 2 * k, 2);
        out[k] = a->form == FORM_STORED_FP16 ? from_half(half) : from_bits((uint32_t)half << 16);
    }
}

static void widen(const rows_arguments *a, int64_t id, int64_t from, int64_t count, float *out) {
    if (id < 0 || id >= a->outputs)
        for (int64_t k = 0; k < count; k++) out[k] = NAN;
    else if (a->form == FORM_INT4 || a->form == FORM_INT8) armature_row_int(a, id, from, count, out);
    else if (a->form == FORM_BF16_PANELS) armature_row_bf16(a, id, from, count, out);
    else stored(a, id, from, count, out);
}

/* A team function of every level. */
void armature_rows(const void *arguments) {
    const rows_arguments *a = arguments;
    const int64_t size = a->form == FORM_INT4 || a->form == FORM_INT8 ? a->group : PART, parts = (a->inputs + size - 1) / size;
    const float factor = (float)a->factor;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->count * parts; i++) {
        const int64_t row = i / parts, from = i % parts * size, left = a->inputs - from, count = left < size ? left : size;
        float *out = a->out + row * a->inputs + from;
        widen(a, a->ids[row], from, count, out);
        for (int64_t k = 0; a->factors && k < count; k++) out[k] *= a->factors[from + k];
        for (int64_t k = 0; factor != 1.0f && k < count; k++) out[k] *= factor;
    }
}
