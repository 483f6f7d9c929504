/* Codes and scales to panels and back: the layout in ops.h, in plain C, since packing happens once. */
#include <string.h>

#include <omp.h>

#include "level.h"

/* The form of a packed weight. Codes are one byte each, [outputs, padded]: int4 as 0 to 15, int8 as signed bytes. */
typedef struct {
    const uint8_t *codes, *scales; /* scales: bf16 [outputs, groups]; codes int8 [outputs, groups] if they are quantized too */
    const uint16_t *others;        /* bf16: minimums [outputs, groups], or scales of outputs [outputs]; NULL for SCALES */
    uint8_t *panels;
    int64_t outputs, first, padded, group, bits, header;
} pack_arguments;

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

/* Write eight codes of an output to where `place` has them, in panels of zeros; outputs share the bytes of four-bit codes
 * in blocks of eight. */
static void pack_eight(const uint8_t *codes, int64_t output, int64_t bits, int64_t block, uint8_t *target) {
    const int64_t half = output / 16, o = output % 16;
    if (bits == 8 && block == 8) memcpy(target + half * 128 + o * 8, codes, 8);
    else if (bits == 8) memcpy(target + half * 64 + o * 4, codes, 4), memcpy(target + 128 + half * 64 + o * 4, codes + 4, 4);
    else if (block == 4) {
        uint32_t low, high;
        memcpy(&low, codes, 4), memcpy(&high, codes + 4, 4);
        low |= high << 4;
        memcpy(target + half * 64 + o * 4, &low, 4);
    } else {
        uint64_t eight, others;
        uint8_t *at = target + half * 64 + o % 8 * 8;
        memcpy(&eight, codes, 8), memcpy(&others, at, 8);
        others |= eight << (o / 8 * 4);
        memcpy(at, &others, 8);
    }
}

/* Pack outputs [first, first + outputs) of a weight, each once, into panels of zeros. */
EXPORT void armature_pack_int(const pack_arguments *a) {
    const int64_t groups = a->padded / a->group, block = armature_now()->block, last = a->first + a->outputs;
    const panel_layout layout = layout_of(a->bits, a->header, a->group, groups);
    const int64_t size = a->header == DOUBLE_QUANTIZED ? 1 : 2; /* bytes of a scale */
#pragma omp parallel for schedule(dynamic, 1) /* a panel is packed by one thread, since outputs share its bytes */
    for (int64_t panel = a->first / PANEL_OUTPUTS; panel < (last + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS; panel++)
        for (int64_t n = panel * PANEL_OUTPUTS; n < (panel + 1) * PANEL_OUTPUTS; n++) {
            const int64_t row = n - a->first, o = n % PANEL_OUTPUTS;
            if (row < 0 || row >= a->outputs) continue;
            uint8_t *begin = a->panels + panel * layout.bytes;
            if (a->header == DOUBLE_QUANTIZED) memcpy(begin + o * 2, a->others + row, 2);
            for (int64_t g = 0; g < groups; g++) {
                uint8_t *scales = begin + layout.scales + g * layout.next_scales, *target = begin + layout.codes + g * layout.next_codes;
                memcpy(scales + o * size, a->scales + (row * groups + g) * size, (size_t)size);
                if (a->header == SCALES_AND_MINIMUMS) memcpy(scales + 64 + o * 2, a->others + row * groups + g, 2);
                const uint8_t *codes = a->codes + row * a->padded + g * a->group;
                for (int64_t k = 0; k < a->group; k += 8) pack_eight(codes + k, o, a->bits, block, target + k / 8 * (a->bits == 8 ? 256 : 128));
            }
        }
}

static float widened(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    union { uint32_t bits; float number; } cast = {(uint32_t)half << 16};
    return cast.number;
}

/* The scale of a group of an output; `scales` are the group's. */
static float scale_of(int64_t header, const uint8_t *panel, const uint8_t *scales, int64_t output) {
    if (header != DOUBLE_QUANTIZED) return widened(scales + output * 2);
    const float c = (float)(int8_t)scales[output];
    return widened(panel + output * 2) * (c * (c < 0 ? -c : c));
}

/* Dequantize one output of one group. */
void armature_row_int(const rows_arguments *a, int64_t id, int64_t from, int64_t count, float *out) {
    const int64_t g = from / a->group, output = id % PANEL_OUTPUTS, block = armature_now()->block;
    const panel_layout layout = layout_of(a->form, a->header, a->group, a->padded / a->group);
    const uint8_t *panel = a->weight + id / PANEL_OUTPUTS * layout.bytes, *scales = panel + layout.scales + g * layout.next_scales;
    const uint8_t *codes = panel + layout.codes + g * layout.next_codes;
    const float scale = scale_of(a->header, panel, scales, output);
    const float minimum = a->header == SCALES_AND_MINIMUMS ? widened(scales + 64 + output * 2) : -8 * scale;
    for (int64_t k = 0; k < count; k++) {
        int shift;
        const uint8_t byte = codes[place(output, k, a->form, block, &shift)];
        out[k] = a->form == FORM_INT8 ? scale * (float)(int8_t)byte : scale * (float)(byte >> shift & 15) + minimum;
    }
}
