/* Links over TCP as Python sees them: `_core.Tcp`. */
#include "py.h"

#include "tcp.h"
#include "views.h"

#include <errno.h>
#include <stdlib.h>

typedef struct {
    PyObject_HEAD
    struct pc_tcp tcp;
    PyObject *events; /* a deque of the owner's: what has happened and was not handled */
    bool failed;      /* an event could not be made */
    PyThreadState *state;
} pc_tcp_object;

/* --- what happens ------------------------------------------------------------------------------------ */

enum event { ARRIVED, OFFERED, PUSHED, SENT, RECEIVED, CANCELLED, BYE, LOST, WATCHED };

/* Straight into what the owner has: a signal handler that raises when a call of ours returns loses nothing. */
static void add(pc_tcp_object *self, PyObject *event) {
    PyObject *none = event != NULL ? PyObject_CallMethod(self->events, "append", "(O)", event) : NULL;
    self->tcp.told = true;
    if (none == NULL) {
        self->failed = true;
        PyErr_Clear();
    }
    Py_XDECREF(none);
    Py_XDECREF(event);
}

static void arrived(void *owner, int peer, const void *header, size_t header_nbytes, const void *payload,
                    size_t nbytes) {
    add(owner, Py_BuildValue("iiy#y#", ARRIVED, peer, header, (Py_ssize_t)header_nbytes, payload, (Py_ssize_t)nbytes));
}
static void offered(void *owner, int peer, const void *header, size_t header_nbytes, uint64_t nbytes, uint64_t id) {
    add(owner, Py_BuildValue("iiy#KK", OFFERED, peer, header, (Py_ssize_t)header_nbytes, (unsigned long long)nbytes,
                             (unsigned long long)id));
}
static void pushed(void *owner, int peer, const void *header, size_t header_nbytes, size_t nbytes, uint64_t handle) {
    add(owner, Py_BuildValue("iiy#nK", PUSHED, peer, header, (Py_ssize_t)header_nbytes, (Py_ssize_t)nbytes,
                             (unsigned long long)handle));
}
static void sent(void *owner, uint64_t id, void *memory) {
    (void)memory;
    add(owner, Py_BuildValue("iK", SENT, (unsigned long long)id));
}
static void received(void *owner, uint64_t handle) {
    add(owner, Py_BuildValue("iK", RECEIVED, (unsigned long long)handle));
}
static void cancelled(void *owner, int peer, uint64_t id) {
    add(owner, Py_BuildValue("iiK", CANCELLED, peer, (unsigned long long)id));
}
static void bye(void *owner, int peer) { add(owner, Py_BuildValue("ii", BYE, peer)); }
static void lost(void *owner, int peer, const char *why) { add(owner, Py_BuildValue("iis", LOST, peer, why)); }
static void watched(void *owner) { add(owner, Py_BuildValue("(i)", WATCHED)); }

static void release(void *owner, void *memory) {
    (void)owner;
    pc_views_release(memory);
}
static void leave(void *owner) { ((pc_tcp_object *)owner)->state = PyEval_SaveThread(); }
static void enter(void *owner) { PyEval_RestoreThread(((pc_tcp_object *)owner)->state); }

static const struct pc_tcp_up up = {arrived, offered, pushed, sent,    received, cancelled,
                                    bye,     lost,    watched, release, leave,    enter, NULL};

/* --- life -------------------------------------------------------------------------------------------- */

static PyObject *fail(int error) {
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *tcp_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"rank", "size", "lanes", "eager_limit", "ahead_limit", "credit", "message_cost", "events", NULL};
    PyObject *events;
    int rank, size, lanes;
    Py_ssize_t eager, ahead, credit, cost;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiinnnnO", names, &rank, &size, &lanes, &eager, &ahead, &credit,
                                     &cost, &events))
        return NULL;
    if (size < 1 || rank < 0 || rank >= size || lanes < 1 || lanes > PC_TCP_LANES || eager < 0 || ahead < 0 ||
        credit < 0 || cost < 0 || ahead > UINT32_MAX || eager > ahead) {
        PyErr_SetString(PyExc_ValueError, "such links cannot be");
        return NULL;
    }
    pc_tcp_object *self = (pc_tcp_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    self->tcp = (struct pc_tcp){
        .rank = rank,
        .size = size,
        .num_lanes = lanes,
        .limits = {(size_t)eager, (size_t)ahead, (size_t)credit, (size_t)cost},
        .up = &up,
        .owner = self,
    };
    self->events = Py_NewRef(events);
    int error = pc_tcp_open(&self->tcp);
    if (error != 0) {
        Py_DECREF(self);
        return fail(error);
    }
    return (PyObject *)self;
}

