/* `_core.wait_all`: waiting for several requests of one engine at once. */
#include "messages.h"

#include <stdlib.h>

struct gathering {
    pc_engine_object *engine;
    struct pc_several several;
    PyObject *listed;
    struct pc_request **requests;
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
        struct pc_op *op = &gathering->requests[index]->op;
        gathering->is_held |= pc_request_is_held(gathering->requests[index]);
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
        pc_several_remove(&gathering->several, &gathering->requests[index]->op);
}

/* What a request is in the core: it itself, or what a persistent one has started; NULL: nothing. */
static struct pc_request *request_of(PyObject *item) {
    if (PyObject_TypeCheck(item, pc_request_type))
        return (struct pc_request *)Py_NewRef(item);
    PyObject *started = PyObject_GetAttrString(item, "_in_core");
    if (started != NULL && PyObject_TypeCheck(started, pc_request_type))
        return (struct pc_request *)started;
    PyErr_Clear();
    Py_XDECREF(started);
    return NULL;
}

/* Keep requests of one engine, none of which holds the others up for ever; false: leave it to Python. */
static bool collect(struct gathering *gathering) {
    Py_ssize_t count = PyList_Size(gathering->listed);
    while (gathering->count < count && count == PyList_Size(gathering->listed)) {
        struct pc_request *request = request_of(PyList_GetItem(gathering->listed, gathering->count));
        if (request == NULL)
            return false;
        gathering->requests[gathering->count++] = request;
        if (gathering->engine == NULL)
            gathering->engine = request->messages->engine;
        if (gathering->engine != request->messages->engine)
            return false;
    }
    return gathering->engine != NULL && gathering->count == count && !gathering->engine->engaged;
}

/* Whether all are done; those that hold a message are gone on with. -1 with an exception. */
static int are_done(struct gathering *gathering) {
    bool done = true;
    for (Py_ssize_t index = 0; index < gathering->count; index++) {
        if (pc_request_go_on(gathering->requests[index]) < 0)
            return -1;
        done &= pc_request_is_done(gathering->requests[index]);
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

#define FEW 64

/* wait_all(list, timeout) -> list | None: the results of requests; None: something is left for Python to do. */
PyObject *pc_wait_all(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    struct pc_request *few[FEW];
    uint64_t timeout_ns;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "arguments are list, timeout");
        return NULL;
    }
    PyObject *listed = args[0];
    struct gathering gathering = {.listed = listed, .requests = few};
    if (!PyList_CheckExact(listed))
        Py_RETURN_NONE;
    if (PyList_Size(listed) > FEW)
        gathering.requests = malloc((size_t)PyList_Size(listed) * sizeof *gathering.requests);
    PyObject *results = NULL;
    if (gathering.requests == NULL)
        return PyErr_NoMemory();
    bool well = collect(&gathering) && pc_seconds(gathering.requests[0]->messages, args[1], &timeout_ns) &&
                await(&gathering, pc_patience(timeout_ns).until_ns) == 1;
    for (Py_ssize_t index = 0; index < gathering.count; index++)
        well &= gathering.requests[index]->status == 0;
    results = well ? PyList_New(gathering.count) : NULL;
    for (Py_ssize_t index = 0; index < gathering.count; index++) {
        PyObject *result = results != NULL ? pc_request_result(gathering.requests[index]) : NULL;
        if (results != NULL && result == NULL)
            Py_CLEAR(results);
        if (results != NULL)
            PyList_SetItem(results, index, result);
        Py_DECREF((PyObject *)gathering.requests[index]);
    }
    if (gathering.requests != few)
        free(gathering.requests);
    if (results == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return results;
}
