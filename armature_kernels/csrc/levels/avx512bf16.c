/* AVX-512 with VNNI and products of bf16: Intel Cooper Lake and Sapphire Rapids, AMD Zen 4 and newer. */
#define LEVEL level_avx512bf16
#define NAME "avx512bf16"
#define LANES 16
#define BLOCK 4
#define TILE_ROWS 12
#define TILE_ALIGN 1
#define ATTENTION_PANELS 1

#include "../tile_avx512.h"
#include "../kernels.h"
