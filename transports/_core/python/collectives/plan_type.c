/* `_core.CompiledPlan`: a compiled schedule, and where its chunks are in the memory of a call. See
   collective.h. */
#include "collective.h"

#include "reduce/reduce.h"

#include <stdlib.h>
#include <string.h>

static uint64_t generation; /* counted up when all plans are to be forgotten */

uint64_t pc_plans_generation(void) { return generation; }

PyObject *pc_forget_plans(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    generation++;
    Py_RETURN_NONE;
}

/* Append the numbers of a tuple, all below `limit`; -1 with an exception. */
static int append(uint32_t **list, uint32_t *count, PyObject *numbers, uint32_t limit) {
    Py_ssize_t added = PyTuple_Size(numbers);
    if (added < 0)
        return -1;
    uint32_t *longer = realloc(*list, (*count + (size_t)added + 1) * sizeof **list);
    if (longer == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *list = longer;
    for (Py_ssize_t index = 0; index < added; index++) {
        long number = PyLong_AsLong(PyTuple_GetItem(numbers, index));
        if (number < 0 || number >= (long)limit) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "%ld is not below %u", number, limit);
            return -1;
        }
        longer[(*count)++] = (uint32_t)number;
    }
    return 0;
}

/* Whether a step may be run: it names what there is. */
static bool is_sound(const struct pc_compiled *self, uint32_t position, int size) {
    const struct pc_step *step = &self->steps[position];
    if (step->kind == PC_STEP_EXTERNAL)
        return true;
    if (step->kind > PC_STEP_COPY || step->num_chunks == 0)
        return false;
    if (step->kind == PC_STEP_COPY)
        return step->other < self->table.num_chunks && step->num_chunks == 1;
    if (step->kind == PC_STEP_REDUCE)
        return position > 0 && self->steps[position - 1].kind == PC_STEP_RECV_SCRATCH &&
               self->steps[position - 1].num_chunks == step->num_chunks;
    return step->other < (uint32_t)size;
}

int pc_compiled_read(struct pc_compiled *self, PyObject *steps, int size) {
    Py_ssize_t count = PyList_Size(steps);
    uint32_t num_chunks = 0, num_successors = 0;
    self->steps = calloc((size_t)count + 1, sizeof *self->steps);
    if (self->steps == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t position = 0; position < count; position++) {
        struct pc_step *step = &self->steps[position];
        PyObject *chunks, *successors;
        unsigned kind, other, index, waits;
        int flag; /* of a reduction: incoming first; of an external step: at the end */
        if (!PyArg_ParseTuple(PyList_GetItem(steps, position), "IpIIO!O!I", &kind, &flag, &other,
                              &index, &PyTuple_Type, &chunks, &PyTuple_Type, &successors, &waits))
            return -1;
        *step = (struct pc_step){.kind = (uint8_t)kind,
                                 .other = other,
                                 .index = index,
                                 .chunks = num_chunks,
                                 .successors = num_successors,
                                 .waits = waits};
        step->incoming_first = kind == PC_STEP_REDUCE && flag;
        step->at_end = kind == PC_STEP_EXTERNAL && flag;
        self->has_external |= kind == PC_STEP_EXTERNAL;
        if (append(&self->chunks, &num_chunks, chunks, self->table.num_chunks) < 0 ||
            append(&self->successors, &num_successors, successors, (uint32_t)count) < 0)
            return -1;
        step->num_chunks = num_chunks - step->chunks;
        step->num_successors = num_successors - step->successors;
        if (kind > PC_STEP_EXTERNAL || !is_sound(self, (uint32_t)position, size)) {
            PyErr_Format(PyExc_ValueError, "step %zd cannot be run", position);
            return -1;
        }
    }
    self->table.num_steps = (uint32_t)count;
    self->table.steps = self->steps;
    self->table.chunks = self->chunks;
    self->table.successors = self->successors;
    return 0;
}

static int read_places(pc_plan *self, PyObject *places) {
    Py_ssize_t count = PyList_Size(places);
    if (count != (Py_ssize_t)self->way.table.num_chunks || self->way.has_external) {
        PyErr_SetString(PyExc_ValueError,
                        "a plan has a place for each chunk, and no external steps");
        return -1;
    }
    self->places = calloc((size_t)count + 1, sizeof *self->places);
    if (self->places == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t chunk = 0; chunk < count; chunk++) {
        Py_ssize_t nbytes, source, target;
        if (!PyArg_ParseTuple(PyList_GetItem(places, chunk), "nnn", &nbytes, &source, &target))
            return -1;
        self->places[chunk] =
            (struct pc_chunk_place){.nbytes = (size_t)nbytes, .source = source, .target = target};
    }
    return 0;
}

/* A copy of some bytes; NULL with an exception. */
static unsigned char *copy_of(const char *bytes, Py_ssize_t nbytes) {
    unsigned char *copy = malloc((size_t)nbytes + 1);
    if (copy == NULL)
        PyErr_NoMemory();
    else
        memcpy(copy, bytes, (size_t)nbytes);
    return copy;
}

