/* `_core.Collectives`: the collectives of one communicator as methods. They decide how a call goes:
   in shared memory (comm.h), by messages (collective.h), or, with the same arguments, to the Python
   method, if the core does not understand them. */
#include "collective.h"
#include "python/arguments/collective_call.h"
#include "python/arguments/timeout.h"

#include <stdlib.h>

/* Plans that a communicator keeps, and those of them among which a call looks for its own. */
#define PLANS 128
#define PLANS_TOGETHER 4

/* --- plans ------------------------------------------------------------------------------------ */

struct plan_key {
    PyObject *algorithm; /* as of `pc_running`; a kept key owns it */
    const struct pc_library *library;
    int format, kind, blocking, op, dtype, root, ndim; /* -1 dimensions: no array was passed */
    int is_gathered; /* `algorithm` is the name of a function */
    intptr_t dims[PC_PLAN_DIMS];
    size_t num_listed;
    /* begins of a reduce_scatterv, as of `read_counts`; shapes of `struct pc_many`; or NULL. A kept
       key owns them. The last */
    size_t *listed;
};

struct pc_plan_entry {
    struct plan_key key;
    PyObject *plan; /* NULL: there is none; None: Python must run such calls */
};

static void forget_plans(pc_collectives *self) {
    for (int index = 0; self->plans != NULL && index < PLANS; index++) {
        Py_CLEAR(self->plans[index].plan);
        Py_CLEAR(self->plans[index].key.algorithm);
        free(self->plans[index].key.listed);
        self->plans[index].key.listed = NULL;
    }
}

static size_t nbytes_listed(const struct plan_key *key) {
    return key->num_listed * sizeof *key->listed;
}

static bool are_alike(const struct plan_key *a, const struct plan_key *b) {
    return memcmp(a, b, offsetof(struct plan_key, listed)) == 0 &&
           (a->listed == NULL || memcmp(a->listed, b->listed, nbytes_listed(a)) == 0);
}

/* The place of a plan; if there is none, one that may be given to it. */
static struct pc_plan_entry *find_plan(pc_collectives *self, const struct plan_key *key) {
    if (self->generation != pc_plans_generation()) {
        forget_plans(self);
        self->generation = pc_plans_generation();
    }
    uint64_t hash = pc_hash(
        (uint64_t)key->kind << 32 | (uint64_t)key->op << 16 | (uint64_t)key->dtype << 8,
        (uint64_t)key->root << 8 | (uint64_t)key->blocking << 4 | (uint64_t)(key->ndim + 1));
    hash = pc_hash(hash, (uint64_t)(uintptr_t)key->algorithm ^ (uint64_t)(uintptr_t)key->library);
    for (int axis = 0; axis < key->ndim; axis++)
        hash = pc_hash(hash, (uint64_t)key->dims[axis]);
    if (key->listed != NULL)
        hash = pc_hash_dims(hash, (int)key->num_listed, (const intptr_t *)key->listed);
    struct pc_plan_entry *together = &self->plans[hash % (PLANS / PLANS_TOGETHER) * PLANS_TOGETHER];
    for (int index = 0; index < PLANS_TOGETHER; index++)
        if (together[index].plan == NULL || are_alike(&together[index].key, key))
            return &together[index];
    return &together[self->num_made % PLANS_TOGETHER];
}

static void keep_plan(pc_collectives *self, const struct plan_key *key, PyObject *plan) {
    struct pc_plan_entry *entry = find_plan(self, key);
    size_t *listed = key->listed != NULL ? malloc(nbytes_listed(key)) : NULL;
    if (key->listed != NULL && listed == NULL)
        return;
    self->num_made++;
    PyObject *before = entry->plan, *named_before = entry->key.algorithm;
    free(entry->key.listed);
    entry->key = *key;
    entry->key.listed = listed;
    if (listed != NULL)
        memcpy(listed, key->listed, nbytes_listed(key));
    Py_XINCREF(key->algorithm);
    entry->plan = Py_NewRef(plan);
    Py_XDECREF(before);
    Py_XDECREF(named_before);
}

/* False with an exception. */
static bool is_plan(PyObject *object) {
    if (Py_TYPE(object) == pc_plan_type && ((pc_plan *)object)->places != NULL)
        return true;
    PyErr_SetString(PyExc_TypeError, "that is no plan");
    return false;
}

/* The counts of a reduce_scatterv, as they were read, as a list; NULL with an exception. */
static PyObject *counts_of(const pc_collectives *self, const size_t *begins) {
    PyObject *counts = PyList_New(self->size);
    for (int rank = 0; counts != NULL && rank < self->size; rank++) {
        PyObject *count = PyLong_FromSize_t(begins[rank + 1] - begins[rank]);
        if (count == NULL || PyList_SetItem(counts, rank, count) < 0)
            Py_CLEAR(counts);
    }
    return counts;
}

