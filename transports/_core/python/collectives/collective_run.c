/* Collectives under way: their beginning, their segments, their end. See collective.h. */
#include "collective.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* --- the end ---------------------------------------------------------------------------------- */

static void end(struct pc_running *self) {
    if (self->pipeline.status == 0 && self->bucket != NULL)
        pc_bucket_unpack(self->bucket);
    if (self->pipeline.status == 0 || self->pipeline.status == PC_UNFIT)
        pc_context_end(self->context, self->call);
    pc_context_let_go(self->context);
    self->context = NULL;
    self->call = NULL;
    pc_pipeline_free(&self->pipeline);
    if (!self->is_launched) {
        self->op.status = self->pipeline.status;
        atomic_store_explicit(&self->op.done, 1, memory_order_relaxed);
        return;
    }
    pc_started_end((struct pc_started *)self, self->pipeline.status, self->pipeline.status != 0);
}

/* Have Python see what has come. */
static void hold(struct pc_running *self) {
    self->is_held = true;
    pc_engine_post(self->collectives->engine, &self->event);
}

/* --- blocks ----------------------------------------------------------------------------------- */

static void pipeline_ended(struct pc_pipeline *pipeline);

static void start_second(struct pc_running *self, const pc_plan *plan) {
    struct pc_blocks *blocks = self->blocks;
    pc_pipeline_free(&self->pipeline);
    self->pipeline = (struct pc_pipeline){.like = {.table = &plan->way.table,
                                                   .places = blocks->places,
                                                   .source_keeper = self->source_keeper,
                                                   .target_keeper = self->source_keeper,
                                                   .call = self->call,
                                                   .subcall = 1,
                                                   .num_segments = plan->num_segments,
                                                   .granule = plan->granule},
                                          .context = self->context,
                                          .ended = pipeline_ended,
                                          .owner = self};
    if (pc_blocks_second(blocks, &self->collectives->engine->engine) &&
        pc_pipeline_prepare(&self->pipeline)) {
        pc_pipeline_start(&self->pipeline);
        return;
    }
    self->pipeline.status = -ENOMEM;
    end(self);
}

void pc_collective_go_on(struct pc_running *self, const pc_plan *plan) {
    struct pc_engine *engine = &self->collectives->engine->engine;
    if (!self->under_way || self->blocks == NULL || !self->blocks->has_second)
        return;
    pc_engine_enter(engine);
    start_second(self, plan);
    pc_engine_leave(engine);
}

static void pipeline_ended(struct pc_pipeline *pipeline) {
    struct pc_running *self = pipeline->owner;
    struct pc_blocks *blocks = self->blocks;
    if (pipeline->status != 0 || blocks == NULL) {
        end(self);
        return;
    }
    if (blocks->has_second)
        pc_blocks_look(blocks);
    if (blocks->longest == 0 || blocks->longest == PC_UNKNOWN) {
        if (blocks->longest == 0 && pc_blocks_settle(blocks))
            end(self);
        else
            hold(self);
        return;
    }
    PyObject **second = self->plan->second;
    PyObject *plan = second != NULL ? second[pc_second_at(blocks->longest)] : NULL;
    if (plan != NULL)
        start_second(self, (pc_plan *)plan);
    else
        hold(self);
}

/* --- what its root announces ------------------------------------------------------------------ */

static bool is_expected(const struct pc_running *self) {
    const struct pc_announced *announced = &self->plan->announced;
    size_t inline_nbytes = announced->inline_nbytes > 0 ? (size_t)announced->inline_nbytes : 0;
    return announced->head != NULL &&
           self->announcement_nbytes == announced->head_nbytes + inline_nbytes &&
           memcmp(self->announcement, announced->head, announced->head_nbytes) == 0;
}

static void announcement_ended(struct pc_run *run) {
    struct pc_running *self = run->owner;
    const struct pc_announced *announced = &self->plan->announced;
    run->owner = NULL;
    if (run->status != 0) {
        pc_pipeline_take_status(&self->pipeline, run);
        end(self);
        return;
    }
    if (!announced->is_root) {
        self->announcement_nbytes = run->came;
        self->is_raw = (self->x == NULL || self->x == Py_None) &&
                       pc_announces_object(self->announcement, run->came);
        if (self->is_raw) {
            end(self);
            return;
        }
        if (!is_expected(self)) {
            hold(self);
            return;
        }
        if (announced->inline_nbytes > 0)
            memcpy(self->target, self->announcement + announced->head_nbytes,
                   (size_t)announced->inline_nbytes);
    }
    if (announced->inline_nbytes >= 0)
        end(self);
    else
        pc_pipeline_start(&self->pipeline);
}

/* Send the announcement, or receive it and pass it on. */
static void announce(struct pc_running *self) {
    const struct pc_announced *announced = &self->plan->announced;
    bool is_root = announced->is_root;
    struct pc_run *run = self->pipeline.runs; /* no segment needs it yet */
    self->announcement_place =
        (struct pc_chunk_place){.nbytes = self->announcement_nbytes,
                                .source = is_root ? 0 : -1,
                                .target = is_root ? -1 : 0};
    *run = (struct pc_run){.table = &announced->way.table,
                           .places = &self->announcement_place,
                           .source = self->announcement,
                           .target = self->announcement,
                           .call = self->call,
                           .takes_less = !is_root,
                           .num_segments = 1,
                           .granule = 1,
                           .ended = announcement_ended,
                           .owner = self};
    if (!pc_run_start(self->context, run)) {
        run->owner = NULL;
        self->pipeline.status = -ENOMEM;
        end(self);
    }
}

