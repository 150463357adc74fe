/* Running the segments of a schedule. See pipeline.h. */
#include "pipeline.h"

#include <errno.h>
#include <stdlib.h>

bool pc_pipeline_prepare(struct pc_pipeline *pipeline) {
    uint32_t count = pipeline->like.num_segments;
    uint32_t most = count < PC_SEGMENTS_IN_FLIGHT ? count : PC_SEGMENTS_IN_FLIGHT;
    pipeline->most = most;
    pipeline->runs = most == 1 ? &pipeline->one : calloc(most, sizeof *pipeline->runs);
    return pipeline->runs != NULL;
}

void pc_pipeline_free(struct pc_pipeline *pipeline) {
    if (pipeline->runs != &pipeline->one)
        free(pipeline->runs);
    pipeline->runs = NULL;
    pipeline->most = 0;
}

void pc_pipeline_cancel(struct pc_pipeline *pipeline) {
    for (uint32_t index = 0; index < pipeline->most; index++)
        if (pipeline->runs[index].owner != NULL)
            (void)pc_run_cancel(&pipeline->runs[index]);
    pipeline->in_flight = 0;
}

void pc_pipeline_take_status(struct pc_pipeline *pipeline, const struct pc_run *run) {
    pipeline->status = run->status;
    pipeline->from = run->from;
    pipeline->came = run->came;
    pipeline->expected = run->expected;
}

static void run_ended(struct pc_run *run);

static void run_asked(struct pc_run *run) {
    struct pc_pipeline *pipeline = run->owner;
    pipeline->asked(pipeline);
}

/* As many segments as may be under way; and so again whenever one has ended. */
void pc_pipeline_start(struct pc_pipeline *pipeline) {
    pipeline->filling = true;
    while (pipeline->status == 0 && pipeline->next < pipeline->like.num_segments &&
           pipeline->in_flight < pipeline->most) {
        struct pc_run *run = pipeline->runs;
        while (run->owner != NULL)
            run++;
        *run = pipeline->like;
        run->subcall += (uint16_t)pipeline->next;
        run->segment = pipeline->next++;
        run->asked = pipeline->asked != NULL ? run_asked : NULL;
        run->ended = run_ended;
        run->owner = pipeline;
        pipeline->in_flight++;
        if (!pc_run_start(pipeline->context, run)) {
            run->owner = NULL;
            pipeline->in_flight--;
            pipeline->status = -ENOMEM;
        }
    }
    pipeline->filling = false;
    if (pipeline->status != 0)
        pc_pipeline_cancel(pipeline);
    if (pipeline->in_flight == 0)
        pipeline->ended(pipeline);
}

static void run_ended(struct pc_run *run) {
    struct pc_pipeline *pipeline = run->owner;
    run->owner = NULL;
    pipeline->in_flight--;
    if (run->status != 0 && pipeline->status == 0)
        pc_pipeline_take_status(pipeline, run);
    if (!pipeline->filling)
        pc_pipeline_start(pipeline);
}

size_t pc_pipeline_awaited(const struct pc_pipeline *pipeline, int *ranks, size_t most) {
    size_t count = 0;
    for (uint32_t index = 0; index < pipeline->most; index++)
        if (pipeline->runs[index].owner != NULL)
            count += pc_run_awaited(&pipeline->runs[index], ranks + count, most - count);
    return count;
}

uint32_t pc_pipeline_next_asked(struct pc_pipeline *pipeline, struct pc_run **run) {
    for (uint32_t index = 0; index < pipeline->most; index++) {
        *run = &pipeline->runs[index];
        uint32_t position = (*run)->owner != NULL ? pc_run_next_asked(*run) : PC_NO_STEP;
        if (position != PC_NO_STEP)
            return position;
    }
    return PC_NO_STEP;
}

struct pc_run *pc_pipeline_run(struct pc_pipeline *pipeline, uint32_t segment) {
    for (uint32_t index = 0; index < pipeline->most; index++)
        if (pipeline->runs[index].owner != NULL && pipeline->runs[index].segment == segment)
            return &pipeline->runs[index];
    return NULL;
}
