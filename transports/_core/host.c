#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <structmember.h>
#include <sys/mman.h>
#include <unistd.h>

#include "arena.h"
#include "channel.h"
#include "comm.h"

/* Looks at a flag, about 20 ns each, before a waiting rank first yields its core. */
#define SPINS 1000

void pc_host_ring(pc_host *host, int rank) {
    uint64_t one = 1;
    /* It fails only when the counter is full, and then the doorbell is ringing anyway. */
    ssize_t ignored = write(host->doorbells[rank], &one, sizeof one);
    (void)ignored;
}

void pc_host_sleep(pc_host *host) {
    if (host->sleepers++ == 0)
        atomic_exchange_explicit(&pc_host_record(host, host->rank)->asleep, 1, memory_order_seq_cst);
}

void pc_host_awake(pc_host *host) {
    if (--host->sleepers == 0)
        atomic_store_explicit(&pc_host_record(host, host->rank)->asleep, 0, memory_order_relaxed);
}

void pc_host_set_status(pc_host *host, const char *text, size_t nbytes) {
    struct pc_record *record = pc_host_record(host, host->rank);
    if (nbytes > PC_STATUS_NBYTES - 1)
        nbytes = PC_STATUS_NBYTES - 1;
    uint32_t sequence = atomic_load_explicit(&record->status_sequence, memory_order_relaxed);
    atomic_exchange_explicit(&record->status_sequence, sequence + 1, memory_order_seq_cst);
    memcpy(record->status, text, nbytes);
    record->status[nbytes] = 0;
    atomic_store_explicit(&record->status_sequence, sequence + 2, memory_order_release);
}

/* --- forks -------------------------------------------------------------------------------------------- */

uint32_t pc_forks;

static void count_fork(void) { pc_forks++; }
static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

/* --- communicators ----------------------------------------------------------------------------------- */

static struct pc_entry *entry_at(pc_host *host, int index) {
    return (struct pc_entry *)(host->base + host->table_offset) + index;
}

/* The table's lock is held for microseconds and never while anything is waited for. A rank that dies with
   it ends the job: who waits for it hears of that like everybody. */
static int lock_table(pc_host *host) {
    pc_flag32 *lock = &pc_host_page(host)->lock;
    for (int tries = 0;; tries++) {
        uint32_t nobody = 0;
        if (atomic_compare_exchange_strong(lock, &nobody, (uint32_t)host->rank + 1))
            return 0;
        sched_yield();
        if (tries % 1000 == 999 && (PyErr_CheckSignals() != 0 || pc_host_failed(host))) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_BlockingIOError, "a rank has failed, perhaps with the lock of the table");
            return -1;
        }
    }
}

static void unlock_table(pc_host *host) { atomic_store(&pc_host_page(host)->lock, 0); }

int pc_host_attach(pc_host *host, uint64_t ident, size_t nbytes, int *entry, unsigned char **region) {
    int found = -1;
    if (lock_table(host) < 0)
        return -1;
    for (int index = 0; index < PC_COMMS; index++) {
        uint64_t owner = atomic_load(&entry_at(host, index)->ident);
        if (owner == ident) {
            found = index;
            break;
        }
        if (owner == 0 && found < 0)
            found = index;
    }
    if (found >= 0)
        atomic_store(&entry_at(host, found)->ident, ident);
    unlock_table(host);
    if (found < 0) {
        PyErr_Format(PyExc_OSError, "more than %d communicators use shared memory: close some", PC_COMMS);
        return -1;
    }
    off_t offset = (off_t)(host->regions_offset + (size_t)found * host->region_nbytes);
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, host->fd, offset);
    if (memory == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    *entry = found;
    *region = memory;
    return 0;
}

void pc_host_detach(pc_host *host, int index, int size, unsigned char *region, size_t nbytes) {
    munmap(region, nbytes);
    struct pc_entry *entry = entry_at(host, index);
    if (atomic_fetch_add(&entry->detached, 1) + 1 < (uint32_t)size)
        return;
    off_t offset = (off_t)(host->regions_offset + (size_t)index * host->region_nbytes);
    /* What is punched out reads as zero, as a new region must. If that fails the entry stays taken. */
    if (fallocate(host->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, (off_t)host->region_nbytes) < 0)
        return;
    atomic_store(&entry->detached, 0);
    atomic_store(&entry->ident, 0);
}

/* --- the Python type --------------------------------------------------------------------------------- */

void pc_host_lay_out(pc_host *host, int ranks) {
    size_t size = (size_t)ranks;
    size_t offset = pc_round_up(PC_PAGE + size * PC_RECORD_NBYTES, PC_PAGE);
    host->rings_offset = offset;
    host->ring_nbytes = pc_ring_nbytes(ranks);
    offset += size * size * host->ring_nbytes;
    host->heaps_offset = offset;
    host->heap_nbytes = PC_HEAP_NBYTES;
    offset += size * host->heap_nbytes;
    host->table_offset = offset;
    offset += pc_round_up(PC_COMMS * sizeof(struct pc_entry), PC_PAGE);
    host->regions_offset = offset;
    host->region_nbytes = pc_round_up(pc_region_nbytes(ranks), PC_PAGE);
    host->mapped = offset;
    host->arena_nbytes = pc_arena_nbytes(ranks);
    host->arenas_offset = pc_round_up(offset + PC_COMMS * host->region_nbytes, PC_HUGE_PAGE);
    host->file_nbytes = host->arenas_offset + size * host->arena_nbytes;
}

