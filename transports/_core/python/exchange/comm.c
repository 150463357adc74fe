/* A call of a communicator: its begin and end, its signature, and the calls that Python makes. See
   comm.h. */
#include "comm.h"
#include "python/arguments/timeout.h"
#include "python/base/call_place.h"

#include <stdlib.h>

unsigned char *pc_scratch(pc_comm *comm, size_t nbytes) {
    if (comm->scratch_nbytes < nbytes) {
        free(comm->scratch);
        comm->scratch = aligned_alloc(PC_PAGE, pc_round_up(nbytes, PC_PAGE));
        comm->scratch_nbytes = comm->scratch != NULL ? nbytes : 0;
    }
    return comm->scratch;
}

/* --- a call ----------------------------------------------------------------------------------- */

/* Two calls agree if their signatures do: kind, operator, dtype, root, and a hash of the shape. */
uint64_t pc_hash_dims(uint64_t seed, int ndim, const intptr_t *dims) {
    uint64_t hash = seed + (uint64_t)ndim;
    for (int axis = 0; axis < ndim; axis++)
        hash = (hash ^ (uint64_t)dims[axis]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 32;
    return hash;
}

void pc_sign(pc_collective *call, uint64_t salt, int ndim, const intptr_t *dims) {
    uint64_t hash = pc_hash_dims(salt, ndim, dims);
    hash ^= hash >> 29;
    hash *= 0xBF58476D1CE4E5B9u;
    call->signature = (hash & 0xFFFFFFFF00000000u) | (uint64_t)call->kind |
                      (uint64_t)call->op << 4 | (uint64_t)call->dtype << 8 |
                      (uint64_t)call->root << 13;
    call->ndim = ndim;
    call->dims = dims;
}

void pc_sign_part(pc_collective *call, uint64_t salt, int ndim, const intptr_t *dims) {
    pc_sign(call, salt, ndim, dims);
    call->signature |= (salt >> 32 & 7) << 29;
}

PyObject *pc_describe(const pc_collective *call) {
    uint64_t number = call->number != 0 ? call->number : call->comm->number + 1;
    call = call->within != NULL ? call->within : call;
    PyObject *x = call->x_object != NULL ? call->x_object : Py_None;
    PyObject *op = call->op_object != NULL ? call->op_object : Py_None, *counts = NULL;
    if (call->begins != NULL) { /* those that were given may have changed */
        counts = PyList_New(call->comm->size);
        for (int rank = 0; counts != NULL && rank < call->comm->size; rank++)
            PyList_SetItem(counts, rank,
                           PyLong_FromSize_t(call->begins[rank + 1] - call->begins[rank]));
        if (counts == NULL)
            return NULL;
    }
    int method = call->method != 0 ? call->method : call->kind;
    return Py_BuildValue("(iiOOiKN)", method, call->kind, x, op, call->root,
                         (unsigned long long)number, counts != NULL ? counts : Py_NewRef(Py_None));
}

static PyObject *header_tuple(const struct pc_slot *slot) {
    struct pc_header header;
    memcpy(&header, slot->data, sizeof header);
    return Py_BuildValue("(iKKy#)", (int)header.form, (unsigned long long)header.nbytes,
                         (unsigned long long)header.value, (const char *)slot->data + sizeof header,
                         (Py_ssize_t)header.description_nbytes);
}

PyObject *pc_called(pc_comm *comm, int rank, uint64_t number) {
    struct pc_slot *slot = pc_slot_of(comm, rank, number);
    /* else it has gone on, and the shape is another call's */
    bool there = pc_load(&slot->number) == number;
    int ndim = !there || slot->shape[0] < 0 ? 0 : slot->shape[0] > 7 ? 7 : (int)slot->shape[0];
    PyObject *shape = PyTuple_New(ndim);
    for (int axis = 0; shape != NULL && axis < ndim; axis++)
        PyTuple_SetItem(shape, axis, PyLong_FromLongLong(slot->shape[axis + 1]));
    return Py_BuildValue("(KN)", (unsigned long long)*pc_signature_of(comm, rank, number), shape);
}

PC_COLD int pc_mismatch(pc_collective *call, int rank, uint64_t number) {
    pc_comm *comm = call->comm;
    pc_hold(&call->call);
    PyObject *mine = pc_called(comm, comm->rank, number), *theirs = pc_called(comm, rank, number);
    if (call->within != NULL && call->within->number != 0) /* of the user's call, or before: this
                                                              part counts as internal */
        number = number >= call->within->number ? call->number : number + 1;
    PyObject *result = PyObject_CallFunction(comm->mismatch, "NiKNN", pc_describe(call), rank,
                                             (unsigned long long)number, mine, theirs);
    if (result != NULL) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_RuntimeError, "ranks made different calls");
    }
    return -1;
}

