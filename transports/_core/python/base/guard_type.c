/* Guard(owner): holds the owner's lock in a `with` statement, and lets go of it whatever happens.
   Python lets a signal handler raise when a Python function begins, also when an `__exit__` does;
   not so here. So what ends a guard is called twice: `leave`, which one signal may keep from doing
   its work, and then `undo`. */
#include "py.h"

typedef struct {
    PyObject_HEAD
    PyObject *owner;
    PyObject *inside; /* a bool: whether the thread was in there before; or NULL */
} pc_guard;

static PyObject *is_inside_name, *enter_name, *leave_name, *undo_name;

void pc_guard_init(void) {
    is_inside_name = PyUnicode_InternFromString("is_inside");
    enter_name = PyUnicode_InternFromString("enter");
    leave_name = PyUnicode_InternFromString("leave");
    undo_name = PyUnicode_InternFromString("undo");
}

static PyObject *guard_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *owner;
    if (!PyArg_ParseTuple(args, "O", &owner))
        return NULL;
    pc_guard *guard = pc_new(type);
    if (guard != NULL)
        guard->owner = Py_NewRef(owner);
    return (PyObject *)guard;
}

static void guard_dealloc(pc_guard *guard) {
    Py_XDECREF(guard->owner);
    Py_XDECREF(guard->inside);
    pc_free(guard);
}

/* `done` is what a call has returned; NULL: it has raised. What `undo` raises takes the place of
   that. */
static PyObject *undo(pc_guard *guard, PyObject *done) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *undone = PyObject_CallMethodObjArgs(guard->owner, undo_name, guard->inside, NULL);
    if (undone != NULL) {
        PyErr_Restore(type, error, trace);
        Py_DECREF(undone);
        return done;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return NULL;
}

static PyObject *guard_enter(pc_guard *guard, PyObject *Py_UNUSED(unused)) {
    Py_XDECREF(guard->inside);
    guard->inside = PyObject_CallMethodObjArgs(guard->owner, is_inside_name, NULL);
    if (guard->inside == NULL)
        return NULL;
    PyObject *done = PyObject_CallMethodObjArgs(guard->owner, enter_name, guard->inside, NULL);
    return done != NULL ? done : undo(guard, NULL);
}

static PyObject *guard_exit(pc_guard *guard, PyObject *Py_UNUSED(args)) {
    return undo(guard, PyObject_CallMethodObjArgs(guard->owner, leave_name, NULL));
}

static PyMethodDef guard_methods[] = {
    {"__enter__", (PyCFunction)guard_enter, METH_NOARGS,
     "Call owner.is_inside() and owner.enter()."},
    {"__exit__", (PyCFunction)guard_exit, METH_VARARGS, "Call owner.leave() and owner.undo()."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot guard_slots[] = {
    {Py_tp_doc, "Holds the lock of an engine in a `with` statement."},
    {Py_tp_new, guard_new},
    {Py_tp_dealloc, guard_dealloc},
    {Py_tp_methods, guard_methods},
    {0, NULL},
};

PyType_Spec pc_guard_spec = {
    .name = "pycoll._transports._core.Guard",
    .basicsize = sizeof(pc_guard),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = guard_slots,
};