/* (steps, is the root's, head or None, inline nbytes, most, dtype, dims or None) */
static int read_announced(struct pc_announced *self, PyObject *given, int size) {
    PyObject *steps, *dims;
    const char *head;
    Py_ssize_t head_nbytes, most;
    int is_root;
    if (!PyArg_ParseTuple(given, "O!pz#nniO", &PyList_Type, &steps, &is_root, &head, &head_nbytes,
                          &self->inline_nbytes, &most, &self->dtype, &dims))
        return -1;
    self->is_announced = true;
    self->is_root = is_root != 0;
    self->most = (size_t)most;
    if (head != NULL && (self->head = copy_of(head, head_nbytes)) == NULL)
        return -1;
    self->head_nbytes = head != NULL ? (size_t)head_nbytes : 0;
    self->ndim = dims != Py_None ? (int)PyTuple_Size(dims) : -1;
    if (most < 0 || self->ndim > PC_PLAN_DIMS || (self->is_root && head == NULL)) {
        PyErr_SetString(PyExc_ValueError, "there is no such announcement");
        return -1;
    }
    for (int axis = 0; axis < self->ndim; axis++)
        self->dims[axis] = PyLong_AsSsize_t(PyTuple_GetItem(dims, axis));
    self->way.table.num_chunks = 1;
    return PyErr_Occurred() ? -1 : pc_compiled_read(&self->way, steps, size);
}

struct pc_reduction pc_reduction_of(int op, int dtype, int divisor) {
    if (op < 0)
        return (struct pc_reduction){0};
    return (struct pc_reduction){.combine = pc_reduce_find(op == PC_AVG ? PC_SUM : op, dtype),
                                 .finish = divisor > 0 ? pc_reduce_find(op, dtype) : NULL,
                                 .divisor = divisor,
                                 .itemsize = pc_itemsize(dtype)};
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *steps, *places = NULL, *announced = Py_None;
    const char *text = "";
    Py_ssize_t text_nbytes = 0, granule = 1;
    int size, op = -1, dtype = 0, divisor = 0;
    unsigned num_chunks, segments = 1;
    unsigned long long salt = 0;
    if (!PyArg_ParseTuple(args, "iIO!|O!y#(iii)InOK", &size, &num_chunks, &PyList_Type, &steps,
                          &PyList_Type, &places, &text, &text_nbytes, &op, &dtype, &divisor,
                          &segments, &granule, &announced, &salt))
        return NULL;
    if (segments == 0 || segments > UINT16_MAX || granule <= 0) {
        PyErr_SetString(PyExc_ValueError, "there is no such segment");
        return NULL;
    }
    pc_plan *self = pc_new(type);
    if (self == NULL)
        return NULL;
    self->reduction = pc_reduction_of(op, dtype, divisor);
    self->granule = (size_t)granule;
    self->num_segments = segments;
    self->salt = salt;
    self->text_nbytes = (size_t)text_nbytes;
    self->text = copy_of(text, text_nbytes);
    self->way.table.num_chunks = num_chunks;
    if (self->text != NULL && pc_compiled_read(&self->way, steps, size) == 0 &&
        (places == NULL || read_places(self, places) == 0) &&
        (announced == Py_None || read_announced(&self->announced, announced, size) == 0))
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

void pc_compiled_free(struct pc_compiled *compiled) {
    free(compiled->steps);
    free(compiled->chunks);
    free(compiled->successors);
}

bool pc_plan_keep_second(pc_plan *self, size_t nbytes, PyObject *second) {
    if (self->second == NULL)
        self->second = calloc(PC_SECONDS, sizeof *self->second);
    if (self->second == NULL || self->second[pc_second_at(nbytes)] != NULL)
        return false;
    self->second[pc_second_at(nbytes)] = second;
    return true;
}

static void plan_dealloc(pc_plan *self) {
    for (unsigned index = 0; self->second != NULL && index < PC_SECONDS; index++)
        Py_XDECREF(self->second[index]);
    free(self->second);
    pc_compiled_free(&self->way);
    pc_compiled_free(&self->announced.way);
    free(self->announced.head);
    free(self->places);
    free(self->text);
    pc_free(self);
}

static PyType_Slot plan_slots[] = {
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_doc, "CompiledPlan(size, num_chunks, steps, places, text, (op, dtype, divisor), "
                "segments, granule, announced=None, salt=0): how calls run that are alike; of the "
                "first three arguments the schedule of a `Run`.\n\n"
                "`steps` are (kind, incoming first, peer or chunk, index, chunks, successors, "
                "waits); `places`, by chunk, (nbytes, offset in x, offset in the result), -1 for "
                "none; `text` is the call's signature; `op` and `dtype` are codes, -1: nothing is "
                "reduced; what was combined is divided, if `divisor` is not 0 and the operator "
                "says so. `announced`, if its root announces the call, is (steps, is the root's, "
                "head or None, bytes that follow it or -1, most bytes, dtype, dims or None). With "
                "a `salt` (`shared_memory.part_of`) it is a call in shared memory, of that text."},
    {0, NULL},
};

PyType_Spec pc_plan_spec = {
    .name = "pycoll._transports._core.CompiledPlan",
    .basicsize = sizeof(pc_plan),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = plan_slots,
};
