/* gatherv, all_gatherv, scatterv and all_to_allv as methods for NumPy arrays: the way of
   pycoll/_calls/shared_memory_uneven.py without Python, for blocks that are plain arrays and an
   `out` that is none or one array. What it says to the other ranks is the same, so each rank may go
   either way; what it hears and cannot use it hands to Python (`resume`). */
#include "python/arguments/collective_call.h"
#include "comm.h"
#include "base/copy.h"
#include "python/arguments/timeout.h"

/* As in pycoll/_calls/shared_memory_uneven.py and blocks.py. */
#define MAX_ROW_NBYTES 2048
#define MIN_ROW_NBYTES 512
#define ROWS_NBYTES 8192
#define ALIGNMENT 64
enum { NOTHING, LARGE_BLOCKS, LONG_HEADS };

#define UINT8 6 /* in pycoll/_dtypes.py */
#define MAX_NDIM 32
#define MAX_SIZE \
    (ROWS_NBYTES / MIN_ROW_NBYTES) /* with more ranks rows for each do not fit into a slot */

struct first { /* of a row: what its sender has left to say, and where the block is */
    uint64_t left, address;
};

/* A block that comes. */
struct block {
    int rank;
    bool is_own;
    uint64_t address;             /* in its sender's memory; 0: it is in the row */
    const unsigned char *elements; /* there */
    int dtype, ndim;
    intptr_t dims[MAX_NDIM];
    size_t nbytes;
    void *place;
};

struct uneven_call {
    pc_comm *comm;
    int kind, root;
    const char *name;
    struct pc_shared *shared;
    struct pc_uneven *known;
    int num_own, mine; /* arrays of this rank's, and which of them it keeps itself; -1: none */
    struct pc_array own[MAX_SIZE];
    PyObject *held; /* a list may change meanwhile: keeps them; or NULL */
    PyObject *out; /* NULL: none */
    struct pc_array whole;
    size_t row_nbytes;
    const unsigned char *rows[MAX_SIZE]; /* what was heard, by rank; NULL: nothing */
    int num_blocks;
    struct block blocks[MAX_SIZE];
};

static const int twins[PC_UNEVEN_KINDS] = {PC_GATHER, PC_ALL_GATHER, PC_SCATTER, PC_ALL_TO_ALL};

static bool gathers(const struct uneven_call *call) {
    return call->kind == PC_GATHERV || call->kind == PC_ALL_GATHERV;
}

/* --- arguments -------------------------------------------------------------------------------- */

/* One array for each rank, all of one dtype. */
static bool view_list(struct uneven_call *call, PyObject *xs) {
    int size = call->comm->size;
    if (!PyList_CheckExact(xs) && !PyTuple_CheckExact(xs))
        return false;
    call->held = PyList_CheckExact(xs) ? PyList_AsTuple(xs) : Py_NewRef(xs);
    if (call->held == NULL)
        PyErr_Clear();
    if (call->held == NULL || PyTuple_Size(call->held) != size)
        return false;
    for (int rank = 0; rank < size; rank++) {
        struct pc_array *own = &call->own[rank];
        if (!pc_array_view(PyTuple_GetItem(call->held, rank), own) || own->ndim > MAX_NDIM ||
            own->dtype != call->own[0].dtype)
            return false;
    }
    call->num_own = size;
    return true;
}

static bool view_own(struct uneven_call *call, PyObject *x) {
    int me = call->comm->rank;
    call->mine = -1;
    if (call->kind == PC_SCATTERV && me != call->root)
        return true; /* what it has passed is not looked at */
    if (x == NULL)
        return false;
    call->mine = gathers(call) ? 0 : me;
    if (!gathers(call))
        return view_list(call, x);
    call->num_own = 1;
    return pc_array_view(x, &call->own[0]) && call->own[0].ndim <= MAX_NDIM;
}

/* Whether blocks of this shape can stand in `out` one after the other. */
static bool rows_alike(const struct pc_array *whole, int ndim, const intptr_t *dims) {
    return ndim == whole->ndim && ndim > 0 && dims_equal(ndim - 1, dims + 1, whole->dims + 1);
}

static bool view_out(struct uneven_call *call, PyObject *out) {
    struct pc_array *whole = &call->whole;
    if (is_none(out) || (call->kind == PC_GATHERV && call->comm->rank != call->root))
        return true;
    call->out = out;
    if (!pc_array_view(out, whole) || !whole->writeable || whole->ndim == 0)
        return false;
    for (int index = 0; index < call->num_own; index++) {
        const struct pc_array *own = &call->own[index];
        const char *a = own->data, *b = whole->data;
        if (own->dtype != whole->dtype || !(a + own->nbytes <= b || b + whole->nbytes <= a))
            return false;
    }
    if (call->mine < 0)
        return true;
    const struct pc_array *mine = &call->own[call->mine];
    if (call->kind == PC_SCATTERV)
        return mine->ndim == whole->ndim && dims_equal(mine->ndim, mine->dims, whole->dims);
    return rows_alike(whole, mine->ndim, mine->dims) && mine->dims[0] <= whole->dims[0];
}

