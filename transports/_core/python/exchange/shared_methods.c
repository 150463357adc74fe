/* The collectives in shared memory, of arguments that are looked at, not converted; what is not the
   common case goes another way. */
#include "python/arguments/collective_call.h"
#include "python/arguments/objects.h"
#include "comm.h"

PyObject *pc_argument_names[ARGUMENTS], *pc_op_names[PC_OPS];

void pc_shared_init(void) {
    static const char *names[ARGUMENTS] = {
        "x",  "op",   "root",   "out", "algorithm", "timeout", "counts",
        "xs", "dest", "source", "tag", "status",    "sendtag", "recvtag", ""};
    static const char *ops[PC_OPS] = {"sum", "prod", "min",  "max", "avg", "band",
                                      "bor", "bxor", "land", "lor", "lxor"};
    for (int index = 0; index < ARGUMENTS; index++)
        pc_argument_names[index] = PyUnicode_InternFromString(names[index]);
    for (int index = 0; index < PC_OPS; index++)
        pc_op_names[index] = PyUnicode_InternFromString(ops[index]);
}

/* The all_reduce that combines ints for a call of the user's, or the all_gather. */
static pc_collective part_of_ints(const pc_collective *call, const struct pc_array *x,
                                  int64_t *gathered) {
    pc_collective part = pc_part_of(call);
    part.kind = PC_ALL_REDUCE;
    part.root = 0;
    if (pc_is_gathered(x)) {
        part.kind = PC_ALL_GATHER;
        part.op = 0;
        part.out = gathered;
    }
    /* as in pycoll/_calls/number_plans.py */
    uint32_t called = (uint32_t)call->kind << 24 | (uint32_t)call->op << 16 | (uint32_t)call->root;
    pc_sign_part(&part, (uint64_t)PC_PART_INTS << 32 | called, x->ndim, x->dims);
    return part;
}

/* The result, of what has come of an all_gather, or an all_reduce. */
static PyObject *int_of(const pc_collective *call, const int64_t *gathered,
                        const union pc_number *number) {
    const pc_comm *comm = call->comm;
    int count = num_combined(comm->size, comm->rank, call->kind);
    PyObject *result = gathered != NULL ? pc_folded_ints(call->op, gathered, comm->size, count)
                                        : pc_int_object(call->op, number);
    bool has_root = call->kind == PC_REDUCE;
    if (PC_UNLIKELY(result == NULL && !PyErr_Occurred())) {
        PyObject *text = PyUnicode_FromFormat(
            has_root ? "%s(int, op=%U, algorithm=shared_memory, root=%d)"
                     : "%s(int, op=%U, algorithm=shared_memory)",
            call->kind == PC_SCAN     ? "scan"
            : call->kind == PC_EXSCAN ? "exscan"
            : has_root                ? "reduce"
                                      : "all_reduce",
            pc_op_names[call->op], call->root);
        pc_raise_int_error(text, NULL);
        Py_XDECREF(text);
    } else if (has_root && call->root != comm->rank && result != NULL) {
        Py_DECREF(result);
        result = Py_NewRef(Py_None);
    }
    return result;
}

