/* The other ranks of an engine: methods of `_core.MessageEngine`. See engine_type.h. */
#include "engine_type.h"

#include <errno.h>
#include <stdlib.h>

struct linking {
    int peer, lane, fd, error;
    const char *why;
};

static void attach(pc_engine_object *self, void *argument) {
    struct linking *linking = argument;
    linking->error = pc_tcp_attach(&self->tcp.tcp, linking->peer, linking->lane, linking->fd);
    if (linking->error == 0)
        self->tcp.peers[linking->peer].begun = true;
    pc_drive_posted(&self->drive);
}

static bool is_other(pc_engine_object *self, int peer) {
    if (self->has_tcp && peer >= 0 && peer < self->engine.size && peer != self->tcp.tcp.rank)
        return true;
    PyErr_SetString(PyExc_ValueError, "there is no such other rank by tcp");
    return false;
}

PyObject *pc_engine_attach_py(pc_engine_object *self, PyObject *args) {
    struct linking linking = {0};
    if (!PyArg_ParseTuple(args, "iii", &linking.peer, &linking.lane, &linking.fd) ||
        !is_other(self, linking.peer))
        return NULL;
    if (linking.lane < 0 || linking.lane >= self->tcp.tcp.num_lanes) {
        PyErr_SetString(PyExc_ValueError, "there is no such lane");
        return NULL;
    }
    if (!pc_engine_do(self, attach, &linking))
        return pc_engine_is_closed();
    if (linking.error != 0) {
        errno = linking.error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static void lose(pc_engine_object *self, void *argument) {
    struct linking *linking = argument;
    pc_tcp_lose(&self->tcp.tcp, linking->peer, linking->why);
}

PyObject *pc_engine_lose_py(pc_engine_object *self, PyObject *args) {
    struct linking linking = {0};
    if (!PyArg_ParseTuple(args, "is", &linking.peer, &linking.why) || !is_other(self, linking.peer))
        return NULL;
    pc_engine_do(self, lose, &linking);
    Py_RETURN_NONE;
}

static void forget(pc_engine_object *self, void *argument) {
    int peer = *(int *)argument;
    pc_engine_forget(&self->engine, peer, 1 + peer);
}

PyObject *pc_engine_forget_py(pc_engine_object *self, PyObject *number) {
    int peer = (int)PyLong_AsLong(number);
    if (PyErr_Occurred())
        return NULL;
    if (peer < 0 || peer >= self->engine.size) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank");
        return NULL;
    }
    pc_engine_do(self, forget, &peer);
    Py_RETURN_NONE;
}

/* Ranks to which something was sent, as bytes of 0 and 1. */
static void find_links(pc_engine_object *self, void *argument) {
    unsigned char *linked = argument;
    for (int local = 0; self->host != NULL && local < self->shm.channel.size; local++)
        if (self->shm.channel.peers[local].linked)
            linked[self->shm.peers[local].rank] = 1;
    for (int peer = 0; self->has_tcp && peer < self->engine.size; peer++)
        if (self->tcp.tcp.peers[peer].used)
            linked[peer] = 1;
}

PyObject *pc_engine_links_py(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    unsigned char *linked = calloc((size_t)self->engine.size, 1);
    if (linked == NULL)
        return PyErr_NoMemory();
    pc_engine_do(self, find_links, linked);
    PyObject *links = PyList_New(0);
    for (int peer = 0; links != NULL && peer < self->engine.size; peer++) {
        PyObject *number = linked[peer] ? PyLong_FromLong(peer) : NULL;
        if (linked[peer] && (number == NULL || PyList_Append(links, number) < 0))
            Py_CLEAR(links);
        Py_XDECREF(number);
    }
    free(linked);
    return links;
}
