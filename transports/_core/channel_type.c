/* Channels as Python sees them: `_core.Channel`. */
#include "channel.h"

#include "host_type.h"

#include <stdlib.h>

static int check_rank(pc_channel *channel, int rank) {
    if (rank >= 0 && rank < channel->size && rank != channel->rank)
        return 0;
    PyErr_SetString(PyExc_ValueError, "there is no such other rank on this host");
    return -1;
}

static PyObject *channel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"host", "eager_limit", "credit", "message_cost", "single_copy", NULL};
    PyObject *host;
    Py_ssize_t eager_limit, credit, message_cost;
    int single_copy;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onnnp", names, &host, &eager_limit, &credit, &message_cost,
                                     &single_copy))
        return NULL;
    pc_host *memory = pc_host_of(host);
    if (memory == NULL)
        return NULL;
    pc_channel *channel = (pc_channel *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (channel == NULL)
        return NULL;
    channel->host = memory;
    channel->host_object = Py_NewRef(host);
    channel->eager_limit = (size_t)eager_limit;
    channel->credit = (uint64_t)credit;
    channel->message_cost = (uint64_t)message_cost;
    channel->single_copy = single_copy != 0;
    if (pc_channel_open(channel) < 0) {
        Py_DECREF(channel);
        return NULL;
    }
    return (PyObject *)channel;
}

static void channel_dealloc(pc_channel *channel) {
    PyTypeObject *type = Py_TYPE((PyObject *)channel);
    pc_channel_free(channel);
    Py_XDECREF(channel->host_object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(channel);
    Py_DECREF(type);
}

/* The heaps of all ranks, to look at the payloads there. */
static int channel_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    pc_host *host = ((pc_channel *)self)->host;
    return PyBuffer_FillInfo(view, self, host->base + host->heaps_offset,
                             (Py_ssize_t)((size_t)host->size * host->heap_nbytes), 1, flags);
}

/* --- sending ----------------------------------------------------------------------------------------- */

/* Get hold of the parts of a payload that are not empty. NULL with an exception. */
static struct pc_send *send_of(PyObject *parts) {
    Py_ssize_t count = PySequence_Size(parts);
    struct pc_send *send = count >= 0 ? calloc(1, sizeof *send) : NULL;
    if (send == NULL)
        return PyErr_Occurred() ? NULL : (struct pc_send *)PyErr_NoMemory();
    struct iovec *table = &send->one;
    if (count > 1)
        table = send->table = malloc((size_t)count * sizeof *table);
    send->views = malloc((size_t)(count > 0 ? count : 1) * sizeof *send->views);
    if (table == NULL || send->views == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    send->parts.parts = table;
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_buffer *view = &send->views[send->num_views];
        PyObject *part = PySequence_GetItem(parts, index);
        if (part == NULL)
            goto failed;
        int status = PyObject_GetBuffer(part, view, PyBUF_SIMPLE);
        Py_DECREF(part);
        if (status < 0)
            goto failed;
        send->num_views++;
        if (view->len > 0)
            table[send->parts.num_parts++] = (struct iovec){view->buf, (size_t)view->len};
        send->nbytes += (size_t)view->len;
    }
    return send;
failed:
    pc_send_free(send);
    return NULL;
}

static PyObject *start_send(pc_channel *channel, PyObject *const *args, Py_ssize_t count, bool may_post) {
    pc_channel_enter(channel);
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "arguments are rank, header, parts");
        return NULL;
    }
    int rank = (int)PyLong_AsLong(args[0]);
    if ((rank == -1 && PyErr_Occurred()) || check_rank(channel, rank) < 0)
        return NULL;
    char *header;
    Py_ssize_t header_nbytes;
    if (PyBytes_AsStringAndSize(args[1], &header, &header_nbytes) < 0)
        return NULL;
    if (header_nbytes > (Py_ssize_t)PC_LONGEST_HEADER) {
        PyErr_SetString(PyExc_ValueError, "the header of a message is too long");
        return NULL;
    }
    struct pc_send *send = send_of(args[2]);
    if (send == NULL)
        return NULL;
    if (may_post && pc_channel_post(channel, rank, header, (size_t)header_nbytes, send->parts, send->nbytes)) {
        pc_send_free(send);
        return PyLong_FromLong(0);
    }
    send->peer = rank;
    uint64_t id = pc_channel_offer(channel, send, header, (size_t)header_nbytes);
    return id != 0 ? PyLong_FromUnsignedLongLong(id) : NULL;
}

static PyObject *channel_send(pc_channel *channel, PyObject *const *args, Py_ssize_t count) {
    return start_send(channel, args, count, true);
}

static PyObject *channel_offer(pc_channel *channel, PyObject *const *args, Py_ssize_t count) {
    return start_send(channel, args, count, false);
}

static struct pc_send *find_send(pc_channel *channel, PyObject *number) {
    unsigned long long id = PyLong_AsUnsignedLongLong(number);
    return PyErr_Occurred() ? NULL : pc_table_get(&channel->sends, id);
}