/* Everything that is neither announced nor a barrier. */
static PyObject *run_array(pc_comm *comm, int kind, PyObject **values, const struct pc_array *x,
                           int op, int root) {
    struct pc_array out;
    int64_t *gathered = NULL;
    if (PC_UNLIKELY(pc_is_gathered(x)) &&
        (gathered = (int64_t *)(void *)pc_scratch(comm, (size_t)comm->size * x->nbytes)) == NULL)
        return PyErr_NoMemory();
    int moves = pc_moves_for(kind, values);
    PyObject *result = result_for(comm->size, comm->rank, moves, values, x, root, &out);
    if (result == NULL)
        return NULL;
    pc_collective call;
    if (pc_user_call_begin(&call, comm, moves, root, values[TIMEOUT]) < 0) {
        Py_CLEAR(result);
        goto done;
    }
    call.method = kind;
    call.op = op;
    call.dtype = x->dtype;
    call.x = x->data;
    call.out = out.data != NULL ? out.data : x->data; /* nothing is written */
    call.nbytes = x->nbytes;
    if (kind == PC_REDUCE_SCATTER || kind == PC_ALL_TO_ALL)
        call.nbytes /= (size_t)comm->size;
    call.may_use_gpus = comm->may_use_gpus && (moves == PC_ALL_REDUCE || moves == PC_REDUCE ||
                                               moves == PC_REDUCE_SCATTER);
    call.x_object = values[X];
    call.op_object = values[OP];
    if (PC_UNLIKELY(moves != kind)) {
        uint64_t salt = PyLong_AsUnsignedLongLong(PyTuple_GetItem(values[FUNCTION], 0));
        pc_sign_part(&call, salt, x->ndim, x->dims);
        result = pc_call_end(&call, pc_exchange_run(&call), result);
    } else if (PC_UNLIKELY(pc_is_int(x))) {
        pc_collective part = part_of_ints(&call, x, gathered);
        result = pc_call_end(&part, pc_exchange_run(&part), result);
    } else {
        pc_sign(&call, 0, x->ndim, x->dims);
        result = pc_call_end(&call, pc_exchange_run(&call), result);
    }
    if (PC_UNLIKELY(out.data == &out.number) && result != NULL) {
        Py_DECREF(result);
        result = pc_is_int(x) ? int_of(&call, gathered, &out.number)
                              : pc_number_object(x->dtype, &out.number);
    }
done:
    pc_memory_release(&out);
    return result;
}

/* What the root of a call that is announced gives, and what there is for the result. */
struct announced {
    struct pc_array x, out; /* must be released in any case */
    bool is_object; /* x is the bytes of one */
    bool is_new;    /* what comes is made when that is known; */
    PyObject *made; /* the root knows it before; or NULL */
};

/* Look at the values of a call that is announced: `x` of the root, `out` of a scatter, and
   elsewhere of a broadcast, too. False: leave it to Python, unless there is an exception. */
static bool view_announced(pc_comm *comm, int kind, PyObject **values, int root,
                           struct announced *found) {
    bool is_root = comm->rank == root;
    struct pc_array *x = &found->x, *out = &found->out;
    if (is_root && !pc_memory_of(values[X], x)) {
        found->is_object = kind == PC_BROADCAST && pc_object_dump(values[X], false, x) > 0;
        return found->is_object && pc_may_share(comm); /* pickling may have run anything */
    }
    if (is_root && x->ndim > PC_DESCRIBED_DIMS)
        return false;
    if (is_root && kind == PC_BROADCAST)
        return true;
    PyObject *target = kind == PC_SCATTER ? values[OUT] : values[X];
    found->is_new = kind == PC_SCATTER ? is_none(target) && (is_root || is_none(values[X]))
                                       : is_not_filled(target);
    if (found->is_new && !is_root)
        return true;
    if ((!is_root && kind == PC_SCATTER && !is_none(values[X])) ||
        (is_root && (x->ndim == 0 || x->dims[0] != comm->size)))
        return false;
    if (found->is_new) {
        found->made = pc_memory_new(x, values[X], -1, out);
        return found->made != NULL;
    }
    if (!pc_target_of(target, out) ||
        (is_root && !out_fits(comm->size, comm->rank, kind, x, out)))
        return false;
    return pc_tell_written(out, target) == 0;
}

static int announce(pc_collective *call, const struct announced *given) {
    unsigned char description[PC_LONGEST_DESCRIPTION];
    const struct pc_array *x = &given->x;
    int skipped = call->kind == PC_SCATTER;
    call->x = x->data;
    call->out = given->out.data;
    call->nbytes = skipped ? x->nbytes / (size_t)call->comm->size : x->nbytes;
    struct pc_header header = {.nbytes = call->nbytes, .address = (uintptr_t)x->data};
    if (given->is_object) {
        header.form = PC_FORM_OF_OBJECT;
    } else {
        header.value = pc_hash_dims((uint64_t)x->dtype, x->ndim - skipped, x->dims + skipped);
        header.description_nbytes = pc_describe_memory(x, skipped, description);
    }
    return pc_announce(call, &header, description);
}

