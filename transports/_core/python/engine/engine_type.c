/* `_core.MessageEngine`: its lock, driving, and the type. What it tells Python is in
   engine_events.c, its ranks in engine_links.c, its begin and end in engine_life.c. See
   engine_type.h. */
#include "engine_type.h"

#include <structmember.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* --- the lock --------------------------------------------------------------------------------- */

/* What was written may not have left: then somebody must drive, though nothing else is pending. */
static void settle(pc_engine_object *self) {
    bool is_behind = self->lags || (self->has_tcp && self->tcp.tcp.behind > 0);
    if (is_behind == self->is_behind)
        return;
    self->is_behind = is_behind;
    pc_drive_pending(&self->drive, is_behind ? 1 : -1);
}

bool pc_engine_take(pc_engine_object *self, struct pc_turn *turn) {
    turn->is_taken = false;
    if (!self->is_open ||
        atomic_load_explicit(&self->drive.closed, memory_order_acquire) != PC_DRIVE_OPEN)
        return false;
    turn->state = NULL;
    if (PC_UNLIKELY(!pc_lock_try(&self->drive.lock))) {
        turn->state = PyEval_SaveThread();
        pc_lock_take(&self->drive.lock);
    }
    if (PC_UNLIKELY(atomic_load_explicit(&self->drive.closed, memory_order_relaxed) !=
                    PC_DRIVE_OPEN)) {
        pc_lock_give(&self->drive.lock);
        if (turn->state != NULL)
            PyEval_RestoreThread(turn->state);
        return false;
    }
    turn->orders = self->queue.num_posted;
    self->is_called = true;
    return turn->is_taken = true;
}

void pc_engine_give(pc_engine_object *self, const struct pc_turn *turn) {
    if (PC_UNLIKELY(!turn->is_taken))
        return;
    self->is_called = false;
    settle(self);
    bool has_orders = self->queue.num_posted != turn->orders;
    pc_lock_give(&self->drive.lock);
    if (PC_UNLIKELY(turn->state != NULL))
        PyEval_RestoreThread(turn->state);
    /* Here, and not when somebody comes to it: what was given up may be used otherwise from now
       on. */
    if (PC_UNLIKELY(has_orders))
        pc_link_do_orders(self);
}

PyObject *pc_engine_is_closed(void) {
    PyErr_SetString(PyExc_RuntimeError, "the message engine is closed");
    return NULL;
}

/* --- driving ---------------------------------------------------------------------------------- */

bool pc_engine_look(pc_engine_object *self) {
    struct pc_turn turn;
    bool worked = false;
    if (pc_engine_take(self, &turn)) {
        for (uint32_t index = 0; index < self->drive.num_sources; index++)
            worked |= self->drive.sources[index]->ops->progress(self->drive.sources[index]);
        pc_engine_give(self, &turn);
    }
    pc_engine_let_go(self);
    return worked;
}

static PyObject *engine_progress(pc_engine_object *self, PyObject *Py_UNUSED(unused)) {
    return PyBool_FromLong(pc_engine_look(self) || pc_engine_has(self->first));
}

int pc_engine_hear(pc_engine_object *self) {
    if (PC_LIKELY(!pc_engine_has(self->first)) || self->on_work == NULL)
        return 0;
    PyObject *heard = PyObject_CallNoArgs(self->on_work);
    Py_XDECREF(heard);
    return heard != NULL ? 0 : -1;
}

static PyObject *engine_pending(pc_engine_object *self, PyObject *number) {
    int delta = (int)PyLong_AsLong(number);
    if (PyErr_Occurred())
        return NULL;
    struct pc_turn turn;
    if (pc_engine_take(self, &turn)) {
        pc_drive_pending(&self->drive, delta);
        pc_engine_give(self, &turn);
    }
    Py_RETURN_NONE;
}

static PyObject *engine_post_work(pc_engine_object *self, PyObject *Py_UNUSED(unused)) {
    struct pc_turn turn;
    if (pc_engine_take(self, &turn)) {
        pc_drive_post_work(&self->drive);
        pc_engine_give(self, &turn);
    }
    Py_RETURN_NONE;
}

static PyObject *engine_watch(pc_engine_object *self, PyObject *number) {
    int fd = (int)PyLong_AsLong(number);
    if (PyErr_Occurred())
        return NULL;
    struct pc_turn turn;
    if (pc_engine_take(self, &turn)) {
        int error = pc_drive_watch(&self->drive, fd);
        pc_engine_give(self, &turn);
        if (error != 0)
            return pc_raise_errno(error);
    }
    Py_RETURN_NONE;
}

static PyObject *engine_watch_again(pc_engine_object *self, PyObject *Py_UNUSED(unused)) {
    struct pc_turn turn;
    if (pc_engine_take(self, &turn)) {
        pc_drive_watch_again(&self->drive);
        pc_engine_give(self, &turn);
    }
    Py_RETURN_NONE;
}

/* --- the type --------------------------------------------------------------------------------- */

