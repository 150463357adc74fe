#include "comm.h"

#include "host_type.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

unsigned char *pc_scratch(pc_comm *comm, size_t nbytes) {
    if (comm->scratch_nbytes < nbytes) {
        free(comm->scratch);
        comm->scratch = aligned_alloc(PC_PAGE, pc_round_up(nbytes, PC_PAGE));
        comm->scratch_nbytes = comm->scratch != NULL ? nbytes : 0;
    }
    return comm->scratch;
}

/* --- a call ------------------------------------------------------------------------------------------- */

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
    call->signature = (hash & 0xFFFFFFFF00000000u) | (uint64_t)call->kind | (uint64_t)call->op << 4 |
                      (uint64_t)call->dtype << 8 | (uint64_t)call->root << 13;
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
    PyObject *text = call->text != NULL ? call->text : Py_None, *x = call->x_object != NULL ? call->x_object : Py_None;
    PyObject *op = call->op_object != NULL ? call->op_object : Py_None, *counts = NULL;
    if (call->begins != NULL) { /* those that were given may have changed */
        counts = PyList_New(call->comm->size);
        for (int rank = 0; counts != NULL && rank < call->comm->size; rank++)
            PyList_SetItem(counts, rank, PyLong_FromSize_t(call->begins[rank + 1] - call->begins[rank]));
        if (counts == NULL)
            return NULL;
    }
    return Py_BuildValue("(OiOOiKN)", text, call->kind, x, op, call->root, (unsigned long long)number,
                         counts != NULL ? counts : Py_NewRef(Py_None));
}

static PyObject *header_tuple(const struct pc_slot *slot) {
    struct pc_header header;
    memcpy(&header, slot->data, sizeof header);
    return Py_BuildValue("(iKKy#)", (int)header.form, (unsigned long long)header.nbytes,
                         (unsigned long long)header.value, (const char *)slot->data + sizeof header,
                         (Py_ssize_t)header.description_nbytes);
}

static int raise_mismatch(pc_collective *call, int rank, uint64_t number, PyObject *mine, PyObject *theirs, PyObject *header) {
    PyObject *result = PyObject_CallFunction(call->comm->mismatch, "NiKNNN", pc_describe(call), rank,
                                             (unsigned long long)number, mine, theirs, header);
    if (result != NULL) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_RuntimeError, "ranks made different calls");
    }
    return -1;
}

/* (signature, shape) of what a rank has called */
static PyObject *called(pc_comm *comm, int rank, uint64_t number) {
    struct pc_slot *slot = pc_slot_of(comm, rank, number);
    bool there = pc_load(&slot->number) == number; /* else it has gone on, and the shape is another call's */
    int ndim = !there || slot->shape[0] < 0 ? 0 : slot->shape[0] > 7 ? 7 : (int)slot->shape[0];
    PyObject *shape = PyTuple_New(ndim);
    for (int axis = 0; shape != NULL && axis < ndim; axis++)
        PyTuple_SetItem(shape, axis, PyLong_FromLongLong(slot->shape[axis + 1]));
    return Py_BuildValue("(KN)", (unsigned long long)*pc_signature_of(comm, rank, number), shape);
}

PC_COLD int pc_mismatch(pc_collective *call, int rank, uint64_t number) {
    pc_comm *comm = call->comm;
    pc_hold(&call->call);
    PyObject *mine = called(comm, comm->rank, number), *theirs = called(comm, rank, number);
    if (call->within != NULL && call->within->number != 0) /* of the user's call, or before: this part counts as internal */
        number = number >= call->within->number ? call->number : number + 1;
    return raise_mismatch(call, rank, number, mine, theirs, Py_NewRef(Py_None));
}

