/* gatherv, all_gatherv, scatterv and all_to_allv for arrays at which memory.h can look, and for one
   array or none as `out`. For all else Python says what the blocks are and where they go
   (`Comm.uneven`); also for a call of which a method has heard what it cannot use. */
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

/* Whether `whole`, where blocks go, may be that, as far as is known. */
static bool may_be_out(const struct pc_uneven *call, const struct pc_array *whole) {
    if (whole->ndim == 0)
        return false;
    for (int index = 0; index < call->num_given; index++) {
        const struct pc_array *array = &call->given[index].array;
        const char *a = array->data, *b = whole->data;
        if (array->dtype != whole->dtype || !(a + array->nbytes <= b || b + whole->nbytes <= a))
            return false;
    }
    if (call->num_given == 0)
        return true;
    const struct pc_array *mine = &call->given[call->mine].array;
    if (call->method == PC_SCATTERV)
        return mine->ndim == whole->ndim && dims_equal(mine->ndim, mine->dims, whole->dims);
    return rows_alike(whole, mine->ndim, mine->dims) && mine->dims[0] <= whole->dims[0];
}

/* Make the array of a block, or find its place in `out`, where `row` is the next that is free.
   NULL, perhaps with an exception: Python must. */
static PyObject *place_of(const struct pc_uneven *call, struct pc_block *block, PyObject *out,
                          const struct pc_array *whole, intptr_t *row) {
    struct pc_described said;
    if (!pc_read_description(block->head + 4, block->head_nbytes - 4, &said) ||
        (call->num_given > 0 && said.dtype != call->given[0].array.dtype))
        return NULL;
    struct pc_array *place = &block->place;
    if (out == NULL)
        return pc_memory_empty(said.library, said.format, said.dtype, said.ndim, said.dims, place);
    place->nbytes = said.nbytes;
    bool is_alike = said.dtype == whole->dtype;
    if (call->method == PC_SCATTERV) {
        place->data = whole->data;
        is_alike &= said.ndim == whole->ndim && dims_equal(said.ndim, said.dims, whole->dims);
        return is_alike ? Py_NewRef(out) : NULL;
    }
    if (!is_alike || !rows_alike(whole, said.ndim, said.dims) ||
        said.dims[0] > whole->dims[0] - *row)
        return NULL;
    size_t row_nbytes = whole->dims[0] > 0 ? whole->nbytes / (size_t)whole->dims[0] : 0;
    place->data = (char *)whole->data + (size_t)*row * row_nbytes;
    block->begin = *row;
    block->end = *row += said.dims[0];
    return Py_NewRef(Py_None); /* a slice, when the block has come: it may be a copy */
}

/* What the caller gets; NULL, perhaps with an exception: Python must find places. */
static PyObject *result_of(const struct pc_uneven *call, PyObject *out,
                           const struct pc_array *whole) {
    intptr_t row = 0;
    if (call->num_blocks == 0)
        return Py_NewRef(Py_None);
    if (call->method == PC_SCATTERV)
        return place_of(call, &call->blocks[0], out, whole, &row);
    PyObject *list = PyList_New(call->num_blocks);
    for (int index = 0; list != NULL && index < call->num_blocks; index++) {
        PyObject *made = place_of(call, &call->blocks[index], out, whole, &row);
        if (made != NULL)
            PyList_SetItem(list, index, made);
        else
            Py_CLEAR(list);
    }
    if (list != NULL && out != NULL && row != whole->dims[0])
        Py_CLEAR(list);
    return list;
}

static PyObject *run(struct pc_uneven *call, PyObject *out, const struct pc_array *whole) {
    if (pc_uneven_first(call) < 0)
        return NULL;
    PyObject *result = call->left < PC_LONG_HEADS ? result_of(call, out, whole) : NULL;
    if (result == NULL && !PyErr_Occurred()) {
        call->comm->heard = call->comm->goes_on = true; /* in Python, from there */
        return NULL;
    }
    if (pc_uneven_second(call, result != NULL ? 0 : -1) < 0)
        Py_CLEAR(result);
    bool cuts = result != NULL && out != NULL && call->method != PC_SCATTERV;
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
    struct pc_array whole = {0};
    struct pc_deadline deadline = {0, 0};
    int root = find_root(values[ROOT], comm->size);
    struct pc_uneven call = pc_uneven(comm, method, root, given, blocks);
    bool is_root = comm->rank == root, gives = method != PC_SCATTERV || is_root;
    PyObject *x = method == PC_SCATTERV || method == PC_ALL_TO_ALLV ? values[XS] : values[X];
    PyObject *out = is_none(values[OUT]) || (method == PC_GATHERV && !is_root) ? NULL : values[OUT];
    PyObject *kept = NULL, *result = NULL;
    if (root >= 0 && comm->direct && !pc_uneven_has_long_rows(&call) &&
        pc_timeout(values[TIMEOUT], comm->op_timeout_ns, &deadline.timeout_ns) &&
        (!gives || view_given(&call, x, &kept)) &&
        (out == NULL || (pc_target_of(out, &whole) && may_be_out(&call, &whole) &&
                         pc_tell_written(&whole, out) == 0))) {
        pc_claim(comm, deadline); /* no other thread comes in between the rounds */
        result = run(&call, out, &whole);
        if (comm->heard)
            comm->kept = Py_XNewRef(kept);
        else
            comm->claimed = false;
    }
    pc_uneven_release(&call);
    pc_memory_release(&whole);
    Py_XDECREF(kept);
    return result;
}

