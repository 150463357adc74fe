/* `_core.wait_all` and `_core.wait_any`: waiting for several requests of one engine at once. */
#include "python/collectives/collective.h"
#include "messages.h"

#include <stdlib.h>

/* What an entry gives that only belongs to the one before it: nothing. */
#define NO_PLACE -1

/* A request, or a collective: then `request` is NULL. A receive and a send that are one request are
   two entries. */
struct awaited {
    PyObject *object; /* kept */
    struct pc_request *request;
    struct pc_op *op;
    Py_ssize_t place; /* of its result */
    bool was_done;    /* when it was last looked at, without the engine's lock */
};

struct gathering {
    pc_engine_object *engine;
    struct pc_several several;
    PyObject *listed;
    struct awaited *awaited;
    Py_ssize_t count;
    bool any;      /* one is enough */
    bool is_taken; /* another thread waits for one of them */
    bool is_held;  /* one of them holds a message */
};

static void gather(pc_engine_object *engine, void *argument) {
    struct gathering *gathering = argument;
    uint32_t left = 0;
    bool is_new = false; /* one has ended since it was looked at */
    (void)engine;
    gathering->is_taken = gathering->is_held = false;
    for (Py_ssize_t index = 0; index < gathering->count; index++) {
        struct pc_request *request = gathering->awaited[index].request;
        struct pc_op *op = gathering->awaited[index].op;
        gathering->is_held |= request != NULL && pc_request_is_held(request);
        if (pc_op_is_done(op)) {
            is_new |= !gathering->awaited[index].was_done;
            continue;
        }
        if (pc_several_add(&gathering->several, op))
            left++;
        else
            gathering->is_taken = true;
    }
    if (gathering->any && left > 0)
        left = is_new ? 0 : 1;
    atomic_store_explicit(&gathering->several.left, left, memory_order_relaxed);
}

static void scatter(pc_engine_object *engine, void *argument) {
    struct gathering *gathering = argument;
    (void)engine;
    for (Py_ssize_t index = 0; index < gathering->count; index++)
        pc_several_remove(&gathering->several, gathering->awaited[index].op);
}

static void add(struct gathering *gathering, PyObject *object, struct pc_request *request,
                struct pc_op *op, Py_ssize_t place) {
    gathering->awaited[gathering->count++] =
        (struct awaited){Py_NewRef(object), request, op, place, false};
}

/* Add what is waited for in the core: an item itself, or what a persistent one has started. NULL:
   it is not in the core. Else its engine. */
static pc_engine_object *add_item(struct gathering *gathering, PyObject *item, Py_ssize_t place) {
    PyObject *started = pc_persistent_last(item), *object = started != NULL ? started : item;
    struct pc_request *received, *sent;
    pc_engine_object *engine;
    if (PyObject_TypeCheck(object, pc_request_type)) {
        struct pc_request *request = (struct pc_request *)object;
        add(gathering, object, request, &request->op, place);
        return request->messages->engine;
    }
    if (pc_both_parts(object, &received, &sent)) {
        add(gathering, object, received, &received->op, place);
        add(gathering, (PyObject *)sent, sent, &sent->op, NO_PLACE);
        return received->messages->engine;
    }
    if (!pc_is_collective(object))
        return NULL;
    struct pc_op *op = pc_collective_op(object, &engine);
    add(gathering, object, NULL, op, place);
    return engine;
}

/* Keep requests of one engine, none of which holds the others up for ever; false: leave it to
   Python. */
static bool collect(struct gathering *gathering) {
    Py_ssize_t count = PyList_Size(gathering->listed);
    for (Py_ssize_t place = 0; place < count; place++) {
        pc_engine_object *engine =
            add_item(gathering, PyList_GetItem(gathering->listed, place), place);
        if (engine == NULL || (gathering->engine != NULL && gathering->engine != engine))
            return false;
        gathering->engine = engine;
    }
    return gathering->engine != NULL && !gathering->engine->python_busy;
}

static bool is_done(const struct awaited *awaited) {
    return awaited->request != NULL ? pc_request_is_done(awaited->request)
                                    : pc_op_is_done(awaited->op);
}

static bool is_well(const struct awaited *awaited) {
    return awaited->request != NULL ? awaited->request->status == 0
                                    : pc_op_is_done(awaited->op) && awaited->op->status == 0;
}

/* Whether all are done, or any; those that hold a message are gone on with. -1 with an
   exception. */
static int are_done(struct gathering *gathering) {
    bool every = true, any = false;
    for (Py_ssize_t index = 0; index < gathering->count; index++)
        if (gathering->awaited[index].request != NULL &&
            pc_request_go_on(gathering->awaited[index].request) < 0)
            return -1;
    for (Py_ssize_t index = 0; index < gathering->count; index++)
        gathering->awaited[index].was_done = is_done(&gathering->awaited[index]);
    for (Py_ssize_t index = 0; index < gathering->count; index++) {
        const struct awaited *awaited = &gathering->awaited[index];
        bool done = awaited->was_done, failed = done && !is_well(awaited);
        while (index + 1 < gathering->count && awaited[1].place == NO_PLACE) {
            awaited++, index++;
            bool is_too = awaited->was_done;
            failed |= is_too && !is_well(awaited);
            done &= is_too;
        }
        every &= done;
        any |= done || failed;
    }
    return gathering->any ? any : every;
}