static void tcp_dealloc(pc_tcp_object *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    pc_tcp_free(&self->tcp);
    Py_CLEAR(self->events);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static bool is_rank(pc_tcp_object *self, long rank) {
    if (rank >= 0 && rank < self->tcp.size && rank != self->tcp.rank)
        return true;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "there is no such other rank");
    return false;
}

static int rank_of(pc_tcp_object *self, PyObject *number) {
    long rank = PyLong_AsLong(number);
    return is_rank(self, rank) ? (int)rank : -1;
}

static PyObject *tcp_attach(pc_tcp_object *self, PyObject *args) {
    int peer, lane, fd;
    if (!PyArg_ParseTuple(args, "iii", &peer, &lane, &fd) || !is_rank(self, peer))
        return NULL;
    if (lane < 0 || lane >= self->tcp.num_lanes) {
        PyErr_SetString(PyExc_ValueError, "there is no such lane");
        return NULL;
    }
    int error = pc_tcp_attach(&self->tcp, peer, lane, fd);
    if (error != 0)
        return fail(error);
    Py_RETURN_NONE;
}

static PyObject *tcp_watch(pc_tcp_object *self, PyObject *number) {
    int fd = (int)PyLong_AsLong(number), error = PyErr_Occurred() ? EINVAL : pc_tcp_watch(&self->tcp, fd);
    if (PyErr_Occurred())
        return NULL;
    if (error != 0)
        return fail(error);
    Py_RETURN_NONE;
}

static PyObject *tcp_fileno(pc_tcp_object *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(self->tcp.epoll);
}

/* --- sending ----------------------------------------------------------------------------------------- */

static PyObject *start(pc_tcp_object *self, PyObject *const *args, bool may_buffer, bool may_push) {
    int peer = rank_of(self, args[0]);
    char *header;
    Py_ssize_t header_nbytes;
    if (peer < 0 || PyBytes_AsStringAndSize(args[1], &header, &header_nbytes) < 0)
        return NULL;
    if (header_nbytes > (Py_ssize_t)PC_TCP_LONGEST_HEADER) {
        PyErr_SetString(PyExc_ValueError, "the header of a message is too long");
        return NULL;
    }
    struct pc_views *views = pc_view_parts(args[2]);
    if (views == NULL)
        return NULL;
    struct pc_tcp_send *send = calloc(1, sizeof *send);
    struct iovec *parts = malloc((size_t)(views->count > 0 ? views->count : 1) * sizeof *parts);
    if (send == NULL || parts == NULL) {
        free(send);
        free(parts);
        pc_views_release(views);
        return PyErr_NoMemory();
    }
    *send = (struct pc_tcp_send){.peer = peer, .nbytes = views->nbytes, .parts = parts, .owner = views};
    for (Py_ssize_t index = 0; index < views->count; index++)
        if (views->views[index].len > 0)
            parts[send->num_parts++] = (struct iovec){views->views[index].buf, (size_t)views->views[index].len};
    int64_t id = may_buffer ? pc_tcp_send(&self->tcp, send, header, (size_t)header_nbytes, may_push)
                            : pc_tcp_offer(&self->tcp, send, header, (size_t)header_nbytes);
    if (id < 0) {
        pc_tcp_free_send(&self->tcp, send);
        return PyErr_NoMemory();
    }
    return PyLong_FromLongLong(id);
}

static PyObject *tcp_send(pc_tcp_object *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "arguments are rank, header, parts, may_push");
        return NULL;
    }
    return start(self, args, true, args[3] == Py_True);
}

static PyObject *tcp_offer(pc_tcp_object *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "arguments are rank, header, parts");
        return NULL;
    }
    return start(self, args, false, false);
}

static PyObject *tcp_stop(pc_tcp_object *self, PyObject *number) {
    unsigned long long id = PyLong_AsUnsignedLongLong(number);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(pc_tcp_stop(&self->tcp, id));
}

static PyObject *tcp_take_back(pc_tcp_object *self, PyObject *number) {
    unsigned long long id = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    pc_tcp_take_back(&self->tcp, id);
    Py_RETURN_NONE;
}