static PyObject *channel_stop(pc_channel *channel, PyObject *id) {
    pc_channel_enter(channel);
    struct pc_send *send = find_send(channel, id);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(send != NULL && pc_send_stop(channel, send));
}

static PyObject *channel_holds(pc_channel *channel, PyObject *id) {
    pc_channel_enter(channel);
    struct pc_send *send = find_send(channel, id);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(send != NULL);
}

static PyObject *channel_take_back(pc_channel *channel, PyObject *id) {
    pc_channel_enter(channel);
    struct pc_send *send = find_send(channel, id);
    if (PyErr_Occurred())
        return NULL;
    if (send != NULL)
        pc_send_give_up(channel, send);
    Py_RETURN_NONE;
}

/* --- receiving --------------------------------------------------------------------------------------- */

static PyObject *channel_accept(pc_channel *channel, PyObject *args) {
    pc_channel_enter(channel);
    int rank;
    Py_ssize_t nbytes;
    unsigned long long id, address;
    unsigned num_parts;
    int transfer;
    PyObject *into;
    if (!PyArg_ParseTuple(args, "inKKIiO", &rank, &nbytes, &id, &address, &num_parts, &transfer, &into) ||
        check_rank(channel, rank) < 0)
        return NULL;
    struct pc_receive *receive = calloc(1, sizeof *receive);
    if (receive == NULL)
        return PyErr_NoMemory();
    if (PyObject_GetBuffer(into, &receive->view, PyBUF_WRITABLE) < 0) {
        free(receive);
        return NULL;
    }
    if (receive->view.len < nbytes) {
        PyErr_SetString(PyExc_ValueError, "there is not enough room for the payload");
        goto failed;
    }
    receive->peer = rank;
    receive->into = receive->view.buf;
    receive->handle = pc_channel_add_receive(channel, receive);
    if (receive->handle == 0) {
        PyErr_NoMemory();
        goto failed;
    }
    struct pc_offer offer = {id, (uint64_t)nbytes, address, num_parts, transfer};
    int status = pc_channel_accept(channel, receive, &offer);
    if (status > 0)
        return PyLong_FromUnsignedLongLong(receive->handle);
    pc_receive_end(channel, receive);
    return status == -3 ? NULL : PyLong_FromLong(status);
failed:
    PyBuffer_Release(&receive->view);
    free(receive);
    return NULL;
}

static struct pc_receive *find_receive(pc_channel *channel, PyObject *number) {
    unsigned long long handle = PyLong_AsUnsignedLongLong(number);
    return PyErr_Occurred() ? NULL : pc_table_get(&channel->receives, handle);
}

static PyObject *channel_give_up(pc_channel *channel, PyObject *handle) {
    pc_channel_enter(channel);
    struct pc_receive *receive = find_receive(channel, handle);
    if (PyErr_Occurred())
        return NULL;
    if (receive != NULL)
        pc_receive_give_up(channel, receive);
    Py_RETURN_NONE;
}