/* Wait a slice of time. 1: all are done, or any; 0: not yet; -1 with an exception. */
static int await(struct gathering *gathering, uint64_t until_ns) {
    int done;
    while ((done = are_done(gathering)) == 0) {
        if (!pc_engine_do(gathering->engine, gather, gathering))
            return 0;
        if (!gathering->is_taken && !gathering->is_held &&
            !pc_several_is_done(&gathering->several)) {
            PyThreadState *state = PyEval_SaveThread();
            pc_drive_wait(&gathering->engine->drive, NULL, &gathering->several, until_ns,
                          PC_FOR_EVER);
            PyEval_RestoreThread(state);
        }
        bool is_over =
            !gathering->is_taken && (gathering->is_held || pc_several_is_done(&gathering->several));
        if (gathering->any || !pc_several_is_done(&gathering->several))
            pc_engine_do(gathering->engine, scatter, gathering);
        pc_engine_let_go(gathering->engine);
        if (!is_over)
            return are_done(gathering);
    }
    return done;
}

/* How long to wait: the time given, or else the default of the first request. */
static bool has_deadline(const struct gathering *gathering, PyObject *seconds,
                         uint64_t *timeout_ns) {
    uint64_t default_ns = PC_FOR_EVER;
    if (gathering->count > 0) {
        const struct awaited *first = &gathering->awaited[0];
        const pc_context_object *context =
            first->request != NULL ? first->request->messages->context
                                   : ((struct pc_started *)first->object)->collectives->context;
        default_ns = context->op_timeout_ns;
    }
    return pc_timeout(seconds, default_ns, timeout_ns);
}

#define FEW 64

/* Begin to wait for what `args` are: a list, and a timeout. `gathering` has room for few. -1 with
   an exception; 0: it is left to Python; 1: so many nanoseconds at most. `end` must follow. */
static int begin(struct gathering *gathering, PyObject *const *args, Py_ssize_t num_args,
                 uint64_t *timeout_ns) {
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "arguments are list, timeout");
        return -1;
    }
    gathering->listed = args[0];
    if (!PyList_CheckExact(args[0]))
        return 0;
    size_t most = (size_t)PyList_Size(args[0]) * 2;
    struct awaited *many = most > FEW ? malloc(most * sizeof *many) : gathering->awaited;
    if (many == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    gathering->awaited = many;
    return collect(gathering) && has_deadline(gathering, args[1], timeout_ns);
}

static void end(struct gathering *gathering, const struct awaited *few) {
    for (Py_ssize_t index = 0; index < gathering->count; index++)
        Py_DECREF(gathering->awaited[index].object);
    if (gathering->awaited != few)
        free(gathering->awaited);
}

static PyObject *result_of(const struct awaited *awaited) {
    if (awaited->request == NULL)
        return pc_collective_result(awaited->object);
    if (awaited->object != (PyObject *)awaited->request)
        return pc_both_result(awaited->object);
    return pc_request_result(awaited->request);
}

/* The results of all; NULL with an exception. */
static PyObject *results_of(const struct gathering *gathering) {
    const struct awaited *last = &gathering->awaited[gathering->count - 1];
    PyObject *results = PyList_New(last->place == NO_PLACE ? last[-1].place + 1 : last->place + 1);
    for (Py_ssize_t index = 0; results != NULL && index < gathering->count; index++) {
        const struct awaited *awaited = &gathering->awaited[index];
        if (awaited->place == NO_PLACE)
            continue;
        PyObject *result = result_of(awaited);
        if (result != NULL)
            PyList_SetItem(results, awaited->place, result);
        else
            Py_CLEAR(results);
    }
    return results;
}

PyObject *pc_wait_all(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    struct awaited few[FEW];
    struct gathering gathering = {.awaited = few};
    uint64_t timeout_ns;
    int status = begin(&gathering, args, num_args, &timeout_ns);
    if (status > 0)
        status = await(&gathering, pc_patience(timeout_ns).until_ns);
    for (Py_ssize_t index = 0; status > 0 && index < gathering.count; index++)
        status = is_well(&gathering.awaited[index]);
    PyObject *results = status > 0    ? results_of(&gathering)
                        : status == 0 ? Py_NewRef(Py_None)
                                      : NULL;
    end(&gathering, few);
    return results;
}

PyObject *pc_wait_any(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    struct awaited few[FEW];
    struct gathering gathering = {.awaited = few, .any = true};
    uint64_t timeout_ns;
    int status = begin(&gathering, args, num_args, &timeout_ns);
    if (status > 0)
        status = await(&gathering, pc_patience(timeout_ns).until_ns);
    end(&gathering, few);
    return status < 0 ? NULL : PyBool_FromLong(status);
}