static uint32_t form_of(const struct pc_slot *slot) {
    return ((const struct pc_header *)(const void *)slot->data)->form;
}

/* The result for what the root has announced (new reference), described by `out`. NULL, perhaps
   with an exception: Python must find it. */
static PyObject *result_for_announced(const struct pc_slot *slot, PyObject *target,
                                      struct announced *found) {
    struct pc_header header;
    struct pc_described said;
    struct pc_array *out = &found->out;
    memcpy(&header, slot->data, sizeof header);
    if (found->is_new && header.form == PC_FORM_OF_OBJECT) {
        found->is_object = true;
        return pc_object_memory(header.nbytes, out);
    }
    if (header.form != PC_FORM_OF_ARRAY)
        return NULL;
    if (!found->is_new)
        return header.value == pc_hash_dims((uint64_t)out->dtype, out->ndim, out->dims)
                   ? Py_NewRef(target)
                   : NULL;
    if (!pc_read_description(slot->data + sizeof header, header.description_nbytes, &said))
        return NULL;
    return pc_memory_empty(said.library, said.format, said.dtype, said.ndim, said.dims, out);
}

static PyObject *run_announced(pc_comm *comm, int kind, PyObject **values, int root) {
    struct announced found = {0};
    PyObject *result = NULL, *target = kind == PC_SCATTER ? values[OUT] : values[X];
    pc_collective call;
    struct pc_slot *slot;
    if (!view_announced(comm, kind, values, root, &found) || PyErr_Occurred() ||
        pc_user_call_begin(&call, comm, kind, root, values[TIMEOUT]) < 0)
        goto done;
    call.x_object = values[X];
    pc_sign(&call, 0, 0, NULL);
    if (comm->rank == root) {
        if (found.made != NULL)
            target = found.made;
        result = pc_call_end_with(&call, announce(&call, &found), target);
        goto done;
    }
    int status = pc_hear(&call, &slot);
    pc_hold(&call.call);
    if (status == 0 && form_of(slot) == PC_FORM_OF_OBJECTS && comm->direct && found.is_new) {
        result = pc_call_end_with(&call, 0, Py_None);
        Py_DECREF(result);
        result = pc_shared_object_of(comm, root);
        goto done;
    }
    if (status == 0) {
        result = result_for_announced(slot, target, &found);
        if (result == NULL && !PyErr_Occurred()) {
            comm->heard = comm->goes_on = true; /* in Python, from there */
            comm->busy = false;
            goto done;
        }
        call.out = found.out.data;
        status = result != NULL ? pc_receive(&call, slot) : -1;
    }
    result = pc_call_end(&call, status, result);
    pc_memory_release(&found.out);
    found.out.held.obj = NULL;
    if (found.is_object && result != NULL)
        result = pc_object_load(result);
done:
    pc_memory_release(&found.x);
    pc_memory_release(&found.out);
    Py_XDECREF(found.made);
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
    if (root < 0)
        return NULL;
    if (kind == PC_SCATTER && comm->rank == root && is_none(values[OUT]) &&
        (PyList_CheckExact(values[X]) || PyTuple_CheckExact(values[X])))
        return pc_shared_objects(comm, kind, root, values[X], values[TIMEOUT]);
    if (pc_is_announced(kind))
        return run_announced(comm, kind, values, root);
    struct pc_array x;
    int op = values[FUNCTION] != NULL ? 0 : find_op(values[OP]);
    bool reduces = pc_reduces(kind);
    bool splits = kind == PC_REDUCE_SCATTER || kind == PC_ALL_TO_ALL;
    if (op < 0)
        return NULL;
    if (PC_UNLIKELY(!value_of(pc_moves_for(kind, values), op, values[X], &x)))
        return !reduces && is_none(values[OUT])
                   ? pc_shared_objects(comm, kind, root, values[X], values[TIMEOUT])
                   : NULL;
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
