/* `_core.Persistent`: a call that is started again and again. Each start is a request of its
   own. */
#include "messages.h"

typedef struct {
    PyObject_HEAD
    PyObject *begin, *args, *keywords; /* what starts the call, which returns its request */
    PyObject *last;                    /* the last one; NULL: none was started */
} pc_persistent;

/* Of what the core has not begun Python knows that. */
static bool is_done_in_core(PyObject *request) {
    return pc_is_started(request) &&
           ((struct pc_started *)request)->ops->is_done((struct pc_started *)request);
}

static PyObject *persistent_bind(pc_persistent *self, PyObject *args) {
    PyObject *begin, *given, *keywords;
    if (!PyArg_ParseTuple(args, "OO!O!", &begin, &PyTuple_Type, &given, &PyDict_Type, &keywords))
        return NULL;
    if (self->begin != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "it is bound");
        return NULL;
    }
    self->begin = Py_NewRef(begin);
    self->args = Py_NewRef(given);
    self->keywords = Py_NewRef(keywords);
    Py_RETURN_NONE;
}

static PyObject *persistent_start(pc_persistent *self, PyObject *Py_UNUSED(unused)) {
    if (self->begin == NULL || (self->last != NULL && !is_done_in_core(self->last)))
        return PyObject_CallMethod((PyObject *)self, "_start", NULL);
    PyObject *made = PyObject_Call(self->begin, self->args, self->keywords), *before = self->last;
    if (made == NULL)
        return NULL;
    self->last = made;
    Py_XDECREF(before);
    return Py_NewRef((PyObject *)self);
}

static PyObject *persistent_wait(pc_persistent *self, PyObject *const *args, Py_ssize_t count,
                                 PyObject *keywords) {
    PyObject *last = Py_XNewRef(self->last);
    PyObject *result =
        last != NULL && pc_is_started(last)
            ? pc_started_wait_method((struct pc_started *)last, args, count, keywords)
            : pc_wait_in_python((PyObject *)self, args, count, keywords);
    Py_XDECREF(last);
    return result;
}

static PyObject *persistent_last(pc_persistent *self, void *Py_UNUSED(unused)) {
    return Py_NewRef(self->last != NULL ? self->last : Py_None);
}

static int persistent_set_last(pc_persistent *self, PyObject *last, void *Py_UNUSED(unused)) {
    PyObject *before = self->last;
    self->last = Py_XNewRef(last);
    Py_XDECREF(before);
    return 0;
}

PyObject *pc_persistent_last(PyObject *object) {
    return PyObject_TypeCheck(object, pc_persistent_type) ? ((pc_persistent *)object)->last : NULL;
}

static int persistent_traverse(pc_persistent *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->begin);
    Py_VISIT(self->args);
    Py_VISIT(self->keywords);
    Py_VISIT(self->last);
    return 0;
}

static int persistent_clear(pc_persistent *self) {
    Py_CLEAR(self->begin);
    Py_CLEAR(self->args);
    Py_CLEAR(self->keywords);
    Py_CLEAR(self->last);
    return 0;
}

static void persistent_dealloc(pc_persistent *self) {
    PyObject_GC_UnTrack(self);
    persistent_clear(self);
    pc_free(self);
}

static PyMethodDef persistent_methods[] = {
    {"_bind", (PyCFunction)persistent_bind, METH_VARARGS,
     "_bind(begin, args, keywords): what starts the call."},
    {"start", (PyCFunction)persistent_start, METH_NOARGS,
     "start($self, /)\n--\n\nStart the call (once more); returns this request.\n\nRaises:\n    "
     "Error: it is still under way."},
    {"wait", (PyCFunction)(void (*)(void))persistent_wait, METH_FASTCALL | METH_KEYWORDS,
     "wait($self, timeout=None)\n--\n\nReturn the result, when the call is done. See "
     "pycoll.Request.wait."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef persistent_values[] = {
    {"_in_core", (getter)persistent_last, (setter)persistent_set_last,
     "The request of the last start; or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot persistent_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, persistent_dealloc},
    {Py_tp_traverse, persistent_traverse},
    {Py_tp_clear, persistent_clear},
    {Py_tp_methods, persistent_methods},
    {Py_tp_getset, persistent_values},
    {Py_tp_doc, "A call that is started again and again."},
    {0, NULL},
};

PyType_Spec pc_persistent_spec = {
    .name = "pycoll._transports._core.Persistent",
    .basicsize = sizeof(pc_persistent),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = persistent_slots,
};
