/* reduce_scatterv: a reduce_scatter whose blocks differ in length, which is counted in rows of x.
   All ranks must give the same counts, so each knows where every block lies, and nothing is
   announced: the counts are a part of the call's signature. A call on NumPy arrays and one whose
   arguments Python has checked are the same to the other ranks. */
#include "python/arguments/collective_call.h"
#include "comm.h"

/* Say what is reduced where, after `op` and `dtype`. */
static void set_rows(pc_collective *call, const size_t *begins, size_t row_nbytes, int ndim,
                     const intptr_t *dims) {
    int size = call->comm->size;
    uint64_t hash = pc_hash_dims(0, size, (const intptr_t *)begins + 1);
    call->method = PC_REDUCE_SCATTERV;
    call->begins = begins;
    call->row_nbytes = row_nbytes;
    for (int rank = 0; rank < size; rank++)
        if (call->nbytes < pc_block_nbytes(call, rank))
            call->nbytes = pc_block_nbytes(call, rank);
    pc_sign_part(call, (uint64_t)PC_PART_UNEVEN << 32 | (hash & 0xFFFFFFFFu), ndim, dims);
}

/* --- NumPy arrays ----------------------------------------------------------------------------- */

/* NULL, perhaps with an exception: leave it to Python. */
static PyObject *run_rows(pc_comm *comm, PyObject **values, const struct pc_array *x, int op,
                          const size_t *begins) {
    size_t row_nbytes = x->dims[0] > 0 ? x->nbytes / (size_t)x->dims[0] : 0;
    struct pc_array out;
    pc_collective call;
    PyObject *result = rows_for(comm->rank, values, x, begins, &out);
    if (result == NULL)
        return NULL;
    if (pc_user_call_begin(&call, comm, PC_REDUCE_SCATTER, 0, values[TIMEOUT]) < 0) {
        pc_memory_release(&out);
        Py_DECREF(result);
        return NULL;
    }
    call.op = op;
    call.dtype = x->dtype;
    call.x = x->data;
    call.out = out.data;
    call.x_object = values[X];
    call.op_object = values[OP];
    set_rows(&call, begins, row_nbytes, x->ndim, x->dims);
    result = pc_call_end(&call, pc_exchange_run(&call), result);
    pc_memory_release(&out);
    return result;
}

PyObject *pc_shared_reduce_scatterv(pc_comm *comm, PyObject **values) {
    size_t begins[comm->size + 1];
    struct pc_array x = {0};
    int op = find_op(values[OP]);
    if (values[COUNTS] == NULL || op < 0 || !pc_array_view(values[X], &x) ||
        pc_reduce_find(op, x.dtype) == NULL || x.ndim == 0 || x.ndim > PC_MAX_DIMS ||
        !read_counts(values[COUNTS], comm->size, (size_t)x.dims[0], begins))
        return NULL;
    return run_rows(comm, values, &x, op, begins);
}

/* --- calls from Python, whose arguments are checked already ----------------------------------- */

static PyObject *run_checked(pc_comm *comm, int dtype, int op, PyObject *shape, PyObject *counts,
                             const Py_buffer *x, const Py_buffer *out) {
    intptr_t dims[PC_MAX_DIMS];
    size_t begins[comm->size + 1];
    pc_collective call;
    int ndim = pc_get_shape(shape, dims);
    if (ndim < 0 || pc_check_attached(comm) < 0)
        return NULL;
    size_t num_rows = ndim > 0 ? (size_t)dims[0] : 0;
    if (!read_counts(counts, comm->size, num_rows, begins)) {
        PyErr_SetString(PyExc_ValueError, "counts do not cut the rows");
        return NULL;
    }
    if (!pc_check_reducible(dtype, x->len > 0 ? x->buf : NULL, out->len > 0 ? out->buf : NULL) ||
        pc_call_begin(&call, comm, PC_REDUCE_SCATTER, 0) < 0)
        return NULL;
    call.op = op;
    call.dtype = dtype;
    call.x = x->buf;
    call.out = out->buf;
    set_rows(&call, begins, num_rows > 0 ? (size_t)x->len / num_rows : 0, ndim, dims);
    int status = pc_exchange_run(&call);
    return pc_call_end_with(&call, status, Py_None);
}

/* reduce_rows(dtype, op, shape, counts, x, out) */
PyObject *pc_comm_reduce_rows(pc_comm *comm, PyObject *args) {
    PyObject *shape, *counts;
    int dtype, op;
    Py_buffer x, out;
    if (!PyArg_ParseTuple(args, "iiO!Oy*w*", &dtype, &op, &PyTuple_Type, &shape, &counts, &x, &out))
        return NULL;
    PyObject *result = run_checked(comm, dtype, op, shape, counts, &x, &out);
    PyBuffer_Release(&x);
    PyBuffer_Release(&out);
    return result;
}
