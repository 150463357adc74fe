/* How a send or a receive begins and ends. See request.h. */
#include "watch.h"

#include <errno.h>
#include <stdlib.h>

/* --- ends ------------------------------------------------------------------------------------- */

/* Whether a thread waits in the core, which will look when the op ends. */
static bool is_awaited(const struct pc_request *request) {
    const struct pc_drive *drive = &request->messages->engine->drive;
    if (request->is_blocking ||
        (request->op.several != NULL && request->op.several->ended == NULL))
        return true;
    for (const struct pc_waiter *waiter = drive->first; waiter != NULL; waiter = waiter->next)
        if (waiter->op == &request->op)
            return true;
    return false;
}

void pc_request_end(struct pc_request *request, int status) {
    request->status = status;
    request->under_way = false;
    if (request->is_starting)
        return; /* who starts it sees that */
    pc_watch_wake(request);
    pc_started_end((struct pc_started *)request, status, false);
}

void pc_request_hold(struct pc_request *request) {
    request->status = PC_HELD;
    if (request->is_starting)
        return; /* who starts it goes on with it */
    bool awaited = is_awaited(request);
    if (request->is_watched || !awaited)
        pc_engine_post(request->messages->engine, &request->event);
    if (awaited)
        pc_op_end(&request->op, PC_HELD);
}

void pc_request_sent(struct pc_send *send) { pc_request_end(send->owner, send->status); }

/* Wait for another message, in the place among the receives where it was: the sender has taken the
   last one back. */
static bool start_again(struct pc_request *request) {
    struct pc_context *context = request->messages->context->context;
    struct pc_receive *receive = &request->receive;
    free(request->spare);
    request->spare = NULL;
    if (context == NULL)
        return false;
    /* it has held a message, and said so */
    if (!request->is_starting && pc_op_is_done(&request->op))
        pc_op_begin(&request->op, &request->messages->engine->drive, -1);
    request->status = 0;
    pc_receive_start_at(context, receive, receive->posted.queued.number);
    return true;
}

/* Receive a short message into memory of our own. False: it is held still. */
static bool receive_short(struct pc_request *request) {
    struct pc_receive *receive = &request->receive;
    const struct pc_message *message = receive->message;
    if (request->is_blocking || message->nbytes > PC_SHORT_NBYTES ||
        !pc_value_is_known(message->header, message->header_nbytes, message->nbytes))
        return false;
    free(receive->header);
    receive->header = malloc(message->header_nbytes);
    receive->header_nbytes = message->header_nbytes;
    /* never NULL for want of bytes */
    request->spare = malloc(message->nbytes + (message->nbytes == 0));
    if (receive->header != NULL && request->spare != NULL) {
        memcpy(receive->header, message->header, message->header_nbytes);
        if (pc_receive_into(receive, request->spare) == 0)
            return true;
    }
    free(request->spare);
    request->spare = NULL;
    return false;
}

void pc_request_received(struct pc_receive *receive) {
    struct pc_request *request = receive->owner;
    if (!request->under_way)
        return;
    if (receive->state == PC_RECEIVE_HELD) {
        if (!receive_short(request))
            pc_request_hold(request);
    } else if (receive->state == PC_RECEIVE_ENDED) {
        if (receive->status == PC_TAKEN_BACK && start_again(request))
            return;
        /* What is offered, or comes in fragments, says elsewhere what it is. */
        if (receive->status == PC_REFUSED && receive->header != NULL &&
            receive->header[PC_FORM_AT] > PC_FORM_OBJECT)
            pc_request_hold(request);
        else
            pc_request_end(request, receive->status);
    }
}

void pc_request_let_go(struct pc_started *started) {
    struct pc_request *request = (struct pc_request *)started;
    if (!pc_request_receives(request)) {
        struct pc_views *views = request->views;
        request->views = NULL;
        pc_views_release(views);
        Py_CLEAR(request->array);
        Py_CLEAR(request->keeper);
    }
    pc_watch_ended(request);
}

/* --- beginning -------------------------------------------------------------------------------- */

struct pc_request *pc_request_new(pc_messages *messages, enum pc_request_kind kind,
                                  bool is_blocking) {
    struct pc_request *request =
        pc_started_new(messages->type, &pc_request_ops, messages, is_blocking);
    if (request != NULL)
        request->kind = kind;
    return request;
}

/* With the lock. Whether it is under way. */
static bool start(struct pc_request *request, const void *header, size_t header_nbytes,
                  enum pc_way way) {
    pc_engine_object *engine = request->messages->engine;
    struct pc_context *context = request->messages->context->context;
    pc_op_begin(&request->op, &engine->drive, -1);
    request->under_way = request->is_starting = true;
    if (context == NULL)
        pc_request_end(request, PC_CONTEXT_CLOSED);
    else if (pc_request_receives(request))
        pc_receive_start(context, &request->receive);
    else if (pc_send_start(context, &request->send, header, header_nbytes, way) != PC_UNDER_WAY)
        pc_request_end(request, request->send.status);
    request->is_starting = false;
    if (!request->under_way) {
        request->op.status = request->status;
        atomic_store_explicit(&request->op.done, 1, memory_order_relaxed);
    } else if (!request->is_blocking) {
        request->is_pending = true;
        pc_drive_pending(&engine->drive, 1);
    }
    return request->under_way;
}

struct pc_request *pc_request_start(struct pc_request *request, const void *header,
                                    size_t header_nbytes, enum pc_way way) {
    pc_engine_object *engine = request->messages->engine;
    struct pc_turn turn;
    Py_INCREF((PyObject *)request);
    bool done = pc_engine_take(engine, &turn);
    bool under_way = done && start(request, header, header_nbytes, way);
    pc_engine_give(engine, &turn);
    /* Whether it has ended by now may be found by another thread, too, which then lets it go. */
    if (!under_way) {
        pc_request_let_go((struct pc_started *)request);
        Py_DECREF((PyObject *)request);
    }
    pc_engine_let_go(engine); /* a message to oneself has ended another one, too */
    if (done && pc_request_go_on(request) == 0 && pc_engine_hear(engine) == 0)
        return request;
    if (done) /* a signal handler has raised: nobody would wait for it */
        pc_started_give_up((struct pc_started *)request);
    Py_DECREF((PyObject *)request);
    if (!done)
        pc_engine_is_closed();
    return NULL;
}

bool pc_request_give_up(struct pc_started *started) {
    struct pc_request *request = (struct pc_request *)started;
    struct pc_receive *receive = &request->receive;
    if (!request->under_way)
        return false;
    bool given_up;
    if (!pc_request_receives(request))
        given_up = pc_send_take_back(&request->send);
    else if (pc_request_is_held(request) && receive->state == PC_RECEIVE_ENDED)
        given_up = true; /* it was refused a message that Python could take */
    else
        given_up = pc_receive_give_up(receive);
    if (given_up)
        pc_request_end(request, PC_GIVEN_UP);
    return given_up;
}
