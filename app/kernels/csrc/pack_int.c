/* Codes and scales to panels and back: the layout in ops.h, in plain C, since packing happens once. */
#include <string.h>

#include <omp.h>

#include "level.h"

/* The form of a packed weight. Codes are one byte each, [outputs, padded]: int4 as 0 to 15, int8 as signed bytes. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *minimums; /* bf16 [outputs, groups]; minimums NULL if the form has none */
    uint8_t *panels;
    int64_t outputs, first, padded, group, bits;
} pack_arguments;

static int64_t bytes_of_group(int64_t group, int64_t bits, int minimums) { return 64 + (minimums ? 64 : 0) + group * PANEL_OUTPUTS * bits / 8; }

/* Position of the code of (output, k) in its group, and the bits by which it is shifted. */
static int64_t place(int64_t output, int64_t k, int64_t bits, int64_t block, int *shift) {
    const int64_t half = output / 16, o = output % 16, eight = k / 8, i = k % 8;
    *shift = 0;
    if (bits == 8) return eight * 256 + (block == 4 ? i / 4 * 128 + half * 64 + o * 4 + i % 4 : half * 128 + o * 8 + i);
    if (block == 4) {
        *shift = i / 4 * 4;
        return eight * 128 + half * 64 + o * 4 + i % 4;
    }
    *shift = o / 8 * 4;
    return eight * 128 + half * 64 + o % 8 * 8 + i;
}

/* Pack outputs [first, first + outputs) of a weight, each once, into panels of zeros. */
EXPORT void armature_pack_int(const pack_arguments *a) {
    const int64_t groups = a->padded / a->group, bytes = bytes_of_group(a->group, a->bits, a->minimums != NULL), block = armature_now()->block;
    const int64_t header = a->minimums ? 128 : 64, last = a->first + a->outputs;
#pragma omp parallel for schedule(dynamic, 1) /* a panel is packed by one thread, since outputs share its bytes */
    for (int64_t panel = a->first / PANEL_OUTPUTS; panel < (last + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS; panel++)
        for (int64_t n = panel * PANEL_OUTPUTS; n < (panel + 1) * PANEL_OUTPUTS; n++) {
            const int64_t row = n - a->first, o = n % PANEL_OUTPUTS;
            if (row < 0 || row >= a->outputs) continue;
            for (int64_t g = 0; g < groups; g++) {
                uint8_t *target = a->panels + (panel * groups + g) * bytes;
                memcpy(target + o * 2, a->scales + row * groups + g, 2);
                if (a->minimums) memcpy(target + 64 + o * 2, a->minimums + row * groups + g, 2);
                const uint8_t *codes = a->codes + row * a->padded + g * a->group;
                for (int64_t k = 0; k < a->group; k++) {
                    int shift;
                    uint8_t *at = target + header + place(o, k, a->bits, block, &shift);
                    *at = (uint8_t)(*at | codes[k] << shift);
                }
            }
        }
}

static float widened(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    union { uint32_t bits; float number; } cast = {(uint32_t)half << 16};
    return cast.number;
}

/* Dequantize one output of one group. */
void armature_row_int(const rows_arguments *a, int64_t id, int64_t from, int64_t count, float *out) {
    const int64_t groups = a->padded / a->group, bytes = bytes_of_group(a->group, a->form, a->minimums != 0), output = id % PANEL_OUTPUTS;
    const uint8_t *group = a->weight + (id / PANEL_OUTPUTS * groups + from / a->group) * bytes;
    const float scale = widened(group + output * 2), minimum = a->minimums ? widened(group + 64 + output * 2) : -8 * scale;
    const int64_t header = a->minimums ? 128 : 64, block = armature_now()->block;
    for (int64_t k = 0; k < count; k++) {
        int shift;
        const uint8_t byte = group[header + place(output, k, a->form, block, &shift)];
        out[k] = a->form == FORM_INT8 ? scale * (float)(int8_t)byte : scale * (float)(byte >> shift & 15) + minimum;
    }
}
