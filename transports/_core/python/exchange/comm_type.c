/* `_core.Comm`: the type, and what is asked and said between calls. See comm.h. */
#include "comm.h"

#include "python/host/host_type.h"
#include "python/arguments/timeout.h"

#include <stdlib.h>
#include <structmember.h>
#include <sys/mman.h>

/* --- what is set ------------------------------------------------------------------------------ */

static PyObject *comm_close(pc_comm *comm, PyObject *Py_UNUSED(unused)) {
    pc_comm_detach(comm);
    Py_RETURN_NONE;
}

static PyObject *comm_allow(pc_comm *comm, PyObject *usable) {
    comm->usable = PyObject_IsTrue(usable) == 1 && comm->entry >= 0;
    Py_RETURN_NONE;
}

/* --- between calls ---------------------------------------------------------------------------- */

/* claim(seconds) -> bool: the calling thread is the only one that calls, until release(), and its
   call may take so long, with what it has done here already; False: another is. A thread that was
   interrupted before it could release may claim again. */
static PyObject *comm_claim(pc_comm *comm, PyObject *seconds) {
    struct pc_deadline deadline = {0, 0};
    if (!pc_timeout(seconds, comm->op_timeout_ns, &deadline.timeout_ns)) {
        PyErr_SetString(PyExc_ValueError, "that is no number of seconds");
        return NULL;
    }
    if (comm->busy || (comm->claimed && !pthread_equal(comm->caller, pthread_self())))
        Py_RETURN_FALSE;
    if (comm->goes_on)
        deadline = comm->deadline;
    comm->goes_on = false;
    pc_deadline_count(&deadline, pc_now_ns());
    pc_claim(comm, deadline);
    Py_RETURN_TRUE;
}

static PyObject *comm_release(pc_comm *comm, PyObject *Py_UNUSED(unused)) {
    comm->claimed = false;
    Py_RETURN_NONE;
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

/* differing() -> (rank, number, mine, theirs): the first call that another rank has made
   differently, with the signatures and shapes of both; None. It never waits: of two ranks that have
   made a call, the one that asks later sees both. */
static PyObject *comm_differing(pc_comm *comm, PyObject *Py_UNUSED(unused)) {
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
                return Py_BuildValue("(iKNN)", rank, (unsigned long long)number,
                                     pc_called(comm, comm->rank, number),
                                     pc_called(comm, rank, number));
    }
    Py_RETURN_NONE;
}

/* --- the type --------------------------------------------------------------------------------- */

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *host, *ranks, *sleep, *mismatch, *give_up;
    unsigned long long ident;
    int rank;
    if (!PyArg_ParseTuple(args, "OKiOOOO", &host, &ident, &rank, &ranks, &sleep, &mismatch,
                          &give_up))
        return NULL;
    Py_ssize_t size = PySequence_Size(ranks);
    if (size < 0)
        return NULL;
    pc_host *memory = pc_host_of(host);
    if (memory == NULL)
        return NULL;
    pc_comm *comm = pc_new(type);
    if (comm == NULL)
        return NULL;
    comm->host = memory;
    comm->tally = &pc_host_record(memory, memory->rank)->tally;
    comm->host_object = Py_NewRef(host);
    comm->ident = ident;
    comm->rank = rank;
    comm->size = (int)size;
    comm->entry = -1;
    comm->op_timeout_ns = PC_FOR_EVER;
    comm->deadline = (struct pc_deadline){PC_FOR_EVER, 0};
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
    else if (pc_read_ranks(ranks, size, 0, memory->size - 1, comm->local))
        return (PyObject *)comm;
    Py_DECREF(comm);
    return NULL;
}

static int comm_traverse(pc_comm *comm, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)comm));
    Py_VISIT(comm->sleep);
    Py_VISIT(comm->mismatch);
    Py_VISIT(comm->give_up);
    return 0;
}

static int comm_clear(pc_comm *comm) {
    Py_CLEAR(comm->sleep);
    Py_CLEAR(comm->mismatch);
    Py_CLEAR(comm->give_up);
    comm->usable = false;
    return 0;
}

static void comm_dealloc(pc_comm *comm) {
    PyObject_GC_UnTrack(comm);
    pc_comm_detach(comm);
    comm_clear(comm);
    Py_CLEAR(comm->host_object);
    PyMem_Free(comm->local);
    PyMem_Free(comm->pids);
    PyMem_Free(comm->compared);
    free(comm->scratch);
    pc_forget_choices(comm);
    pc_free(comm);
}

static PyObject *comm_get_internal(pc_comm *comm, void *Py_UNUSED(unused)) {
    /* a call that was heard only is still to be made */
    return PyLong_FromUnsignedLongLong(comm->internal + comm->heard);
}
static PyObject *comm_get_piece_nbytes(pc_comm *comm, void *unused) {
    (void)comm, (void)unused;
    return PyLong_FromSize_t(PC_PIECE_NBYTES);
}
static PyObject *comm_get_choices(pc_comm *comm, void *Py_UNUSED(unused)) {
    PyObject *list = PyList_New(0);
    for (int kind = 0; kind < PC_KINDS; kind++) {
        for (int bits = 0; list != NULL && bits < PC_CHOICES; bits++) {
            int direct = pc_known_choice(comm, kind, bits);
            PyObject *item =
                direct < 0 ? NULL : Py_BuildValue("(iiO)", kind, bits, direct ? Py_True : Py_False);
            if (direct >= 0 && (item == NULL || PyList_Append(list, item) < 0))
                Py_CLEAR(list);
            Py_XDECREF(item);
        }
    }
    return list;
}
static PyObject *comm_get_ready(pc_comm *comm, void *Py_UNUSED(unused)) {
    return PyBool_FromLong(comm->usable && !comm->host->python_busy && !pc_host_failed(comm->host));
}

