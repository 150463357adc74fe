/* What the ranks of a host have called last in shared memory, as it lies there: for the launcher,
   which reads it when a rank has failed. See region.h. */
#include "python/base/py.h"

#include "host/host.h"
#include "host/region.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

/* The calls that are kept of a rank, the oldest first: (its number here, that on the host, how many
   calls it has made, pairs of uint64 for the last of them). */
static PyObject *calls_of(const struct pc_progress *progress, uint32_t rank, uint64_t number) {
    uint64_t count = number < PC_KEPT_CALLS ? number : PC_KEPT_CALLS;
    struct pc_kept *calls = malloc((count + 1) * sizeof *calls);
    if (calls == NULL)
        return PyErr_NoMemory();
    for (uint64_t at = 0; at < count; at++)
        calls[at] = progress->kept[(number - count + 1 + at) % PC_KEPT_CALLS];
    PyObject *found = Py_BuildValue("(IIKy#)", rank, progress->local, (unsigned long long)number,
                                    (const char *)calls, (Py_ssize_t)(count * sizeof *calls));
    free(calls);
    return found;
}

/* The number of the last call of a rank: the highest of its slots. */
static uint64_t last_number(int fd, off_t region, uint32_t size, uint32_t rank) {
    uint64_t last = 0, number;
    for (uint32_t slot = 0; slot < PC_SLOTS; slot++) {
        size_t at = pc_slots_offset((int)size) + (rank * PC_SLOTS + slot) * sizeof(struct pc_slot);
        if (pread(fd, &number, sizeof number, region + (off_t)at) == sizeof number && number > last)
            last = number;
    }
    return last;
}

/* Of one communicator; `progress` is room for that of a rank. */
static PyObject *ranks_of(int fd, off_t region, int size, struct pc_progress *progress) {
    PyObject *found = PyList_New(0);
    for (uint32_t rank = 0; found != NULL && rank < (uint32_t)size; rank++) {
        off_t at = region + (off_t)(rank * sizeof *progress);
        if (pread(fd, progress, sizeof *progress, at) != sizeof *progress ||
            progress->mark != PC_KEPT_MARK || progress->size <= rank ||
            progress->size > (uint32_t)size)
            continue; /* it has not come to it, or has no such rank */
        uint64_t number = last_number(fd, region, progress->size, rank);
        PyObject *calls = calls_of(progress, rank, number);
        if (calls == NULL || PyList_Append(found, calls) < 0)
            Py_CLEAR(found);
        Py_XDECREF(calls);
    }
    return found;
}

/* kept_calls(fd, size) -> [(ident, [(rank, rank on the host, number of calls, last calls)])] */
PyObject *pc_kept_calls(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd, size;
    if (!PyArg_ParseTuple(args, "ii", &fd, &size))
        return NULL;
    if (size < 1) {
        PyErr_SetString(PyExc_ValueError, "a host has at least one rank");
        return NULL;
    }
    pc_host host = {0};
    pc_host_lay_out(&host, size);
    struct pc_entry *entries = calloc(PC_COMMS, sizeof *entries);
    struct pc_progress *progress = aligned_alloc(2 * PC_LINE, sizeof *progress);
    PyObject *found = entries != NULL && progress != NULL ? PyList_New(0) : PyErr_NoMemory();
    /* shorter, if no rank has come so far: then all are free */
    if (found != NULL &&
        pread(fd, entries, PC_COMMS * sizeof *entries, (off_t)host.table_offset) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_CLEAR(found);
    }
    for (int index = 0; found != NULL && index < PC_COMMS; index++) {
        if (entries[index].ident == 0)
            continue;
        off_t region = (off_t)(host.regions_offset + (size_t)index * host.region_nbytes);
        PyObject *ranks = ranks_of(fd, region, size, progress);
        unsigned long long ident = entries[index].ident;
        PyObject *one = ranks != NULL ? Py_BuildValue("(KN)", ident, ranks) : NULL;
        if (one == NULL || PyList_Append(found, one) < 0)
            Py_CLEAR(found);
        Py_XDECREF(one);
    }
    free(entries);
    free(progress);
    return found;
}