/* The plan of a call (new reference); None: Python must run it; NULL with an exception. */
static PyObject *plan_of(pc_collectives *self, const struct plan_key *key, PyObject **values,
                         PyObject *result) {
    struct pc_plan_entry *entry = find_plan(self, key);
    if (PC_LIKELY(entry->plan != NULL && are_alike(&entry->key, key)))
        return Py_NewRef(entry->plan);
    PyObject *x = values[X] != NULL ? values[X] : values[XS] != NULL ? values[XS] : Py_None;
    PyObject *algorithm = key->algorithm != NULL ? key->algorithm : Py_None;
    PyObject *counts = key->kind == PC_REDUCE_SCATTERV ? counts_of(self, key->listed)
                                                       : Py_NewRef(Py_None);
    PyObject *op = values[FUNCTION] != NULL ? Py_NewRef(values[OP]) : PyLong_FromLong(key->op);
    PyObject *plan = PyObject_CallFunction(self->planner, "iiONiOON", key->kind, key->blocking, x,
                                           op, key->root, result, algorithm, counts);
    if (plan == NULL)
        return NULL;
    if (plan != Py_None && !is_plan(plan)) {
        Py_DECREF(plan);
        return NULL;
    }
    keep_plan(self, key, plan); /* plans may have been forgotten meanwhile */
    return plan;
}

int pc_collectives_expect(pc_collectives *self, const struct pc_running *like, PyObject *plan) {
    struct plan_key key;
    if (!is_plan(plan))
        return -1;
    memset(&key, 0, sizeof key);
    key.kind = like->kind;
    key.blocking = like->is_blocking;
    key.root = like->root;
    key.algorithm = like->algorithm;
    key.ndim = -1;
    keep_plan(self, &key, plan);
    return 0;
}

/* --- methods ---------------------------------------------------------------------------------- */

static void name_array(struct plan_key *key, const struct pc_array *array) {
    /* which says what kind of array it is; an int is no array */
    if (pc_is_announced(key->kind) || pc_is_int(array)) {
        key->library = array->library;
        key->format = array->library != NULL ? array->format : 0;
    }
    key->dtype = array->dtype;
    key->ndim = array->ndim;
    for (int axis = 0; axis < array->ndim; axis++)
        key->dims[axis] = array->dims[axis];
}

/* A call of which all is known but the plan. What may change its memory is kept from it. */
static struct pc_running *start(pc_collectives *self, const struct plan_key *key, PyObject *x,
                                PyObject *result, PyObject *plan, const struct pc_array *source,
                                const struct pc_array *target, bool is_new) {
    bool is_number = pc_is_number(source), keeps = source->data != NULL && !is_number;
    if (plan == NULL || plan == Py_None)
        return NULL;
    struct pc_running *started =
        pc_started_new(self->type, &pc_collective_ops, self, key->blocking != 0);
    if (started == NULL)
        return NULL;
    started->plan = (pc_plan *)Py_NewRef(plan);
    started->x = Py_XNewRef(x);
    started->result = Py_NewRef(result);
    started->kind = key->kind;
    started->root = key->root;
    started->algorithm = Py_XNewRef(key->algorithm);
    started->reduction = key->op;
    started->source_keeper = keeps ? pc_memory_keeper(source, x, key->blocking) : NULL;
    started->target_keeper = target->data != NULL && !is_new && !is_number
                                 ? pc_memory_keeper(target, result, key->blocking)
                                 : Py_NewRef(result);
    /* a barrier's chunks are empty, but somewhere */
    started->source = key->kind != PC_BARRIER ? source->data : (void *)self;
    started->target = target->data;
    if (is_number) { /* numbers are in the call itself */
        started->numbers[1] = source->number;
        started->source = &started->numbers[1];
    }
    if (is_number && target->data == &target->number) {
        started->number_dtype = source->dtype;
        started->target = &started->numbers[0];
    }
    if (pc_is_gathered(source))
        started->target = started->gathered = malloc((size_t)self->size * source->nbytes);
    if (started->target_keeper != NULL && (started->source_keeper != NULL || !keeps) &&
        (started->gathered != NULL || !pc_is_gathered(source)))
        return pc_collective_start(started);
    Py_DECREF((PyObject *)started);
    return NULL;
}

/* A call whose root announces what will come, on another rank. */
static struct pc_running *begin_announced(pc_collectives *self, struct plan_key *key,
                                          PyObject **values) {
    /* where the result goes, if anybody says so */
    PyObject *place = values[key->kind == PC_BROADCAST ? X : OUT];
    struct pc_array none = {0}, out = {0};
    key->ndim = -1;
    if (key->kind == PC_BROADCAST && place != NULL && is_not_filled(place))
        place = Py_None;
    if (!is_none(place)) {
        if (!pc_target_of(place, &out))
            return NULL;
        if (out.ndim > PC_PLAN_DIMS || pc_tell_written(&out, place) < 0) {
            pc_memory_release(&out);
            return NULL;
        }
        name_array(key, &out);
    }
    bool is_new = is_none(place);
    PyObject *plan = plan_of(self, key, values, !is_new ? place : Py_None);
    PyObject *result = Py_NewRef(!is_new ? place : Py_None);
    if (is_new && plan != NULL && plan != Py_None && ((pc_plan *)plan)->announced.ndim >= 0) {
        /* What it was last time: it is thrown away if something else comes. */
        const struct pc_announced *expected = &((pc_plan *)plan)->announced;
        Py_DECREF(result);
        result = pc_array_empty(expected->dtype, expected->ndim, expected->dims);
        if (result != NULL && !pc_array_view(result, &out))
            Py_CLEAR(result);
    }
    struct pc_running *started = NULL;
    if (result != NULL)
        started = start(self, key, place, result, plan, &none, &out, is_new);
    Py_XDECREF(result);
    Py_XDECREF(plan);
    pc_memory_release(&out);
    return started;
}