/* --- receiving --------------------------------------------------------------------------------------- */

static PyObject *tcp_accept(pc_tcp_object *self, PyObject *args) {
    int peer;
    unsigned long long id;
    Py_ssize_t nbytes;
    PyObject *into;
    if (!PyArg_ParseTuple(args, "iKnO", &peer, &id, &nbytes, &into) || !is_rank(self, peer))
        return NULL;
    struct pc_views *views = pc_view_into(into, nbytes);
    if (views == NULL)
        return NULL;
    int64_t handle = pc_tcp_accept(&self->tcp, peer, id, views->views[0].buf, (size_t)nbytes, views);
    if (handle <= 0)
        pc_views_release(views);
    return handle < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(handle);
}

static PyObject *tcp_place(pc_tcp_object *self, PyObject *args) {
    unsigned long long handle;
    PyObject *into;
    if (!PyArg_ParseTuple(args, "KO", &handle, &into))
        return NULL;
    struct pc_tcp_receive *receive = pc_table_get(&self->tcp.receives, handle);
    struct pc_views *views = receive != NULL ? pc_view_into(into, (Py_ssize_t)receive->nbytes) : NULL;
    if (PyErr_Occurred())
        return NULL;
    bool is_there = receive != NULL && pc_tcp_place(&self->tcp, handle, views->views[0].buf, views);
    if (is_there)
        pc_views_release(views);
    return PyBool_FromLong(is_there);
}

static PyObject *tcp_redirect(pc_tcp_object *self, PyObject *args) {
    unsigned long long handle;
    PyObject *into;
    if (!PyArg_ParseTuple(args, "KO", &handle, &into))
        return NULL;
    struct pc_tcp_receive *receive = pc_table_get(&self->tcp.receives, handle);
    if (receive == NULL)
        Py_RETURN_FALSE;
    struct pc_views *views = pc_view_into(into, (Py_ssize_t)receive->nbytes);
    if (views == NULL)
        return NULL;
    pc_tcp_redirect(&self->tcp, handle, views->views[0].buf, views);
    Py_RETURN_TRUE;
}

static PyObject *tcp_give_up(pc_tcp_object *self, PyObject *number) {
    unsigned long long handle = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    pc_tcp_give_up(&self->tcp, handle);
    Py_RETURN_NONE;
}

static PyObject *tcp_drop(pc_tcp_object *self, PyObject *args) {
    int peer;
    unsigned long long id;
    if (!PyArg_ParseTuple(args, "iK", &peer, &id) || !is_rank(self, peer))
        return NULL;
    pc_tcp_drop(&self->tcp, peer, id);
    Py_RETURN_NONE;
}

static PyObject *tcp_consumed(pc_tcp_object *self, PyObject *args) {
    int peer;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "in", &peer, &nbytes) || !is_rank(self, peer))
        return NULL;
    pc_tcp_consumed(&self->tcp, peer, (size_t)nbytes);
    Py_RETURN_NONE;
}

/* --- both -------------------------------------------------------------------------------------------- */

static PyObject *tcp_progress(pc_tcp_object *self, PyObject *unused) {
    (void)unused;
    Py_ssize_t waiting = PyObject_Size(self->events);
    self->tcp.told = waiting > 0;
    bool worked = self->tcp.epoll >= 0 && pc_tcp_progress(&self->tcp);
    if (waiting < 0)
        return NULL;
    if (self->failed) {
        self->failed = false;
        return PyErr_NoMemory();
    }
    return PyBool_FromLong(worked);
}

static PyObject *tcp_is_idle(pc_tcp_object *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(pc_tcp_idle(&self->tcp));
}

static PyObject *tcp_is_behind(pc_tcp_object *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(self->tcp.behind > 0);
}

static PyObject *tcp_forget(pc_tcp_object *self, PyObject *number) {
    int peer = rank_of(self, number);
    if (peer < 0)
        return NULL;
    pc_tcp_forget(&self->tcp, peer);
    Py_RETURN_NONE;
}

static PyObject *tcp_lose(pc_tcp_object *self, PyObject *args) {
    int peer;
    const char *why;
    if (!PyArg_ParseTuple(args, "is", &peer, &why) || !is_rank(self, peer))
        return NULL;
    pc_tcp_lose(&self->tcp, peer, why);
    Py_RETURN_NONE;
}

