/* gatherv, all_gatherv, scatterv and all_to_allv for arrays at which memory.h can look, also as
   `out`: one, or a list of one for each block, or of None. For all else Python says what the blocks
   are and where they go (`Comm.uneven`); also for a call of which a method has heard what it cannot
   use. */
#include "uneven.h"

#include "python/arguments/collective_call.h"
#include "python/arguments/timeout.h"

/* Look at this rank's array, or one array for each rank, all of one dtype; `kept` gets what keeps
   them, for a list may change meanwhile. False: leave it to Python. */
static bool view_given(struct pc_uneven *call, PyObject *x, PyObject **kept) {
    int size = call->comm->size, count = pc_uneven_gathers(call) ? 1 : size;
    if (!pc_uneven_gathers(call)) {
        if (!PyList_CheckExact(x) && !PyTuple_CheckExact(x))
            return false;
        *kept = PyList_CheckExact(x) ? PyList_AsTuple(x) : Py_NewRef(x);
        if (*kept == NULL)
            PyErr_Clear();
        if (*kept == NULL || PyTuple_Size(*kept) != size)
            return false;
    } else { /* which may stand in for what the caller has */
        *kept = Py_NewRef(x);
    }
    for (int index = 0; index < count; index++) {
        PyObject *item = pc_uneven_gathers(call) ? x : PyTuple_GetItem(*kept, index);
        struct pc_array *array = &call->given[index].array;
        call->given[index].head = NULL;
        if (!pc_memory_of(item, array))
            return false;
        call->num_given++;
        call->x = index == 0 ? item : call->x;
        if (array->ndim > PC_DESCRIBED_DIMS || array->dtype != call->given[0].array.dtype)
            return false;
    }
    call->dtype = call->method == PC_SCATTERV ? 0 : call->given[0].array.dtype;
    return true;
}

/* Whether blocks of this shape can stand in `out` one after the other. */
static bool rows_alike(const struct pc_array *whole, int ndim, const intptr_t *dims) {
    return ndim == whole->ndim && ndim > 0 && dims_equal(ndim - 1, dims + 1, whole->dims + 1);
}

/* Whether blocks may go to `target`, as far as is known: that with an index, or all (-1). */
static bool may_be_out(const struct pc_uneven *call, const struct pc_array *target, int index) {
    bool are_rows = index < 0 && call->method != PC_SCATTERV;
    if (are_rows && target->ndim == 0)
        return false;
    for (int given = 0; given < call->num_given; given++) {
        const struct pc_array *array = &call->given[given].array;
        const char *a = array->data, *b = target->data;
        if (array->dtype != target->dtype || !(a + array->nbytes <= b || b + target->nbytes <= a))
            return false;
    }
    if (call->num_given == 0 || (index >= 0 && index != call->comm->rank))
        return true;
    const struct pc_array *mine = &call->given[call->mine].array;
    if (!are_rows)
        return mine->ndim == target->ndim && dims_equal(mine->ndim, mine->dims, target->dims);
    return rows_alike(target, mine->ndim, mine->dims) && mine->dims[0] <= target->dims[0];
}

/* Look at `out`; `targets` has room for a tuple's items, or for the one array. False, perhaps with
   an exception: leave it to Python. */
static bool view_out(const struct pc_uneven *call, PyObject *out, struct pc_array *targets) {
    bool are_several = PyTuple_CheckExact(out);
    int count = are_several ? call->comm->size : 1;
    if (are_several && (call->method == PC_SCATTERV || PyTuple_Size(out) != count))
        return false;
    for (int index = 0; index < count; index++) {
        PyObject *item = are_several ? PyTuple_GetItem(out, index) : out;
        if ((!are_several || item != Py_None) &&
            (!pc_target_of(item, &targets[index]) ||
             !may_be_out(call, &targets[index], are_several ? index : -1)))
            return false;
    }
    for (int index = 0; index < count; index++) {
        PyObject *item = are_several ? PyTuple_GetItem(out, index) : out;
        if (item != Py_None && pc_tell_written(&targets[index], item) < 0)
            return false;
    }
    return true;
}

/* Make the array of a block, or find its place in `out`, where `row` is the next that is free.
   NULL, perhaps with an exception: Python must. */
