/* The division of a product among threads, for any kind of product. */
#ifndef ARMATURE_DIVISION_H
#define ARMATURE_DIVISION_H

#include <omp.h>
#include <stdint.h>

#define FEW_TILES 4

/* Panels that a single row, and in integers two, multiplies in turns, a part of each at a time: each is a stream of memory
 * of its own, of which some processors read several faster than one. */
#ifndef STREAMS
#define STREAMS 1
#define STREAM_AHEAD 0 /* prefetch distance in bytes of each */
#endif
#define STREAM_ROWS 2 /* of integers */

/* `panels` panels and `tiles` tiles per task. */
typedef struct {
    int64_t num_panels, num_tiles, panels, tiles, panel_tasks, tile_tasks;
} division;

/* STREAMS, unless threads would have less than two tasks each. */
static inline int64_t streams_of(int64_t num_panels) { return num_panels < 2 * STREAMS * omp_get_num_threads() ? 1 : STREAMS; }

/* Few rows: memory is the cost, so a task is `few` panels and threads claim about a megabyte at a time. Many rows: tiles
 * are multiplied with several panels, of which `fit` stay in the cache. If there are too few outputs for all threads,
 * rows are divided too. */
static inline division divide(int64_t num_panels, int64_t num_tiles, int64_t few, int64_t fit) {
    division d = {.num_panels = num_panels, .num_tiles = num_tiles};
    const int64_t wanted = 4 * omp_get_num_threads();
    d.panels = d.num_tiles <= FEW_TILES ? few : d.num_panels / wanted < fit ? d.num_panels / wanted : fit;
    if (d.panels < 1) d.panels = 1;
    d.panel_tasks = (d.num_panels + d.panels - 1) / d.panels;
    d.tile_tasks = d.panel_tasks >= wanted || d.num_tiles <= FEW_TILES ? 1 : (wanted + d.panel_tasks - 1) / d.panel_tasks;
    if (d.tile_tasks > d.num_tiles) d.tile_tasks = d.num_tiles;
    d.tiles = (d.num_tiles + d.tile_tasks - 1) / d.tile_tasks;
    d.tile_tasks = (d.num_tiles + d.tiles - 1) / d.tiles;
    return d;
}

#endif
