/* Random numbers that are the same in every run, buffers, and the output of failures. */
#include "proof.h"

#include <stdarg.h>

int64_t threads = 1, failures;

static uint64_t state = 0x9e3779b97f4a7c15;

int64_t below(int64_t limit) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (int64_t)((state >> 16) % (uint64_t)limit);
}

int64_t between(int64_t first, int64_t last) { return first + below(last - first + 1); }

float number(void) { return (float)between(-32768, 32768) / 32768; }

void *room(int64_t bytes) {
    void *p = NULL;
    if (posix_memalign(&p, 64, (size_t)bytes) != 0) abort();
    memset(p, 0x7b, (size_t)bytes);
    return p;
}

uint16_t bf16_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float float_of_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

void set_element(void *rows, int64_t wide, int64_t at, float x) {
    if (wide) ((float *)rows)[at] = x;
    else ((uint16_t *)rows)[at] = bf16_of_float(x);
}

float get_element(const void *rows, int64_t wide, int64_t at) { return wide ? ((const float *)rows)[at] : float_of_bf16(((const uint16_t *)rows)[at]); }

void run(int64_t code, const void *arguments) {
    const operation asked = {code, arguments};
    if (armature_run(&asked, 1, threads) != 0) failed("operation %d has no kernel", (int)code);
}

void failed(const char *format, ...) {
    va_list words;
    va_start(words, format);
    if (++failures <= 100) {
        printf("FAILED: ");
        vprintf(format, words);
        printf("\n");
    }
    va_end(words);
}

int same(float a, float b) { return memcmp(&a, &b, 4) == 0 || (a != a && b != b); }

int close_to(double value, double expected, double tolerance) {
    if (expected != expected) return value != value;
    return fabs(value - expected) <= tolerance;
}
