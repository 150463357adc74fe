/* The collectives in shared memory, of arguments that are looked at, not converted; what is not the
   common case goes another way. */
#include "python/arguments/collective_call.h"
#include "comm.h"

PyObject *pc_argument_names[ARGUMENTS], *pc_op_names[PC_OPS];

void pc_shared_init(void) {
    static const char *names[ARGUMENTS] = {
        "x",  "op",   "root",   "out", "algorithm", "timeout", "counts",
        "xs", "dest", "source", "tag", "status",    "sendtag", "recvtag"};
    static const char *ops[PC_OPS] = {"sum", "prod", "min",  "max", "avg", "band",
                                      "bor", "bxor", "land", "lor", "lxor"};
    for (int index = 0; index < ARGUMENTS; index++)
        pc_argument_names[index] = PyUnicode_InternFromString(names[index]);
    for (int index = 0; index < PC_OPS; index++)
        pc_op_names[index] = PyUnicode_InternFromString(ops[index]);
}

/* The all_reduce that combines ints for a call of the user's. */
static pc_collective part_of_ints(const pc_collective *call, const struct pc_array *x) {
    pc_collective part = pc_part_of(call);
    part.kind = PC_ALL_REDUCE;
    part.root = 0;
    /* as in pycoll/_calls/number_plans.py */
    uint32_t called = (uint32_t)call->kind << 24 | (uint32_t)call->op << 16 | (uint32_t)call->root;
    pc_sign_part(&part, (uint64_t)PC_PART_INTS << 32 | called, x->ndim, x->dims);
    return part;
}

static PyObject *int_of(const pc_collective *call, const union pc_number *number) {
    PyObject *result = pc_int_object(call->op, number);
    bool has_root = call->kind == PC_REDUCE;
    if (PC_UNLIKELY(result == NULL && !PyErr_Occurred())) {
        PyObject *text = PyUnicode_FromFormat(
            has_root ? "reduce(int, op=%U, algorithm=shared_memory, root=%d)"
                     : "all_reduce(int, op=%U, algorithm=shared_memory)",
            pc_op_names[call->op], call->root);
        pc_raise_int_error(text, NULL);
        Py_XDECREF(text);
    } else if (has_root && call->root != call->comm->rank && result != NULL) {
        Py_DECREF(result);
        result = Py_NewRef(Py_None);
    }
    return result;
}

/* Everything that is neither announced nor a barrier. */
static PyObject *run_array(pc_comm *comm, int kind, PyObject **values, const struct pc_array *x,
                           int op, int root) {
    struct pc_array out;
    PyObject *result = result_for(comm->size, comm->rank, kind, values, x, root, &out);
    if (result == NULL)
        return NULL;
    pc_collective call;
    if (pc_user_call_begin(&call, comm, kind, root, values[TIMEOUT]) < 0) {
        Py_CLEAR(result);
        goto done;
    }
    call.op = op;
    call.dtype = x->dtype;
    call.x = x->data;
    call.out = out.data != NULL ? out.data : x->data; /* nothing is written */
    call.nbytes = x->nbytes;
    if (kind == PC_REDUCE_SCATTER || kind == PC_ALL_TO_ALL)
        call.nbytes /= (size_t)comm->size;
    call.may_use_gpus = comm->may_use_gpus && (kind == PC_ALL_REDUCE || kind == PC_REDUCE ||
                                               kind == PC_REDUCE_SCATTER);
    call.x_object = values[X];
    call.op_object = values[OP];
    if (PC_UNLIKELY(pc_is_int(x))) {
        pc_collective part = part_of_ints(&call, x);
        result = pc_call_end(&part, pc_exchange_run(&part), result);
    } else {
        pc_sign(&call, 0, x->ndim, x->dims);
        result = pc_call_end(&call, pc_exchange_run(&call), result);
    }
    if (PC_UNLIKELY(out.data == &out.number) && result != NULL) {
        Py_DECREF(result);
        result = pc_is_int(x) ? int_of(&call, &out.number)
                              : pc_number_object(x->dtype, &out.number);
    }
done:
    pc_memory_release(&out);
    return result;
}

/* The arrays of a call that is announced: `x` of the root, `out` of a scatter, and elsewhere of a
   broadcast, too. False: leave it to Python. What is there must be released in any case. */
static bool view_announced(pc_comm *comm, int kind, PyObject **values, int root,
                           struct pc_array *x, struct pc_array *out) {
    bool is_root = comm->rank == root;
    if (is_root && (!pc_memory_of(values[X], x) || x->ndim > PC_DESCRIBED_DIMS))
        return false;
    if (is_root && kind == PC_BROADCAST)
        return true;
    PyObject *target = kind == PC_SCATTER ? values[OUT] : values[X];
    if (is_none(target) || (!is_root && kind == PC_SCATTER && !is_none(values[X])) ||
        (is_root && (x->ndim == 0 || x->dims[0] != comm->size)) || !pc_target_of(target, out) ||
        (is_root && !out_fits(comm->size, comm->rank, kind, x, out)))
        return false;
    return pc_tell_written(out, target) == 0;
}

