/* Shared by the parts of the driver: random numbers, buffers of exact size, one line per failure, and the library's
 * functions. */
#ifndef ARMATURE_PROOF_H
#define ARMATURE_PROOF_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops.h"

const char *armature_level(void);
int armature_select(const char *name);
int armature_has(int64_t code);
int64_t armature_tiles(int64_t what);
int64_t armature_run(const operation *operations, int64_t count, int64_t threads);
void armature_run_lanes(const lanes_arguments *a);

extern int64_t threads; /* threads on which operations run */
extern int64_t failures;

/* 0 to below. */
int64_t below(int64_t limit);
int64_t between(int64_t first, int64_t last);
/* -1 to 1, with 16 bits. */
float number(void);

/* Not initialised, aligned as the library's own allocations; the byte after it must not be touched. */
void *room(int64_t bytes);
uint16_t bf16_of_float(float x); /* to nearest, ties to even */
float float_of_bf16(uint16_t x);

/* Element `at` of rows of fp32 or, if not `wide`, bf16. */
void set_element(void *rows, int64_t wide, int64_t at, float x);
float get_element(const void *rows, int64_t wide, int64_t at);

void run(int64_t code, const void *arguments);
/* Print one line for a failed check. */
void failed(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same bits, or both NaN. */
int same(float a, float b);
int close_to(double value, double expected, double tolerance);

/* The tests: each checks many shapes at the level in use and returns how many. */
typedef int64_t check(void);
check quantized_rows, exact_products, near_products, bad_activations, rows_alone, widened_rows, norms, layer_norms, activated_rows, whole_texts, texts_in_lanes, gates, gathers, pools, stored_rows, turning_angles, picks, bf16_products, bf16_rows_alone, bf16_rows, fp32_products, fp32_rows_alone, fp32_rows, top_elements, attends, turns, int4_scales, gptq_codes, wide_products, adapters, routes, mixtures, latent_rows, recurrences, recurrent_inputs, altered_streams, matched_rows, odd_calls;

#endif
