/* The collectives as methods for NumPy arrays: arguments are looked at, not converted, and whatever
   is not the common case is handed, untouched, to the Python method. */
#include "collective_call.h"
#include "comm.h"

PyObject *pc_argument_names[ARGUMENTS], *pc_op_names[PC_OPS];

void pc_fast_init(void) {
    static const char *names[ARGUMENTS] = {"x",         "op",      "root",  "out",
                                           "algorithm", "timeout", "counts"};
    static const char *ops[PC_OPS] = {"sum", "prod", "min",  "max", "avg", "band",
                                      "bor", "bxor", "land", "lor", "lxor"};
    for (int index = 0; index < ARGUMENTS; index++)
        pc_argument_names[index] = PyUnicode_InternFromString(names[index]);
    for (int index = 0; index < PC_OPS; index++)
        pc_op_names[index] = PyUnicode_InternFromString(ops[index]);
}

/* Everything that is neither announced nor a barrier. */
static PyObject *run_array(pc_comm *comm, int kind, PyObject **values, struct pc_array *x, int op,
                           int root) {
    bool has_result = (kind != PC_REDUCE && kind != PC_GATHER) || comm->rank == root;
    bool has_none = kind == PC_EXSCAN && comm->rank == 0; /* nothing is written */
    struct pc_array out = {.data = has_none ? x->data : NULL};
    PyObject *result;
    if (!has_result) {
        result = Py_NewRef(Py_None);
    } else if (!is_none(values[OUT])) {
        if (!pc_array_view(values[OUT], &out) || !out_fits(comm->size, comm->rank, kind, x, &out))
            return NULL;
        result = Py_NewRef(has_none ? Py_None : values[OUT]);
    } else if (has_none) {
        result = Py_NewRef(Py_None);
    } else {
        int change = shape_change(kind);
        result = pc_array_new(x, values[X], change > 0 ? comm->size : change);
        if (result == NULL)
            return NULL;
        if (!pc_array_view(result, &out)) {
            Py_DECREF(result);
            return NULL;
        }
    }
    pc_collective call;
    if (pc_user_call_begin(&call, comm, kind, root, values[TIMEOUT]) < 0) {
        Py_DECREF(result);
        return NULL;
    }
    call.op = op;
    call.dtype = x->dtype;
    call.x = x->data;
    call.out = out.data;
    call.nbytes = x->nbytes;
    if (kind == PC_REDUCE_SCATTER || kind == PC_ALL_TO_ALL)
        call.nbytes /= (size_t)comm->size;
    call.x_object = values[X];
    call.op_object = values[OP];
    pc_sign(&call, 0, x->ndim, x->dims);
    return pc_call_end(&call, pc_run(&call), result);
}

/* Write what `conversion.describe` writes for a NumPy array; returns its length. */
uint32_t pc_describe_array(const struct pc_array *x, int skipped, unsigned char *to) {
    int ndim = x->ndim - skipped;
    to[0] = (unsigned char)x->dtype;
    to[1] = 5;
    to[2] = (unsigned char)ndim;
    memcpy(to + 3, "numpy", 5);
    for (int axis = 0; axis < ndim; axis++) {
        uint64_t dim = (uint64_t)x->dims[axis + skipped];
        memcpy(to + 8 + 8 * axis, &dim, 8);
    }
    return 8 + 8 * (uint32_t)ndim;
}

static PyObject *run_announced(pc_comm *comm, int kind, PyObject **values, int root) {
    struct pc_array x = {0}, out = {0};
    bool is_root = comm->rank == root, has_out = !is_none(values[OUT]);
    pc_collective call;
    if (is_root) {
        if (!pc_array_view(values[X], &x) || x.ndim > 32)
            return NULL;
        if (kind == PC_SCATTER && (!has_out || x.ndim == 0 || x.dims[0] != comm->size ||
                                   !pc_array_view(values[OUT], &out) ||
                                   !out_fits(comm->size, comm->rank, kind, &x, &out)))
            return NULL;
    } else {
        PyObject *target = kind == PC_SCATTER ? values[OUT] : values[X];
        if ((kind == PC_SCATTER && !is_none(values[X])) || is_none(target) ||
            !pc_array_view(target, &out) || !out.writeable)
            return NULL;
    }
    if (pc_user_call_begin(&call, comm, kind, root, values[TIMEOUT]) < 0)
        return NULL;
    call.x_object = values[X];
    pc_sign(&call, 0, 0, NULL);
    call.out = out.data;
    int status;
    if (is_root) {
        unsigned char description[8 + 8 * 32];
        int skipped = kind == PC_SCATTER;
        call.x = x.data;
        call.nbytes = skipped ? x.nbytes / (size_t)comm->size : x.nbytes;
        struct pc_header header = {.nbytes = call.nbytes, .address = (uintptr_t)x.data, .form = 0};
        header.value = pc_hash_dims((uint64_t)x.dtype, x.ndim - skipped, x.dims + skipped);
        header.description_nbytes = pc_describe_array(&x, skipped, description);
        status = pc_announce(&call, &header, description);
        PyObject *result = skipped ? values[OUT] : values[X];
        pc_hold(&call.call); /* the interpreter's lock, before a reference is counted */
        return pc_call_end(&call, status, Py_NewRef(result));
    }
    struct pc_slot *slot;
    status = pc_hear(&call, &slot);
    if (status == 0) {
        struct pc_header header;
        memcpy(&header, slot->data, sizeof header);
        if (header.form != 0 ||
            header.value != pc_hash_dims((uint64_t)out.dtype, out.ndim, out.dims)) {
            pc_hold(&call.call);
            comm->heard = comm->goes_on = true; /* in Python, from there */
            comm->busy = false;
            return NULL;
        }
        status = pc_receive(&call, slot);
    }
    pc_hold(&call.call);
    return pc_call_end(&call, status, Py_NewRef(kind == PC_SCATTER ? values[OUT] : values[X]));
}