PC_COLD int pc_other_value(pc_collective *call, const struct pc_slot *slot) {
    pc_hold(&call->call);
    return raise_mismatch(call, call->root, call->number, Py_NewRef(Py_None), Py_NewRef(Py_None), header_tuple(slot));
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

static void *leave(void) { return PyEval_SaveThread(); }
static void enter(void *left) { PyEval_RestoreThread(left); }
static const struct pc_call_up call_up = {sleep_in_python, leave, enter};

int pc_call_begin(pc_collective *call, pc_comm *comm, int kind, int root) {
    memset(call, 0, sizeof *call);
    call->call.host = comm->host;
    call->call.up = &call_up;
    call->comm = comm;
    call->kind = kind;
    call->root = root;
    if (PC_UNLIKELY(comm->busy || pc_host_forked(comm->host))) {
        PyErr_SetString(PyExc_RuntimeError, comm->busy ? "a call of this communicator is under way"
                                                       : "this communicator is that of a fork's parent");
        return -1;
    }
    comm->busy = true;
    return 0;
}

/* Have Python break the communicator for the exception that ends a call: wherever it came from, also from a
   signal handler at the door of a Python function. */
static PC_COLD void give_up(pc_comm *comm) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *result = PyObject_CallFunctionObjArgs(comm->give_up, error, NULL);
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
    give_up(call->comm);
    return NULL;
}

/* --- attaching ---------------------------------------------------------------------------------------- */

struct greeting { /* of a rank to the others of its communicator */
    int64_t pid;
    uint64_t address, nonce;
};

static int gather_all(pc_comm *comm, const void *x, void *out, size_t nbytes) {
    pc_collective call;
    if (pc_call_begin(&call, comm, PC_ALL_GATHER, 0) < 0)
        return -1;
    call.x = x;
    call.out = out;
    call.nbytes = nbytes;
    pc_sign(&call, nbytes, 0, NULL);
    comm->internal++;
    int status = pc_run(&call);
    pc_call_end(&call, status, NULL);
    return status;
}

enum { READS = 1, MAPS = 2 }; /* what a rank can do with every other's memory */

/* Find out whether every rank can read every other's memory, and has mapped its arena, which all must know alike. */
static int probe(pc_comm *comm, bool allowed) {
    size_t size = (size_t)comm->size;
    struct greeting own, greetings[size];
    char able = allowed ? READS | MAPS : MAPS, all[size];
    own.pid = getpid();
    own.address = (uintptr_t)&own.nonce;
    own.nonce = pc_now_ns() ^ (uint64_t)own.pid << 32;
    if (gather_all(comm, &own, greetings, sizeof own) < 0)
        return -1;
    for (size_t rank = 0; rank < size; rank++) {
        uint64_t nonce = 0;
        struct iovec local = {&nonce, sizeof nonce}, remote = {(void *)(uintptr_t)greetings[rank].address, sizeof nonce};
        comm->pids[rank] = (int)greetings[rank].pid;
        if (able & READS && (process_vm_readv(comm->pids[rank], &local, 1, &remote, 1, 0) != sizeof nonce ||
                             nonce != greetings[rank].nonce))
            able &= ~READS;
        if ((int)rank != comm->rank && !pc_window_open(comm->host, comm->local[rank]))
            able &= ~MAPS;
    }
    if (gather_all(comm, &able, all, 1) < 0)
        return -1;
    for (size_t rank = 0; rank < size; rank++)
        able &= all[rank];
    comm->direct = able & READS;
    comm->together = able & MAPS;
    return 0;
}

