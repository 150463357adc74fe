/* A communicator maps its region, and its ranks find out what they can do with each other's memory.
   See comm.h. */
#include "comm.h"

#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

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
    int status = pc_exchange_run(&call);
    pc_call_end(&call, status, NULL);
    return status;
}

enum { READS = 1, MAPS = 2 }; /* what a rank can do with every other's memory */

/* Find out whether every rank can read every other's memory, and has mapped its arena, which all
   must know alike. */
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
        struct iovec local = {&nonce, sizeof nonce},
                     remote = {(void *)(uintptr_t)greetings[rank].address, sizeof nonce};
        comm->pids[rank] = (int)greetings[rank].pid;
        if (able & READS &&
            (process_vm_readv(comm->pids[rank], &local, 1, &remote, 1, 0) != sizeof nonce ||
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
    while ((error = pc_host_attach(host, comm->ident, comm->region_nbytes, &comm->entry,
                                   &comm->region)) == EBUSY) {
        if (PyErr_CheckSignals() != 0)
            return -1;
        if (pc_host_failed(host)) {
            PyErr_SetString(PyExc_BlockingIOError,
                            "a rank has failed, perhaps with the lock of the table");
            return -1;
        }
    }
    if (error == 0) {
        struct pc_progress *mine = pc_progress_of(comm, comm->rank);
        mine->local = (uint32_t)comm->local[comm->rank];
        mine->size = (uint32_t)comm->size;
        pc_publish(&mine->mark, PC_KEPT_MARK);
        return 0;
    }
    errno = error;
    if (error == ENOSPC)
        PyErr_Format(PyExc_OSError, "more than %d communicators use shared memory: close some",
                     PC_COMMS);
    else
        PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* attach(direct): map the region, meet the others there. */
PyObject *pc_comm_attach(pc_comm *comm, PyObject *allowed) {
    if (comm->entry < 0) {
        if (map_region(comm) < 0)
            return NULL;
        if (probe(comm, PyObject_IsTrue(allowed) == 1) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

void pc_comm_detach(pc_comm *comm) {
    comm->usable = false;
    /* The objects of a fork's child are ended by its interpreter, but the entry is its parent's. */
    if (comm->entry >= 0 && !comm->busy && !pc_host_forked(comm->host)) {
        pc_host_detach(comm->host, comm->entry, comm->size, comm->region, comm->region_nbytes);
        comm->entry = -1;
        comm->region = NULL;
    }
}