static int sleep_in_python(pc_call *base, int peer, uint64_t waited_ns, bool last) {
    pc_collective *call = (pc_collective *)base;
    PyObject *result = PyObject_CallFunction(call->comm->sleep, "Nidi", pc_describe(call), peer,
                                             (double)waited_ns * 1e-9, (int)last);
    if (result == NULL)
        return -1;
    int verdict = PyObject_IsTrue(result);
    Py_DECREF(result);
    return verdict;
}

static void identify(const pc_call *base, int peer, struct pc_noted_wait *wait) {
    const pc_collective *call = (const pc_collective *)base;
    char place[PC_MOST_PLACE_NBYTES];
    size_t nbytes = base->left == NULL ? pc_call_place(place) : 0;
    wait->ident = call->comm->ident;
    wait->number = call->number != 0 ? call->number : call->comm->number + 1;
    wait->peer = (uint32_t)call->comm->local[peer];
    wait->nbytes = nbytes <= sizeof wait->place ? (uint32_t)nbytes : 0;
    memcpy(wait->place, place, wait->nbytes);
}

static void *leave(void) { return PyEval_SaveThread(); }
static void enter(void *left) { PyEval_RestoreThread(left); }
static const struct pc_call_up call_up = {sleep_in_python, identify, leave, enter};

int pc_call_begin(pc_collective *call, pc_comm *comm, int kind, int root) {
    memset(call, 0, sizeof *call);
    call->call.host = comm->host;
    call->call.up = &call_up;
    call->call.deadline = &comm->deadline;
    call->comm = comm;
    call->kind = kind;
    call->root = root;
    if (PC_UNLIKELY(comm->busy || pc_host_forked(comm->host))) {
        PyErr_SetString(PyExc_RuntimeError, comm->busy
                                                ? "a call of this communicator is under way"
                                                : "this communicator is that of a fork's parent");
        return -1;
    }
    comm->busy = true;
    return 0;
}

int pc_user_call_begin(pc_collective *call, pc_comm *comm, int kind, int root, PyObject *timeout) {
    struct pc_deadline deadline = {0, 0};
    if (!pc_timeout(timeout, comm->op_timeout_ns, &deadline.timeout_ns))
        return -1;
    if (PC_UNLIKELY(pc_call_begin(call, comm, kind, root) < 0)) {
        PyErr_Clear();
        return -1;
    }
    comm->deadline = deadline;
    comm->tally->calls++;
    return 0;
}

/* Have Python break the communicator for the exception that ends a call: wherever it came from,
   also from a signal handler at the door of a Python function. */