static inline PyObject *collective(pc_shared *self, int kind, PyObject *const *args,
                                   Py_ssize_t count, PyObject *keywords) {
    pc_comm *comm = self->comm;
    PyObject *values[ARGUMENTS] = {NULL};
    if (PC_LIKELY(comm->usable && !comm->claimed && !comm->busy && !comm->host->engaged &&
                  !pc_host_failed(comm->host)) &&
        parse(kind, args, count, keywords, values) && is_none(values[ALGORITHM])) {
        PyObject *result = NULL;
        int root = find_root(values[ROOT], comm->size);
        if (kind == PC_BARRIER) {
            pc_collective call;
            if (pc_user_call_begin(&call, comm, kind, 0, values[TIMEOUT]) == 0) {
                pc_sign(&call, 0, 0, NULL);
                int status = pc_run(&call);
                pc_hold(&call.call);
                result = pc_call_end(&call, status, Py_NewRef(Py_None));
            }
        } else if (root >= 0 && values[X] != NULL) {
            if (pc_is_announced(kind)) {
                result = run_announced(comm, kind, values, root);
            } else {
                struct pc_array x;
                int op = find_op(values[OP]);
                bool reduces = pc_reduces(kind);
                bool splits = kind == PC_REDUCE_SCATTER || kind == PC_ALL_TO_ALL;
                if (op >= 0 && pc_array_view(values[X], &x) &&
                    (!reduces || pc_reduce_find(op, x.dtype) != NULL) &&
                    (!splits || (x.ndim > 0 && x.dims[0] == comm->size)))
                    result = run_array(comm, kind, values, &x, reduces ? op : 0, root);
            }
        }
        if (result != NULL || PyErr_Occurred())
            return result;
    }
    PyObject *result = pc_call_slow(self->slow[kind], args, count, keywords);
    comm->heard = comm->goes_on = false;
    return result;
}

#define FAST(name, kind)                                                                          \
    static PC_HOT PyObject *fast_##name(pc_shared *self, PyObject *const *args, Py_ssize_t count, \
                                        PyObject *keywords) {                                     \
        return collective(self, kind, args, count, keywords);                                     \
    }
FAST(barrier, PC_BARRIER)
FAST(broadcast, PC_BROADCAST)
FAST(reduce, PC_REDUCE)
FAST(all_reduce, PC_ALL_REDUCE)
FAST(gather, PC_GATHER)
FAST(all_gather, PC_ALL_GATHER)
FAST(scatter, PC_SCATTER)
FAST(reduce_scatter, PC_REDUCE_SCATTER)
FAST(all_to_all, PC_ALL_TO_ALL)
FAST(scan, PC_SCAN)
FAST(exscan, PC_EXSCAN)

#define METHOD(name, parameters)                                                     \
    {#name, (PyCFunction)(void (*)(void))fast_##name, METH_FASTCALL | METH_KEYWORDS, \
     #name "($self, " parameters                                                     \
           "*, algorithm=None, timeout=None)\n--\n\nSee pycoll.Communicator." #name "."}
PyMethodDef pc_fast_methods[] = {
    METHOD(barrier, ""),
    METHOD(broadcast, "x, root=0, "),
    METHOD(reduce, "x, op='sum', root=0, out=None, "),
    METHOD(all_reduce, "x, op='sum', out=None, "),
    METHOD(gather, "x, root=0, out=None, "),
    METHOD(all_gather, "x, out=None, "),
    METHOD(scatter, "x, root=0, out=None, "),
    METHOD(reduce_scatter, "x, op='sum', out=None, "),
    METHOD(all_to_all, "x, out=None, "),
    METHOD(scan, "x, op='sum', out=None, "),
    METHOD(exscan, "x, op='sum', out=None, "),
    {NULL, NULL, 0, NULL},
};
