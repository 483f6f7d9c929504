/* A program that prints the levels that this processor supports, the best first. The build and tools/native.py run it. */
#include <stdio.h>

#include "processor.h"

int main(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (has_amx()) printf("amx ");
    if (has_avx512bf16()) printf("avx512bf16 ");
    if (has_avx512()) printf("avx512 ");
    if (has_avxvnni()) printf("avxvnni ");
    if (has_avx2()) printf("avx2 ");
#elif defined(__aarch64__)
    if (has_i8mm()) printf("i8mm ");
    if (has_dotprod()) printf("dotprod ");
    printf("neon ");
#endif
    printf("portable\n");
    return 0;
}