static PyObject *engine_rings(pc_engine_object *self, void *Py_UNUSED(unused)) {
    return PyLong_FromUnsignedLongLong(atomic_load_explicit(&self->rings, memory_order_relaxed));
}

/* On Linux a pthread_t is a number, the one by which Python knows a thread, too. */
static PyObject *engine_thread(pc_engine_object *self, void *Py_UNUSED(unused)) {
    return PyLong_FromUnsignedLong(self->drive.started ? (unsigned long)self->drive.thread : 0);
}

static PyObject *engine_is_receiving(pc_engine_object *self, void *Py_UNUSED(unused)) {
    struct pc_turn turn;
    bool receiving = !pc_engine_take(self, &turn);
    for (struct pc_context *each = self->engine.contexts; each != NULL && !receiving;
         each = each->next)
        for (struct pc_message *message = each->taken.first; message != NULL;
             message = message->next)
            receiving |= message->state == PC_MESSAGE_READING;
    pc_engine_give(self, &turn);
    return PyBool_FromLong(receiving);
}

static PyObject *engine_has_work(pc_engine_object *self, void *Py_UNUSED(unused)) {
    return PyBool_FromLong(atomic_load_explicit(&self->drive.work, memory_order_relaxed) != 0 ||
                           pc_engine_has(self->first));
}

static PyObject *engine_has_fired(pc_engine_object *self, void *Py_UNUSED(unused)) {
    return PyBool_FromLong(atomic_load_explicit(&self->drive.fired, memory_order_relaxed) != 0);
}

static PyObject *engine_python_busy(pc_engine_object *self, void *Py_UNUSED(unused)) {
    return PyBool_FromLong(self->python_busy);
}

static void set_busy(pc_engine_object *self, bool whether) {
    self->python_busy = whether;
    if (self->host != NULL)
        self->shm.channel.host->python_busy = self->python_busy;
}

static int set_python_busy(pc_engine_object *self, PyObject *value, void *Py_UNUSED(unused)) {
    set_busy(self, value == Py_True || PyList_Size(self->dropped) > 0);
    return 0;
}

/* drop(what): called as a finalizer, at any moment and in any thread. So it takes no lock, and runs
   no Python. */
static PyObject *engine_drop(pc_engine_object *self, PyObject *what) {
    if (atomic_load(&self->drive.closed) != PC_DRIVE_OPEN)
        Py_RETURN_NONE;
    if (PyList_Append(self->dropped, what) < 0)
        return NULL;
    set_busy(self, true);
    Py_RETURN_NONE;
}

/* count_in(fd, offset, notes): what it does is counted there (tally.h), and what it calls is noted
   (noted.h). */
static PyObject *engine_count_in(pc_engine_object *self, PyObject *args) {
    int fd;
    Py_ssize_t offset, notes;
    struct stat file;
    if (!PyArg_ParseTuple(args, "inn", &fd, &offset, &notes))
        return NULL;
    size_t nbytes = (size_t)notes + PC_NOTES_NBYTES;
    if (offset < 0 || offset % 8 != 0 || notes < offset || notes % 8 != 0 ||
        self->counted != NULL || fstat(fd, &file) < 0 || (size_t)file.st_size < nbytes) {
        PyErr_SetString(PyExc_ValueError, "that is no place to count in, or there is one");
        return NULL;
    }
    unsigned char *base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    self->counted = base;
    self->counted_nbytes = nbytes;
    struct pc_turn turn;
    if (pc_engine_take(self, &turn)) {
        self->engine.tally = self->drive.tally = (struct pc_tally *)(base + offset);
        self->engine.notes = (struct pc_notes *)(base + notes);
        pc_engine_give(self, &turn);
    }
    Py_RETURN_NONE;
}

/* note_name(ident, name) */
static PyObject *engine_note_name(pc_engine_object *self, PyObject *args) {
    unsigned long long ident;
    const char *name;
    Py_ssize_t nbytes;
    struct pc_turn turn;
    if (!PyArg_ParseTuple(args, "Ks#", &ident, &name, &nbytes))
        return NULL;
    if (pc_engine_take(self, &turn)) {
        struct pc_notes *notes = self->engine.notes;
        if (notes != NULL) {
            struct pc_noted_name *noted = &notes->names[notes->num_names++ % PC_NOTED_NAMES];
            bool fits = (size_t)nbytes < sizeof noted->text;
            noted->ident = ident;
            noted->nbytes = fits ? (uint32_t)nbytes : sizeof noted->text;
            memcpy(noted->text, name, noted->nbytes);
        }
        pc_engine_give(self, &turn);
    }
    Py_RETURN_NONE;
}