/* The value of a call that is not announced, or its root's; of a reduce_scatterv its counts, too.
   False: leave it to Python. */
static bool find_value(pc_collectives *self, struct plan_key *key, PyObject **values,
                       struct pc_array *x) {
    int kind = key->kind;
    bool reduces = pc_reduces(kind);
    bool splits = kind == PC_REDUCE_SCATTER || kind == PC_ALL_TO_ALL || kind == PC_SCATTER;
    if (!value_of(pc_moves_for(kind, values), key->op, values[X], x))
        return false;
    if (x->ndim > PC_PLAN_DIMS || (reduces && pc_reduce_find(key->op, x->dtype) == NULL) ||
        (splits && (x->ndim == 0 || x->dims[0] != self->size)) ||
        (kind == PC_REDUCE_SCATTERV &&
         (x->ndim == 0 || values[COUNTS] == NULL ||
          !read_counts(values[COUNTS], self->size, (size_t)x->dims[0], key->listed)))) {
        pc_memory_release(x);
        return false;
    }
    name_array(key, x);
    return true;
}

/* A call on blocks of which only their senders know the length. NULL, perhaps with an exception:
   leave it to Python. */
static struct pc_running *begin_blocks(pc_collectives *self, struct plan_key *key,
                                       PyObject **values) {
    int kind = key->kind;
    bool is_announced = pc_is_announced(kind);
    bool is_rooted = kind == PC_GATHER || kind == PC_GATHERV;
    PyObject *given = NULL, *kept = NULL;
    if (values[XS] != NULL)
        values[X] = values[XS];
    PyObject *out = is_rooted && self->rank != key->root ? NULL : values[OUT];
    if (key->algorithm != NULL || (!is_none(out) && !pc_is_uneven(kind)))
        return NULL;
    bool is_list = out != NULL && PyList_CheckExact(out); /* which may change meanwhile */
    PyObject *places = is_list ? PyList_AsTuple(out) : Py_NewRef(out != NULL ? out : Py_None);
    if (places == NULL)
        return NULL;
    struct pc_blocks *blocks = pc_blocks_of(self, kind, key->root, values[X],
                                            is_none(places) ? NULL : places, key->blocking != 0,
                                            &given, &kept);
    /* pickling may have run anything */
    if (blocks != NULL && !pc_may_start((struct pc_methods *)self,
                                        self->context->collectives_usable)) {
        pc_blocks_free(blocks, self->engine);
        blocks = NULL;
    }
    struct pc_running *started = NULL;
    key->ndim = -1;
    key->dtype = blocks != NULL ? blocks->dtype : 0;
    PyObject *plan = blocks != NULL ? plan_of(self, key, values, Py_None) : NULL;
    if (plan != NULL && plan != Py_None)
        started = pc_started_new(self->type, &pc_collective_ops, self, key->blocking != 0);
    if (started != NULL) {
        started->plan = (pc_plan *)Py_NewRef(plan);
        started->result = Py_NewRef(kind == PC_BROADCAST ? values[X] : Py_None);
        if (kind == PC_BROADCAST)
            started->x = PyTuple_Pack(2, PyTuple_GetItem(given, 0), values[X]);
        else
            started->x = pc_is_uneven(kind) ? PyTuple_Pack(2, given, places) : Py_NewRef(given);
        started->kind = kind;
        started->root = key->root;
        started->source_keeper = Py_NewRef(kept);
        started->is_raw = kind != PC_BROADCAST;
        if (is_announced) {
            started->announcement =
                pc_announce_objects(self, started->plan, blocks, kind == PC_SCATTER,
                                    &started->announcement_nbytes);
            started->is_left = started->announcement == NULL;
        } else {
            started->blocks = blocks;
            blocks = NULL;
        }
        started = pc_collective_start(started);
    }
    pc_blocks_free(blocks, self->engine);
    Py_DECREF(places);
    Py_XDECREF(plan);
    Py_XDECREF(given);
    Py_XDECREF(kept);
    return started;
}

/* The plan of an all_reduce_many (new reference), and its bucket; NULL, perhaps with an exception:
   leave it to Python. */
static PyObject *pack(pc_collectives *self, struct plan_key *key, PyObject **values,
                      struct pc_bucket **bucket) {
    struct pc_many many;
    PyObject *plan = NULL;
    *bucket = NULL;
    if (pc_many_read(values[XS], values[OUT], &many) &&
        pc_reduce_find(key->op, many.dtype) != NULL) {
        key->dtype = many.dtype;
        key->listed = many.shapes;
        key->num_listed = many.num_listed;
        PyObject *read[ARGUMENTS];
        memcpy(read, values, sizeof read);
        read[XS] = many.xs; /* another thread may change the list */
        plan = plan_of(self, key, read, Py_None);
    }
    if (plan != NULL && plan != Py_None)
        *bucket = pc_bucket_new(&many, key->blocking != 0);
    if (*bucket == NULL)
        Py_CLEAR(plan);
    pc_many_release(&many);
    return plan;
}