static int map_region(pc_comm *comm) {
    pc_host *host = comm->host;
    int error;
    while ((error = pc_host_attach(host, comm->ident, comm->region_nbytes, &comm->entry, &comm->region)) == EBUSY) {
        if (PyErr_CheckSignals() != 0)
            return -1;
        if (pc_host_failed(host)) {
            PyErr_SetString(PyExc_BlockingIOError, "a rank has failed, perhaps with the lock of the table");
            return -1;
        }
    }
    if (error == 0)
        return 0;
    errno = error;
    if (error == ENOSPC)
        PyErr_Format(PyExc_OSError, "more than %d communicators use shared memory: close some", PC_COMMS);
    else
        PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* attach(direct): map the region, meet the others there. */
static PyObject *comm_attach(pc_comm *comm, PyObject *allowed) {
    if (comm->entry < 0) {
        if (map_region(comm) < 0)
            return NULL;
        if (probe(comm, PyObject_IsTrue(allowed) == 1) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

static void detach(pc_comm *comm) {
    comm->usable = false;
    /* The objects of a fork's child are ended by its interpreter, but the entry is its parent's. */
    if (comm->entry >= 0 && !comm->busy && !pc_host_forked(comm->host)) {
        pc_host_detach(comm->host, comm->entry, comm->size, comm->region, comm->region_nbytes);
        comm->entry = -1;
        comm->region = NULL;
    }
}

static void clear_methods(pc_comm *comm) {
    for (int kind = 0; kind < PC_METHODS; kind++)
        Py_CLEAR(comm->slow[kind]);
    for (int kind = 0; kind < PC_UNEVEN_KINDS; kind++) {
        struct pc_uneven *uneven = &comm->uneven[kind];
        Py_CLEAR(uneven->slow);
        Py_CLEAR(uneven->resume);
        Py_CLEAR(uneven->sign);
        Py_CLEAR(uneven->text);
    }
}

static PyObject *comm_close(pc_comm *comm, PyObject *unused) {
    (void)unused;
    detach(comm);
    clear_methods(comm);
    Py_RETURN_NONE;
}

static PyObject *comm_allow(pc_comm *comm, PyObject *usable) {
    comm->usable = PyObject_IsTrue(usable) == 1 && comm->entry >= 0;
    Py_RETURN_NONE;
}

/* --- calls from Python, whose arguments are checked already -------------------------------------------- */

static int get_buffer(PyObject *object, Py_buffer *view, int flags) {
    view->obj = NULL;
    view->buf = NULL;
    return object == Py_None ? 0 : PyObject_GetBuffer(object, view, flags);
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

/* run(text, kind, dtype, op, root, shape, salt, x, out, nbytes, hook=None) -> whether all ranks rather do it by
   messages, as those with a hook would (offers), unless that is for the pieces of an all_reduce */
static PyObject *comm_run(pc_comm *comm, PyObject *args) {
    PyObject *text, *shape, *x, *out, *hook = Py_None;
    int kind, dtype, op, root;
    unsigned long long salt;
    Py_ssize_t nbytes;
    Py_buffer x_view, out_view;
    pc_collective call;
    intptr_t dims[PC_MAX_DIMS];
    int ndim;
    if (!PyArg_ParseTuple(args, "OiiiiOKOOn|O", &text, &kind, &dtype, &op, &root, &shape, &salt, &x, &out, &nbytes,
                          &hook) ||
        pc_check_attached(comm) < 0 || (ndim = pc_get_shape(shape, dims)) < 0)
        return NULL;
    if (get_buffer(x, &x_view, PyBUF_SIMPLE) < 0)
        return NULL;
    if (get_buffer(out, &out_view, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&x_view);
        return NULL;
    }
    PyObject *result = NULL;
    if (pc_call_begin(&call, comm, kind, root) == 0) {
        call.text = text;
        call.dtype = dtype;
        call.op = op;
        call.x = x_view.buf;
        call.out = out_view.buf;
        call.nbytes = (size_t)nbytes;
        call.hook = hook != Py_None ? hook : NULL;
        call.pass = pass_gate;
        pc_sign_part(&call, salt, ndim, dims);
        int status = pc_run(&call);
        bool by_messages = status == PC_BY_MESSAGES;
        pc_hold(&call.call);
        result = pc_call_end(&call, by_messages ? 0 : status, PyBool_FromLong(by_messages));
    }
    PyBuffer_Release(&x_view);
    PyBuffer_Release(&out_view);
    return result;
}

/* announce(text, kind, root, value, form, description, x, out, nbytes): the root's broadcast or scatter */
static PyObject *comm_announce(pc_comm *comm, PyObject *args) {
    PyObject *text, *x, *out;
    int kind, root, form;
    unsigned long long value;
    const char *description;
    Py_ssize_t description_nbytes, nbytes;
    Py_buffer x_view, out_view;
    pc_collective call;
    if (!PyArg_ParseTuple(args, "OiiKiy#OOn", &text, &kind, &root, &value, &form, &description,
                          &description_nbytes, &x, &out, &nbytes) ||
        pc_check_attached(comm) < 0)
        return NULL;
    if (description_nbytes > PC_DESCRIPTION_NBYTES) {
        PyErr_SetString(PyExc_ValueError, "the description is too long");
        return NULL;
    }
    if (get_buffer(x, &x_view, PyBUF_SIMPLE) < 0)
        return NULL;
    if (get_buffer(out, &out_view, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&x_view);
        return NULL;
    }
    PyObject *result = NULL;
    if (pc_call_begin(&call, comm, kind, root) == 0) {
        call.text = text;
        call.x = x_view.buf;
        call.out = out_view.buf;
        call.nbytes = (size_t)nbytes;
        pc_sign(&call, 0, 0, NULL);
        struct pc_header header = {(uint64_t)nbytes, (uintptr_t)call.x, value, (uint32_t)description_nbytes, (uint32_t)form};
        int status = pc_announce(&call, &header, description);
        pc_hold(&call.call);
        result = pc_call_end(&call, status, Py_NewRef(Py_None));
    }
    PyBuffer_Release(&x_view);
    PyBuffer_Release(&out_view);
    return result;
}

/* hear(text, kind, root) -> (form, nbytes, value, description); then `receive` must follow. */
static PyObject *comm_hear(pc_comm *comm, PyObject *args) {
    PyObject *text;
    int kind, root;
    pc_collective call;
    struct pc_slot *slot = NULL;
    if (!PyArg_ParseTuple(args, "Oii", &text, &kind, &root) || pc_check_attached(comm) < 0 ||
        pc_call_begin(&call, comm, kind, root) < 0)
        return NULL;
    call.text = text;
    pc_sign(&call, 0, 0, NULL);
    int status = pc_hear(&call, &slot);
    pc_hold(&call.call);
    if (pc_call_end(&call, status, Py_NewRef(Py_None)) == NULL)
        return NULL;
    Py_DECREF(Py_None);
    return header_tuple(slot);
}

/* receive(text, kind, root, out) */
static PyObject *comm_receive(pc_comm *comm, PyObject *args) {
    PyObject *text, *out;
    int kind, root;
    Py_buffer view;
    pc_collective call;
    if (!PyArg_ParseTuple(args, "OiiO", &text, &kind, &root, &out) || pc_check_attached(comm) < 0 ||
        get_buffer(out, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    PyObject *result = NULL;
    if (pc_call_begin(&call, comm, kind, root) == 0) {
        call.text = text;
        call.out = view.buf;
        call.number = comm->number;
        pc_sign(&call, 0, 0, NULL);
        struct pc_slot *slot = pc_slot_of(comm, root, comm->number);
        int status = pc_receive(&call, slot);
        pc_hold(&call.call);
        result = pc_call_end(&call, status, Py_NewRef(Py_None));
    }
    PyBuffer_Release(&view);
    return result;
}

/* (rank, address, into) */
static bool get_piece(pc_comm *comm, PyObject *item, struct pc_piece *piece, Py_buffer *view) {
    PyObject *into;
    unsigned long long address;
    if (!PyArg_ParseTuple(item, "iKO", &piece->rank, &address, &into))
        return false;
    if (piece->rank < 0 || piece->rank >= comm->size) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank");
        return false;
    }
    if (PyObject_GetBuffer(into, view, PyBUF_WRITABLE) < 0)
        return false;
    piece->address = address;
    piece->into = view->buf;
    piece->nbytes = (size_t)view->len;
    return true;
}

/* fetch(text, root, salt, pieces): every rank's pieces of the others' memory, whose addresses they have been told */
static PyObject *comm_fetch(pc_comm *comm, PyObject *args) {
    PyObject *text, *items, *result = NULL;
    int root;
    unsigned long long salt;
    pc_collective call;
    if (!PyArg_ParseTuple(args, "OiKO!", &text, &root, &salt, &PyList_Type, &items) || pc_check_attached(comm) < 0)
        return NULL;
    if (!comm->direct) {
        PyErr_SetString(PyExc_RuntimeError, "the ranks cannot read each other's memory");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(items), held = 0;
    struct pc_piece *pieces = PyMem_Calloc((size_t)count + 1, sizeof *pieces);
    Py_buffer *views = PyMem_Calloc((size_t)count + 1, sizeof *views);
    if (pieces == NULL || views == NULL)
        PyErr_NoMemory();
    else
        while (held < count && get_piece(comm, PyList_GetItem(items, held), &pieces[held], &views[held]))
            held++;
    if (!PyErr_Occurred() && pc_call_begin(&call, comm, PC_ALL_GATHER, root) == 0) {
        call.text = text;
        pc_sign_part(&call, salt, 0, NULL);
        int status = pc_fetch(&call, pieces, (size_t)count);
        pc_hold(&call.call);
        result = pc_call_end(&call, status, Py_NewRef(Py_None));
    }
    while (held > 0)
        PyBuffer_Release(&views[--held]);
    PyMem_Free(views);
    PyMem_Free(pieces);
    return result;
}

/* claim() -> bool: the calling thread is the only one that calls, until release(); False: another is. A thread that
   was interrupted before it could release may claim again. */
static PyObject *comm_claim(pc_comm *comm, PyObject *unused) {
    (void)unused;
    if (comm->busy || (comm->claimed && !pthread_equal(comm->caller, pthread_self())))
        Py_RETURN_FALSE;
    comm->claimed = true;
    comm->caller = pthread_self();
    Py_RETURN_TRUE;
}

static PyObject *comm_release(pc_comm *comm, PyObject *unused) {
    (void)unused;
    comm->claimed = false;
    Py_RETURN_NONE;
}

/* value_hash(dtype, shape, salt): of an array, as announced */
static PyObject *comm_value_hash(pc_comm *comm, PyObject *args) {
    (void)comm;
    int dtype, ndim;
    PyObject *shape;
    unsigned long long salt;
    intptr_t dims[PC_MAX_DIMS];
    if (!PyArg_ParseTuple(args, "iOK", &dtype, &shape, &salt) || (ndim = pc_get_shape(shape, dims)) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(pc_hash_dims((uint64_t)dtype + salt, ndim, dims));
}

/* Number of the last call that a rank has entered. */
static uint64_t last_entered(pc_comm *comm, int rank) {
    uint64_t last = 0;
    for (uint64_t slot = 0; slot < PC_SLOTS; slot++) {
        uint64_t number = pc_load(&pc_slot_of(comm, rank, slot)->number);
        last = number > last ? number : last;
    }
    return last;
}

/* entered(rank): number of the last call it has entered */
static PyObject *comm_entered(pc_comm *comm, PyObject *arg) {
    long rank = PyLong_AsLong(arg);
    if (PyErr_Occurred() || pc_check_attached(comm) < 0)
        return NULL;
    if (rank < 0 || rank >= comm->size) {
        PyErr_SetString(PyExc_ValueError, "no such rank");
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(last_entered(comm, (int)rank));
}

/* differing() -> (rank, number, mine, theirs): the first call that another rank has made differently, with the
   signatures and shapes of both; None. It never waits: of two ranks that have made a call, the one that asks
   later sees both. */
static PyObject *comm_differing(pc_comm *comm, PyObject *unused) {
    (void)unused;
    if (comm->entry < 0 || comm->claimed || comm->busy || pc_host_forked(comm->host))
        Py_RETURN_NONE;
    for (int rank = 0; rank < comm->size; rank++) {
        if (rank == comm->rank)
            continue;
        uint64_t last = last_entered(comm, rank);
        if (last > comm->number)
            last = comm->number;
        for (uint64_t number = comm->compared[rank] + 1; number <= last; number++)
            if (*pc_signature_of(comm, rank, number) != *pc_signature_of(comm, comm->rank, number))
                return Py_BuildValue("(iKNN)", rank, (unsigned long long)number, called(comm, comm->rank, number),
                                     called(comm, rank, number));
    }
    Py_RETURN_NONE;
}

/* --- the type ----------------------------------------------------------------------------------------- */

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    PyObject *host, *ranks, *sleep, *mismatch, *give_up;
    unsigned long long ident;
    int rank;
    if (!PyArg_ParseTuple(args, "OKiOOOO", &host, &ident, &rank, &ranks, &sleep, &mismatch, &give_up))
        return NULL;
    Py_ssize_t size = PySequence_Size(ranks);
    if (size < 0)
        return NULL;
    pc_host *memory = pc_host_of(host);
    if (memory == NULL)
        return NULL;
    pc_comm *comm = (pc_comm *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (comm == NULL)
        return NULL;
    comm->host = memory;
    comm->host_object = Py_NewRef(host);
    comm->ident = ident;
    comm->rank = rank;
    comm->size = (int)size;
    comm->entry = -1;
    comm->sleep = Py_NewRef(sleep);
    comm->mismatch = Py_NewRef(mismatch);
    comm->give_up = Py_NewRef(give_up);
    comm->chunk_nbytes = pc_chunk_nbytes(comm->size);
    comm->slots_offset = pc_slots_offset(comm->size);
    comm->big_offset = pc_big_offset(comm->size);
    comm->region_nbytes = pc_region_nbytes(comm->size);
    comm->local = PyMem_Calloc((size_t)size, sizeof *comm->local);
    comm->pids = PyMem_Calloc((size_t)size, sizeof *comm->pids);
    comm->compared = PyMem_Calloc((size_t)size, sizeof *comm->compared);
    if (comm->local == NULL || comm->pids == NULL || comm->compared == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t index = 0; !PyErr_Occurred() && index < size; index++) {
        PyObject *item = PySequence_GetItem(ranks, index);
        comm->local[index] = item != NULL ? (int)PyLong_AsLong(item) : 0;
        Py_XDECREF(item);
        if (!PyErr_Occurred() && (comm->local[index] < 0 || comm->local[index] >= comm->host->size))
            PyErr_SetString(PyExc_ValueError, "there is no such rank on this host");
    }
    if (PyErr_Occurred()) {
        Py_DECREF(comm);
        return NULL;
    }
    return (PyObject *)comm;
}

static int comm_traverse(pc_comm *comm, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)comm));
    Py_VISIT(comm->sleep);
    Py_VISIT(comm->mismatch);
    Py_VISIT(comm->give_up);
    for (int kind = 0; kind < PC_METHODS; kind++)
        Py_VISIT(comm->slow[kind]);
    for (int kind = 0; kind < PC_UNEVEN_KINDS; kind++) {
        Py_VISIT(comm->uneven[kind].slow);
        Py_VISIT(comm->uneven[kind].resume);
        Py_VISIT(comm->uneven[kind].sign);
    }
    return 0;
}

static int comm_clear(pc_comm *comm) {
    Py_CLEAR(comm->sleep);
    Py_CLEAR(comm->mismatch);
    Py_CLEAR(comm->give_up);
    clear_methods(comm);
    comm->usable = false;
    return 0;
}

static void comm_dealloc(pc_comm *comm) {
    PyTypeObject *type = Py_TYPE((PyObject *)comm);
    PyObject_GC_UnTrack(comm);
    detach(comm);
    comm_clear(comm);
    Py_CLEAR(comm->host_object);
    PyMem_Free(comm->local);
    PyMem_Free(comm->pids);
    PyMem_Free(comm->compared);
    free(comm->scratch);
    pc_forget_choices(comm);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(comm);
    Py_DECREF(type);
}

/* set_slow(kind, function): what the method of that kind calls for all that it does not do itself */
static PyObject *comm_set_slow(pc_comm *comm, PyObject *args) {
    int kind;
    PyObject *function;
    if (!PyArg_ParseTuple(args, "iO", &kind, &function))
        return NULL;
    if (kind < 0 || kind >= PC_METHODS) {
        PyErr_SetString(PyExc_ValueError, "no such kind");
        return NULL;
    }
    PyObject *old = comm->slow[kind];
    comm->slow[kind] = Py_NewRef(function);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

/* set_uneven(kind, slow, resume, sign): see struct pc_uneven */
static PyObject *comm_set_uneven(pc_comm *comm, PyObject *args) {
    int kind;
    PyObject *slow, *resume, *sign;
    if (!PyArg_ParseTuple(args, "iOOO", &kind, &slow, &resume, &sign))
        return NULL;
    if (kind < 0 || kind >= PC_UNEVEN_KINDS || comm->uneven[kind].slow != NULL) {
        PyErr_SetString(PyExc_ValueError, "no such kind, or it is set");
        return NULL;
    }
    comm->uneven[kind] = (struct pc_uneven){Py_NewRef(slow), Py_NewRef(resume), Py_NewRef(sign), NULL, 0, 0, 0};
    Py_RETURN_NONE;
}

static PyObject *comm_get_number(pc_comm *comm, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(comm->number);
}
static PyObject *comm_get_internal(pc_comm *comm, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(comm->internal);
}
static PyObject *comm_get_piece_nbytes(pc_comm *comm, void *unused) {
    (void)comm, (void)unused;
    return PyLong_FromSize_t(PC_PIECE_NBYTES);
}
static PyObject *comm_get_choices(pc_comm *comm, void *unused) {
    (void)unused;
    PyObject *list = PyList_New(0);
    for (int kind = 0; kind < PC_KINDS; kind++) {
        for (int bits = 0; list != NULL && bits < PC_CHOICES; bits++) {
            int direct = pc_known_choice(comm, kind, bits);
            PyObject *item = direct < 0 ? NULL : Py_BuildValue("(iiO)", kind, bits, direct ? Py_True : Py_False);
            if (direct >= 0 && (item == NULL || PyList_Append(list, item) < 0))
                Py_CLEAR(list);
            Py_XDECREF(item);
        }
    }
    return list;
}
static PyObject *comm_get_ready(pc_comm *comm, void *unused) {
    (void)unused;
    return PyBool_FromLong(comm->usable && !comm->host->engaged && !pc_host_failed(comm->host));
}

static PyObject *comm_get_attached(pc_comm *comm, void *unused) {
    (void)unused;
    return PyBool_FromLong(comm->entry >= 0);
}
static PyObject *comm_get_direct(pc_comm *comm, void *unused) {
    (void)unused;
    return PyBool_FromLong(comm->direct);
}

static PyGetSetDef comm_getset[] = {
    {"number", (getter)comm_get_number, NULL, "Number of the last call.", NULL},
    {"internal", (getter)comm_get_internal, NULL, "Number of calls that were not the user's.", NULL},
    {"piece_nbytes", (getter)comm_get_piece_nbytes, NULL, "Bytes of which a large all_reduce has pieces.", NULL},
    {"choices", (getter)comm_get_choices, NULL,
     "What trials have found: (kind, k, whether direct) for values of 2^k to 2^(k + 1) - 1 bytes.", NULL},
    {"ready", (getter)comm_get_ready, NULL, "Whether a call may begin without a look at the engine.", NULL},
    {"attached", (getter)comm_get_attached, NULL, "Whether its region is mapped.", NULL},
    {"direct", (getter)comm_get_direct, NULL, "Whether the ranks read each other's memory.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define COMM_METHOD(name, flags, doc) {#name, (PyCFunction)(void (*)(void))comm_##name, flags, doc}
static PyMethodDef comm_methods[] = {
    COMM_METHOD(attach, METH_O, "Map the region and meet the other ranks there."),
    COMM_METHOD(allow, METH_O, "Whether the fast path may be taken."),
    COMM_METHOD(close, METH_NOARGS, "Give the region back."),
    COMM_METHOD(set_slow, METH_VARARGS, "What a method calls for what it does not do itself."),
    COMM_METHOD(run, METH_VARARGS, "Run a collective on contiguous memory."),
    COMM_METHOD(set_uneven, METH_VARARGS, "The same for a collective of blocks that differ in shape."),
    COMM_METHOD(announce, METH_VARARGS, "The root's part of a broadcast or scatter."),
    COMM_METHOD(hear, METH_VARARGS, "Wait for what the root announces."),
    COMM_METHOD(receive, METH_VARARGS, "Receive what the root has announced."),
    COMM_METHOD(claim, METH_NOARGS, "Be the only thread that calls; False: another is."),
    COMM_METHOD(release, METH_NOARGS, "Let others call."),
    COMM_METHOD(fetch, METH_VARARGS, "Read pieces of the others' memory."),
    COMM_METHOD(entered, METH_O, "Number of the last call that a rank has entered."),
    COMM_METHOD(differing, METH_NOARGS, "The first call that another rank has made differently."),
    COMM_METHOD(value_hash, METH_VARARGS, "Hash of an array's dtype and shape, as announced."),
    {NULL, NULL, 0, NULL},
};

static PyMethodDef *all_methods(void) {
    static PyMethodDef methods[64];
    int count = 0;
    for (PyMethodDef *method = comm_methods; method->ml_name != NULL; method++)
        methods[count++] = *method;
    for (PyMethodDef *method = pc_fast_methods; method->ml_name != NULL; method++)
        methods[count++] = *method;
    for (PyMethodDef *method = pc_uneven_methods; method->ml_name != NULL; method++)
        methods[count++] = *method;
    for (PyMethodDef *method = pc_reduce_scatterv_methods; method->ml_name != NULL; method++)
        methods[count++] = *method;
    return methods;
}

PyType_Spec *pc_comm_spec(void) {
    static PyType_Slot slots[] = {
        {Py_tp_new, comm_new},
        {Py_tp_dealloc, comm_dealloc},
        {Py_tp_traverse, comm_traverse},
        {Py_tp_clear, comm_clear},
        {Py_tp_getset, comm_getset},
        {Py_tp_doc, "The native side of one communicator."},
        {Py_tp_methods, NULL},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "pycoll._transports._core.Comm",
        .basicsize = sizeof(pc_comm),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
        .slots = slots,
    };
    slots[6].pfunc = all_methods();
    return &spec;
}