/* Bytes of its region that take memory; 0 if it is not attached. */
static PyObject *comm_get_taken(pc_comm *comm, void *Py_UNUSED(unused)) {
    size_t pages = comm->region != NULL ? pc_round_up(comm->region_nbytes, PC_PAGE) / PC_PAGE : 0;
    size_t taken = 0;
    unsigned char *in_memory = PyMem_Calloc(pages + 1, 1);
    if (in_memory == NULL)
        return PyErr_NoMemory();
    if (pages > 0 && mincore(comm->region, comm->region_nbytes, in_memory) == 0)
        for (size_t page = 0; page < pages; page++)
            taken += in_memory[page] & 1;
    PyMem_Free(in_memory);
    return PyLong_FromSize_t(taken * PC_PAGE);
}

static PyObject *comm_get_op_timeout(pc_comm *comm, void *Py_UNUSED(unused)) {
    return pc_seconds(comm->op_timeout_ns);
}
static int comm_set_op_timeout(pc_comm *comm, PyObject *value, void *Py_UNUSED(unused)) {
    return pc_set_timeout(value, &comm->op_timeout_ns);
}

static PyObject *comm_get_deadline(pc_comm *comm, void *Py_UNUSED(unused)) {
    uint64_t until_ns = comm->deadline.until_ns;
    return PyFloat_FromDouble(until_ns == 0 || until_ns == PC_FOR_EVER ? Py_HUGE_VAL
                                                                      : (double)until_ns * 1e-9);
}
static PyObject *comm_get_attached(pc_comm *comm, void *Py_UNUSED(unused)) {
    return PyBool_FromLong(comm->entry >= 0);
}
static PyGetSetDef comm_getset[] = {
    {"op_timeout", (getter)comm_get_op_timeout, (setter)comm_set_op_timeout,
     "Default deadline of a call, seconds; inf: none.", NULL},
    {"internal", (getter)comm_get_internal, NULL, "Number of calls that were not the user's.",
     NULL},
    {"piece_nbytes", (getter)comm_get_piece_nbytes, NULL,
     "Bytes of which a large all_reduce has pieces.", NULL},
    {"choices", (getter)comm_get_choices, NULL,
     "What trials have found: (kind, k, whether direct) for values of 2^k to 2^(k + 1) - 1 bytes.",
     NULL},
    {"ready", (getter)comm_get_ready, NULL,
     "Whether a call may begin without a look at the engine.", NULL},
    {"taken_nbytes", (getter)comm_get_taken, NULL,
     "Bytes of its region that take memory; 0 if it is not mapped.", NULL},
    {"deadline", (getter)comm_get_deadline, NULL,
     "Until when the call under way may take, of time.monotonic; math.inf: it has none.", NULL},
    {"attached", (getter)comm_get_attached, NULL, "Whether its region is mapped.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef comm_members[] = {
    {"number", T_ULONGLONG, offsetof(pc_comm, number), READONLY, "number of the last call"},
    {"may_use_gpus", T_BOOL, offsetof(pc_comm, may_use_gpus), 0,
     "whether large reductions ask all ranks if they are for GPUs; the same on all ranks"},
    {"direct", T_BOOL, offsetof(pc_comm, direct), READONLY,
     "whether the ranks read each other's memory"},
    {NULL, 0, 0, 0, NULL},
};

#define COMM_METHOD(name, flags, doc) {#name, (PyCFunction)(void (*)(void))comm_##name, flags, doc}
#define COMM_CALL(name, doc) \
    {#name, (PyCFunction)(void (*)(void))pc_comm_##name, METH_VARARGS, doc}
static PyMethodDef comm_methods[] = {
    {"attach", (PyCFunction)pc_comm_attach, METH_O,
     "Map the region and meet the other ranks there."},
    COMM_METHOD(allow, METH_O, "Whether the fast path may be taken."),
    COMM_METHOD(close, METH_NOARGS, "Give the region back."),
    COMM_METHOD(claim, METH_O,
                "Be the only thread that calls, for so many seconds; False: another is."),
    COMM_METHOD(release, METH_NOARGS, "Let others call."),
    COMM_METHOD(entered, METH_O, "Number of the last call that a rank has entered."),
    COMM_METHOD(differing, METH_NOARGS, "The first call that another rank has made differently."),
    COMM_CALL(run, "Run a collective on contiguous memory."),
    COMM_CALL(announce, "The root's part of a broadcast or scatter."),
    COMM_CALL(hear, "Wait for what the root announces."),
    COMM_CALL(receive, "Receive what the root has announced."),
    COMM_CALL(value_hash, "Hash of an array's dtype and shape, as announced."),
    COMM_CALL(uneven, "Run a collective of blocks that differ in shape. `given`: head and memory "
                      "of each of this rank's; `places` returns, for the heads of those that "
                      "come, where they go, None: nowhere."),
    COMM_CALL(reduce_rows, "Run a reduce_scatterv on contiguous memory."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot comm_slots[] = {
    {Py_tp_new, comm_new},
    {Py_tp_dealloc, comm_dealloc},
    {Py_tp_traverse, comm_traverse},
    {Py_tp_clear, comm_clear},
    {Py_tp_methods, comm_methods},
    {Py_tp_getset, comm_getset},
    {Py_tp_members, comm_members},
    {Py_tp_doc, "The shared memory of one communicator."},
    {0, NULL},
};

PyType_Spec pc_comm_spec = {
    .name = "pycoll._transports._core.Comm",
    .basicsize = sizeof(pc_comm),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = comm_slots,
};
