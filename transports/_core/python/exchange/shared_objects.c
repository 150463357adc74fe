/* gather, all_gather, all_to_all and scatter of objects, which travel pickled (uneven.h). */
#include "uneven.h"

#include "python/arguments/collective_call.h"
#include "python/arguments/objects.h"
#include "python/arguments/timeout.h"

/* Pickle this rank's object, or one for each rank. False: leave it to Python, unless there is an
   exception. */
static bool dump_given(struct pc_uneven *call, PyObject *x) {
    PyObject *items = NULL;
    int count = pc_uneven_gathers(call) ? 1 : call->comm->size;
    if (!pc_uneven_gathers(call)) {
        if (PyTuple_CheckExact(x))
            items = Py_NewRef(x);
        else if (PyList_CheckExact(x)) /* which may change meanwhile */
            items = PyList_AsTuple(x);
        if (items == NULL || PyTuple_Size(items) != count)
            count = -1;
    }
    for (int index = 0; index < count; index++) {
        struct pc_given *given = &call->given[index];
        given->head = NULL;
        given->array.dtype = 0;
        PyObject *one = items != NULL ? PyTuple_GetItem(items, index) : x;
        if (pc_object_dump(one, call->method == PC_ALL_TO_ALL, &given->array) <= 0)
            break;
        call->num_given++;
    }
    Py_XDECREF(items);
    return call->num_given == count;
}

/* Memory for what comes: a list by sender; NULL with an exception. */
static PyObject *memory_for(const struct pc_uneven *call) {
    PyObject *list = PyList_New(call->num_blocks);
    for (int index = 0; list != NULL && index < call->num_blocks; index++) {
        struct pc_block *block = &call->blocks[index];
        PyObject *memory = pc_object_memory(pc_uneven_object_nbytes(block), &block->place);
        if (memory == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, index, memory);
    }
    return list;
}

/* Load all objects of a list in place; steals it. NULL with an exception. */
static PyObject *loaded(PyObject *list, int count) {
    for (int index = 0; list != NULL && index < count; index++) {
        PyObject *object = pc_object_load(Py_NewRef(PyList_GetItem(list, index)));
        if (object == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, index, object);
    }
    return list;
}

/* Have the others know that a scatter is one of objects. 0; -1 with an exception. */
static int announce(pc_comm *comm, int root) {
    pc_collective call;
    struct pc_header header = {.form = PC_FORM_OF_OBJECTS};
    if (pc_call_begin(&call, comm, PC_SCATTER, root) < 0)
        return -1;
    pc_sign(&call, 0, 0, NULL);
    PyObject *done = pc_call_end_with(&call, pc_announce(&call, &header, ""), Py_None);
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}

/* Run a call that is claimed, whose objects are pickled, to its end: those that have come, or
   None. */
static PyObject *run(struct pc_uneven *call) {
    pc_comm *comm = call->comm;
    PyObject *result = NULL;
    bool announces = call->method == PC_SCATTER && call->num_given > 0;
    if ((!announces || announce(comm, call->root) == 0) && pc_uneven_first(call) == 0) {
        result = memory_for(call);
        if (pc_uneven_second(call, result != NULL ? 0 : -1) < 0)
            Py_CLEAR(result);
    }
    comm->claimed = false;
    pc_uneven_release(call);
    result = loaded(result, call->num_blocks);
    if (result == NULL || (call->num_blocks > 0 && call->method != PC_SCATTER))
        return result;
    PyObject *list = result;
    result = Py_NewRef(call->num_blocks > 0 ? PyList_GetItem(list, 0) : Py_None);
    Py_DECREF(list);
    return result;
}

PyObject *pc_shared_objects(pc_comm *comm, int method, int root, PyObject *x, PyObject *timeout) {
    struct pc_given given[comm->size];
    struct pc_block blocks[comm->size];
    struct pc_deadline deadline = {0, 0};
    struct pc_uneven call = pc_uneven(comm, method, root, given, blocks);
    call.x = x;
    if (comm->direct && pc_timeout(timeout, comm->op_timeout_ns, &deadline.timeout_ns) &&
        dump_given(&call, x) && pc_may_share(comm)) { /* pickling may have run anything */
        pc_claim(comm, deadline); /* no other thread comes in between the rounds */
        return run(&call);
    }
    pc_uneven_release(&call);
    return NULL;
}

PyObject *pc_shared_object_of(pc_comm *comm, int root) {
    struct pc_given given[1];
    struct pc_block blocks[comm->size];
    struct pc_uneven call = pc_uneven(comm, PC_SCATTER, root, given, blocks);
    pc_claim_rest(comm);
    return run(&call);
}