static struct pc_running *begin_many(pc_collectives *self, struct plan_key *key,
                                     PyObject **values) {
    struct pc_bucket *bucket;
    PyObject *plan = pack(self, key, values, &bucket);
    struct pc_running *started = NULL;
    if (plan != NULL && ((pc_plan *)plan)->salt == 0)
        started = pc_started_new(self->type, &pc_collective_ops, self, key->blocking != 0);
    if (started != NULL) {
        started->plan = (pc_plan *)Py_NewRef(plan);
        started->kind = key->kind;
        started->result = Py_NewRef(bucket->results);
        started->source_keeper = Py_NewRef(bucket->memory);
        started->target_keeper = Py_NewRef(bucket->memory);
        started->source = started->target = bucket->start;
        started->bucket = bucket;
        bucket = NULL;
        started = pc_collective_start(started);
    }
    pc_bucket_free(bucket);
    Py_XDECREF(plan);
    return started;
}

/* An all_reduce_many in shared memory. NULL without an exception: leave it to Python. */
static PyObject *share_many(pc_collectives *self, PyObject **values) {
    struct plan_key key;
    struct pc_bucket *bucket;
    pc_collective call;
    PyObject *text = NULL, *result = NULL;
    memset(&key, 0, sizeof key);
    key.kind = PC_ALL_REDUCE_MANY;
    key.blocking = true;
    key.op = find_op(values[OP]);
    const pc_plan *plan = key.op >= 0 ? (pc_plan *)pack(self, &key, values, &bucket) : NULL;
    if (plan == NULL)
        return NULL;
    if (plan->salt != 0) /* which Python shows, if it takes long */
        text = PyUnicode_FromStringAndSize((const char *)plan->text, (Py_ssize_t)plan->text_nbytes);
    if (text != NULL && pc_may_share(self->comm) &&
        pc_user_call_begin(&call, self->comm, PC_ALL_REDUCE, 0, values[TIMEOUT]) == 0) {
        call.method = key.kind;
        call.op = key.op;
        call.dtype = key.dtype;
        call.x = call.out = bucket->start;
        call.nbytes = (size_t)bucket->nbytes;
        call.x_object = text;
        pc_sign_part(&call, plan->salt, 1, &bucket->nbytes);
        result = pc_call_end_with(&call, pc_exchange_run(&call), bucket->results);
        if (result != NULL)
            pc_bucket_unpack(bucket);
    }
    Py_XDECREF(text);
    pc_bucket_free(bucket);
    Py_DECREF((PyObject *)plan);
    return result;
}

/* NULL without an exception: leave it to Python. */
static struct pc_running *begin(pc_collectives *self, int kind, bool is_blocking,
                                PyObject *algorithm, PyObject **values) {
    struct plan_key key;
    struct pc_array x = {0}, out = {0};
    size_t begins[kind == PC_REDUCE_SCATTERV ? self->size + 1 : 1];
    memset(&key, 0, sizeof key);
    key.kind = kind;
    if (kind == PC_REDUCE_SCATTERV) {
        key.num_listed = (size_t)self->size + 1;
        key.listed = begins;
    }
    key.blocking = is_blocking;
    key.algorithm = algorithm;
    if (kind != PC_BARRIER) {
        key.is_gathered = pc_moves_for(kind, values) != kind;
        key.root = find_root(values[ROOT], self->size);
        key.op = pc_reduces(pc_moves_for(kind, values)) ? find_op(values[OP]) : 0;
        if (key.root >= 0 && pc_is_announced(kind) && self->rank != key.root)
            return begin_announced(self, &key, values);
        if (key.root < 0 || key.op < 0)
            return NULL;
        if (kind == PC_ALL_REDUCE_MANY)
            return begin_many(self, &key, values);
        if (pc_is_uneven(kind) || !find_value(self, &key, values, &x))
            return pc_is_uneven(kind) || pc_takes_objects(kind) ? begin_blocks(self, &key, values)
                                                                : NULL;
    }
    int moves = pc_moves_for(kind, values);
    PyObject *result = kind == PC_BROADCAST ? Py_NewRef(values[X])
                       : key.listed != NULL
                           ? rows_for(self->rank, values, &x, begins, &out)
                           : result_for(self->size, self->rank, moves, values, &x, key.root, &out);
    struct pc_running *started = NULL;
    if (result != NULL) {
        /* numbers go by one plan, wherever the result goes; and what is gathered is no result */
        bool is_out = !pc_is_number(&x) && moves == kind;
        PyObject *plan = plan_of(self, &key, values, is_out ? result : Py_None);
        started = start(self, &key, values[X], result, plan, &x, &out, is_none(values[OUT]));
        Py_XDECREF(plan);
        Py_DECREF(result);
        pc_memory_release(&out);
    }
    pc_memory_release(&x);
    return started;
}