static PyObject *place_of(const struct pc_uneven *call, int index, PyObject *out,
                          const struct pc_array *targets, intptr_t *row) {
    struct pc_described said;
    struct pc_block *block = &call->blocks[index];
    if (!pc_read_description(block->head + 4, block->head_nbytes - 4, &said) ||
        (call->num_given > 0 && said.dtype != call->given[0].array.dtype))
        return NULL;
    struct pc_array *place = &block->place;
    bool are_several = out != NULL && PyTuple_CheckExact(out);
    const struct pc_array *target = &targets[are_several ? index : 0];
    PyObject *item = are_several ? PyTuple_GetItem(out, index) : out;
    if (item == NULL || item == Py_None)
        return pc_memory_empty(said.library, said.format, said.dtype, said.ndim, said.dims, place);
    place->nbytes = said.nbytes;
    if (said.dtype != target->dtype)
        return NULL;
    if (are_several || call->method == PC_SCATTERV) {
        place->data = target->data;
        return said.ndim == target->ndim && dims_equal(said.ndim, said.dims, target->dims)
                   ? Py_NewRef(item)
                   : NULL;
    }
    if (!rows_alike(target, said.ndim, said.dims) || said.dims[0] > target->dims[0] - *row)
        return NULL;
    size_t row_nbytes = target->dims[0] > 0 ? target->nbytes / (size_t)target->dims[0] : 0;
    place->data = (char *)target->data + (size_t)*row * row_nbytes;
    block->begin = *row;
    block->end = *row += said.dims[0];
    return Py_NewRef(Py_None); /* a slice, when the block has come: it may be a copy */
}

/* What the caller gets; NULL, perhaps with an exception: Python must find places. */
static PyObject *result_of(const struct pc_uneven *call, PyObject *out,
                           const struct pc_array *targets) {
    intptr_t row = 0;
    if (call->num_blocks == 0)
        return Py_NewRef(Py_None);
    if (call->method == PC_SCATTERV)
        return place_of(call, 0, out, targets, &row);
    PyObject *list = PyList_New(call->num_blocks);
    for (int index = 0; list != NULL && index < call->num_blocks; index++) {
        PyObject *made = place_of(call, index, out, targets, &row);
        if (made != NULL)
            PyList_SetItem(list, index, made);
        else
            Py_CLEAR(list);
    }
    if (list != NULL && out != NULL && !PyTuple_CheckExact(out) && row != targets->dims[0])
        Py_CLEAR(list);
    return list;
}

static PyObject *run(struct pc_uneven *call, PyObject *out, const struct pc_array *targets) {
    if (pc_uneven_first(call) < 0)
        return NULL;
    PyObject *result = call->left < PC_LONG_HEADS ? result_of(call, out, targets) : NULL;
    if (result == NULL && !PyErr_Occurred()) {
        call->comm->heard = call->comm->goes_on = true; /* in Python, from there */
        return NULL;
    }
    if (pc_uneven_second(call, result != NULL ? 0 : -1) < 0)
        Py_CLEAR(result);
    bool cuts = result != NULL && out != NULL && call->method != PC_SCATTERV &&
                !PyTuple_CheckExact(out);
    for (int index = 0; cuts && result != NULL && index < call->num_blocks; index++) {
        const struct pc_block *block = &call->blocks[index];
        PyObject *slice = PySequence_GetSlice(out, block->begin, block->end);
        if (slice != NULL)
            PyList_SetItem(result, index, slice);
        else
            Py_CLEAR(result);
    }
    return result;
}

PyObject *pc_shared_uneven(pc_comm *comm, int method, PyObject **values) {
    struct pc_given given[comm->size];
    struct pc_block blocks[comm->size];
    struct pc_array targets[comm->size];
    struct pc_deadline deadline = {0, 0};
    int root = find_root(values[ROOT], comm->size);
    struct pc_uneven call = pc_uneven(comm, method, root, given, blocks);
    bool is_root = comm->rank == root, gives = method != PC_SCATTERV || is_root;
    PyObject *x = method == PC_SCATTERV || method == PC_ALL_TO_ALLV ? values[XS] : values[X];
    PyObject *out = is_none(values[OUT]) || (method == PC_GATHERV && !is_root) ? NULL : values[OUT];
    PyObject *kept = NULL, *result = NULL;
    memset(targets, 0, sizeof targets);
    out = out != NULL && PyList_CheckExact(out) ? PyList_AsTuple(out) : Py_XNewRef(out);
    if (root >= 0 && comm->direct && !pc_uneven_has_long_rows(&call) &&
        pc_timeout(values[TIMEOUT], comm->op_timeout_ns, &deadline.timeout_ns) &&
        (!gives || view_given(&call, x, &kept)) && !PyErr_Occurred() &&
        (out == NULL || view_out(&call, out, targets))) {
        pc_claim(comm, deadline); /* no other thread comes in between the rounds */
        result = run(&call, out, targets);
        if (comm->heard)
            comm->kept = Py_XNewRef(kept);
        else
            comm->claimed = false;
    }
    pc_uneven_release(&call);
    for (int index = 0; index < comm->size; index++)
        pc_memory_release(&targets[index]);
    Py_XDECREF(kept);
    Py_XDECREF(out);
    return result;
}

