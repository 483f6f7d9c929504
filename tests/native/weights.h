/* Quantized weights: codes, scales and minimums, and the panels that the library packs from them. */
#ifndef ARMATURE_WEIGHTS_H
#define ARMATURE_WEIGHTS_H

#include "activations.h"

typedef struct {
    int64_t outputs, inputs, padded, group, groups, bits, header;
    uint8_t *codes;         /* [outputs, padded]: int4 as 0 to 15, int8 as they are */
    uint16_t *scales, *low; /* [outputs, groups]: the scales and the minimums */
    int8_t *scale_codes;    /* [outputs, groups], with a scale per output in `scales` [outputs] */
    uint8_t *panels;
} weights;

weights new_weights(int64_t outputs, int64_t inputs, int64_t group, int64_t bits, int64_t header, int kind);
void free_weights(weights *w);
/* The effective code: without its zero point if the form has one. */
int32_t code_of(const weights *w, int64_t output, int64_t k);
float scale_of(const weights *w, int64_t output, int64_t g);
float minimum_of(const weights *w, int64_t output, int64_t g);

#endif