/* Wait for a blocking call, which is let go; what takes long goes on in Python. */
static PyObject *finish(pc_collectives *self, struct pc_running *started, uint64_t timeout_ns) {
    PyObject *result = NULL, *finished = NULL;
    struct pc_started *base = (struct pc_started *)started;
    if (!pc_op_is_done(&started->op)) {
        struct pc_patience patience = pc_patience(timeout_ns);
        PyObject *left = NULL;
        if (pc_collective_ops.wait(base, patience.until_ns) == 0 &&
            (left = pc_patience_left(&patience)) != NULL)
            finished = PyObject_CallFunctionObjArgs(self->finish, (PyObject *)started, left, NULL);
        Py_XDECREF(left);
    }
    if (finished != NULL || !PyErr_Occurred())
        result = pc_collective_ops.result(base);
    Py_XDECREF(finished);
    Py_DECREF((PyObject *)started);
    return result;
}

/* NULL without an exception: leave it to Python. */
static PyObject *by_messages(pc_collectives *self, int kind, bool is_blocking, PyObject **values) {
    uint64_t timeout_ns;
    if (!pc_may_start((struct pc_methods *)self, self->context->collectives_usable) ||
        !pc_timeout(values[TIMEOUT], self->context->op_timeout_ns, &timeout_ns) ||
        (!is_blocking && values[TIMEOUT] != NULL) ||
        (!is_none(values[ALGORITHM]) && !PyUnicode_CheckExact(values[ALGORITHM])))
        return NULL;
    PyObject *algorithm = !is_none(values[ALGORITHM]) ? Py_NewRef(values[ALGORITHM]) : NULL;
    if (algorithm != NULL)
        PyUnicode_InternInPlace(&algorithm);
    struct pc_running *started = begin(self, kind, is_blocking, algorithm, values);
    Py_XDECREF(algorithm);
    if (started == NULL || !is_blocking)
        return (PyObject *)started;
    return finish(self, started, timeout_ns);
}

/* In shared memory, or else by messages. NULL without an exception: leave it to Python. */
static inline PyObject *attempt(pc_collectives *self, int kind, bool is_blocking, PyObject **values,
                                bool *goes_on);

/* Whether something reduces that is no name. */
static bool is_by_function(int kind, PyObject *const *values) {
    return values[OP] != NULL && kind < PC_KINDS && !PyUnicode_Check(values[OP]) &&
           values[FUNCTION] == NULL;
}

/* A reduction by a function: short values are gathered, and Python combines them when that is over.
   As `attempt`. */
PC_COLD static PyObject *attempt_function(pc_collectives *self, int kind, PyObject **values,
                                          bool *goes_on) {
    PyObject *moved[ARGUMENTS], *result = NULL, *rows = NULL, *done = NULL;
    struct pc_array x, out;
    int root = find_root(values[ROOT], self->size);
    size_t count = kind != PC_REDUCE_SCATTER ? (size_t)self->size : 1;
    /* in a scan a rank waits for those below it only */
    if (kind == PC_SCAN || kind == PC_EXSCAN || root < 0 || self->size > PC_GATHERED_RANKS ||
        !is_none(values[ALGORITHM]) || !pc_memory_of(values[X], &x))
        return NULL;
    if (x.nbytes <= PC_GATHERED_NBYTES / count && pc_reduce_find(PC_SUM, x.dtype) != NULL &&
        (kind != PC_REDUCE_SCATTER || x.ndim > 0))
        result = result_for(self->size, self->rank, kind, values, &x, root, &out);
    pc_memory_release(&x);
    if (result == NULL)
        return NULL;
    pc_memory_release(&out);
    memcpy(moved, values, sizeof moved);
    moved[OUT] = NULL;
    moved[FUNCTION] = PyObject_CallMethod(self->planner, "function", "iO", kind, values[OP]);
    if (!is_none(moved[FUNCTION])) {
        moved[ALGORITHM] = PyTuple_GetItem(moved[FUNCTION], 1); /* so plans are told apart */
        rows = attempt(self, kind, true, moved, goes_on);
    }
    if (rows != NULL && result != Py_None) {
        PyObject *combine = PyTuple_GetItem(moved[FUNCTION], 2);
        done = PyObject_CallFunctionObjArgs(combine, rows, result, NULL);
    }
    if (rows == NULL || (done == NULL && result != Py_None))
        Py_CLEAR(result);
    Py_XDECREF(moved[FUNCTION]);
    Py_XDECREF(rows);
    Py_XDECREF(done);
    return result;
}

static inline PyObject *attempt(pc_collectives *self, int kind, bool is_blocking, PyObject **values,
                                bool *goes_on) {
    if (PC_UNLIKELY(is_by_function(kind, values)))
        return is_blocking ? attempt_function(self, kind, values, goes_on) : NULL;
    int moves = pc_moves_for(kind, values);
    pc_comm *comm = is_blocking && self->allowed >> moves & 1 ? self->comm : NULL;
    PyObject *result = NULL;
    if (PC_LIKELY(pc_may_share(comm)) && (is_none(values[ALGORITHM]) || moves != kind)) {
        result = PC_LIKELY(kind != PC_ALL_REDUCE_MANY) ? pc_shared_run(comm, kind, values)
                                                       : share_many(self, values);
        *goes_on = comm->heard;
    }
    if (PC_UNLIKELY(result == NULL) && !PyErr_Occurred() && !*goes_on)
        result = by_messages(self, kind, is_blocking, values);
    return result;
}