/* The text of the call, which all ranks compare, and its hash. False with an exception. */
static bool find_text(struct uneven_call *call) {
    struct pc_uneven *known = call->known;
    int dtype = call->kind == PC_SCATTERV ? 0 : call->own[0].dtype;
    if (known->text != NULL && known->dtype == dtype && known->root == call->root)
        return true;
    PyObject *text, *said = PyObject_CallFunction(call->shared->sign, "sii", call->name, dtype,
                                                  call->root);
    unsigned long long salt;
    if (said == NULL || !PyArg_ParseTuple(said, "OK", &text, &salt)) {
        Py_XDECREF(said);
        return false;
    }
    PyObject *before = known->text;
    known->text = Py_NewRef(text);
    known->salt = salt;
    known->dtype = dtype;
    known->root = call->root;
    Py_DECREF(said);
    Py_XDECREF(before);
    return true;
}

/* --- the first round -------------------------------------------------------------------------- */

/* Write a row without its `first`; whether all of the block is there. */
static bool write_row(const struct pc_array *own, unsigned char *row, size_t row_nbytes) {
    unsigned char *at = row + sizeof(struct first);
    uint32_t length = pc_describe_array(own, 0, at + 4);
    memcpy(at, &length, 4);
    size_t said = pc_round_up(4 + length, ALIGNMENT);
    memset(at + 4 + length, 0, said - 4 - length);
    if (own->nbytes > row_nbytes - sizeof(struct first) - said)
        return false;
    pc_copy(at + said, own->data, own->nbytes);
    return true;
}

static void write_rows(const struct uneven_call *call, unsigned char *rows) {
    bool is_here[MAX_SIZE], all = true;
    for (int index = 0; index < call->num_own; index++)
        all &= is_here[index] =
            write_row(&call->own[index], rows + (size_t)index * call->row_nbytes, call->row_nbytes);
    for (int index = 0; index < call->num_own; index++) {
        uintptr_t address = is_here[index] ? 0 : (uintptr_t)call->own[index].data;
        struct first first = {all ? NOTHING : LARGE_BLOCKS, address};
        memcpy(rows + (size_t)index * call->row_nbytes, &first, sizeof first);
    }
}

static bool hears(const struct uneven_call *call, int rank) {
    return call->kind != PC_SCATTERV || rank == call->root;
}

static int first_round(struct uneven_call *call, pc_collective *round) {
    pc_comm *comm = call->comm;
    struct pc_slot *slot, *theirs;
    if (pc_enter_begin(round, &slot) < 0)
        return -1;
    if (call->num_own > 0)
        write_rows(call, slot->data);
    pc_enter_end(round, slot);
    for (int rank = 0; rank < comm->size; rank++) {
        if (!hears(call, rank))
            continue;
        if (rank != comm->rank && pc_await_entry(round, rank, &theirs) < 0)
            return -1;
        const unsigned char *data = rank == comm->rank ? slot->data : theirs->data;
        call->rows[rank] = data + (gathers(call) ? 0 : (size_t)comm->rank * call->row_nbytes);
    }
    if (call->kind != PC_SCATTERV)
        comm->entered_by_all = round->number;
    return 0;
}

/* --- what was heard --------------------------------------------------------------------------- */

/* Read the row of a rank; false: it is not what this way can do. */
static bool read_row(const struct uneven_call *call, int rank, struct block *block) {
    const unsigned char *row = call->rows[rank], *at = row + sizeof(struct first);
    struct first first;
    uint32_t length;
    memcpy(&first, row, sizeof first);
    memcpy(&length, at, 4);
    block->rank = rank;
    block->ndim = at[6];
    block->dtype = at[4];
    if (at[5] != 5 || memcmp(at + 7, "numpy", 5) != 0 || block->ndim > MAX_NDIM ||
        length != 8 + 8 * (uint32_t)block->ndim)
        return false;
    size_t itemsize = pc_array_itemsize(block->dtype),
           start = pc_round_up(4 + (size_t)length, ALIGNMENT), count = 1;
    for (int axis = 0; axis < block->ndim; axis++) {
        uint64_t dim;
        memcpy(&dim, at + 12 + 8 * axis, 8);
        block->dims[axis] = (intptr_t)dim;
        count *= (size_t)dim;
    }
    block->nbytes = count * itemsize;
    block->elements = at + start;
    block->address = block->nbytes > call->row_nbytes - sizeof first - start ? first.address : 0;
    block->is_own = rank == call->comm->rank;
    return itemsize != 0 && (call->num_own == 0 || block->dtype == call->own[0].dtype);
}

