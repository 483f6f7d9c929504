/* Armv8.2 with dot products: AWS Graviton 2, Ampere Altra, Arm Neoverse N1, Apple M1. */
#define LEVEL level_dotprod
#define NAME "dotprod"
#define LANES 4
#define BLOCK 4
#define TILE_ROWS 12
#define TILE_ALIGN 1

#include "../tile_dotprod.h"
#include "../kernels.h"
