/* The lists of all_reduce_many: several small arrays of one dtype go as one, a bucket. See
   collective.h; pycoll/_calls/many.py says which arrays share a bucket. */
#include "collective.h"
#include "python/arguments/collective_call.h"

#include "base/copy.h"
#include "reduce/reduce_kernels.h"

#include <stdlib.h>

/* A list or tuple as a tuple, which nobody changes; NULL, perhaps with an exception: it is none. */
static PyObject *tuple_of(PyObject *list) {
    if (PyList_CheckExact(list))
        return PyList_AsTuple(list);
    return PyTuple_CheckExact(list) ? Py_NewRef(list) : NULL;
}

/* Look at an array, and write its shape; false: it does not go with those before. */
static bool read_array(struct pc_many *many, PyObject *x) {
    struct pc_array array;
    if (!pc_memory_of(x, &array))
        return false;
    bool goes = array.ndim <= PC_PLAN_DIMS && array.nbytes <= PC_MANY_NBYTES - many->nbytes &&
                (many->num_listed == 0 || array.dtype == many->dtype);
    if (goes) {
        many->dtype = array.dtype;
        many->nbytes += array.nbytes;
        many->shapes[many->num_listed++] = (size_t)array.ndim;
        for (int axis = 0; axis < array.ndim; axis++)
            many->shapes[many->num_listed++] = (size_t)array.dims[axis];
    }
    pc_memory_release(&array);
    return goes;
}

bool pc_many_read(PyObject *xs, PyObject *out, struct pc_many *many) {
    *many = (struct pc_many){.xs = tuple_of(xs), .out = is_none(out) ? NULL : tuple_of(out)};
    Py_ssize_t count = many->xs != NULL ? PyTuple_Size(many->xs) : 0;
    if (count == 0 || count > PC_MOST_MANY ||
        (!is_none(out) && (many->out == NULL || PyTuple_Size(many->out) != count)))
        return false;
    many->shapes = malloc((size_t)count * (1 + PC_PLAN_DIMS) * sizeof *many->shapes);
    bool are_read = many->shapes != NULL;
    for (Py_ssize_t index = 0; are_read && index < count; index++)
        are_read = read_array(many, PyTuple_GetItem(many->xs, index));
    return are_read;
}

void pc_many_release(struct pc_many *many) {
    free(many->shapes);
    Py_XDECREF(many->xs);
    Py_XDECREF(many->out);
}

/* Whether it is still as it was read: making other arrays may have run anything. */
static bool is_as_read(const struct pc_many *many, const size_t *shape,
                       const struct pc_array *x) {
    return x->dtype == many->dtype && (size_t)x->ndim == *shape &&
           dims_equal(x->ndim, x->dims, (const intptr_t *)shape + 1);
}

/* Copy an array to its place, and make its result (new reference); NULL, perhaps without an
   exception. */
static PyObject *pack(const struct pc_many *many, Py_ssize_t index, const size_t *shape,
                      bool is_blocking, char *place, struct pc_member *member) {
    struct pc_array x, to;
    PyObject *values[ARGUMENTS] = {[X] = PyTuple_GetItem(many->xs, index)}, *result = NULL;
    if (many->out != NULL)
        values[OUT] = PyTuple_GetItem(many->out, index);
    if (!pc_memory_of(values[X], &x))
        return NULL;
    if (is_as_read(many, shape, &x)) {
        pc_copy(place, x.data, x.nbytes);
        result = result_for(1, 0, PC_ALL_REDUCE, values, &x, 0, &to);
    }
    if (result != NULL) {
        *member = (struct pc_member){.to = to.data, .nbytes = x.nbytes};
        /* in place `to` says nothing of a buffer that must be held */
        const struct pc_array *held = values[OUT] == values[X] ? &x : &to;
        member->keeper = pc_memory_keeper(held, result, is_blocking || is_none(values[OUT]));
        pc_memory_release(&to);
        if (member->keeper == NULL)
            Py_CLEAR(result);
    }
    pc_memory_release(&x);
    return result;
}

struct pc_bucket *pc_bucket_new(const struct pc_many *many, bool is_blocking) {
    Py_ssize_t count = PyTuple_Size(many->xs);
    struct pc_bucket *bucket =
        calloc(1, sizeof *bucket + (size_t)count * sizeof *bucket->members);
    if (bucket == NULL)
        return NULL;
    bucket->count = count;
    struct pc_array memory;
    bucket->nbytes = (intptr_t)many->nbytes;
    bucket->memory = pc_array_empty(PC_UINT8, 1, &bucket->nbytes);
    bucket->results = PyList_New(count);
    bool is_packed = bucket->memory != NULL && bucket->results != NULL &&
                     pc_array_view(bucket->memory, &memory);
    bucket->start = is_packed ? memory.data : NULL;
    char *place = bucket->start;
    const size_t *shape = many->shapes;
    for (Py_ssize_t index = 0; is_packed && index < count; index++) {
        struct pc_member *member = &bucket->members[index];
        PyObject *result = pack(many, index, shape, is_blocking, place, member);
        is_packed = result != NULL && PyList_SetItem(bucket->results, index, result) == 0;
        place += member->nbytes;
        shape += 1 + *shape;
    }
    if (is_packed)
        return bucket;
    pc_bucket_free(bucket);
    return NULL;
}

void pc_bucket_unpack(const struct pc_bucket *bucket) {
    const char *from = bucket->start;
    for (Py_ssize_t index = 0; index < bucket->count; index++) {
        pc_copy(bucket->members[index].to, from, bucket->members[index].nbytes);
        from += bucket->members[index].nbytes;
    }
}

void pc_bucket_free(struct pc_bucket *bucket) {
    for (Py_ssize_t index = 0; bucket != NULL && index < bucket->count; index++)
        Py_XDECREF(bucket->members[index].keeper);
    if (bucket != NULL) {
        Py_XDECREF(bucket->memory);
        Py_XDECREF(bucket->results);
    }
    free(bucket);
}