static PC_COLD void give_up(pc_collective *call) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *result = PyObject_CallFunction(call->comm->give_up, "NO", pc_describe(call), error);
    if (result != NULL) {
        Py_DECREF(result);
        PyErr_Restore(type, error, trace);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

PyObject *pc_call_end(pc_collective *call, int status, PyObject *result) {
    pc_hold(&call->call);
    call->comm->busy = false;
    if (PC_LIKELY(status == 0))
        return result;
    Py_XDECREF(result);
    call->comm->usable = false; /* ranks may disagree now where they are */
    if (call->comm->entry >= 0 && !pc_host_forked(call->comm->host)) {
        pc_publish(&pc_progress_of(call->comm, call->comm->rank)->given_up, 1);
        if (call->placed)
            pc_abandon(call);
        atomic_thread_fence(memory_order_seq_cst); /* before what the caller does to its arrays */
    }
    give_up(call);
    return NULL;
}

/* --- calls from Python, whose arguments are checked already ----------------------------------- */

static int get_buffer(PyObject *object, Py_buffer *view, int flags) {
    view->obj = NULL;
    view->buf = NULL;
    return object == Py_None ? 0 : PyObject_GetBuffer(object, view, flags);
}

/* False with an exception. */
static bool get_buffers(PyObject *x, Py_buffer *x_view, PyObject *out, Py_buffer *out_view) {
    if (get_buffer(x, x_view, PyBUF_SIMPLE) < 0)
        return false;
    if (get_buffer(out, out_view, PyBUF_WRITABLE) == 0)
        return true;
    PyBuffer_Release(x_view);
    return false;
}

int pc_get_shape(PyObject *shape, intptr_t *dims) {
    Py_ssize_t ndim = PyTuple_Size(shape);
    if (ndim > PC_MAX_DIMS)
        PyErr_SetString(PyExc_ValueError, "too many dimensions");
    for (Py_ssize_t axis = 0; axis < ndim && !PyErr_Occurred(); axis++)
        dims[axis] = (intptr_t)PyLong_AsSsize_t(PyTuple_GetItem(shape, axis));
    return PyErr_Occurred() ? -1 : (int)ndim;
}

int pc_check_attached(const pc_comm *comm) {
    if (comm->entry >= 0)
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "not attached to shared memory");
    return -1;
}

static int pass_gate(pc_collective *call, size_t offset) {
    pc_hold(&call->call);
    PyObject *passed = PyObject_CallFunction(call->hook, "n", (Py_ssize_t)offset);
    Py_XDECREF(passed);
    return passed == NULL ? -1 : 0;
}

bool pc_check_reducible(int dtype, const void *x, const void *out) {
    if (pc_is_aligned(dtype, (uintptr_t)x) && pc_is_aligned(dtype, (uintptr_t)out))
        return true;
    PyErr_SetString(PyExc_ValueError, "what is reduced is not aligned");
    return false;
}

static const void *data_of(const Py_buffer *view) { return view->len > 0 ? view->buf : NULL; }

/* run(kind, dtype, op, root, shape, salt, x, out, nbytes, hook=None, wants=None) -> whether
   all ranks rather do it elsewhere (offers in exchange.c). `wants` is for a reduction: whether this
   rank would, None: nobody is asked. */
PyObject *pc_comm_run(pc_comm *comm, PyObject *args) {
    PyObject *shape, *x, *out, *hook = Py_None, *wants = Py_None;
    int kind, dtype, op, root;
    unsigned long long salt;
    Py_ssize_t nbytes;
    Py_buffer x_view, out_view;
    pc_collective call;
    intptr_t dims[PC_MAX_DIMS];
    int ndim;
    if (!PyArg_ParseTuple(args, "iiiiOKOOn|OO", &kind, &dtype, &op, &root, &shape, &salt,
                          &x, &out, &nbytes, &hook, &wants) ||
        pc_check_attached(comm) < 0 || (ndim = pc_get_shape(shape, dims)) < 0)
        return NULL;
    if (!get_buffers(x, &x_view, out, &out_view))
        return NULL;
    PyObject *result = NULL;
    if ((!pc_reduces(kind) || pc_check_reducible(dtype, data_of(&x_view), data_of(&out_view))) &&
        pc_call_begin(&call, comm, kind, root) == 0) {
        call.dtype = dtype;
        call.op = op;
        call.x = x_view.buf;
        call.out = out_view.buf;
        call.nbytes = (size_t)nbytes;
        call.hook = hook != Py_None ? hook : NULL;
        call.pass = pass_gate;
        call.may_use_gpus = wants != Py_None;
        call.wants_gpus = wants == Py_True;
        pc_sign_part(&call, salt, ndim, dims);
        int status = pc_exchange_run(&call);
        bool by_messages = status == PC_BY_MESSAGES;
        pc_hold(&call.call);
        result = pc_call_end(&call, by_messages ? 0 : status, PyBool_FromLong(by_messages));
    }
    PyBuffer_Release(&x_view);
    PyBuffer_Release(&out_view);
    return result;
}

