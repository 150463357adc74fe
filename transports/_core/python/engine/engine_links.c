/* The other ranks of an engine: methods of `_core.MessageEngine`. See engine_type.h. */
#include "engine_type.h"

#include <stdlib.h>

static bool is_other(pc_engine_object *self, int peer) {
    if (self->has_tcp && peer >= 0 && peer < self->engine.size && peer != self->tcp.tcp.rank)
        return true;
    PyErr_SetString(PyExc_ValueError, "there is no such other rank by tcp");
    return false;
}

PyObject *pc_engine_attach_py(pc_engine_object *self, PyObject *args) {
    int peer, lane, fd;
    if (!PyArg_ParseTuple(args, "iii", &peer, &lane, &fd) || !is_other(self, peer))
        return NULL;
    if (lane < 0 || lane >= self->tcp.tcp.num_lanes) {
        PyErr_SetString(PyExc_ValueError, "there is no such lane");
        return NULL;
    }
    struct pc_turn turn;
    if (!pc_engine_take(self, &turn))
        return pc_engine_is_closed();
    int error = pc_tcp_attach(&self->tcp.tcp, peer, lane, fd);
    if (error == 0)
        self->tcp.peers[peer].begun = true;
    pc_drive_posted(&self->drive);
    pc_engine_give(self, &turn);
    if (error != 0)
        return pc_raise_errno(error);
    Py_RETURN_NONE;
}

PyObject *pc_engine_lose_py(pc_engine_object *self, PyObject *args) {
    int peer;
    const char *why;
    struct pc_turn turn;
    if (!PyArg_ParseTuple(args, "is", &peer, &why) || !is_other(self, peer))
        return NULL;
    if (pc_engine_take(self, &turn)) {
        pc_tcp_lose(&self->tcp.tcp, peer, why);
        pc_engine_give(self, &turn);
    }
    Py_RETURN_NONE;
}

PyObject *pc_engine_forget_py(pc_engine_object *self, PyObject *number) {
    int peer = (int)PyLong_AsLong(number);
    if (PyErr_Occurred())
        return NULL;
    if (peer < 0 || peer >= self->engine.size) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank");
        return NULL;
    }
    struct pc_turn turn;
    if (pc_engine_take(self, &turn)) {
        pc_engine_forget(&self->engine, peer, 1 + peer);
        pc_engine_give(self, &turn);
    }
    Py_RETURN_NONE;
}

PyObject *pc_engine_links_py(pc_engine_object *self, PyObject *Py_UNUSED(unused)) {
    int *linked = malloc((size_t)self->engine.size * sizeof *linked);
    size_t count = 0;
    struct pc_turn turn;
    if (linked == NULL)
        return PyErr_NoMemory();
    bool is_open = pc_engine_take(self, &turn);
    for (int peer = 0; is_open && peer < self->engine.size; peer++) {
        int local = self->host != NULL ? self->shm.local[peer] : -1;
        if ((local >= 0 && self->shm.channel.peers[local].linked) ||
            (self->has_tcp && self->tcp.tcp.peers[peer].used))
            linked[count++] = peer;
    }
    pc_engine_give(self, &turn);
    PyObject *links = pc_list_of(linked, count);
    free(linked);
    return links;
}