static PyObject *host_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fd", "rank", "doorbells", "cores", NULL};
    int fd, rank, cores;
    PyObject *doorbells;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiOi", names, &fd, &rank, &doorbells, &cores))
        return NULL;
    Py_ssize_t size = PySequence_Size(doorbells);
    if (size < 0)
        return NULL;
    if (rank < 0 || rank >= size) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank on this host");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    pc_host *host = (pc_host *)alloc(type, 0);
    if (host == NULL)
        return NULL;
    host->fd = fd;
    host->rank = rank;
    host->size = (int)size;
    host->spins = size <= cores ? SPINS : 0;
    host->doorbells = PyMem_Calloc((size_t)size, sizeof *host->doorbells);
    if (host->doorbells == NULL)
        goto failed;
    for (Py_ssize_t index = 0; index < size; index++) {
        PyObject *item = PySequence_GetItem(doorbells, index);
        host->doorbells[index] = item != NULL ? (int)PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred())
            goto failed;
    }
    host->windows = PyMem_Calloc((size_t)size, sizeof *host->windows);
    if (host->windows == NULL)
        goto failed;
    pc_host_lay_out(host, host->size);
    if (ftruncate(fd, (off_t)host->file_nbytes) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        goto failed;
    }
    void *base = mmap(NULL, host->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        goto failed;
    }
    host->base = base;
    host->seen_epoch = atomic_load(&pc_host_page(host)->epoch);
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    host->forks = pc_forks;
    pc_arena_host(host, true);
    return (PyObject *)host;
failed:
    Py_DECREF(host);
    return NULL;
}

static void host_dealloc(pc_host *host) {
    PyTypeObject *type = Py_TYPE((PyObject *)host);
    if (host->base != NULL)
        munmap(host->base, host->mapped);
    pc_arena_host(host, false);
    PyMem_Free(host->windows);
    PyMem_Free(host->doorbells);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(host);
    Py_DECREF(type);
}

static PyObject *host_sleep(pc_host *host, PyObject *unused) {
    (void)unused;
    pc_host_sleep(host);
    Py_RETURN_NONE;
}

static PyObject *host_awake(pc_host *host, PyObject *unused) {
    (void)unused;
    pc_host_awake(host);
    Py_RETURN_NONE;
}

static PyObject *host_set_status(pc_host *host, PyObject *text) {
    Py_ssize_t nbytes;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &nbytes);
    if (bytes == NULL)
        return NULL;
    pc_host_set_status(host, bytes, (size_t)nbytes);
    Py_RETURN_NONE;
}

static PyObject *host_see_failure(pc_host *host, PyObject *unused) {
    (void)unused;
    host->seen_epoch = atomic_load(&pc_host_page(host)->epoch);
    Py_RETURN_NONE;
}

/* window(rank, address, nbytes) -> memoryview of bytes in the arena of a rank; None: there are none such. */
static PyObject *host_window(pc_host *host, PyObject *args) {
    int rank;
    unsigned long long address;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "iKn", &rank, &address, &nbytes))
        return NULL;
    if (rank < 0 || rank >= host->size || nbytes < 0) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank, or length");
        return NULL;
    }
    unsigned char *here = pc_reach_here(host, rank, address, (size_t)nbytes);
    return here != NULL ? PyMemoryView_FromMemory((char *)here, nbytes, PyBUF_WRITE) : Py_NewRef(Py_None);
}

static PyMethodDef host_methods[] = {
    {"window", (PyCFunction)host_window, METH_VARARGS, "Bytes in the arena of a rank, as they are mapped here."},
    {"sleep", (PyCFunction)host_sleep, METH_NOARGS, "Announce that a thread goes to sleep until the doorbell rings."},
    {"awake", (PyCFunction)host_awake, METH_NOARGS, "Take that back."},
    {"set_status", (PyCFunction)host_set_status, METH_O, "Say in the control memory what this rank is doing."},
    {"see_failure", (PyCFunction)host_see_failure, METH_NOARGS, "Take note of the failure epoch."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef host_members[] = {
    {"engaged", T_BOOL, offsetof(pc_host, engaged), 0, "Whether a thread is in the engine."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot host_slots[] = {
    {Py_tp_new, host_new},
    {Py_tp_dealloc, host_dealloc},
    {Py_tp_methods, host_methods},
    {Py_tp_members, host_members},
    {Py_tp_doc, "The memory that the ranks of one host share, mapped."},
    {0, NULL},
};

PyType_Spec pc_host_spec = {
    .name = "pycoll.transports._core.Host",
    .basicsize = sizeof(pc_host),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = host_slots,
};
