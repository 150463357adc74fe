/* `_core.wait_all`: waiting for several requests of one engine at once. */
#include "messages.h"

#include <stdlib.h>

/* A request, or a collective: then `request` is NULL. */
struct awaited {
    PyObject *object; /* kept */
    struct pc_request *request;
    struct pc_op *op;
};

struct gathering {
    pc_engine_object *engine;
    struct pc_several several;
    PyObject *listed;
    struct awaited *awaited;
    Py_ssize_t count;
    bool is_taken; /* another thread waits for one of them */
    bool is_held;  /* one of them holds a message */
};

static void gather(pc_engine_object *engine, void *argument) {
    struct gathering *gathering = argument;
    uint32_t left = 0;
    (void)engine;
    gathering->is_taken = gathering->is_held = false;
    for (Py_ssize_t index = 0; index < gathering->count; index++) {
        struct pc_request *request = gathering->awaited[index].request;
        struct pc_op *op = gathering->awaited[index].op;
        gathering->is_held |= request != NULL && pc_request_is_held(request);
        if (pc_op_is_done(op))
            continue;
        if (pc_several_add(&gathering->several, op))
            left++;
        else
            gathering->is_taken = true;
    }
    atomic_store_explicit(&gathering->several.left, left, memory_order_relaxed);
}

static void scatter(pc_engine_object *engine, void *argument) {
    struct gathering *gathering = argument;
    (void)engine;
    for (Py_ssize_t index = 0; index < gathering->count; index++)
        pc_several_remove(&gathering->several, gathering->awaited[index].op);
}

/* What is waited for in the core: an item itself, or what a persistent one has started. False: it is not in the core. */
static bool find(PyObject *item, struct awaited *awaited, pc_engine_object **engine) {
    PyObject *started = pc_persistent_last(item), *object = started != NULL ? started : item;
    bool is_request = PyObject_TypeCheck(object, pc_request_type);
    if (!is_request && !pc_is_collective(object))
        return false;
    struct pc_request *request = is_request ? (struct pc_request *)object : NULL;
    struct pc_op *op = is_request ? &request->op : pc_collective_op(object, engine);
    *awaited = (struct awaited){Py_NewRef(object), request, op};
    if (is_request)
        *engine = request->messages->engine;
    return true;
}

/* Keep requests of one engine, none of which holds the others up for ever; false: leave it to Python. */
static bool collect(struct gathering *gathering) {
    Py_ssize_t count = PyList_Size(gathering->listed);
    while (gathering->count < count && count == PyList_Size(gathering->listed)) {
        pc_engine_object *engine;
        if (!find(PyList_GetItem(gathering->listed, gathering->count), &gathering->awaited[gathering->count], &engine))
            return false;
        gathering->count++;
        if (gathering->engine == NULL)
            gathering->engine = engine;
        if (gathering->engine != engine)
            return false;
    }
    return gathering->engine != NULL && gathering->count == count && !gathering->engine->engaged;
}

/* Whether all are done; those that hold a message are gone on with. -1 with an exception. */
static int are_done(struct gathering *gathering) {
    bool done = true;
    for (Py_ssize_t index = 0; index < gathering->count; index++) {
        struct pc_request *request = gathering->awaited[index].request;
        if (request != NULL && pc_request_go_on(request) < 0)
            return -1;
        done &= request != NULL ? pc_request_is_done(request) : pc_op_is_done(gathering->awaited[index].op);
    }
    return done;
}

/* Wait a slice of time. 1: all are done; 0: not yet; -1 with an exception. */
static int await(struct gathering *gathering, uint64_t until_ns) {
    int done;
    while ((done = are_done(gathering)) == 0) {
        if (!pc_engine_do(gathering->engine, gather, gathering))
            return 0;
        if (!gathering->is_taken && !gathering->is_held && !pc_several_is_done(&gathering->several)) {
            PyThreadState *state = PyEval_SaveThread();
            pc_drive_wait(&gathering->engine->drive, NULL, &gathering->several, until_ns, PC_FOR_EVER);
            PyEval_RestoreThread(state);
        }
        bool is_over = !gathering->is_taken && (gathering->is_held || pc_several_is_done(&gathering->several));
        if (!pc_several_is_done(&gathering->several))
            pc_engine_do(gathering->engine, scatter, gathering);
        pc_engine_let_go(gathering->engine);
        if (!is_over)
            return are_done(gathering);
    }
    return done;
}

/* How long to wait: the time given, or else the default of the first request. Collectives alone have none here. */
static bool has_deadline(const struct gathering *gathering, PyObject *seconds, uint64_t *timeout_ns) {
    *timeout_ns = PC_FOR_EVER;
    for (Py_ssize_t index = 0; index < gathering->count; index++)
        if (gathering->awaited[index].request != NULL)
            return pc_seconds(gathering->awaited[index].request->messages, seconds, timeout_ns);
    return seconds == Py_None;
}

static bool is_well(const struct awaited *awaited) {
    return awaited->request != NULL ? awaited->request->status == 0
                                    : pc_op_is_done(awaited->op) && awaited->op->status == 0;
}

#define FEW 64

/* wait_all(list, timeout) -> list | None: the results of requests; None: something is left for Python to do. */
PyObject *pc_wait_all(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    struct awaited few[FEW];
    uint64_t timeout_ns;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "arguments are list, timeout");
        return NULL;
    }
    PyObject *listed = args[0];
    struct gathering gathering = {.listed = listed, .awaited = few};
    if (!PyList_CheckExact(listed))
        Py_RETURN_NONE;
    if (PyList_Size(listed) > FEW)
        gathering.awaited = malloc((size_t)PyList_Size(listed) * sizeof *gathering.awaited);
    PyObject *results = NULL;
    if (gathering.awaited == NULL)
        return PyErr_NoMemory();
    bool well = collect(&gathering) && has_deadline(&gathering, args[1], &timeout_ns) &&
                await(&gathering, pc_patience(timeout_ns).until_ns) == 1;
    for (Py_ssize_t index = 0; index < gathering.count; index++)
        well &= is_well(&gathering.awaited[index]);
    results = well ? PyList_New(gathering.count) : NULL;
    for (Py_ssize_t index = 0; index < gathering.count; index++) {
        struct awaited *awaited = &gathering.awaited[index];
        PyObject *result = NULL;
        if (results != NULL)
            result = awaited->request != NULL ? pc_request_result(awaited->request)
                                              : pc_collective_result(awaited->object);
        if (results != NULL && result == NULL)
            Py_CLEAR(results);
        if (results != NULL)
            PyList_SetItem(results, index, result);
        Py_DECREF(awaited->object);
    }
    if (gathering.awaited != few)
        free(gathering.awaited);
    if (results == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return results;
}