/* What is left: the most that any rank has left to say. */
static uint64_t read_left(const struct uneven_call *call) {
    uint64_t most = NOTHING;
    for (int rank = 0; rank < call->comm->size; rank++) {
        struct first first = {NOTHING, 0};
        if (call->rows[rank] != NULL)
            memcpy(&first, call->rows[rank], sizeof first);
        most = first.left > most ? first.left : most;
    }
    return most;
}

/* Read all rows; false: Python must go on. */
static bool read_rows(struct uneven_call *call) {
    const pc_comm *comm = call->comm;
    if (call->kind == PC_GATHERV && comm->rank != call->root)
        return true;
    for (int rank = 0; rank < comm->size; rank++)
        if (call->rows[rank] != NULL && !read_row(call, rank, &call->blocks[call->num_blocks++]))
            return false;
    return true;
}

/* Find the places of the blocks; NULL, perhaps with an exception: Python must go on. */
static PyObject *make_result(struct uneven_call *call) {
    const struct pc_array *whole = &call->whole;
    intptr_t row = 0;
    size_t row_nbytes =
        call->out != NULL && whole->dims[0] > 0 ? whole->nbytes / (size_t)whole->dims[0] : 0;
    bool is_one = call->kind == PC_SCATTERV;
    PyObject *list = is_one ? NULL : PyList_New(call->num_blocks), *made = NULL;
    for (int index = 0; (is_one || list != NULL) && index < call->num_blocks; index++) {
        struct block *block = &call->blocks[index];
        struct pc_array view;
        made = NULL;
        if (call->out == NULL) {
            made = pc_array_empty(block->dtype, block->ndim, block->dims);
            if (made != NULL && pc_array_view(made, &view))
                block->place = view.data;
            else
                Py_CLEAR(made);
        } else if (block->dtype != whole->dtype ||
                   (is_one && (block->ndim != whole->ndim ||
                               !dims_equal(block->ndim, block->dims, whole->dims)))) {
            break;
        } else if (is_one) {
            block->place = whole->data;
            made = Py_NewRef(call->out);
        } else if (rows_alike(whole, block->ndim, block->dims) &&
                   block->dims[0] <= whole->dims[0] - row) {
            block->place = (char *)whole->data + (size_t)row * row_nbytes;
            made = PySequence_GetSlice(call->out, row, row + block->dims[0]);
            row += block->dims[0];
        }
        if (made == NULL)
            break;
        if (!is_one)
            PyList_SetItem(list, index, made);
    }
    if (is_one)
        return made;
    if (list != NULL && (made == NULL || (call->out != NULL && row != whole->dims[0])))
        Py_CLEAR(list);
    return list;
}

/* Copy what is here, and note what must be read from the others' memory; how much that is. */
static size_t fill(const struct uneven_call *call, struct pc_piece *pieces) {
    size_t count = 0;
    for (int index = 0; index < call->num_blocks; index++) {
        const struct block *block = &call->blocks[index];
        if (block->is_own)
            pc_copy(block->place, call->own[call->mine].data, block->nbytes);
        else if (block->address == 0)
            memcpy(block->place, block->elements, block->nbytes);
        else
            pieces[count++] =
                (struct pc_piece){block->rank, block->address, block->place, block->nbytes};
    }
    return count;
}

/* --- a call ----------------------------------------------------------------------------------- */

static int begin(const struct uneven_call *call, pc_collective *round, int kind, bool has_shape) {
    static const intptr_t no_dims[1];
    intptr_t dims[1] = {(intptr_t)call->row_nbytes};
    if (pc_call_begin(round, call->comm, kind, call->root) < 0)
        return -1;
    round->text = call->known->text;
    round->dtype = has_shape ? UINT8 : 0;
    pc_sign_part(round, call->known->salt, has_shape, has_shape ? dims : no_dims);
    round->ndim = 0; /* other ranks are told the text */
    return 0;
}