/* What stands in for values that are not contiguous, scalars of NumPy's, or lists of arrays. */
struct stand_ins {
    PyObject *x, *target; /* new references, or NULL */
    int target_at;        /* the argument that is written to */
    bool is_copy;         /* and which has to be copied there */
    bool are_rows;        /* it is a list of arrays for the rows of a new one */
};

/* By messages Python has longer arrays of a list sent from where they are, or received there. */
#define COPIED_NBYTES ((size_t)64 << 10)

static PyObject *item_at(PyObject *list, int index) {
    return PyList_CheckExact(list) ? PyList_GetItem(list, index) : PyTuple_GetItem(list, index);
}

/* Whether a gather's rows fit into the arrays of a list; in an all_gather this rank's may be x. */
static bool are_for_rows(const pc_collectives *self, int kind, PyObject *x, PyObject *list) {
    struct pc_array given, place;
    if ((!PyList_CheckExact(list) && !PyTuple_CheckExact(list)) ||
        PySequence_Size(list) != self->size || !pc_memory_of(x, &given))
        return false;
    bool fit = given.nbytes <= COPIED_NBYTES;
    for (int index = 0; fit && index < self->size; index++) {
        bool may_be_x = kind == PC_ALL_GATHER && index == self->rank;
        fit = pc_target_of(item_at(list, index), &place);
        if (fit) {
            fit = place.library == given.library && pc_takes_values(&place) &&
                  out_fits(1, 0, may_be_x ? PC_ALL_REDUCE : PC_SCAN, &given, &place);
            pc_memory_release(&place);
        }
    }
    pc_memory_release(&given);
    return fit;
}

/* Copy rows to the arrays of a list, which is returned (new reference); NULL with an exception. */
static PyObject *filled_rows(PyObject *list, PyObject *rows, int count) {
    bool is_well = true;
    for (int index = 0; is_well && index < count; index++) {
        PyObject *number = PyLong_FromLong(index); /* a tensor is no sequence */
        PyObject *row = number != NULL ? PyObject_GetItem(rows, number) : NULL;
        PyObject *item = row != NULL ? PySequence_GetItem(list, index) : NULL;
        is_well = item != NULL && PyObject_SetItem(item, Py_Ellipsis, row) == 0;
        Py_XDECREF(number);
        Py_XDECREF(row);
        Py_XDECREF(item);
    }
    return is_well ? Py_NewRef(list) : NULL;
}

/* Whether a rank says of what kind its array is, for others to make one. */
static bool tells_kind(int kind) {
    return kind == PC_BROADCAST || kind == PC_SCATTER || pc_is_uneven(kind);
}

static struct stand_ins stand_ins(const pc_collectives *self, int kind, bool is_blocking,
                                  PyObject **values) {
    PyObject *x = values[X], *out = is_none(values[OUT]) ? NULL : values[OUT];
    bool is_broadcast = kind == PC_BROADCAST;
    bool may_be_in_place = kind == PC_REDUCE || kind == PC_ALL_REDUCE;
    bool takes_numbers = is_blocking && pc_reduces(kind) && kind != PC_REDUCE_SCATTER &&
                         !is_by_function(kind, values);
    struct stand_ins found = {.target_at = OUT};
    if (x == NULL || (is_broadcast && !is_blocking) ||
        (pc_is_numpy_scalar(x) && !takes_numbers))
        return found;
    if (PyList_CheckExact(x) || PyTuple_CheckExact(x)) {
        bool is_scattered = kind == PC_SCATTER && out == NULL && is_blocking &&
                            find_root(values[ROOT], self->size) == self->rank;
        if (kind == PC_REDUCE_SCATTER || is_scattered)
            found.x = pc_stacked(x, self->size, is_scattered ? COPIED_NBYTES : SIZE_MAX);
        return found;
    }
    if (is_broadcast && find_root(values[ROOT], self->size) != self->rank) {
        found.target_at = X;
        found.target = pc_target_stand_in(x, NULL, &found.is_copy);
        return found;
    }
    /* where the result is `out`, and no list of its rows */
    if (is_blocking && out != NULL && kind <= PC_REDUCE_SCATTERV && (out != x || may_be_in_place))
        found.target = pc_target_stand_in(out, out != x ? x : NULL, &found.is_copy);
    if (PyErr_Occurred())
        return found;
    bool gathers = is_blocking && out != NULL && (kind == PC_GATHER || kind == PC_ALL_GATHER);
    bool is_listed = gathers && (PyList_CheckExact(out) || PyTuple_CheckExact(out));
    if (is_listed)
        found.are_rows = are_for_rows(self, kind, x, out);
    else if (found.target != NULL && out == x && !found.is_copy)
        found.x = Py_NewRef(found.target);
    else
        found.x = pc_stand_in(x, out != x ? out : NULL, /* a function is called with that kind */
                              is_blocking && !tells_kind(kind) && !is_by_function(kind, values));
    return found;
}