static PyGetSetDef engine_values[] = {
    {"python_busy", (getter)engine_python_busy, (setter)set_python_busy,
     "Whether a thread holds the lock of the engine in Python: then all calls go through Python.",
     NULL},
    {"rings", (getter)engine_rings, NULL, "How often the doorbell has rung.", NULL},
    {"thread", (getter)engine_thread, NULL, "The core's own thread: its `threading.get_ident()`.",
     NULL},
    {"is_receiving", (getter)engine_is_receiving, NULL,
     "Whether an accepted message is on its way.", NULL},
    {"has_fired", (getter)engine_has_fired, NULL,
     "Whether what is watched was readable, and is not watched anew yet.", NULL},
    {"has_work", (getter)engine_has_work, NULL, "Whether there is something for Python to do.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef engine_members[] = {
    {"dropped", T_OBJECT_EX, offsetof(pc_engine_object, dropped), READONLY,
     "the list to which `drop` appends; until it is empty nothing is done without Python's engine"},
    {"looked", T_ULONGLONG, offsetof(pc_engine_object, looked), READONLY,
     "how often a wait for any of several has looked at one; for tests"},
    {"is_behind", T_BOOL, offsetof(pc_engine_object, is_behind), READONLY,
     "whether something waits to be written"},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef engine_methods[] = {
    {"send", (PyCFunction)(void (*)(void))pc_item_send, METH_FASTCALL,
     "send(rank, header, parts, way) -> None | int | Send: None: it is done; a status: it has "
     "failed. Ways: 0 buffers, 1 may push, 2 offers."},
    {"progress", (PyCFunction)engine_progress, METH_NOARGS,
     "Do what can be done without waiting; whether that was something, or there are events."},
    {"events", (PyCFunction)pc_engine_events_py, METH_NOARGS,
     "Return what has happened since the last call, and forget it."},
    {"drop", (PyCFunction)engine_drop, METH_O,
     "drop(what): append it to `dropped`. May be called at any moment; of a closed engine it is "
     "forgotten."},
    {"pending", (PyCFunction)engine_pending, METH_O,
     "pending(delta): so many more things are to be driven for."},
    {"post_work", (PyCFunction)engine_post_work, METH_NOARGS,
     "There is something for Python to do: have somebody come."},
    {"count_in", (PyCFunction)engine_count_in, METH_VARARGS,
     "count_in(fd, offset, notes): count what is done, and note calls, in this file."},
    {"note_name", (PyCFunction)engine_note_name, METH_VARARGS,
     "note_name(ident, name): note what a communicator is called."},
    {"watch", (PyCFunction)engine_watch, METH_O,
     "watch(fd): have waits end when it is readable, once."},
    {"watch_again", (PyCFunction)engine_watch_again, METH_NOARGS,
     "Have waits end again when what is watched is readable."},
    {"attach", (PyCFunction)pc_engine_attach_py, METH_VARARGS,
     "attach(rank, lane, fd): take over a connected socket."},
    {"lose", (PyCFunction)pc_engine_lose_py, METH_VARARGS,
     "lose(rank, why): there is no link to it."},
    {"forget", (PyCFunction)pc_engine_forget_py, METH_O,
     "forget(rank): it has ended; what waits for it ends with 1 + rank."},
    {"next_order", (PyCFunction)pc_link_next_order, METH_NOARGS,
     "next_order() -> tuple | None: what a transport of Python's is to do next; the last order was "
     "done."},
    {"tell_arrived", (PyCFunction)pc_link_tell_arrived, METH_VARARGS,
     "tell_arrived(rank, header, payload, nbytes, waits) -> int: the message's number; 0: it is to "
     "be released now; -1: there is no room, tell it later; -2: it makes no sense."},
    {"tell_over", (PyCFunction)pc_link_tell, METH_VARARGS,
     "tell_over(number, what, status=0): 0: received, 1: withdrawn, 2: sent, or failed with a "
     "status that is not 0, 3: it is too late to stop it."},
    {"tell_end", (PyCFunction)pc_link_tell_end, METH_VARARGS,
     "tell_end(rank, why): it is lost; None: it has finished."},
    {"tell_lag", (PyCFunction)pc_link_tell_lag, METH_O,
     "tell_lag(whether): a transport has something to write."},
    {"links", (PyCFunction)pc_engine_links_py, METH_NOARGS,
     "The ranks to which something was sent."},
    {"say_goodbye", (PyCFunction)pc_engine_say_goodbye_py, METH_NOARGS,
     "Tell all links that nothing more will come."},
    {"flush", (PyCFunction)pc_engine_flush_py, METH_NOARGS,
     "Deliver what is buffered; whether all of it is."},
    {"close", (PyCFunction)pc_engine_close_py, METH_NOARGS,
     "Have everybody who waits return, and close every link."},
    {"forked", (PyCFunction)pc_engine_forked_py, METH_NOARGS,
     "In the child of a fork: nothing works any more."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, pc_engine_new_py},
    {Py_tp_dealloc, pc_engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_getset, engine_values},
    {Py_tp_members, engine_members},
    {Py_tp_doc, "The messages of one rank: matching, links, driving; see engine/engine.h."},
    {0, NULL},
};

PyType_Spec pc_engine_spec = {
    .name = "pycoll._transports._core.MessageEngine",
    .basicsize = sizeof(pc_engine_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};