/* Have Python go on, which is told what was heard. */
static PyObject *resume(const struct uneven_call *call, PyObject *const *args, Py_ssize_t count,
                        PyObject *keywords) {
    size_t num_rows = call->kind == PC_SCATTERV ? 1 : (size_t)call->comm->size;
    PyObject *name = PyUnicode_FromString(call->name);
    PyObject *heard =
        PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(num_rows * call->row_nbytes));
    Py_ssize_t num_keywords = keywords != NULL ? PyTuple_Size(keywords) : 0,
               num_args = count + num_keywords;
    PyObject **all =
        name != NULL && heard != NULL ? PyMem_Calloc((size_t)num_args + 2, sizeof *all) : NULL;
    if (all == NULL) {
        Py_XDECREF(name);
        Py_XDECREF(heard);
        return PyErr_NoMemory();
    }
    char *at = PyByteArray_AsString(heard);
    for (int rank = 0; rank < call->comm->size; rank++) {
        if (call->rows[rank] == NULL)
            continue;
        memcpy(at, call->rows[rank], call->row_nbytes);
        at += call->row_nbytes;
    }
    all[0] = name;
    all[1] = heard;
    memcpy(all + 2, args, (size_t)num_args * sizeof *all);
    call->comm->goes_on = true;
    PyObject *result = pc_call_slow(call->shared->resume, all, count + 2, keywords);
    call->comm->goes_on = false;
    PyMem_Free(all);
    Py_DECREF(name);
    Py_DECREF(heard);
    return result;
}

/* Read the others' memory; the reference to the result is taken over. */
static PyObject *second_round(const struct uneven_call *call, PyObject *result) {
    struct pc_piece pieces[MAX_SIZE];
    pc_collective round;
    size_t num_pieces = fill(call, pieces);
    if (begin(call, &round, PC_ALL_GATHER, false) < 0) {
        Py_DECREF(result);
        return NULL;
    }
    return pc_call_end(&round, pc_direct_fetch(&round, pieces, num_pieces), result);
}

static PyObject *run(struct uneven_call *call, PyObject *const *args, Py_ssize_t count,
                     PyObject *keywords) {
    pc_collective round;
    /* all hear how it goes on */
    int kind = call->kind == PC_GATHERV ? PC_ALL_GATHER : twins[call->kind];
    if (begin(call, &round, kind, true) < 0)
        return NULL;
    round.nbytes = call->row_nbytes;
    int status = first_round(call, &round);
    pc_hold(&round.call); /* the interpreter's lock, before a reference is counted */
    if (pc_call_end(&round, status, Py_NewRef(Py_None)) == NULL)
        return NULL;
    Py_DECREF(Py_None);
    uint64_t left = read_left(call), number = call->comm->number;
    PyObject *result = NULL;
    call->comm->internal++; /* what follows is a part of the call that has been counted */
    if (left < LONG_HEADS && read_rows(call))
        result = call->num_blocks > 0 ? make_result(call) : Py_NewRef(Py_None);
    if (result == NULL && !PyErr_Occurred())
        result = resume(call, args, count, keywords);
    else if (result != NULL && left != NOTHING)
        return second_round(call, result);
    else if (result != NULL)
        fill(call, NULL);
    /* The others wait in a second round, into which this rank did not come. */
    if (result == NULL && left != NOTHING && call->comm->number == number && call->comm->usable &&
        begin(call, &round, PC_ALL_GATHER, false) == 0)
        return pc_call_end(&round, -1, NULL);
    call->comm->internal -= call->comm->number == number; /* nothing has followed */
    return result;
}

PyObject *pc_shared_uneven(struct pc_shared *shared, const char *name, enum pc_uneven_kind kind,
                           PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    pc_comm *comm = shared->comm;
    PyObject *values[ARGUMENTS] = {NULL};
    struct uneven_call call = {.comm = comm, .kind = kind, .known = &shared->uneven[kind],
                               .name = name, .shared = shared};
    struct pc_deadline deadline = {0, 0};
    size_t share = (size_t)(ROWS_NBYTES / comm->size / ALIGNMENT * ALIGNMENT);
    if (comm->direct && comm->size <= MAX_SIZE &&
        parse(twins[kind], args, count, keywords, values) &&
        pc_timeout(values[TIMEOUT], comm->op_timeout_ns, &deadline.timeout_ns) &&
        values[ALGORITHM] == NULL && values[OP] == NULL &&
        (count > 0 || (kind != PC_SCATTERV && kind != PC_ALL_TO_ALLV)) && /* there it is `xs`, and
                                                                             not `x` */
        (values[ROOT] == NULL || kind == PC_GATHERV || kind == PC_SCATTERV) &&
        (call.root = find_root(values[ROOT], comm->size)) >= 0) {
        call.row_nbytes = gathers(&call) || share > MAX_ROW_NBYTES ? MAX_ROW_NBYTES : share;
        bool is_plain = view_own(&call, values[X]) && view_out(&call, values[OUT]);
        PyObject *result = NULL;
        if (is_plain) {
            pc_claim(comm, deadline); /* no other thread comes in between the rounds */
            if (find_text(&call))
                result = run(&call, args, count, keywords);
            if (pthread_equal(comm->caller, pthread_self())) /* else Python has let it go, and
                                                                another has come */
                comm->claimed = false;
        }
        Py_XDECREF(call.held);
        return result;
    }
    return NULL;
}