/* The same with what stands in for arrays that are not contiguous, scalars, and lists of arrays. */
PC_COLD static PyObject *attempt_with_stand_ins(pc_collectives *self, int kind, bool is_blocking,
                                                PyObject **values, bool *goes_on) {
    struct stand_ins found = stand_ins(self, kind, is_blocking, values);
    PyObject *x = values[X], *target = values[found.target_at], *result = NULL;
    bool is_whole = values[OUT] != x || (found.x != NULL) == (found.target != NULL);
    if (!PyErr_Occurred() && is_whole &&
        (found.x != NULL || found.target != NULL || found.are_rows)) {
        values[X] = found.x != NULL ? found.x : x;
        if (found.target != NULL || found.are_rows)
            values[found.target_at] = found.target; /* NULL: rows of a new array */
        result = attempt(self, kind, is_blocking, values, goes_on);
    }
    PyObject *wanted;
    if (found.are_rows && !is_none(result)) {
        wanted = filled_rows(target, result, self->size);
    } else if (result != NULL && result == found.target) {
        wanted = found.is_copy ? pc_filled(target, result) : Py_NewRef(target);
    } else if (result != NULL && result == found.x) {
        wanted = Py_NewRef(x);
    } else if (found.x != NULL && is_none(values[OUT]) && !is_none(result)) {
        wanted = pc_result_of_stand_in(x, result);
    } else {
        wanted = Py_XNewRef(result);
    }
    Py_XDECREF(result);
    Py_XDECREF(found.x);
    Py_XDECREF(found.target);
    return wanted;
}

static inline PyObject *collective(pc_collectives *self, const char *name, int kind,
                                   bool is_blocking, PyObject *const *args, Py_ssize_t count,
                                   PyObject *keywords) {
    PyObject *values[ARGUMENTS] = {NULL}, *result = NULL;
    bool goes_on = false;
    int needed = parameters[kind][0]; /* what to move; a barrier has nothing */
    if (parse(parameters[kind], args, count, keywords, values) &&
        (kind == PC_BARRIER || PC_LIKELY(values[needed] != NULL))) {
        result = attempt(self, kind, is_blocking, values, &goes_on);
        if (PC_UNLIKELY(result == NULL) && !PyErr_Occurred() && !goes_on)
            result = attempt_with_stand_ins(self, kind, is_blocking, values, &goes_on);
        if (PC_LIKELY(result != NULL) || PyErr_Occurred())
            return result;
    }
    result = pc_call_method(self->slow, name, args, count, keywords);
    if (goes_on)
        pc_shared_end(self->comm, kind);
    return result;
}

static PyObject *collectives_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *context, *owner, *call, *planner, *finish, *unpack, *slow, *comm;
    int size, rank;
    unsigned allowed;
    if (!PyArg_ParseTuple(args, "OiiOOOOOOOI", &context, &size, &rank, &owner, &call, &planner,
                          &finish, &unpack, &slow, &comm, &allowed))
        return NULL;
    if (!PyObject_TypeCheck(context, pc_context_type) || !PyType_Check(call) ||
        !PyType_IsSubtype((PyTypeObject *)call, pc_collective_type) ||
        (comm != Py_None && !PyObject_TypeCheck(comm, pc_comm_type))) {
        PyErr_SetString(PyExc_TypeError, "arguments are context, size, rank, owner, type, planner, "
                                         "finish, unpack, slow, comm, allowed");
        return NULL;
    }
    pc_collectives *self = pc_new(type);
    if (self == NULL)
        return NULL;
    self->context = (pc_context_object *)Py_NewRef(context);
    self->engine = self->context->engine;
    self->size = size;
    self->rank = rank;
    self->owner = Py_NewRef(owner);
    self->type = Py_NewRef(call);
    self->planner = Py_NewRef(planner);
    self->finish = Py_NewRef(finish);
    self->unpack = Py_NewRef(unpack);
    self->slow = Py_NewRef(slow);
    self->comm = comm != Py_None ? (pc_comm *)Py_NewRef(comm) : NULL;
    self->allowed = allowed;
    self->generation = pc_plans_generation();
    self->plans = calloc(PLANS, sizeof *self->plans);
    if (self->plans != NULL)
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static int collectives_traverse(pc_collectives *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->owner);
    Py_VISIT(self->planner);
    Py_VISIT(self->finish);
    Py_VISIT(self->unpack);
    Py_VISIT(self->slow);
    Py_VISIT((PyObject *)self->comm);
    return 0;
}

static int collectives_clear(pc_collectives *self) {
    Py_CLEAR(self->owner);
    Py_CLEAR(self->planner);
    Py_CLEAR(self->finish);
    Py_CLEAR(self->unpack);
    Py_CLEAR(self->slow);
    return 0;
}

static void collectives_dealloc(pc_collectives *self) {
    PyObject_GC_UnTrack(self);
    collectives_clear(self);
    forget_plans(self);
    free(self->plans);
    Py_XDECREF((PyObject *)self->context);
    Py_XDECREF((PyObject *)self->comm);
    Py_XDECREF(self->type);
    pc_free(self);
}

