/* Armv8.2 with dot products and matrix products of bytes: AWS Graviton 3 and 4, Arm Neoverse V1, N2, V2, Apple M2 and newer. */
#define LEVEL level_i8mm
#define NAME "i8mm"
#define LANES 4
#define BLOCK 8
#define TILE_ROWS 12
#define TILE_ALIGN 2

#include "../tile_i8mm.h"
#include "../kernels.h"