static PyObject *tcp_links(pc_tcp_object *self, PyObject *unused) {
    (void)unused;
    PyObject *links = PyList_New(0);
    for (int rank = 0; links != NULL && rank < self->tcp.size; rank++) {
        if (!self->tcp.peers[rank].used)
            continue;
        PyObject *number = PyLong_FromLong(rank);
        if (number == NULL || PyList_Append(links, number) < 0)
            Py_CLEAR(links);
        Py_XDECREF(number);
    }
    return links;
}

static PyObject *tcp_say_goodbye(pc_tcp_object *self, PyObject *unused) {
    (void)unused;
    pc_tcp_say_goodbye(&self->tcp);
    Py_RETURN_NONE;
}

static PyObject *tcp_flush(pc_tcp_object *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(pc_tcp_flush(&self->tcp));
}

static PyObject *tcp_close(pc_tcp_object *self, PyObject *unused) {
    (void)unused;
    pc_tcp_close(&self->tcp);
    Py_RETURN_NONE;
}

static PyMethodDef tcp_methods[] = {
    {"attach", (PyCFunction)tcp_attach, METH_VARARGS, "attach(rank, lane, fd): take over a connected socket."},
    {"watch", (PyCFunction)tcp_watch, METH_O, "watch(fd): have an event when it is readable."},
    {"fileno", (PyCFunction)tcp_fileno, METH_NOARGS, "A descriptor that is readable when progress has something to do."},
    {"send", (PyCFunction)(void (*)(void))tcp_send, METH_FASTCALL,
     "send(rank, header, parts, may_push) -> int: 0 if it is buffered, else its number."},
    {"offer", (PyCFunction)(void (*)(void))tcp_offer, METH_FASTCALL,
     "offer(rank, header, parts) -> int: its number; it is done when the receiver has accepted it and it is written."},
    {"stop", (PyCFunction)tcp_stop, METH_O, "stop(number) -> bool: a send goes no further; False: it is too late."},
    {"take_back", (PyCFunction)tcp_take_back, METH_O, "take_back(number): give up a send."},
    {"accept", (PyCFunction)tcp_accept, METH_VARARGS,
     "accept(rank, number, nbytes, into) -> int: a handle."},
    {"place", (PyCFunction)tcp_place, METH_VARARGS,
     "place(handle, into) -> bool: what was pushed goes there; True: it is there already."},
    {"redirect", (PyCFunction)tcp_redirect, METH_VARARGS, "redirect(handle, into) -> bool: let a receive go on elsewhere; False: it has ended."},
    {"give_up", (PyCFunction)tcp_give_up, METH_O, "give_up(handle): end a receive, or drop what was pushed."},
    {"drop", (PyCFunction)tcp_drop, METH_VARARGS, "drop(rank, number): nobody wants what was offered."},
    {"consumed", (PyCFunction)tcp_consumed, METH_VARARGS, "consumed(rank, nbytes): a buffered message was used."},
    {"progress", (PyCFunction)tcp_progress, METH_NOARGS, "Do what can be done, and append what has happened to `events`."},
    {"is_idle", (PyCFunction)tcp_is_idle, METH_NOARGS, "Whether only the descriptor tells of more to do."},
    {"is_behind", (PyCFunction)tcp_is_behind, METH_NOARGS, "Whether something waits to be written."},
    {"forget", (PyCFunction)tcp_forget, METH_O, "forget(rank): it has ended; its transfers are gone."},
    {"lose", (PyCFunction)tcp_lose, METH_VARARGS, "lose(rank, why): there is no link to it."},
    {"links", (PyCFunction)tcp_links, METH_NOARGS, "The ranks to which something was sent."},
    {"say_goodbye", (PyCFunction)tcp_say_goodbye, METH_NOARGS, "Tell all links that nothing more will come."},
    {"flush", (PyCFunction)tcp_flush, METH_NOARGS, "Write what waits; True: the peers' kernels have it all."},
    {"close", (PyCFunction)tcp_close, METH_NOARGS, "Close every connection."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tcp_slots[] = {
    {Py_tp_new, tcp_new},
    {Py_tp_dealloc, tcp_dealloc},
    {Py_tp_methods, tcp_methods},
    {Py_tp_doc, "The messages between this rank and others, over TCP."},
    {0, NULL},
};

PyType_Spec pc_tcp_spec = {
    .name = "pycoll.transports._core.Tcp",
    .basicsize = sizeof(pc_tcp_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = tcp_slots,
};