#define COLLECTIVE(name, kind)                                                                   \
    static PyObject *start_##name(pc_collectives *self, PyObject *const *args, Py_ssize_t count, \
                                  PyObject *keywords) {                                          \
        return collective(self, "i" #name, kind, false, args, count, keywords);                  \
    }                                                                                            \
    static PC_HOT PyObject *run_##name(pc_collectives *self, PyObject *const *args,              \
                                       Py_ssize_t count, PyObject *keywords) {                   \
        return collective(self, #name, kind, true, args, count, keywords);                       \
    }
COLLECTIVE(barrier, PC_BARRIER)
COLLECTIVE(broadcast, PC_BROADCAST)
COLLECTIVE(scatter, PC_SCATTER)
COLLECTIVE(reduce, PC_REDUCE)
COLLECTIVE(all_reduce, PC_ALL_REDUCE)
COLLECTIVE(all_reduce_many, PC_ALL_REDUCE_MANY)
COLLECTIVE(gather, PC_GATHER)
COLLECTIVE(all_gather, PC_ALL_GATHER)
COLLECTIVE(reduce_scatter, PC_REDUCE_SCATTER)
COLLECTIVE(reduce_scatterv, PC_REDUCE_SCATTERV)
COLLECTIVE(all_to_all, PC_ALL_TO_ALL)
COLLECTIVE(scan, PC_SCAN)
COLLECTIVE(exscan, PC_EXSCAN)
COLLECTIVE(gatherv, PC_GATHERV)
COLLECTIVE(all_gatherv, PC_ALL_GATHERV)
COLLECTIVE(scatterv, PC_SCATTERV)
COLLECTIVE(all_to_allv, PC_ALL_TO_ALLV)

#define BLOCKING(name, function, parameters)                                      \
    {#name, (PyCFunction)(void (*)(void))function, METH_FASTCALL | METH_KEYWORDS, \
     #name "($self, " parameters "timeout=None)\n--\n\nSee pycoll.Communicator." #name "."}
#define STARTING(name, parameters)                                                        \
    {"i" #name, (PyCFunction)(void (*)(void))start_##name, METH_FASTCALL | METH_KEYWORDS, \
     "i" #name "($self, " parameters ")\n--\n\nSee pycoll.Communicator.i" #name "."}
#define METHODS(name, parameters)                           \
    STARTING(name, parameters "*, algorithm=None"),         \
        BLOCKING(name, run_##name, parameters "*, algorithm=None, ")
#define METHODS_OF_BLOCKS(name, parameters) \
    STARTING(name, parameters), BLOCKING(name, run_##name, parameters ", *, ")

static PyMethodDef collectives_methods[] = {
    METHODS(barrier, ""),
    METHODS(broadcast, "x, root=0, "),
    METHODS(scatter, "x, root=0, out=None, "),
    METHODS(reduce, "x, op='sum', root=0, out=None, "),
    METHODS(all_reduce, "x, op='sum', out=None, "),
    METHODS(all_reduce_many, "xs, op='sum', out=None, "),
    METHODS(gather, "x, root=0, out=None, "),
    METHODS(all_gather, "x, out=None, "),
    METHODS(reduce_scatter, "x, op='sum', out=None, "),
    METHODS(reduce_scatterv, "x, counts, op='sum', out=None, "),
    METHODS(all_to_all, "x, out=None, "),
    METHODS(scan, "x, op='sum', out=None, "),
    METHODS(exscan, "x, op='sum', out=None, "),
    METHODS_OF_BLOCKS(gatherv, "x, root=0, out=None"),
    METHODS_OF_BLOCKS(all_gatherv, "x, out=None"),
    METHODS_OF_BLOCKS(scatterv, "xs, root=0, out=None"),
    METHODS_OF_BLOCKS(all_to_allv, "xs, out=None"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot collectives_slots[] = {
    {Py_tp_new, collectives_new},
    {Py_tp_dealloc, collectives_dealloc},
    {Py_tp_traverse, collectives_traverse},
    {Py_tp_clear, collectives_clear},
    {Py_tp_methods, collectives_methods},
    {Py_tp_doc, "Collectives(context, size, rank, owner, type, planner, finish, unpack, slow, "
                "comm, allowed)\n\n"
                "The collectives of one communicator in the core. `type` is a "
                "subclass of `Collective`; `planner(kind, blocking, x, op, root, result, "
                "algorithm, counts)` returns a `Plan`, or None if Python must run such calls; "
                "`finish(collective, seconds)` waits for one that takes long; "
                "`unpack(memory)` makes the array of a block that has come; `slow(name)` returns"
                "  the Python method to which goes what is not done here. In shared memory, "
                "`comm` (None: there is none), go the methods of `allowed`, a bit each."},
    {0, NULL},
};

PyType_Spec pc_collectives_spec = {
    .name = "pycoll.Communicator", /* what the repr of its methods says to users */
    .basicsize = sizeof(pc_collectives),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = collectives_slots,
};