static PyObject *channel_redirect(pc_channel *channel, PyObject *args) {
    pc_channel_enter(channel);
    PyObject *handle, *into;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "OO", &handle, &into) || PyObject_GetBuffer(into, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    struct pc_receive *receive = find_receive(channel, handle);
    int status = 0;
    if (receive == NULL || (size_t)view.len < receive->nbytes) {
        PyBuffer_Release(&view);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "there is no such receive, or not enough room for it");
        return NULL;
    }
    status = pc_receive_redirect(channel, receive, view.buf);
    Py_buffer old = receive->view;
    receive->view = view;
    PyBuffer_Release(&old);
    if (status < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *channel_drop(pc_channel *channel, PyObject *args) {
    pc_channel_enter(channel);
    int rank;
    unsigned long long id;
    if (!PyArg_ParseTuple(args, "iK", &rank, &id) || check_rank(channel, rank) < 0 ||
        pc_channel_tell(channel, rank, PC_FINISHED, id) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *channel_use(pc_channel *channel, PyObject *args) {
    pc_channel_enter(channel);
    int rank;
    Py_ssize_t nbytes;
    struct pc_block block = {0};
    unsigned long long number = 0;
    if (!PyArg_ParseTuple(args, "in|IK", &rank, &nbytes, &block.unit, &number) || check_rank(channel, rank) < 0)
        return NULL;
    block.number = number;
    if (number != 0 && pc_block_valid(&block, 0))
        pc_block_give_back(channel->peers[rank].heap, &block);
    pc_channel_use(channel, rank, (size_t)nbytes);
    Py_RETURN_NONE;
}

/* --- both -------------------------------------------------------------------------------------------- */

static PyObject *channel_progress(pc_channel *channel, PyObject *unused) {
    (void)unused;
    pc_channel_enter(channel);
    PyObject *events = NULL;
    if (pc_channel_progress(channel, &events) < 0) {
        Py_XDECREF(events);
        return NULL;
    }
    if (events == NULL)
        Py_RETURN_NONE;
    return events;
}

static PyObject *channel_ready(pc_channel *channel, PyObject *unused) {
    (void)unused;
    pc_channel_enter(channel);
    return PyBool_FromLong(pc_channel_ready(channel));
}

static PyObject *channel_flush(pc_channel *channel, PyObject *unused) {
    (void)unused;
    pc_channel_enter(channel);
    return PyBool_FromLong(pc_channel_flush(channel));
}

static PyObject *channel_forget(pc_channel *channel, PyObject *number) {
    pc_channel_enter(channel);
    int rank = (int)PyLong_AsLong(number);
    if ((rank == -1 && PyErr_Occurred()) || check_rank(channel, rank) < 0)
        return NULL;
    pc_channel_forget(channel, rank);
    Py_RETURN_NONE;
}

static PyObject *channel_links(pc_channel *channel, PyObject *unused) {
    (void)unused;
    PyObject *links = PyList_New(0);
    for (int rank = 0; links != NULL && rank < channel->size; rank++) {
        if (!channel->peers[rank].linked && channel->peers[rank].first == NULL)
            continue;
        PyObject *number = PyLong_FromLong(rank);
        if (number == NULL || PyList_Append(links, number) < 0)
            Py_CLEAR(links);
        Py_XDECREF(number);
    }
    return links;
}

static PyObject *channel_say_goodbye(pc_channel *channel, PyObject *unused) {
    (void)unused;
    pc_channel_enter(channel);
    for (int rank = 0; rank < channel->size; rank++)
        if ((channel->peers[rank].linked || channel->peers[rank].first != NULL) &&
            pc_channel_tell(channel, rank, PC_BYE, 0) < 0)
            return NULL;
    Py_RETURN_NONE;
}

static PyObject *channel_close(pc_channel *channel, PyObject *unused) {
    (void)unused;
    pc_channel_enter(channel);
    pc_channel_close(channel);
    Py_RETURN_NONE;
}

static PyMethodDef channel_methods[] = {
    {"send", (PyCFunction)(void (*)(void))channel_send, METH_FASTCALL,
     "send(rank, header, parts) -> int: 0 if the message was posted, else the id of an offer."},
    {"offer", (PyCFunction)(void (*)(void))channel_offer, METH_FASTCALL,
     "offer(rank, header, parts) -> int: its id; it is done when the receiver has it, however short it is."},
    {"stop", (PyCFunction)channel_stop, METH_O, "stop(id) -> bool: an offer goes no further; False: it is too late."},
    {"holds", (PyCFunction)channel_holds, METH_O, "holds(id) -> bool: an offer is under way."},
    {"take_back", (PyCFunction)channel_take_back, METH_O, "take_back(id): give up an offer."},
    {"accept", (PyCFunction)channel_accept, METH_VARARGS,
     "accept(rank, nbytes, id, address, num_parts, transfer, into) -> int: a handle; 0: done; -1: the message was "
     "taken back; -2: its sender has left."},
    {"give_up", (PyCFunction)channel_give_up, METH_O, "give_up(handle): end a receive."},
    {"redirect", (PyCFunction)channel_redirect, METH_VARARGS, "redirect(handle, into): let a receive go on elsewhere."},
    {"drop", (PyCFunction)channel_drop, METH_VARARGS, "drop(rank, id): nobody wants this offer."},
    {"use", (PyCFunction)channel_use, METH_VARARGS,
     "use(rank, nbytes, unit=0, number=0): a payload was used, and its block is free."},
    {"progress", (PyCFunction)channel_progress, METH_NOARGS, "Do what can be done; a list of events, None: nothing."},
    {"ready", (PyCFunction)channel_ready, METH_NOARGS, "Whether progress would find something."},
    {"flush", (PyCFunction)channel_flush, METH_NOARGS, "Send what waits for room; True: some of it still waits."},
    {"forget", (PyCFunction)channel_forget, METH_O, "forget(rank): it has ended; its transfers are gone."},
    {"links", (PyCFunction)channel_links, METH_NOARGS, "The ranks to which something was sent."},
    {"say_goodbye", (PyCFunction)channel_say_goodbye, METH_NOARGS, "Tell all links that nothing more will come."},
    {"close", (PyCFunction)channel_close, METH_NOARGS, "End all transfers."},
    {NULL, NULL, 0, NULL},
};

bool pc_is_channel(PyObject *object) {
    return PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == (void *)channel_dealloc;
}

static PyType_Slot channel_slots[] = {
    {Py_tp_new, channel_new},
    {Py_tp_dealloc, channel_dealloc},
    {Py_tp_methods, channel_methods},
    {Py_bf_getbuffer, channel_getbuffer},
    {Py_tp_doc, "The messages between this rank and the others of its host."},
    {0, NULL},
};

PyType_Spec pc_channel_spec = {
    .name = "pycoll.transports._core.Channel",
    .basicsize = sizeof(pc_channel),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = channel_slots,
};