/* announce(kind, root, value, form, description, x, out, nbytes): the root's broadcast or
   scatter */
PyObject *pc_comm_announce(pc_comm *comm, PyObject *args) {
    PyObject *x, *out;
    int kind, root, form;
    unsigned long long value;
    const char *description;
    Py_ssize_t description_nbytes, nbytes;
    Py_buffer x_view, out_view;
    pc_collective call;
    if (!PyArg_ParseTuple(args, "iiKiy#OOn", &kind, &root, &value, &form, &description,
                          &description_nbytes, &x, &out, &nbytes) ||
        pc_check_attached(comm) < 0)
        return NULL;
    if (description_nbytes > PC_DESCRIPTION_NBYTES) {
        PyErr_SetString(PyExc_ValueError, "the description is too long");
        return NULL;
    }
    if (!get_buffers(x, &x_view, out, &out_view))
        return NULL;
    PyObject *result = NULL;
    if (pc_call_begin(&call, comm, kind, root) == 0) {
        call.x = x_view.buf;
        call.out = out_view.buf;
        call.nbytes = (size_t)nbytes;
        pc_sign(&call, 0, 0, NULL);
        struct pc_header header = {(uint64_t)nbytes, (uintptr_t)call.x, value,
                                   (uint32_t)description_nbytes, (uint32_t)form};
        int status = pc_announce(&call, &header, description);
        result = pc_call_end_with(&call, status, Py_None);
    }
    PyBuffer_Release(&x_view);
    PyBuffer_Release(&out_view);
    return result;
}

/* hear(kind, root) -> (form, nbytes, value, description); then `receive` must follow. */
PyObject *pc_comm_hear(pc_comm *comm, PyObject *args) {
    int kind, root;
    pc_collective call;
    struct pc_slot *slot = NULL;
    if (!PyArg_ParseTuple(args, "ii", &kind, &root) || pc_check_attached(comm) < 0)
        return NULL;
    if (comm->heard) { /* by a method of the core (shared_methods.c), which could not receive it */
        comm->heard = false;
        return header_tuple(pc_slot_of(comm, root, comm->number));
    }
    if (pc_call_begin(&call, comm, kind, root) < 0)
        return NULL;
    pc_sign(&call, 0, 0, NULL);
    int status = pc_hear(&call, &slot);
    if (pc_call_end_with(&call, status, Py_None) == NULL)
        return NULL;
    Py_DECREF(Py_None);
    return header_tuple(slot);
}

/* receive(kind, root, out) */
PyObject *pc_comm_receive(pc_comm *comm, PyObject *args) {
    PyObject *out;
    int kind, root;
    Py_buffer view;
    pc_collective call;
    if (!PyArg_ParseTuple(args, "iiO", &kind, &root, &out) || pc_check_attached(comm) < 0 ||
        get_buffer(out, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    PyObject *result = NULL;
    if (pc_call_begin(&call, comm, kind, root) == 0) {
        call.out = view.buf;
        call.number = comm->number;
        pc_sign(&call, 0, 0, NULL);
        struct pc_slot *slot = pc_slot_of(comm, root, comm->number);
        int status = pc_receive(&call, slot);
        result = pc_call_end_with(&call, status, Py_None);
    }
    PyBuffer_Release(&view);
    return result;
}

/* value_hash(dtype, shape, salt): of an array, as announced */
PyObject *pc_comm_value_hash(pc_comm *Py_UNUSED(comm), PyObject *args) {
    int dtype, ndim;
    PyObject *shape;
    unsigned long long salt;
    intptr_t dims[PC_MAX_DIMS];
    if (!PyArg_ParseTuple(args, "iOK", &dtype, &shape, &salt) ||
        (ndim = pc_get_shape(shape, dims)) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(pc_hash_dims((uint64_t)dtype + salt, ndim, dims));
}