/* Make its memory; that of the root holds it. False: there is none. */
static bool prepare_announcement(struct pc_running *self) {
    const struct pc_announced *announced = &self->plan->announced;
    size_t inline_nbytes = announced->inline_nbytes > 0 ? (size_t)announced->inline_nbytes : 0;
    if (self->announcement != NULL || self->is_left)
        return true;
    self->announcement_nbytes =
        announced->is_root ? announced->head_nbytes + inline_nbytes : announced->most;
    self->announcement = malloc(self->announcement_nbytes + 1);
    if (self->announcement == NULL)
        return false;
    if (announced->is_root) {
        memcpy(self->announcement, announced->head, announced->head_nbytes);
        memcpy(self->announcement + announced->head_nbytes, self->source, inline_nbytes);
    }
    return true;
}

void pc_collective_settle(struct pc_running *self, int status) {
    if (!self->under_way)
        return;
    self->pipeline.status = status;
    end(self);
}

/* --- beginning -------------------------------------------------------------------------------- */

/* With the engine's lock. False: nothing has happened. */
static bool launch(struct pc_running *self, const unsigned char *text, size_t text_nbytes) {
    pc_engine_object *engine = self->collectives->engine;
    struct pc_context *context = self->collectives->context->context;
    if (context == NULL || context->broken != 0)
        return false;
    pc_op_begin(&self->op, &engine->drive, -1);
    self->call = pc_context_begin(context, text, text_nbytes);
    if (self->call == NULL)
        return false;
    self->number = self->call->number;
    self->context = context;
    context->num_users++;
    pc_engine_enter(&engine->engine); /* it is launched before it hears of anything */
    self->pipeline.like.call = self->call;
    self->pipeline.context = context;
    if (self->is_left)
        hold(self);
    else if (self->plan->announced.is_announced)
        announce(self);
    else
        pc_pipeline_start(&self->pipeline);
    if (!pc_op_is_done(&self->op)) {
        self->is_launched = self->under_way = true;
        self->is_pending = !self->is_blocking;
        if (self->is_pending)
            pc_drive_pending(&engine->drive, 1);
    }
    pc_engine_leave(&engine->engine);
    return true;
}

struct pc_running *pc_collective_start(struct pc_running *started) {
    unsigned char few[512];
    pc_engine_object *engine = started->collectives->engine;
    const pc_plan *plan = started->plan;
    PyObject *itself = (PyObject *)started;
    bool gives_number = started->source == &started->numbers[1];
    bool makes_number = started->number_dtype != 0;
    const struct pc_blocks *blocks = started->blocks;
    started->pipeline = (struct pc_pipeline){
        .like = {.table = &plan->way.table,
                 .places = blocks != NULL ? blocks->places : plan->places,
                 .grown = blocks != NULL ? blocks->grown : NULL,
                 .reduction = plan->reduction,
                 .source = started->source,
                 .target = started->target,
                 .source_keeper = gives_number ? itself : started->source_keeper,
                 .target_keeper = makes_number ? itself : started->target_keeper,
                 .subcall = plan->announced.is_announced,
                 .num_segments = plan->num_segments,
                 .granule = plan->granule},
        .ended = pipeline_ended,
        .owner = started};
    bool has_memory = pc_pipeline_prepare(&started->pipeline) &&
                      (!plan->announced.is_announced || prepare_announcement(started));
    size_t text_nbytes = plan->text_nbytes + 1, most = text_nbytes + PC_MOST_PLACE_NBYTES;
    unsigned char *text = most <= sizeof few ? few : malloc(most);
    bool done = false;
    if (has_memory && text != NULL) {
        struct pc_turn turn;
        memcpy(text, plan->text, plan->text_nbytes);
        text[plan->text_nbytes] = 0;
        text_nbytes += pc_call_place((char *)text + text_nbytes);
        Py_INCREF(itself);
        if (pc_engine_take(engine, &turn)) {
            done = launch(started, text, text_nbytes);
            pc_engine_give(engine, &turn);
        }
        if (!done || !started->is_launched) {
            pc_collective_let_go((struct pc_started *)started);
            Py_DECREF(itself);
        }
    }
    if (text != few)
        free(text);
    if (done && !started->is_launched && started->pipeline.status != 0) {
        PyObject *said = PyObject_CallMethod(itself, "_fail", NULL);
        done = said != NULL;
        Py_XDECREF(said);
    }
    if (done && pc_engine_hear(engine) == 0)
        return started;
    Py_DECREF(itself);
    return NULL;
}

/* --- what is asked of one that is under way --------------------------------------------------- */

bool pc_collective_give_up(struct pc_started *started) {
    struct pc_running *self = (struct pc_running *)started;
    struct pc_engine *engine = &self->collectives->engine->engine;
    if (!self->under_way)
        return false;
    pc_engine_enter(engine);
    self->pipeline.status = PC_CONTEXT_CLOSED; /* nobody asks why */
    pc_pipeline_cancel(&self->pipeline);
    end(self);
    pc_engine_leave(engine);
    return true;
}

void pc_collective_let_go(struct pc_started *started) {
    struct pc_running *self = (struct pc_running *)started;
    Py_CLEAR(self->x);
    Py_CLEAR(self->source_keeper);
    struct pc_bucket *bucket = self->bucket;
    self->bucket = NULL;
    pc_bucket_free(bucket);
}

size_t pc_collective_awaited(const struct pc_running *self, int *ranks, size_t most) {
    return self->under_way ? pc_pipeline_awaited(&self->pipeline, ranks, most) : 0;
}
