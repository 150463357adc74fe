/* `_core.Scratch`: scratch memory of the engine's as an object that keeps it. See engine/scratch.h.

   A transport that has registered the memory, or still sends from it, refers to the object. So
   memory that has one is freed with it, and not by the engine. */
#include "engine_type.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *weak_references;
    void *start;
    Py_ssize_t nbytes;
} pc_scratch_object;

static void scratch_dealloc(pc_scratch_object *self) {
    /* whoever has registered the memory takes that back */
    PyObject_ClearWeakRefs((PyObject *)self);
    pc_scratch_discard(self->start);
    pc_free(self);
}

static PyObject *scratch_address(pc_scratch_object *self, void *Py_UNUSED(unused)) {
    return PyLong_FromVoidPtr(self->start);
}

static PyMemberDef scratch_members[] = {
    {"nbytes", T_PYSSIZET, offsetof(pc_scratch_object, nbytes), READONLY, "its length"},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(pc_scratch_object, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef scratch_getset[] = {
    {"address", (getter)scratch_address, NULL, "where it begins", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot scratch_slots[] = {
    {Py_tp_members, scratch_members},
    {Py_tp_getset, scratch_getset},
    {Py_tp_dealloc, scratch_dealloc},
    {Py_tp_doc, "Memory of the engine's own, which one call after the other uses."},
    {0, NULL},
};

PyType_Spec pc_scratch_spec = {
    .name = "pycoll._transports._core.Scratch",
    .basicsize = sizeof(pc_scratch_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = scratch_slots,
};

PyObject *pc_scratch_object_of(void *memory) {
    void **keeper = pc_scratch_keeper(memory);
    if (keeper == NULL)
        return NULL;
    if (*keeper == NULL) {
        pc_scratch_object *self = pc_new(pc_scratch_type);
        if (self == NULL) {
            PyErr_Clear();
            return NULL;
        }
        self->start = memory;
        self->nbytes = (Py_ssize_t)pc_scratch_nbytes(memory);
        *keeper = self; /* the block has this reference */
    }
    return Py_NewRef((PyObject *)*keeper);
}

void pc_scratch_free_with_keeper(void *memory) {
    void **keeper = pc_scratch_keeper(memory);
    if (keeper != NULL && *keeper != NULL)
        Py_DECREF((PyObject *)*keeper);
    else
        pc_scratch_discard(memory);
}

void pc_scratch_let_go_left(pc_engine_object *engine) {
    struct pc_turn turn;
    PyObject *keeper = NULL;
    do {
        Py_XDECREF(keeper);
        keeper = pc_engine_take(engine, &turn) ? pc_scratch_next_left(&engine->engine.scratch)
                                               : NULL;
        pc_engine_give(engine, &turn);
    } while (keeper != NULL);
}
