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
    pc_engine_object *engine = request->messages->engine;
    request->status = status;
    request->under_way = false;
    if (request->is_starting)
        return; /* who starts it sees that */
    if (request->is_pending)
        pc_drive_pending(&engine->drive, -1);
    if (request->is_reporting) {
        /* who tells it lets it go */
    } else if (request->is_watched || request->event.stands) {
        request->event.kind = PC_EVENT_REQUEST;
        pc_engine_post(engine, &request->event); /* which keeps it alive */
    } else {
        request->next = engine->ended;
        pc_engine_set(&engine->ended, request);
    }
    pc_watch_wake(request);
    pc_op_end(&request->op, status);
}

void pc_request_hold(struct pc_request *request) {
    request->status = PC_HELD;
    if (request->is_starting)
        return; /* who starts it goes on with it */
    bool awaited = is_awaited(request);
    if (request->is_watched || !awaited) {
        request->event.kind = PC_EVENT_REQUEST;
        pc_engine_post(request->messages->engine, &request->event);
    }
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

static void take_ended(pc_engine_object *engine, void *argument) {
    struct pc_request **ended = argument;
    *ended = engine->ended;
    pc_engine_set(&engine->ended, NULL);
}

static void let_go(struct pc_request *request) {
    if (!pc_request_receives(request)) {
        struct pc_views *views = request->views;
        request->views = NULL;
        pc_views_release(views);
        Py_CLEAR(request->array);
        Py_CLEAR(request->keeper);
    }
    pc_watch_ended(request);
    Py_DECREF((PyObject *)request);
}

void pc_engine_let_go(pc_engine_object *engine) {
    pc_link_settle(engine);
    if (pc_engine_has(engine->ended_collectives))
        pc_engine_let_go_collectives(engine);
    if (!pc_engine_has(engine->ended))
        return;
    struct pc_request *ended = NULL;
    if (!pc_engine_do(engine, take_ended, &ended))
        take_ended(engine, &ended); /* it is closed: nobody else comes here */
    while (ended != NULL) {
        struct pc_request *request = ended;
        ended = request->next;
        let_go(request);
    }
}

static struct pc_request *of_event(struct pc_event *event) {
    return (struct pc_request *)((char *)event - offsetof(struct pc_request, event));
}

void pc_request_event_taken(struct pc_event *event) { of_event(event)->is_reporting = true; }

struct telling {
    struct pc_request *request;
    bool has_ended;
};

static void reported(pc_engine_object *engine, void *argument) {
    struct telling *telling = argument;
    (void)engine;
    telling->request->is_reporting = false;
    telling->has_ended = !telling->request->under_way;
}

PyObject *pc_request_event(pc_engine_object *engine, struct pc_event *event) {
    struct pc_request *request = of_event(event);
    PyObject *tuple = Py_BuildValue("iO", PC_EVENT_REQUEST, (PyObject *)request);
    struct telling telling = {.request = request};
    if (!pc_engine_do(engine, reported, &telling))
        reported(engine, &telling); /* it is closed: nobody else comes here */
    if (telling.has_ended)
        let_go(request);
    return tuple;
}

/* --- beginning -------------------------------------------------------------------------------- */

struct pc_request *pc_request_new(pc_messages *messages, enum pc_request_kind kind,
                                  bool is_blocking) {
    PyTypeObject *type = (PyTypeObject *)messages->type;
    struct pc_request *request =
        (struct pc_request *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (request == NULL)
        return NULL;
    request->messages = (pc_messages *)Py_NewRef((PyObject *)messages);
    request->kind = kind;
    request->is_blocking = is_blocking;
    return request;
}

struct starting {
    struct pc_request *request;
    const void *header;
    size_t header_nbytes;
    enum pc_way way;
};

static void start(pc_engine_object *engine, void *argument) {
    struct starting *starting = argument;
    struct pc_request *request = starting->request;
    struct pc_context *context = request->messages->context->context;
    pc_op_begin(&request->op, &engine->drive, -1);
    request->under_way = request->is_starting = true;
    if (context == NULL)
        pc_request_end(request, PC_CONTEXT_CLOSED);
    else if (pc_request_receives(request))
        pc_receive_start(context, &request->receive);
    else if (pc_send_start(context, &request->send, starting->header, starting->header_nbytes,
                           starting->way) != PC_UNDER_WAY)
        pc_request_end(request, request->send.status);
    request->is_starting = false;
    if (!request->under_way) {
        starting->request = NULL;
        atomic_store_explicit(&request->op.done, 1, memory_order_relaxed);
    } else if (!request->is_blocking) {
        request->is_pending = true;
        pc_drive_pending(&engine->drive, 1);
    }
}

struct pc_request *pc_request_start(struct pc_request *request, const void *header,
                                    size_t header_nbytes, enum pc_way way) {
    pc_engine_object *engine = request->messages->engine;
    struct starting starting = {
        .request = request, .header = header, .header_nbytes = header_nbytes, .way = way};
    Py_INCREF((PyObject *)request);
    bool done = pc_engine_do(engine, start, &starting);
    /* Whether it has ended by now may be found by another thread, too, which then lets it go. */
    if (!done || starting.request == NULL)
        let_go(request);
    pc_engine_let_go(engine); /* a message to oneself has ended another one, too */
    if (done && pc_request_go_on(request) == 0 && pc_engine_hear(engine) == 0)
        return request;
    Py_DECREF((PyObject *)request);
    if (!done)
        pc_engine_is_closed();
    return NULL;
}

bool pc_request_give_up(struct pc_request *request) {
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