static PyObject *announce(pc_comm *comm, int kind, PyObject **values, int root,
                          const struct pc_array *x, const struct pc_array *out) {
    pc_collective call;
    if (pc_user_call_begin(&call, comm, kind, root, values[TIMEOUT]) < 0)
        return NULL;
    call.x_object = values[X];
    pc_sign(&call, 0, 0, NULL);
    call.out = out->data;
    int status;
    if (comm->rank == root) {
        unsigned char description[PC_LONGEST_DESCRIPTION];
        int skipped = kind == PC_SCATTER;
        call.x = x->data;
        call.nbytes = skipped ? x->nbytes / (size_t)comm->size : x->nbytes;
        struct pc_header header = {.nbytes = call.nbytes, .address = (uintptr_t)x->data, .form = 0};
        header.value = pc_hash_dims((uint64_t)x->dtype, x->ndim - skipped, x->dims + skipped);
        header.description_nbytes = pc_describe_memory(x, skipped, description);
        status = pc_announce(&call, &header, description);
        PyObject *result = skipped ? values[OUT] : values[X];
        return pc_call_end_with(&call, status, result);
    }
    struct pc_slot *slot;
    status = pc_hear(&call, &slot);
    if (status == 0) {
        struct pc_header header;
        memcpy(&header, slot->data, sizeof header);
        if (header.form != 0 ||
            header.value != pc_hash_dims((uint64_t)out->dtype, out->ndim, out->dims)) {
            pc_hold(&call.call);
            comm->heard = comm->goes_on = true; /* in Python, from there */
            comm->busy = false;
            return NULL;
        }
        status = pc_receive(&call, slot);
    }
    return pc_call_end_with(&call, status, kind == PC_SCATTER ? values[OUT] : values[X]);
}

static PyObject *run_announced(pc_comm *comm, int kind, PyObject **values, int root) {
    struct pc_array x = {0}, out = {0};
    PyObject *result = NULL;
    if (view_announced(comm, kind, values, root, &x, &out))
        result = announce(comm, kind, values, root, &x, &out);
    pc_memory_release(&x);
    pc_memory_release(&out);
    return result;
}

PC_HOT PyObject *pc_shared_run(pc_comm *comm, int kind, PyObject **values) {
    PyObject *result = NULL;
    if (PC_UNLIKELY(kind >= PC_KINDS))
        return kind == PC_REDUCE_SCATTERV ? pc_shared_reduce_scatterv(comm, values)
                                          : pc_shared_uneven(comm, kind, values);
    int root = find_root(values[ROOT], comm->size);
    if (kind == PC_BARRIER) {
        pc_collective call;
        if (pc_user_call_begin(&call, comm, kind, 0, values[TIMEOUT]) < 0)
            return NULL;
        pc_sign(&call, 0, 0, NULL);
        int status = pc_exchange_run(&call);
        return pc_call_end_with(&call, status, Py_None);
    }
    if (root < 0 || values[X] == NULL)
        return NULL;
    if (pc_is_announced(kind))
        return run_announced(comm, kind, values, root);
    struct pc_array x;
    int op = find_op(values[OP]);
    bool reduces = pc_reduces(kind);
    bool splits = kind == PC_REDUCE_SCATTER || kind == PC_ALL_TO_ALL;
    if (op < 0 || !value_of(kind, op, values[X], &x))
        return NULL;
    if ((!reduces || pc_reduce_find(op, x.dtype) != NULL) &&
        (!splits || (x.ndim > 0 && x.dims[0] == comm->size)))
        result = run_array(comm, kind, values, &x, reduces ? op : 0, root);
    pc_memory_release(&x);
    return result;
}

PC_COLD void pc_shared_end(pc_comm *comm, int kind) {
    if (comm->heard && PyErr_Occurred()) { /* before it came to what was heard */
        pc_collective call;
        comm->heard = false;
        if (pc_call_begin(&call, comm, kind < PC_KINDS ? kind : PC_ALL_GATHER, 0) == 0) {
            call.method = kind;
            call.number = comm->number;
            (void)pc_call_end(&call, -1, NULL);
        }
    }
    comm->heard = comm->goes_on = false;
    if (comm->claimed && pthread_equal(comm->caller, pthread_self()))
        comm->claimed = false;
    Py_CLEAR(comm->kept);
}
