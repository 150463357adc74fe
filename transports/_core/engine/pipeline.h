/* Running one schedule on one segment of every chunk after the other: several segments are under
   way at a time, each in a subcall of its own, so while a rank hands one on, the next comes in.
   Plain C, without Python.

   Nothing here locks: the caller holds the engine's lock for everything. */
#ifndef PC_PIPELINE_H
#define PC_PIPELINE_H

#include "run.h"

/* Segments that are under way at a time. */
#define PC_SEGMENTS_IN_FLIGHT 16

/* The caller sets the first block, and all else to zero. Its memory, table and places are the
   caller's. */
struct pc_pipeline {
    /* What its runs have, but for segment, functions and owner: the first subcall, and 1 segment at
       least; of a single one `grown`. */
    struct pc_run like;
    struct pc_context *context;
    /* as of a run: `pc_pipeline_next_asked` says what */
    void (*asked)(struct pc_pipeline *pipeline);
    /* the last that is done with it; perhaps before the start returns */
    void (*ended)(struct pc_pipeline *pipeline);
    void *owner;

    int status, from; /* when it has ended: as of the first run that has failed */
    size_t came, expected;

    struct pc_run *runs, one; /* those without an owner are free */
    uint32_t most, in_flight, next;
    bool filling;
};

/* Get its memory, for all segments. False: there is none. */
bool pc_pipeline_prepare(struct pc_pipeline *pipeline);
/* Start what was prepared, and has a call and a context. It ends in any case. */
void pc_pipeline_start(struct pc_pipeline *pipeline);
/* Give up what is under way: it does not end, and its memory is not used any more. */
void pc_pipeline_cancel(struct pc_pipeline *pipeline);
/* Let go of its memory, when it has ended, was given up, or was not started. May be called
   again. */
void pc_pipeline_free(struct pc_pipeline *pipeline);
/* As of runs. */
size_t pc_pipeline_awaited(const struct pc_pipeline *pipeline, int *ranks, size_t most);
/* The next step that the owner shall do, and its run; PC_NO_STEP: there is none. */
uint32_t pc_pipeline_next_asked(struct pc_pipeline *pipeline, struct pc_run **run);
/* The run of a segment; NULL: it is not under way. */
struct pc_run *pc_pipeline_run(struct pc_pipeline *pipeline, uint32_t segment);
/* It has failed as a run has. */
void pc_pipeline_take_status(struct pc_pipeline *pipeline, const struct pc_run *run);

#endif
